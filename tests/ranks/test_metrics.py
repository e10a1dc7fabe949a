"""Metrics and records of cells and of the federation, against one process that has all the data."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from tests.worlds import run_world
from xffl.aggregation import RoundReport
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError
from xffl.training.config.dataclasses import BaseTrainerConfig, ExperimentConfig
from xffl.training.data.place import share_of
from xffl.training.metrics import (
    WeightedSums,
    compute_metrics,
    counted_place,
    prepare_metrics,
    reduce_mean,
    reduce_sums,
)
from xffl.training.mixins.logging import LoggerMixin
from xffl.training.mixins.validation import EvalMetricMixin, MetricsConfig
from xffl.training.run_directory import RunDirectory

CPU = torch.device("cpu")
SAMPLES, CLASSES, TOKENS = 41, 4, 6
BATCH = 4
PADDING = -100
CUTS = {1: [0, 41], 2: [0, 26, 41]}
"""Where the cells' samples begin: uneven parts, and no multiple of a batch."""

Layout = tuple[tuple[int, ...] | None, int | None, dict[str, int] | None]
LAYOUTS: list[Layout] = [
    ((2, 2), 2, None),
    ((3, 1), None, None),
    (None, 2, None),
    (None, None, {"dp_replicate": -1, "tp": 2}),
    ((2, 2), None, {"dp_replicate": -1, "tp": 2}),
    ((2, 2), None, {"pp": 2, "dp_replicate": -1}),
    ((2, 2), None, {"cp": 2, "dp_replicate": -1}),
]


def make_data() -> SimpleNamespace:
    random = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    words = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=random)
    words[torch.rand(SAMPLES, TOKENS, generator=random) < 0.4] = PADDING
    words[:, 0] = 1  # every half of a sequence, which a rank of cp has, counts something
    words[:, TOKENS // 2] = 2
    return SimpleNamespace(
        logits=draw(SAMPLES, CLASSES),
        labels=torch.randint(CLASSES, (SAMPLES,), generator=random),
        text=draw(SAMPLES, TOKENS, CLASSES),
        words=words,
        x=draw(SAMPLES),
        y=draw(SAMPLES),
    )


def make_metrics() -> dict[str, Any]:
    from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef, SumMetric
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
    )
    from torchmetrics.text import Perplexity
    from torchmetrics.wrappers import ClasswiseWrapper

    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "auroc": MulticlassAUROC(CLASSES),
        "recall": MulticlassRecall(CLASSES, average="none"),
        "by_class": ClasswiseWrapper(MulticlassPrecision(CLASSES, average="none"), prefix="class_"),
        "several": MetricCollection(
            {"precision": MulticlassPrecision(CLASSES), "recall": MulticlassRecall(CLASSES), "f1": MulticlassF1Score(4)}
        ),
        "perplexity": Perplexity(ignore_index=PADDING),
        "pearson": PearsonCorrCoef(),
        "mean": MeanMetric(),
        "tokens": SumMetric(),  # tells whether something counts twice
    }


def feed(metrics: dict[str, Any], data: SimpleNamespace, chosen: torch.Tensor, columns: slice = slice(None)) -> None:
    """Update metrics with samples, or with some columns of their sequences."""
    logits, labels = data.logits[chosen], data.labels[chosen]
    for name in ("accuracy", "f1", "auroc", "recall", "by_class", "several"):
        metrics[name].update(logits, labels)
    metrics["perplexity"].update(data.text[chosen][:, columns], data.words[chosen][:, columns])
    metrics["pearson"].update(data.x[chosen], data.y[chosen])
    metrics["mean"].update(data.x[chosen])
    metrics["tokens"].update((data.words[chosen][:, columns] != PADDING).sum())


def token_loss(data: SimpleNamespace, chosen: torch.Tensor, columns: slice = slice(None)) -> tuple[torch.Tensor, int]:
    words = data.words[chosen][:, columns]
    loss = F.cross_entropy(data.text[chosen][:, columns].flatten(0, 1), words.flatten(), ignore_index=PADDING)
    return loss, int((words != PADDING).sum())


def oracle(data: SimpleNamespace, chosen: torch.Tensor) -> dict[str, float]:
    """Measure samples in this process, in one piece."""
    metrics = make_metrics()
    feed(metrics, data, chosen)
    found = {}
    for name, metric in metrics.items():
        metric.distributed_available_fn = lambda: False
        for part in metric.modules():
            part.distributed_available_fn = lambda: False
        value = metric.compute()
        if isinstance(value, dict):
            found |= {f"val/{name}/{key}": float(one) for key, one in value.items()}
        elif value.dim():
            found |= {f"val/{name}/{place}": float(one) for place, one in enumerate(value)}
        else:
            found[f"val/{name}"] = float(value)
    loss, _ = token_loss(data, chosen)
    found["val/loss"] = float(loss)
    found["val/plain"] = float(F.cross_entropy(data.logits[chosen], data.labels[chosen]))
    return found


class Trainer(EvalMetricMixin, LoggerMixin):
    """What the mixins need of a trainer."""

    def __init__(self, state: DistributedState, folder: RunDirectory | None = None, **sections: Any) -> None:
        self.strategy: Any = SimpleNamespace(state=state, device=CPU)
        self.run_directory = folder
        self.config = SimpleNamespace(**sections)
        self.global_step = self.current_epoch = self.samples = 0

    def configure_metrics(self) -> None:
        vars(self).update(make_metrics())


def measuring_trainer(state: DistributedState, **sections: Any) -> Trainer:
    trainer = Trainer(state, **sections)
    trainer._open_loggers = lambda: None
    trainer.setup()
    return trainer


def set_up(rank: int, world_size: int, layout: Layout) -> DistributedState:
    sizes, hsdp, shape = layout
    state = DistributedState()
    state.set_global("gloo", "cpu", None, None, rank, world_size)
    if sizes is not None:
        state.set_federated_scaling(sizes, hsdp, shape)
    elif shape is not None:
        state.set_hsdp(2, shape)
    elif hsdp is not None:
        state.set_hsdp(hsdp)
    return state


def take_down(state: DistributedState, layout: Layout) -> None:
    if layout[0] is not None:
        state.unset_federated_scaling()
    else:
        state.unset_hsdp()


def my_batches(state: DistributedState, cut: list[int]) -> Iterator[torch.Tensor]:
    """Deal the cell's samples out to the ranks with data of their own."""
    cell = state.topology.cell_of(state.rank)
    place, places = share_of(state.data_place)
    return iter(torch.arange(cut[cell] + place, cut[cell + 1], places).split(BATCH))


def validate(trainer: Trainer, data: SimpleNamespace, cut: list[int]) -> None:
    """Do what a trainer does in a validation."""
    state = trainer.state
    shape = dict(state.topology.cell_shape or ())
    local = state.topology.coordinates(state.rank).local_rank
    is_last_stage = shape.get("pp", 1) == 1 or local >= state.topology.sizes[state.topology.cell_of(state.rank)] // 2
    half = TOKENS // 2
    columns = slice(None)
    if shape.get("cp", 1) == 2:
        first = local < state.topology.sizes[state.topology.cell_of(state.rank)] // 2
        columns = slice(0, half) if first else slice(half, None)
    trainer.reset_metrics()
    for chosen in my_batches(state, cut):
        with trainer.measuring(len(chosen)):
            if is_last_stage:
                feed(trainer.named_metrics(), data, chosen, columns)
        loss, tokens = token_loss(data, chosen, columns)
        plain = F.cross_entropy(data.logits[chosen], data.labels[chosen])
        if not counted_place(state.topology, state.rank)[1]:
            plain = plain + 1000  # the first of those that measure the same counts
        trainer.update_outputs({"val_loss": (loss, tokens), "plain": plain, "logits": data.logits}, len(chosen))
    for chosen in (torch.tensor([0]), torch.tensor([40])):  # batches that only keep ranks in step
        with trainer.measuring(0):
            feed(trainer.named_metrics(), data, chosen)
        trainer.update_outputs({"val_loss": (torch.tensor(math.nan), 3), "plain": 1e9}, 0)


def check(found: dict[str, float], wanted: dict[str, float], about: str) -> None:
    assert found.keys() == wanted.keys(), about
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=2e-6, abs=1e-7), f"{about}: {name}"


def measure_layouts(rank: int, world_size: int, layouts: list[Layout]) -> list[tuple[dict[str, float], ...]]:
    data = make_data()
    measured = cache(lambda first, last: oracle(data, torch.arange(first, last)))
    told = []
    for layout in layouts:
        state = set_up(rank, world_size, layout)
        cut = CUTS[state.topology.cells]
        cell = state.topology.cell_of(rank)
        trainer = measuring_trainer(state)
        validate(trainer, data, cut)
        # Cells validate at times of their own: these would not meet if they were of the world.
        for _ in range(1 + 2 * cell):
            mine = trainer.compute_metrics()
        check(mine, measured(cut[cell], cut[cell + 1]), f"{layout}, cell {cell}")
        validate(trainer, data, cut)
        every = trainer.compute_metrics("federation")
        check(every, measured(0, SAMPLES), f"{layout}, federation")
        check(trainer.compute_metrics(), mine, f"{layout}, the cell again")
        assert float(trainer.accuracy.compute()) >= 0  # this rank's own; it moves nothing
        told.append((mine, every))
        take_down(state, layout)
    return told


def measure_unequal(rank: int, world_size: int) -> list[tuple[dict[str, float], ...]]:
    edges(rank)
    return measure_layouts(rank, world_size, [((2, 1), None, None)])


def test_two_unequal_cells_measure_what_one_process_measures() -> None:
    pytest.importorskip("torchmetrics")
    told = run_world(3, measure_unequal)
    (((cell_0, every_0),), ((cell_1, every_1),), ((cell_2, every_2),)) = told
    assert cell_0 == cell_1 != cell_2 and every_0 == every_1 == every_2  # to the bit


def test_layouts_measure_what_one_process_measures() -> None:
    pytest.importorskip("torchmetrics")
    told = run_world(4, measure_layouts, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        assert all(ranks[number][1] == told[0][number][1] for ranks in told), layout


# Edges ----------------------------------------------------------------------------------------------------------------


def edges(rank: int) -> None:
    layout: Layout = ((2, 1), None, None)
    state = set_up(rank, 3, layout)
    data = make_data()
    trainer = measuring_trainer(state, metrics=MetricsConfig(perplexity=True))
    # A rank without any sample, lists that are empty there, and metrics that another run has filled.
    for chosen in ([torch.arange(12)], [], [torch.arange(5, 12), torch.arange(12, 14)]):
        trainer.reset_metrics()
        mine = chosen if rank != 1 else []
        for one in mine:
            feed(trainer.named_metrics(), data, one)
            trainer.update_outputs({"val_loss": token_loss(data, one), "plain": 0.0}, len(one))
        if chosen:
            values = trainer.compute_metrics()
            check(
                {name: values[name] for name in ("val/f1", "val/auroc", "val/pearson", "val/loss")},
                part_oracle(data, chosen),
                "",
            )
        else:
            with pytest.raises(ConfigError, match="metric 'accuracy' was updated on none of rank"):
                trainer.compute_metrics("federation")
    # The number of lists' tensors does not matter, nor does what a rank has seen before an empty batch.
    assert values["val/loss"] == pytest.approx(math.log(trainer.compute_metrics()["val/perplexity"]))
    # Different metrics and different names are told on all ranks, not waited for.
    trainer._metric_names = tuple(name for name in trainer._metric_names if rank or name != "auroc")
    with pytest.raises(ConfigError, match="ranks have different metrics: rank 0: accuracy, f1, recall"):
        trainer.compute_metrics("federation")
    trainer._metric_names = ()
    trainer.reset_metrics()
    trainer.update_outputs({"val_loss": 1.0, **({"extra": 2.0} if rank == 1 else {})}, 3)
    if rank < 2:
        with pytest.raises(ConfigError, match="rank 0: no more; rank 1: val/extra"):
            trainer.compute_metrics()
    else:
        assert trainer.compute_metrics()["val/loss"] == 1.0
    check_wrong_metrics(trainer, rank)
    check_names(state, rank)
    check_single_samples(state, data, rank)
    take_down(state, layout)


def part_oracle(data: SimpleNamespace, chosen: list[torch.Tensor]) -> dict[str, float]:
    found = oracle(data, torch.cat(chosen))
    return {name: found[name] for name in ("val/f1", "val/auroc", "val/pearson", "val/loss")}


def make_words() -> Any:
    from torchmetrics import Metric

    class Words(Metric):
        """Keeps what is no tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("kept", default=[])

        def update(self, word: str) -> None:
            self.kept.append(word)

        def compute(self) -> int:
            return len(self.kept)

    return Words()


def check_wrong_metrics(trainer: Trainer, rank: int) -> None:
    from torchmetrics.classification import MulticlassConfusionMatrix

    trainer.confusion = MulticlassConfusionMatrix(CLASSES)
    trainer.confusion.distributed_available_fn = lambda: False
    trainer._metric_names = ("confusion",)
    trainer.reset_metrics()
    trainer.confusion.update(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"'confusion' gives a tensor of shape \(4, 4\)"):
        trainer.compute_metrics("federation")
    assert int(trainer.confusion.confmat.sum()) == 1  # its own state is back
    trainer.words = make_words()
    trainer.words.distributed_available_fn = lambda: False
    trainer._metric_names = ("words",)
    if rank == 1:
        trainer.words.update("a")
    with pytest.raises(ConfigError, match=r"'words' keeps a str in 'kept'; only tensors can move \(rank 1\)"):
        trainer.compute_metrics("federation")
    with pytest.raises(ConfigError, match="over must be one of 'cell', 'federation', got 'world'"):
        trainer.compute_metrics("world")


def check_single_samples(state: DistributedState, data: SimpleNamespace, rank: int) -> None:
    """Lists of columns of batches of one sample, which count as contiguous with any stride."""
    from torchmetrics import MetricCollection, SpearmanCorrCoef
    from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryCalibrationError
    from torchmetrics.retrieval import RetrievalMAP

    def update(metrics: dict[str, Any], chosen: torch.Tensor) -> dict[str, Any]:
        scores, hits = data.logits[chosen].softmax(-1)[:, 1], (data.labels[chosen] == 1).long()
        metrics["binary"].update(scores, hits)
        metrics["rank"].update(scores, data.logits[chosen][:, 0])
        metrics["retrieval"].update(scores, hits, indexes=(chosen % 2)[:, None][:, 0])
        return metrics

    def made() -> dict[str, Any]:
        binary = MetricCollection([BinaryAUROC(), BinaryAveragePrecision(), BinaryCalibrationError()])
        metrics = {"binary": binary, "rank": SpearmanCorrCoef(), "retrieval": RetrievalMAP()}
        prepare_metrics(metrics, CPU)
        return metrics

    whole = {name: metric.compute() for name, metric in update(made(), torch.arange(12)).items()}
    metrics = made()
    for one in torch.arange(rank, 12, 3).split(1):
        update(metrics, one)
    found = compute_metrics(metrics, state, over="federation")
    wanted = {f"binary/{name}": value for name, value in whole.pop("binary").items()} | whole
    check(found, {name: float(value) for name, value in wanted.items()}, "single samples")


def check_names(state: DistributedState, rank: int) -> None:
    # More names than one reduction carries, from ranks that count differently; one rank is silent.
    names = [f"name {number:03}" for number in range(150)]
    values = {name: float(number + rank) for number, name in enumerate(names)}
    found = reduce_mean(values, dict.fromkeys(names, 1.0 + rank), state, over="federation")
    for number, name in enumerate(names):
        wanted = sum((number + one) * (1.0 + one) for one in range(3)) / 6
        assert found[name] == pytest.approx(wanted, rel=1e-15)
    assert reduce_mean(values if rank == 2 else {}, 1.0, state, over="federation") == pytest.approx(
        {name: float(number + 2) for number, name in enumerate(names)}
    )
    assert reduce_mean({}, 1.0, state) == {}
    # Sums that would agree: the hashes' spread tells, not their mean.
    sums = WeightedSums(CPU)
    sums.add(f"of {rank}", 1.0)
    with pytest.raises(ConfigError, match="rank 0: of 0; rank 1: of 1; rank 2: of 2"):
        reduce_sums(sums, state, over="federation", device=CPU)
    assert reduce_mean({"x": torch.tensor(math.inf)}, 1.0, state)["x"] == math.inf


# Records --------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(path: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(one["step"], one["values"]) for one in read(path)]


def recorder(state: DistributedState, path: Path, is_resumed: bool = False) -> LoggerMixin:
    config = BaseTrainerConfig(experiment=ExperimentConfig(name="demo", output_dir=str(path)))
    folder = RunDirectory.open(path, state, config, origins={"experiment.name": "command line"}, is_resumed=is_resumed)
    trainer = Trainer(state, folder)
    trainer.strategy.world = DistributedWorld(DeviceParameters.FSDP())
    trainer.world.setup(state)
    trainer.config = config
    trainer.configure_metrics = None  # type: ignore[assignment]
    LoggerMixin.setup(trainer)
    return trainer


def train(trainer: Any, first: int, last: int, saved_at: int = -1) -> dict[str, Any] | None:
    """Log as a loop does: cells step at their own pace, ranks weigh differently; tell what a checkpoint keeps."""
    rank, cell = trainer.state.rank, trainer.run_directory.cell
    saved = None
    for step in range(first, last + 1):
        for _ in range(1 + rank):  # micro-batches
            trainer.log_scalar("train/loss", torch.rand((), generator=seeded(step, rank)), weight=1.0 + rank)
        trainer.log_scalar("train/learning_rate", 0.1 / step)
        trainer.global_step, trainer.samples = step, step * 16
        if step % (3 + cell) == 0:
            trainer.flush_scalars()
        if step == saved_at:
            saved = trainer.own_parts()["records"].state_dict()
            json.dumps(saved)
        if step % 5 == 0:
            trainer.log_round(report_of(step // 5, rank), divergence={"l2": math.inf} if step == 5 else None)
            trainer.log_metrics({"val/loss": step / 7}, over="federation")
            trainer.log_text("note", f"step {step}")
    return saved


def report_of(number: int, rank: int) -> RoundReport:
    told: dict[str, Any] = {"phases": {"vote": 0.1}, "nonfinite": {1: ("w",)}, "shares": (0.25, 0.75)}
    return RoundReport(number, (1.0, 2.0), 100 + rank, 10 * rank, 0.5, is_skipped=number == 1, **told)


def seeded(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank)


def records(rank: int, world_size: int, path: str) -> None:
    layout: Layout = ((2, 1), None, None)
    state = set_up(rank, world_size, layout)
    whole, cut = Path(path) / "whole", Path(path) / "cut"
    trainer = recorder(state, whole)
    train(trainer, 1, 14)
    trainer.teardown(None)
    dist.barrier()
    if rank == 0:
        check_records(whole)
    # Killed at step 13, resumed from step 10, whose round came after the checkpoint.
    trainer = recorder(state, cut)
    saved = train(trainer, 1, 13, saved_at=10)
    assert saved is not None
    trainer.teardown(None)
    if rank == 0:
        with (cut / "metrics/cell_0.jsonl").open("a") as stream:
            stream.write('{"time": 3, "step": 1')
    dist.barrier()
    trainer = recorder(state, cut, is_resumed=True)
    trainer.own_parts()["records"].load_state_dict(json.loads(json.dumps(saved)))
    trainer.global_step, trainer.samples = 10, 160
    trainer.on_resumed()
    trainer.log_round(report_of(2, rank))
    trainer.log_metrics({"val/loss": 10 / 7}, over="federation")
    trainer.log_text("note", "step 10")
    train(trainer, 11, 14)
    trainer.teardown(None)
    dist.barrier()
    for name in ("cell_0", "cell_1", "federation"):
        assert curve(cut / f"metrics/{name}.jsonl") == curve(whole / f"metrics/{name}.jsonl")  # to the bit
        ends = [
            [line.split(",", 1)[-1] for line in (run / f"metrics/{name}.csv").read_text().splitlines()]
            for run in (cut, whole)
        ]
        assert ends[0] == ends[1] and len(ends[0]) > 2, (name, ends)
    for name in ("rounds/cell_0.jsonl", "rounds/cell_1.jsonl", "texts/cell_1.jsonl"):
        both = [[{**one, "time": 0} for one in read(run / name)] for run in (cut, whole)]
        assert both[0] == both[1] and both[0]
    take_down(state, layout)


def check_records(run: Path) -> None:
    (first, *_), (step, values) = curve(run / "metrics/cell_0.jsonl")[0], curve(run / "metrics/cell_0.jsonl")[0]
    assert first == step == 3 and [one for one, _ in curve(run / "metrics/cell_1.jsonl")] == [4, 8, 12]
    total = weights = 0.0
    for one in (1, 2, 3):
        for rank in (0, 1):
            draw = float(torch.rand((), generator=seeded(one, rank)))
            total += draw * (1 + rank) * (1 + rank)
            weights += (1 + rank) * (1 + rank)
    assert values["train/loss"] == pytest.approx(total / weights, rel=1e-15)
    assert values["train/learning_rate"] == pytest.approx((0.1 + 0.05 + 0.1 / 3) / 3, rel=1e-15)
    first_round, second = read(run / "rounds/cell_0.jsonl")
    assert (first_round["round"], first_round["bytes_across"], first_round["bytes_home"]) == (1, 201, 10)
    assert first_round["divergence"] == {"l2": "Infinity"} and "divergence" not in second
    assert set(second) == {
        *("time", "step", "epoch", "round", "weights", "bytes_across", "bytes_home", "seconds", "phases", "hidden"),
        *(
            "dropped",
            "update_norms",
            "fragment",
            "steps",
            "step_seconds",
            "codec_error",
            "nonfinite",
            "shares",
            "scale",
            "step_norm",
        ),
        *("is_skipped", "is_last"),
    }
    assert set(second) == {"time", "step", "epoch"} | {one.name for one in fields(RoundReport)}
    assert (second["nonfinite"], second["shares"], second["scale"]) == ({"1": ["w"]}, [0.25, 0.75], 1.0)
    assert first_round["is_skipped"] is True and second["is_skipped"] is False
    assert read(run / "rounds/cell_1.jsonl")[0]["bytes_across"] == 102
    assert curve(run / "metrics/federation.jsonl") == [(5, {"val/loss": 5 / 7}), (10, {"val/loss": 10 / 7})]
    assert read(run / "metrics/cell_0.jsonl")[-1]["samples"] == 12 * 16


def test_a_resumed_run_has_the_records_of_an_uninterrupted_one(tmp_path: Path) -> None:
    run_world(3, records, str(tmp_path))
    for run in ("whole", "cut"):
        assert sorted(one.name for one in (tmp_path / run / "logs").iterdir()) == [
            f"rank_{rank}.log" for rank in range(3)
        ]
        assert json.loads((tmp_path / run / "topology.json").read_text())["cells"] == [2, 1]
        assert yaml.safe_load((tmp_path / run / "config.yaml").read_text())["experiment"]["name"] == "demo"
        assert json.loads((tmp_path / run / "origins.json").read_text())["experiment.name"] == "command line"


def folders(rank: int, world_size: int, path: str) -> None:
    state = set_up(rank, world_size, ((1, 1), None, None))
    mine = Path(path) / f"host_{rank}"
    mine.mkdir()
    link = Path(path) / "run"
    shared = RunDirectory.open(link, state, {"a": 1})
    logging.getLogger("xffl").info("rank %d is here", rank)
    warnings.warn(f"careful, rank {rank}", stacklevel=1)
    shared.close()
    assert f"rank {rank} is here" in shared.log.read_text()
    assert f"careful, rank {rank}" in shared.log.read_text()
    hosts = json.loads((link / "environment.json").read_text())["hosts"]
    assert len(hosts) == 1  # both ranks are of one node
    # Each rank looks where only it has files, as with a disk of the node's own.
    look = RunDirectory._check_visible
    if rank == 1:
        RunDirectory._check_visible = lambda self, token: look(RunDirectory(mine, state), token)  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"is not there; give a folder on a file system that all ranks share \(rank 1"
    ):
        RunDirectory.open(Path(path) / "other", state, {"a": 1})
    RunDirectory._check_visible = look  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="different output_dir"):
        RunDirectory.open(Path(path) / f"run_{rank}", state, {"a": 1})
    if rank == 0:
        (link / "metrics/cell_1.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds the records of another run"):
        RunDirectory.open(link, state, {"a": 1})
    state.unset_federated_scaling()


def test_folders_that_cannot_be_taken_are_told_on_all_ranks(tmp_path: Path) -> None:
    run_world(2, folders, str(tmp_path))


def test_places_that_count() -> None:
    from xffl.topology import Topology

    plain = Topology(4, (3, 1))
    assert [counted_place(plain, rank) for rank in range(4)] == [(0, True), (1, True), (2, True), (0, True)]
    mesh = Topology(16, (16,), None, {"pp": 2, "cp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 2})
    places = [counted_place(mesh, rank) for rank in range(16)]
    assert [rank for rank, (_, is_first) in enumerate(places) if is_first] == [0, 2, 4, 6]
    assert sorted(part for part, is_first in places if is_first) == [0, 1, 2, 3]
    assert all(places[rank][0] == places[rank % 8 - rank % 2][0] for rank in range(16))
