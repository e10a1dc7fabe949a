"""Which cells a round between jobs has to do without, by what their ranks have said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from xffl.aggregation.engine.decision.fitting_cells import AcceptedTraits, find_failed_cells, find_faulty_cells
from xffl.aggregation.engine.voting.votes import MergeMode, RoundStatus
from xffl.topology import Topology

Vote = Mapping[str, Any]
OLD: Vote = {"is_accepted": True, "weight": 3.0}
NEW: Vote = {"weight": 3.0}
UNIFORM: Vote = {"is_uniform": True, "weight": 1.0}


def votes_of(*told: Vote) -> list[RoundStatus]:
    return [RoundStatus(7, **vote) for vote in told]


@pytest.mark.parametrize(
    "told, faulty",
    [
        ([OLD, OLD, NEW, NEW], []),
        ([OLD, OLD, UNIFORM, UNIFORM], [1]),
        ([UNIFORM, UNIFORM, OLD, OLD], [0]),
        ([OLD | UNIFORM] * 2 + [NEW] * 2, [1]),
        # Of cells that are all new nobody knows which is wrong, nor of those that all go on as before.
        ([NEW, NEW, UNIFORM, UNIFORM], []),
        ([OLD, OLD, OLD | UNIFORM, OLD | UNIFORM], []),
        # The ranks of one cell
        ([OLD, OLD, NEW, UNIFORM], [1]),
        ([OLD, UNIFORM, UNIFORM, UNIFORM], [0]),
        ([OLD, OLD | {"is_failed": True}, UNIFORM, UNIFORM], [0]),
        # Two that are new, and wrong together, or each by itself
        ([OLD, OLD, NEW, NEW, UNIFORM, UNIFORM], [2]),
        ([OLD, OLD, UNIFORM, UNIFORM, UNIFORM, UNIFORM], [1, 2]),
        ([OLD | {"is_absent": True}] * 2 + [NEW] * 2 + [UNIFORM] * 2, [1, 2]),
        # Other things than weights
        ([OLD, OLD, {"weight": 1.7e308}, {"weight": 1e306}], []),
        ([OLD | {"weight": 1e308}, OLD, {"weight": 1.7e308}, NEW], [1]),
        ([OLD, OLD, NEW | {"is_flushing": True}, NEW | {"is_flushing": True}], [1]),
        (
            [OLD | {"merge": MergeMode.BLEND, "alpha": 0.5}] * 2 + [NEW | {"merge": MergeMode.BLEND, "alpha": 0.4}] * 2,
            [1],
        ),
        ([OLD | {"merge": MergeMode.BLEND, "alpha": 0.5}] * 2 + [NEW] * 2, []),  # it has finished
        # A cell that gives nothing says nothing of how it weighs
        ([OLD, OLD, {"is_absent": True}, {"is_absent": True}], []),
    ],
)
def test_a_cell_that_does_not_fit_those_before_is_at_fault(told: Sequence[Vote], faulty: list[int]) -> None:
    topology = Topology(len(told), (2,) * (len(told) // 2), None)
    assert sorted(find_faulty_cells(votes_of(*told), topology)) == faulty


def test_a_cell_of_which_a_rank_has_failed_is_at_fault_unless_it_has_lost_another_one() -> None:
    failed, lost = {"is_failed": True}, {"is_failed": True, "is_cut_off": True}
    topology = Topology(6, (2, 2, 2), None)
    assert find_failed_cells(votes_of(failed, {}, failed, lost, {}, {}), topology) == {0}


def test_what_a_rank_says_is_accepted_once_a_round_was_taken_in_which_it_said_so() -> None:
    traits = AcceptedTraits()

    def are_accepted(*told: Vote) -> list[bool]:
        return [traits.mark(vote).is_accepted for vote in votes_of(*told)]

    assert are_accepted(NEW) == [False]
    assert are_accepted(NEW) == [False]  # the round before was not taken
    traits.accept()
    delayed = {"weight": math.pi, "merge": MergeMode.KEEP_STEPS}
    assert are_accepted(NEW, {"weight": 5.0, "is_encoding": True}, UNIFORM, delayed) == [True, True, False, False]
    traits.accept()
    assert are_accepted(NEW, delayed, {"is_absent": True}, delayed | {"is_flushing": True}) == [True, True, True, False]
