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


class Ledger:
    """Steps and counts that wait for a round, for each part of the model; local.

    :param fragments: Parts that rounds take in turn.
    """

    def __init__(self, fragments: int) -> None:
        self._steps = [0] * fragments
        self._efforts = [0.0] * fragments
        self._counts = [0.0] * fragments

    def add_step(self, effort: float = 1.0) -> None:
        """Note a local step, which changes every part, and what it amounts to."""
        self._steps = [steps + 1 for steps in self._steps]
        self._efforts = [waiting + effort for waiting in self._efforts]

    def add_count(self, count: float) -> None:
        """Note what was counted (samples, tokens) since the last call."""
        self._counts = [waiting + count for waiting in self._counts]

    def steps(self, fragment: int) -> int:
        """Return the steps that wait for a round of a part."""
        return self._steps[fragment]

    def effort(self, fragment: int) -> float:
        """Return what the steps that wait for a round of a part amount to."""
        return self._efforts[fragment]

    def count(self, fragment: int) -> float:
        """Return the count that waits for a round of a part."""
        return self._counts[fragment]

    def has_others(self, fragment: int) -> bool:
        """Tell whether steps wait for rounds of other parts."""
        return any(steps for other, steps in enumerate(self._steps) if other != fragment)

    def claim(self, fragment: int) -> Claim:
        """Take what waits for a part's round; either :meth:`settle` or :meth:`put_back` follows."""
        claim = Claim(fragment, self._steps[fragment], self._efforts[fragment], self._counts[fragment])
        self._steps[fragment], self._efforts[fragment] = 0, 0.0
        return claim

    def settle(self, claim: Claim) -> None:
        """Strike off what a round has taken in."""
        self._counts[claim.fragment] -= claim.amount

    def put_back(self, claim: Claim) -> None:
        """Let what a rejected or skipped round did not take in wait for the next."""
        self._steps[claim.fragment] += claim.steps
        self._efforts[claim.fragment] += claim.effort

    def state_dict(self) -> dict[str, Any]:
        """Return what waits; with no claim open.

        :return: Numbers.
        """
        return {"steps": list(self._steps), "efforts": list(self._efforts), "counts": list(self._counts)}

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
