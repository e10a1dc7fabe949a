"""Loggers: what stands in their files, after a kill and a resume, too."""

from __future__ import annotations

import csv
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.worlds import fake_world
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, StateError
from xffl.extras import install_command
from xffl.training.config.dataclasses import BaseTrainerConfig, ExperimentConfig
from xffl.training.loggers import (
    CSVLogger,
    JSONLinesLogger,
    LineFile,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandBLogger,
    cut_lines,
    tiled,
)
from xffl.training.metrics import WeightedSums
from xffl.training.mixins import logging as mixin
from xffl.training.mixins.logging import (
    LoggerConfigMixin,
    LoggerMixin,
    LoggingConfig,
    MLflowLoggerMixin,
    TensorBoardLoggerMixin,
    WandBConfig,
    WandBLoggerConfigMixin,
    WandBLoggerMixin,
)
from xffl.training.run_directory import RunDirectory

VALUES = {"train/loss": 0.1 + 0.2, "val/a, b": -1e-300, "odd": math.nan, "up": math.inf, "down": -math.inf}


def same(found: dict[str, float], wanted: dict[str, float]) -> bool:
    return found.keys() == wanted.keys() and all(
        math.isnan(found[name]) if math.isnan(value) else found[name] == value for name, value in wanted.items()
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    return tmp_path


def test_json_lines_and_csv_read_back_to_the_bit(run: Path) -> None:
    for logger in (JSONLinesLogger(run, "cell_0"), CSVLogger(run, "cell_0")):
        logger.log(VALUES, step=3, epoch=1, samples=48, time_s=1.25)
        logger.log({"x": 2.0}, step=4, epoch=1, samples=64, time_s=2.5)
        logger.close()
        logger.log({}, step=5, epoch=1, samples=80, time_s=3.0)
        logger.close()
    first, second, third = (json.loads(line) for line in (run / "metrics/cell_0.jsonl").read_text().splitlines())
    assert {name: first[name] for name in ("time", "step", "epoch", "samples")} == {
        "time": 1.25,
        "step": 3,
        "epoch": 1,
        "samples": 48,
    }
    assert first["values"]["odd"] == "NaN" and first["values"]["up"] == "Infinity"
    assert first["values"]["down"] == "-Infinity"
    assert same({name: float(value) for name, value in first["values"].items()}, VALUES)
    assert second["values"] == {"x": 2.0} and third["values"] == {}
    with (run / "metrics/cell_0.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert same({row["name"]: float(row["value"]) for row in rows[:-1]}, VALUES)
    assert rows[-1] == {"time": "2.5", "step": "4", "epoch": "1", "samples": "64", "name": "x", "value": "2.0"}


def write_and_die(run: Path) -> None:
    loggers = [JSONLinesLogger(run, "cell_0"), CSVLogger(run, "cell_0")]
    for step in range(50):
        for logger in loggers:
            logger.log({"x": float(step)}, step=step, epoch=0, samples=0, time_s=0.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_no_whole_line_and_half_a_line_is_removed(run: Path) -> None:
    writer = multiprocessing.get_context("fork").Process(target=write_and_die, args=(run,))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    for name, header in (("cell_0.jsonl", 0), ("cell_0.csv", 1)):
        path = run / "metrics" / name
        assert len(path.read_text().splitlines()) == 50 + header
        with path.open("a") as stream:
            stream.write('{"time": 1')  # as a kill in the middle of a write leaves it
        file = LineFile(path, "unused")
        assert file.lines == 50 + header
        file.append("whole\n")
        assert file.lines == 51 + header
        assert path.read_text().splitlines()[-2:][1] == "whole" and '{"time": 1\n' not in path.read_text()


def test_lines_are_cut_aside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    cut_lines(path, lambda place, line: False)  # there is none
    path.write_bytes(b"0\n1\n2\n3")
    before = path.stat().st_ino
    cut_lines(path, lambda place, line: int(line) != 1)
    assert path.read_bytes() == b"0\n2\n" and path.stat().st_ino != before
    before = path.stat().st_ino
    cut_lines(path, lambda place, line: True)
    assert path.stat().st_ino == before and [one.name for one in tmp_path.iterdir()] == ["file"]
    path.write_bytes(b"0\n\0\0\n2\n")
    with pytest.raises(ConfigError, match="line 2 is not a record"):
        cut_lines(path, lambda place, line: int(line) >= 0)
    assert path.read_bytes() == b"0\n\0\0\n2\n"


def test_texts_and_pictures(run: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    logger = JSONLinesLogger(run, "cell_1")
    logger.log_text("sample", "two\nlines", step=7)
    pictures = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).reshape(2, 3, 2, 2) / 23
    logger.log_image("train/samples", pictures, step=7)
    logger.close()
    (line,) = (run / "texts/cell_1.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": 7, "name": "sample", "text": "two\nlines"}.items()
    found = np.asarray(image.open(run / "images/cell_1/train_samples_7.png"))
    assert found.shape == (2, 4, 3)
    for picture, left in ((0, 0), (1, 2)):  # side by side, channels last
        wanted = np.round(pictures[picture].numpy() * 255).transpose(1, 2, 0)
        assert np.array_equal(found[:, left : left + 2], wanted)
    assert tiled(np.eye(2, dtype=bool)).tolist() == [[[255] * 3, [0] * 3], [[0] * 3, [255] * 3]]
    assert tiled(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)).shape == (1, 2, 3)
    for wrong in (torch.zeros(2), torch.zeros(1, 2, 4, 4), torch.full((2, 2), 1.5), torch.ones(2, 2, dtype=torch.long)):
        with pytest.raises(ConfigError, match="give|must have shape"):
            tiled(wrong)
    with pytest.raises(ConfigError, match="nan"):
        tiled(torch.tensor([[math.nan]]))


def test_tensorboard_forgets_later_steps(run: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(run, "cell_0")
    for step in range(5):
        logger.log({"train/loss": float(step)}, step=step, epoch=0, samples=0, time_s=float(step))
    logger.log_config({"training.epochs": 3})
    logger.log_text("note", "hello", step=1)
    logger.log_image("digit", torch.zeros(8, 8), step=1)
    logger.cut_after(2)
    logger.log({"train/loss": 30.0}, step=3, epoch=0, samples=0, time_s=9.0)
    logger.close()
    found = EventAccumulator(str(run / "tensorboard/cell_0"), size_guidance={"scalars": 0})
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert found.Tags()["images"] == ["digit"]
    assert set(found.Tags()["tensors"]) == {"configuration/text_summary", "note/text_summary"}


def test_mlflow_in_a_local_store(run: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    for epoch in range(2):  # the second one goes on
        logger = MLflowLogger(run, "cell_0", name="demo")
        logger.log_config({f"training.option_{number}": number for number in range(130)} | {"epoch": epoch})
        logger.log({"train/loss": 0.5 + epoch}, step=epoch, epoch=epoch, samples=16, time_s=2.0)
        logger.log_text("note", "hello", step=epoch)
        logger.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow/cell_0.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "demo"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value, one.timestamp) for one in history] == [(0, 0.5, 2000), (1, 1.5, 2000)]
    assert len(found.data.params) == 131 and found.data.params["epoch"] == "0"
    assert found.data.tags["note"] == "hello" and found.info.run_name == "demo-cell_0"
    assert found.info.status == "FINISHED"


@pytest.mark.timeout(120)
def test_wandb_offline_writes_files(run: Path) -> None:
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("PIL")
    loggers = [WandBLogger(run, scope, name="demo", project="xffl", tags=("a",)) for scope in ("cell_0", "federation")]
    for number, logger in enumerate(loggers):
        logger.log_config({"training.epochs": 3})
        logger.log({"train/loss": 0.5 + number}, step=10, epoch=0, samples=16, time_s=2.0)
        logger.log({"train/loss": 0.25}, step=5, epoch=0, samples=16, time_s=3.0)  # as after a resume
        logger.log_text("note", "hello", step=10)
        logger.log_image("digit", torch.zeros(8, 8), step=10)
    for logger in loggers:
        logger.close()
    wandb.teardown()  # waits for the process that writes
    files = list((run / "wandb").glob("offline-run-*/run-*.wandb"))
    ids = {(run / "wandb" / f"{scope}.id").read_text() for scope in ("cell_0", "federation")}
    assert {path.stem.removeprefix("run-") for path in files} == ids and len(ids) == 2
    assert all(path.stat().st_size > 500 for path in files)
    before = (run / "wandb/cell_0.id").read_text()
    WandBLogger(run, "cell_0", name="demo", project="xffl", mode="disabled").close()
    assert (run / "wandb/cell_0.id").read_text() == before


def test_a_missing_package_is_told_with_its_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kind, extra in (
        ("mlflow.entities", MLflowLogger, "mlflow"),
        ("wandb", WandBLogger, "wandb"),
        ("torch.utils.tensorboard", TensorBoardLogger, "tensorboard"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        options = {} if kind is TensorBoardLogger else {"name": "demo"}
        options |= {"project": "xffl"} if kind is WandBLogger else {}
        with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
            kind(run, "cell_0", **options)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("report"))):
        JSONLinesLogger(run, "cell_0").log_image("x", torch.zeros(2, 2), step=1)


# Trainers with loggers -----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Config(BaseTrainerConfig, LoggerConfigMixin, WandBLoggerConfigMixin):
    pass


class Trainer(TensorBoardLoggerMixin, MLflowLoggerMixin, WandBLoggerMixin):
    is_broken = False

    def __init__(self, path: Path, **sections: Any) -> None:
        state = DistributedState()
        state.set_global("gloo", "cpu", None, None, 0, 1)
        self.strategy: Any = SimpleNamespace(state=state, device=torch.device("cpu"))
        self.config = Config(experiment=ExperimentConfig(name="demo", output_dir=str(path)), **sections)
        self.run_directory = RunDirectory.open(path, self.state, self.config)
        self.global_step, self.current_epoch, self.samples = 4, 1, 64

    def configure_loggers(self, scope: str) -> list[Logger]:
        if self.is_broken:
            raise OSError("no such server")
        return super().configure_loggers(scope)


def test_mixins_and_sections_add_loggers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    given: list[dict[str, Any]] = []
    nothing = {name: lambda *args, **kwargs: None for name in ("log", "log_config", "close")}  # a store takes seconds
    made = {"__init__": lambda self, *args, **kwargs: given.append(kwargs), **nothing}
    monkeypatch.setattr(mixin, "MLflowLogger", type("MLflowLogger", (Logger,), made))
    sections = {"logging": LoggingConfig(tensorboard=True, mlflow=True), "wandb": WandBConfig(mode="disabled")}
    for number, options in enumerate(({"wandb": sections["wandb"]}, sections)):
        trainer = Trainer(tmp_path / str(number), **options)
        with pytest.raises(StateError, match="after setup"):
            trainer.log_scalar("x", 1.0)
        trainer.setup()
        kinds = [type(logger) for logger in trainer._loggers["cell"]]
        assert sorted(kind.__name__ for kind in kinds) == [
            *("CSVLogger", "JSONLinesLogger", "MLflowLogger", "TensorBoardLogger", "WandBLogger"),
        ]
        assert [type(logger) for logger in trainer._loggers["federation"]] == [JSONLinesLogger, CSVLogger]
        trainer.log_scalar("x", 1.0, weight=3)
        trainer.log_scalar("x", torch.tensor(5.0), weight=1)
        trainer.log_scalar("weightless", 1.0, weight=0)
        trainer.log_scalar("unmeasured", None)
        trainer.flush_scalars()
        trainer.flush_scalars()  # nothing is pending: no record
        trainer.log_metrics({})  # as after a validation that measures nothing
        for wrong in ({"values": {"": 1.0}}, {"values": {"x": 1.0}, "over": "world"}):
            with pytest.raises(ConfigError):
                trainer.log_metrics(**wrong)
        trainer.teardown(None)
        (line,) = (tmp_path / str(number) / "metrics/cell_0.jsonl").read_text().splitlines()
        assert given[number] == {"name": "demo", "uri": None, "experiment": None}
        record = json.loads(line)
        assert record["values"] == {"x": 2.0} and (record["step"], record["epoch"], record["samples"]) == (4, 1, 64)


def test_a_logger_that_cannot_be_made(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.is_broken = True
    with pytest.raises(ConfigError, match="loggers could not be made: OSError: no such server"):
        trainer.setup()
    trainer.teardown(None)
    with pytest.raises(ConfigError, match="wandb.mode"):
        WandBConfig(mode="sometimes")


class Stubborn(Logger):
    """Cannot write what is left."""

    def close(self) -> None:
        raise OSError("no network")


class PlainTrainer(Trainer):
    """Writes files only."""

    def configure_loggers(self, scope: str) -> list[Logger]:
        return LoggerMixin.configure_loggers(self, scope)


def test_a_logger_without_a_log_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Stubborn has no log; override it"):
        Stubborn().log({"x": 1.0}, step=1, epoch=0, samples=1, time_s=0.0)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_everything_is_closed_whatever_a_logger_raises(tmp_path: Path, error: BaseException | None) -> None:
    before = warnings.showwarning, list(logging.getLogger("xffl").handlers)
    trainer = PlainTrainer(tmp_path)
    trainer.setup()
    trainer.log_metrics({"x": 1.0})
    trainer._loggers["cell"].insert(0, Stubborn())
    _, jsonl, *_ = trainer._loggers["cell"]
    if error is None:
        with pytest.raises(OSError, match="no network"):
            trainer.teardown(None)
    else:
        trainer.teardown(error)  # which is what the run ends with
    assert jsonl.files[0]._handle is None
    assert (warnings.showwarning, logging.getLogger("xffl").handlers) == before
    assert "no network" in (tmp_path / "logs" / "rank_0.log").read_text()


# Sums of scalars ------------------------------------------------------------------------------------------------------


def test_sums_are_exact_and_go_on_to_the_same_bits() -> None:
    cpu = torch.device("cpu")
    draws = torch.rand(40, generator=torch.Generator().manual_seed(1))

    def feed(sums: WeightedSums, places: range) -> None:
        for place in places:
            value = draws[place]
            sums.add("tensor", value, 1.0 + place)
            sums.add("number", float(value) / 3, 0.1)
            sums.add("both", value if place % 3 else float(value) / 7)

    whole, early, late = WeightedSums(cpu), WeightedSums(cpu), WeightedSums(cpu)
    feed(whole, range(40))
    feed(early, range(23))
    late.load_state_dict(json.loads(json.dumps(early.state_dict())))
    feed(late, range(23, 40))
    assert late.state_dict() == whole.state_dict()
    exact = math.fsum(float(value) * (1.0 + place) for place, value in enumerate(draws))
    assert whole.state_dict()["sums"]["tensor"] == pytest.approx(exact, rel=1e-15)
    assert whole.vector(("both", "missing"), True)[1] == 0.0 and not whole.vector(("both",), False).any()


def test_a_kept_value_is_not_changed_by_what_happens_to_the_tensor() -> None:
    sums = WeightedSums(torch.device("cpu"))
    loss = torch.tensor([[2.0]], requires_grad=True)
    scaled = loss * 1
    sums.add("loss", scaled)
    with torch.no_grad():
        scaled.detach().mul_(100)
    sums.add("loss", torch.tensor(3))  # a whole number
    sums.add("weightless", math.nan, 0.0)
    assert sums.state_dict() == {"sums": {"loss": 5.0, "weightless": 0.0}, "weights": {"loss": 2.0, "weightless": 0.0}}
    assert not any(one.requires_grad for one in sums._sums.values() if isinstance(one, torch.Tensor))


def test_wrong_scalars() -> None:
    sums = WeightedSums(torch.device("cpu"))
    for name, value, weight, message in (
        ("", 1.0, 1.0, "name of a value must be a text"),
        ("a\nb", 1.0, 1.0, "name of a value must be a text"),
        ("a", 1.0, -1.0, "weight of 'a' must be .* got -1"),
        ("a", 1.0, math.nan, "weight of 'a' must be .* got nan"),
        ("a", 1.0, math.inf, "weight of 'a' must be .* got inf"),
        ("a", torch.zeros(2), 1.0, "shape \\(2,\\)"),
        ("a", torch.zeros(0), 1.0, "shape \\(0,\\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            sums.add(name, value, weight)


def test_of_a_part_no_rank_has_the_value() -> None:
    sums = WeightedSums(torch.device("cpu"))
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        sums.add("whole", DTensor.from_local(torch.tensor([3.0]), mesh, [Replicate()]))
        for placement in (Shard(0), Partial()):
            with pytest.raises(ConfigError, match=r"of which no rank has the value; give its full_tensor\(\)"):
                sums.add("part", DTensor.from_local(torch.tensor([3.0]), mesh, [placement]))
    assert sums.state_dict()["sums"] == {"whole": 3.0, "part": 0.0}
