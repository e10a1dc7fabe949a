"""The samples of all cells are counted on where a run goes on without the rounds' own state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xffl.training.mixins.federated import FederatedMixin, FederationConfig


class Counting(FederatedMixin):
    """Has rounds of which nothing but the counts is there."""

    def __init__(self, *, rounds: int, weight: float) -> None:
        self.rounds = 5
        asked = FederationConfig(every=2, weight="samples", max_samples=100)
        self.config: Any = SimpleNamespace(federation=asked)
        self._scaling: Any = SimpleNamespace(total_weight=weight, aggregator=SimpleNamespace(rounds=rounds))

    def lone_cell(self) -> None:
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
