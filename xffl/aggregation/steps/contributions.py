"""Contributions of local steps that no round has taken in yet: steps, counts, effective steps, seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from xffl.errors import CheckpointError, ConfigError

__all__ = [
    "ContributionTracker",
    "Snapshot",
    "StepTimer",
    "backward_error",
]


class Snapshot(NamedTuple):
    """What one round takes in of a fragment."""

    fragment: int
    steps: int
    effort: float
    amount: float
    is_changed: bool

    @property
    def has_steps(self) -> bool:
        """Whether there are steps in it, whole ones or not."""
        return self.steps > 0 or self.is_changed


class ContributionTracker:
    """Steps and counts that wait for a round, for each fragment that rounds take in turn; local.

    Optimizers that step after the one whose steps are local steps change the model, too: that waits for a round beside
    the steps, and counts for something in it.
    """

    def __init__(self, fragments: int) -> None:
        self._steps = [0] * fragments
        self._efforts = [0.0] * fragments
        self._counts = [0.0] * fragments
        self._is_changed = [False] * fragments
        self._usual_count = 0.0  # of a local step, in the last round that took some in

    def note_change(self) -> None:
        """Note that an optimizer is about to change every fragment."""
        self._is_changed = [True] * len(self._is_changed)

    def add_effort(self, effort: float) -> None:
        """Note effective steps, without a local step."""
        for fragment in range(len(self._efforts)):
            self._efforts[fragment] += effort

    def add_step(self, effort: float = 1.0) -> None:
        """Note a local step, which changes every fragment, and its effective number."""
        for fragment in range(len(self._steps)):
            self._steps[fragment] += 1
            self._efforts[fragment] += effort

    def add_count(self, count: float) -> None:
        """Note what was counted (samples, tokens) since the last call."""
        for fragment in range(len(self._counts)):
            self._counts[fragment] += count

    def is_waiting(self, fragment: int) -> bool:
        """Tell whether steps wait for a round of a fragment, whole ones or not."""
        return self._steps[fragment] > 0 or self._is_changed[fragment]

    def effort(self, fragment: int) -> float:
        """Return the effective steps that wait for a fragment's round; 1 for a change that nobody measured."""
        return self._efforts[fragment] or float(self._is_changed[fragment])

    def count(self, fragment: int) -> float:
        """Return the count that waits for a fragment's round; a local step's where the samples were counted before."""
        if not self._counts[fragment] and not self._steps[fragment] and self._is_changed[fragment]:
            return self._usual_count
        return self._counts[fragment]

    def has_others(self, fragment: int) -> bool:
        """Tell whether steps wait for rounds of other fragments."""
        return any(self.is_waiting(other) for other in range(len(self._steps)) if other != fragment)

    def snapshot(self, fragment: int) -> Snapshot:
        """Take what waits for a fragment's round; either :meth:`commit` or :meth:`rollback` follows."""
        steps, effort, is_changed = self._steps[fragment], self._efforts[fragment], self._is_changed[fragment]
        # Counts are subtracted by the commit: a weight function that counts meanwhile adds to them.
        snapshot = Snapshot(fragment, steps=steps, effort=effort, amount=self._counts[fragment], is_changed=is_changed)
        self._steps[fragment], self._efforts[fragment], self._is_changed[fragment] = 0, 0.0, False
        return snapshot

    def commit(self, snapshot: Snapshot) -> None:
        """Subtract what a round has taken in."""
        self._counts[snapshot.fragment] -= snapshot.amount
        if snapshot.steps:
            self._usual_count = snapshot.amount / snapshot.steps

    def rollback(self, snapshot: Snapshot) -> None:
        """Let what a rejected or skipped round did not take in wait for the next."""
        self._steps[snapshot.fragment] += snapshot.steps
        self._efforts[snapshot.fragment] += snapshot.effort
        self._is_changed[snapshot.fragment] |= snapshot.is_changed

    def forget(self, fragments: Collection[int]) -> None:
        """Forget what waits for rounds of some fragments."""
        for fragment in fragments:
            self._steps[fragment] = 0
            self._efforts[fragment] = 0.0
            self._counts[fragment] = 0.0
            self._is_changed[fragment] = False

    def state_dict(self, doubted: Snapshot | None = None) -> dict[str, Any]:
        """Return what waits, with what an open snapshot has taken: a resumed run does not know of its round."""
        waiting = self
        if doubted is not None:
            waiting = copy.deepcopy(self)
            waiting.rollback(doubted)
        return {
            "steps": list(waiting._steps),
            "efforts": list(waiting._efforts),
            "counts": list(self._counts),
            "changed": list(waiting._is_changed),
            "usual_count": self._usual_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; ``CheckpointError`` for another number of fragments."""
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

    What the caller does between two steps counts (loading, evaluating), since it makes others wait, too. Work that the
    device has still to do when a round comes is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self.steps = 0
        """Local steps since the last :meth:`clear`."""
        self._since = time.perf_counter()

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the last :meth:`clear`, up to the last pause; 0 without a step."""
        return self._seconds / self.steps if self.steps else 0.0

    def clear(self) -> None:
        """Forget the steps so far: a round has reported how long they took."""
        self._seconds = 0.0
        self.steps = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for work that is not a local step."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # only this one: a round under way has its own
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


def backward_error(what: str) -> ConfigError:
    """Return what is raised where a step is made in a backward pass, which still reads what a round would change."""
    return ConfigError(
        f"{what} inside a backward pass, where a round would change parameters that gradients are still computed "
        "from; give optimizer=None, and call scaling.step() after backward()"
    )
