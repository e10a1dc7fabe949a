"""Protection of a cell's values: noise that hides its training data, and sums that hide its values from other cells.

:class:`Privacy` clips each cell's update and adds noise to it, and :class:`Accountant` computes the privacy cost.
:class:`SecureSum` masks the values that cross, so that only the sum over all cells can be read. For each pair of cells
``c < d`` the two ranks that send the same elements share a secret, from which both derive a mask. Cell ``c`` adds the
mask to its row, and ``d`` subtracts it from its own: a single row looks random, and in the sum of all rows the masks
cancel (Bonawitz et al., 2017, doi 10.1145/3133956.3133982, without their recovery of lost cells). To cancel to the last
bit, values are integers modulo ``2**64``: ``round(share * x * 2**fraction_bits)``.

*No mask is used twice.* A mask's key is derived from the pair's secret, the attempt, and the place (bucket group,
bucket, part). A secret belongs to one :class:`Masker`: its key pair is new, is never saved or copied, and the secret
depends on both public keys. :meth:`Masker.start_attempt` accepts only higher numbers than all earlier attempts,
successful or not, so a repeated round has new masks; and within an attempt :meth:`Masker.encode` accepts each place
once. Each rank checks this itself and need not trust other ranks' counts.

A cell that fails after rows were masked cannot be left out, since no other cell can remove its masks: the round fails
for all, and the next attempt is made among the cells that its vote counts.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from xffl.aggregation.arithmetic import CHUNK, piece_length
from xffl.checks import integer, number, one_of, shown
from xffl.distributed.agreement.consistency import control_device, run_on_all_ranks
from xffl.distributed.collectives import Group, all_gather_json
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError
from xffl.extras import optional_import
from xffl.reading import Fields
from xffl.topology import Topology

__all__ = ["Accountant", "KeyPair", "Keystream", "Masker", "Noise", "Privacy", "SecureSum", "make_masker", "privatize"]

PLACES = ("cell", "sum")
"""Where the full noise is: in each cell's update, or in the sum over the cells."""

LEAST_NOISE, MOST_NOISE = 1e-6, 1e6  # less has no effect, and more leaves nothing of the update

FRACTION = 53  # bits of a uniform number, as many as a 64-bit float holds


@dataclass(frozen=True)
class Privacy:
    """DP-FedAvg: clip a cell's update and add Gaussian noise (McMahan et al., 2018, arXiv 1710.06963).

    With ``x`` the cell's stepped tensors (trainable parameters of policy ``average``) and ``g`` the last agreed ones, a
    cell sends ``g + min(1, clip / |x - g|) (x - g) + z``, where ``|.|`` is the L2 norm and ``z`` is normal. All
    cells have equal weights: a weight would be disclosed, and would change the bound on the influence of a cell.

    ``where="cell"``: ``z`` has the standard deviation ``noise * clip``. Each message of a cell is protected by itself;
    no other cell is trusted. ``where="sum"``: ``noise * clip / sqrt(cells)``, so that the sum over the cells has
    ``noise * clip``. A single message then has too little noise to be disclosed, so this needs secure sums, and it
    trusts the other cells to add their part of the noise and to keep it secret.

    Noise is that of 64-bit floats, rounded to the values' type. Its lowest bits do not follow the normal distribution
    on which the accountant's bound rests (Mironov, 2012, doi 10.1145/2382196.2382264); see the page on privacy.

    :param clip: The greatest L2 norm of an update; longer ones are clipped to it. Above 0.
    :param noise: Standard deviation of the noise, divided by ``clip``; 0 for none.
    :param where: One of :data:`PLACES`.
    :param delta: Probability that the accountant's epsilon does not hold; above 0 and below 1.
    :param seed: Makes the noise the same in each run, for tests only: whoever knows the seed knows the noise.
    :raises ConfigError: if an argument is invalid.
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

    def scale_of(self, norm: float) -> float:
        """Return the factor that clips an update whose L2 norm over all shards is given, ``min(1, clip / norm)``."""
        if not math.isfinite(norm):
            raise RoundError(f"the norm of this cell's update is {norm}, so it cannot be clipped; lower the step size")
        return self.clip / norm if norm > self.clip else 1.0

    def deviation(self, cells: int) -> float:
        """Return the standard deviation of the noise on each element of an update, for ``cells`` contributing cells."""
        whole = self.noise * self.clip
        return whole / math.sqrt(cells) if self.where == "sum" else whole


class Noise:
    """Cryptographically secure normal numbers of one rank.

    torch's generators are fast but not secure: where an update is zero, as for words that do not occur in a cell's
    data, its message shows the noise itself, and a few thousand numbers of such a generator determine all others. These
    numbers are made from the keystream of AES (:class:`Keystream`) by the transform of Box and Muller (1958) in 64
    bits. Each call continues the stream, so no number is used twice, not even for a repeated round. Make an object for
    each exchange, with its number (:attr:`~xffl.aggregation.privacy.Accountant.rounds`), so that a resumed run does not
    repeat its noise. A seed makes the numbers reproducible, for tests; by default the key is random.

    About 80 million numbers a second on one core; always computed on the CPU.
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

    Local. The rank that sends values for its cell calls it, once for each element and round, before anything is sent:
    a second draw for the same update would disclose more about it.
    """
    length = piece_length(values.device)
    for value, origin in zip(torch.split(values, length), torch.split(anchor, length), strict=True):
        origin = origin.double()
        wide = torch.sub(value.double(), origin).mul_(scale).add_(origin)
        if deviation:
            wide.add_(noise.normal(wide.numel()).mul_(deviation).to(wide.device))
        # By way of fp32, as for the mean: so a CPU and a GPU give the same bits.
        value.copy_(wide if value.dtype.itemsize >= 4 else wide.float())


NEIGHBOURS = ("replace", "zero")
"""How two runs that must be indistinguishable differ: a cell has another update in one of them, or an update of 0."""

ORDERS = tuple(1.0 + 10.0 ** (step / 40.0) for step in range(-160, 241))
"""Orders of the Rényi divergence: each gives a valid bound; the best order is higher for more noise."""


class Accountant:
    """Add up the privacy cost of a cell's updates: RDP composition by opacus (extra ``privacy``).

    The unit of protection is *one cell's update in every round*, and with it all data that the cell trained on. The
    privacy loss of a round with noise multiplier ``m`` (standard deviation over sensitivity) is ``alpha / (2 m^2)`` at
    order ``alpha``; rounds add up (Mironov, 2017, arXiv 1702.07476), and the sum is converted to an epsilon for a delta
    (Balle et al., 2020, arXiv 1905.09982). Every cell takes part in every round, so there is no amplification by
    sampling.

    Local, and the same on all ranks after the same calls.

    :param privacy: The clipping and noise of each update.
    """

    def __init__(self, privacy: Privacy) -> None:
        self._privacy = privacy
        self._spent: Counter[tuple[float, str, int]] = Counter()

    @property
    def rounds(self) -> int:
        """Number of exchanges that have been counted."""
        return self._spent.total()

    def spend(self, cells: int, rounds: int = 1) -> None:
        """Count exchanges to which ``cells`` cells contribute; several at once to plan a run.

        Call it when an exchange begins, whether or not the round will count: its messages disclose as much.
        """
        cells, rounds = integer("cells", cells), integer("rounds", rounds)
        self._spent[self._privacy.noise, self._privacy.where, cells] += rounds

    def epsilon(self, delta: float | None = None, *, neighbours: str = "replace", colluding: int = 1) -> float:
        """Return the epsilon of (epsilon, delta)-differential privacy that the counted exchanges guarantee.

        ``neighbours="replace"``: a cell's data cannot be told from any other data. A clipped update changes by at most
        ``2 * clip``. This is the definition of differential privacy for messages whose sender is known.
        ``neighbours="zero"``: a cell's data cannot be told from an update of zero, a change of at most ``clip``; the
        usual number for DP-FedAvg, with half the sensitivity. The mean over cells divides both the change and the
        noise, so the number of cells does not appear.

        With ``where="sum"`` the readers of the sum are cells, which know their own noise and can subtract it: of
        ``cells`` shares of the variance, ``cells - colluding`` remain.

        :param delta: By default that of the privacy.
        :param neighbours: One of :data:`NEIGHBOURS`.
        :param colluding: Number of curious cells that share their noise with each other; used with ``where="sum"``.
        :return: Epsilon; 0 if nothing was counted, infinite without noise.
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
        # Orders near 1 may give a negative bound; epsilon is at least 0.
        return max(0.0, float(accountant.get_epsilon(delta, alphas=list(ORDERS))))

    def state_dict(self) -> dict[str, Any]:
        """Return what has been counted. A run that resumes from an older checkpoint forgets what it spent since."""
        return {"spent": [[*kind, rounds] for kind, rounds in self._spent.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, also from a run with other noise."""
        self._spent = self._read(state)

    def cover(self, state: Mapping[str, Any]) -> None:
        """Raise the count of each kind of exchange to that in another accountant's state, if that is higher."""
        self._spent |= self._read(state)

    def _read(self, state: Mapping[str, Any]) -> Counter[tuple[float, str, int]]:
        """Return the counts of a state, whose values may come from anybody."""
        hint = "the state is not that of a privacy accountant, load another one"
        fields = Fields(state, "the state of privacy", error=CheckpointError, hint=hint)
        spent: Counter[tuple[float, str, int]] = Counter()
        for kind in fields.list_of("spent", MOST_KINDS, Fields.any):
            if not isinstance(kind, list | tuple) or len(kind) != 4:
                fields.fail(f"{fields.place('spent')} must have noise, where, cells and rounds, got {shown(kind)}")
            given = Fields(
                dict(zip(("noise", "where", "cells", "rounds"), kind, strict=True)),
                "what privacy has spent",
                error=CheckpointError,
                hint=hint,
            )
            # Infinite noise would make exchanges free of cost, and so would fractional counts.
            key = given.number("noise", 0.0, MOST_NOISE), given.choice("where", PLACES), given.integer("cells", 1)
            spent[key] += given.integer("rounds", 0)
        return spent


MOST_KINDS = 1_000_000
"""The most kinds of exchanges (noise, place, cells) in a state"""

LEAST_CELLS = 3
"""The fewest cells whose sum hides each of them: of two cells, each could subtract its own values."""

DEVICE_CHUNK = 2**22  # values on a GPU that are masked at a time; their masks are copied to it

INTEGER_BITS = 62
"""Bits of the largest value. Of 64, one is the sign, and one is spare, for rounding and to detect wrong masks."""


@dataclass(frozen=True)
class SecureSum:
    """Fixed-point numbers of a secure sum.

    The mean's error is at most ``cells * 2**-(fraction_bits + 1) + 2**-51 * sum(share * |x|)``, before it is rounded to
    the values' type. Values beyond ``limit`` make the round fail.

    :param fraction_bits: Binary digits after the point, 1 to 60. 32: values up to a billion, an error of some 1e-10.
    :raises ConfigError: if it is out of this range.
    """

    fraction_bits: int = 32

    def __post_init__(self) -> None:
        hint = "give the binary digits that follow the point, such as 32"
        bits = integer("fraction_bits", self.fraction_bits, 1, INTEGER_BITS - 2, hint=hint)
        object.__setattr__(self, "fraction_bits", bits)

    @property
    def limit(self) -> float:
        """The largest magnitude of a value."""
        return 2.0 ** (INTEGER_BITS - self.fraction_bits)


class Masker:
    """The secrets that a rank shares with every rank that may send the same elements in another cell.

    Local: public keys are exchanged before, and secrets are computed when they are first needed. They depend on
    ``context``, a text that is the same on all ranks, such as the plan.
    """

    def __init__(
        self,
        options: SecureSum,
        rank: int,
        keys: KeyPair,
        *,
        publics: Sequence[bytes],
        topology: Topology,
        context: str,
    ) -> None:
        self._options = options
        self._rank = rank
        self._cell = topology.cell_of(rank)
        self._topology = topology
        self._keys = keys
        self._publics = tuple(publics)
        self._context = context
        self._secrets: dict[int, bytes] = {}
        self._attempt = 0
        self._is_abandoned = False
        self._cells: tuple[int, ...] = ()
        self._used: set[tuple[object, ...]] = set()

    @property
    def next_attempt(self) -> int:
        """The lowest number that :meth:`start_attempt` accepts; a round takes the highest of all ranks' numbers."""
        return self._attempt + 1

    def start_attempt(self, attempt: int, cells: Iterable[int]) -> None:
        """Begin an exchange, with the attempt and the contributing cells of the opening vote; local."""
        if attempt < self.next_attempt:
            raise StateError(
                f"attempt {attempt} may have used its masks; start with {self.next_attempt} or above, the highest "
                "next_attempt of all ranks"
            )
        self._attempt = attempt
        self._is_abandoned = False
        self._used.clear()
        self._cells = ()
        self.check(cells)
        self._cells = tuple(sorted(set(cells)))

    def check(self, cells: Iterable[int]) -> None:
        """Raise if a sum over these cells would disclose a cell's values; pure."""
        if len(contributing := sorted(set(cells))) < LEAST_CELLS:
            raise RoundError(
                f"cells {contributing} contribute to this round, but a secure sum needs {LEAST_CELLS}, since of two "
                "each would learn the other's values; wait for more cells, or average with secure=False"
            )

    def abandon(self) -> None:
        """Send zeros instead of masked rows from now on, so that the other cells' masks do not cancel; local.

        For a rank whose values must not leave. Masked zeros would disclose the sum of the other cells' values.
        """
        self._is_abandoned = True

    @torch.no_grad()
    def encode(
        self,
        values: torch.Tensor,
        share: float,
        out: torch.Tensor,
        *,
        place: tuple[object, ...],
        senders: Mapping[int, int],
    ) -> None:
        """Write values times this cell's share as a masked row; local.

        If it raises, and after :meth:`abandon`, ``out`` holds zeros: sending it discloses nothing. Values are already
        clipped and noised. The place (bucket group, bucket, part) is the same on all ranks that send these elements,
        and differs between the rows of an attempt. ``senders`` has the sender of each contributing cell, including this
        one; ``out`` is flat int64 on the values' device.
        """
        out.zero_()
        if self._is_abandoned:
            return
        if tuple(sorted(senders)) != self._cells or senders.get(self._cell) != self._rank:
            raise StateError(
                f"senders {dict(senders)} are not one for each of the cells {self._cells} with rank {self._rank} for "
                f"cell {self._cell}; call start_attempt with the cells that contribute"
            )
        if place in self._used:
            raise StateError(f"place {place} has a row in attempt {self._attempt} already; a second would reveal both")
        self._used.add(place)
        self._check_range(values)
        streams = [
            (Keystream(self._key(peer, place)), 1 if self._cell < cell else -1)
            for cell, peer in senders.items()
            if cell != self._cell
        ]
        factor = share * 2.0**self._options.fraction_bits
        # On a CPU a chunk should fit in the cache; on a GPU each chunk costs a copy that the host waits for.
        chunk = CHUNK if out.device.type == "cpu" else DEVICE_CHUNK
        numel = min(chunk, values.numel())
        masks, bits = torch.empty(2, numel, dtype=torch.int64, device="cpu")
        wide = torch.empty(numel, dtype=torch.float64, device=out.device)
        for value, row in zip(torch.split(values, chunk), torch.split(out, chunk), strict=True):
            mask, fresh, number = (scratch[: value.numel()] for scratch in (masks, bits, wide))
            mask.zero_()
            for stream, sign in streams:
                stream.fill(fresh)
                mask.add_(fresh, alpha=sign)
            number.copy_(value).mul_(factor).round_()
            # The masks are written first: unmasked numbers never stand in the memory that is sent.
            row.copy_(mask).add_(number.long())

    @torch.no_grad()
    def decode(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the sum of masked rows, ``sum(share * x)``; local, the same bits in any order of the rows."""
        if len(rows) != len(self._cells):
            raise StateError(f"{len(rows)} rows came of the cells {self._cells}; give one of each, this cell's too")
        bounds: list[torch.Tensor] = []
        for value, *parts in zip(*(torch.split(tensor, CHUNK) for tensor in (out, *rows)), strict=True):
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            bounds += torch.aminmax(total) if total.numel() else ()
            mean = total.double().mul_(2.0**-self._options.fraction_bits)
            value.copy_(mean if value.dtype.itemsize >= 4 else mean.float())
        if bounds and max(abs(bound) for bound in torch.stack(bounds).tolist()) > 2**INTEGER_BITS + len(rows):
            raise RoundError(
                f"the masks of cells {self._cells} do not cancel in attempt {self._attempt}, so the sum is not known; "
                "a rank has sent a row of another attempt, or a damaged one"
            )

    def _check_range(self, values: torch.Tensor) -> None:
        if not values.numel():
            return
        least, largest = torch.stack(torch.aminmax(values)).double().tolist()
        if not max(-least, largest) <= self._options.limit:  # NaN, too
            # All ranks get the message, so it must not contain the value.
            raise RoundError(
                f"cell {self._cell} holds a value that is not finite or beyond {self._options.limit:g}, the most that "
                f"a secure sum with fraction_bits={self._options.fraction_bits} holds; give fewer fraction_bits"
            )

    def _key(self, peer: int, place: tuple[object, ...]) -> bytes:
        """Return the key of the mask between this rank and a peer, for one place of this attempt."""
        if peer not in self._secrets:
            ends = sorted((self._topology.cell_of(rank), rank) for rank in (self._rank, peer))
            self._secrets[peer] = self._keys.agree_secret(self._publics[peer], (*ends, self._context))
        return derive_key(self._secrets[peer], ("xffl mask", self._attempt, place))


def make_masker(
    options: SecureSum, rank: int, topology: Topology, *, context: str, group: Group | None = None
) -> Masker:
    """Make a key pair and send its public key to all ranks; collective over the world: 32 bytes a rank."""
    with run_on_all_ranks("secure sums", group=group) as share:
        if topology.cells < LEAST_CELLS:
            raise ConfigError(
                f"a secure sum over {topology.cells} cells would disclose the other cell's values; give at least "
                f"{LEAST_CELLS} cells, or secure=False"
            )
        keys = KeyPair()
        share(f"{options}, {context}")
    publics = list(map(bytes.fromhex, all_gather_json(keys.public.hex(), control_device(group), group)))
    return Masker(options, rank, keys, publics=publics, topology=topology, context=context)


KEY_BYTES = 32  # bytes of every key of X25519, HMAC-SHA256 and AES-256
NEED = ("privacy", "privacy and secure sums need cryptography")
"""The extra, and the message where the package is missing."""


class Keystream:
    """The keystream of AES-256 in counter mode (NIST SP 800-38A), with the counter from 0.

    Without the key the bits cannot be told from random bits, nor predicted from earlier ones. Several GB/s on one core
    with the processor's AES instructions. Local; two streams with the same key are equal.
    """

    def __init__(self, key: bytes) -> None:
        with optional_import(*NEED):
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: torch.Tensor) -> None:
        """Overwrite flat, contiguous int64 values on the CPU with the next bits."""
        assert out.device.type == "cpu" and out.is_contiguous(), "the bits are written into the tensor's memory"
        if out.numel():
            window = out.zero_().numpy().data.cast("B")
            self._encryptor.update_into(window, window)  # zeros become the keystream itself


class KeyPair:
    """A new X25519 key pair (RFC 7748) from the operating system's randomness.

    The private key stays in this object: no method returns it, and pickling or copying the object raises.
    """

    def __init__(self) -> None:
        with optional_import(*NEED):
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def agree_secret(self, peer: bytes, context: object) -> bytes:
        """Return the key that only the two holders of these pairs can compute; local, the same at both ends.

        HKDF-SHA256 (RFC 5869) of the X25519 secret, bound to both public keys and to ``context``.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise RoundError(
                f"{peer.hex()!r} is not a public key of X25519 ({error}); make the aggregator on all ranks anew"
            ) from error
        info = repr(("xffl pair", *sorted((self.public, peer)), context)).encode()
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(shared)

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a private key stays in the process that made it; make another pair instead of a copy")


def derive_key(secret: bytes, context: object) -> bytes:
    """Return the key of a context; local. Keys of contexts with different ``repr`` are independent of each other."""
    with optional_import(*NEED):
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
    return HKDFExpand(SHA256(), KEY_BYTES, info=repr(context).encode()).derive(secret)
