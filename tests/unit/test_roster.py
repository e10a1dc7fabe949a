"""The roster of an elastic federation: who may make a round, from which model, by what the journal has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.journal_records import next_round
from xffl.cluster.runtimes import Runtime
from xffl.elastic.federation import ElasticFederation
from xffl.elastic.roster import CellRecord, Epoch, form_epoch, is_life, least_cells
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
)
from xffl.journal.who_continues import Fate, History, Holding

RUN = "f" * 32
CELLS = 3


def start_of(cell: int, number: int = 0) -> str:
    return f"{number:016x}{cell:016x}"


class Journal:
    """The records of a run that three cells have started, and that each of them has read to its end."""

    def __init__(self, cells: int = CELLS) -> None:
        self.cells = cells
        self.history = History()
        self.add(StartRecord(RUN, 0, RUN, tuple(Start(cell, start_of(cell), None) for cell in range(cells))))

    def add(self, record: Record) -> None:
        self.history.add([record])

    def add_round(self, *cells: int, base: RoundRecord | None = None, left: tuple[int, ...] = ()) -> RoundRecord:
        number = self.history.newest + 1
        made = next_round(number, cells, base, federation=self.cells, left=left, run=RUN)
        self.add(made)
        return made

    def record(self, cell: int, held: RoundRecord | None = None, number: int = 0, **more: object) -> CellRecord:
        plain = {
            "start": start_of(cell, number),
            "since": self.history.newest if number else -1,
            "held": None if held is None else held.model,
            "seen": self.history.newest,
            "round": 0 if held is None else held.round,
        }
        return CellRecord(cell, self.cells, f"{cell}.{number}", **plain | more)  # type: ignore[arg-type]

    def restart(self, cell: int, held: RoundRecord | None = None) -> CellRecord:
        """Record another start of a cell, with what it holds from a checkpoint."""
        number = self.history.newest + 1
        model = None if held is None else held.model
        self.add(StartRecord(RUN, number, f"{number:032x}", (Start(cell, start_of(cell, number), model),)))
        return replace(self.record(cell, held, number), since=number - 1)

    def meet(self, *records: CellRecord, least: int | None = None) -> Epoch:
        return form_epoch(records, 1000, self.history, least=least)


def test_a_run_begins_from_the_model_of_the_lowest_cell() -> None:
    run = Journal()
    epoch = run.meet(run.record(2), run.record(0), run.record(1))
    assert (epoch.cells, epoch.first, epoch.behind, epoch.refusal) == ((0, 1, 2), 0, {1, 2}, "")
    attempt = epoch.attempt((3.0, 0.0, 0.0))
    assert attempt == run.meet(run.record(0), run.record(1), run.record(2)).attempt((3.0, 0.0, 0.0))
    assert (attempt.run, attempt.number, attempt.round, attempt.base) == (RUN, 1, 1, None)
    assert attempt.weights == (3.0, 0.0, 0.0)


def test_a_run_begins_with_more_than_half_of_its_cells() -> None:
    run = Journal()
    assert run.meet(run.record(0, gone=(1, 2))).refusal == "a round needs 2 of 3 cells, but only cell 0 came"
    epoch = run.meet(run.record(0), run.record(1))
    assert (epoch.refusal, epoch.missing) == ("cell 2 may still come", (2,))
    assert run.meet(run.record(0, gone=(2,)), run.record(1)).missing == (2,)
    assert not run.meet(run.record(0, gone=(2,)), run.record(1, gone=(2,))).refusal
    assert [least_cells(cells) for cells in (1, 2, 3, 4, 5)] == [1, 1, 2, 3, 3]


def test_a_run_goes_on_however_few_hold_its_model() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    assert run.meet(run.record(2, first)).missing == (0, 1)  # they may only be late
    alone = run.record(2, first, gone=(0, 1))
    epoch = run.meet(alone)
    assert (epoch.base, epoch.refusal) == (first, "")
    assert run.meet(alone, least=2).refusal == "a round needs 2 of 3 cells, but only cell 2 came"
    # What a cell says that is behind does not count: it has no way to ask those of the last round.
    assert not run.meet(alone, run.restart(1)).refusal


def test_a_cell_that_is_behind_takes_over_and_gives_nothing() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    second = run.add_round(1, 2, base=first)
    late = run.record(0, first, total_weight=90.0)
    here = [run.record(cell, second, total_weight=70.0) for cell in (1, 2)]
    epoch = run.meet(late, *here)
    assert (epoch.first, epoch.behind, epoch.base, epoch.refusal) == (1, {0}, second, "")
    assert epoch.total_weight == 70.0  # and not what led to the model that is given up
    attempt = epoch.attempt((4.0, 1.0, 1.0))
    assert attempt.weights == (0.0, 1.0, 1.0)
    fates = [Holding(member.cell, member.held).take(attempt) for member in epoch.members]
    assert fates == [Fate.TOOK_OVER, Fate.GAVE, Fate.GAVE]


def test_cells_without_the_newest_model_wait_for_those_that_may_hold_it() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    second = run.add_round(0, 1, base=first)
    epoch = run.meet(run.record(2, first))
    assert epoch.wait is not None and epoch.wait.cells == (0, 1)
    assert epoch.refusal == (
        "cells 0, 1 took part in round 2 (record 2) and may hold its model; start them, or give up what they hold"
    )
    zero = run.restart(0, first)
    epoch = run.meet(run.record(2, first), zero)
    assert epoch.refusal == (
        "cell 1 took part in round 2 (record 2) and may hold its model; start it, or give up what it holds"
    )
    run.add(ForgetRecord(RUN, run.history.newest + 1, "e" * 32, 1))
    epoch = run.meet(run.record(2, first, gone=(1,)), replace(zero, gone=(1,)))
    assert (epoch.base, epoch.refusal) == (first, "")
    assert run.meet(run.record(1, second)).base == second  # it may come back, and still holds it


def test_cells_that_have_all_lost_the_model_begin_anew() -> None:
    run = Journal()
    run.add_round(0, 1, 2)
    here = [run.restart(cell) for cell in range(3)]
    epoch = run.meet(*here)
    assert (epoch.base, epoch.first, epoch.behind, epoch.refusal) == (None, 0, {1, 2}, "")


def test_cells_that_begin_anew_say_that_the_model_is_lost_whoever_started_them_again() -> None:
    """As by hand, with other ranks: then no launcher counts the starts."""
    run = Journal()
    warned: list[str] = []
    cell: Any = SimpleNamespace(
        cell=0, _journal=SimpleNamespace(history=run.history), _warn=warned.append, _tell_runtimes=lambda epoch: None
    )
    ElasticFederation._warn_of(cell, run.meet(*map(run.record, range(CELLS))))
    assert not warned
    last = run.add_round(0, 1, 2)
    ElasticFederation._warn_of(cell, run.meet(run.record(0, last), run.restart(1), run.restart(2)))
    assert not warned
    epoch = run.meet(*map(run.restart, range(CELLS)))
    assert (epoch.base, epoch.refusal) == (None, "")
    ElasticFederation._warn_of(cell, epoch)
    assert warned == ["no cell holds an agreed model; the run begins from round 1"]


def test_starts_are_recorded_before_a_round_is_made() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    new = replace(run.record(1, number=5), since=run.history.newest)
    epoch = run.meet(run.record(0, first), new, run.record(2, first))
    assert epoch.has_new_starts and epoch.refusal == "the cells' starts are being recorded"


def test_of_two_jobs_of_one_cell_the_later_one_stays() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    again = run.restart(1)
    epoch = run.meet(*(run.record(cell, first) for cell in range(3)), again)
    assert epoch.lives == ("0.0", again.life, "2.0")
    assert not run.meet(run.record(1, first)).members


def test_cells_decide_by_what_all_of_them_have_read() -> None:
    """One cell has read a record that the others have not; all form the same epoch, and the number is then taken."""
    run = Journal()
    first = run.add_round(0, 1, 2)
    here = [run.record(cell, first) for cell in range(3)]
    before = run.meet(*here)
    run.add(VoidRecord(RUN, run.history.newest + 1, "d" * 32))
    assert run.meet(*here) == before
    seen = [here[0], replace(here[1], seen=run.history.newest), here[2]]
    assert run.meet(*seen).number == before.number + 1


def test_cells_that_have_finished_are_not_missed() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2, left=(1,))
    epoch = run.meet(run.record(0, first), run.record(2, first, is_finished=True))
    assert (epoch.left, epoch.refusal) == ((1,), "")
    assert epoch.attempt((1.0, 1.0)).left == (1, 2)
    back = run.restart(1, first)
    epoch = run.meet(run.record(0, first), back, run.record(2, first))
    assert epoch.attempt((1.0, 1.0, 1.0)).left == ()


def test_a_group_is_kept_by_just_its_members() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    name = run.meet(*(run.record(cell, first) for cell in range(3))).group
    members = [run.record(cell, first, group=name) for cell in range(3)]
    assert run.meet(*members).keeps_group
    assert not run.meet(*members[:2]).keeps_group
    assert not run.meet(*members[:2], run.restart(2)).keeps_group
    assert not run.meet(*members[:2], replace(members[2], group="")).keeps_group  # it is broken there


def test_records_travel_as_text_and_must_go_together() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    told = run.record(1, first, gone=(2,), group="5.17/2", told='{"a": 1}')
    assert CellRecord.from_plain(told.to_plain()) == told
    alone = replace(run.record(1), runtime=Runtime(processor="a GPU", torch="2.13.0"))
    assert CellRecord.from_plain(alone.to_plain()) == alone
    older = alone.to_plain() | {"runtime": {"torch": "2.13.0"}}  # of a version that tells less of itself
    assert CellRecord.from_plain(older).runtime == Runtime(torch="2.13.0")
    with pytest.raises(ConfigError, match=r"different numbers of cells \(cell 0: 3, cell 1: 4\)"):
        run.meet(run.record(0), replace(run.record(1), cells=4))
    with pytest.raises(ConfigError, match="^new of the record of cell 1 is unknown; .*run one version of xffl in all"):
        CellRecord.from_plain({**told.to_plain(), "new": 1})
    with pytest.raises(ConfigError, match="start of the record of cell 1 is no id"):
        CellRecord.from_plain({**told.to_plain(), "start": "x"})
    with pytest.raises(ConfigError, match="life of the record of cell 1 is 2.8f0c, one of cell 2"):
        CellRecord.from_plain({**told.to_plain(), "life": "2.8f0c"})
    # The number is read before anything else, which may be told otherwise in that format.
    with pytest.raises(ConfigError, match=r"^the exchange format of cell 1 is 9 \(xffl 9.1\), that of this cell "):
        CellRecord.from_plain({"cell": 1, "format": 9, "runtime": {"xffl": "9.1"}, "new": 1})
    with pytest.raises(ConfigError, match=r"^the exchange format of cell 1 is unknown, that of this cell is \d "):
        CellRecord.from_plain({"cell": 1})


@pytest.mark.parametrize(
    ("life", "is_one"), [(f"2.{start_of(2)}", True), (f"3.{start_of(3)}", False), ("2", False), ("x.8f0c", False)]
)
def test_who_has_not_proved_itself_may_be_anything(life: str, is_one: bool) -> None:
    """Those of this run are waited for; others, such as torchft's own members, are not."""
    assert is_life(life, CELLS) == is_one


def test_a_newcomer_with_other_settings_ends_no_run() -> None:
    run = Journal()
    first = run.add_round(0, 1)
    members = [run.record(0, first), run.record(1, first)]
    for stranger in (replace(run.record(2), cells=4), replace(run.record(2), replica_size=2)):
        epoch = run.meet(*members, stranger)
        assert epoch.cells == (0, 1) and epoch.strangers == (stranger,) and not epoch.refusal
    with pytest.raises(ConfigError):
        run.meet(*members, replace(run.record(2, first), cells=4))  # all began at once: nobody can tell who is right
    for more in ({"cells": 4}, {"replica_size": 2}):
        for again in (replace(run.record(1, first, number=9), **more), replace(run.restart(1, first), **more)):
            epoch = run.meet(members[0], again)
            assert epoch.cells == (0,) and epoch.strangers == (again,)


def test_the_journal_of_a_run_of_other_cells_is_refused() -> None:
    run = Journal()
    first = run.add_round(0, 1, 2)
    with pytest.raises(ConfigError, match="that of a run of 3 cells, and the cells here are of 4"):
        run.meet(*(replace(run.record(cell, first), cells=4) for cell in range(3)))


def test_a_model_of_another_journal_is_no_base() -> None:
    run = Journal()
    run.add_round(0, 1, 2)
    other = ModelId("e" * 32, 1, "e" * 32)
    epoch = run.meet(*(replace(run.record(cell), held=other) for cell in range(3)))
    assert epoch.base is None  # a cell refuses to hold it before it meets others: see CellJournal.check()


def test_a_journal_that_was_lost_goes_on_from_the_newest_model_that_a_cell_holds() -> None:
    lost = ModelId("e" * 32, 41, "1" * 32)
    newest = RoundRecord(
        run=lost.run,
        number=57,
        id="2" * 32,
        round=40,
        base=lost,
        lineage="3" * 16,
        cells=(1, 2),
        weights=(1.0, 1.0),
        federation=CELLS,
    )
    run = Journal()
    run.history = History()
    run.add(RecoverRecord(RUN, 0, RUN))
    run.add(StartRecord(RUN, 1, "4" * 32, tuple(Start(cell, start_of(cell), None) for cell in range(CELLS))))
    older, holder = run.record(0, lost=lost, gone=(1, 2)), run.record(1, lost=newest.model, gone=(0, 2))
    for here in ([older], [older, holder]):
        epoch = run.meet(*here)
        assert "the run's journal was lost, and cell" in epoch.refusal and epoch.recovering is None
    # Cells that hold no model cannot know whether one that is not here does.
    epoch = run.meet(*(run.record(cell, gone=(1,)) for cell in (0, 2)))
    assert "the run's journal was lost, and cell 1 may hold a newer model" in epoch.refusal
    assert run.meet(*(run.record(cell) for cell in range(CELLS))).refusal == ""
    with pytest.raises(ConfigError, match="the cells hold models of the runs"):
        run.meet(older, replace(holder, lost=ModelId("9" * 32, 3, "9" * 32)))
    run.add(ForgetRecord(RUN, 2, "5" * 32, 2))
    older, holder = (replace(record, seen=2) for record in (older, holder))
    epoch = run.meet(older, holder)
    assert (epoch.recovering, epoch.refusal) == (newest.model, "the newest model of the lost journal is being recorded")
    made = run.history.recover(newest, [1])
    run.add(made)
    epoch = run.meet(older, replace(holder, seen=3))
    assert (epoch.base, epoch.first, epoch.behind, epoch.refusal) == (made, 1, {0}, "")
    assert epoch.members[1].held == made.model
    following = epoch.attempt((1.0, 1.0))
    assert (following.round, following.weights) == (41, (0.0, 1.0))
    run.add(following)
    # Who comes with the recovered model later is behind, and is waited for no more.
    epoch = run.meet(replace(run.record(0, following), seen=4), replace(run.record(2, lost=newest.model), gone=()))
    assert epoch.behind == {2}
    assert epoch.members[1].held == made.model
    for wrong in (RecoverRecord(RUN, 5, "6" * 32), replace(made, number=5)):
        with pytest.raises(CheckpointError, match="recovers"):
            run.history.add([wrong])
