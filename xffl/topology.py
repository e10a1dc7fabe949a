"""Rank arithmetic: who stands where, who talks to whom, for worlds of any size, without torch.

Everything here is a pure function of the world size, the cells' sizes, the replica size and a rank. Coordinates cost
``O(log C)`` and peers ``O(C)`` for ``C`` cells, so one rank of a very large federation never pays for the others.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, SupportsIndex

from xffl.checks import integer, shown
from xffl.errors import TopologyError

__all__ = ["REPLICATE_AXIS", "Coordinates", "DataPlace", "RankGroup", "Topology", "cells_text", "ranks_text"]

MAX_RANKS = 1_000_000
"""The most ranks of a world. A larger number is a mistake: to write out the cells of a thousand million ranks takes
minutes and all memory.
"""
REPLICATE_AXIS = "dp_replicate"
"""The axis of a cell's shape that counts replicas; all other axes cut the model."""


class Coordinates(NamedTuple):
    """Where one rank stands.

    ``shard`` and ``replica`` are counted inside the cell; without HSDP every cell is one replica, so ``replica`` is 0.
    """

    rank: int
    cell: int
    local_rank: int
    replica: int
    shard: int
    is_sender: bool
    receive_from: int | None


class RankGroup(NamedTuple):
    """One process group as one rank sees it.

    ``member`` is False for a placeholder: a group of the rank alone, made so that all ranks make equally many groups.
    """

    kind: str
    ranks: tuple[int, ...]
    member: bool = True


@dataclass(frozen=True)
class Topology:
    """Cells, replicas and shards of a world.

    :param world_size: Number of all ranks, at least 1.
    :param federated_sizes: Ranks of each cell, in rank order, summing to ``world_size``; a single number means equal
        cells of that size; ``None`` means one cell of all ranks.
    :param replica_size: Ranks that together hold one copy of the model (the ``hsdp`` argument); it divides every
        cell's size. ``None`` means that each cell is one replica.
    :param cell_shape: Sizes of the axes of the mesh inside a cell, outermost first, for cells with tensor, context or
        pipeline parallelism. One axis is ``dp_replicate``, where -1 means "whatever the cell's size leaves".
    :raises TopologyError: if the sizes do not fit each other.
    """

    world_size: int
    federated_sizes: tuple[int, ...] | int | None = None
    replica_size: int | None = None
    cell_shape: Mapping[str, int] | tuple[tuple[str, int], ...] | None = None
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _run: int = field(init=False, repr=False, compare=False)
    """Shards that stand next to each other in rank order before the next replica begins."""

    def __post_init__(self) -> None:
        world = _size("world size", self.world_size, "start at least one process")
        sizes, offsets = _cell_sizes(world, self.federated_sizes)
        replica = self.replica_size
        if replica is not None:
            replica = _size("replica size (hsdp)", replica, "give the ranks that hold one copy of the model")
        shape = None if self.cell_shape is None else _shape(self.cell_shape)
        run = 0
        if shape is not None:
            replica, run = _replica_of_shape(shape, replica)
        if replica is not None:
            _check_replicas(sizes, replica, shape)
        vars(self).update(world_size=world, federated_sizes=sizes, replica_size=replica, cell_shape=shape)
        vars(self).update(sizes=sizes, offsets=offsets, _run=run)

    # Sizes ------------------------------------------------------------------------------------------------------------

    @property
    def cells(self) -> int:
        """Number of cells, ``C``."""
        return len(self.sizes)

    @property
    def is_hsdp(self) -> bool:
        """Whether cells consist of replicas of a given size."""
        return self.replica_size is not None

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """Replicas in each cell, ``(R_0, ..., R_{C-1})``."""
        if self.replica_size is None:
            return (1,) * self.cells
        return tuple(size // self.replica_size for size in self.sizes)

    @property
    def is_cut_alike(self) -> bool:
        """Whether every cell cuts the model into the same number of shards."""
        return self.replica_size is not None or self.sizes.count(self.sizes[0]) == self.cells

    def replicas(self, cell: int) -> int:
        """Count the replicas in a cell, ``R_c``."""
        size = self.sizes[self._cell(cell)]
        return 1 if self.replica_size is None else size // self.replica_size

    def shards(self, cell: int) -> int:
        """Count the shards that a cell cuts the model into."""
        size = self.sizes[self._cell(cell)]
        return size if self.replica_size is None else self.replica_size

    # Coordinates ------------------------------------------------------------------------------------------------------

    def cell_of(self, rank: int) -> int:
        """Return the cell that a rank belongs to."""
        return bisect_right(self.offsets, self._rank(rank)) - 1

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank stands, and whether it sends its shard in a round or from whom it receives it."""
        rank = self._rank(rank)
        cell = self.cell_of(rank)
        local = rank - self.offsets[cell]
        replicas, shards = self.replicas(cell), self.shards(cell)
        run = self._run or shards
        outer, rest = divmod(local, replicas * run)
        replica, inner = divmod(rest, run)
        shard = outer * run + inner
        sender = self.sender(cell, shard)
        return Coordinates(
            rank,
            cell=cell,
            local_rank=local,
            replica=replica,
            shard=shard,
            is_sender=rank == sender,
            receive_from=None if rank == sender else sender,
        )

    def rank_of(self, cell: int, replica: int, shard: int) -> int:
        """Return the rank that holds a shard in a replica of a cell, all from 0; the inverse of :meth:`coordinates`."""
        cell = self._cell(cell)
        replicas, shards = self.replicas(cell), self.shards(cell)
        replica = integer("replica", replica, 0, replicas - 1, hint="count from 0", error=TopologyError)
        shard = integer("shard", shard, 0, shards - 1, hint="count from 0", error=TopologyError)
        run = self._run or shards
        outer, inner = divmod(shard, run)
        return self.offsets[cell] + (outer * replicas + replica) * run + inner

    def sender(self, cell: int, shard: int, turn: int = 0) -> int:
        """Return the rank that exchanges a shard with the other cells; with a turn, where its holders take turns.

        Senders lie on the diagonal (shard ``s`` in replica ``s % R_c``), so they spread over nodes and network cards.
        """
        return self.rank_of(cell, (shard + turn) % self.replicas(cell), shard)

    def senders(self, cell: int) -> tuple[int, ...]:
        """Return the senders of a cell, by shard."""
        return tuple(self.sender(cell, shard) for shard in range(self.shards(cell)))

    # Groups -----------------------------------------------------------------------------------------------------------

    def federation(self, cell: int) -> tuple[int, ...]:
        """Return all ranks of a cell."""
        cell = self._cell(cell)
        return tuple(range(self.offsets[cell], self.offsets[cell + 1]))

    def shard_group(self, cell: int, replica: int) -> tuple[int, ...]:
        """Return the ranks of one replica, by shard."""
        return tuple(self.rank_of(cell, replica, shard) for shard in range(self.shards(cell)))

    def replica_group(self, cell: int, shard: int) -> tuple[int, ...]:
        """Return the ranks of a cell that hold a shard, by replica."""
        return tuple(self.rank_of(cell, replica, shard) for replica in range(self.replicas(cell)))

    def federated_group(self, shard: int) -> tuple[int, ...]:
        """Return the ranks that exchange a shard: its sender in each cell, or all ranks where cells are cut unlike."""
        if not self.is_cut_alike:
            return tuple(range(self.world_size))
        # A sender's place in its cell follows from the cell's size, which is fast for very many cells.
        cells = dict(zip(self.sizes, range(self.cells), strict=True))
        places = {size: self.sender(cell, shard) - self.offsets[cell] for size, cell in cells.items()}
        return tuple(map(operator.add, self.offsets, map(places.__getitem__, self.sizes)))

    def groups_of(self, rank: int) -> tuple[RankGroup, ...]:
        """Return the process groups that a rank makes, in creation order: the same kinds on every rank.

        These are ``federation``, then with HSDP ``shard`` and ``replica``, then ``federated``.
        """
        at = self.coordinates(rank)
        groups = [RankGroup("federation", self.federation(at.cell))]
        if self.is_hsdp:
            groups.append(RankGroup("shard", self.shard_group(at.cell, at.replica)))
            groups.append(RankGroup("replica", self.replica_group(at.cell, at.shard)))
        if at.is_sender:
            groups.append(RankGroup("federated", self.federated_group(at.shard)))
        else:
            groups.append(RankGroup("federated", (at.rank,), member=False))
        return tuple(groups)

    def groups(self) -> Iterator[RankGroup]:
        """Yield every group of the world once, kind by kind in creation order; placeholders are left out."""
        cells = range(self.cells)
        yield from (RankGroup("federation", self.federation(c)) for c in cells)
        if self.is_hsdp:
            yield from (RankGroup("shard", self.shard_group(c, k)) for c in cells for k in range(self.replicas(c)))
            yield from (RankGroup("replica", self.replica_group(c, s)) for c in cells for s in range(self.shards(c)))
        shards = range(self.shards(0)) if self.is_cut_alike else range(1)
        yield from (RankGroup("federated", self.federated_group(s)) for s in shards)

    # Checks -----------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        return integer("rank", rank, 0, self.world_size - 1, hint="count from 0", error=TopologyError)

    def _cell(self, cell: int) -> int:
        return integer("cell", cell, 0, self.cells - 1, hint="count from 0", error=TopologyError)


@dataclass(frozen=True)
class DataPlace:
    """Where a rank's data lies: the cells that samples are dealt out to, and the rank's number among their ranks.

    ``state.data_place`` is the one of this process, in whatever way it was started. A plan or a test, which has no
    state, makes its own.

    :param topology: All cells of the federation, also those that are jobs of their own.
    :param rank: The rank's number in it, counted over the ranks of all cells.
    :param job: The same in this job alone, where other cells (or replica groups) are jobs of their own: these are the
        ranks that a collective reaches. ``None`` where the job has all cells.
    :raises TopologyError: if the rank is outside the topology.
    """

    topology: Topology
    rank: int
    job: DataPlace | None = None

    def __post_init__(self) -> None:
        self.topology.cell_of(self.rank)

    @property
    def cell(self) -> int:
        """The number of the rank's cell among all cells of the federation."""
        return self.topology.cell_of(self.rank)

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return self.topology.cells

    @property
    def cell_rank(self) -> int:
        """The rank's number among the ranks of its cell."""
        return self.rank - self.topology.offsets[self.cell]

    @property
    def cell_size(self) -> int:
        """How many ranks the cell has."""
        return self.topology.sizes[self.cell]

    @property
    def in_job(self) -> DataPlace:
        """The place among the ranks of this job, which a collective reaches."""
        return self if self.job is None else self.job


def _size(what: str, value: object, knob: str) -> int:
    size = integer(what, value, hint=knob, error=TopologyError)
    if size > MAX_RANKS:
        raise TopologyError(f"{what} must be at most {MAX_RANKS}, got {shown(size)}; {knob}")
    return size


def _cell_sizes(world: int, sizes: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of each cell, and where each begins, with the world's end."""
    if sizes is None:
        return (world,), (0, world)
    knob = f"give sizes that sum to {world}"
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, (SupportsIndex, str))
    given: tuple[Any, ...] = tuple(sizes) if is_list else (sizes,)  # type: ignore[arg-type]
    if not given:
        raise TopologyError(f"federated sizes () name no cell; {knob}")
    # The common case is checked at once, which is fast for very many cells.
    is_plain = set(map(type, given)) == {int} and min(set(given)) > 0 and max(set(given)) <= MAX_RANKS
    cells = given if is_plain else tuple(_size("federated size", size, knob) for size in given)
    if len(cells) == 1:
        if world % cells[0]:
            raise TopologyError(
                f"federated size {cells[0]} does not divide the world of {world} ranks into equal cells; give a "
                f"divisor of {world}, or one size for each cell that sum to {world}"
            )
        return (cells[0],) * (world // cells[0]), tuple(range(0, world + 1, cells[0]))
    offsets = tuple([0, *accumulate(cells)])  # noqa: C409 - a list grows faster
    if offsets[-1] != world:
        shown = cells if len(cells) <= 16 else f"{cells[:16]} and {len(cells) - 16} more"
        raise TopologyError(f"federated sizes {shown} sum to {offsets[-1]}, but the world has {world} ranks; {knob}")
    return cells, offsets


def _shape(shape: Mapping[str, int] | tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    axes = tuple(shape.items() if isinstance(shape, Mapping) else shape)
    knob = "give the ranks along that axis"
    names = [name for name, _ in axes]
    if REPLICATE_AXIS not in names or len(set(names)) != len(names):
        raise TopologyError(f"cell shape {dict(axes)} needs each axis once, {REPLICATE_AXIS!r}, too; -1 derives it")
    return tuple(
        (name, -1 if name == REPLICATE_AXIS and size == -1 else _size(f"cell shape's {name}", size, knob))
        for name, size in axes
    )


def _replica_of_shape(shape: tuple[tuple[str, int], ...], replica_size: int | None) -> tuple[int, int]:
    """Return the ranks of a replica and the shards that stand next to each other."""
    at = [name for name, _ in shape].index(REPLICATE_AXIS)
    run = prod(size for _, size in shape[at + 1 :])
    replica = run * prod(size for _, size in shape[:at])
    if replica_size not in (None, replica):
        raise TopologyError(f"replica size (hsdp) {replica_size} differs from cell shape {dict(shape)}; leave one out")
    return replica, run


def _check_replicas(sizes: tuple[int, ...], replica: int, shape: tuple[tuple[str, int], ...] | None) -> None:
    asked = -1 if shape is None else dict(shape)[REPLICATE_AXIS]
    for size in dict.fromkeys(sizes):
        cell = sizes.index(size)
        if size % replica:
            raise TopologyError(
                f"replica size (hsdp) {replica} does not divide cell {cell} of {size} ranks; give one that divides all"
            )
        if asked not in (-1, size // replica):
            raise TopologyError(
                f"cell {cell} of {size} ranks has {size // replica} replicas of {replica}, but the cell shape asks for "
                f"{REPLICATE_AXIS}={asked}; give -1 to derive it"
            )


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks the short way, such as ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {text}"


def cells_text(cells: Collection[int]) -> str:
    """Write cells by their numbers, such as ``cells 0, 1, 3``."""
    return f"cell{'s' if len(cells) != 1 else ''} {', '.join(map(str, cells))}"
