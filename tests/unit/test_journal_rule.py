"""The rule of the journal: random histories hold it, and each of its conditions is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.journal_model import EVENTS, Broken, MemoryJournal, Process, World, happen, play
from tests.journal_records import RUN, attempt_after, next_round
from xffl.errors import CheckpointError, ConfigError
from xffl.journal.records import (
    ForgetRecord,
    ModelId,
    Record,
    RoundRecord,
    Start,
    StartRecord,
    VoidRecord,
)
from xffl.journal.who_continues import Continue, Fate, History, Holding, Member, Recovery, Wait, void_of

# Each condition is needed ---------------------------------------------------------------------------------------------


def first_broken(worlds: type[World], seeds: Iterable[int]) -> Broken | None:
    """Return how the first history ends that breaks the rule."""
    for seed in seeds:
        try:
            play(seed, worlds=worlds)
        except Broken as error:
            return error
    return None


class GoesOnWithWhoIsHere(History):
    def may_hold(self, cell: int, record: RoundRecord) -> bool:
        return False


class ForgetsForEver(History):
    def may_hold(self, cell: int, record: RoundRecord) -> bool:
        forgotten = (isinstance(other, ForgetRecord) and other.cell == cell for other in self._records)
        return not any(forgotten) and super().may_hold(cell, record)


class BelievesAnyStart(History):
    """An earlier start counts as well, although a later one may have taken the model over again."""

    def may_hold(self, cell: int, record: RoundRecord) -> bool:
        starts = [start for other in self._records if isinstance(other, StartRecord) for start in other.starts]
        older = (start.cell == cell and (start.held is None or start.held.number < record.number) for start in starts)
        return not any(older) and super().may_hold(cell, record)


class KeepsOldStarts(History):
    def is_superseded(self, member: Member) -> bool:
        return False


class TrustsUnrecordedStarts(History):
    def is_superseded(self, member: Member) -> bool:
        recorded = (start.id for other in self._records if isinstance(other, StartRecord) for start in other.starts)
        return member.start in recorded and super().is_superseded(member)


class RecoversWithWhoIsHere(History):
    def find_recovery(self, members: Sequence[Member], federation: int) -> Recovery | None:
        recovery = super().find_recovery(members, federation)
        is_wait = recovery is None or recovery.newest is None
        return None if is_wait else replace(recovery, missing=())  # type: ignore[type-var]


class RecoversAnyModel(History):
    def find_recovery(self, members: Sequence[Member], federation: int) -> Recovery | None:
        recovery = super().find_recovery(members, federation)
        lost = [member.lost for member in members if member.lost is not None]
        return replace(recovery, newest=lost[0]) if recovery is not None and lost else recovery


class ForgetsWhatALostModelIsCalled(History):
    def find_recovered(self, lost: ModelId | None) -> ModelId | None:
        return None


class ComparesNumbers(Holding):
    def settle(self, standing: Record) -> Fate:
        fate = super().settle(standing)
        if fate is Fate.PUT_BACK and isinstance(standing, RoundRecord):
            self.model = ModelId(standing.run, standing.number, "0" * 32)
            return Fate.GAVE
        return fate


class CountsAsGiven(Holding):
    """A cell that was behind goes on with its steps."""

    def settle(self, standing: Record) -> Fate:
        fate = super().settle(standing)
        return Fate.GAVE if fate is Fate.TOOK_OVER else fate


class Overwrites(MemoryJournal):
    def put(self, record: Record, chance: Random) -> Record:
        if record.number < len(self.records) and chance.random() < 0.1:
            self.records[record.number] = record
        return super().put(record, chance)


class Deletes(MemoryJournal):
    """Old records are gone, so that an old number may be put again."""

    def put(self, record: Record, chance: Random) -> Record:
        if record.number < len(self.records) - 1:
            self.records[record.number] = record
        return super().put(record, chance)


def world_of(
    *, history: type[History] = History, holding: type[Holding] = Holding, journal: type[MemoryJournal] = MemoryJournal
) -> type[World]:
    """Return a world in which another rule, or another journal, is used."""

    class Changed(World):
        histories, holdings, journals = history, holding, journal

    return Changed


class BelievesTheListing(World):
    def newest_for(self, history: History, members: object) -> int:
        return history.newest


class TakesLostContactForANo(World):
    def hear_end(self, process: Process, *, hears_no: bool) -> None:
        process.holding.doubt = None


class JudgesByTheError(World):
    """A reply that was lost is sent again; what comes back is that the number exists, and is taken for a failure."""

    def publish(self, attempt: RoundRecord) -> Record:
        standing = super().publish(attempt)
        return void_of(attempt) if self.chance.random() < 0.2 else standing


class SavesTheDoubtfulModel(World):
    def save(self, process: Process) -> None:
        super().save(process)
        saved = self.disks[process.cell]
        assert saved is not None
        if saved.doubt is not None:
            local = saved.local[saved.mark :]
            self.disks[process.cell] = replace(saved, model=saved.doubt.model, doubt=None, mark=0, local=local)


class SavesTheBaseOnly(World):
    """The attempt in doubt is not saved, and its steps are taken for new ones."""

    def save(self, process: Process) -> None:
        super().save(process)
        saved = self.disks[process.cell]
        assert saved is not None
        self.disks[process.cell] = replace(saved, doubt=None, mark=0, local=saved.local[saved.mark :])


class TakesOverBeforeTheRound(World):
    """A cell that is behind takes the base over before the record stands, so that no record names it as a holder."""

    def take_base(self, process: Process, base: RoundRecord) -> None:
        if process.holding.model != base.model:
            process.holding.model = base.model
            process.drop_steps()


class LosesStepsOfAVoid(World):
    def keep_steps(self, process: Process, fate: Fate) -> None:
        super().keep_steps(process, fate)
        if fate is Fate.PUT_BACK:
            process.local = process.local[process.mark :]


class CountsStepsTwice(World):
    def keep_steps(self, process: Process, fate: Fate) -> None:
        if fate is not Fate.GAVE:
            super().keep_steps(process, fate)


class KeepsReplacedSteps(World):
    """A cell whose model is replaced goes on with its steps."""

    def keep_steps(self, process: Process, fate: Fate) -> None:
        if fate is not Fate.TOOK_OVER:
            super().keep_steps(process, fate)


class TakesAnyJournal(World):
    """A cell does not see that another journal has taken the place of the one that it has read."""

    def has_read_another(self, process: Process) -> bool:
        return False


class PublishesByTheLowest(World):
    def choose_publisher(self, members: list[Process]) -> Process | None:
        lowest = min(members, key=lambda process: process.cell)
        return lowest if lowest.reaches else None


WITHOUT = {
    "waits for absent holders": (world_of(history=GoesOnWithWhoIsHere), "b"),
    "forgetting ends with a later record": (world_of(history=ForgetsForEver), "b"),
    "only the newest start counts": (world_of(history=BelievesAnyStart), "b"),
    "a number that a member has seen exists": (BelievesTheListing, "abcd"),
    "an older start stops": (world_of(history=KeepsOldStarts), "abcd"),
    "a start that others have overtaken stops": (world_of(history=TrustsUnrecordedStarts), "abcd"),
    "steps of a model that was replaced are dropped": (KeepsReplacedSteps, "d"),
    "a model is known by its id": (world_of(holding=ComparesNumbers), "ad"),
    "who was behind drops its steps": (world_of(holding=CountsAsGiven), "d"),
    "a record is never overwritten": (world_of(journal=Overwrites), "abcd"),
    "a record is never deleted": (world_of(journal=Deletes), "abcd"),
    "a no must be said": (TakesLostContactForANo, "abd"),
    "what stands decides, not the error": (JudgesByTheError, "abd"),
    "a doubtful model is saved as such": (SavesTheDoubtfulModel, "ad"),
    "the steps of a doubt are saved": (SavesTheBaseOnly, "d"),
    "a cell holds only what it took part in": (TakesOverBeforeTheRound, "b"),
    "steps of a void are put back": (LosesStepsOfAVoid, "d"),
    "steps of a round are dropped": (CountsStepsTwice, "d"),
    "a recovered run waits for all cells": (world_of(history=RecoversWithWhoIsHere), "b"),
    "the newest model of a lost journal is recorded": (world_of(history=RecoversAnyModel), "b"),
    "a model of a lost journal keeps its name": (world_of(history=ForgetsWhatALostModelIsCalled), "bc"),
    "who has read a lost journal stops": (TakesAnyJournal, "c"),
    "a member that reaches the journal publishes": (PublishesByTheLowest, "c"),
}


LATE = {"a start that others have overtaken stops": 4900}
"""The first history to play, where the rule is broken late"""


@pytest.mark.parametrize("condition", WITHOUT)
def test_each_condition_is_needed(condition: str) -> None:
    worlds, invariants = WITHOUT[condition]
    first = LATE.get(condition, 0)
    broken = first_broken(worlds, range(first, first + 5000))
    assert broken is not None and str(broken)[0] in invariants, broken


# Histories ------------------------------------------------------------------------------------------------------------


def test_random_histories_hold_the_rule() -> None:
    assert first_broken(World, range(1000)) is None


class Cells(RuleBasedStateMachine):
    """Events in an order that hypothesis chooses, and shortens where the rule is broken."""

    @initialize(seed=st.integers(0, 2**32), cells=st.integers(2, 4))
    def begin(self, seed: int, cells: int) -> None:
        self.world = World(Random(seed), cells)
        for cell in range(cells):
            self.world.start(cell)

    @rule(event=st.sampled_from([event for event in EVENTS if event not in ("meet", "advance")]))
    def one_cell(self, event: str) -> None:
        happen(self.world, event)

    @rule()
    def meet(self) -> None:
        happen(self.world, "meet")

    @precondition(lambda self: bool(self.world.meetings))
    @rule(count=st.integers(1, 6))
    def advance(self, count: int) -> None:
        for _ in range(count):
            happen(self.world, "advance")

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


class TestCells(Cells.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def history_of(*records: Record) -> History:
    history = History()
    history.add(records)
    return history


def member(cell: int, held: RoundRecord | None = None, *, start: str = "", since: int = -1) -> Member:
    return Member(cell, start or f"{cell:032x}", since, None if held is None else held.model)


def test_finished_cells_that_return_do_not_fork_the_run() -> None:
    """Cells 0 to 3 of five make a round, after which 2 and 3 have finished; cells 2 and 3 are started again later.

    Cell 0 goes on with the newcomer 4, and cell 1 with 2 and 3. By a majority of the cells of the last round both would
    be right: one is half of those that have not finished, the other more than half of all.
    """
    first = next_round(0, (0, 1, 2, 3), federation=5)
    starts = (Start(2, "c" * 32, first.model), Start(3, "d" * 32, first.model), Start(4, f"{4:032x}", None))
    history = history_of(first, StartRecord(RUN, 1, "e" * 32, starts))
    members = [[member(0, first), member(4)], [member(1, first), member(2, first), member(3, first)]]
    decisions = [history.choose_base(side) for side in members]
    assert decisions == [Continue(first)] * 2  # both may try, but there is one number
    attempts = [attempt_after(history, first, side, dict.fromkeys(range(5), 1), federation=5) for side in members]
    assert [attempt.number for attempt in attempts] == [2, 2]
    history.add(attempts[:1])
    assert history.choose_base(members[1]) == Wait(attempts[0], (0, 4))


class FormerRule(History):
    """A cell that was in the last meeting was taken to know of all rounds, also where that meeting was refused."""

    has_refused = False

    def choose_base(self, members: Sequence[Member]) -> Continue | Wait:
        decision = super().choose_base(members)
        self.has_refused = isinstance(decision, Wait)
        return decision

    def may_hold(self, cell: int, record: RoundRecord) -> bool:
        return not self.has_refused and super().may_hold(cell, record)


def test_an_older_model_is_not_taken_while_a_newer_one_lives() -> None:
    """Three cells: 0 and 2 make a round, 0 makes another one with 1 and is killed, and meets 2 without its model."""
    second = next_round(0, (0, 2))
    third = next_round(1, (0, 1), second)
    restart = StartRecord(RUN, 2, "b" * 32, (Start(0, "c" * 32, None),))
    history = history_of(second, third, restart)
    former = FormerRule()
    former.add((second, third, restart))
    here = [member(0, start="c" * 32), member(2, second)]
    for _ in range(3):  # however often they try
        assert history.choose_base(here) == Wait(third, (1,))
    assert history.choose_base([*here, member(1, third)]) == Continue(third)
    assert history.choose_base([member(1, third)]) == Continue(third)  # whoever holds it may go on alone
    # The rule before the journal took it at the second try, with which the run forked.
    assert [former.choose_base(here) for _ in range(2)] == [Wait(third, (1,)), Continue(second)]


def test_a_holder_that_is_forgotten_is_not_waited_for() -> None:
    first = next_round(0, (0, 1))
    second = next_round(1, (1,), first)
    history = history_of(first, second)
    assert history.choose_base([member(0, first)]) == Wait(second, (1,))
    history.add([ForgetRecord(RUN, 2, "f" * 32, 1)])
    assert history.choose_base([member(0, first)]) == Continue(first)
    again = next_round(3, (0, 1), first)
    history.add([again])
    assert history.choose_base([member(2)]) == Wait(again, (0, 1))  # it counts for what it has taken part in since


def test_cells_begin_anew_once_all_models_are_lost() -> None:
    first = next_round(0, (0, 1))
    starts = (Start(0, "c" * 32, None), Start(1, "d" * 32, None))
    history = history_of(first, StartRecord(RUN, 1, "e" * 32, starts))
    here = [member(0, start="c" * 32), member(1, start="d" * 32)]
    assert history.choose_base(here) == Continue(None)
    attempt = attempt_after(history, None, here, {0: 3, 1: 4})
    assert (attempt.cells, attempt.weights, attempt.federation, attempt.base) == ((0, 1), (3, 0), 3, None)


def test_a_cell_that_was_behind_takes_over() -> None:
    first = next_round(0, (0, 1))
    second = next_round(1, (0,), first)
    history = history_of(first, second)
    here = [member(0, second), member(1, first)]
    attempt = attempt_after(history, second, here, {0: 2, 1: 2})
    assert attempt.weights == (2, 0)
    fates = []
    for cell, held in ((0, second), (1, first), (2, None)):
        holding = Holding(cell, None if held is None else held.model)
        holding.say_yes(attempt)
        fates.append(holding.settle(attempt))
        assert holding.model == attempt.model and holding.doubt is None and holding.seen == 2
    assert fates == [Fate.GAVE, Fate.TOOK_OVER, Fate.TOOK_OVER]
    holding.say_yes(attempt)
    assert holding.settle(void_of(attempt)) is Fate.PUT_BACK
    with pytest.raises(ValueError, match="cell 2 has no doubt"):
        holding.settle(attempt)


def test_a_journal_is_refused_by_a_cell_that_holds_what_it_lacks() -> None:
    first = next_round(0, (0, 1))
    history = history_of(first)
    history.check_holder(0, first.model)
    history.check_holder(1, None)
    for other in (ModelId(RUN, 0, "b" * 32), ModelId("b" * 32, 0, first.id), ModelId(RUN, 7, first.id)):
        with pytest.raises(
            ConfigError, match=f"cell 1 holds the model of record {other.number} of run {other.run}.*--recover"
        ):
            history.check_holder(1, other)


def test_records_that_do_not_follow_are_refused() -> None:
    first = next_round(0, (0, 1))
    history = history_of(first)
    wrong: list[Record] = [
        VoidRecord(RUN, 2, "b" * 32),
        VoidRecord("b" * 32, 1, "b" * 32),
        replace(next_round(1, (0,), first), lineage="0" * 16),
        replace(next_round(1, (0,), first), round=3),
        replace(next_round(1, (0,), first), base=ModelId(RUN, 0, "b" * 32)),
        next_round(1, (0,), first, federation=2),
    ]
    for record in wrong:
        with pytest.raises(CheckpointError, match="does not follow"):
            history.add([record])
    assert history.newest == 0
