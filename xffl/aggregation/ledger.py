"""What local steps have done that no round has taken in yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from xffl.errors import CheckpointError

__all__ = ["Claim", "Ledger"]


class Claim(NamedTuple):
    """What one round takes in."""

    fragment: int
    steps: int
    effort: float
    amount: float
    is_changed: bool


class Ledger:
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

    def claim(self, fragment: int) -> Claim:
        """Take what waits for a part's round; either :meth:`settle` or :meth:`put_back` follows."""
        claim = Claim(
            fragment,
            self._steps[fragment],
            self._efforts[fragment],
            self._counts[fragment],
            self._is_changed[fragment],
        )
        self._steps[fragment], self._efforts[fragment], self._is_changed[fragment] = 0, 0.0, False
        return claim

    def settle(self, claim: Claim) -> None:
        """Strike off what a round has taken in."""
        self._counts[claim.fragment] -= claim.amount
        if claim.steps:
            self._usual_count = claim.amount / claim.steps

    def put_back(self, claim: Claim) -> None:
        """Let what a rejected or skipped round did not take in wait for the next."""
        self._steps[claim.fragment] += claim.steps
        self._efforts[claim.fragment] += claim.effort
        self._is_changed[claim.fragment] |= claim.is_changed

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
