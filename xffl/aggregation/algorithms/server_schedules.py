"""Schedules of the server's learning rate, as plain functions of its step.

``step`` is the number of steps that the server has made for the fragment so far; ``lr`` is the learning rate of its
rule. Options and their meaning are those of the classes of :mod:`torch.optim.lr_scheduler`. All are pure.
One rank computes the rate of a round and sends it to all others, since cosines and powers differ between systems.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from xffl.checks import integer, number

__all__ = [
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "linear",
    "multi_step",
    "polynomial",
    "step_decay",
    "warmup",
]


def constant(step: int, lr: float, factor: float = 1 / 3, total_iters: int = 5) -> float:
    """Return ``factor`` times the rate in the first ``total_iters`` steps, and the rate itself after them."""
    return lr * number("factor", factor, 0.0) if step < integer("total_iters", total_iters, 0) else lr


def cosine(step: int, lr: float, T_max: int, eta_min: float = 0.0) -> float:
    """Go down to ``eta_min`` in ``T_max`` steps along half a cosine, and up again."""
    least = number("eta_min", eta_min, 0.0)
    return least + (lr - least) * (1.0 + math.cos(math.pi * step / integer("T_max", T_max))) / 2.0


def cosine_restarts(step: int, lr: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> float:
    """Go down along half a cosine again and again, each time in ``T_mult`` times as many steps."""
    length, factor = integer("T_0", T_0), integer("T_mult", T_mult)
    while step >= length:
        step -= length
        length *= factor
    return cosine(step, lr, length, eta_min)


def exponential(step: int, lr: float, gamma: float) -> float:
    """Multiply the rate by ``gamma`` after each step."""
    return lr * number("gamma", gamma, 0.0) ** step


def linear(step: int, lr: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> float:
    """Go from ``start_factor`` to ``end_factor`` of the rate in ``total_iters`` steps, and stay there."""
    start, end = number("start_factor", start_factor, 0.0), number("end_factor", end_factor, 0.0)
    total = integer("total_iters", total_iters)
    return lr * (start + (end - start) * min(step, total) / total)


def multi_step(step: int, lr: float, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """Multiply the rate by ``gamma`` at each of the milestones."""
    passed = bisect_right(sorted(integer("milestones", milestone, 0) for milestone in milestones), step)
    return lr * number("gamma", gamma, 0.0) ** passed


def polynomial(step: int, lr: float, total_iters: int = 5, power: float = 1.0) -> float:
    """Go down to 0 in ``total_iters`` steps along a power of the steps that are left."""
    total = integer("total_iters", total_iters)
    left = 1.0 - min(step, total) / total
    return lr * float(left ** number("power", power, 0.0))


def step_decay(step: int, lr: float, step_size: int, gamma: float = 0.1) -> float:
    """Multiply the rate by ``gamma`` after every ``step_size`` steps."""
    return lr * number("gamma", gamma, 0.0) ** (step // integer("step_size", step_size))


def warmup(step: int, lr: float, steps: int, then: Callable[[int, float], float] | None = None) -> float:
    """Go up from ``lr / steps`` to ``lr`` in a number of steps; then follow another schedule from its beginning."""
    count = integer("steps", steps)
    if step < count:
        return lr * (step + 1) / count
    return lr if then is None else then(step - count, lr)
