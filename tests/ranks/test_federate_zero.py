"""A Trainer whose cell DeepSpeed shards: it trains what a loop by hand trains, killed and started again, too."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_federate import (
    EVERY,
    SIZES,
    Weights,
    be_by_hand,
    differ,
    import_once,
    make_model,
    make_trainer,
    run_job,
    weights_of,
)
from tests.worlds import be_launched, run_world
from xffl.distributed.startup.isolation import enter_isolation

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

TRAINED = ("stage 2", "stage 3", "adapted")  # stage 1 is cut as 2 is


def configure(stage: int) -> dict[str, Any]:
    """Return a configuration of DeepSpeed whose numbers Trainer fills in."""
    numbers = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {**dict.fromkeys(numbers, "auto"), **zero, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**62}


def gather(model: Any) -> Weights:
    """Return the whole weights; collective over the cell."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return weights_of(model)


def be_cell(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    stage: int,
    death: int | None = None,
    is_adapted: bool = False,
    **given: Any,
) -> tuple[Weights, list[Any], int]:
    """Train, until the first rank's death before a local step."""
    from transformers import TrainerCallback

    from xffl.integrations.transformers import federate

    class Mortality(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0 and state.global_step == death:
                os.kill(os.getpid(), signal.SIGKILL)

    be_launched(rank, world_size, port)
    with enter_isolation(SIZES) as isolated:
        model = make_model(isolated.cell, is_adapted=is_adapted)
        trainer = make_trainer(folder, model, deepspeed=configure(stage), bf16=False, **given)
        rounds = federate(trainer, every=EVERY)
        trainer.add_callback(Mortality())
        trainer.train()
        steps = 0 if rounds.resumed is None else rounds.resumed.step
        return gather(trainer.model_wrapped.module), [report.weights for report in rounds.reports], steps


def be_mortal(rank: int, world_size: int, port: int, folder: str, death: int) -> tuple[Weights, list[Any], int]:
    return be_cell(rank, world_size, port, folder, 2, death, save_strategy="steps", save_steps=3)


def be_adapted(rank: int, world_size: int, port: int, folder: str) -> tuple[Weights, list[Any], int]:
    return be_cell(rank, world_size, port, folder, 2, is_adapted=True)


def train_all(
    rank: int, world_size: int, folder: str, names: tuple[str, ...]
) -> tuple[list[Any], dict[str, list[Any]], list[Any]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_once()
    # It would be compiled for a minute.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    trained = {
        name: run_job(sum(SIZES), be_adapted, f"{folder}/{name}")
        if name == "adapted"
        else run_job(sum(SIZES), be_cell, f"{folder}/{name}", int(name.removeprefix("stage ")))
        for name in names
    }
    by_hand = run_job(sum(SIZES), be_by_hand)
    if "stage 2" not in names:
        return by_hand, trained, []
    # Behind the second round: before it the other cell may still be saving its sixth step.
    assert None in run_job(sum(SIZES), be_mortal, f"{folder}/killed", 2 * EVERY)
    return by_hand, trained, run_job(sum(SIZES), be_mortal, f"{folder}/killed", -1)


@pytest.mark.parametrize(
    "names", [TRAINED[:1], pytest.param(TRAINED[1:], marks=pytest.mark.long)], ids=["some", "more"]
)
def test_a_cell_of_zero_trains_what_a_loop_by_hand_trains(tmp_path: Path, names: tuple[str, ...]) -> None:
    [(by_hand, ranks, resumed)] = run_world(1, train_all, str(tmp_path), names, init=False, timeout_s=280)
    for name, trained in ranks.items():
        expected = by_hand[0]["adapted" if name == "adapted" else "full"]
        for weights, counts, _ in trained:
            assert differ(weights, trained[0][0]) == 0.0
            assert differ(weights, expected["weights"]) < 1e-6
            assert counts == expected["counts"]
    for weights, _, step in resumed:
        assert step == 6
        assert differ(weights, ranks["stage 2"][0][0]) == 0.0
