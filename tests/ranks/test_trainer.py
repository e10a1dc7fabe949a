"""The trainer: its life in the documented order, and the same numbers as a loop by hand."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

import xffl
from tests.ranks.test_strategies import joined
from tests.tasks import HELD_OUT, TaskConfig, TaskTrainer, digits, whole_weights
from tests.worlds import run_world
from xffl.errors import ConfigError, StateError
from xffl.parallel import DistributedConfig
from xffl.training import (
    BaseTrainer,
    BaseTrainerConfig,
    Callback,
    CellLoader,
    DataConfig,
    EvalMetricMixin,
    ExperimentConfig,
    FederationConfig,
    ModelSetupMixin,
    OptimizerAndSchedulerSetupMixin,
    SetupConfig,
    SetupConfigMixin,
    SetupMixin,
    TrainingParameters,
)
from xffl.training.callbacks import CheckpointCallback
from xffl.training.callbacks.base import STAGES


class Diary(Callback):
    """Notes each stage, by both of its names."""

    def __init__(self) -> None:
        self.stages: list[str] = []


def _noting(name: str) -> Any:
    def note(self: Diary, trainer: Any, *_: Any) -> None:
        self.stages.append(name)

    return note


for _first, _second in STAGES.items():
    setattr(Diary, _first, _noting(_first))
    setattr(Diary, _second, _noting(_second))


def configure(folder: str, **changes: Any) -> TaskConfig:
    training = {"epochs": 2, "batch_size": 20, "validate_every_epochs": None, **changes.pop("training", {})}
    return TaskConfig(
        experiment=ExperimentConfig(name="test", output_dir=folder, resume=False),
        training=TrainingParameters(**training),
        **{"samples": 60, "dropout": 0.0, **changes},
    )


def fit(rank: int, world_size: int, config: TaskConfig, kind: type[BaseTrainer] = TaskTrainer) -> Any:
    diary = Diary()
    weights: dict[str, torch.Tensor] = {}

    class Last(Callback):
        def post_fit(self, trainer: Any) -> None:
            weights.update(whole_weights(trainer.model))

    trainer = kind(config, callbacks=[diary, Last()])
    trainer.fit(joined(rank, world_size))
    return weights, diary.stages, (trainer.global_step, trainer.current_epoch, trainer.local_batches, trainer.samples)


def by_hand(rank: int, world_size: int, config: TaskConfig, batch_size: int) -> dict[str, torch.Tensor]:
    """Train in one process with torch alone, but for the order of the samples."""
    trainer = TaskTrainer(config)
    trainer.world.setup(joined(rank, world_size))
    trainer.world.set_determinism(config.experiment.seed)
    trainer.configure_models()
    model, window = trainer.model, config.training.gradient_accumulation
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    images, labels = (one[HELD_OUT : HELD_OUT + config.samples] for one in digits())
    loader = CellLoader(
        TensorDataset(images, labels), trainer.state, batch_size=batch_size, seed=config.experiment.seed
    )
    for epoch in range(config.training.epochs):
        batches = list(loader)
        for start in range(0, len(batches), window):
            group = batches[start : start + window]
            for x, y in group:
                (F.cross_entropy(model(x), y) / len(group)).backward()
            if config.training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        for options in optimizer.param_groups:
            options["lr"] = config.learning_rate * 0.97 ** (epoch + 1)
    return dict(model.state_dict())


def in_one_process(rank: int, world_size: int, folder: str, sharded: TaskConfig) -> Any:
    """Train with the trainer and by hand, also with what a returned loss leaves to the trainer."""
    found = {}
    for window in (1, 2):
        config = configure(f"{folder}/{window}", training={"gradient_accumulation": window})
        own = replace(config, experiment=replace(config.experiment, output_dir=f"{folder}/returned {window}"))
        runs = [fit(rank, world_size, config), fit(rank, world_size, own, Returning)]
        found[window] = (runs, by_hand(rank, world_size, config, 20))
    return found, by_hand(rank, world_size, replace_batch(sharded, 20), 20)


def test_ranks_are_the_loop_by_hand(tmp_path: Path) -> None:
    config = configure(
        str(tmp_path / "run"),
        distributed=DistributedConfig(strategy="fsdp"),
        training={"batch_size": 10, "max_grad_norm": 1.0, "gradient_accumulation": 2},
    )
    ((alone, expected),) = run_world(1, in_one_process, str(tmp_path), config)
    for window, (runs, weights_by_hand) in alone.items():
        for weights, _, counters in runs:
            assert counters == (2 * math.ceil(3 / window), 2, 6, 120)
            assert all(torch.equal(weights[name], tensor) for name, tensor in weights_by_hand.items()), window
    for weights, _, counters in run_world(2, fit, config):
        assert counters == (4, 2, 6, 120)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6)


def replace_batch(config: TaskConfig, batch_size: int) -> TaskConfig:
    return replace(config, training=replace(config.training, batch_size=batch_size), distributed=DistributedConfig())


def test_stages_come_in_order_by_both_names(tmp_path: Path) -> None:
    config = configure(
        str(tmp_path / "run"), training={"epochs": 1, "gradient_accumulation": 3, "validate_every_epochs": 1}
    )
    ((_, stages, _),) = run_world(1, fit, config)

    def both(*names: str) -> list[str]:
        return [one for name in names for one in (name, STAGES[name])]

    batch = both("pre_train_batch", "post_train_batch")
    val_batch = both("pre_val_batch", "post_val_batch")
    assert stages == [
        *both("pre_fit", "pre_configure", "post_configure", "pre_setup", "post_setup", "pre_train", "pre_train_epoch"),
        *batch * 2,
        *both("pre_train_batch", "pre_optimizer_step", "post_train_batch", "post_optimizer_step"),
        *both("pre_val_epoch"),
        *val_batch * 5,
        *both("val_metrics", "post_val_epoch", "post_validation", "post_train_epoch", "post_train", "post_fit"),
    ]


@dataclass(kw_only=True)
class DocumentConfig(BaseTrainerConfig, SetupConfigMixin):
    """The document's example has sections of its own."""


class DocumentTrainer(BaseTrainer, SetupMixin, EvalMetricMixin):
    """Written as the reference document writes it."""

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def init_weights(self) -> None:
        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(mean=0.0, std=0.02)
                if module.bias is not None:
                    module.bias.data.zero_()

        self.model.apply(init)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def configure_dataloaders(self) -> Any:
        images, labels = digits()
        training, held_out = TensorDataset(images[:80], labels[:80]), TensorDataset(images[80:95], labels[80:95])
        return DataLoader(training, batch_size=8, shuffle=True), DataLoader(held_out, batch_size=8, shuffle=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        if not self.is_accumulating_gradients:
            self.step(self.model, self.optimizer)
        self.log_scalar("train/loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return {"val_loss": F.cross_entropy(self.model(images), labels)}


def first_weights(rank: int, world_size: int, folder: str, cases: list[tuple[bool, str]]) -> Any:
    return [
        first_weights_of(rank, world_size, f"{folder}/{strategy}_{meta}", meta, strategy) for meta, strategy in cases
    ]


def first_weights_of(rank: int, world_size: int, folder: str, meta: bool, strategy: str) -> Any:
    made: dict[str, torch.Tensor] = {}

    class First(Callback):
        def post_setup(self, trainer: Any) -> None:
            made.update(whole_weights(trainer.model))

    config = DocumentConfig(
        experiment=ExperimentConfig(output_dir=folder, resume=False),
        setup=SetupConfig(meta_device=meta),
        distributed=DistributedConfig(strategy=strategy),
    )
    DocumentTrainer(config, callbacks=[First()]).fit(joined(rank, world_size))
    records = [json.loads(line) for line in (Path(folder) / "metrics" / "cell_0.jsonl").read_text().splitlines()]
    return made, records


def test_the_documents_trainer(tmp_path: Path) -> None:
    for world_size, cases in ((1, [(False, "single"), (True, "single")]), (2, [(True, "fsdp"), (False, "ddp")])):
        for weights, records in chain(*run_world(world_size, first_weights, str(tmp_path), cases)):
            assert weights["0.weight"].std().item() == pytest.approx(0.02, rel=0.1)
            assert not weights["2.bias"].any()
            assert records[0]["step"] == 5 * (1 if world_size == 2 else 2)  # 80 samples, 8 a rank
            assert any("val/loss" in record["values"] for record in records)


def rounds_and_metrics(rank: int, world_size: int, folder: str) -> Any:
    config = configure(
        folder,
        samples=70,
        distributed=DistributedConfig(strategy="fsdp", federated=(2, 1)),
        training={"batch_size": 8, "validate_every_rounds": 1, "validate_every_epochs": 1},
        federation=FederationConfig(every=2),
    )
    seen: list[Any] = []

    class Watch(Callback):
        def post_round(self, trainer: Any, report: Any) -> None:
            trainer.eval()
            images, labels = (one[:HELD_OUT] for one in digits())
            with torch.no_grad():
                logits = trainer.model(images)
            trainer.train()
            right = (logits.argmax(1) == labels).double().mean().item()
            seen.append((report.round, report.weights, F.cross_entropy(logits, labels).item(), right))

    TaskTrainer(config, callbacks=[Watch()]).fit(joined(rank, world_size))
    return seen


def test_rounds_are_told_recorded_and_measured_over_the_federation(tmp_path: Path) -> None:
    found = run_world(3, rounds_and_metrics, str(tmp_path / "run"))
    by_rank = [[one[0] for one in seen] for seen in found]
    assert by_rank == [by_rank[0]] * 3
    assert by_rank[0] == list(range(1, len(by_rank[0]) + 1))
    lines = (tmp_path / "run" / "metrics" / "federation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == len(by_rank[0])  # the last round made the final model
    for record, (_, _, loss, accuracy) in zip(records, found[0], strict=False):
        # All of the held-out data in each cell: the mean over both is that of one process over all of it.
        assert record["values"]["val/loss"] == pytest.approx(loss, rel=1e-5)
        assert record["values"]["val/accuracy"] == pytest.approx(accuracy, abs=1e-7)
    for cell, ranks in ((0, (0, 1)), (1, (2,))):
        rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds" / f"cell_{cell}.jsonl").open()]
        assert [one["round"] for one in rounds] == by_rank[0]
        assert [tuple(one["weights"]) for one in rounds] == [one[1] for one in found[ranks[0]]]
    assert sum(sum(one[1]) for one in found[0]) == 2 * 70  # every sample of both epochs counts once


class Forgetful(TaskTrainer):
    """Computes gradients and never steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.backward(loss)
        return {"loss": loss}


class Returning(TaskTrainer):
    """Leaves backward and step to the trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Silent(TaskTrainer):
    """Returns nothing that has a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Naked(BaseTrainer, SetupMixin):
    """Says nothing of itself."""


class Backwards(BaseTrainer, OptimizerAndSchedulerSetupMixin, ModelSetupMixin):
    """Would make the optimizer of weights that are thrown away."""

    def configure_models(self) -> None:
        self.model = nn.Linear(64, 10)

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)


FAILURES: dict[type[BaseTrainer], tuple[str, str]] = {
    Forgetful: ("StateError", "has not stepped"),
    Silent: ("StateError", "neither called backward nor returned a loss"),
    Naked: ("ConfigError", "override configure_models"),
    Backwards: ("ConfigError", "ModelSetupMixin stand before"),
}


def failing(rank: int, world_size: int, folder: str) -> list[tuple[str, list[str], str]]:
    found = []
    for kind in FAILURES:
        diary = Diary()
        config = configure(f"{folder}/{kind.__name__}", training={"gradient_accumulation": 2})
        try:
            kind(config, callbacks=[diary]).fit(joined(rank, world_size))
        except (ConfigError, StateError) as error:
            found.append((type(error).__name__, diary.stages[-2:], str(error)))
    return found


def test_what_a_trainer_leaves_out_is_said(tmp_path: Path) -> None:
    (found,) = run_world(1, failing, str(tmp_path))
    for (kind, stages, text), (expected, words) in zip(found, FAILURES.values(), strict=True):
        assert kind == expected and words in text
        assert stages == ["exception", "on_exception"]


class Stopping(Callback):
    """Ends training in its fourth step."""

    def post_optimizer_step(self, trainer: Any) -> None:
        if trainer.global_step == 4:
            trainer.stop("enough")


def stopped(rank: int, world_size: int, folder: str) -> Any:
    return [stopped_at(rank, world_size, f"{folder}/{limit}", limit) for limit in (None, 6)]


def stopped_at(rank: int, world_size: int, folder: str, limit: int | None) -> Any:
    config = configure(folder, training={"max_steps": limit, "epochs": 3})
    trainer = TaskTrainer(config, callbacks=[] if limit else [Stopping()])
    trainer.fit(joined(rank, world_size))
    states = trainer.state_dict()
    other = TaskTrainer(config)
    other.strategy.setup(joined(rank, world_size))
    other.run_directory = trainer.run_directory
    other.configure()
    other.setup()
    other.load_state_dict(states)
    same = all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True))
    return trainer.global_step, trainer.current_epoch, other.global_step, same, sorted(states)


def test_training_ends_where_it_is_told_to(tmp_path: Path) -> None:
    names = ["dataloaders", "models", "optimizers", "schedulers", "trainer"]
    assert run_world(1, stopped, str(tmp_path)) == [[(4, 1, 4, True, names), (6, 2, 6, True, names)]]


def end_by_samples(rank: int, world_size: int, folder: str) -> Any:
    found = []
    for most in (100, 210):
        config = configure(
            folder,
            training={"batch_size": 10, "epochs": 50},
            federation=FederationConfig(every=2, max_samples=most, aggregator={"fragments": 2}),
            callbacks=[CheckpointCallback()],
            distributed=DistributedConfig(federated=(1, 1)),
        )
        config.experiment = replace(config.experiment, resume=True)
        trainer = TaskTrainer(config)
        trainer.fit(joined(rank, world_size))
        scaling = trainer.find_rounds()
        assert scaling is not None
        found.append((trainer.global_step, scaling.total_weight))
    return found


def test_training_ends_after_the_samples_of_all_cells(tmp_path: Path) -> None:
    """A run that goes on knows how many there were. A round moves half of the model, with the steps of one or two."""
    first, second = run_world(2, end_by_samples, str(tmp_path))
    assert first == second
    assert [samples for _, samples in first] == [20.0 * steps for steps, _ in first]
    assert 100 <= first[0][1] <= 140 and 210 <= first[1][1] <= 250


def test_configurations_are_checked() -> None:
    for wrong in ({"epochs": 0}, {"max_steps": -1}, {"log_every": True}, {"scheduler_interval": "hour"}):
        with pytest.raises(ConfigError):
            TrainingParameters(**wrong)
    with pytest.raises(ConfigError, match="name"):
        ExperimentConfig(name="a/b")
    with pytest.raises(ConfigError, match="BaseTrainerConfig"):
        TaskTrainer({"training": {}})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two callbacks"):
        TaskTrainer(TaskConfig(callbacks=[Stopping(), Stopping()]))
    for federation in ({"weight": "equal", "every": 2}, {}, {"every": 2, "aggregator": {"levels": [{"every": 2}]}}):
        with pytest.raises(ConfigError, match="max_samples 100"):
            FederationConfig(max_samples=100, **federation)  # type: ignore[arg-type]
    assert TaskConfig().training_parameters.epochs == 1
    assert xffl.XfflError


def dealt(rank: int, world_size: int, folder: str, cases: list[tuple[str, bool]]) -> Any:
    return [dealt_as(rank, world_size, f"{folder}/{one}_{labels}", one, labels) for one, labels in cases]


def dealt_as(rank: int, world_size: int, folder: str, partition: str, labels: bool | str) -> Any:
    class Dealing(TaskTrainer):
        def configure_dataloaders(self) -> Any:
            images, codes = (one[:200] for one in digits())
            if labels == "plain":
                return DataLoader(TensorDataset(images, codes), batch_size=4, shuffle=True), None
            return self.train_loader(TensorDataset(images, codes), labels=codes.numpy() if labels else None), None

    config = configure(
        folder,
        data=DataConfig(partition=partition),
        distributed=DistributedConfig(federated=(1, 1)),
        training={"epochs": 1, "max_steps": 1},
    )
    trainer = Dealing(config)
    try:
        with warnings.catch_warnings(record=True) as told:
            trainer.fit(joined(rank, world_size))
    except ConfigError as error:
        return str(error)
    assert sum("2 cells train models of their own" in str(one.message) for one in told) == (rank == 0)
    return trainer.train_dataloader.samples


def test_data_are_dealt_out_as_the_configuration_says(tmp_path: Path) -> None:
    dirichlet = "dirichlet:alpha=0.3"
    unequal = "quantity:alpha=0.5"
    cases: list[tuple[str, Any]] = [(dirichlet, True), ("iid", False), (dirichlet, False), ("dirichlett", False)]
    cases += [("whole", True), ("whole", "plain"), (unequal, False), (unequal, "plain"), (dirichlet, "plain")]
    results = zip(*run_world(2, dealt, str(tmp_path), cases), strict=True)
    found, equal, unlabelled, unknown, whole, plainly_whole, drawn, plainly_drawn, plainly_unlabelled = results
    assert sum(found) == 200
    assert set(whole) == {200} == set(plainly_whole)
    rows = json.loads((tmp_path / "whole_True" / "partition.json").read_text())["counts"]
    assert rows[0] == rows[1] and sum(rows[0]) == 200
    # A plain loader's samples are dealt out as the configuration says, too.
    assert drawn == plainly_drawn and drawn[0] != drawn[1]
    assert plainly_unlabelled == unlabelled
    counts = json.loads((tmp_path / f"{dirichlet}_True" / "partition.json").read_text())
    assert counts["labels"] == [str(digit) for digit in range(10)]
    assert [sum(row) for row in counts["counts"]] == list(found)
    _, labels = digits()
    assert [sum(pair) for pair in zip(*counts["counts"], strict=True)] == labels[:200].bincount().tolist()
    assert set(equal) == {100}
    words = "one entry for each sample, got shape ()); does it need labels? Give train_loader(dataset, labels=...)"
    assert all(words in error for error in unlabelled) and all("dirichlet" in error for error in unknown)


VALIDATING: dict[str, tuple[Callable[[Any], Any], str | int]] = {
    "plain": (lambda data: DataLoader(data, batch_size=7), 20),
    "shuffled": (lambda data: DataLoader(data, batch_size=7, shuffle=True, drop_last=True), 20),
    "a part": (lambda data: DataLoader(Subset(data, range(11)), batch_size=7), 11),
    "sampler": (lambda data: DataLoader(data, sampler=SubsetRandomSampler([1, 2])), "draws by SubsetRandomSampler"),
    "batch sampler": (
        lambda data: DataLoader(data, batch_sampler=[[1], [2]]),
        "choose samples with torch.utils.data.S",
    ),
    "no batches": (lambda data: DataLoader(data, batch_size=None), "batch_size None and batch_sampler NoneType"),
    "small batches": (lambda data: None, 2),
}


def validating(rank: int, world_size: int, folder: str) -> dict[str, str | int]:
    return {name: validating_with(rank, world_size, f"{folder}/{name}", name) for name in VALIDATING}


def validating_with(rank: int, world_size: int, folder: str, name: str) -> str | int:
    class Validating(TaskTrainer):
        def configure_dataloaders(self) -> Any:
            data = TensorDataset(*(one[:20] for one in digits()))
            given = VALIDATING[name][0](data)
            return self.train_loader(data), self.validation_loader(data) if given is None else given

    config = configure(folder, training={"epochs": 1, "max_steps": 1}, data=DataConfig(validation_batch_size=2))
    trainer = Validating(config)
    try:
        trainer.fit(joined(rank, world_size))
    except ConfigError as error:
        return str(error)
    return trainer.val_dataloader.batch_size if name == "small batches" else trainer.val_dataloader.samples


def test_plain_loaders_for_validation(tmp_path: Path) -> None:
    (found,) = run_world(1, validating, str(tmp_path))
    for name, (_, expected) in VALIDATING.items():
        assert expected in str(found[name]) if isinstance(expected, str) else found[name] == expected, found


def configured_apart(rank: int, world_size: int, folder: str) -> str:
    try:
        config = configure(folder, learning_rate=0.1 * (rank + 1), distributed=DistributedConfig(strategy="ddp"))
        TaskTrainer(config).fit(joined(rank, world_size))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_configurations_are_told(tmp_path: Path) -> None:
    for told in run_world(2, configured_apart, str(tmp_path / "run")):
        assert "configurations" in told
        assert "0.2" in told


class Losing(TaskTrainer):
    """Holds its loss function as an attribute, and has no sections but the base's."""

    def configure_models(self) -> None:
        super().configure_models()
        self.loss_of = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(self.model(batch[0]), batch[1])


@dataclass(kw_only=True)
class BareConfig(BaseTrainerConfig):
    """No section of any mixin."""

    samples: int = 40
    dropout: float = 0.0
    optimizer: str = "SGD"
    learning_rate: float = 0.1


def losing(rank: int, world_size: int, folder: str) -> Any:
    config = BareConfig(experiment=ExperimentConfig(output_dir=folder), distributed=DistributedConfig(strategy="ddp"))
    trainer = Losing(config)
    trainer.fit(joined(rank, world_size))
    return sorted(trainer.named_models()), trainer.global_step


def test_a_loss_function_is_no_model_and_sections_have_defaults(tmp_path: Path) -> None:
    assert run_world(2, losing, str(tmp_path / "run")) == [(["model"], 20)] * 2


def continued(rank: int, world_size: int, folder: str, reset: bool, epochs: int) -> Any:
    config = configure(
        folder,
        distributed=DistributedConfig(strategy="fsdp" if world_size > 1 else "single"),
        training={"epochs": epochs, "batch_size": 10, "max_steps": 5 if epochs == 2 else None},
    )
    config.experiment = ExperimentConfig(output_dir=folder, reset=reset)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}

    class Looking(Callback):
        def pre_train(self, trainer: Any) -> None:
            before.update(whole_weights(trainer.model))

        def post_fit(self, trainer: Any) -> None:
            after.update(whole_weights(trainer.model))

    try:
        trainer = TaskTrainer(config, callbacks=[Looking(), CheckpointCallback()])
        trainer.fit(joined(rank, world_size))
    except ConfigError as error:
        return str(error)
    return before, after, trainer.current_epoch, trainer.global_step


def test_other_numbers_of_ranks_go_on_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (_, saved, epoch, step), _ = run_world(2, continued, folder, False, 2)  # 3 steps an epoch: ends inside the second
    assert (epoch, step) == (1, 5)
    (told,) = run_world(1, continued, folder, False, 3)
    assert "reset" in told
    (found,) = run_world(1, continued, folder, True, 3)
    assert not isinstance(found, str), found
    before, _, epoch, step = found
    assert all(torch.equal(before[name], tensor) for name, tensor in saved.items())
    assert (epoch, step) == (3, 5 + 6 + 6)  # the second epoch anew, in steps of ten
