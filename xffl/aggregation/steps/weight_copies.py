"""Optimizers that keep a second copy of the weights, of which rounds know nothing: whoever uses one is told by name.

A round averages what the model holds. A schedule-free optimizer (Defazio et al., 2024, arXiv 2405.15682) trains one
sequence of weights and evaluates another, which ``eval()`` computes from the weights and a copy ``z`` in its state.
Lookahead pulls the weights back to a slow copy; others keep master weights or a mean of the steps. Without
``moments="average"`` no round averages such a copy, so it differs between cells, and what it is swapped in for or
written into differs, too.

The first kind is known by its methods. The others are found by what they hold: a state tensor that is close to the
parameter. Moments of gradients are not: their distance from the weights is about as large as the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from xffl.aggregation.steps.step_observers import StepObserver
from xffl.distributed.values.sharding import local_tensor

__all__ = ["CopyWatch", "find_copies", "swaps_weights", "tell_swaps"]

CLOSE = 0.5
"""Distance of a copy from the weights, relative to their norm, at most: a copy is some steps old, and far closer."""

MINIMUM = 64
"""Elements of a state that is looked at, at least: of a few numbers a distance tells nothing."""


def swaps_weights(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer evaluates other weights than it trains: it has ``train`` and ``eval``; local."""
    return all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval"))


def tell_swaps(optimizers: Sequence[Optimizer]) -> None:
    """Say which optimizers evaluate other weights than they train; local."""
    for optimizer in optimizers:
        if swaps_weights(optimizer):
            _write(
                f"xffl: optimizer {type(optimizer).__name__} evaluates other weights than it trains (it has train() "
                "and eval()): its second copy of the weights is in no round, so after optimizer.eval() each cell holds "
                "another model; for one model give moments='average', or call optimizer.eval() and then "
                "xffl.Aggregator(model, state).aggregate() "
                "(docs: Algorithms, Optimizers with a second copy of the weights)"
            )


def find_copies(optimizer: Optimizer) -> list[str]:
    """Return the names of states that hold a copy of the weights; local, and reads all states once."""
    distances: dict[str, float] = {}
    norms: dict[str, float] = {}
    counts: dict[str, int] = {}
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(state, Mapping):
                continue  # what some optimizers keep for all parameters
            own = local_tensor(parameter).detach()
            for key, value in state.items():
                held = local_tensor(value) if isinstance(value, torch.Tensor) else None
                if held is None or type(held) is not torch.Tensor or not held.is_floating_point():
                    continue
                if held.shape != own.shape or not own.numel():
                    continue
                weights = own.to(held.device, torch.float32)
                distances[key] = distances.get(key, 0.0) + float((held.float() - weights).square().sum())
                norms[key] = norms.get(key, 0.0) + float(weights.square().sum())
                counts[key] = counts.get(key, 0) + own.numel()
    large = [key for key, count in counts.items() if count >= MINIMUM]
    return [key for key in large if distances[key] < CLOSE**2 * norms[key]]


class CopyWatch(StepObserver):
    """Says which optimizers keep a second copy of the weights, after the step that has made it.

    It looks after every step until the first round, and once more when the loop has ended.

    :param say: What to do with each line; ``None`` writes it to the standard error stream.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = _write if say is None else say
        self._seen: dict[Optimizer, frozenset[str]] = {}

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at an optimizer's state if it has entries that were not there before."""
        if swaps_weights(optimizer):  # told at the start
            return
        state = next((one for one in optimizer.state.values() if isinstance(one, Mapping)), {})
        names = frozenset(map(str, state))
        known = self._seen.get(optimizer, frozenset())
        if names <= known:
            return
        self._seen[optimizer] = known | names
        if copies := [repr(name) for name in find_copies(optimizer) if name not in known]:
            self._say(
                f"xffl: optimizer {type(optimizer).__name__} keeps a copy of the weights in its state "
                f"({', '.join(copies)}): that copy is in no round, so it differs between cells, and if the optimizer "
                "writes it into the weights, that undoes a part of each round "
                "(docs: Algorithms, Optimizers with a second copy of the weights)"
            )

    def after_round(self, *, is_dropped: bool) -> None:
        """Look no more: most copies are made in the first steps."""
        self.is_over = True


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
