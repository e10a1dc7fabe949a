"""The list of what features do to a round: its order, and what a stage may leave out."""

from __future__ import annotations

import itertools

import pytest

from xffl.aggregation.engine.stages.order import ORDER, in_order
from xffl.aggregation.engine.stages.stage import RoundStage


def bare(kind: type[RoundStage]) -> RoundStage:
    """A stage without what it needs in a round."""
    return object.__new__(kind)


def test_stages_keep_their_order_whichever_are_there() -> None:
    for count in range(len(ORDER) + 1):
        for kinds in itertools.combinations(ORDER, count):
            assert [type(stage) for stage in in_order(map(bare, kinds))] == list(kinds)


@pytest.mark.parametrize("first, second", list(itertools.product(range(len(ORDER)), repeat=2)))
def test_stages_out_of_order_and_twice_are_refused(first: int, second: int) -> None:
    stages = [bare(ORDER[first]), bare(ORDER[second])]
    if first < second:
        assert in_order(stages) == tuple(stages)
    else:
        with pytest.raises(AssertionError, match="out of order"):
            in_order(stages)


def test_what_stages_remember_has_names_of_its_own() -> None:
    keys = [kind.key for kind in ORDER if kind.key is not None]
    assert sorted(keys) == ["agreed", "codecs", "privacy"]  # as saved checkpoints have them


def test_a_bare_stage_changes_nothing_of_a_round() -> None:
    stage = RoundStage()
    context = object()
    assert stage.count(context, ()) is context  # type: ignore[arg-type]
    assert stage.status(0) == {} == stage.report() == stage.state_dict()
    assert not stage.inspects and not stage.is_over and list(stage.write(None, None)) == []  # type: ignore[arg-type]
