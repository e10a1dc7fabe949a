"""The rule of an elastic run: which cells may continue, from which model, and what becomes of a cell's steps.

This module is pure: it is given records that stand in the journal and what cells tell each other, and asks nobody.

**The rule.** The newest round of the journal is the run's model. If a cell here holds it, the cells here continue from
it, however few they are. If none does, they wait for those cells of that round that are not here, except for those that
have lost it: a later record forgets the cell, or a later start of its job holds an older model. If nobody is left to
wait for, the model is lost, and the same question is asked of the round before; if all are lost, the run begins anew
from the start of the lowest cell here.

**A lost journal.** A journal that begins with a recover record takes the place of one that was lost. It makes no round
before all cells of the federation have come, or are forgotten, and the newest model that one of them holds by the lost
journal is recorded as its first round. Models of the lost journal that are older are given up. Its numbers begin at 0
again, though cells may have been told higher ones: nobody knows which before the last cell has come, and a number means
nothing by itself. Models, doubts and checkpoints name the run as well, so that none of the lost journal is ever taken
for one of this; and a cell that runs on does not read a journal of another run.

**A round.** The cells here have read every record below a number, nobody has read one under it, and each says yes to
the attempt to make it a round. Then one of them publishes it. It is taken if and only if its record stands. A cell
whose contact is lost after its yes is in doubt. It trains no further; it publishes a void record under that number, and
what then stands ends the doubt. A cell holds a model only by a round that it took part in.

**Why a run never goes back.** Claim: if a round with number n stands whose base is older than a round w < n, then no
cell that is not forgotten holds w, or ever will.

1. A number has one content, so the attempt n was published after all records below n stood, and its cells had read all
   of them: among them w. They passed over w, so none of them held it, and each cell of w was here without it, forgotten
   after w, or started again with an older model after w.
2. A cell of w that was here had told its model, and had ended its doubts before. It cannot be in doubt about w again: a
   yes belongs to one attempt, and w stands. If an older start of the same cell still runs elsewhere, it is not the
   newest in the journal; it stops when it reads that, and saves nothing.
3. A cell that started again after w holds what its newest start says, by the same argument.

**Why no step counts twice.** Claim: a cell has no step that the model it holds has already.

1. It drops the steps that it gave to an attempt if and only if the record of that stands, so exactly when it holds a
   model that has them.
2. When another model takes the place of its own, it drops all of its steps, also those of which no round knows.
3. A checkpoint has a model and steps made on it. If a later round has these, the cell does not hold that round's model:
   it is behind, and drops them when it takes that over.

**Why it makes progress.** Who holds the newest model waits for nobody. A doubt ends as soon as any cell here reaches
the journal. A wait names cells, and ends when they come, start again without the model, or are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from xffl.errors import CheckpointError, ConfigError
from xffl.journal.records import (
    ForgetRecord,
    ModelId,
    Record,
    RecoverRecord,
    RoundRecord,
    Start,
    StartRecord,
    VoidRecord,
    make_id,
    next_lineage,
)

__all__ = [
    "Continue",
    "Fate",
    "History",
    "Holding",
    "Member",
    "Recovery",
    "Wait",
    "attempt_of",
    "forget_of",
    "is_behind",
    "largest_told",
    "recover_record",
    "void_of",
]


@dataclass(frozen=True)
class Member:
    """What a cell tells the others at a meeting, once its doubts have ended."""

    cell: int
    start: str  # id of this start of its job
    since: int  # number of the newest record when its job started, before it loaded anything; -1 if there was none
    held: ModelId | None = None  # the model that it holds; None: it has only its own start
    seen: int = -1  # the largest number of a record that it knows of; -1 if none
    lost: ModelId | None = None  # the model that it holds by a journal that was lost


@dataclass(frozen=True)
class Continue:
    """The cells here may make a round."""

    base: RoundRecord | None  # the round whose model they start from; None: the start of the lowest cell


@dataclass(frozen=True)
class Wait:
    """The cells here must not make a round, because others may hold a newer model."""

    round: RoundRecord
    cells: tuple[int, ...]  # that may hold its model, and are not here


@dataclass(frozen=True)
class Recovery:
    """What the cells here lack for the first round after their journal was lost."""

    missing: tuple[int, ...]  # absent cells, which may hold a newer model
    newest: ModelId | None  # the newest model that a cell here holds, to be recorded once nobody is missing


class Fate(Enum):
    """What becomes of the steps that a cell has made, once an attempt to make a round has ended."""

    GAVE = "gave"  # those sent are in the model; those made since the yes continue from it
    TOOK_OVER = "took over"  # the model was replaced: all are dropped
    PUT_BACK = "put back"  # no round: they apply to the model that the cell holds


class History:
    """The records of a run's journal that a cell has read, up to the newest that it knows.

    It has all of them, or those that may still be needed (:meth:`pruned`).
    """

    def __init__(self) -> None:
        self.oldest = 0
        """Number of the oldest record that is kept, with all that follow"""
        self._records: list[Record] = []
        self._beginning: Record | None = None
        self._starts: list[StartRecord] = []
        self._recovered: RoundRecord | None = None

    @property
    def newest(self) -> int:
        """Return the number of the newest record; -1 if there is none."""
        return self.oldest + len(self._records) - 1

    @property
    def run(self) -> str:
        """Return the id of the run: that of the journal's first record; empty if there is none."""
        return "" if self._beginning is None else self._beginning.id

    def until(self, number: int) -> History:
        """Return the records up to a number, for cells that have to decide alike though some have read further."""
        if number >= self.newest:
            return self
        history = History()
        history.oldest = self.oldest
        history._records = self._records[: max(0, number + 1 - self.oldest)]
        history._beginning = self._beginning if number >= 0 else None
        history._starts = [record for record in self._starts if record.number <= number]
        if self._recovered is not None and self._recovered.number <= number:
            history._recovered = self._recovered
        return history

    def pruned(self, members: Iterable[Member] = ()) -> History:
        """Return a copy without the records that decide nothing any more.

        The newest record that names a cell says what it may hold: a round its model, a start what that held, a forget
        nothing. No round older than all of these is asked for, unless a cell comes with an older checkpoint. Then the
        journal has to be read again: if :attr:`oldest` is above what a cell holds, or what a record that follows names
        (:meth:`has_models_of`).

        :param members: Cells that decide by the copy. One that was forgotten while it ran may hold an older model.
        :return: The copy.
        """
        history = History()
        history.oldest = self._find_oldest_needed(members)
        history._records = self._records[history.oldest - self.oldest :]
        history._beginning = self._beginning
        history._recovered = self._recovered
        cells = {start.cell for record in self._starts for start in record.starts}
        newest = [self._find_start(cell, -1) for cell in cells]
        kept = {record.number for record, _ in filter(None, newest)}
        history._starts = [
            record for record in self._starts if record.number >= history.oldest or record.number in kept
        ]
        return history

    def _find_oldest_needed(self, members: Iterable[Member]) -> int:
        """Return the number of the oldest round that a cell may hold, of those that are its newest.

        The newest round of all is needed as well: it tells that the run has begun.
        """
        newest = next(self.rounds(), None)
        if newest is None:
            return self.oldest
        oldest = min([newest.number, *(member.held.number for member in members if member.held is not None)])
        known: set[int] = set()
        for record in reversed(self._records):
            for cell, number in _may_hold_by(record):
                if cell not in known:
                    known.add(cell)
                    oldest = min(oldest, self.newest if number is None else number)
        return max(oldest, self.oldest)

    def has_models_of(self, records: Iterable[Record]) -> bool:
        """Tell whether the models are kept that rounds which follow start from, and new starts of cells hold."""
        named: list[ModelId | None] = []
        for record in records:
            if isinstance(record, RoundRecord):
                named.append(record.base)
            elif isinstance(record, StartRecord):
                named += [start.held for start in record.starts]
        return all(model is None or model.number >= self.oldest for model in named)

    def add(self, records: Iterable[Record]) -> None:
        """Append the records that follow, as read from the journal.

        CheckpointError if they do not belong to this journal.
        """
        for record in records:
            run = self.run or record.id
            if record.number != self.newest + 1 or record.run != run:
                raise CheckpointError(
                    f"record {record.number} of run {record.run} does not follow record {self.newest} of run {run}; "
                    "give each run a journal of its own"
                )
            if isinstance(record, RoundRecord):
                self._check_base(record)
            if isinstance(record, RecoverRecord) and record.number > 0:
                raise CheckpointError(
                    f"record {record.number} of run {record.run} recovers a run, but is not the first"
                )
            if self._beginning is None:
                self._beginning = record
            self._records.append(record)
            if isinstance(record, StartRecord):
                self._starts.append(record)
            if isinstance(record, RoundRecord) and record.recovered is not None:
                self._recovered = record

    def _check_base(self, record: RoundRecord) -> None:
        if record.recovered is not None:
            if not self.is_recovered or record.base is not None or next(self.rounds(), None) is not None:
                raise CheckpointError(f"record {record.number} of run {record.run} recovers no model here")
            return
        base = None if record.base is None else self.round_of(record.base)
        is_known = (base is None) == (record.base is None)
        is_alike = base is None or base.federation == record.federation
        is_next = record.round == _next_round(base) and record.lineage == next_lineage(base, record.id)
        if not (is_known and is_alike and is_next):
            raise CheckpointError(f"record {record.number} of run {record.run} does not follow from its base")

    def __getitem__(self, number: int) -> Record:
        return self._records[number - self.oldest]

    def round_of(self, model: ModelId | None) -> RoundRecord | None:
        """Return the round that made a model; ``None`` if no record here did."""
        if model is None or model.run != self.run or not self.oldest <= model.number <= self.newest:
            return None
        record = self[model.number]
        return record if isinstance(record, RoundRecord) and record.id == model.id else None

    @property
    def is_recovered(self) -> bool:
        """Whether this journal takes the place of one that was lost."""
        return isinstance(self._beginning, RecoverRecord)

    def is_lost(self, model: ModelId | None) -> bool:
        """Tell whether a model is one of the journal that was lost."""
        return self.is_recovered and model is not None and model.run != self.run

    def find_recovered(self, lost: ModelId | None) -> ModelId | None:
        """Return what this journal calls a model of the lost journal; ``None`` if it was given up, or not recorded."""
        first = self._recovered
        return first.model if first is not None and first.recovered == lost else None

    def find_recovery(self, members: Sequence[Member], federation: int) -> Recovery | None:
        """Return what has to happen before members may make the first round of a recovered journal.

        Members that hold no model wait for the absent cells, too: they cannot know whether one of those holds a model.

        :param members: The members.
        :param federation: Number of cells of the federation.
        :return: What is missing; ``None`` if nothing is, or if the journal is not a recovered one.
        """
        if not self.is_recovered or next(self.rounds(), None) is not None:
            return None
        absent = {*range(federation)} - {member.cell for member in members}
        missing = tuple(sorted(cell for cell in absent if not self.is_forgotten(cell, 0)))
        lost = [member.lost for member in members if member.lost is not None]
        if not missing and not lost:
            return None
        return Recovery(missing, max(lost, key=lambda model: model.number, default=None))

    def recover(self, model: RoundRecord, holders: Iterable[int]) -> RoundRecord:
        """Return the record by which the newest model of the lost journal becomes one of this, under the next number.

        :param model: The round of the lost journal that made it.
        :param holders: The cells that hold it.
        :return: The record.
        """
        cells = tuple(sorted(holders))
        return RoundRecord(
            run=self.run,
            number=self.newest + 1,
            id=make_id(),
            round=model.round,
            base=None,
            lineage=model.lineage,
            cells=cells,
            weights=(0.0,) * len(cells),
            federation=model.federation,
            left=model.left,
            recovered=model.model,
        )

    def check_holder(self, cell: int, held: ModelId | None) -> None:
        """Raise ConfigError if this is not the journal by which a cell holds its model."""
        if held is not None and self.round_of(held) is None and not self.is_lost(held):
            raise ConfigError(
                f"cell {cell} holds the model of record {held.number} of run {held.run}, which the journal of run "
                f"{self.run or '(empty)'} does not have; give the cells the journal with which they have trained, or "
                "begin an empty one by xffl lighthouse --journal DIR --recover, if it is lost"
            )

    def rounds_behind(self, record: RoundRecord, held: ModelId | None) -> Iterator[RoundRecord]:
        """Yield the rounds that led to a round's model from one that a cell holds, the newest first."""
        at: RoundRecord | None = record
        while at is not None and at.model != held:
            yield at
            at = self.round_of(at.base)

    def rounds(self) -> Iterator[RoundRecord]:
        """Yield the rounds that are kept, the newest first."""
        return (record for record in reversed(self._records) if isinstance(record, RoundRecord))

    # Who may continue -------------------------------------------------------------------------------------------------

    def choose_base(self, members: Sequence[Member]) -> Continue | Wait:
        """Decide whether the members may make a round, and from which model.

        All records up to the largest number that a member has seen must have been added, the starts of all members be
        recorded, and none of them be superseded.
        """
        here = {member.cell for member in members}
        held = {member.held for member in members}
        for record in self.rounds():
            if record.model in held:
                return Continue(record)
            missing = tuple(cell for cell in record.cells if cell not in here and self.may_hold(cell, record))
            if missing:
                return Wait(record, missing)
        return Continue(None)

    def may_hold(self, cell: int, record: RoundRecord) -> bool:
        """Tell whether a cell of a round may still hold its model."""
        if self.is_forgotten(cell, record.number):
            return False
        # Only its newest start counts: an earlier one has ended, or stops when it reads of the newest.
        newest = self._find_start(cell, record.number)
        if newest is None:
            return True
        _, start = newest
        return start.held is not None and start.held.number >= record.number

    def find_holders(self) -> tuple[RoundRecord, tuple[int, ...]] | None:
        """Return the newest round whose model a cell may still hold, and all such cells; ``None`` if there is none."""
        for record in self.rounds():
            holders = tuple(cell for cell in record.cells if self.may_hold(cell, record))
            if holders:
                return record, holders
        return None

    def has_cell(self, cell: int) -> bool:
        """Tell whether a cell has been started, or has taken part in a round."""
        return self._find_start(cell, -1) is not None or any(cell in record.cells for record in self.rounds())

    def is_forgotten(self, cell: int, number: int) -> bool:
        """Tell whether a record above a number forgets a cell."""
        later = self._records[max(0, number + 1 - self.oldest) :]
        return any(isinstance(record, ForgetRecord) and record.cell == cell for record in later)

    # Starts -----------------------------------------------------------------------------------------------------------

    def is_superseded(self, member: Member) -> bool:
        """Tell whether a later start of the same cell is recorded, so that this one must stop and save nothing."""
        return self.successor_of(member) is not None

    def successor_of(self, member: Member) -> StartRecord | None:
        """Return the record of a later start of the same cell; ``None`` if there is none.

        If this start is recorded, a later one stands above it. If it is not, then any start of the cell that was
        recorded since it began is another job's, which may have gone further than what this one has loaded.
        """
        newest = self._find_start(member.cell, member.since)
        if newest is None:
            return None
        record, start = newest
        return None if start.id == member.start else record

    def _find_start(self, cell: int, number: int) -> tuple[StartRecord, Start] | None:
        """Return the newest start of a cell that is recorded above a number, with its record; ``None`` without one."""
        for record in reversed(self._starts):
            if record.number <= number:
                break
            start = _start_of(cell, record)
            if start is not None:
                return record, start
        return None

    def has_start(self, name: str) -> bool:
        """Tell whether a start of a job is recorded."""
        return any(start.id == name for record in self._starts for start in record.starts)

    def earliest(self, members: Sequence[Member]) -> list[Member]:
        """Return those of some members whose starts were recorded first; all of them, if none was.

        :param members: The members.
        :return: Those that have run for longest.
        """
        ids = {member.start for member in members}
        for record in self._starts:
            started = {start.id for start in record.starts} & ids
            if started:
                return [member for member in members if member.start in started]
        return list(members)

    def unrecorded(self, members: Iterable[Member]) -> tuple[Start, ...]:
        """Return the starts of the members that have to be recorded before these decide."""
        recorded = {start.id for record in self._starts for start in record.starts}
        new: dict[int, Member] = {}
        for member in members:
            if member.start not in recorded:
                # Of two new starts of one cell the other is superseded at once: the one that holds more stays.
                other = new.get(member.cell)
                new[member.cell] = member if other is None else max(other, member, key=_precedence)
        return tuple(Start(member.cell, member.start, member.held) for _, member in sorted(new.items()))

    def start_record(self, starts: tuple[Start, ...]) -> StartRecord:
        """Return the record of some starts, to be published under the next number."""
        attempt = make_id()
        return StartRecord(self.run or attempt, self.newest + 1, attempt, starts)


@dataclass
class Holding:
    """What one start of a cell holds: a model, and the attempt about which it may be in doubt."""

    cell: int
    model: ModelId | None = None
    doubt: RoundRecord | None = None
    seen: int = -1  # the largest number of a record that it knows of

    def say_yes(self, attempt: RoundRecord) -> None:
        """Note that this cell is about to say yes to an attempt: from now on it may become a round."""
        self.doubt = attempt

    def note_seen(self, number: int) -> None:
        """Note that a record with this number stands."""
        self.seen = max(self.seen, number)

    def settle(self, standing: Record) -> Fate:
        """End the doubt by the record that stands under the number of its attempt.

        :param standing: The record, as the journal has answered.
        :return: What becomes of the steps that this cell has made.
        """
        attempt = self.doubt
        if attempt is None or standing.number != attempt.number:
            raise ValueError(f"cell {self.cell} has no doubt about record {standing.number}")
        self.doubt = None
        self.note_seen(standing.number)
        if standing.id != attempt.id:
            return Fate.PUT_BACK
        held = self.model
        self.model = attempt.model
        has_taken_over = is_behind(self.cell, held, attempt.base, lowest=attempt.cells[0])
        return Fate.TOOK_OVER if has_taken_over else Fate.GAVE

    def take(self, attempt: RoundRecord) -> Fate:
        """Note that the record of an attempt stands, and return what becomes of the steps that this cell has made."""
        self.doubt = attempt
        return self.settle(attempt)


def largest_told(members: Iterable[Member]) -> int:
    """Return the largest number of a record that any member knows of, the same for all who have heard them.

    All records up to it must be read before the members decide: a listing of the journal may be old.
    """
    known = [max(member.seen, -1 if member.held is None else member.held.number) for member in members]
    return max(known, default=-1)


def is_behind(cell: int, held: ModelId | None, base: ModelId | None, *, lowest: int) -> bool:
    """Tell whether a cell of a round does not start from the round's base.

    :param cell: The cell.
    :param held: The model that it holds.
    :param base: The base; without one the round starts from what the lowest cell has.
    :param lowest: The lowest cell of the round.
    :return: Whether it takes the round's model over, and gives nothing.
    """
    return cell != lowest if base is None else held != base


def attempt_of(
    *,
    run: str,
    number: int,
    name: str,
    base: RoundRecord | None,
    members: Sequence[Member],
    weights: Mapping[int, float],
    federation: int,
    left: Iterable[int] = (),
) -> RoundRecord:
    """Return the attempt of some members to make a round.

    :param run: Id of the run.
    :param number: Number of the record.
    :param name: Id of the attempt.
    :param base: What :meth:`History.choose_base` has chosen.
    :param members: The cells that take part.
    :param weights: By cell, what it would contribute.
    :param federation: Number of cells of the federation.
    :param left: Cells that have finished the run once the round is taken.
    :return: The record of the round, to be published once all members have said yes.
    """
    model = None if base is None else base.model
    numbers = sorted(member.cell for member in members)
    behind = {member.cell for member in members if is_behind(member.cell, member.held, model, lowest=numbers[0])}
    return RoundRecord(
        run=run,
        number=number,
        id=name,
        round=_next_round(base),
        base=model,
        lineage=next_lineage(base, name),
        cells=tuple(numbers),
        weights=tuple(0.0 if cell in behind else weights[cell] for cell in numbers),
        federation=federation,
        left=tuple(sorted(left)),
    )


def _next_round(base: RoundRecord | None) -> int:
    return 1 if base is None else base.round + 1


def _precedence(member: Member) -> tuple[int, int, str]:
    return (-1 if member.held is None else member.held.number, member.since, member.start)


def void_of(attempt: RoundRecord) -> VoidRecord:
    """Return the record by which a cell in doubt gives the number of an attempt up."""
    name = make_id()
    is_first = attempt.number == 0  # the id of the first record is that of the run
    return VoidRecord(name if is_first else attempt.run, attempt.number, name)


def recover_record() -> RecoverRecord:
    """Return the first record of a journal that takes the place of a lost one."""
    name = make_id()
    return RecoverRecord(name, 0, name)


def forget_of(history: History, cell: int) -> ForgetRecord:
    """Return the record that forgets what a cell holds, to be published under the next number."""
    name = make_id()
    return ForgetRecord(history.run or name, history.newest + 1, name, cell)


def _may_hold_by(record: Record) -> list[tuple[int, int | None]]:
    """Return the cells that a record names, each with the number of the model that it may hold by it, if any."""
    if isinstance(record, RoundRecord):
        return [(cell, record.number) for cell in record.cells]
    if isinstance(record, StartRecord):
        return [(start.cell, None if start.held is None else start.held.number) for start in record.starts]
    if isinstance(record, ForgetRecord):
        return [(record.cell, None)]
    return []


def _start_of(cell: int, record: StartRecord) -> Start | None:
    """Return the start of a cell in a record; ``None`` if it has none."""
    return next((start for start in record.starts if start.cell == cell), None)
