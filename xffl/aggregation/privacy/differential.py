"""Clipping and noise on a cell's update, so that what leaves the cell tells little about what it trained on."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from xffl.aggregation.mean import piece_length
from xffl.aggregation.privacy.secure_sum import KEY_BYTES, Keystream, derive_key
from xffl.checks import integer, number, one_of
from xffl.errors import CheckpointError, ConfigError, RoundError
from xffl.extras import optional_import

__all__ = ["NEIGHBOURS", "PLACES", "Accountant", "Noise", "Privacy", "privatize"]


PLACES = ("cell", "sum")
"""What has the whole of the noise: each cell's own update, or the sum over the cells."""

LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""Beyond these, noise is nothing, or nothing is left of the update."""

FRACTION = 53
"""Bits of a uniform number, as many as a 64-bit float holds."""


@dataclass(frozen=True)
class Privacy:
    """DP-FedAvg: clip a cell's update and add Gaussian noise (McMahan et al., 2018, arXiv 1710.06963).

    With ``x`` the cell's stepped tensors (trainable parameters of policy ``average``) and ``g`` the last agreed ones, a
    cell gives ``g + min(1, clip / |x - g|) (x - g) + z``, where ``|.|`` is the L2 norm and ``z`` is normal. All cells
    count alike: a weight would be told to all, and would move the bound on what one cell can change.

    ``where="cell"``: ``z`` has the standard deviation ``noise * clip``. What a cell sends is protected by itself; no
    other cell is trusted. ``where="sum"``: ``noise * clip / sqrt(cells)``, so that the sum over the cells has ``noise *
    clip``. A cell's own message then has too little noise to be seen, so this needs secure sums, and it trusts the
    other cells to add their part and not to share what they know of it.

    Noise is that of 64-bit floats, rounded to the values' type. Its lowest bits do not follow the normal distribution
    on which the accountant's bound rests (Mironov, 2012, doi 10.1145/2382196.2382264); see the page on privacy.

    :param clip: The largest L2 norm of an update that is left as it is; above 0.
    :param noise: Standard deviation of the noise over ``clip``; 0 for none.
    :param where: One of :data:`PLACES`.
    :param delta: Probability that the accountant's epsilon does not hold; above 0 and below 1.
    :param seed: Makes the noise the same in each run, for tests only: who knows the seed knows the noise.
    :raises ConfigError: if one is invalid.
    """

    clip: float
    noise: float
    _: KW_ONLY
    where: str = "cell"
    delta: float = 1e-5
    seed: int | None = None

    def __post_init__(self) -> None:
        number("privacy's clip", self.clip, above=0.0, hint="give the largest L2 norm of an update")
        if number("privacy's noise", self.noise):
            hint = "give 0 for none, or a factor of the clip, such as 1.0"
            number("privacy's noise", self.noise, LEAST_NOISE, MOST_NOISE, hint=hint)
        number("privacy's delta", self.delta, above=0.0, below=1.0, hint="give a small one, such as 1e-5")
        one_of("privacy's where", self.where, PLACES)
        if self.seed is not None:
            seed = integer("privacy's seed", self.seed, None, hint="give one in tests, else None")
            object.__setattr__(self, "seed", seed)

    def check(self, *, is_secure: bool) -> None:
        """Raise where the noise would not hide what crosses: that of a sum, without a secure sum; local."""
        if self.where == "sum" and not is_secure:
            raise ConfigError(
                "privacy's where='sum' gives a cell's own values too little noise to be seen; use secure sums with it, "
                "or where='cell'"
            )

    def scale_of(self, norm: float) -> float:
        """Return the factor that clips an update, ``min(1, clip / norm)``; local.

        The L2 norm is that over all shards of the cell, from sums in 64 bits; all ranks of the cell use the same.
        """
        if not math.isfinite(norm):
            raise RoundError(f"the norm of this cell's update is {norm}, so it cannot be clipped; lower the step size")
        return self.clip / norm if norm > self.clip else 1.0

    def deviation(self, cells: int) -> float:
        """Return the standard deviation of the noise on each element of a cell's update, of so many that contribute."""
        whole = self.noise * self.clip
        return whole / math.sqrt(cells) if self.where == "sum" else whole

    def noise_of(self, rank: int, exchange: int = 0) -> Noise:
        """Return a rank's source of noise; make one for each exchange, and draw all of its noise from it.

        An exchange's number is what :attr:`~xffl.aggregation.privacy.differential.Accountant.rounds` counts, so that a
        resumed run goes on with other noise than it began with. Without ``seed`` noise comes from the operating
        system's randomness.
        """
        return Noise(rank, self.seed, exchange)


class Noise:
    """Normal numbers that nobody can guess from others, for one rank.

    torch's generators are fast but not made for secrets: where an update is zero, as for words that a cell has not
    met, its message shows the noise itself, and a few thousand numbers of such a generator tell all others. These come
    from the keystream of AES (:class:`xffl.aggregation.privacy.secure_sum.Keystream`) by the transform of Box and
    Muller (1958) in 64 bits, and go on where the last ones ended: no number is used twice, also not for a round that is
    repeated. A seed repeats them, for tests: the same ones for the same rank and exchange.

    Some 80 million numbers a second on one core; made on the CPU whatever the device.
    """

    def __init__(self, rank: int, seed: int | None = None, exchange: int = 0) -> None:
        if seed is None:
            key = os.urandom(KEY_BYTES)
        else:
            key = derive_key(bytes(KEY_BYTES), ("xffl noise", seed, rank, exchange))
        self._stream = Keystream(key)

    def normal(self, numel: int) -> torch.Tensor:
        """Return the next numbers of mean 0 and variance 1; local."""
        half = -(-numel // 2)
        bits = torch.empty(2, half, dtype=torch.int64, device="cpu")
        self._stream.fill(bits.view(-1))
        uniform = (bits >> (64 - FRACTION)).bitwise_and_(2**FRACTION - 1).double()
        radius = uniform[0].add_(1.0).mul_(2.0**-FRACTION).log_().mul_(-2.0).sqrt_()  # above 0, at most 1
        angle = uniform[1].mul_(2.0 * math.pi * 2.0**-FRACTION)
        return torch.cat([torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)])[:numel]


@torch.no_grad()
def privatize(values: torch.Tensor, anchor: torch.Tensor, scale: float, deviation: float, noise: Noise) -> None:
    """Replace values by ``anchor + scale * (values - anchor) + deviation * normal``, in 64 bits and rounded once.

    Local. The rank that sends values for its cell calls it, once for each element and round, before anything is sent: a
    second draw for the same update would be a second message about it.
    """
    length = piece_length(values.device)
    for value, origin in zip(torch.split(values, length), torch.split(anchor, length), strict=True):
        origin = origin.double()
        wide = torch.sub(value.double(), origin).mul_(scale).add_(origin)
        if deviation:
            wide.add_(noise.normal(wide.numel()).mul_(deviation).to(wide.device))
        # By way of fp32, as the mean's: a CPU and a GPU then round alike.
        value.copy_(wide if value.dtype.itemsize >= 4 else wide.float())


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
        :raises ConfigError: if one is not a positive integer.
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
        :raises ConfigError: if an argument is invalid, or opacus is not installed.
        """
        delta = self._privacy.delta if delta is None else delta
        number("delta", delta, above=0.0, below=1.0, hint="give a small one, such as 1e-5")
        one_of("neighbours", neighbours, NEIGHBOURS)
        colluding = integer("colluding", colluding, 0, hint="give a number of cells")
        history = []
        for (noise, where, cells), rounds in self._spent.items():
            remaining = max(0, cells - colluding) / cells if where == "sum" else 1.0
            multiplier = noise * math.sqrt(remaining) / (2.0 if neighbours == "replace" else 1.0)
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
        :raises CheckpointError: if it is not that of an accountant.
        """
        spent: Counter[tuple[float, str, int]] = Counter()
        try:
            for noise, where, cells, rounds in state["spent"]:
                if where not in PLACES or noise < 0 or cells < 1 or rounds < 0:
                    raise ValueError(f"{(noise, where, cells, rounds)} does not count exchanges")
                spent[float(noise), where, int(cells)] += int(rounds)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state is not that of a privacy accountant ({type(error).__name__}: {error}); load one that "
                "Accountant.state_dict returned"
            ) from error
        self._spent = spent
