"""What local steps have done that no round has taken in yet."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Claim", "Ledger"]


class Claim(NamedTuple):
    """What one round takes in."""

    fragment: int
    steps: int
    amount: float


class Ledger:
    """Steps and counts that wait for a round, for each part of the model; local.

    :param fragments: Parts that rounds take in turn.
    """

    def __init__(self, fragments: int) -> None:
        self._steps = [0] * fragments
        self._counts = [0.0] * fragments

    def add_step(self) -> None:
        """Note a local step, which changes every part."""
        self._steps = [steps + 1 for steps in self._steps]

    def add_count(self, count: float) -> None:
        """Note what was counted (samples, tokens) since the last call."""
        self._counts = [waiting + count for waiting in self._counts]

    def steps(self, fragment: int) -> int:
        """Return the steps that wait for a round of a part."""
        return self._steps[fragment]

    def count(self, fragment: int) -> float:
        """Return the count that waits for a round of a part."""
        return self._counts[fragment]

    def has_others(self, fragment: int) -> bool:
        """Tell whether steps wait for rounds of other parts."""
        return any(steps for other, steps in enumerate(self._steps) if other != fragment)

    def claim(self, fragment: int) -> Claim:
        """Take what waits for a part's round; either :meth:`settle` or :meth:`put_back` follows."""
        claim = Claim(fragment, self._steps[fragment], self._counts[fragment])
        self._steps[fragment] = 0
        return claim

    def settle(self, claim: Claim) -> None:
        """Strike off what a round has taken in."""
        self._counts[claim.fragment] -= claim.amount

    def put_back(self, claim: Claim) -> None:
        """Let what a rejected round did not take in wait for the next."""
        self._steps[claim.fragment] += claim.steps
