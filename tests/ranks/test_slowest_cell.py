"""A cell that is made slow is the one that the report of the recorded run names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_strategies import joined
from tests.tasks import TaskConfig, TaskTrainer
from tests.worlds import run_world
from xffl.parallel import DistributedConfig
from xffl.run_report.pace import find_slowest_cells, measure_waits
from xffl.run_report.reader import read_run
from xffl.training import Callback, ExperimentConfig, FederationConfig, TrainingParameters

PAUSE_S = 0.06
EVERY = 3
ROUNDS = 8


class Pause(Callback):
    """Make every local step of a cell longer."""

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(PAUSE_S)


def train(rank: int, world_size: int, folder: str, federation: dict[str, Any]) -> None:
    config = TaskConfig(
        experiment=ExperimentConfig(name="slow", output_dir=folder),
        distributed=DistributedConfig(strategy="single", federated=(1, 1)),
        training=TrainingParameters(epochs=8, max_steps=EVERY * ROUNDS, batch_size=16),
        federation=FederationConfig(every=EVERY, **federation),
        samples=150,
    )
    callbacks = [Pause()] if rank == 1 else []
    TaskTrainer(config, callbacks=callbacks).fit(joined(rank, world_size))


@pytest.mark.parametrize("federation", [{}, {"delay": 1}], ids=["blocking", "delayed"])
def test_the_slow_cell_of_a_recorded_run_is_found(federation: dict[str, Any], tmp_path: Path) -> None:
    run_world(2, train, str(tmp_path), federation)
    run = read_run(tmp_path)
    assert len(measure_waits(run)) >= ROUNDS
    found = find_slowest_cells(run)
    assert found is not None, measure_waits(run)
    assert found.cells == (1,)
    # Three pauses between two rounds; a local step of the other cell takes some milliseconds.
    assert PAUSE_S < found.waited < 3 * EVERY * PAUSE_S
