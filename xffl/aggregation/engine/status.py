"""The votes of a round: every rank tells every rank a few numbers, and all draw the same conclusion from them."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.engine.groups import Progress, start_moves
from xffl.costs import STATUS_BYTES
from xffl.distributed.consistency import control_device
from xffl.errors import ConfigError, RoundError
from xffl.topology import Topology

__all__ = [
    "MergeMode",
    "RoundStatus",
    "VotePhase",
    "all_gather_status",
    "by_cell",
    "cell_weights",
    "check_rounds",
    "checked_number",
    "checked_weight",
]


TAG = 7_001
"""Tells a vote's messages from those that a caller sends over the same group."""


class VotePhase(IntEnum):
    """The two votes of a round (two-phase commit)."""

    PREPARE = 0  # whether the round takes place, and what each cell counts for
    COMMIT = 1  # whether all ranks have the result


class MergeMode(IntEnum):
    """How a rank writes the result of a round into its model."""

    REPLACE = 0  # it takes the place of the old values
    BLEND = 1  # alpha * local + (1 - alpha) * result, of a round that went on behind local steps
    KEEP_STEPS = 2  # result + (local - copy): the steps made meanwhile stay


class RoundStatus(NamedTuple):
    """What one rank says in one vote of a round; the fields are in the order of :data:`PACKED`."""

    round: int  # number of the round that the rank believes to be in
    aggregator: int = 0  # number of the aggregator whose round it is, see consensus.RoundCoordinator
    attempt: int = 0  # the next number of masks that it can use in a secure sum
    weight: float = 0.0  # its count; 1 where cells count alike
    arithmetic: float = 0.0  # xffl.aggregation.mean.arithmetic_of, of this rank
    alpha: float = 0.0  # the part of a local value that stays, with MergeMode.BLEND
    norm: float = 0.0  # squared L2 norm of its part of the cell's update, where that is measured
    steps: float = 0.0  # effective local steps of its cell since the last round
    seconds: float = 0.0  # seconds of a local step here; 0 where nobody has measured
    is_uniform: bool = False  # it gave no count
    is_absent: bool = False  # it has nothing to contribute any more
    is_finished: bool = False  # its cell has no more steps to make
    is_nonfinite: bool = False  # it holds a value that is not finite
    is_failed: bool = False  # it cannot go on; the reason is gathered afterwards
    is_encoding: bool = False  # it knows the agreed state that lossy codecs start from
    squares_fit_fp32: bool = False  # differences between its values and others like them stay in fp32
    phase: VotePhase = VotePhase.PREPARE
    merge: MergeMode = MergeMode.REPLACE

    @property
    def merge_text(self) -> str:
        """How it writes the result, for messages."""
        return {MergeMode.REPLACE: "aggregate", MergeMode.KEEP_STEPS: "no alpha"}.get(self.merge, f"alpha={self.alpha}")


# The bytes do not depend on the machine; the padding leaves room for more fields at the same price.
_FIELDS = "<3q6d7?2B"
PACKED = struct.Struct(f"{_FIELDS}{STATUS_BYTES - struct.calcsize(_FIELDS)}x")
"""A status as bytes: three integers, six numbers, seven flags, two enums."""


def all_gather_status(
    status: RoundStatus,
    topology: Topology,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    within_s: float = math.inf,
) -> list[RoundStatus]:
    """Give this rank's status and return everybody's, by rank.

    Collective over ``group``, all ranks of the topology, whose first rank is ``first`` of the world: 128 bytes a rank
    go up a binary tree inside each cell, from each cell's first rank to those of the others, and down again. The slow
    link is crossed once, by all cells at the same time, where an all-gather over the world would cross it ring step by
    ring step. Over NCCL it raises RuntimeError after ``within_s`` seconds; gloo has its own timeout.
    """
    device, rank = control_device(group), dist.get_rank() - first
    cell = topology.cell_of(rank)
    start, stop = topology.offsets[cell], topology.offsets[cell + 1]
    place = rank - start
    children = [first + start + child for child in (2 * place + 1, 2 * place + 2) if start + child < stop]
    parent = first + start + (place - 1) // 2
    table = torch.zeros(topology.world_size, STATUS_BYTES, dtype=torch.uint8, device=device)
    table[rank] = torch.tensor(list(PACKED.pack(*status)), dtype=torch.uint8, device=device)
    own_cell = table[start:stop]
    below = torch.zeros(len(children), *own_cell.shape, dtype=torch.uint8, device=device)
    _swap({}, dict(zip(children, below, strict=True)), group)
    own_cell += below.sum(0, dtype=torch.uint8)  # each row is zero in all tables but one
    if rank == start:
        others = [other for other in range(topology.cells) if other != cell]
        rows = {other: table[topology.offsets[other] : topology.offsets[other + 1]] for other in others}
        firsts = {first + topology.offsets[other]: row for other, row in rows.items()}
        _swap(dict.fromkeys(firsts, own_cell), firsts, group)
    else:
        _swap({parent: own_cell}, {}, group)
        _swap({}, {parent: table}, group)
    _swap(dict.fromkeys(children, table), {}, group)
    if device.type == "cuda":
        Progress(device, within_s).drain()
    return [
        RoundStatus._make([*fields, VotePhase(phase), MergeMode(merge)])
        for *fields, phase, merge in PACKED.iter_unpack(table.cpu().numpy().tobytes())
    ]


def _swap(
    send: Mapping[int, torch.Tensor], receive: Mapping[int, torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send to some ranks of the world and receive from some, at the same time."""
    arriving, leaving = ([(values, rank) for rank, values in by_rank.items()] for by_rank in (receive, send))
    try:
        for work in start_moves(arriving, leaving, group, TAG):
            work.wait()
    except RuntimeError as broken:
        raise RuntimeError(f"{broken}, in a vote with ranks {sorted({*send, *receive})}") from broken


def check_rounds(statuses: Sequence[RoundStatus], topology: Topology) -> None:
    """Raise RoundError, on all ranks alike, where the ranks are not at the same point of the same round.

    That is where they differ in the aggregator, the round, in knowing the codecs' state, or within a cell in how they
    merge, or between cells in their ``alpha``.
    """
    called = {status.aggregator: rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(called) > 1:
        shown = ", ".join(f"rank {rank} of number {number}" for number, rank in sorted(called.items()))
        raise RoundError(
            f"the ranks are in rounds of different aggregators, counted as they were made ({shown}); call those of "
            "several models in the same order on every rank"
        )
    points = {(status.round, status.phase): rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(points) > 1:
        shown = ", ".join(
            f"rank {rank} {'at the end of' if phase is VotePhase.COMMIT else 'in'} round {number}"
            for (number, phase), rank in sorted(points.items())
        )
        raise RoundError(f"the ranks are in different rounds ({shown}); call aggregate equally often on every rank")
    if len({status.is_encoding for status in statuses}) > 1:
        without = [rank for rank, status in enumerate(statuses) if not status.is_encoding]
        raise RoundError(
            f"ranks {without} do not know the state that the codec starts from and others do; load the aggregator's "
            "state dict on every rank or on none"
        )
    for cell in range(topology.cells):
        # What a rank says that cannot take part does not count; it tells why afterwards.
        of_cell = [statuses[rank] for rank in topology.federation(cell)]
        if len(modes := {status.merge_text for status in of_cell if not status.is_failed}) > 1:
            raise RoundError(
                f"the ranks of cell {cell} merge in different ways ({', '.join(sorted(modes))}); call the same on all "
                "of them"
            )
    # A cell that has finished takes the result at once, while others go on.
    going_on = (one for one in statuses if not one.is_failed and one.merge is not MergeMode.REPLACE)
    alphas = {status.merge_text for status in going_on}
    if len(alphas) > 1:
        raise RoundError(
            f"the cells merge with different alphas ({', '.join(sorted(alphas))}); give the same in all of them"
        )


def by_cell(values: Sequence[float], topology: Topology, of: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Fold one value of each rank into one number for each cell; pure."""
    return tuple(of([values[rank] for rank in topology.federation(cell)]) for cell in range(topology.cells))


def checked_weight(weight: object) -> float:
    """Return a rank's count, a real number or a tensor of one element, as a float; raise ConfigError otherwise."""
    return checked_number("weight", weight, "give this rank's count of samples or tokens, or None")


def checked_number(what: str, value: object, knob: str) -> float:
    """Return a number of a rank as a float; raise ConfigError where it is none, negative or not finite."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{what} {value!r} is no number; {knob}")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{what} {value} is negative or not finite; {knob}")
    return float(value)


def cell_weights(statuses: Sequence[RoundStatus], topology: Topology) -> tuple[float, ...]:
    """Add the ranks' counts up to one weight for each cell.

    Local and deterministic; all ranks get the same. Where no rank gave a count, a cell counts 1, or 0 once it has
    nothing to contribute.
    """
    present = [(rank, status) for rank, status in enumerate(statuses) if not status.is_absent]
    uniform = [rank for rank, status in present if status.is_uniform]
    if uniform and len(uniform) < len(present):
        raise ConfigError(f"ranks {uniform} gave no weight and others gave one; give a weight on every rank or on none")
    weights = []
    for cell in range(topology.cells):
        counts = [statuses[rank].weight for rank in topology.federation(cell)]
        weights.append(max(counts) if uniform else sum(counts))
    if not math.isfinite(sum(weights)):
        raise ConfigError(f"the weights of the cells {tuple(weights)} have no finite sum; give smaller counts")
    return tuple(weights)
