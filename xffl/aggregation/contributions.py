"""What local steps have done that no round has taken in yet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from xffl.errors import CheckpointError, ConfigError

__all__ = [
    "ContributionTracker",
    "NormalizedSteps",
    "Snapshot",
    "StepTimer",
    "check_apart",
    "check_outside_backward",
    "enclosing_calls",
    "unwrap",
]


class Snapshot(NamedTuple):
    """What one round takes in."""

    fragment: int
    steps: int
    effort: float
    amount: float
    is_changed: bool


class ContributionTracker:
    """Steps and counts that wait for a round, for each part of the model; local.

    Optimizers that step after the one whose steps are local steps change the model, too: that waits for a round beside
    the steps, and counts for something in it.

    :param fragments: Parts that rounds take in turn.
    """

    def __init__(self, fragments: int) -> None:
        self._steps = [0] * fragments
        self._efforts = [0.0] * fragments
        self._counts = [0.0] * fragments
        self._is_changed = [False] * fragments
        self._usual_count = 0.0
        """What a local step counted for in the last round that took some in"""

    def note_change(self) -> None:
        """Note that an optimizer is about to change every part."""
        self._is_changed = [True] * len(self._is_changed)

    def add_effort(self, effort: float) -> None:
        """Note what steps amount to that are no local steps."""
        self._efforts = [waiting + effort for waiting in self._efforts]

    def add_step(self, effort: float = 1.0) -> None:
        """Note a local step, which changes every part, and what it amounts to."""
        self._steps = [steps + 1 for steps in self._steps]
        self.add_effort(effort)

    def add_count(self, count: float) -> None:
        """Note what was counted (samples, tokens) since the last call."""
        self._counts = [waiting + count for waiting in self._counts]

    def is_waiting(self, fragment: int) -> bool:
        """Tell whether steps wait for a round of a part, whole ones or not."""
        return self._steps[fragment] > 0 or self._is_changed[fragment]

    def effort(self, fragment: int) -> float:
        """Return what the steps that wait for a round of a part amount to; 1 for a change that nobody measured."""
        return self._efforts[fragment] or float(self._is_changed[fragment])

    def count(self, fragment: int) -> float:
        """Return the count that waits for a round of a part; a local step's where the samples were counted before."""
        if not self._counts[fragment] and not self._steps[fragment] and self._is_changed[fragment]:
            return self._usual_count
        return self._counts[fragment]

    def has_others(self, fragment: int) -> bool:
        """Tell whether steps wait for rounds of other parts."""
        return any(self.is_waiting(other) for other in range(len(self._steps)) if other != fragment)

    def snapshot(self, fragment: int) -> Snapshot:
        """Take what waits for a part's round; either :meth:`commit` or :meth:`rollback` follows."""
        taken = Snapshot(
            fragment,
            self._steps[fragment],
            self._efforts[fragment],
            self._counts[fragment],
            self._is_changed[fragment],
        )
        self._steps[fragment], self._efforts[fragment], self._is_changed[fragment] = 0, 0.0, False
        return taken

    def commit(self, taken: Snapshot) -> None:
        """Strike off what a round has taken in."""
        self._counts[taken.fragment] -= taken.amount
        if taken.steps:
            self._usual_count = taken.amount / taken.steps

    def rollback(self, taken: Snapshot) -> None:
        """Let what a rejected or skipped round did not take in wait for the next."""
        self._steps[taken.fragment] += taken.steps
        self._efforts[taken.fragment] += taken.effort
        self._is_changed[taken.fragment] |= taken.is_changed

    def state_dict(self) -> dict[str, Any]:
        """Return what waits; with no claim open.

        :return: Numbers.
        """
        return {
            "steps": list(self._steps),
            "efforts": list(self._efforts),
            "counts": list(self._counts),
            "changed": list(self._is_changed),
            "usual_count": self._usual_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        :param state: The saved state.
        :raises CheckpointError: if it is that of another number of parts.
        """
        if len(state["steps"]) != len(self._steps):
            raise CheckpointError(
                f"the saved steps are those of {len(state['steps'])} fragments, and there are {len(self._steps)}; "
                "resume with the same fragments"
            )
        self._steps = [int(steps) for steps in state["steps"]]
        self._efforts = [float(effort) for effort in state["efforts"]]
        self._counts = [float(count) for count in state["counts"]]
        # Older checkpoints know whole steps only.
        self._is_changed = [bool(one) for one in state.get("changed", [False] * len(self._steps))]
        self._usual_count = float(state.get("usual_count", 0.0))


class StepTimer:
    """Measure how long this rank's local steps take, without the rounds between them; local.

    What the caller does between two steps counts (loading, evaluating), since it makes others wait, too.

    :param device: Where the steps work: what it has still to do when a round comes is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._steps = 0
        self._since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the last :meth:`clear`, up to the last pause; 0 without a step."""
        return self._seconds / self._steps if self._steps else 0.0

    def add_step(self) -> None:
        """Note a local step."""
        self._steps += 1

    def clear(self) -> None:
        """Forget the steps so far: a round has told how long they took."""
        self._seconds, self._steps = 0.0, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for what is no local step."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # not that of a round under way
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


INNER = {"opacus": "original_optimizer", "accelerate": "optimizer"}
"""Packages of wrappers that leave the parameters alone once the optimizer inside has stepped, and where it is held."""


def enclosing_calls() -> list[Optimizer]:
    """Return the optimizers in whose ``step`` the call lies that a step hook was called for; innermost first.

    To be called by the hook itself. torch runs hooks in the ``step`` of a class and in that of its parent, so
    ``super().step()`` runs them once more. The stack is asked, since a count of what began and ended would be wrong
    after a step that raised: it has no hook at its end.
    """
    hook = sys._getframe(1)
    calls: list[Optimizer] = []
    frame = hook.f_back
    # Whatever another hook of the same file has called (a callback that trains, say) is no part of its step.
    while frame is not None and frame.f_code.co_filename != hook.f_code.co_filename:
        if frame.f_code.co_filename == torch_optimizer.__file__:  # torch's wrapper(*args, **kwargs) around a step
            args = frame.f_locals.get("args")
            if isinstance(args, tuple) and args and isinstance(args[0], Optimizer):
                calls.append(args[0])
        frame = frame.f_back
    return calls[1:]


def check_apart(optimizer: Optimizer, outer: Sequence[Optimizer]) -> None:
    """Raise where an optimizer steps inside another one's step and both hold the same parameters: it is one step."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for other in outer:
        if any(id(parameter) in mine for group in other.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} steps inside the step of {type(other).__name__}, and both are "
                "given for the same parameters, so their step would count twice; give "
                f"{type(other).__name__} only"
            )


def check_outside_backward(what: str) -> None:
    """Raise where a step is made while a backward pass goes on, in which a round would change what it still reads."""
    if _in_backward():
        raise ConfigError(
            f"{what} inside a backward pass, where a round would change parameters that gradients are still computed "
            "from; give optimizer=None, and call scaling.step() after backward()"
        )


def _in_backward() -> bool:
    """Tell whether a backward pass is under way in this thread; torch has no public call for it."""
    return torch._C._current_graph_task_id() != -1


def unwrap(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose step hooks are called: those given, or those in wrappers that are known.

    Wrappers that never initialized themselves as optimizers have no hooks. Of others it is not known whether they
    change the parameters after the inner step (Lookahead does), where a round would have been too early.
    """
    found: list[Optimizer] = []
    for given in optimizers:
        optimizer = given
        while not _has_hooks(optimizer):
            packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
            held = [getattr(optimizer, name, None) for package, name in INNER.items() if package in packages]
            if len(held) != 1 or not isinstance(held[0], Optimizer):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} does not call torch.optim.Optimizer.__init__, so its steps "
                    "cannot be counted; let it do so. Or give the optimizer inside it, if nothing changes the "
                    "parameters after that one's step; else optimizer=None, and call scaling.step() after each local "
                    "step"
                )
            optimizer = held[0]
        if any(optimizer is other for other in found):
            raise ConfigError(
                f"optimizer {type(optimizer).__name__} is given twice, as it is or in a wrapper, so its steps would "
                "count twice; give each optimizer once"
            )
        found.append(optimizer)
    return found


def _has_hooks(optimizer: Optimizer) -> bool:
    """Tell whether step hooks can be registered, and are called."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))


class NormalizedSteps:
    """Follow the momentum of optimizers, step by step; local, and the same on all ranks of a cell.

    Momentum counts for :class:`torch.optim.SGD`. The steps of other optimizers do not grow with what they hold (Adam's
    are normalized): each counts 1.

    :param optimizers: The optimizers of a local step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        # Gradients that a group's momentum holds, for each optimizer; and the factors since of_step was asked.
        self._held: list[list[float]] = [[] for _ in optimizers]
        self._factors: list[list[float]] = [[] for _ in optimizers]

    def before_step(self, optimizer: Optimizer) -> None:
        """Look whether the momentum is empty.

        :param optimizer: The optimizer that is about to make a step.
        """
        if not optimizer.state:
            self._held[self._index(optimizer)] = []

    def after_step(self, optimizer: Optimizer) -> list[float]:
        """Note a step.

        :param optimizer: The optimizer that made it.
        :return: Its factor for each parameter group.
        """
        index = self._index(optimizer)
        factors = self._factors_of(optimizer, self._held[index])
        so_far = self._factors[index]
        so_far += [0.0] * (len(factors) - len(so_far))
        self._factors[index] = [waiting + factor for waiting, factor in zip(so_far, factors, strict=True)]
        return factors

    def of_step(self) -> float:
        """Return what steps since the last call amount to: the mean over all elements, 0 for those not stepped."""
        parts: list[tuple[float, int]] = [
            (factor, sum(parameter.numel() for parameter in group["params"]))
            for optimizer, factors in zip(self._optimizers, self._factors, strict=True)
            for group, factor in zip(optimizer.param_groups, factors or repeat(0.0), strict=False)
        ]
        self._factors = [[] for _ in self._optimizers]
        if len({factor for factor, _ in parts}) <= 1:
            return parts[0][0] if parts else 0.0
        return sum(factor * numel for factor, numel in parts) / sum(numel for _, numel in parts)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the same on all ranks of a cell.

        :return: Numbers.
        """
        return {"held": [list(held) for held in self._held], "factors": [list(factors) for factors in self._factors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        :param state: The saved state.
        :raises CheckpointError: if it is that of other optimizers.
        """
        if len(state["held"]) != len(self._held):
            raise CheckpointError(
                f"the saved momentum is that of {len(state['held'])} optimizers, and there are {len(self._held)}; "
                "resume with the same optimizers"
            )
        self._held = [list(held) for held in state["held"]]
        # Older checkpoints were saved between local steps.
        self._factors = [list(factors) for factors in state.get("factors", [[] for _ in self._held])]

    @staticmethod
    def _factors_of(optimizer: Optimizer, held: list[float]) -> list[float]:
        """Return the factor of a step for each parameter group, and note what the momentum holds after it."""
        held += [0.0] * (len(optimizer.param_groups) - len(held))
        if not isinstance(optimizer, SGD):
            return [1.0] * len(held)
        factors = []
        for number, group in enumerate(optimizer.param_groups):
            momentum = float(group["momentum"])
            # Dampening does not count for the gradient that comes first.
            taken = 1.0 - float(group["dampening"]) if held[number] else 1.0
            held[number] = momentum * held[number] + taken if momentum else 0.0
            ahead = 1.0 + momentum * held[number] if group["nesterov"] else held[number]
            factors.append(ahead if momentum else 1.0)
        return factors

    def _index(self, optimizer: Optimizer) -> int:
        return next(index for index, one in enumerate(self._optimizers) if one is optimizer)
