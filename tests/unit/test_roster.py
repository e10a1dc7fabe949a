"""The roster of an elastic federation: its rules, and thousands of interleavings of losses, doubts and returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xffl.elastic.roster import Attendance, CellRecord, Epoch, Standing, Version, form_epoch, least_cells
from xffl.errors import ConfigError


def life(cell: int, number: int = 0) -> str:
    return f"{cell}.{number}"


def agreed(number: int, *cells: int, lineage: str = "", created: int = 0) -> Version:
    return Version(number, created or number, lineage or f"lineage {number}", tuple(map(life, cells)))


START = Version()


def record(cell: int, version: Version = START, *, cells: int = 3, number: int = 0, **more: object) -> CellRecord:
    return CellRecord(cell, cells, life(cell, number), restarts=number, version=version, **more)  # type: ignore[arg-type]


def meet(*records: CellRecord, created: int = 1000, looks: int = 0) -> Epoch:
    return form_epoch(records, created, looks=looks)


def test_all_cells_begin_from_the_model_of_the_first() -> None:
    epoch = meet(record(2), record(0), record(1))
    assert (epoch.cells, epoch.first, epoch.behind, epoch.refusal) == ((0, 1, 2), 0, {1, 2}, "")
    assert epoch.next_version == meet(record(0), record(1), record(2)).next_version


def test_a_new_cell_takes_over_what_the_others_hold() -> None:
    version = agreed(7, 0, 1, 2)
    other = record(0, agreed(5, 0), number=1, total_weight=90.0)
    epoch = meet(other, *(record(cell, version, total_weight=70.0) for cell in (1, 2)))
    assert (epoch.first, epoch.behind, epoch.base.round, epoch.refusal) == (1, {0}, 7, "")
    assert epoch.total_weight == 70.0  # and not what led to the model that is given up


def test_cells_without_the_runs_model_wait_for_one_that_may_hold_it() -> None:
    epoch = meet(record(1, number=1), record(2, number=1))
    assert epoch.refusal == "no cell here holds an agreed model, and cell 0 may; see that it runs"
    told = "a run begins with more than half of its cells, but only cell 1 came"
    assert meet(record(1, cells=2)).refusal == told
    assert not meet(record(1), record(2)).refusal  # in their first lives more than half: cell 0 has begun nothing
    assert not meet(record(0, number=1), record(1, number=1), record(2, number=1)).refusal  # nobody else could


def test_a_minority_makes_no_round() -> None:
    assert meet(record(0, agreed(4, 0, 1, 2))).refusal == "a round needs 2 of 3 cells, but only cell 0 came"
    assert [least_cells(cells) for cells in (1, 2, 3, 4, 5)] == [1, 1, 2, 3, 3]


def test_of_two_cells_each_goes_on_alone() -> None:
    for cell in (0, 1):
        assert not meet(record(cell, agreed(4, 0, 1), cells=2)).refusal


def test_of_two_halves_the_one_with_the_lowest_cell_goes_on() -> None:
    version = agreed(4, 0, 1, 2, 3)
    first, second = ([record(cell, version, cells=5) for cell in half] for half in ((0, 1), (2, 3)))
    joiner = record(4, cells=5)
    assert not meet(*first, joiner).refusal
    assert meet(*second, joiner).refusal == "cells 0, 1 may hold a later model than round 4; see that they run"
    # Their lives of then have ended; one alone may have gone on with the other before it did.
    again = [record(cell, number=1, cells=5) for cell in (0, 1)]
    assert meet(*second, joiner, again[0]).refusal == "cell 1 may hold a later model than round 4; see that it runs"
    # And with one that has never met these.
    assert meet(*second, *again).refusal == "cell 4 may hold a later model than round 4; see that it runs"
    assert not meet(*second, *again, joiner).refusal


def test_cells_that_see_which_lives_have_ended_go_on_however_few_they_are() -> None:
    version = agreed(4, 0, 1, 2, 3)

    def one(cell: int, *living: int, **more: object) -> CellRecord:
        return record(cell, version, cells=4, living=tuple(map(life, living)), **more)

    assert not form_epoch([one(2, 2, 3), one(3, 2, 3)], 1000).refusal  # nor do they look again
    assert not form_epoch([one(3, 3)], 1000).refusal
    assert not meet(one(3, 3), record(1, cells=4, number=1, living=(life(3),))).refusal
    assert meet(one(2, 2, 3), one(3, 1, 2, 3)).refusal == "a round needs 3 of 4 cells, but only cells 2, 3 came"
    assert meet(one(2, 2, 3), record(3, version, cells=4)).refusal  # is on another machine, and sees nothing
    assert form_epoch([one(3, 3)], 1000, least=2).refusal == "a round needs 2 of 4 cells, but only cell 3 came"
    # Nobody holds a model yet: a run begins with more than half.
    assert meet(record(3, cells=4, living=())).refusal == "a round needs 3 of 4 cells, but only cell 3 came"


def test_who_has_been_in_all_meetings_knows_that_nobody_went_on_without_it() -> None:
    version = agreed(4, 0, 1)

    def again(met: int, number: int, **more: Any) -> str:
        own = record(1, version, met=met, **{"same_lighthouse": True, "has_met_all": True, **more})
        return form_epoch([record(0, number=1), own], 1000, number, looks=0).refusal

    told = "cell 2 may hold a later model than round 4; see that it runs"
    assert not again(7, 8)  # cell 2 has not come yet
    assert again(7, 9) == told  # cell 0 may have made a round with it
    assert again(7, 8, same_lighthouse=False) == told
    assert again(7, 8, has_met_all=False) == told


def test_who_has_missed_a_meeting_never_claims_again_to_have_been_in_all() -> None:
    """Cells 0 and 2 make round 2 in meeting 9, cell 2 is cut off, 0 and 1 make round 3 in meeting 10 and are lost."""
    version = Version(2, 900, "lineage 2", (life(0), life(2)))
    attendance = Attendance()
    attendance.note(9, created=900)

    def meets_cell_0(number: int, created: int) -> str:
        """Let cell 2 meet cell 0, which was started again without a checkpoint."""
        own = record(
            2,
            version,
            same_lighthouse=True,
            met=attendance.last_number,
            has_met_all=attendance.covers(version),
        )
        epoch = form_epoch([record(0, number=1), own], created, number, looks=0)
        attendance.note(number, created)
        return epoch.refusal

    told = "cell 1 may hold a later model than round 2; see that it runs"
    # The refused meeting is one that cell 2 was in; it does not close the gap before it.
    assert [meets_cell_0(number, 1000 + number) for number in (14, 14, 15, 16)] == [told] * 4
    # Without the gap nobody can have gone on without it.
    attendance = Attendance()
    attendance.note(9, created=900)
    assert not meets_cell_0(10, 1010)


def test_a_gap_is_forgotten_with_the_round_that_it_came_before() -> None:
    attendance = Attendance()
    attendance.note(3, created=300)
    attendance.note(5, created=500)  # meeting 4 was one of others
    attendance.note(5, created=501)
    attendance.note(6, created=600)
    assert attendance.covers(agreed(1, 0, created=500), None)
    assert attendance.covers(agreed(1, 0, created=501), agreed(2, 0, created=600))
    assert not attendance.covers(agreed(1, 0, created=300), agreed(2, 0, created=600))
    attendance.note(2, created=700)  # of a lighthouse that was started again
    assert not attendance.covers(agreed(1, 0, created=600))
    attendance.note(3, created=800)
    attendance.forget_before(800)
    assert attendance.covers(agreed(1, 0, created=800)) and not attendance.covers(agreed(1, 0, created=700))


def test_the_next_life_of_a_cell_votes_for_one_that_has_ended_in_order() -> None:
    version = agreed(4, 0, 1)
    told = "cell 2 may hold a later model than round 4; see that it runs"
    here = record(1, version)
    # Cell 0, with which the lighthouse went, is back.
    assert meet(record(0, version, number=1), here).refusal == told
    assert not meet(record(0, version, number=1, inherited=(life(0),)), here).refusal
    # Both are back.
    again = [record(cell, version, number=1, inherited=(life(cell),)) for cell in (0, 1)]
    assert not meet(*again).refusal
    assert meet(replace(again[0], inherited=()), again[1]).refusal == told
    # Of a version that is not the one they go on from it says nothing.
    older = record(0, agreed(3, 0, 1), number=1, inherited=(life(0),))
    assert meet(older, here).refusal == told


def test_an_old_checkpoint_does_not_outvote_who_may_be_alive() -> None:
    old = agreed(4, 0, 1, 2)
    assert "cell 2 may hold a later model" in meet(record(0, old, number=1), record(1, old, number=1)).refusal
    assert not meet(*(record(cell, old, number=1) for cell in range(3))).refusal


def test_who_was_there_last_is_looked_for_twice() -> None:
    version = agreed(4, 0, 1, 2)
    here = [record(0, version), record(1, version)]
    first = form_epoch(here, 1000)
    assert first.looks_again
    assert first.refusal == "cell 2 may still come"
    assert not form_epoch([replace(one, looks=1) for one in here], 1001).refusal
    assert not form_epoch([replace(one, left=(2,)) for one in here], 1000).refusal  # it has left
    assert form_epoch([record(0), record(1)], 1000).refusal == "cell 2 may still come"  # all are started at once


def test_a_lighthouse_that_has_formed_the_last_round_is_asked_once() -> None:
    version, older = agreed(4, 0, 1, 2), agreed(3, 0, 1, 2)
    here = [record(0, version), record(1, version, same_lighthouse=True)]
    assert not form_epoch(here, 1000).refusal
    # Nor does it look for anybody, where a newcomer has asked long before.
    comer = [*(replace(one, cells=4) for one in here), record(3, cells=4)]
    assert form_epoch(comer, 1000).refusal == "cell 2 may still come"
    assert not form_epoch([replace(one, looks=1) for one in comer], 1000).refusal
    # Of an older round it says nothing.
    assert form_epoch([record(0, version), record(1, older, same_lighthouse=True)], 1000).looks_again


def test_a_doubt_is_ended_by_who_took_the_round_or_refused_it() -> None:
    old, new = agreed(4, 0, 1, 2), agreed(5, 0, 1, 2, created=900)
    doubter = record(0, old, doubt=new)
    assert meet(doubter, record(1, new)).base == new
    assert meet(doubter, record(1, old)).base == old  # it was there and did not take it: nobody has
    both = meet(doubter, record(1, old, doubt=new))
    assert (both.base, both.behind) == (new, frozenset())  # cell 2 may have taken it
    assert meet(doubter, record(1, number=1), record(2, number=1)).base == new


def test_what_a_standing_makes_of_each_end_of_a_round() -> None:
    epoch = meet(record(0), record(1), record(2, is_finished=True))
    taken, doubting = Standing(), Standing()
    taken.take(epoch)
    assert (taken.version.round, taken.left) == (1, (2,))
    doubting.suspect(epoch)
    assert doubting.version == Version()
    after = meet(record(0, taken.version, left=taken.left), record(1, doubt=doubting.doubt))
    assert doubting.settle(after, 1) is True
    assert (doubting.version, doubting.left, doubting.doubt) == (taken.version, (2,), None)
    assert doubting.settle(after, 1) is None


def test_a_group_is_kept_by_just_its_members() -> None:
    version = agreed(4, 0, 1, 2)
    name = meet(*(record(cell, version) for cell in range(3))).group
    members = [record(cell, version, group=name) for cell in range(3)]
    assert meet(*members).keeps_group
    assert not meet(*members[:2]).keeps_group
    assert not meet(*members[:2], record(2, number=1)).keeps_group
    assert not meet(*members[:2], replace(members[2], group="")).keeps_group  # it is broken there


def test_records_travel_as_text_and_must_go_together() -> None:
    one = record(1, agreed(4, 0, 1), doubt=agreed(5, 0, 1), left=(2,), group="5.17/2", living=(life(1),))
    assert CellRecord.from_plain(one.to_plain()) == one
    with pytest.raises(ConfigError, match=r"different numbers of cells \(cell 0: 3, cell 1: 4\)"):
        meet(record(0), record(1, cells=4))
    with pytest.raises(ConfigError, match="^new of the record of cell 1 is unknown; .*run one version of xffl in all"):
        CellRecord.from_plain({**one.to_plain(), "new": 1})
    # The number is read before anything else, which may be told otherwise in that format.
    with pytest.raises(ConfigError, match=r"^the exchange format of cell 1 is 9 \(xffl 9.1\), that of this cell "):
        CellRecord.from_plain({"cell": 1, "format": 9, "runtime": {"xffl": "9.1"}, "new": 1})
    with pytest.raises(ConfigError, match=r"^the exchange format of cell 1 is unknown, that of this cell is \d "):
        CellRecord.from_plain({"cell": 1})
    assert meet(record(0), record(0, number=1), record(1)).refusal.startswith("cell 0 is there twice")


def test_a_newcomer_with_other_settings_ends_no_run() -> None:
    version = agreed(4, 0, 1)
    members = [record(0, version), record(1, version)]
    for stranger in (record(2, cells=4), record(1, number=1, replica_size=2)):
        epoch = meet(*members, stranger)
        assert epoch.cells == (0, 1) and epoch.strangers == (stranger,) and not epoch.refusal
    with pytest.raises(ConfigError):
        meet(*members, record(2, version, cells=4))  # it has a model, too: nobody can tell who is right


@dataclass
class Job:
    """A cell that runs: what it holds, as the steps that are in it, and the steps that no round has counted."""

    life: str
    restarts: int
    standing: Standing
    model: frozenset[str]
    waiting: frozenset[str] = frozenset()
    doubted: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # its model then, and its steps in it
    kept: frozenset[str] = frozenset()  # its steps since it last took a model over: none may get lost
    looks: int = 0
    has_begun: bool = False  # it has entered an epoch, so it may hold the run's model
    living: tuple[str, ...] | None = None  # what it has seen when it asked, and waits since
    attendance: Attendance = field(default_factory=Attendance)
    lighthouses: tuple[int, int] = (-1, -1)  # which has formed the epoch of its version, and of its doubt
    inherited: tuple[Version, tuple[str, ...]] = (START, ())  # a version, and lives that have left it their votes


class Federation(RuleBasedStateMachine):
    """Cells that step, meet in any company, die and return, while rounds break at any point.

    Two cells count on it that who is absent is dead, so there all that live meet.
    """

    @initialize(cells=st.integers(2, 5), late=st.sampled_from([0, 0, 1]), sees_lives=st.booleans())
    def begin(self, cells: int, late: int, sees_lives: bool) -> None:
        self.cells, self.clock, self.sees_lives = cells, 0, sees_lives
        self.lighthouse, self.number, self.met = 0, 0, set[str]()
        self.jobs: dict[int, Job] = {}
        self.lives = [0] * cells
        self.saved: dict[int, tuple[Version, frozenset[str]]] = {}
        self.contents: dict[Version, frozenset[str]] = {}
        self.votes: dict[int, tuple[Version, tuple[str, ...]]] = {}
        for cell in range(max(1, cells - late)):
            self.start(cell, False)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def start(self, cell: int, uses_checkpoint: bool) -> None:
        number = self.lives[cell]
        self.lives[cell] += 1
        own = life(cell, number)
        version, model = Version(), frozenset({f"start of {own}"})
        if uses_checkpoint and cell in self.saved:
            version, model = self.saved[cell]
        self.jobs[cell] = Job(own, number, Standing(version), model)
        self.jobs[cell].inherited = self.votes.pop(cell, (START, ()))

    @rule(cell=st.integers(0, 4), fate=st.sampled_from(["dies", "is started again", "is started from a checkpoint"]))
    def fail(self, cell: int, fate: str) -> None:
        cell %= self.cells
        self.jobs.pop(cell, None)
        if fate != "dies":
            self.start(cell, fate == "is started from a checkpoint")

    @precondition(lambda self: self.jobs)
    @rule(cell=st.integers(0, 4), comes_back=st.booleans())
    def leave(self, cell: int, comes_back: bool) -> None:
        """Let a cell end in order, between rounds: what it has saved has its vote, once."""
        cell %= self.cells
        job = self.jobs.get(cell)
        if job is None or job.standing.doubt is not None:
            return
        self.save(cell)
        version, lives = job.inherited
        lives = (job.life, *(lives if version == job.standing.version else ()))
        self.votes[cell] = job.standing.version, tuple(one for one in lives if one in job.standing.version.voters)
        self.jobs.pop(cell)
        if comes_back:
            self.start(cell, True)

    @precondition(lambda self: len(self.saved) > 1)
    @rule()
    def fail_all(self) -> None:
        for cell in range(self.cells):
            self.jobs.pop(cell, None)
            self.start(cell, True)

    @precondition(lambda self: self.jobs)
    @rule(cell=st.integers(0, 4))
    def save(self, cell: int) -> None:
        if (job := self.jobs.get(cell % self.cells)) and job.standing.version.is_agreed:
            self.saved[cell % self.cells] = job.standing.version, job.model

    def living(self) -> tuple[str, ...] | None:
        return tuple(job.life for job in self.jobs.values() if job.has_begun) if self.sees_lives else None

    @precondition(lambda self: self.jobs)
    @rule(cell=st.integers(0, 4))
    def ask(self, cell: int) -> None:
        if (job := self.jobs.get(cell % self.cells)) and job.living is None:
            job.living = self.living()

    @rule()
    def start_lighthouse(self) -> None:
        self.lighthouse, self.number, self.met = self.lighthouse + 1, 0, set()

    # Most rules are meetings, since faults lie between them.
    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def meet_well(self, data: st.DataObject) -> None:
        self.meet(data, "h")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def meet_in_doubt(self, data: st.DataObject) -> None:
        self.meet(data, "hd")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def meet_badly(self, data: st.DataObject) -> None:
        self.meet(data, "hhdxn")

    def meet(self, data: st.DataObject, ends: str) -> None:
        for job in self.jobs.values():
            step = f"{job.life} step {self.tick()}"
            job.waiting |= {step}
            job.kept |= {step}
        here = set(self.jobs)
        if self.cells > 2:
            enough = 1 if self.sees_lives else min(least_cells(self.cells), len(here))
            here = data.draw(st.sets(st.sampled_from(sorted(here)), min_size=enough), "here")
        jobs = {cell: self.jobs[cell] for cell in sorted(here)}
        records = [
            CellRecord(
                cell,
                self.cells,
                job.life,
                job.restarts,
                version=job.standing.version,
                doubt=job.standing.doubt,
                inherited=job.inherited[1] if job.inherited[0] == job.standing.version else (),
                looks=job.looks,
                living=self.living() if job.living is None else job.living,
                met=job.attendance.last_number,
                has_met_all=job.attendance.covers(job.standing.version, job.standing.doubt),
                same_lighthouse={*job.lighthouses[: 1 if job.standing.doubt is None else 2]} == {self.lighthouse},
            )
            for cell, job in jobs.items()
        ]
        lives = {job.life for job in jobs.values()}
        self.number, self.met = self.number + (lives != self.met), lives
        epoch = form_epoch(records, self.tick(), self.number, looks=0)
        for job in jobs.values():
            job.living = None
            job.attendance.note(self.number, epoch.created)
        assert not epoch.refusal or len(here) < self.cells, "all are here, so none is waited for"
        if epoch.refusal:
            return
        for cell, job in jobs.items():
            job.has_begun = True
            if job.standing.settle(epoch, cell):
                job.lighthouses = job.lighthouses[1], -1
                job.model, used = job.doubted
                job.waiting -= used
        self.round(epoch, jobs, data, ends)

    def round(self, epoch: Epoch, jobs: dict[int, Job], data: st.DataObject, ends: str) -> None:
        first = jobs[epoch.first]
        assert first.standing.version == epoch.base
        if not epoch.base.is_agreed:
            holders = [cell for cell, job in self.jobs.items() if job.standing.version.is_agreed]
            assert not holders, f"cells {holders} hold the run's model, and others begin anew"
        result = first.model
        for cell, job in jobs.items():
            if cell not in epoch.behind:
                assert job.model == first.model, f"cell {cell} contributes steps from another model"
                assert not job.waiting & result, "a step counts twice"
                result |= job.waiting
        fates = ["h"] * len(jobs)
        if ends != "h":
            fates = data.draw(st.lists(st.sampled_from(ends), min_size=len(jobs), max_size=len(jobs)), "fates")
        for (cell, job), fate in zip(jobs.items(), fates, strict=True):
            if fate == "x":
                self.jobs.pop(cell)
            elif fate == "n" or ("n" in fates and fate == "h"):  # without its yes nobody takes the round
                job.standing.refuse()
            elif fate == "d":
                job.standing.suspect(epoch)
                job.lighthouses = job.lighthouses[0], self.lighthouse
                job.doubted = result, job.waiting
                job.kept = frozenset() if cell in epoch.behind else job.kept
            else:
                job.standing.take(epoch)
                job.lighthouses = self.lighthouse, -1
                job.model, job.waiting = result, frozenset()
                job.kept = frozenset() if cell in epoch.behind else job.kept
                for other, alive in self.jobs.items():
                    holds = alive.standing.version
                    base = epoch.base
                    # From a checkpoint; where runs were begun anew, the one with more rounds goes on.
                    is_old = not alive.has_begun and (holds.round, holds.created) < (base.round, base.created)
                    assert alive.model <= result or not holds.is_agreed or is_old, (
                        f"a round leaves out what cell {other} holds"
                    )

    @invariant()
    def holds(self) -> None:
        for cell, job in self.jobs.items() if hasattr(self, "jobs") else ():
            version, model = job.standing.version, job.model
            if version.is_agreed:
                assert self.contents.setdefault(version, model) == model, f"two models are called {version}"
            if job.standing.doubt is not None:
                model = self.contents.setdefault(job.standing.doubt, job.doubted[0])
                assert model == job.doubted[0], f"two models are called {job.standing.doubt}"
            assert job.kept <= job.waiting | model, f"cell {cell} lost steps"


TestFederation = Federation.TestCase
TestFederation.settings = settings(
    max_examples=400, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
