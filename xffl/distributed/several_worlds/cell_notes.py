"""Short texts that the cells of a job leave for each other, beside rounds."""

from __future__ import annotations

from typing import Protocol

from torch.distributed import DistNetworkError

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.distributed.several_worlds.job_ranks import connect_job_store, get_from_job
from xffl.errors import LaunchError

__all__ = ["CellNotes", "open_notes"]


class CellNotes(Protocol):
    """Texts of the cells, by name; each cell has one of each name, which its first rank writes."""

    def write(self, name: str, text: str) -> None:
        """Leave this cell's text, in place of an earlier one; local, and nothing on ranks other than the first."""

    def gather(self, name: str) -> tuple[str, ...]:
        """Return the texts of all cells, by cell; waits until each of them has written one."""

    def read(self, name: str) -> tuple[str | None, ...]:
        """Return the texts that there are, by cell; local."""

    def end(self) -> None:
        """Write and read no more; the rank that serves the store of the job waits until all cells have come so far."""


class LoneNotes:
    """The notes of a cell that shares its job with no other one: its own."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def write(self, name: str, text: str) -> None:
        """Keep this rank's text."""
        self._texts[name] = text

    def gather(self, name: str) -> tuple[str, ...]:
        """Return this rank's text."""
        return (self._texts[name],)

    def read(self, name: str) -> tuple[str | None, ...]:
        """Return this rank's text."""
        return (self._texts.get(name),)

    def end(self) -> None:
        """Do nothing: there is no store."""


class IsolatedNotes:
    """The notes of isolated cells, at the store of their job."""

    def __init__(self, isolated: IsolatedCell, topic: str, timeout_s: float) -> None:
        self._isolated = isolated
        self._timeout_s = timeout_s
        self._store = connect_job_store(isolated, timeout_s)
        # All ranks open their notes of a topic together, so this number is the same on each of them.
        number = int(self._store.add(f"notes/{topic}/{isolated.rank}", 1))
        self._prefix = f"notes/{topic}/{number}"

    def write(self, name: str, text: str) -> None:
        """Leave the text at the store, if this is the first rank of its cell."""
        if self._isolated.cell_rank == 0:
            self._store.set(self._key(name, self._isolated.cell), text)

    def gather(self, name: str) -> tuple[str, ...]:
        """Return the texts of all cells; LaunchError where one does not come in time."""
        cells = range(len(self._isolated.sizes))
        try:
            keys = [self._key(name, cell) for cell in cells]
            return tuple(get_from_job(self._store, key, self._isolated, self._timeout_s).decode() for key in keys)
        except (LaunchError, DistNetworkError) as error:  # the second: the store's rank has ended after an error
            raise LaunchError(
                f"rank {self._isolated.rank} has waited in vain for the {name} of all {len(cells)} cells: {error}; see "
                "the other ranks' output"
            ) from error

    def read(self, name: str) -> tuple[str | None, ...]:
        """Return the texts that are at the store."""
        keys = [self._key(name, cell) for cell in range(len(self._isolated.sizes))]
        return tuple(self._store.get(key).decode() if self._store.check([key]) else None for key in keys)

    def end(self) -> None:
        """Let rank 0 serve the store until the first ranks of all cells are here."""
        self.write("end", "")
        if self._isolated.rank == 0:
            self.gather("end")

    def _key(self, name: str, cell: int) -> str:
        return f"{self._prefix}/{name}/{cell}"


def open_notes(state: DistributedState, topic: str) -> CellNotes:
    """Return notes between the cells of this job; all of its ranks call it, as often for each topic.

    :param state: The state of the cell.
    :param topic: What the notes are about.
    :return: Those of isolated cells, or of a cell that is alone in its job.
    """
    if state.isolated is None:
        return LoneNotes()
    return IsolatedNotes(state.isolated, topic, state.timeouts.session_s)
