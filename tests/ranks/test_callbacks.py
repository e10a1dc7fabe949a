"""Callbacks in runs of several ranks, against what follows from the whole weights and gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.ranks.test_strategies import full_weights, joined
from tests.worlds import run_world
from xffl.checkpoint import find_latest_checkpoint
from xffl.distributed.parameters import DeviceParameters
from xffl.parallel import DistributedConfig
from xffl.training import (
    BaseTrainer,
    BaseTrainerConfig,
    EvalMetricConfigMixin,
    EvalMetricMixin,
    ExperimentConfig,
    FederatedConfigMixin,
    FederatedMixin,
    FederationConfig,
    LoggerConfigMixin,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from xffl.training.callbacks import (
    Callback,
    CheckpointCallback,
    DriftCallback,
    EarlyStoppingCallback,
    EMACallback,
    GradientNormCallback,
    ProgressCallback,
    ThroughputCallback,
    UpdateNormCallback,
)

Weights = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Config(BaseTrainerConfig, SetupConfigMixin, FederatedConfigMixin, EvalMetricConfigMixin, LoggerConfigMixin):
    """All that the tests ask for."""


class Trainer(BaseTrainer, SetupMixin, FederatedMixin, EvalMetricMixin):
    """A small decoder on English text, and what it was asked to record."""

    config: Config
    samples_of_text = 48

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scalars: dict[str, list[float]] = {}
        self.records: list[dict[str, float]] = []
        self.losses: list[float] = []

    def configure_models(self) -> None:
        self.model = Decoder(layers=2)

    def init_weights(self) -> None:
        torch.manual_seed(0)
        for _, parameter in sorted(self.model.named_parameters(recurse=False)):
            nn.init.normal_(parameter, 0.5, 0.1)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        train = TensorDataset(*text_batch(0, batch=self.samples_of_text))
        return self.train_loader(train), self.validation_loader(TensorDataset(*text_batch(9, batch=6)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": loss_of(self.model(batch[0]), batch[1])}

    def log_scalar(self, name: str, value: float | torch.Tensor, *, weight: float = 1.0) -> None:
        self.scalars.setdefault(name, []).append(float(value))

    def log_metrics(self, values: Mapping[str, float], *, over: str = "cell") -> None:
        self.records.append(dict(values))

    def recorded(self, name: str) -> list[float]:
        return [values[name] for values in self.records if name in values]


class Witness(Callback):
    """Keeps whole weights and gradients, as single tensors by name."""

    def __init__(self, ema: EMACallback | None = None) -> None:
        self.ema = ema
        self.averages: Weights = {}
        self.weights: Weights = {}
        self.gradients: list[Weights] = []
        self.before: list[Weights] = []
        self.stepped: list[Weights] = []
        self.after: list[Weights] = []
        self.rounds: list[Weights] = []
        self.validated: list[Weights] = []
        self.trained: list[Weights] = []

    def post_setup(self, trainer: BaseTrainer) -> None:
        trainer.named_optimizers()["optimizer"].register_step_post_hook(
            lambda *_: self.stepped.append(full_weights(trainer.named_models()["model"]))
        )

    def pre_optimizer_step(self, trainer: BaseTrainer) -> None:
        model = trainer.named_models()["model"]
        self.before.append(full_weights(model))
        self.gradients.append(full_weights(gradients_of(model)))

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        self.after.append(full_weights(trainer.named_models()["model"]))

    def post_round(self, trainer: BaseTrainer, report: Any) -> None:
        self.rounds.append(full_weights(trainer.named_models()["model"]))

    def pre_val_batch(self, trainer: BaseTrainer, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(full_weights(trainer.named_models()["model"]))

    def post_validation(self, trainer: BaseTrainer, metrics: Any) -> None:
        self.trained.append(full_weights(trainer.named_models()["model"]))

    def post_fit(self, trainer: BaseTrainer) -> None:
        self.weights = full_weights(trainer.named_models()["model"])
        if self.ema is not None:
            self.averages = {key.removeprefix("model."): whole(value) for key, value in self.ema.averages.items()}


class _Gradients:
    """A model's gradients where its parameters would be."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Any:
        return [(name, one.grad) for name, one in self._model.named_parameters()]


def gradients_of(model: nn.Module) -> Any:
    return _Gradients(model)


def norm(*parts: torch.Tensor) -> float:
    return math.sqrt(sum(part.double().square().sum().item() for part in parts))


def difference(a: Weights, b: Weights) -> list[torch.Tensor]:
    return [a[name].double() - b[name].double() for name in sorted(a)]


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def configure(folder: Path, strategy: str, mesh: dict[str, Any], federated: Any = None, **more: Any) -> Config:
    training = {"batch_size": 4, "epochs": 2, "validate_every_epochs": None, **more.pop("training", {})}
    wrap = (Block,) if more.pop("wraps", True) and strategy in ("fsdp", "hsdp") else ()
    return Config(
        experiment=ExperimentConfig(name="test", output_dir=str(folder), **more.pop("experiment", {})),
        distributed=DistributedConfig(
            strategy=strategy, federated=federated, device_parameters=DeviceParameters(**mesh), wrap=wrap
        ),
        training=TrainingParameters(**training),
        **more,
    )


def run(rank: int, world_size: int, config: Config, *callbacks: Callback, samples: int = 48) -> Trainer:
    trainer = Trainer(config, callbacks=callbacks)
    trainer.samples_of_text = samples
    trainer.fit(joined(rank, world_size))
    return trainer


# Inside a cell --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Told:
    """What a rank saw of a run with callbacks, and, where FSDP gathers weights, of the same run without."""

    witness: Witness
    losses: list[float]
    plain_losses: list[float]
    scalars: dict[str, list[float]]
    records: list[dict[str, float]]


MESHES: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "single": (1, "single", {}, False),
    "ddp": (2, "ddp", {"dp_replicate": 2}, False),
    "fsdp, root only": (2, "fsdp", {"dp_shard": 2}, False),
    "tensor": (2, "fsdp", {"tp": 2}, False),
    "hsdp": (4, "hsdp", {"dp_shard": 2, "dp_replicate": 2}, True),
}


def watch(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Told]:
    return {name: watch_one(rank, world_size, folder / name.replace(", ", "_"), name) for name in names}


def watch_one(rank: int, world_size: int, folder: Path, name: str) -> Told:
    _, strategy, mesh, wraps = MESHES[name]
    training = {"max_steps": 6, "validate_every_steps": 2, "max_grad_norm": 1.0}
    config = configure(folder, strategy, mesh, wraps=wraps, training=training)
    ema = EMACallback(decay=0.75, every=2, start=1)
    witness = Witness(ema)
    trainer = run(
        rank,
        world_size,
        config,
        ema,
        GradientNormCallback(depth=1),
        UpdateNormCallback(every=1, relative=True),
        ThroughputCallback(window=2),
        ProgressCallback(every_s=1000.0),
        witness,
    )
    witness.ema = None  # it does not go to another process
    losses = trainer.losses
    if name == "fsdp, root only":
        losses = run(
            rank, world_size, configure(folder / "plain", strategy, mesh, wraps=wraps, training=training)
        ).losses
    return Told(
        witness=witness,
        losses=trainer.losses,
        plain_losses=losses,
        scalars=trainer.scalars,
        records=trainer.records,
    )


def whole(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_norms_and_averages_equal_those_of_whole_weights(ranks: int, tmp_path: Path) -> None:
    names = [name for name, case in MESHES.items() if case[0] == ranks]
    told = run_world(ranks, watch, tmp_path, names, timeout_s=200)
    for name in names:
        for found in (rank[name] for rank in told):
            assert found.losses == found.plain_losses, name  # to the last bit: validations leave nothing behind
            check_norms(found)
            check_averages(found)
            rates = [values for values in found.records if "throughput/steps_per_s" in values]
            assert len(rates) == 2
            samples = 4 * ranks if name != "tensor" else 4
            for rate in rates:
                assert rate["throughput/samples_per_s"] / rate["throughput/steps_per_s"] == pytest.approx(samples)


def check_norms(found: Told) -> None:
    witness, scalars = found.witness, found.scalars
    assert len(witness.gradients) == 6
    expected: dict[str, list[float]] = {"norms/gradient": [], "norms/update": [], "norms/update_relative": []}
    for before, gradients, stepped in zip(witness.before, witness.gradients, witness.stepped, strict=True):
        expected["norms/gradient"].append(norm(*gradients.values()))
        expected["norms/update"].append(norm(*difference(stepped, before)))
        expected["norms/update_relative"].append(expected["norms/update"][-1] / norm(*stepped.values()))
        for part in ("embed_tokens", "layers", "norm", "lm_head"):
            inside = [value for key, value in gradients.items() if key.split(".")[0] == part]
            expected.setdefault(f"norms/gradient/{part}", []).append(norm(*inside))
    assert {name: scalars[name] for name in expected} == {
        name: pytest.approx(values, rel=1e-5) for name, values in expected.items()
    }
    assert {name for name in scalars if name.startswith("norms/")} == set(expected)


def check_averages(found: Told) -> None:
    witness = found.witness
    average = {key: value.clone() for key, value in witness.after[0].items()}  # start=1
    seen = []
    for step, weights in enumerate(witness.after[1:], 2):
        if step in (2, 4, 6):  # a validation comes before that step's update
            seen.append({key: value.clone() for key, value in average.items()})
        if (step - 1) % 2 == 0:
            average = {key: 0.75 * average[key] + 0.25 * weights[key] for key in average}
    assert witness.averages.keys() == average.keys()
    for mine, expected in [(witness.averages, average), *zip(witness.validated[1:], seen[1:], strict=True)]:
        assert max((mine[key] - expected[key]).abs().max().item() for key in expected) < 1e-6
    # The first validation is before averaging has begun; after each the weights are what they were.
    assert equal(witness.validated[0], witness.after[1])
    assert all(equal(mine, witness.after[step]) for mine, step in zip(witness.trained, (1, 3, 5), strict=True))
    assert max((witness.validated[2][key] - witness.trained[2][key]).abs().max().item() for key in average) > 1e-3


# Saving and going on --------------------------------------------------------------------------------------------------


def save_and_resume(rank: int, world_size: int, folder: Path) -> Any:
    def callbacks(is_async: bool = False, **save: Any) -> tuple[EMACallback, Witness, CheckpointCallback]:
        ema = EMACallback(decay=0.75)
        return ema, Witness(ema), CheckpointCallback(is_async=is_async, best="val/loss", **save)

    def config(name: str, steps: int) -> Config:
        training = {"max_steps": steps, "validate_every_steps": 3, "gradient_accumulation": 2}
        return configure(folder / name, "fsdp", {"dp_shard": 2}, training=training)

    ema, end, save = callbacks(True, save_frequency=2, every_epochs=1, keep_last_n=2)
    straight = run(rank, world_size, config("straight", 6), ema, end, save)
    first = run(rank, world_size, config("resumed", 3), *callbacks(save_frequency=2, save_final=False))
    latest = find_latest_checkpoint(folder / "resumed")
    again, end_again, last = callbacks(save_frequency=2)
    second = run(rank, world_size, config("resumed", 6), again, end_again, last)
    return {
        "losses": (straight.losses, first.losses[:4] + second.losses),
        "averages": [one.averages for one in (end, end_again)],
        "weights": [one.weights for one in (end, end_again)],
        "steps": (ema.steps, again.steps),
        "latest": None if latest is None else latest.name,
        "saved": sorted(path.name for path in (folder / "straight" / "checkpoints").glob("*")),
        "best": (save.monitored.best if save.monitored else None, straight.recorded("val/loss")),
    }


def test_a_run_goes_on_with_its_averages(tmp_path: Path) -> None:
    for told in run_world(2, save_and_resume, tmp_path, timeout_s=250):
        assert told["latest"] == "step_2"
        straight, resumed = told["losses"]
        assert straight == resumed and len(straight) == 12
        assert told["steps"] == (6, 6)
        assert equal(*told["averages"]) and equal(*told["weights"])
        # 48 samples on 2 ranks of 4 in 2 micro-batches are 3 steps: an epoch.
        assert told["saved"] == ["best", "final", "latest", "step_4", "step_6"]
        best, values = told["best"]
        assert best == min(values) and len(values) >= 2
    run_world(1, load_elsewhere, tmp_path, told["averages"][0], timeout_s=100)


def load_elsewhere(rank: int, world_size: int, folder: Path, averages: Weights) -> None:
    """Load the averages of two ranks on one."""
    ema = EMACallback(decay=0.75)
    checked = []

    class Check(Callback):
        def post_load_checkpoint(self, trainer: BaseTrainer, path: str) -> None:
            checked.append(path)
            assert equal({key.removeprefix("model."): one for key, one in ema.averages.items()}, averages)

    training = {"max_steps": 6, "validate_every_steps": 3, "gradient_accumulation": 2, "batch_size": 8}
    experiment = {"reset": ["random", "records"]}
    config = configure(folder / "straight", "single", {}, training=training, experiment=experiment)
    run(rank, world_size, config, ema, Check(), CheckpointCallback(best="val/loss", save_final=False))
    assert checked


# Several models -------------------------------------------------------------------------------------------------------


class Pair(Trainer):
    """Two models that step one after the other; the first one's gradients are not finite in the second step."""

    def configure_models(self) -> None:
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)

    def init_weights(self) -> None:
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            nn.init.constant_(parameter, 0.25)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.first.parameters(), lr=0.1)
        self.other = torch.optim.SGD(self.second.parameters(), lr=0.1)
        self.seen: list[tuple[float, ...]] = []

    def configure_dataloaders(self) -> tuple[Any, Any]:
        return self.train_loader(TensorDataset(torch.ones(16, 3))), None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        norms = []
        for model, optimizer, width in ((self.first, self.optimizer, 3), (self.second, self.other, 2)):
            scale = math.inf if model is self.first and batch_idx == 1 else (1 + batch_idx) / 256
            self.backward(model(batch[0][:, :width]).float().sum() * scale)
            before = [one.detach().clone() for one in model.parameters()]
            self.step(model, optimizer)
            change = norm(*(a - b.detach() for a, b in zip(before, model.parameters(), strict=True)))
            norms.append(change / 0.1)
        self.seen.append(tuple(norms))


def several_models(rank: int, world_size: int, folder: Path) -> None:
    training = {"epochs": 1, "validate_every_epochs": None, "mixed_precision": "fp16"}
    config = configure(folder, "single", {}, training=training)
    trainer = Pair(config, callbacks=[GradientNormCallback()])
    trainer.fit(joined(rank, world_size))
    first, second = zip(*trainer.seen, strict=True)
    assert first[1] == 0.0 and len(first) == 4  # float16 has skipped it
    assert trainer.scalars["norms/gradient/first"] == pytest.approx([first[0], *first[2:]], rel=1e-3)
    assert trainer.scalars["norms/gradient/second"] == pytest.approx(list(second), rel=1e-3)


def test_each_model_is_measured_where_its_optimizer_steps(tmp_path: Path) -> None:
    run_world(1, several_models, tmp_path)


# Several cells --------------------------------------------------------------------------------------------------------


def drift(rank: int, world_size: int, folder: Path) -> Any:
    told = {}
    for name, copies in (("copies", True), ("norms", False)):
        config = configure(
            folder / name,
            "fsdp",
            {"dp_shard": "auto"},
            (2, 1),
            federation=FederationConfig(every=3, aggregator={"norms": True}),
        )
        witness = Witness()
        trainer = run(
            rank, world_size, config, DriftCallback(copies=copies), UpdateNormCallback(every=1), witness, samples=50
        )
        names = ("norm", "relative", "distance", "cosine")
        told[name] = ({key: trainer.recorded(f"drift/{key}") for key in names}, witness, trainer.scalars)
    return told


def test_drift_is_that_of_whole_weights(tmp_path: Path) -> None:
    told = run_world(3, drift, tmp_path, timeout_s=200)
    for rank, found in enumerate(told):
        measured, witness, scalars = found["copies"]
        # Cell 0 has 2 ranks with about 5 steps an epoch, as cell 1 has; the last round takes what is left over.
        steps = len(witness.before)
        before, expected = witness.before[0], []
        for number, after in enumerate(witness.rounds):
            if 3 * number >= steps:
                break
            reached = witness.stepped[min(3 * (number + 1), steps) - 1]
            update, way = difference(reached, before), difference(after, before)
            dot = sum((a * b).sum().item() for a, b in zip(update, way, strict=True))
            expected.append(
                {
                    "norm": norm(*update),
                    "relative": norm(*update) / norm(*before.values()),
                    "distance": norm(*difference(reached, after)),
                    "cosine": dot / (norm(*update) * norm(*way)),
                }
            )
            before = after
        assert len(expected) >= 3, rank
        for key, values in measured.items():
            assert values == pytest.approx([one[key] for one in expected], rel=2e-5, abs=1e-6), (rank, key)
        assert any(value < 0.999 for value in measured["cosine"])
        updates = [norm(*difference(a, b)) for a, b in zip(witness.stepped, witness.before, strict=True)]
        assert scalars["norms/update"] == pytest.approx(updates, rel=1e-5)  # the rounds do not count
        by_rounds, _, _ = found["norms"]
        assert by_rounds["norm"] == pytest.approx(measured["norm"], rel=1e-4)
        assert by_rounds["relative"] == pytest.approx(measured["relative"], rel=1e-4)
        assert not by_rounds["cosine"]
    assert told[0]["copies"][0] == told[1]["copies"][0] != told[2]["copies"][0]
    # Rounds record how far all cells had moved, weighted as they were averaged.
    records = [json.loads(line) for line in (tmp_path / "norms/rounds/cell_0.jsonl").read_text().splitlines()]
    both = list(zip(told[0]["norms"][0]["norm"], told[2]["norms"][0]["norm"], strict=False))
    assert len(both) >= 3 and len(records) >= len(both)
    for record, norms in zip(records, both, strict=False):
        squares = sum(weight * norm**2 for weight, norm in zip(record["weights"], norms, strict=True))
        assert record["divergence"] == {"rms": pytest.approx(math.sqrt(squares / sum(record["weights"])), rel=1e-9)}


class Planted(Callback):
    """Gives validations other results than they have."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def val_metrics(self, trainer: BaseTrainer, metrics: Any) -> None:
        metrics["val/planted"] = self.values.pop(0) if self.values else 0.0


def stop_together(rank: int, world_size: int, folder: Path) -> Any:
    """Unequal cells: one validates often, with means over the cells that get worse from the third round on."""
    told = {}
    values = [[5.0, 3.0, 1.0, 4.0, 5.0, 6.0], [7.0, 5.0, 3.0, 0.0, 9.0, 9.0]]
    for over in ("federation", "cell"):
        config = configure(
            folder / over,
            "single",
            {},
            1,
            training={"epochs": 50, "validate_every_steps": 2, "max_steps": 14},
            federation=FederationConfig(every=2),
        )
        stopping = EarlyStoppingCallback(metric="val/planted", patience=2, over=over)
        save = CheckpointCallback(save_frequency=3, every_rounds=5, keep_last_n=9)
        trainer = run(rank, world_size, config, Planted(list(values[rank])), stopping, save, samples=48)
        saved = sorted(path.name for path in (folder / over / "checkpoints").iterdir())
        told[over] = (trainer.global_step, trainer.stop_reason, stopping.monitored.best, saved)
    return told


def test_cells_stop_together_and_save_at_rounds(tmp_path: Path) -> None:
    first, second = run_world(2, stop_together, tmp_path, timeout_s=200)
    # Means: 6, 4, 2, 2, 7: not better at the fourth and fifth round.
    assert first["federation"][:3] == second["federation"][:3]
    steps, reason, best, saved = first["federation"]
    assert (steps, best) == (10, 2.0) and "val/planted was not better than 2 2 times" in reason
    # Every 3 steps: at the first round at or after them; and at the fifth round.
    assert saved == ["final", "latest", "step_10", "step_4", "step_6"]
    assert (first["cell"][0], first["cell"][2]) == (10, 1.0)
    assert (second["cell"][0], second["cell"][2]) == (12, 0.0)
