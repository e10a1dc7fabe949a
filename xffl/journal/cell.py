"""The journal as one start of a cell's job uses it: what it has read, what it holds, and what it publishes.

One process of the cell has it. A cell reads the journal before it loads a checkpoint, so that it notices if another job
of the same cell has begun since (:meth:`~xffl.journal.who_continues.History.is_superseded`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from xffl.errors import CheckpointError, ConfigError
from xffl.journal.records import (
    PATIENCE_S,
    STOPPING_S,
    Journal,
    JournalUnreachable,
    ModelId,
    Record,
    RoundRecord,
    VoidRecord,
    make_id,
)
from xffl.journal.who_continues import History, Holding, Member, largest_told, void_of

__all__ = ["CellJournal"]

READ_AGAIN_S = 0.1
LEAST_PUT_S = 0.5
PUTS = 10
"""An attempt that is not published after so many times a usual put is given up: else a slow publisher always loses."""
UNKNOWN_PUT_S = 2.0
"""The same for a cell that has not published yet; it waits twice as long after each attempt that it has given up."""
MOST_DOUBLINGS = 5
_PUTS_KEPT = 20
LEAST_PRUNED = 1000
"""Records that a cell keeps at least before it looks which of them decide nothing any more."""


class CellJournal:
    """What one start of a cell's job knows of the journal; making one reads it.

    :param journal: Where the records stand.
    :param cell: The cell's number.
    :param patience_s: How long to wait for a record that another cell has seen.
    :raises JournalUnreachable: if the journal cannot be read.
    """

    def __init__(self, journal: Journal, cell: int, *, patience_s: float = PATIENCE_S) -> None:
        self.history = History()
        self.holding = Holding(cell)
        self.start = make_id()
        """Id of this start of the job"""
        self._journal = journal
        self._patience_s = patience_s
        self._puts: deque[float] = deque(maxlen=_PUTS_KEPT)
        self._voids = 0  # attempts in a row that were given up here
        self._prune_at = LEAST_PRUNED
        self._is_stopping: Callable[[], bool] | None = None
        self._run = ""  # the run of the records that were read; empty before the first
        self.read_new()
        self.since = self.history.newest
        """Number of the newest record before this start has loaded anything"""

    @property
    def where(self) -> str:
        """The folder of the journal, or the address of its service."""
        return self._journal.where

    def heed(self, is_stopping: Callable[[], bool] | None) -> None:
        """Wait no longer than about a second for the journal once this cell is to stop.

        :param is_stopping: Tells whether it is; called in the thread that asks the journal.
        """
        self._is_stopping = is_stopping
        self._journal.heed(is_stopping)

    @property
    def give_up_s(self) -> float:
        """Seconds without news of an attempt after which a cell in doubt publishes a void record in its place."""
        usual_s = max(LEAST_PUT_S, PUTS * statistics.median(self._puts)) if self._puts else UNKNOWN_PUT_S
        return usual_s * 2.0 ** min(self._voids, MOST_DOUBLINGS)

    def begin(self, model: ModelId | None) -> None:
        """Hold what was loaded, or only this cell's own start, as another start of the same job; local.

        The others must not take what an earlier start has told them for what this one holds.

        :param model: The model.
        """
        if not self.history.is_superseded(self.as_member()) and self.history.has_start(self.start):
            self.since = self.history.newest
        self.start = make_id()
        self.holding.model = model
        self.holding.doubt = None

    def check(self) -> None:
        """Raise ConfigError if this start of the job has to end.

        Its model may be of another journal, or a later start of the same cell may have taken its place.
        """
        if self.holding.model is not None and self.history.round_of(self.holding.model) is None:
            self._keep_from(self.holding.model.number)
            self.read_new()
        self.history.check_holder(self.holding.cell, self.holding.model)
        successor = self.history.successor_of(self.as_member())
        if successor is not None:
            raise ConfigError(
                f"another job is cell {self.holding.cell} of this run since record {successor.number} of the journal, "
                "so this one ends and saves nothing; give each job a number of its own (--cell)"
            )

    def as_member(self) -> Member:
        """Return what the cell tells the others at a meeting, once its doubt has ended."""
        holding = self.holding
        is_lost = self.history.is_lost(holding.model)
        return Member(
            cell=holding.cell,
            start=self.start,
            since=self.since,
            held=None if is_lost else holding.model,
            seen=holding.seen,
            lost=holding.model if is_lost else None,
        )

    # Reading ----------------------------------------------------------------------------------------------------------

    def read_new(self) -> None:
        """Read the records that follow those that are known.

        :raises JournalUnreachable: if the journal cannot be read, or lacks what was read before.
        :raises CheckpointError: if another journal has taken its place.
        """
        while records := self._read_following():
            if self.history.has_models_of(records):
                self.history.add(records)
            else:
                self.history = History()
        self.holding.note_seen(self.history.newest)

    def _read_following(self) -> list[Record]:
        """Return records that follow those that are known, if there are any.

        The newest that is known is read again: nothing else would tell that a shorter journal stands in its place.
        """
        newest = self.history.newest
        if newest < 0:
            records = self._journal.read_from(0)
            if records:
                self._check_run(records[0])
                self._run = records[0].run
            return records
        records = self._journal.read_from(newest)
        if not records:
            for first in self._journal.read_from(0)[:1]:
                self._check_run(first)
            raise JournalUnreachable(
                f"the journal {self.where} does not have record {newest} any more, which was read here; restore it, or "
                "begin an empty one by xffl lighthouse --journal DIR --recover, if it is lost"
            )
        self._check_run(records[0])
        return records[1:]

    def _check_run(self, record: Record) -> None:
        """Raise CheckpointError if a record is one of another journal than those that were read before."""
        if self._run and record.run != self._run:
            raise CheckpointError(
                f"another journal has taken the place of the one at {self.where}: this cell {self.holding.cell} has "
                f"read that of run {self._run}, and there is that of run {record.run} now; put the first one back, or "
                "start the cells again, if it was lost and the new one was begun by xffl lighthouse --recover"
            )

    def read_to(self, number: int) -> None:
        """Read all records up to one that some cell has seen.

        :param number: Its number.
        :raises JournalUnreachable: if it cannot be read: the view of the journal here is old.
        :raises ConfigError: if nothing that another cell has written was ever read here, so that this is another
            journal.
        """
        begun = time.monotonic()
        while self.history.newest < number:
            self.read_new()
            if self.history.newest >= number:
                return
            waited_s = time.monotonic() - begun
            is_stopping = self._is_stopping is not None and self._is_stopping()
            if waited_s > (STOPPING_S if is_stopping else self._patience_s):
                text = f"record {number} of the journal, which another cell has seen, cannot be read here"
                if self.since < 0 and not self.history.has_start(self.start):
                    raise ConfigError(
                        f"{text}, and the journal was empty when this cell {self.holding.cell} began: what the others "
                        f"write does not come to {self.where}; give all cells one folder of a file system "
                        "that their hosts share, or use the service of a host (xffl lighthouse --journal)"
                    )
                raise JournalUnreachable(
                    f"{text}; the newest here is {self.history.newest}: see that all cells have the same journal"
                )
            time.sleep(READ_AGAIN_S)

    def read_for(self, members: Iterable[Member]) -> None:
        """Read all that the members of a meeting have seen, so that they may decide."""
        members = list(members)
        self._keep_from(min((member.held.number for member in members if member.held is not None), default=None))
        self.read_new()
        self.read_to(largest_told(members))
        kept = self.history.newest - self.history.oldest + 1
        if kept > self._prune_at:
            self.history = self.history.pruned(members)
            self._prune_at = max(LEAST_PRUNED, 2 * (self.history.newest - self.history.oldest + 1))

    def _keep_from(self, number: int | None) -> None:
        """Read the journal anew if an older record is asked for than those that are kept here."""
        if number is not None and number < self.history.oldest:
            self.history = History()

    # Publishing -------------------------------------------------------------------------------------------------------

    def publish(self, record: Record) -> Record:
        """Publish a record, and return the one that stands under its number.

        :param record: The record.
        :return: What stands.
        :raises JournalUnreachable: if it is not known what stands.
        :raises CheckpointError: if another journal has taken the place of this one.
        """
        begun = time.monotonic()
        standing = self._journal.put(record)
        self._check_run(standing)
        if isinstance(standing, VoidRecord):
            self._voids += 1
        elif isinstance(standing, RoundRecord):
            self._voids = 0
        self._puts.append(time.monotonic() - begun)
        # Whoever loses has learnt that the number is taken, even if a listing does not show it yet.
        self.holding.note_seen(standing.number)
        return standing

    def try_again(self) -> None:
        """Raise JournalUnreachable unless the journal can be read and written here.

        The newest record is put once more, which changes nothing.
        """
        self.read_new()
        if self.history.newest >= 0:
            self._check_run(self._journal.put(self.history[self.history.newest]))

    def record_starts(self, members: Sequence[Member]) -> bool:
        """Publish the starts of the members that are not recorded; the members then meet again.

        :param members: The members; all that they have seen must have been read.
        :return: Whether there was one to record.
        """
        # Since the meeting another job of the same cell may have been recorded, which must stay the newest.
        starts = self.history.unrecorded(member for member in members if not self.history.is_superseded(member))
        if starts:
            self.publish(self.history.start_record(starts))
        return bool(starts)

    def ask_for(self, attempt: RoundRecord, waited_s: float) -> Record | None:
        """Return the record that stands under the number of an attempt, or ``None`` if another cell may yet publish it.

        :param attempt: The attempt about which this cell is in doubt.
        :param waited_s: How long it has asked.
        :return: The record: a void one if the attempt was not published in time.
        """
        self.read_new()
        if self.history.newest < attempt.number:
            if waited_s < self.give_up_s:
                return None
            return self.publish(void_of(attempt))
        return self.history[attempt.number]
