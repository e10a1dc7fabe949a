"""A job that is one cell of several, each of them a job of its own: rounds go over files, or over a lighthouse."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xffl.cluster.lighthouse.address import meeting_timeout_of, parse_lighthouse, restarts_of
from xffl.cluster.over_files import read_over_files
from xffl.cluster.run_token import token_of, warn_without_token
from xffl.cluster.sizes import Federation
from xffl.cluster.sizes_text import parse_cell
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState, set_cell_world
from xffl.distributed.failures.faults import arm as arm_fault
from xffl.distributed.parameters import ElasticParameters
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.distributed.startup.mistakes import own_place, raise_at_meeting
from xffl.errors import ConfigError, XfflError
from xffl.journal.cell import CellJournal
from xffl.journal.place import derive_journal, open_journal, read_journal_variable
from xffl.journal.records import PATIENCE_S, JournalUnproven

__all__ = ["LoneCell", "find_lone_cell", "read_lone_cell"]

PATIENT_PART = 0.1
"""The most of a session's timeout for which the leader asks the journal, while the other ranks of its cell wait"""


@dataclass(frozen=True)
class LoneCell:
    """Which cell a job is asked to be."""

    cell: int
    cells: int | tuple[int, ...]
    """How many there are, or the ranks of each"""
    elastic: ElasticParameters | None
    """How it makes rounds with cells that may be lost; ``None`` for rounds over files"""

    def join(self, join: Callable[..., DistributedState], federated: Federation | None) -> DistributedState:
        """Join the job's world, which is the cell; collective over its ranks.

        :param join: Joins it.
        :param federated: The cells that were asked for; :meth:`take` refuses them.
        :return: The state of the world.
        """
        return join()

    def leave(self, error: BaseException | None) -> None:
        """Leave things as they are: joining has changed nothing; local."""

    def take(self, state: DistributedState) -> None:
        """Let a job be this cell; collective over its ranks.

        :param state: The state of the job's world.
        :raises ConfigError: if the job has other ranks than that cell, or cells of its own; on all ranks.
        """
        topology = state.topology
        sizes = (topology.world_size,) * self.cells if isinstance(self.cells, int) else self.cells
        if topology.cells > 1 or sizes[self.cell] != topology.world_size:
            raise ConfigError(
                f"this job is to be cell {self.cell}, of {sizes[self.cell]} ranks, but it has {topology.cells} cells "
                f"and {topology.world_size} ranks; start as many, without a federation"
            )
        journal = None
        if self.elastic is not None:
            with run_on_all_ranks("tokens"):
                token = token_of()
            if state.rank == 0:
                warn_without_token(token)
            arm_fault(self.cell, state.rank or 0, self.elastic.restarts)
            journal = self._read_journal(state, self.elastic.journal, token)
        set_cell_world(state, CellWorld(self.cell, sizes, elastic=self.elastic, journal=journal))

    def _read_journal(self, state: DistributedState, place: str | None, token: bytes) -> CellJournal | None:
        """Read the run's journal on rank 0; the others hear how that went."""
        with run_on_all_ranks("the run's journal"):
            if place is not None and state.rank == 0:
                # The other ranks wait in a collective meanwhile, and in later ones for several such questions.
                patience_s = min(PATIENCE_S, state.timeouts.session_s * PATIENT_PART)
                try:
                    return CellJournal(open_journal(place, token, patience_s), self.cell, patience_s=patience_s)
                except JournalUnproven as error:  # another start of this job would have the same token
                    raise ConfigError(str(error)) from error
        return None


def find_lone_cell(
    cell: int | None,
    cells: int | Sequence[int] | None,
    elastic: str | ElasticParameters | None,
    link_backend: str | None,
) -> LoneCell | None:
    """Return what :func:`read_lone_cell` does; the ranks hear of a mistake where they meet."""
    try:
        return read_lone_cell(cell, cells, elastic, link_backend)
    except XfflError as wrong:
        raise_at_meeting(wrong, own_place())


def read_lone_cell(
    cell: int | None = None,
    cells: int | Sequence[int] | None = None,
    elastic: str | ElasticParameters | None = None,
    link_backend: str | None = None,
) -> LoneCell | None:
    """Return which cell this job is asked to be, by arguments or else by the environment; local.

    The arguments are those of :func:`xffl.session`. ``None`` where the job is not one cell of several jobs.
    """
    named = _read_cell(cell, cells)
    if named is not None and link_backend not in (None, "auto", "gloo"):
        raise ConfigError(
            f"cells that are jobs of their own have gloo between them; leave link_backend {link_backend!r} out"
        )
    parameters = _read_elastic(elastic, named)
    return None if named is None else LoneCell(*named, parameters)


def _read_cell(cell: int | None, cells: int | Sequence[int] | None) -> tuple[int, int | tuple[int, ...]] | None:
    if (cell is None) != (cells is None):
        raise ConfigError(f"cell is {cell} and cells is {cells}; give both, such as cell=0, cells=2")
    if cell is None or cells is None:
        text = read_over_files().cell
        return None if text is None else parse_cell(text, "XFFL_CELL")
    sizes = cells if isinstance(cells, (int, str)) else ",".join(map(str, cells))
    return parse_cell(f"{cell}/{sizes}", "cell")


def _read_elastic(elastic: str | ElasticParameters | None, named: object) -> ElasticParameters | None:
    if elastic is None and (named is None or not os.environ.get("XFFL_LIGHTHOUSE", "").strip()):
        return None
    if named is None:
        raise ConfigError(
            "elastic is given, but not which cell this job is; give cell and cells, such as cell=0, cells=2 (XFFL_CELL)"
        )
    if isinstance(elastic, ElasticParameters):
        return elastic if elastic.journal is not None else replace(elastic, journal=_find_journal(elastic.lighthouse))
    what, text = ("XFFL_LIGHTHOUSE", os.environ["XFFL_LIGHTHOUSE"]) if elastic is None else ("elastic", elastic)
    lighthouse = parse_lighthouse(what, text)
    parameters = ElasticParameters(lighthouse=lighthouse, journal=_find_journal(lighthouse), restarts=restarts_of())
    meeting_timeout_s = meeting_timeout_of()
    return parameters if meeting_timeout_s is None else replace(parameters, meeting_timeout_s=meeting_timeout_s)


def _find_journal(lighthouse: str) -> str:
    """Return where the run's journal is: as the environment says, or else by the address of the lighthouse."""
    return read_journal_variable() or derive_journal(lighthouse)
