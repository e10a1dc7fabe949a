"""The samples of all cells are counted on where a run goes on without the rounds' own state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xffl.distributed.distributed_state import DistributedState, set_cell_world
from xffl.distributed.parameters import ElasticParameters
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.errors import ConfigError
from xffl.training.mixins.federated import FederatedMixin, FederationConfig


class Counting(FederatedMixin):
    """Has rounds of which nothing but the counts is there."""

    def __init__(self, *, rounds: int, weight: float) -> None:
        self.rounds = 5
        asked = FederationConfig(every=2, weight="samples", max_samples=100)
        self.config: Any = SimpleNamespace(federation=asked)
        self._scaling: Any = SimpleNamespace(total_weight=weight, aggregator=SimpleNamespace(rounds=rounds))

    def lone_cell(self) -> Any:
        return None


@pytest.mark.parametrize("is_reset", [False, True])
def test_training_ends_after_the_samples_of_all_starts(is_reset: bool) -> None:
    before = Counting(rounds=5, weight=90.0)
    saved = before.counters()
    assert saved["total_weight"] == 90.0 and not before.has_federation_ended
    trainer = Counting(rounds=0, weight=0.0) if is_reset else Counting(rounds=5, weight=90.0)
    trainer.load_counters(saved)
    trainer.on_resumed()
    assert trainer.total_weight == 90.0 and not trainer.has_federation_ended
    trainer._scaling.total_weight += 10.0
    assert trainer.has_federation_ended and trainer.counters()["total_weight"] == 100.0
    again = Counting(rounds=0, weight=0.0)  # changed a second time
    again.load_counters(trainer.counters())
    again.on_resumed()
    assert again.total_weight == 100.0


def test_older_checkpoints_do_not_tell() -> None:
    trainer = Counting(rounds=0, weight=0.0)
    trainer.load_counters({})
    trainer.on_resumed()
    assert trainer.total_weight == 0.0


class Placed(Counting):
    def lone_cell(self) -> Any:
        return self.state.lone_cell


def test_a_configuration_says_how_long_an_elastic_cell_waits_for_others() -> None:
    state = DistributedState()
    trainer: Any = Placed(rounds=0, weight=0.0)
    trainer.strategy = SimpleNamespace(state=state, world=SimpleNamespace(state=state))
    trainer.config.federation = FederationConfig(every=2, meeting_timeout_s=7)
    trainer.configure()
    assert state.elastic is None
    set_cell_world(state, CellWorld(1, (1, 1), ElasticParameters(lighthouse="http://10.0.0.1:29510")))
    trainer.configure()
    assert state.elastic is not None and state.elastic.meeting_timeout_s == 7
    with pytest.raises(ConfigError, match=r"federation\.meeting_timeout_s .*; give seconds"):
        FederationConfig(every=2, meeting_timeout_s=0)
