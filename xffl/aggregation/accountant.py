"""How much privacy a run has spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from xffl.aggregation.privacy import PLACES, Privacy
from xffl.checks import integer
from xffl.errors import CheckpointError, ConfigError
from xffl.extras import optional_import

__all__ = ["NEIGHBOURS", "Accountant"]

NEIGHBOURS = ("replace", "zero")
"""Which two runs must look alike: one cell's update is any other in one of them, or is none at all."""

ORDERS = tuple(1.0 + 10.0 ** (step / 40.0) for step in range(-160, 241))
"""Orders of the Rényi divergence: each gives a valid bound, and the best is near 1 for little noise, far for much."""


class Accountant:
    """Add up the privacy that a cell's updates have spent: RDP composition by opacus (extra ``privacy``).

    The unit that is protected is *one cell's update in every round*, and with it all that the cell trained on. The
    privacy loss of a round with noise multiplier ``m`` (standard deviation over sensitivity) is ``alpha / (2 m^2)`` at
    order ``alpha``; rounds add up (Mironov, 2017, arXiv 1702.07476), and the sum becomes an epsilon for a delta (Balle
    et al., 2020, arXiv 1905.09982). Every cell takes part in every round, so sampling amplifies nothing.

    Local, and the same on all ranks that were told the same.

    :param privacy: What each update gets.
    """

    def __init__(self, privacy: Privacy) -> None:
        self._privacy = privacy
        self._spent: Counter[tuple[float, str, int]] = Counter()

    @property
    def rounds(self) -> int:
        """Number of exchanges that have been counted."""
        return self._spent.total()

    def spend(self, cells: int, rounds: int = 1) -> None:
        """Count exchanges; call it when one begins, whether or not the round is taken: its messages were seen.

        :param cells: Number of cells that contribute.
        :param rounds: How many exchanges; more than 1 to plan a run.
        :raises ConfigError: if one is no whole number from 1.
        """
        cells, rounds = integer("cells", cells), integer("rounds", rounds)
        self._spent[self._privacy.noise, self._privacy.where, cells] += rounds

    def epsilon(self, delta: float | None = None, *, neighbours: str = "replace", colluding: int = 1) -> float:
        """Return the epsilon of (epsilon, delta)-differential privacy that the counted exchanges guarantee.

        ``neighbours="replace"``: nobody can tell whether a cell had one data set or any other. A clipped update changes
        by at most ``2 * clip``. This is what differential privacy means for a message whose sender is known.
        ``neighbours="zero"``: nobody can tell whether a cell had its data or had not moved at all, a change of at most
        ``clip``; the usual figure for DP-FedAvg, with half the sensitivity. The mean over cells divides a change and
        the noise alike, so the number of cells does not appear.

        With ``where="sum"`` whoever reads the sum is a cell, knows its own noise and takes it off: of ``cells`` shares
        of the variance, ``cells - colluding`` are left.

        :param delta: By default that of the privacy.
        :param neighbours: One of :data:`NEIGHBOURS`.
        :param colluding: Curious cells that tell each other their noise; counts with ``where="sum"``.
        :return: Epsilon; 0 where nothing was counted, infinite without noise.
        :raises ConfigError: if an argument cannot be meant, or opacus is not installed.
        """
        delta = self._privacy.delta if delta is None else delta
        if not 0 < delta < 1:
            raise ConfigError(f"delta {delta} is not between 0 and 1; give a small one, such as 1e-5")
        if neighbours not in NEIGHBOURS:
            raise ConfigError(f"neighbours {neighbours!r} is unknown; choose one of {', '.join(NEIGHBOURS)}")
        colluding = integer("colluding", colluding, 0, hint="give a number of cells")
        history = []
        for (noise, where, cells), rounds in self._spent.items():
            left = max(0, cells - colluding) / cells if where == "sum" else 1.0
            multiplier = noise * math.sqrt(left) / (2.0 if neighbours == "replace" else 1.0)
            if multiplier == 0.0:
                return math.inf
            history.append((multiplier, 1.0, rounds))
        if not history:
            return 0.0
        with optional_import("privacy", "an account of privacy needs opacus"):
            from opacus.accountants import RDPAccountant
        accountant = RDPAccountant()
        accountant.history = history
        # Orders near 1 can give a negative number, which bounds epsilon no better than 0.
        return max(0.0, float(accountant.get_epsilon(delta, alphas=list(ORDERS))))

    def state_dict(self) -> dict[str, Any]:
        """Return what has been counted. A run that resumes from an older checkpoint forgets what it spent since."""
        return {"spent": [[*kind, rounds] for kind, rounds in self._spent.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, also from a run with other noise.

        :param state: The saved state.
        :raises CheckpointError: if it is no accountant's.
        """
        spent: Counter[tuple[float, str, int]] = Counter()
        try:
            for noise, where, cells, rounds in state["spent"]:
                if where not in PLACES or noise < 0 or cells < 1 or rounds < 0:
                    raise ValueError(f"{(noise, where, cells, rounds)} is no count of exchanges")
                spent[float(noise), where, int(cells)] += int(rounds)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state is not that of a privacy accountant ({type(error).__name__}: {error}); load one that "
                "Accountant.state_dict returned"
            ) from error
        self._spent = spent
