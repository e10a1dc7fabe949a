"""The votes of a round: every rank tells every rank a few numbers, and all draw the same conclusion from them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.engine.groups import Progress, start_moves
from xffl.distributed.consistency import control_device
from xffl.errors import ConfigError, RoundError
from xffl.topology import Topology

__all__ = [
    "AT_ONCE",
    "COMMIT_PHASE",
    "NO_ALPHA",
    "RoundStatus",
    "all_gather_status",
    "by_cell",
    "cell_weights",
    "check_rounds",
    "checked_number",
    "checked_weight",
    "next_number",
]


AT_ONCE = -2.0
"""A result takes the place of the old values."""

NO_ALPHA = -1.0
"""A result is merged so that the steps made meanwhile stay."""

TAG = 7_001
"""Tells a vote's messages from those that a caller sends over the same group."""

COMMIT_PHASE = 0.5
"""What the number of a round is raised by in the vote on its outcome."""


_numbers = [0]
"""The highest number that an aggregator of this process has."""


class RoundStatus(NamedTuple):
    """What one rank says at the opening or the close of a round.

    :param round: Number of the round that the rank believes to be in.
    :param weight: Its count; 1 where cells count alike.
    :param is_uniform: Whether it gave no count.
    :param is_absent: Whether it has nothing to contribute any more.
    :param is_finished: Whether its cell has no more steps to make.
    :param is_nonfinite: Whether it holds a value that is not finite.
    :param is_failed: Whether it cannot go on; the reason is gathered afterwards.
    :param is_encoding: Whether it knows the agreed state that lossy codecs start from.
    :param is_moderate: Whether differences between its values and others like them stay in fp32.
    :param arithmetic: What :func:`xffl.aggregation.mean.arithmetic_of` says here.
    :param merging: How its cell writes the result: :data:`AT_ONCE`, :data:`NO_ALPHA`, or the part of a local value that
        stays.
    :param norm: Squared L2 norm of its part of the cell's update, where that is measured.
    :param steps: Effective local steps of its cell since the last round.
    :param seconds: Seconds that a local step takes here; 0 where nobody has measured.
    :param attempt: The next number of masks that it can use in a secure sum.
    :param aggregator: The number of the aggregator whose round it is, see :func:`next_number`.
    """

    round: float
    weight: float = 0.0
    is_uniform: bool = False
    is_absent: bool = False
    is_finished: bool = False
    is_nonfinite: bool = False
    is_failed: bool = False
    is_encoding: bool = False
    is_moderate: bool = False
    arithmetic: float = 0.0
    merging: float = AT_ONCE
    norm: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0
    attempt: float = 0.0
    aggregator: float = 0.0


def all_gather_status(
    status: RoundStatus,
    topology: Topology,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    within_s: float = math.inf,
) -> list[RoundStatus]:
    """Give this rank's status and read everybody's.

    Collective over the world: 128 bytes a rank go up a binary tree inside each cell, from each cell's first rank to
    those of the others, and down again. The slow link is crossed once, by all cells at the same time, where an
    all-gather over the world would cross it ring step by ring step.

    :param status: This rank's status.
    :param topology: The federation.
    :param group: A group of all ranks; by default the world.
    :param first: The rank of the world that the topology's ranks are counted from.
    :param within_s: Seconds that the statuses may take where NCCL carries them; gloo has its own.
    :return: The statuses, by rank.
    :raises RuntimeError: if they do not come.
    """
    device, rank = control_device(group), dist.get_rank() - first
    cell = topology.cell_of(rank)
    start, stop = topology.offsets[cell], topology.offsets[cell + 1]
    place = rank - start
    children = [first + start + child for child in (2 * place + 1, 2 * place + 2) if start + child < stop]
    parent = first + start + (place - 1) // 2
    table = torch.zeros(topology.world_size, len(status), dtype=torch.float64, device=device)
    table[rank] = torch.tensor(status, dtype=torch.float64, device=device)
    home = table[start:stop]
    below = torch.zeros(len(children), *home.shape, dtype=torch.float64, device=device)
    _swap({}, dict(zip(children, below, strict=True)), group)
    home += below.sum(0)  # each row is zero in all tables but one
    if rank == start:
        others = [other for other in range(topology.cells) if other != cell]
        rows = {other: table[topology.offsets[other] : topology.offsets[other + 1]] for other in others}
        firsts = {first + topology.offsets[other]: row for other, row in rows.items()}
        _swap(dict.fromkeys(firsts, home), firsts, group)
    else:
        _swap({parent: home}, {}, group)
        _swap({}, {parent: table}, group)
    _swap(dict.fromkeys(children, table), {}, group)
    if device.type == "cuda":
        Progress(device, within_s).drain()
    return [_status_of_row(*row) for row in table.tolist()]


def _status_of_row(number: float, weight: float, *rest: float) -> RoundStatus:
    flags = RoundStatus._fields.index("arithmetic") - 2
    return RoundStatus(number, weight, *map(bool, rest[:flags]), *rest[flags:])


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


def next_number(group: dist.ProcessGroup | None) -> int:
    """Return a number that tells an aggregator from all others that these ranks have.

    Collective over the group: one all-reduce of 8 bytes.

    :param group: The ranks that the aggregator joins; by default the world.
    :return: The number, the same on all of them.
    """
    highest = torch.tensor(_numbers[0] + 1, dtype=torch.int64, device=control_device(group))
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    _numbers[0] = int(highest)
    return _numbers[0]


def check_rounds(statuses: Sequence[RoundStatus], topology: Topology) -> None:
    """Raise, on all ranks alike, where the ranks are not at the same point of the same round.

    :param statuses: The statuses, by rank.
    :param topology: The federation.
    :raises RoundError: if they differ in the aggregator, the round, in knowing the codecs' state, or within a cell in
        how they merge, or between cells in their ``alpha``.
    """
    called = {status.aggregator: rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(called) > 1:
        shown = ", ".join(f"rank {rank} of number {int(number)}" for number, rank in sorted(called.items()))
        raise RoundError(
            f"the ranks are in rounds of different aggregators, counted as they were made ({shown}); call those of "
            "several models in the same order on every rank"
        )
    found = {status.round: rank for rank, status in reversed(list(enumerate(statuses)))}
    if len(found) > 1:
        shown = ", ".join(
            f"rank {rank} {'at the end of' if number % 1 else 'in'} round {int(number)}"
            for number, rank in sorted(found.items())
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
        if len(ways := {status.merging for status in of_cell if not status.is_failed}) > 1:
            raise RoundError(
                f"the ranks of cell {cell} merge in different ways ({sorted(ways)}, where {AT_ONCE:g} is aggregate and "
                f"{NO_ALPHA:g} no alpha); call the same on all of them"
            )
    # A cell that has finished takes the result at once, while others go on.
    alphas = {status.merging for status in statuses if not status.is_failed} - {AT_ONCE}
    if len(alphas) > 1:
        raise RoundError(
            f"the cells merge with different alphas ({sorted(alphas)}, where {NO_ALPHA:g} is none); give the same in "
            "all of them"
        )


def by_cell(values: Sequence[float], topology: Topology, of: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Fold what each rank said into one number for each cell; pure.

    :param values: One for each rank.
    :param topology: The federation.
    :param of: Makes one number of a cell's.
    :return: One for each cell.
    """
    return tuple(of([values[rank] for rank in topology.federation(cell)]) for cell in range(topology.cells))


def checked_weight(weight: object) -> float:
    """Return a rank's count as a float.

    :param weight: A real number or a tensor of one element.
    :return: The count.
    :raises ConfigError: if it is none, negative or not finite.
    """
    return checked_number("weight", weight, "give this rank's count of samples or tokens, or None")


def checked_number(what: str, value: object, knob: str) -> float:
    """Return what a rank says of itself as a float.

    :param what: What it is, for the message.
    :param value: A real number or a tensor of one element.
    :param knob: What to do about a wrong one.
    :return: The number.
    :raises ConfigError: if it is none, negative or not finite.
    """
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

    :param statuses: The statuses, by rank.
    :param topology: The federation.
    :return: The weights, by cell.
    :raises ConfigError: if some ranks gave a count and others none, or a sum is not finite.
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
