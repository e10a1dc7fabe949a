"""What becomes of the steps that a loop offers: rounds of one job, of cells that come and go, and over files."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from xffl.aggregation.algorithms.every_steps import EverySteps
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.federated_scaling import Countdown, FederatedScaling
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.aggregation.rounds import elastic
from xffl.aggregation.rounds.choose import choose_rounds
from xffl.aggregation.rounds.config import RoundArguments, RoundConfig
from xffl.aggregation.rounds.elastic import ElasticRounds
from xffl.aggregation.rounds.loop_hooks import LoopHooks, check_hooks
from xffl.aggregation.rounds.offer import (
    Averaged,
    Empty,
    HandedOver,
    Outcome,
    Part,
    RoundOffer,
    Skipped,
    Snapshot,
    StepLedger,
    outcome_of,
)
from xffl.errors import ConfigError, MeetingLeft, RoundError, StateError
from xffl.training import trainer

CONFIG = RoundConfig(EverySteps(2), None, {}, delay=0, alpha=None)


def report_of(number: int, weights: tuple[float, ...] = (1.0, 1.0), **more: Any) -> RoundReport:
    return RoundReport(round=number, weights=weights, bytes_across=0, bytes_home=0, seconds=0.0, **more)


class Activity:
    def note_round(self) -> None:
        """Do nothing."""


class State:
    """What the backends ask a state."""

    cell, cells, activity = 0, 2, Activity()
    elastic: object = object()
    lone_cell = (0, (1, 1))


class Meetings:
    """Stands for an ElasticAggregator: ``plan`` has what is to happen, ``given`` the steps that it was given."""

    fragments, total_weight, lineage, can_go_on = 1, 0.0, "a", True

    def __init__(self, *unused: object, **options: object) -> None:
        self.rounds = 0
        self.is_closed = False
        self.under_way: object | None = None
        self.is_in_doubt = self.is_behind = self.is_founding = False
        self.taken_over: frozenset[int] = frozenset()
        self.has_handed_over = False
        self.plan: list[str] = []
        self.given: list[float | None] = []
        self.told: list[object] = []
        self.dropped = 0

    @property
    def next_fragment(self) -> int:
        return 0

    def open(self, *, is_finished: bool = False, told: object = None, is_stopping: Callable[[], bool] | None) -> None:
        self.told.append(told)
        self.taken_over = frozenset()
        if is_stopping is not None and is_stopping():
            raise MeetingLeft

    def end_doubt(self, is_stopping: Callable[[], bool] | None = None) -> RoundReport | None:
        if not self.is_in_doubt:
            return None
        what = self.plan.pop(0)
        if what == "no answer before a stop":
            raise MeetingLeft
        if what == "no answer":
            raise RoundError("the journal does not answer")
        self.is_in_doubt = False
        if what == "it was taken":
            self.rounds += 1
            return report_of(self.rounds)
        return None

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        self.given.append(None if given.is_absent else given.steps)
        what = self.plan.pop(0)
        if what in ("broken", "in doubt"):
            self.is_in_doubt = what == "in doubt"
            raise RoundBroken(what)
        if what == "over":
            return None
        self.rounds += 1
        self.taken_over = frozenset({0} if what in ("taken over", "handed over") else ())
        self.has_handed_over = what == "gave its model"
        return report_of(self.rounds, (1.0, 1.0) if what in ("taken", "taken over") else (0.0, 0.0))

    def aggregate_async(self, weight: object, **unused: object) -> object:
        self.under_way = object()
        return self.under_way

    def discard(self) -> None:
        self.dropped += 1
        self.is_in_doubt = False
        self.under_way = None

    def close(self) -> None:
        self.is_closed = True

    def give_back_groups(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        if self.under_way is not None:
            raise StateError("a round is under way")
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.is_in_doubt = False


class Loop:
    """A loop with the rounds of an elastic federation, which counts as FederatedScaling does."""

    def __init__(self, *plan: str, hooks: LoopHooks | None = None) -> None:
        model = nn.Linear(2, 2)
        self.rounds = ElasticRounds(model, State(), CONFIG)  # type: ignore[arg-type]
        self.rounds.open()
        aggregator: Any = self.rounds.aggregator
        self.meetings: Meetings = aggregator
        self.meetings.plan.extend(plan)
        self.ledger = StepLedger(model, (), None)
        self.hooks = LoopHooks() if hooks is None else hooks
        self.ended: list[tuple[type, int, float]] = []

    @property
    def offer(self) -> RoundOffer:
        return RoundOffer(self.ledger, CONFIG, self.hooks, lambda: None)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.ledger.tracker.add_step(1.0)
            self.ledger.timer.steps += 1

    def make_round(self) -> list[Outcome]:
        return self.follow(self.rounds.round(self.offer))

    def follow(self, ends: Iterable[Outcome]) -> list[Outcome]:
        outcomes = []
        for outcome in ends:
            outcomes.append(outcome)
            if outcome.report is not None and outcome.taken is not None:
                self.ended.append((type(outcome), outcome.report.round, outcome.taken.effort))
                self.ledger.tracker.commit(outcome.taken)
        return outcomes

    @property
    def waiting(self) -> list[int]:
        return list(self.ledger.tracker.state_dict(self.rounds.doubted)["steps"])


@pytest.fixture(autouse=True)
def meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "ElasticAggregator", Meetings)
    return


def test_a_round_that_breaks_is_made_again_with_the_same_steps() -> None:
    loop = Loop("broken", "broken", "taken")
    loop.step(3)
    loop.make_round()
    assert loop.meetings.given == [3.0, 3.0, 3.0] and loop.ended == [(Averaged, 1, 3.0)] and loop.waiting == [0]


def test_steps_of_a_round_in_doubt_count_once_it_is_known_to_be_taken_and_before_the_next_is_tried() -> None:
    loop = Loop("in doubt", "it was taken", "taken")
    loop.step(3)
    outcomes = loop.rounds.round(loop.offer)
    first = next(iter(outcomes))
    assert first.report is not None and first.report.round == 1 and first.taken == Snapshot(0, 3, 3.0, 0.0, False)
    assert loop.meetings.given == [3.0], "the next round is not tried before the loop has accounted for this one"
    loop.ledger.tracker.commit(first.taken)
    loop.step(2)
    [second] = outcomes
    assert second.report is not None and second.report.round == 2 and loop.meetings.given == [3.0, 2.0]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_steps_of_a_round_in_doubt_that_was_not_taken_count_in_the_next_one(is_stopped: bool) -> None:
    hooks = LoopHooks(is_stopping=lambda: is_stopped and len(loop.meetings.given) == 1)
    loop = Loop("in doubt", "it was not taken", *([] if is_stopped else ["taken"]), hooks=hooks)
    loop.step(3)
    outcomes = loop.make_round()
    if is_stopped:
        assert not outcomes and loop.waiting == [3] and loop.rounds.doubted is None
    else:
        assert loop.meetings.given == [3.0, 3.0] and loop.ended == [(Averaged, 1, 3.0)] and loop.waiting == [0]


@pytest.mark.parametrize("how", ["load", "discard"])
def test_other_weights_end_a_doubt_here_and_in_the_aggregator(how: str) -> None:
    loop = Loop("in doubt", "no answer", "taken")
    loop.step(3)
    with pytest.raises(RoundError, match="does not answer"):
        loop.make_round()
    assert loop.meetings.is_in_doubt and loop.rounds.doubted is not None
    if how == "load":
        loop.rounds.load_state_dict({"aggregator": {"rounds": 0}, "total_weight": 5.0})
        assert loop.rounds.needs_join and loop.rounds.state_dict()["total_weight"] == 5.0
    else:
        loop.rounds.discard()
        assert loop.meetings.dropped == 1
    assert not loop.meetings.is_in_doubt and loop.rounds.doubted is None
    loop.step(2)
    loop.make_round()
    assert loop.ended == [(Averaged, 1, 2.0)]


@pytest.mark.parametrize(("what", "kind"), [("taken over", Averaged), ("handed over", HandedOver)])
def test_a_cell_whose_model_was_replaced_is_told_so(what: str, kind: type) -> None:
    loop = Loop(what)
    loop.step(1)
    [outcome] = loop.make_round()
    assert type(outcome) is kind and outcome.taken_over == {0} and outcome.parts == {0: Part.TOOK_OVER}


def test_a_cell_that_has_handed_its_model_over_has_lost_nothing() -> None:
    loop = Loop("gave its model")
    [outcome] = loop.make_round()
    assert type(outcome) is HandedOver and not outcome.taken_over and outcome.parts == {0: Part.GAVE}


def test_steps_of_fragments_that_were_replaced_are_forgotten_and_others_wait_on() -> None:
    counts = [5.0, 2.0]
    ledger = StepLedger(nn.Linear(2, 2), (), lambda: counts.pop())
    ledger.clear(fragments=2)
    ledger.tracker.add_step()
    assert ledger.count(0) == 2.0
    ledger.tracker.add_step()
    ledger.forget_steps({0})
    assert not counts and not ledger.tracker.is_waiting(0) and ledger.tracker.is_waiting(1)
    state = ledger.tracker.state_dict()
    assert (state["steps"], state["efforts"], state["counts"]) == ([0, 2], [0.0, 2.0], [0.0, 7.0])


def test_where_all_have_finished_there_is_no_round() -> None:
    [outcome] = Loop("over").make_round()
    assert outcome == Empty(None) and outcome.is_last


def test_a_cell_that_leaves_the_first_meeting_may_save_before_and_join_later() -> None:
    called: list[str] = []
    hooks = LoopHooks(
        is_stopping=lambda: not called, before_final_rounds=lambda: called.append("saved"), tell=lambda: {"ranks": 1}
    )
    loop = Loop("nothing given", "taken", hooks=hooks)
    with pytest.raises(MeetingLeft):
        list(loop.rounds.join(loop.offer))
    assert called == ["saved"] and loop.rounds.needs_join
    list(loop.rounds.join(loop.offer))
    assert not loop.rounds.needs_join
    loop.make_round()
    assert loop.meetings.told == [None, None, {"ranks": 1}], "who joins has measured nothing since a round"


def test_a_cell_that_joins_gives_the_steps_that_wait_once_also_where_the_round_was_in_doubt() -> None:
    loop = Loop("broken", "in doubt", "it was taken", "nothing given")
    loop.step(3)
    [counted, joined] = loop.follow(loop.rounds.join(loop.offer))
    assert loop.meetings.given == [3.0, 3.0, None] and loop.ended == [(Averaged, 1, 3.0)] and loop.waiting == [0]
    assert counted.parts == {0: Part.GAVE} and joined == Empty(None)


def test_a_block_begins_again_behind_an_error_that_has_left_a_round_under_way() -> None:
    loop = Loop("taken")
    loop.step(3)
    list(loop.rounds.start(loop.offer))
    loop.rounds.close(KeyError("an error of the loop"))
    loop.rounds.open()
    assert not loop.rounds.is_under_way and loop.waiting == [3]


def test_a_cell_that_is_to_stop_in_doubt_while_it_joins_may_save_before_and_its_steps_count_once() -> None:
    called: list[list[int]] = []
    hooks = LoopHooks(before_final_rounds=lambda: called.append(loop.waiting))
    loop = Loop("in doubt", "no answer before a stop", "it was taken", "nothing given", hooks=hooks)
    loop.step(3)
    with pytest.raises(MeetingLeft):
        loop.follow(loop.rounds.join(loop.offer))
    assert called == [[3]] and loop.rounds.needs_join
    loop.follow(loop.rounds.join(loop.offer))
    assert loop.meetings.given == [3.0, None] and loop.ended == [(Averaged, 1, 3.0)] and loop.waiting == [0]


def test_outcomes_say_what_this_cell_did() -> None:
    taken = Snapshot(0, 1, 1.0, 1.0, False)

    def parts(report: RoundReport, cell: int = 0, *, is_absent: bool = False) -> tuple[type, Part, bool]:
        outcome = outcome_of(report, taken, cell, is_absent=is_absent)
        return type(outcome), outcome.parts[report.fragment], outcome.counts

    assert parts(report_of(1)) == (Averaged, Part.GAVE, True)
    assert parts(report_of(1, fragment=3), is_absent=True) == (Averaged, Part.NEITHER, True)
    assert parts(report_of(1, dropped=(1,)), 1) == (Averaged, Part.NEITHER, True)
    assert parts(report_of(1, (0.0, 0.0))) == (Empty, Part.NEITHER, True)
    assert parts(report_of(1, is_skipped=True)) == (Skipped, Part.NEITHER, False)
    assert outcome_of(report_of(1, is_last=True), taken, 0, is_absent=False).is_last
    assert isinstance(ElasticRoundReport(**vars(report_of(1))), RoundReport)


def test_schedules_and_clients_see_only_rounds_to_which_cells_gave_something() -> None:
    assert {kind: (kind.has_values, kind.is_written) for kind in (Averaged, HandedOver, Empty, Skipped)} == {
        Averaged: (True, True),
        HandedOver: (False, True),  # the model is another one, of which a client takes note, but no mean of variates
        Empty: (False, False),
        Skipped: (True, False),  # all have told how long their steps take
    }
    scheduled: list[RoundReport | None] = []

    class Noting(EverySteps):
        def steps(self, rounds: int, cell: int, report: RoundReport | None) -> int:
            scheduled.append(report)
            return 1

    countdown = Countdown(Noting(1), 0, is_endless=False)
    for weights in ((1.0, 1.0), (0.0, 0.0)):
        countdown.load({"since": 0, "target": 1, "report": asdict(report_of(2, weights))})
        countdown.restart(2)
    assert scheduled == [report_of(2), None]


def test_hooks_that_cannot_be_called_and_what_are_no_hooks_are_refused_by_name() -> None:
    wrong: Any = 5
    with pytest.raises(ConfigError, match="^hook tell must be a function or None, got int; give LoopHooks"):
        LoopHooks(tell=wrong)
    for hooks, told in ((wrong, "got int"), ({"tell": dict}, "got dict"), (LoopHooks, "got the class LoopHooks")):
        with pytest.raises(ConfigError, match=f"^hooks must be LoopHooks or None, {told}; give "):
            check_hooks(hooks)


def test_hooks_are_joined_and_either_may_hold_a_round() -> None:
    tells = LoopHooks(tell=dict, defers_start=lambda: False)
    held: list[bool] = []
    both = tells.joined_with(LoopHooks(is_stopping=lambda: True, defers_start=lambda: bool(held)))
    assert both.tell is dict and both.is_stopping is not None and both.before_final_rounds is None
    assert both.defers_start is not None and not both.defers_start()
    held.append(True)
    assert both.defers_start() and tells.joined_with(LoopHooks()).defers_start is not None
    assert LoopHooks().joined_with(LoopHooks()) == LoopHooks()


@pytest.mark.parametrize("name", ["before_final_rounds", "tell", "is_stopping", "defer_start"])
def test_what_was_an_attribute_and_is_a_hook_is_refused_by_name(name: str) -> None:
    scaling = object.__new__(FederatedScaling)
    with pytest.raises(StateError, match=rf"FederatedScaling.{name} is no attribute any more; give hooks=LoopHooks\("):
        setattr(scaling, name, lambda: True)
    with pytest.raises(StateError, match=rf"FederatedScaling.{name} is no attribute any more"):
        getattr(scaling, name)


def test_an_elastic_federation_makes_its_own_aggregator() -> None:
    asked = RoundArguments(2, torch, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="makes its own aggregator, got module; give aggregator as a mapping"):
        choose_rounds(nn.Linear(1, 1), State(), CONFIG, asked)  # type: ignore[arg-type]


def test_rounds_of_one_job_import_nothing_of_other_kinds() -> None:
    code = (
        "import sys, xffl.aggregation.federated_scaling, xffl.aggregation.rounds.network\n"
        "print([one for one in sys.modules if one.startswith(('torchft', 'xffl.elastic', 'xffl.checkpoint')) or one in "
        "('xffl.aggregation.federations.elastic', 'xffl.aggregation.exports')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_divergence_of_a_round_leaves_out_cells_that_were_left_out() -> None:
    report = report_of(3, weights=(1.0, 0.0, 3.0), update_norms=(2.0, math.nan, 4.0), dropped=(1,))
    assert trainer._divergence_of(report) == {"rms": math.sqrt((4.0 + 3.0 * 16.0) / 4.0)}
    assert trainer._divergence_of(report_of(3, weights=(0.0,), update_norms=(1.0,))) is None
    assert trainer._divergence_of(report_of(3)) is None
