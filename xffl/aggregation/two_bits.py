"""Codecs of two bits a value: its sign, and which of the two magnitudes of its block it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xffl.aggregation.compression import Codec
from xffl.checks import integer, number
from xffl.message_sizes.codecs import (
    DECAY,
    DENSITY,
    LARGEST_EXACT_BLOCK,
    SPARSE_BLOCK,
    kept_in_blocks,
    kept_values,
    sparse_bytes,
    two_bit_bytes,
)

__all__ = ["SparseBlocks", "TwoBits"]


@dataclass(frozen=True)
class TwoBits(Codec):
    """Round each value to one of two magnitudes of its block, with its sign: 2 bits a value.

    A block's values above the mean magnitude are large, the others small; the two magnitudes are the means of both, in
    bf16. Blocks of 1 to 4096 values run over the flat values in the order given; the last may be short. With blocks of
    64 this takes 0.078 of the fp32 bytes, with 128 0.070.

    Error: the squares of what is left out of a block sum up to at most those of its values, and for normally
    distributed values to 0.12 of them. A zero beside other values becomes the small magnitude, which the residual takes
    back; blocks of zeros stay zeros. A block's bytes depend on its own values only.
    """

    block: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", integer("block", self.block, 1, LARGEST_EXACT_BLOCK, hint="give block=64"))

    def __str__(self) -> str:
        return f"int2:block={self.block}"

    @property
    def alignment(self) -> int:
        """A block: however a large tensor is cut at multiples of it, blocks have the same values."""
        return self.block

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the blocks' magnitudes and of the values."""
        return two_bit_bytes(numel, self.block)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Choose the magnitudes of each block, and write which a value has; see :meth:`Codec.encode`."""
        self._check(values, out)
        if values.numel() == 0:
            return
        codes = values.new_empty(values.numel(), dtype=torch.uint8)
        levels = values.new_empty(-(-values.numel() // self.block), 2, dtype=torch.bfloat16)
        at_a_time = max(CHUNK // self.block, 1) if values.device.type == "cpu" else levels.shape[0]
        scratch = values.new_empty(3, min(at_a_time * self.block, values.numel()))
        for (rows, pair), (written, _) in zip(
            _blocks(values, levels, self.block), _blocks(codes, levels, self.block), strict=True
        ):
            for some, pairs, into in zip(
                *(torch.split(each, at_a_time) for each in (rows, pair, written)), strict=True
            ):
                magnitudes, is_large, spare = (row[: some.numel()].view_as(some) for row in scratch)
                tops = torch.abs(some, out=magnitudes).amax(1, keepdim=True)
                steps = _count_steps(magnitudes, tops)
                counts = torch.full_like(tops, some.shape[1])
                _choose(steps, counts, tops, out=pairs, is_large=is_large, spare=spare)
                into.copy_(is_large.mul_(2.0).add_(torch.lt(some, 0.0, out=spare)))
        head = 4 * levels.shape[0]
        out[:head].copy_(levels.view(-1).view(torch.uint8))
        _pack(codes, out[head:])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write each value's magnitude with its sign; see :meth:`Codec.decode`."""
        self._check(out, data)
        if out.numel() == 0:
            return
        head = 4 * -(-out.numel() // self.block)
        levels = data[:head].clone().view(torch.bfloat16).view(-1, 2).float()  # the data may be unaligned
        codes = _unpack(data[head:], out.numel())
        out.copy_(codes.bitwise_right_shift(1))
        for rows, pair in _blocks(out, levels, self.block):
            rows.mul_(pair[:, 1:] - pair[:, :1]).add_(pair[:, :1])
        out.mul_(codes.bitwise_and_(1).float().mul_(-2.0).add_(1.0))


@dataclass(frozen=True)
class SparseBlocks(Codec):
    """Keep the ``ceil(density * 4096)`` values of largest magnitude of each block of 4096; the others become 0.

    Of equal magnitudes the first are kept. A value has its place in the block (12 bits), its sign, and one of two
    magnitudes of its block (2 bits), which are the means of those above and below their mean, in bf16. Blocks run over
    the flat values in the order given; of a short last one as large a share is kept. With 64 of 4096 values (a density
    of 1/64) this takes 0.0071 of the fp32 bytes. A block's bytes depend on its own values only. Zeros stay zeros.

    What is left out is multiplied by ``decay`` before it is added to the next values: with a decay below 1 the residual
    takes the place of an outer momentum. Sarfi et al., SparseLoCo, 2025 (arXiv:2508.15706).
    """

    density: float = DENSITY
    decay: float = DECAY

    def __post_init__(self) -> None:
        number("density", self.density, above=0.0, maximum=1.0, hint="give density=0.015625 for 64 of 4096")
        number("decay", self.decay, 0.0, maximum=1.0, hint="give decay=0.95")

    def __str__(self) -> str:
        return f"sparseloco:density={float(self.density)!r},decay={float(self.decay)!r}"

    @property
    def alignment(self) -> int:
        """A block: however a large tensor is cut at multiples of it, blocks have the same values."""
        return SPARSE_BLOCK

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the blocks' magnitudes, of places and of values."""
        return sparse_bytes(numel, self.density)

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Select each block's largest values, and write their places and magnitudes; see :meth:`Codec.encode`."""
        self._check(values, out)
        if values.numel() == 0:
            return
        at_a_time = ROWS if values.device.type == "cpu" else -(-values.numel() // SPARSE_BLOCK)
        selected = [
            _select(rows, kept_values(rows.shape[1], self.density))
            for blocks in _rows(values)
            for rows in torch.split(blocks, at_a_time)
        ]
        levels, places, codes = (torch.cat(each) for each in zip(*selected, strict=True))
        head = levels.view(-1).view(torch.uint8)
        middle = -(-3 * places.numel() // 2)
        out[: head.numel()].copy_(head)
        _pack_places(places, out[head.numel() : head.numel() + middle])
        _pack(codes, out[head.numel() + middle :])

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Write zeros, then the values that were kept; see :meth:`Codec.decode`."""
        self._check(out, data)
        if out.numel() == 0:
            return
        count = kept_in_blocks(out.numel(), self.density)
        head, middle = 4 * -(-out.numel() // SPARSE_BLOCK), -(-3 * count // 2)
        levels = data[:head].clone().view(torch.bfloat16).view(-1, 2).float()  # the data may be unaligned
        places = _unpack_places(data[head : head + middle], count)
        codes = _unpack(data[head + middle :], count)
        kept = codes.bitwise_right_shift(1).float()
        first = start = block = 0
        for rows in _rows(out):
            each = kept_values(rows.shape[1], self.density)
            stop = start + rows.shape[0] * each
            pair = levels[block : block + rows.shape[0]]
            kept[start:stop].view(-1, each).mul_(pair[:, 1:] - pair[:, :1]).add_(pair[:, :1])
            starts = torch.arange(first, first + rows.numel(), SPARSE_BLOCK, device=out.device)
            places[start:stop].view(-1, each).add_(starts.unsqueeze(1))
            first, start, block = first + rows.numel(), stop, block + rows.shape[0]
        kept.mul_(codes.bitwise_and_(1).float().mul_(-2.0).add_(1.0))
        out.zero_().scatter_(0, places, kept)


CHUNK = 2**18
"""Values that are rounded to two bits at a time on a CPU."""

ROWS = 64
"""Blocks of 4096 values that are selected from at a time on a CPU, with 24 bytes of scratch memory for each value."""

STEPS = 4095.0
"""Steps from 0 to a block's largest magnitude in which magnitudes are added up.

Sums of at most 4096 whole numbers up to 4095 are exact in fp32, in whatever order a processor adds.
"""

TINY = 2.0**-126
"""Smallest divisor, a normal fp32, so that no ratio is 0 / 0."""

GROUPED = 16
"""Values of which a largest one is taken first, where few of many are kept."""


def _count_steps(magnitudes: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Turn magnitudes into whole numbers of steps to the largest of each row, in place."""
    return magnitudes.div_(tops.clamp(min=TINY)).mul_(STEPS).round_()


def _choose(
    steps: torch.Tensor,
    counts: torch.Tensor,
    tops: torch.Tensor,
    *,
    out: torch.Tensor,
    is_large: torch.Tensor,
    spare: torch.Tensor,
) -> None:
    """Choose two magnitudes for each row, and which of its values are large.

    :param steps: Whole numbers of steps, a row a block.
    :param counts: How many values of each row count, at least 1; the steps of others are 0.
    :param tops: The largest magnitude of each row.
    :param out: Takes the two magnitudes of each row, the small one first, in bf16.
    :param is_large: Memory like ``steps``; takes 1 for large values, and 0.
    :param spare: Memory like ``steps``, which is overwritten.
    """
    total = steps.sum(1, keepdim=True)
    torch.gt(steps, total / counts, out=is_large)
    above = torch.mul(steps, is_large, out=spare).sum(1, keepdim=True)
    numbers = is_large.sum(1, keepdim=True)
    high = above / numbers.clamp(min=1.0)
    low = (total - above) / (counts - numbers).clamp(min=1.0)
    largest = torch.finfo(torch.bfloat16).max
    out.copy_(torch.cat([low, high], 1).mul_(tops * (1.0 / STEPS)).clamp_(max=largest))


def _select(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each row the two magnitudes, the places of the largest values, and their two bits."""
    # A key has the magnitude (floats have the order of their bits) and the place: no two keys of a row are equal, so
    # the result does not depend on how ties are broken.
    backwards = torch.arange(SPARSE_BLOCK - 1, SPARSE_BLOCK - 1 - rows.shape[1], -1, device=rows.device)
    keys = rows.abs().view(torch.int32).long().bitwise_left_shift_(12).bitwise_or_(backwards)
    best = _largest(keys, count)
    places = (best & (SPARSE_BLOCK - 1)).neg_().add_(SPARSE_BLOCK - 1)
    magnitudes = best.bitwise_right_shift_(12).int().view(torch.float32)
    tops = magnitudes[:, :1].clone()
    steps = _count_steps(magnitudes, tops)
    is_sent = steps > 0
    counts = is_sent.sum(1, keepdim=True).clamp_(min=1).float()
    levels = rows.new_empty(rows.shape[0], 2, dtype=torch.bfloat16)
    is_large = torch.empty_like(steps)
    _choose(steps, counts, tops, out=levels, is_large=is_large, spare=torch.empty_like(steps))
    codes = is_large.mul_(2.0).add_(rows.gather(1, places) < 0).byte()
    # In place of a value that is no step large, the block's largest one is written again.
    places = torch.where(is_sent, places, places[:, :1])
    codes = torch.where(is_sent, codes, codes[:, :1])
    return levels, places.view(-1), codes.view(-1)


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` largest keys of each row, falling; no two keys of a row are equal."""
    numel = keys.shape[1]
    if numel % GROUPED == 0 and 2 * count * GROUPED <= numel:
        # A key is among the largest only if its group's largest one is among the largest of groups.
        groups = keys.view(-1, GROUPED, numel // GROUPED)
        chosen = torch.topk(groups.amax(1), count, dim=1, sorted=False).indices
        keys = groups.gather(2, chosen.unsqueeze(1).expand(-1, GROUPED, -1)).flatten(1)
    return torch.topk(keys, count, dim=1).values


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the whole blocks as a matrix, then the short last one, each if there is any."""
    whole = flat.numel() // SPARSE_BLOCK * SPARSE_BLOCK
    found = [flat[:whole].view(-1, SPARSE_BLOCK), flat[whole:].unsqueeze(0)]
    return [rows for rows in found if rows.numel()]


def _blocks(flat: torch.Tensor, each: torch.Tensor, block: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the whole blocks as rows, then the short last one, each with its rows of ``each``."""
    whole = flat.numel() // block
    found = [(flat[: whole * block].view(whole, block), each[:whole])]
    if flat.numel() > whole * block:
        found.append((flat[whole * block :].unsqueeze(0), each[whole:]))
    return found if whole else found[1:]


def _pack(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write numbers from 0 to 3 (uint8) four to a byte: one of each quarter of them; ``out`` at any offset."""
    quarter = out.numel()
    out.copy_(codes[:quarter])
    for place in (1, 2, 3):
        part = codes[place * quarter : (place + 1) * quarter]
        out[: part.numel()].bitwise_or_(part << 2 * place)


def _unpack(data: torch.Tensor, count: int) -> torch.Tensor:
    """Read the result of :func:`_pack`, as uint8."""
    quarters = data.new_empty(4, data.numel())
    for place, quarter in enumerate(quarters):
        torch.bitwise_right_shift(data, 2 * place, out=quarter)
    return quarters.bitwise_and_(3).view(-1)[:count]


def _pack_places(places: torch.Tensor, out: torch.Tensor) -> None:
    """Write numbers of 12 bits: the lower 8 of all, then the upper 4 of two in a byte, one of each half of them."""
    count = places.numel()
    half = -(-count // 2)
    out[:count].copy_(places & 255)
    upper = places >> 8
    rest = count - half
    out[count:].copy_(upper[:half])
    out[count : count + rest].bitwise_or_((upper[half:] << 4).byte())


def _unpack_places(data: torch.Tensor, count: int) -> torch.Tensor:
    """Read the result of :func:`_pack_places`, as int64."""
    half = -(-count // 2)
    upper = torch.cat([data[count:] & 15, torch.bitwise_right_shift(data[count : 2 * count - half], 4)])
    return upper.long().bitwise_left_shift_(8).bitwise_or_(data[:count])
