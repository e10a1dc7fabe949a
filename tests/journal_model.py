"""A model of cells that follow the rule of the journal: crashes, doubts, stale reads, partitions, lost disks, returns.

The journal may be lost once, and a recovered one takes its place: who has read the first one stops when it sees that.

Nothing here runs in parallel: a meeting is a generator that pauses wherever processes of different cells could be
delayed against each other, and the world advances one meeting, or lets something happen to one cell, at a time.

:class:`World` checks after each event that

(a) a cell holds a model only if its record stands,
(b) no round starts from an older base while a cell that is not forgotten holds a newer model,
(c) cells make a round once a holder of the newest model is here, or once all cells are here,
(d) each step is at most once in a model, and was made on it or on one that led to it; and the steps of a cell whose
    model was not replaced are all in the model that it holds, or wait for a round,
(e) a history without what decides nothing any more gives the same answers as the whole one.

Conditions are left out by subclasses: of the rule (``histories``, ``holdings``), of the journal (``journals``), or of
the world itself, for what cells do with the rule's answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tests.journal_records import attempt_after
from xffl.errors import CheckpointError
from xffl.journal.records import (
    ForgetRecord,
    ModelId,
    Record,
    RoundRecord,
    StartRecord,
)
from xffl.journal.who_continues import (
    Continue,
    Fate,
    History,
    Holding,
    Member,
    Recovery,
    Wait,
    forget_of,
    is_behind,
    largest_told,
    recover_record,
    void_of,
)


@dataclass(frozen=True)
class Step:
    """One step of one cell."""

    cell: int
    index: int  # among all steps of the world
    model: ModelId | None  # that the cell held when it made it


class Broken(AssertionError):
    """The rule has been broken; the text begins with the invariant."""

    log: list[str] = []  # noqa: RUF012 - replaced, never changed


class Replaced(Exception):
    """Another journal has taken the place of the one that a record belongs to."""


class MemoryJournal:
    """A journal whose records are put one after another."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, record: Record, chance: Random) -> Record:
        """Publish a record, and return the one that stands."""
        if record.number > len(self.records):
            raise Broken(f"model: record {record.number} would leave a hole")
        if record.number == len(self.records):
            self.records.append(record)
        return self.records[record.number]


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    start: str  # the start of the job that saved it
    model: ModelId | None
    doubt: RoundRecord | None
    mark: int
    local: tuple[Step, ...]
    owed: frozenset[Step]


class Process:
    """One start of a cell's job."""

    def __init__(self, cell: int, start: str, saved: Saved | None, since: int, holding: Holding) -> None:
        self.cell = cell
        self.run = ""
        """The run of the journal that it has read; empty before the first record"""
        self.start = start
        self.since = since
        self.holding = holding
        self.holding.note_seen(since)
        self.local: list[Step] = [] if saved is None else list(saved.local)
        self.mark = 0 if saved is None else saved.mark
        self.owed: set[Step] = set() if saved is None else {*saved.owed}
        """The steps that are to be in the model that it holds, or to wait for a round"""
        self.reaches = True
        self.meeting: Meeting | None = None
        if saved is not None:
            self.holding.model = saved.model
            self.holding.doubt = saved.doubt

    def drop_steps(self) -> None:
        """Drop all steps, because another model takes the place of that on which they were made."""
        self.local = []
        self.owed = set()

    def as_member(self, history: History) -> Member:
        """Return what it tells the others, and what these make of a model of a lost journal."""
        held = self.holding.model
        lost = held if history.is_lost(held) else None
        if lost is not None:
            held = history.find_recovered(lost)
        return Member(self.cell, self.start, self.since, held=held, seen=self.holding.seen, lost=lost)

    def saved(self) -> Saved:
        """Return what a checkpoint of it holds, with its doubt if it has one."""
        holding = self.holding
        return Saved(
            start=self.start,
            model=holding.model,
            doubt=holding.doubt,
            mark=self.mark,
            local=tuple(self.local),
            owed=frozenset(self.owed),
        )


class Meeting:
    """Processes that have met, and how it goes on."""

    def __init__(self, members: list[Process]) -> None:
        self.members = members
        self.going: Iterator[None] = iter(())
        self.outcome: Wait | Recovery | str = ""


class World:
    """Cells, their disks, and the journal.

    :param chance: What decides where the model has a choice.
    :param cells: Number of cells.
    """

    journals: ClassVar[type[MemoryJournal]] = MemoryJournal
    histories: ClassVar[type[History]] = History
    holdings: ClassVar[type[Holding]] = Holding

    def __init__(self, chance: Random, cells: int) -> None:
        self.chance = chance
        self.cells = cells
        self.journal = self.journals()
        self.lost: list[Record] = []
        """The records of a journal that was lost"""
        self.steps_made = 0
        self.steps: dict[str, tuple[Step, ...]] = {}
        """By id of an attempt, the steps that it would add"""
        self.read_before: dict[tuple[str, ...], History] = {}
        """By the ids of their records, histories that were read"""
        self.orders: dict[str, int] = {}
        """By start of a job, how many starts there were before it"""
        self.owners: dict[int, str] = {}
        """By cell, the newest start of its job, whose checkpoints its folder holds"""
        self.stuck: int | None = None
        """What all listings say, if they are never renewed"""
        self.processes: list[Process] = []
        self.disks: dict[int, Saved | None] = {}
        self.finished: set[int] = set()
        self.meetings: list[Meeting] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.p_stale = chance.choice([0.0, 0.3, 0.7])
        self.p_slow = chance.choice([0.3, 0.6, 0.9])
        self.p_smooth = chance.choice([0.5, 0.9])
        self.p_lose = chance.choice([0.0, 0.0, 0.2])
        self.p_finish = chance.choice([0.0, 0.0, 0.05])

    # The journal ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.log.append(text)

    @property
    def run(self) -> str:
        """Return the id of the journal's run; empty if it has no record."""
        return self.journal.records[0].run if self.journal.records else ""

    def lose_journal(self) -> None:
        """Lose the journal with all of its records, and begin another one that takes its place; once in a world."""
        if self.lost or not self.journal.records:
            return
        self.say("the journal is lost")
        self.counts["journal lost"] += 1
        self.lost = self.journal.records
        self.journal = self.journals()
        self.journal.records.append(recover_record())

    def put(self, record: Record) -> Record:
        if self.lost and record.run != self.run and record.run == self.lost[0].run:
            raise Replaced
        before = len(self.journal.records)
        standing = self.journal.put(record, self.chance)
        if len(self.journal.records) > before or standing is record:
            self.counts[record.kind] += 1
            self.say(f"  record {record}")
            if isinstance(record, RoundRecord):
                self.check_round(record)
        else:
            self.counts["put lost"] += 1
        return standing

    def listed(self) -> int:
        """Return the newest number of a listing, which may be old."""
        newest = len(self.journal.records) - 1
        if self.stuck is not None:
            return self.stuck
        if self.chance.random() >= self.p_stale:
            return newest
        return self.chance.randint(max(-1, newest - 3), newest)

    def history(self, newest: int | None = None) -> History:
        records = self.journal.records if newest is None else self.journal.records[: newest + 1]
        key = tuple(record.id for record in records)
        if key not in self.read_before:
            history = self.histories()
            try:
                history.add(records)
            except CheckpointError as error:
                raise Broken(f"a: {error}") from error
            self.read_before[key] = history
        return self.read_before[key]

    # What must hold ---------------------------------------------------------------------------------------------------

    def check_round(self, record: RoundRecord) -> None:
        base = -1 if record.base is None else record.base.number
        history = self.history()
        for cell, start, model in self.held_models():
            if self.is_given_up(cell, start, model) or not self.stands(model):
                continue
            if model.run == self.run and base < model.number != record.number:
                raise Broken(f"b: round {record.number} starts from {base}, and cell {cell} holds {model.number}")
            if model.run == self.run or history.find_recovered(model) == record.model:
                continue
            recovered = record.recovered or self.recovered_base(record)
            if recovered is None or recovered.number < model.number:
                raise Broken(f"b: round {record.number} goes back to {recovered}, and cell {cell} holds {model}")
        chain = list(self.chain(record))
        counted = Counter(step for round_ in chain for step in self.steps[round_.id])
        if twice := [step for step, times in counted.items() if times > 1]:
            raise Broken(f"d: steps {twice[:4]} of round {record.number} do not count once")
        models = {round_.model for round_ in chain}
        for step in self.steps[record.id]:
            is_own = step.cell == chain[-1].cells[0] if step.model is None else step.model in models
            if not is_own:
                raise Broken(f"d: step {step} of round {record.number} was made on another model")

    def check_pruned(self, history: History, told: list[Member]) -> None:
        """Check that a history without the records of which nothing depends any more decides as the whole one."""
        if self.histories is not History:
            return  # the copy would follow the rule
        at = self.chance.randint(0, history.newest) if history.newest >= 0 else -1
        pruned = history.until(at).pruned()
        new = [history[number] for number in range(at + 1, history.newest + 1)]
        if not pruned.has_models_of(new):
            self.counts["read again"] += 1
            return
        pruned.add(new)
        if any(member.held is not None and member.held.number < pruned.oldest for member in told):
            self.counts["read again"] += 1
            pruned = history  # all of it; it may be pruned again at once
        if self.chance.random() < 0.5:
            pruned = pruned.pruned(told)
        self.counts["pruned"] += pruned.oldest
        seen, starts = [
            ([kept.is_superseded(member) for member in told], [kept.unrecorded(told)]) for kept in (history, pruned)
        ]
        if seen != starts:
            raise Broken(f"e: by the pruned history {starts} are superseded or unrecorded, by the whole {seen}")
        if not history.unrecorded(told) and history.choose_base(told) != pruned.choose_base(told):
            raise Broken(f"e: {pruned.choose_base(told)} by the history from {pruned.oldest}")

    def recovered_base(self, record: RoundRecord) -> ModelId | None:
        """Return the model of the lost journal that a round of the new one goes back to."""
        return next((round_.recovered for round_ in self.chain(record) if round_.recovered is not None), None)

    def round_of(self, model: ModelId | None) -> RoundRecord | None:
        """Return the round that made a model, also one of the lost journal."""
        for records in (self.journal.records, self.lost):
            if model is not None and model.number < len(records):
                record = records[model.number]
                if isinstance(record, RoundRecord) and record.model == model:
                    return record
        return None

    def chain(self, record: RoundRecord | None) -> Iterator[RoundRecord]:
        """Yield the rounds that lead to a model, itself first."""
        while record is not None:
            yield record
            record = self.round_of(record.base or record.recovered)

    def held_models(self) -> Iterator[tuple[int, str, ModelId]]:
        """Yield all models that some cell has, on its disk, or as one of two in doubt, with the start that got it."""
        for process in self.processes:
            yield from self._models(process.cell, process.start, process.holding.model, process.holding.doubt)
        for cell, saved in self.disks.items():
            if saved is not None:
                yield from self._models(cell, saved.start, saved.model, saved.doubt)

    @staticmethod
    def _models(
        cell: int, start: str, model: ModelId | None, doubt: RoundRecord | None
    ) -> Iterator[tuple[int, str, ModelId]]:
        if model is not None:
            yield cell, start, model
        if doubt is not None:
            yield cell, start, doubt.model

    def stands(self, model: ModelId) -> bool:
        return self.round_of(model) is not None

    def is_given_up(self, cell: int, start: str, model: ModelId) -> bool:
        """Tell whether an operator, or a later start of the cell's job, has given a model up."""
        is_lost = model.run != self.run
        later = self.journal.records[0 if is_lost else model.number + 1 :]
        if any(isinstance(record, ForgetRecord) and record.cell == cell for record in later):
            return True
        starts = [one for record in later if isinstance(record, StartRecord) for one in record.starts]
        newest = next((one for one in reversed(starts) if one.cell == cell), None)
        if newest is None or self.orders[newest.id] <= self.orders[start]:
            return False
        return is_lost or newest.held is None or newest.held.number < model.number

    def check(self) -> None:
        for process in self.processes:
            held = process.holding.model
            if held is not None and not self.stands(held):
                raise Broken(f"a: cell {process.cell} holds {held.number} with an id that does not stand")
            chain = self.chain(self.round_of(held))
            taken = {step for record in chain for step in self.steps[record.id]}
            if taken & {*process.local}:
                raise Broken(f"d: cell {process.cell} has steps again that its model holds")
            if lost := process.owed - taken - {*process.local}:
                raise Broken(f"d: cell {process.cell} has lost the steps {lost}, though its model was not replaced")

    # What happens to one cell -----------------------------------------------------------------------------------------

    def newest_processes(self) -> dict[int, Process]:
        return {process.cell: process for process in self.processes}

    def make_step(self, process: Process) -> None:
        """Let a cell train one step."""
        step = Step(process.cell, self.steps_made, process.holding.model)
        self.steps_made += 1
        process.local.append(step)
        process.owed.add(step)

    def start(self, cell: int) -> None:
        """Start a cell's job, even if an earlier one is running."""
        if cell not in self.newest_processes() and self.chance.random() < self.p_lose:
            self.disks[cell] = None
        saved = self.disks.get(cell)
        process = Process(cell, f"{self.chance.getrandbits(64):016x}", saved, self.listed(), self.holdings(cell))
        process.run = self.run if process.since >= 0 else ""
        doubt = process.holding.doubt
        if self.lost and doubt is not None and doubt.run != self.run:
            process.holding.doubt = None  # what became of it, nobody knows any more
        self.processes.append(process)
        self.orders[process.start] = len(self.orders)
        self.owners[cell] = process.start
        self.finished.discard(cell)
        self.say(f"start {cell} {process.start[:4]} since {process.since} from {process.holding.model}")

    def stop(self, process: Process) -> None:
        """End a process without warning."""
        self.say(f"stop {process.cell} {process.start[:4]}")
        process.meeting = None
        if process in self.processes:
            self.processes.remove(process)

    def save(self, process: Process) -> None:
        """Write a checkpoint; a cell's folder belongs to the newest of its jobs."""
        self.disks[process.cell] = process.saved()
        self.say(f"save {process.cell} {self.disks[process.cell]}")

    def owns_disk(self, process: Process) -> bool:
        return self.owners[process.cell] == process.start

    def forget(self, cell: int) -> None:
        if not any(process.cell == cell and process.meeting for process in self.processes):
            self.put(forget_of(self.history(self.listed()), cell))

    def resolve(self, process: Process) -> None:
        """End a doubt by the journal."""
        doubt = process.holding.doubt
        assert doubt is not None
        if self.has_read_another(process):
            self.stop(process)
        else:
            self.settle(process, self.put(void_of(doubt)))

    def has_read_another(self, process: Process) -> bool:
        """Tell whether a process sees now that another journal has taken the place of the one that it has read."""
        is_replaced = process.run not in ("", self.run)
        self.counts["replaced journal seen"] += is_replaced
        return is_replaced

    def lose_contact(self, process: Process) -> None:
        """Leave a meeting; who is in doubt then, and reaches the journal, ends the doubt."""
        process.meeting = None
        self.say(f"lost contact {process.cell}")
        if process.holding.doubt is not None and process.reaches:
            self.resolve(process)

    def settle(self, process: Process, standing: Record) -> None:
        fate = process.holding.settle(standing)
        self.say(f"  cell {process.cell} {fate.value}")
        self.counts[fate.value] += 1
        self.keep_steps(process, fate)

    def keep_steps(self, process: Process, fate: Fate) -> None:
        if fate is Fate.GAVE:
            process.local = process.local[process.mark :]
        elif fate is Fate.TOOK_OVER:
            process.drop_steps()

    # Meetings ---------------------------------------------------------------------------------------------------------

    def meet(self, members: list[Process], *, is_calm: bool = False) -> Meeting:
        meeting = Meeting(members)
        for process in members:
            process.meeting = meeting
        meeting.going = self.hold(meeting, is_calm)
        self.meetings.append(meeting)
        self.say(f"meet {[process.cell for process in members]}")
        self.advance(meeting)
        return meeting

    def advance(self, meeting: Meeting) -> None:
        try:
            is_over = next(meeting.going, self) is self
        except Replaced:  # its publisher is in doubt, as the others are
            is_over = True
        if is_over:
            self.meetings.remove(meeting)
            for process in meeting.members:
                if process.meeting is meeting:
                    process.meeting = None

    def hold(self, meeting: Meeting, is_calm: bool) -> Iterator[None]:
        """Hold a meeting, and pause where a process may be delayed."""
        members = meeting.members

        def is_slow() -> bool:
            return not is_calm and self.chance.random() < self.p_slow

        def is_whole() -> bool:
            return all(process.meeting is meeting for process in members)

        reaching = [process for process in members if process.reaches]
        if not reaching:
            meeting.outcome = "no member reaches the journal"
            return
        for process in members:
            if process.holding.doubt is not None:
                self.resolve(process)
        if is_slow():
            yield
        if not is_whole():
            return
        for process in members:
            if self.has_read_another(process):
                self.stop(process)
                return
        history = self.read(members)
        for process in members:
            process.run = history.run
            process.holding.note_seen(history.newest)
            if history.is_superseded(process.as_member(history)):
                self.counts["superseded"] += 1
                self.stop(process)
                return
        told = [process.as_member(history) for process in members]
        self.check_pruned(history, told)
        if starts := history.unrecorded(told):
            if is_slow():
                yield
            record = history.start_record(starts)
            if is_whole():
                meeting.outcome = "starts recorded" if self.put(record) is record else "another record stands"
                for process in members:
                    process.holding.note_seen(record.number)
            return
        decision = history.choose_base(told)
        if isinstance(decision, Wait):
            self.counts["wait"] += 1
            self.say(f"  wait {decision}")
            meeting.outcome = decision
            if {*decision.cells} & {process.cell for process in members}:
                raise Broken("c: the cells wait for one of themselves")
            return
        recovery = history.find_recovery(told, self.cells)
        if recovery is not None:
            meeting.outcome = recovery
            if not recovery.missing and recovery.newest is not None:
                if is_slow():
                    yield
                holders = [member.cell for member in told if member.lost == recovery.newest]
                made = self.round_of(recovery.newest)
                assert made is not None, "who holds it took part in it"
                recovered = history.recover(made, holders)
                self.steps[recovered.id] = ()
                if is_whole():
                    self.put(recovered)
                    self.counts["recovered"] += 1
                    for process in members:
                        process.holding.note_seen(recovered.number)
            return
        if is_slow():
            yield
        if not is_whole():
            return
        for process, member in zip(members, told, strict=True):
            if member.lost is not None:
                process.holding.model = member.held
                if member.held is None:
                    process.drop_steps()
        if decision.base is not None:
            for process in members:
                self.take_base(process, decision.base)
        yield from self.try_round(meeting, history, decision, is_calm)

    def read(self, members: Iterable[Process]) -> History:
        """Read the journal, as far as a listing and the members know of."""
        history = self.history(self.listed())
        return self.history(self.newest_for(history, members))

    def newest_for(self, history: History, members: Iterable[Process]) -> int:
        """Return the number up to which members read the journal."""
        return max(history.newest, largest_told(process.as_member(history) for process in members))

    def try_round(self, meeting: Meeting, history: History, decision: Continue, is_calm: bool) -> Iterator[None]:
        members, chance = meeting.members, self.chance

        def is_slow(p: float = 1.0) -> bool:
            return not is_calm and chance.random() < self.p_slow * p

        is_smooth = is_calm or chance.random() < self.p_smooth
        told = [process.as_member(history) for process in members]
        weights = {process.cell: float(len(process.local)) for process in members}
        attempt = attempt_after(history, decision.base, told, weights, federation=self.cells)
        lowest = attempt.cells[0]
        giving = [
            process
            for process in members
            if not is_behind(process.cell, process.holding.model, attempt.base, lowest=lowest)
        ]
        marks = {process.cell: len(process.local) for process in members}
        self.steps[attempt.id] = tuple(step for process in giving for step in process.local)
        self.say(f"  attempt {attempt}")
        agreed = []
        refusing = None
        order = list(members)
        chance.shuffle(order)
        for process in order:
            if process.meeting is not meeting:
                break
            if not is_smooth and chance.random() < 0.2:
                refusing = process
                break
            process.mark = marks[process.cell]
            process.holding.say_yes(attempt)
            agreed.append(process)
            if is_slow(0.4):
                yield
        if refusing is not None or len(agreed) < len(members):
            for process in agreed:
                if process.meeting is meeting and process.holding.doubt is attempt:
                    self.hear_end(process, hears_no=refusing is not None and chance.random() < 0.6)
            return
        self.counts["all said yes"] += 1
        publisher = self.choose_publisher(members)
        if publisher is None:
            return
        while is_slow(0.8):
            yield
        if not is_smooth and chance.random() < 0.25:
            self.stop(publisher)  # before it publishes
        is_late = not (publisher.meeting is meeting and publisher.holding.doubt is attempt)
        if is_late and chance.random() < 0.5:
            return  # else its put was under way, and arrives although nobody waits for it
        standing = self.publish(attempt)
        if not is_smooth and chance.random() < 0.25:
            self.stop(publisher)  # before it tells
        order.sort(key=lambda process: process is not publisher)
        for process in order:
            if process.holding.doubt is not attempt or process not in self.processes:
                continue
            is_told = publisher in self.processes and not is_late and (is_smooth or chance.random() < 0.7)
            if not is_told or process.meeting is not meeting:
                self.hear_end(process, hears_no=False)
                continue
            self.settle(process, standing)
            if not is_calm and standing is attempt and chance.random() < self.p_finish:
                self.finish(process)
            if is_slow(0.4):
                yield
        if standing.id == attempt.id:
            meeting.outcome = "taken"

    def take_base(self, process: Process, base: RoundRecord) -> None:
        """Let a cell prepare for a round; what it holds stays its own until the record stands."""

    def choose_publisher(self, members: Iterable[Process]) -> Process | None:
        """Return the lowest cell that reaches the journal."""
        reaching = [process for process in members if process.reaches]
        return min(reaching, key=lambda process: process.cell) if reaching else None

    def publish(self, attempt: RoundRecord) -> Record:
        """Put an attempt, and return what its publisher believes to stand."""
        return self.put(attempt)

    def hear_end(self, process: Process, *, hears_no: bool) -> None:
        """Let a cell hear that another has said no, or hear nothing any more: then it is in doubt."""
        if hears_no:
            process.holding.doubt = None

    def finish(self, process: Process) -> None:
        self.say(f"finished {process.cell}")
        if self.owns_disk(process) and self.chance.random() < 0.7:
            self.save(process)
        self.stop(process)
        self.finished.add(process.cell)

    # How it ends ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let all disturbances end, and check that a round comes about."""
        while self.meetings:
            self.advance(self.meetings[0])
        self.p_stale = 0.0
        history = self.history()
        for process in list(self.processes):
            process.reaches = True
            is_newest = self.newest_processes()[process.cell] is process
            if not is_newest or History.is_superseded(history, process.as_member(history)):
                self.stop(process)
        newest = next(History.rounds(history), None)
        holders = [
            process
            for process in self.processes
            if newest is not None
            and process.run in ("", self.run)
            and newest.model in (process.as_member(history).held, process.holding.doubt and process.holding.doubt.model)
        ]
        if holders and self.chance.random() < 0.5:
            others = {process.cell for process in self.processes if self.chance.random() < 0.3}
            self.await_round({self.chance.choice(holders).cell, *others})
        else:
            self.await_round({*range(self.cells)} - (self.finished - {*self.newest_processes()}))
        self.check()

    def await_round(self, cells: set[int]) -> None:
        """Let the newest processes of some cells meet until they make a round; they start again if they stop."""
        outcome: Wait | Recovery | str = "nobody is here"
        reaching = self.chance.choice(sorted(cells)) if cells else 0
        stuck = max(-1, len(self.journal.records) - 4) if self.chance.random() < 0.5 else None
        for _ in range(20):
            self.stuck = None
            for cell in sorted(cells - {*self.newest_processes()}):
                self.start(cell)
            self.stuck = stuck
            members = [process for cell, process in sorted(self.newest_processes().items()) if cell in cells]
            if not members:
                return
            for process in members:
                process.reaches = process.cell == reaching
            outcome = self.meet(members, is_calm=True).outcome
            if outcome == "taken":
                self.counts["ends with a round"] += 1
                return
            awaited = outcome.cells if isinstance(outcome, Wait) else ()
            if isinstance(outcome, Recovery):
                awaited = outcome.missing
            if awaited and {*awaited} <= self.finished:
                self.counts["ends waiting for a finished cell"] += 1
                return
        raise Broken(f"c: no round comes about: {outcome}")


EVENTS = {
    "step": 15,
    "meet": 14,
    "advance": 52,
    "start": 8,
    "start a second": 1,
    "crash": 4,
    "save": 6,
    "leave": 4,
    "resolve": 6,
    "forget": 1,
    "reach": 2,
    "lose the journal": 0,  # see play()
}
"""How often each event happens in random histories, relative to the others"""


def happen(world: World, event: str) -> None:
    """Let one event happen to a random cell, if it can."""
    chance = world.chance
    running = world.newest_processes()
    process = chance.choice(world.processes) if world.processes else None
    if event == "start":
        stopped = [cell for cell in range(world.cells) if cell not in running]
        if stopped:
            world.start(chance.choice(stopped))
    elif event == "advance" and world.meetings:
        world.advance(chance.choice(world.meetings))
    elif event in ("meet", "advance"):
        members = [one for one in world.processes if one.meeting is None and chance.random() < 0.6]
        for one in members:
            if one.holding.doubt is None and chance.random() < 0.7:
                world.make_step(one)
        if members:
            world.meet(members)
    elif event == "lose the journal":
        world.lose_journal()
    elif event == "forget":
        world.forget(chance.randrange(world.cells))
    elif process is None:
        return
    elif event == "start a second":
        if len(world.processes) < world.cells + 2:
            world.start(process.cell)
    elif event == "step":
        if process.meeting is None or process.holding.doubt is not None:
            world.make_step(process)
    elif event == "crash":
        world.stop(process)
    elif event == "save":
        if world.owns_disk(process):
            world.save(process)
    elif event == "leave":
        if process.meeting is not None:
            world.lose_contact(process)
    elif event == "resolve":
        if process.holding.doubt is not None and process.reaches:
            world.lose_contact(process)
    elif event == "reach":
        process.reaches = not process.reaches
    world.check()


def play(seed: int, events: int = 60, worlds: type[World] = World) -> World:
    """Play one random history to its end; Broken where the rule does not hold."""
    chance = Random(seed)
    world = worlds(chance, chance.choice([2, 3, 3, 4, 5]))
    for cell in range(world.cells):
        if chance.random() < 0.9:
            world.start(cell)
    weights = {event: weight * chance.choice([0.3, 1.0, 2.0]) for event, weight in EVENTS.items()}
    loses_at = Random(~seed).randrange(2 * events)  # in half of the histories never
    try:
        for number, event in enumerate(chance.choices(list(weights), list(weights.values()), k=events)):
            happen(world, "lose the journal" if number == loses_at else event)
        world.end()
    except Broken as error:
        error.args = (f"{error} (seed {seed})",)
        error.log = world.log
        raise
    return world
