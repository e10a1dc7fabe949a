"""What a cell does with the journal: it reads, publishes, and ends its doubts; in a folder and through the service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.journal_records import attempt_after
from xffl.errors import CheckpointError, ConfigError
from xffl.journal.cell import LEAST_PUT_S, UNKNOWN_PUT_S, CellJournal
from xffl.journal.folder import JournalFolder
from xffl.journal.records import (
    Journal,
    JournalUnreachable,
    ModelId,
    Record,
    RoundRecord,
    VoidRecord,
)
from xffl.journal.service import JournalService, RemoteJournal
from xffl.journal.who_continues import Continue, Fate, Wait, forget_of, recover_record

TOKEN = b"a token of the run"


@pytest.fixture(params=["folder", "service"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    """Return a function that opens the run's journal anew, as another process does."""
    folder = JournalFolder(tmp_path)
    if request.param == "folder":
        yield lambda: JournalFolder(tmp_path)
        return
    service = JournalService(folder, TOKEN, "127.0.0.1", 0)
    yield lambda: RemoteJournal(service.url, TOKEN)
    service.close()


def meet(*cells: CellJournal) -> Continue | Wait:
    """Let cells meet, record their starts, and decide."""
    first = cells[0]
    for _ in range(5):
        for cell in cells:
            cell.read_for([other.as_member() for other in cells])
        members = [cell.as_member() for cell in cells]
        assert not any(first.history.is_superseded(member) for member in members)
        if not first.record_starts(members):
            return first.history.choose_base(members)
    raise AssertionError("the starts are never recorded")


def attempt_of(base: RoundRecord | None, *cells: CellJournal) -> RoundRecord:
    """Let all cells say yes to an attempt."""
    members = [cell.as_member() for cell in cells]
    attempt = attempt_after(cells[0].history, base, members, dict.fromkeys(range(3), 1.0))
    for cell in cells:
        cell.holding.say_yes(attempt)
    return attempt


def settle(cell: CellJournal, standing: Record) -> Fate:
    """End a cell's doubt by a record, and read it."""
    cell.read_to(standing.number)
    return cell.holding.settle(standing)


def make_round(*cells: CellJournal) -> list[Fate]:
    decision = meet(*cells)
    assert isinstance(decision, Continue)
    standing = cells[0].publish(attempt_of(decision.base, *cells))
    return [settle(cell, standing) for cell in cells]


def test_rounds_and_a_cell_that_comes_late(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    assert make_round(zero, one) == [Fate.GAVE, Fate.TOOK_OVER]
    assert make_round(zero, one) == [Fate.GAVE, Fate.GAVE]
    two = CellJournal(opened(), 2)
    assert two.since == two.history.newest == 2  # the starts, and two rounds
    assert make_round(zero, one, two) == [Fate.GAVE, Fate.GAVE, Fate.TOOK_OVER]
    assert {cell.holding.model for cell in (zero, one, two)} == {zero.holding.model}
    newest = next(zero.history.rounds())
    assert (newest.round, newest.cells, newest.weights) == (3, (0, 1, 2), (1.0, 1.0, 0.0))
    assert meet(two) == Continue(newest)  # the others are gone, and it holds the model


def test_a_doubt_ends_by_what_stands(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    make_round(zero, one)
    base = next(zero.history.rounds())
    taken = attempt_of(base, zero, one)
    assert settle(zero, zero.publish(taken)) is Fate.GAVE  # and is lost before it tells
    told = one.ask_for(taken, 0.0)
    assert told == taken
    assert (settle(one, told), one.holding.model) == (Fate.GAVE, taken.model)
    lost = attempt_of(meet_base(zero, one), zero, one)  # nobody publishes it
    assert one.ask_for(lost, 0.0) is None  # it may still come
    void = one.ask_for(lost, 2 * one.give_up_s)
    assert isinstance(void, VoidRecord) and settle(one, void) is Fate.PUT_BACK
    assert zero.publish(lost) == void  # the late link of a slow publisher
    assert (settle(zero, void), zero.holding.model) == (Fate.PUT_BACK, taken.model)
    assert make_round(zero, one) == [Fate.GAVE, Fate.GAVE]


def meet_base(*cells: CellJournal) -> RoundRecord | None:
    decision = meet(*cells)
    assert isinstance(decision, Continue)
    return decision.base


def test_a_cell_goes_on_from_a_checkpoint(opened: Callable[[], Journal]) -> None:
    """Saved while a round was in doubt, it is that of the model before, and its cell is behind who has taken it."""
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    make_round(zero, one)
    attempt = attempt_of(meet_base(zero, one), zero, one)
    model = one.holding.model
    settle(zero, zero.publish(attempt))
    again = CellJournal(opened(), 1)
    again.begin(model)
    again.check()
    assert meet(again) == Wait(attempt, (0,))
    assert meet(again, zero) == Continue(attempt)
    assert again.holding.model == model
    one.read_new()
    with pytest.raises(ConfigError, match="another job is cell 1 of this run since record 3 of the journal"):
        one.check()
    again.begin(ModelId("f" * 32, 0, "f" * 32))
    with pytest.raises(ConfigError, match="cell 1 holds the model of record 0 of run"):
        again.check()


def test_a_job_that_loads_an_older_model_is_another_start(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    make_round(zero, one)
    older = one.holding.model
    make_round(zero, one)
    before = one.start
    one.begin(older)
    one.check()
    assert one.start != before
    assert meet(zero, one) == Continue(next(zero.history.rounds()))
    assert not zero.history.may_hold(1, next(zero.history.rounds()))


def test_a_record_that_comes_in_time_is_waited_for(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    make_round(zero, one)
    attempt = attempt_of(meet_base(zero, one), zero, one)
    assert one.ask_for(attempt, one.give_up_s / 2) is None
    assert zero.publish(attempt) == attempt
    assert one.ask_for(attempt, 0.0) == attempt
    lost = attempt_of(meet_base(zero, one), zero, one)
    assert isinstance(one.ask_for(lost, one.give_up_s), VoidRecord)
    assert one.give_up_s >= 2 * LEAST_PUT_S  # so that a slow publisher does not always lose


def test_cells_without_the_model_wait_for_one_that_has_it(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    make_round(zero, one)
    make_round(one)
    newest = next(one.history.rounds())
    assert meet(zero) == Wait(newest, (1,))
    again = CellJournal(opened(), 1)  # has lost it
    assert meet(zero, again) == Continue(zero.history.round_of(zero.holding.model))


def test_of_many_attempts_one_is_taken(opened: Callable[[], Journal]) -> None:
    """Sides of a divided network that all reach the journal try the same number."""
    cells = [CellJournal(opened(), cell) for cell in range(3)]
    make_round(*cells)
    base = meet_base(*cells)
    for cell in cells:
        cell.read_new()
    attempts = [attempt_of(base, cell) for cell in cells]
    fates: dict[int, Fate] = {}

    def publish(number: int) -> None:
        fates[number] = settle(cells[number], cells[number].publish(attempts[number]))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fate.value for fate in fates.values()) == ["gave", "put back", "put back"]
    winner = next(number for number, fate in fates.items() if fate is Fate.GAVE)
    for number in {0, 1, 2} - {winner}:
        assert meet(cells[number]) == Wait(attempts[winner], (winner,))


class OldView:
    """A journal whose newest records are not seen for a while."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.newest = 10**6
        self.looks = 0

    @property
    def where(self) -> str:
        return self.journal.where

    def heed(self, is_stopping: Callable[[], bool] | None) -> None:
        self.journal.heed(is_stopping)

    def put(self, record: Record) -> Record:
        return self.journal.put(record)

    def read_from(self, number: int) -> list[Record]:
        self.looks -= 1
        newest = self.newest if self.looks > 0 else 10**6
        return [record for record in self.journal.read_from(number) if record.number <= newest]


def test_an_old_view_is_read_again(opened: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.journal.cell.READ_AGAIN_S", 0.01)
    zero = CellJournal(opened(), 0)
    view = OldView(opened())
    one = CellJournal(view, 1, patience_s=5.0)
    make_round(zero, one)
    make_round(zero)
    view.newest, view.looks = one.history.newest, 5
    decision = meet(one, zero)
    assert isinstance(decision, Continue) and decision.base is not None and decision.base.round == 2
    make_round(zero)
    impatient = CellJournal(view, 2, patience_s=0.0)
    view.newest, view.looks = impatient.history.newest, 10**6
    make_round(zero)
    with pytest.raises(JournalUnreachable, match="which another cell has seen, cannot be read here"):
        impatient.read_for([zero.as_member()])


def test_a_folder_to_which_nothing_of_the_others_comes_is_refused_by_name(tmp_path: Path) -> None:
    zero = CellJournal(JournalFolder(tmp_path / "here"), 0)
    one = CellJournal(JournalFolder(tmp_path / "there"), 1, patience_s=0.2)
    zero.record_starts([zero.as_member(), one.as_member()])
    with pytest.raises(ConfigError, match=f"does not come to {tmp_path}/there.*or use the service of a host"):
        one.read_for([zero.as_member(), one.as_member()])


def test_an_attempt_is_given_up_after_many_times_a_put(opened: Callable[[], Journal]) -> None:
    cell = CellJournal(opened(), 0)
    assert cell.give_up_s == UNKNOWN_PUT_S
    make_round(cell)
    assert LEAST_PUT_S <= cell.give_up_s < UNKNOWN_PUT_S


def test_records_that_decide_nothing_any_more_are_not_kept(
    opened: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.cell.LEAST_PRUNED", 4)
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    models = []
    for _ in range(12):
        make_round(zero, one)
        models.append(next(zero.history.rounds()).model)
    assert zero.history.newest == 12 and zero.history.oldest > 3
    whole = CellJournal(opened(), 2).history
    assert zero.history.run == whole.run and [*zero.history.rounds()] == [*whole.rounds()][: 13 - zero.history.oldest]
    # Cell 1 comes back with an older checkpoint than any that is kept: the journal is read again, and it is behind.
    again = CellJournal(opened(), 1)
    again.begin(models[0])
    again.check()
    assert make_round(zero, again) == [Fate.GAVE, Fate.TOOK_OVER]
    assert zero.history.oldest == models[0].number


def test_a_forgotten_cell_that_runs_goes_on_when_the_journal_has_been_pruned(
    opened: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.cell.LEAST_PRUNED", 0)
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    for _ in range(3):
        make_round(zero, one)
    base = next(zero.history.rounds())
    for cell in (1, 0):
        one.read_new()
        one.publish(forget_of(one.history, cell))
    again = CellJournal(opened(), 1)  # it has lost its model, and cell 0 was only slow
    assert meet(zero, again) == Continue(base)
    assert {zero.history.oldest, again.history.oldest} == {base.number}


def test_a_start_is_not_recorded_over_a_later_one_of_its_cell(opened: Callable[[], Journal]) -> None:
    zero, one = (CellJournal(opened(), cell) for cell in range(2))
    members = [zero.as_member(), one.as_member()]
    # Another job of cell 1 begins, and comes to a meeting before that of the others has ended.
    another = CellJournal(opened(), 1)
    another.record_starts([another.as_member()])
    zero.read_new()
    zero.record_starts(members)
    another.read_new()
    assert another.history.has_start(zero.start)
    another.check()
    one.read_new()
    with pytest.raises(ConfigError, match="another job is cell 1 of this run since record 0"):
        one.check()


@pytest.mark.parametrize("is_longer", [False, True], ids=["shorter", "longer"])
@pytest.mark.parametrize("what", ["read", "put"])
def test_a_journal_that_takes_the_place_of_another_is_refused_by_name(
    tmp_path: Path, opened: Callable[[], Journal], what: str, is_longer: bool
) -> None:
    cell = CellJournal(opened(), 0)
    make_round(cell)
    attempt = attempt_of(cell.history.round_of(cell.holding.model), cell)
    for file in tmp_path.glob("*.json"):
        file.unlink()
    other = CellJournal(JournalFolder(tmp_path), 1)
    other.publish(recover_record())
    while is_longer and other.history.newest < attempt.number:
        other.read_new()
        other.publish(forget_of(other.history, 1))
    if what == "put" and is_longer:
        with pytest.raises(CheckpointError, match=f"that of run {attempt.run}, and there is that of run"):
            cell.publish(attempt)
    with pytest.raises(CheckpointError, match="another journal has taken the place.*cell 0.*--recover"):
        cell.read_new()


def test_a_journal_that_lacks_what_was_read_is_unreachable_and_says_so(
    tmp_path: Path, opened: Callable[[], Journal]
) -> None:
    cell = CellJournal(opened(), 0)
    make_round(cell)
    for file in tmp_path.glob("*.json"):
        file.unlink()
    with pytest.raises(JournalUnreachable, match=r"does not have record 1 any more.*--recover"):
        cell.read_new()


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
def test_a_cell_that_is_to_stop_does_not_wait_for_the_journal(
    tmp_path: Path, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.service.SILENT_S", 60.0)
    service = JournalService(JournalFolder(tmp_path), TOKEN, "127.0.0.1", 0)
    cell = CellJournal(RemoteJournal(service.url, TOKEN), 0)
    service.close()
    port = int(service.url.rpartition(":")[2])
    begun = time.monotonic()
    cell.heed(lambda: time.monotonic() > begun + 0.5)
    silent = socket.create_server(("127.0.0.1", port)) if is_silent else nullcontext()
    with silent, pytest.raises(JournalUnreachable):
        cell.read_new()
    assert time.monotonic() - begun < 30.0
