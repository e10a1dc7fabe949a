"""A world that is one cell of a federation whose other cells are other worlds: what a state knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from xffl.distributed.parameters import ElasticParameters
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.errors import StateError
from xffl.journal.cell import CellJournal
from xffl.topology import REPLICATE_AXIS, DataPlace, Topology

__all__ = ["CellWorld"]


@dataclass(frozen=True)
class CellWorld:
    """The place of a world among all cells; a state without one is that of a whole job.

    Without ``isolated`` the world is a job of its own, and rounds go over files or, with ``elastic``, among the cells
    that are there.
    """

    cell: int
    """The number of the cell"""
    sizes: tuple[int, ...]
    """The ranks of all cells"""
    elastic: ElasticParameters | None = None
    """How rounds are made with cells that may be lost"""
    journal: CellJournal | None = field(default=None, compare=False)
    """The run's journal, on rank 0 of an elastic cell"""
    isolated: IsolatedCell | None = None
    """The rank's place in its job, where all cells are in one"""
    group: CrossWorldGroup | None = field(default=None, compare=False)
    """All ranks of that job, by the job's numbers, until this one leaves them"""

    @property
    def lone_cell(self) -> tuple[int, tuple[int, ...]] | None:
        """The cell and the ranks of all, where the cell is a job."""
        return (self.cell, self.sizes) if self.isolated is None else None

    @property
    def job_group(self) -> CrossWorldGroup | None:
        """The group of all ranks of the job, where it has other worlds than this one.

        :raises StateError: if this rank has left the job.
        """
        if self.isolated is not None and self.group is None:
            raise StateError("this rank has left the other cells of its job; use the state inside its session")
        return self.group

    def job_rank(self, rank: int | None) -> int | None:
        """Return the number in the job of a rank of this world, which is that of this process."""
        return rank if self.isolated is None else self.isolated.rank

    def job_topology(self, world: Topology) -> Topology:
        """Return the cells of the whole job, of which this world has one."""
        return world if self.isolated is None else self._all_cells(world)

    def data_place(self, job: DataPlace) -> DataPlace:
        """Return a rank's place among the ranks of all cells, as it would be in one world."""
        dealt = self._all_cells(job.topology)
        rank = dealt.offsets[self.cell] + job.rank
        return DataPlace(dealt, rank, job)

    def left(self) -> CellWorld:
        """Close the connections to the other cells of the job, and return what is left; local."""
        if self.group is None:
            return self
        self.group.end_waits()
        self.group.close()
        return replace(self, group=None)

    def _all_cells(self, world: Topology) -> Topology:
        """Return the cells of other worlds with this one's, as they would be in one world."""
        replica = world.replica_size  # other cells may have another layout
        if replica is not None and any(size % replica for size in self.sizes):
            replica = None
        shape = world.cell_shape
        has_one_shape = self.isolated is not None and len(set(self.sizes)) == 1
        if shape is not None and not has_one_shape:  # cells of other sizes have other numbers of replicas
            shape = tuple((name, -1 if name == REPLICATE_AXIS else size) for name, size in dict(shape).items())
        return Topology(sum(self.sizes), self.sizes, replica, shape)
