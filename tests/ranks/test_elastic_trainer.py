"""A trainer in an elastic federation: its place in the data, what cells tell each other, its checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import of_all
from tests.rows import some_of
from tests.tasks import TaskConfig, TaskTrainer, whole_weights
from tests.worlds import be_launched, run_world
from xffl.checkpoint import consolidate_checkpoint
from xffl.checkpoint.format import read_record, record_text
from xffl.training import Callback, ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback, EarlyStoppingCallback

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

ROOT = Path(__file__).parents[2]


@contextmanager
def serving_lighthouse() -> Iterator[str]:
    from xffl.elastic.lighthouse_client import coordination

    server = coordination().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20000, quorum_tick_ms=100, heartbeat_timeout_ms=2000
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def lighthouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XFFL_JOURNAL", str(tmp_path / "journal"))
    with serving_lighthouse() as url:
        yield url


class Rounds(Callback):
    """Keeps what the rounds' reports have told."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, ...]] = []
        self.told: list[Any] = []

    def post_round(self, trainer: Any, report: Any) -> None:
        self.cells.append(report.cells)
        self.told.append((report.round, report.told))


def config_of(folder: str, cell: int, **training: Any) -> TaskConfig:
    asked = {"epochs": 3, "batch_size": 10, "validate_every_epochs": None} | training
    return TaskConfig(
        experiment=ExperimentConfig(name="test", output_dir=f"{folder}/cell_{cell}"),
        training=TrainingParameters(**asked),
        federation=FederationConfig(every=2),
        samples=60,
    )


def fit(rank: int, world: int, url: str, ports: list[int], folder: str) -> Any:
    be_launched(0, 1, ports[rank])
    rounds = Rounds()
    with xffl.session(cell=rank, cells=2, elastic=of_all(url, world)) as state:
        trainer = TaskTrainer(config_of(folder, rank), callbacks=[rounds, CheckpointCallback()])
        trainer.fit(state)
        return whole_weights(trainer.model), trainer.global_step, trainer.world.lone_cell, rounds.cells


class Order(Callback):
    """Keeps what it hears, and in which order, until a step at which it fails."""

    def __init__(self, last_step: int | None) -> None:
        self.heard: list[str] = []
        self._last_step = last_step

    def pre_train(self, trainer: Any) -> None:
        self.heard.append("pre_train")

    def post_round(self, trainer: Any, report: Any) -> None:
        self.heard.append(f"round {report.round}")

    def post_train_batch(self, trainer: Any, output: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._last_step:
            raise ArithmeticError


def fit_twice(rank: int, world: int, url: str, ports: list[int], folder: str) -> list[list[str]]:
    """Save each step, fail between two rounds, and resume."""
    heard = []
    for life, last_step in enumerate((3, None)):
        be_launched(0, 1, ports[2 * life + rank])
        order = Order(last_step)
        with suppress(ArithmeticError), xffl.session(cell=rank, cells=2, elastic=of_all(url, world)) as state:
            callbacks = [CheckpointCallback(save_frequency=1), order]
            TaskTrainer(config_of(folder, rank), callbacks=callbacks).fit(state)
        heard.append(order.heard)
    return heard


def test_callbacks_hear_of_no_round_before_training_begins(lighthouse: str, tmp_path: Path) -> None:
    """Also of that round in which a cell resumes, and to which it gives the steps of its checkpoint."""
    ports = [free_port() for _ in range(4)]
    for first, second in run_world(2, fit_twice, lighthouse, ports, str(tmp_path), init=False):
        assert first == ["pre_train", "round 2"]
        assert second[:2] == ["pre_train", "round 3"]


def test_a_trainer_is_a_cell(lighthouse: str, tmp_path: Path) -> None:
    """And the run's model is that of the cell with the most rounds, which a checkpoint tells."""
    ports = [free_port(), free_port()]
    told = run_world(2, fit, lighthouse, ports, str(tmp_path), init=False)
    (weights, steps, cell, rounds), (other_weights, other_steps, other_cell, _) = told
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert steps == other_steps == 9  # its half of the samples, three times
    assert (cell, other_cell) == (0, 1)
    assert (0, 1) in rounds
    lines = (tmp_path / "cell_1/rounds/cell_0.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert first["weights"] == [20.0, 20.0] and first["steps"] == [2.0, 2.0]  # all samples of all steps
    records = [json.loads((tmp_path / f"cell_{cell}/checkpoints/final/checkpoint.json").read_text()) for cell in (0, 1)]
    values = [record["values"] for record in records]
    assert [value["cell"] for value in values] == [0, 1]
    assert values[0]["round"] == values[1]["round"] > 3 and values[0]["lineage"] == values[1]["lineage"] != ""
    # Another cell has gone on alone for a while.
    folder = tmp_path / "cell_1/checkpoints/final"
    record = read_record(folder)
    later = replace(record, values=values[1] | {"round": values[1]["round"] + 1})
    (folder / "checkpoint.json").write_text(record_text(later))
    done = consolidate_checkpoint(tmp_path, tmp_path / "model")
    assert done.cell == 1
    from safetensors.torch import load_file

    found = load_file(done.folder / "model.safetensors")
    assert {name: found[name].tolist() for name in found} == {name: weights[name].tolist() for name in found}
    # And so has the other one, without it: neither is the model of the run.
    (folder / "checkpoint.json").write_text(record_text(replace(record, values=values[1] | {"lineage": "another"})))
    with pytest.raises(xffl.ConfigError, match=r"several models of .*/cell_0/.*/final, .*/cell_1/.*/final"):
        consolidate_checkpoint(tmp_path, tmp_path / "another")
    # A cell's number settles it; so it does for the cell's own folder, which has no other.
    taken = [consolidate_checkpoint(tmp_path, tmp_path / f"of_{cell}", cell=cell).cell for cell in (0, 1)]
    assert taken == [0, 1]
    assert consolidate_checkpoint(folder, tmp_path / "own", cell=1).cell == 1
    with pytest.raises(xffl.CheckpointError, match=rf"no checkpoint in {tmp_path}/cell_2.*cell_0, cell_1"):
        consolidate_checkpoint(tmp_path, tmp_path / "none", cell=2)
    # The folders of cells whose rounds go over files have no number in their checkpoints.
    unnumbered = {name: value for name, value in values[1].items() if name not in ("cell", "round", "lineage")}
    (folder / "checkpoint.json").write_text(record_text(replace(record, values=unnumbered)))
    assert consolidate_checkpoint(tmp_path, tmp_path / "over_files", cell=1).cell == 1
    # A checkpoint has folders of its cells, too: one that is damaged is no run.
    (folder / "checkpoint.json").write_text("damaged")
    with pytest.raises(xffl.CheckpointError, match="is damaged"):
        consolidate_checkpoint(folder, tmp_path / "none", cell=0)
    (tmp_path / "cell_2/slurm").mkdir(parents=True)
    with pytest.raises(xffl.CheckpointError, match=rf"no checkpoint in {tmp_path}/cell_2"):
        consolidate_checkpoint(tmp_path, tmp_path / "none", cell=2)


class NotNumberTrainer(TaskTrainer):
    """Also measures what is no number."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().validation_step(batch, batch_idx), "nothing": float("nan")}


def stop(rank: int, world: int, url: str, ports: list[int], folder: str) -> Any:
    be_launched(0, 1, ports[rank])
    # Cell 1 would go on for long: as one that has come back, it has not seen what the other one has.
    stopping = EarlyStoppingCallback(patience=2 if rank == 0 else 1000, min_delta=10.0)
    rounds = Rounds()
    config = config_of(folder, rank, epochs=200, validate_every_steps=2)
    with xffl.session(cell=rank, cells=2, elastic=of_all(url, world)) as state:
        trainer = NotNumberTrainer(config, callbacks=[rounds, stopping])
        trainer.fit(state)
        return trainer.stop_reason, trainer.global_step, rounds.told


def test_cells_stop_together(lighthouse: str, tmp_path: Path) -> None:
    """By the mean of what they tell each other at their meetings; one that decides alone takes the others with it."""
    ports = [free_port(), free_port()]
    (reason, steps, told), (other_reason, other_steps, other_told) = run_world(
        2, stop, lighthouse, ports, str(tmp_path), init=False
    )
    assert reason.startswith("val/loss was not better than")
    assert other_reason == f"cell 0 has stopped: {reason}"
    assert steps < other_steps < 30
    both = dict(told)
    assert all(str(values) == str(both[number]) for number, values in other_told if number in both)
    for place in (0, 1):  # what was measured is told once, whatever it is
        numbers = [one["validation"] for _, values in told for one in values[place : place + 1] if "metrics" in one]
        assert numbers == sorted(set(numbers))
    validated = [values for _, values in told if len(values) == 2 and all("metrics" in one for one in values)]
    assert validated and all(one["ranks"] == 1 and one["metrics"]["val/loss"] > 0 for one in validated[0])


class SlowTrainer(TaskTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


class Begun(Callback):
    """Leaves a file behind after some rounds."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def post_round(self, trainer: Any, report: Any) -> None:
        if report.round == 6:
            self.file.touch()


def end_together(rank: int, world: int, url: str, ports: list[int], folder: str) -> Any:
    be_launched(0, 1, ports[rank])
    begun, deadline = Path(folder) / "begun", time.monotonic() + 120
    while rank == 2 and not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    config = config_of(folder, rank, epochs=200)
    config.federation = FederationConfig(every=2, max_samples=600)
    with xffl.session(cell=rank, cells=3, elastic=of_all(url, 2)) as state:  # neither of the first two begins alone
        trainer = SlowTrainer(config, callbacks=[Rounds(), Begun(begun), CheckpointCallback()])
        trainer.fit(state)
        scaling = trainer.find_rounds()
        assert scaling is not None
        return whole_weights(trainer.model), trainer.global_step, trainer.rounds, scaling.total_weight


def test_a_late_cell_ends_with_the_others(lighthouse: str, tmp_path: Path) -> None:
    """After as many samples of all cells as were asked for, of which those that began have trained on more."""
    ports = [free_port() for _ in range(3)]
    told = run_world(3, end_together, lighthouse, ports, str(tmp_path), init=False)
    weights, steps, rounds, total = told[0]
    assert [cell[1:] for cell in told[1:]] == [(steps, rounds, total), (told[2][1], rounds, total)]
    assert all(torch.equal(weights[name], cell[0][name]) for cell in told[1:] for name in weights)
    assert 600 <= total < 660  # a round of three cells
    assert 2 < told[2][1] <= steps - 10
    assert total == 10 * (2 * steps + told[2][1])
    records = [json.loads((tmp_path / f"cell_{cell}/checkpoints/final/checkpoint.json").read_text()) for cell in (0, 2)]
    assert records[0]["values"]["lineage"] == records[1]["values"]["lineage"]


TRAINER = """
import json, os, time
from dataclasses import dataclass
from tests.processes import await_cells
from tests.tasks import TaskConfig, TaskTrainer, digits
from torch.utils.data import Dataset

class Numbered(Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, at):
        images, labels = digits()
        return images[at], labels[at], at

class Trainer(TaskTrainer):
    config: TaskConfig
    def configure_dataloaders(self):
        await_cells(2)
        open(f"back_{self.world.lone_cell}_{os.environ['XFFL_RESTARTS']}", "w").close()
        return self.train_loader(Numbered()), None
    def training_step(self, batch, batch_idx):
        images, labels, numbers = batch
        cell, life = self.world.lone_cell, os.environ["XFFL_RESTARTS"]
        place = [self.global_step, self.current_epoch, sorted(numbers.tolist()), self.scheduler.last_epoch]
        with open(f"steps_{cell}_{life}.jsonl", "a") as file:
            file.write(json.dumps([cell, int(life), *place]) + "\\n")
        deadline = time.monotonic() + 150  # so that the other one is back before this one has finished
        while cell == 0 and self.global_step == 9 and not os.path.exists("back_1_1") and time.monotonic() < deadline:
            time.sleep(0.1)
        if cell == 0 and self.global_step > 8 and not os.path.exists("steps_1_1.jsonl"):
            time.sleep(1.5)
        return super().training_step((images, labels), batch_idx)
"""


@pytest.mark.parametrize(
    "callbacks",
    some_of(("", "callbacks: [{class_path: CheckpointCallback, init_args: {save_frequency: 1}}]\n"), ""),
    ids=["bare", "saved"],
)
def test_a_cell_that_comes_back_goes_on_in_its_data(tmp_path: Path, callbacks: str) -> None:
    """What it had given to rounds is not trained on again, and its schedule goes on, too.

    Steps that are lost are made again, with or without a checkpoint of them.
    """
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "run.yaml").write_text(
        "trainer: train.Trainer\n"
        "training: {epochs: 2, batch_size: 10, log_every: 1}\n"
        "federation: {every: 2}\n"
        "experiment: {name: digits}\n" + callbacks
    )
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", "1,1", "run.yaml"]
    environ = os.environ | {"XFFL_FAULT": "1:0:exchange:5", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lives = [
        [json.loads(line) for line in (tmp_path / f"steps_1_{life}.jsonl").read_text().splitlines()] for life in (0, 1)
    ]
    counted = 6  # rounds 2, 3 and 4
    assert [step[2] for step in lives[0]] == list(range(counted + 2))  # two more were lost with it
    assert lives[0][counted:] == [[1, 0, *step[2:]] for step in lives[1][:2]]
    every = [*lives[0][:counted], *lives[1]]
    assert [step[2] for step in every] == list(range(30))
    assert all(step[5] == step[3] for step in every)  # the schedule's epochs
    for epoch in range(2):
        seen = [number for step in every if step[3] == epoch for number in step[4]]
        assert len(seen) == len(set(seen)) == 150
    # Records: those of rounds that counted stay, and none is there twice.
    lines = (tmp_path / "runs/digits/cell_1/rounds/cell_0.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    assert [one["round"] for one in rounds[:3]] == [2, 3, 4]
    assert len({one["round"] for one in rounds}) == len(rounds)
    recorded = (tmp_path / "runs/digits/cell_1/metrics/cell_0.jsonl").read_text().splitlines()
    steps = [one["step"] for one in map(json.loads, recorded) if "train/loss" in one["values"]]
    assert steps == sorted(set(steps)) and {*range(1, counted + 1)} <= {*steps}


WAITING_TRAINER = """
import time
from tests.tasks import TaskTrainer
from xffl.training import EvalMetricMixin

class Trainer(TaskTrainer):
    configure_metrics = EvalMetricMixin.configure_metrics  # none: torchmetrics takes each job seconds to load

    def configure_dataloaders(self):
        return super().configure_dataloaders()[0], None

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)
"""


def test_two_of_three_cells_that_leave_in_order_go_on_when_they_are_back(tmp_path: Path) -> None:
    """Though the lighthouse leaves with them, and one has gone on alone while the other was away.

    One comes back with another number of ranks, which nobody has to be told.
    """
    (tmp_path / "train.py").write_text(WAITING_TRAINER)
    (tmp_path / "run.yaml").write_text(
        "trainer: train.Trainer\n"
        "training: {epochs: 1000, batch_size: 10}\n"
        "distributed: {strategy: fsdp}\n"
        "federation: {every: 2}\n"
        "experiment: {name: digits}\n"
    )
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XFFL_TOKEN": "0" * 64}
    environ["XFFL_JOURNAL"] = str(tmp_path / "journal")
    command = [sys.executable, "-m", "xffl", "exec", f"--elastic=file:{tmp_path}/lighthouse"]

    def start(cell: int, ranks: int = 1) -> subprocess.Popen[bytes]:
        with (tmp_path / f"log_{cell}").open("ab") as log:
            return subprocess.Popen(
                [*command, f"--processes={ranks}", f"--cell={cell}/3", "run.yaml"],
                env=environ,
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )

    def logs() -> str:
        return "\n".join(log.read_text() for log in sorted(tmp_path.glob("log_*")))

    def await_true(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not what():
            assert time.monotonic() < deadline, logs()
            time.sleep(0.2)

    def rounds(cell: int = 0) -> list[int]:
        file = tmp_path / f"runs/digits/cell_{cell}/rounds/cell_0.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line)["round"] for line in text[: text.rfind("\n") + 1].splitlines()]

    def await_rounds(cell: int = 0) -> None:
        before = max(rounds(cell), default=0)
        await_true(lambda: max(rounds(cell), default=0) >= before + 3)

    def leave(job: subprocess.Popen[bytes]) -> None:
        job.send_signal(signal.SIGUSR2)
        assert job.wait(200) == 75

    jobs = [start(0)]
    try:
        await_true((tmp_path / "lighthouse").exists)
        jobs.append(start(1))
        await_rounds()
        leave(jobs[0])
        jobs[0] = start(0, ranks=2)
        await_rounds()
        assert logs().count("this cell comes back with 2 ranks") == 1
        leave(jobs[0])
        await_rounds(1)
        leave(jobs[1])
        jobs[:] = start(0, ranks=2), start(1)
        await_rounds()
        for job in jobs:
            leave(job)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert len({*rounds()}) == len(rounds())
    assert logs().count("this cell comes back with") == 1
