"""The journal as one start of a cell's job uses it: what it has read, what it holds, and what it publishes.

One process of the cell has it. A cell reads the journal before it loads a checkpoint, so that it notices if another job
of the same cell has begun since (:meth:`~xffl.journal.rule.History.is_superseded`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence

from xffl.journal.records import Journal, JournalUnreachable, ModelId, Record, RoundRecord, make_id
from xffl.journal.rule import Fate, History, Holding, Member, void_of

__all__ = ["CellJournal"]

READ_AGAIN_S = 0.1
PATIENCE_S = 60.0
"""How long to read again for a record that another cell has seen"""
LEAST_PUT_S = 0.5
PUTS = 10
"""An attempt that is not published after so many times a usual put is given up: else a slow publisher always loses."""
_PUTS_KEPT = 20


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
        self.read_new()
        self.since = self.history.newest
        """Number of the newest record before this start has loaded anything"""

    @property
    def give_up_s(self) -> float:
        """Seconds without news of an attempt after which a cell in doubt publishes a void record in its place."""
        return max(LEAST_PUT_S, PUTS * statistics.median(self._puts)) if self._puts else PATIENCE_S

    def restore(self, model: ModelId | None, doubt: RoundRecord | None) -> None:
        """Hold what a checkpoint has: a model, and the attempt about which its cell was in doubt.

        :param model: The model.
        :param doubt: The attempt.
        :raises ConfigError: if the journal is not the one by which the cell has got the model.
        """
        self.history.check_holder(self.holding.cell, model)
        self.holding.model = model
        self.holding.doubt = doubt

    def as_member(self) -> Member:
        """Return what the cell tells the others at a meeting, once its doubt has ended."""
        holding = self.holding
        return Member(holding.cell, self.start, self.since, held=holding.model, seen=holding.seen)

    # Reading ----------------------------------------------------------------------------------------------------------

    def read_new(self) -> None:
        """Read the records that follow those that are known."""
        while records := self._journal.read_from(self.history.newest + 1):
            self.history.add(records)
        self.holding.note_seen(self.history.newest)

    def read_to(self, number: int) -> None:
        """Read all records up to one that some cell has seen.

        :param number: Its number.
        :raises JournalUnreachable: if it cannot be read: the view of the journal here is old.
        """
        deadline = time.monotonic() + self._patience_s
        while self.history.newest < number:
            self.read_new()
            if self.history.newest >= number:
                return
            if time.monotonic() > deadline:
                raise JournalUnreachable(
                    f"record {number} of the journal, which another cell has seen, cannot be read here; the newest "
                    f"here is {self.history.newest}: see that all cells have the same journal"
                )
            time.sleep(READ_AGAIN_S)

    def read_for(self, members: Iterable[Member]) -> None:
        """Read all that the members of a meeting have seen, so that they may decide."""
        self.read_new()
        self.read_to(self.history.largest_seen(members))

    # Publishing -------------------------------------------------------------------------------------------------------

    def publish(self, record: Record) -> Record:
        """Publish a record, and return the one that stands under its number.

        :param record: The record.
        :return: What stands.
        :raises JournalUnreachable: if it is not known what stands.
        """
        begun = time.monotonic()
        standing = self._journal.put(record)
        self._puts.append(time.monotonic() - begun)
        # Whoever loses has learnt that the number is taken, even if a listing does not show it yet.
        self.holding.note_seen(standing.number)
        return standing

    def record_starts(self, members: Sequence[Member]) -> bool:
        """Publish the starts of the members that are not recorded; the members then meet again.

        :param members: The members; all that they have seen must have been read.
        :return: Whether there was one to record.
        """
        starts = self.history.unrecorded(members)
        if starts:
            self.publish(self.history.start_record(starts))
        return bool(starts)

    def end_doubts(self, attempts: Iterable[RoundRecord]) -> list[Record]:
        """End doubts of any cells, and return what stands under the number of each attempt.

        :param attempts: The attempts about which cells are in doubt.
        :return: The records, in the same order.
        """
        ended: dict[RoundRecord, Record] = {}
        for attempt in attempts:
            if attempt not in ended:
                ended[attempt] = self.publish(void_of(attempt))
        return list(ended.values())

    def settle(self, standing: Record) -> Fate:
        """End this cell's doubt by the record that stands under its number.

        :param standing: The record, as this cell or another one has read it.
        :return: What becomes of the steps that the cell has made.
        """
        self.read_to(standing.number - 1)
        if self.history.newest < standing.number:
            self.history.add([standing])
        return self.holding.settle(standing, self.history)

    def end_doubt(self) -> Fate | None:
        """End this cell's own doubt by the journal; ``None`` if it has none."""
        if self.holding.doubt is None:
            return None
        [standing] = self.end_doubts([self.holding.doubt])
        return self.settle(standing)
