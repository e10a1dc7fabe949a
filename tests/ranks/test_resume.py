"""A run that was killed and resumed is the run that was not, to the last bit: weights and curves."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.test_strategies import joined
from tests.rows import some_of
from tests.tasks import TaskConfig, TaskTrainer, whole_weights
from tests.worlds import run_world
from xffl.checkpoint import find_latest_checkpoint
from xffl.distributed.parameters import DeviceParameters
from xffl.parallel import DistributedConfig
from xffl.training import Callback, ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback

STEPS = 22

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "single": {"ranks": 1, "strategy": "single"},
    "saved at epochs' ends": {"ranks": 1, "saving": {"every_epochs": 1}, "interval": "epoch", "batch_size": 40},
    "ddp, asynchronous": {"ranks": 2, "strategy": "ddp", "is_async": True},
    "diloco": {"ranks": 2, "federated": (1, 1), "federation": {"algorithm": "diloco", "every": 3}},
    "error feedback": {
        "ranks": 2,
        "federated": (1, 1),
        "federation": {"every": 3, "aggregator": {"codec": "int8"}},
        "accumulation": 2,
        "batch_size": 5,
    },
    "fragments with momentum": {
        "ranks": 3,
        "strategy": "fsdp",
        "federated": (1, 2),
        "federation": {"algorithm": "streaming_diloco", "every": 2},
    },
    "moments": {
        "ranks": 2,
        "federated": (1, 1),
        "federation": {"algorithm": "desloc", "every": 2},
    },
    "scaffold": {
        "ranks": 2,
        "federated": (1, 1),
        "federation": {"algorithm": "scaffold", "every": 3},
        "optimizer": "SGD",
    },
}


class Killer(Callback):
    """Kill this process before an optimizer steps."""

    def __init__(self, step: int, batch: int = 0) -> None:
        self.step, self.batch = step, batch

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        window = trainer.config.training.gradient_accumulation
        if trainer.global_step == self.step and trainer.local_batches % window == self.batch % window:
            os.kill(os.getpid(), signal.SIGKILL)


def configure(case: Case, folder: Path) -> TaskConfig:
    parameters = DeviceParameters(**case["mesh"]) if "mesh" in case else None
    saving = case.get("saving", {"every_rounds": 1} if "federated" in case else {"save_frequency": 4})
    return TaskConfig(
        experiment=ExperimentConfig(name="resume", output_dir=str(folder)),
        distributed=DistributedConfig(
            strategy=case.get("strategy", "single"), device_parameters=parameters, federated=case.get("federated")
        ),
        training=TrainingParameters(
            epochs=8,
            max_steps=STEPS,
            batch_size=case.get("batch_size", 16),
            gradient_accumulation=case.get("accumulation", 1),
            max_grad_norm=1.0,
            log_every=3,
            validate_every_steps=5,
            scheduler_interval=case.get("interval", "step"),
        ),
        federation=FederationConfig(**case.get("federation", {})),
        callbacks=[CheckpointCallback(**saving, keep_last_n=2, is_async=case.get("is_async", False))],
        samples=150,
        optimizer=case.get("optimizer", "AdamW"),
    )


def train(rank: int, world_size: int, case: Case, folder: str, killed: tuple[int, int, int] | None) -> Any:
    killers = [Killer(*killed[1:])] if killed is not None and killed[0] == rank else []
    weights: dict[str, torch.Tensor] = {}

    class Last(Callback):
        def post_fit(self, trainer: Any) -> None:
            weights.update(whole_weights(trainer.model))

    trainer = TaskTrainer(configure(case, Path(folder)), callbacks=[*killers, Last()])
    trainer.fit(joined(rank, world_size))
    return weights, trainer.global_step


def curves(folder: Path) -> dict[str, list[Any]]:
    """Return what was recorded, but for times."""
    found = {}
    for file in sorted(folder.glob("metrics/*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name] = [{name: value for name, value in record.items() if name != "time"} for record in records]
    return found


@pytest.mark.parametrize("name", some_of(CASES, "single", "diloco", "moments"))
def test_a_killed_run_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ranks = case["ranks"]
    draw = random.Random(name)
    whole = run_world(ranks, train, case, str(tmp_path / "whole"), None)
    assert {steps for _, steps in whole} == {STEPS}

    folder = tmp_path / "killed"
    killed = (draw.randrange(ranks), draw.randrange(5, STEPS), draw.randrange(3))
    run_world(ranks, train, case, str(folder), killed, mortal=range(ranks))
    assert not (folder / "checkpoints" / "final").exists()
    assert find_latest_checkpoint(folder) is not None, f"killed at {killed} before anything was saved"
    resumed = run_world(ranks, train, case, str(folder), None)

    for rank, ((mine, _), (theirs, _)) in enumerate(zip(resumed, whole, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(mine[key], tensor), f"{key} of rank {rank} differs, killed at {killed}"
    assert curves(folder) == curves(tmp_path / "whole"), f"killed at {killed}"
