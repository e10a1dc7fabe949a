"""Callbacks that need no other rank: arguments, decisions, clocks, tables, and what is shown."""

from __future__ import annotations

import inspect
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from torch import nn

from xffl.aggregation.report import ElasticRoundReport
from xffl.errors import CheckpointError, ConfigError, StateError
from xffl.topology import Topology
from xffl.training import BaseTrainer, EvalMetricMixin, FederatedMixin, QuantizeMixin, SetupMixin
from xffl.training import callbacks as shipped
from xffl.training.callbacks import (
    Callback,
    CallbackCollection,
    CheckpointCallback,
    DriftCallback,
    EarlyStoppingCallback,
    EMACallback,
    GradientNormCallback,
    MemoryCallback,
    ProfilerCallback,
    ProgressCallback,
    ThroughputCallback,
    UpdateNormCallback,
)
from xffl.training.callbacks.base import STAGES
from xffl.training.callbacks.monitors import TrainingClock
from xffl.training.callbacks.progress import ending_line
from xffl.training.config.settings import to_plain
from xffl.training.mixins.base import TrainerMixin

SHIPPED = sorted(set(shipped.__all__) - {"Callback", "CallbackCollection"})


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stand_in(*, cells: int = 1, every: int | None = None, **more: Any) -> Any:
    """What callbacks read of a trainer of one process, as rank 0 of its cells of one rank."""
    federation = SimpleNamespace(every=every, has_rounds=every is not None, is_alone=False, delay=None, aggregator={})
    trainer = SimpleNamespace(
        config=SimpleNamespace(
            experiment=SimpleNamespace(name="demo", output_dir="unused"),
            training=SimpleNamespace(epochs=2, max_steps=None, gradient_accumulation=2, log_every=10),
            federation=federation,
        ),
        state=SimpleNamespace(topology=Topology(cells, 1 if cells > 1 else None), elastic=None),
        strategy=SimpleNamespace(name="single"),
        last_step=None,
        lone_cell=lambda: None,
        find_rounds=lambda: None,
        device=torch.device("cpu"),
        global_step=0,
        current_epoch=0,
        samples=0,
        rounds=0,
        steps_since_round=0,
        stop_reason=None,
        train_dataloader=range(100),
        val_dataloader=range(4),
        logged=[],
        reasons=[],
        callbacks=[],
        named_models=dict,
        named_optimizers=dict,
    )
    trainer.world = SimpleNamespace(
        rank=0,
        lone_cell=None,
        dp_size=1,
        is_global_zero=True,
        pp_enabled=False,
        all_gather=lambda tensor, mesh: tensor[None],
        all_reduce=lambda tensor, op, mesh: tensor,
    )
    trainer.log_metrics = trainer.logged.append
    trainer.stop = trainer.reasons.append
    for name, value in more.items():
        setattr(trainer, name, value)
    return trainer


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_callbacks_are_made_of_yaml(name: str, tmp_path: Path) -> None:
    """Each is a class with keyword-only arguments of plain types, which a configuration writes out and reads again."""
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    arguments = {"metric": "val/accuracy", "mode": "max"} if name == "EarlyStoppingCallback" else {}
    text = yaml.safe_dump([{"class_path": f"xffl.training.callbacks.{name}", "init_args": arguments}])
    parsed = parser.parse_args([f"--callbacks={text}"])
    again = parser.parse_string(parser.dump(parsed))
    (made,) = parser.instantiate(again).callbacks
    assert type(made) is getattr(shipped, name)
    assert isinstance(made.state_dict(), dict)
    if arguments:
        assert (made.monitored.name, made.monitored.mode) == ("val/accuracy", "max")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_resolved_configuration_tells_what_callbacks_were_made_with(name: str) -> None:
    kind = getattr(shipped, name)
    told: Any = to_plain(kind())
    assert told.get("init_args", {}) == {
        key: parameter.default for key, parameter in inspect.signature(kind).parameters.items()
    }
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in inspect.signature(kind).parameters.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: CheckpointCallback(save_frequency=0),
        lambda: CheckpointCallback(every_rounds=-1),
        lambda: CheckpointCallback(keep_last_n=0),
        lambda: CheckpointCallback(best="val/loss", mode="least"),
        lambda: EarlyStoppingCallback(patience=0),
        lambda: EarlyStoppingCallback(mode="least"),
        lambda: EarlyStoppingCallback(over="world"),
        lambda: EarlyStoppingCallback(min_delta=-1.0),
        lambda: EarlyStoppingCallback(min_delta=math.nan),
        lambda: EMACallback(decay=1.0),
        lambda: EMACallback(decay=math.nan),
        lambda: EMACallback(every=0),
        lambda: EMACallback(start=-1),
        lambda: GradientNormCallback(every=True),
        lambda: GradientNormCallback(depth=-1),
        lambda: UpdateNormCallback(every=0),
        lambda: MemoryCallback(every=0),
        lambda: ThroughputCallback(window=0),
        lambda: ProfilerCallback(active=0),
        lambda: ProgressCallback(every_s=0.0),
        lambda: ProgressCallback(every_s=math.inf),
    ],
)
def test_wrong_arguments(make: Callable[[], Callback]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_what_is_asked_of_rounds_needs_rounds() -> None:
    with pytest.raises(ConfigError, match=r"federation\.every"):
        CheckpointCallback(every_rounds=1).pre_fit(stand_in())
    for callback in (CheckpointCallback(save_frequency=10), CheckpointCallback(best="x"), EarlyStoppingCallback()):
        trainer = stand_in(cells=2, callbacks=[callback])
        with pytest.raises(ConfigError, match=r"federation\.every"):
            callback.pre_fit(trainer)
        trainer = stand_in(cells=2, every=3, callbacks=[callback])
        callback.pre_fit(trainer)
    with pytest.raises(ConfigError, match="no rounds|are none"):
        DriftCallback().post_setup(stand_in(cells=2))
    delayed = stand_in(cells=2, every=3)
    delayed.config.federation.delay = 1
    with pytest.raises(ConfigError, match="delay 1"):
        DriftCallback().post_setup(delayed)


@pytest.mark.parametrize("make", [EMACallback, GradientNormCallback, UpdateNormCallback, DriftCallback])
def test_deepspeed_is_refused(make: Callable[[], Callback]) -> None:
    trainer = stand_in(cells=2, every=3, strategy=SimpleNamespace(name="deepspeed"))
    with pytest.raises(ConfigError, match="DeepSpeed"):
        make().post_setup(trainer)


def test_averages_of_a_pipeline_are_refused() -> None:
    trainer = stand_in()
    trainer.world.pp_enabled = True
    with pytest.raises(ConfigError, match="pp=1"):
        EMACallback().post_setup(trainer)


def test_checkpoints_come_after_what_they_keep() -> None:
    save = CheckpointCallback(save_frequency=1)
    save.pre_fit(stand_in(callbacks=[EMACallback(), save, MemoryCallback()]))
    with pytest.raises(ConfigError, match="EMACallback comes after"):
        save.pre_fit(stand_in(callbacks=[save, EMACallback()]))


# Decisions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "stops_after"),
    [
        ([3.0, 2.0, 1.0, 0.5, 0.4], {"patience": 2}, None),
        ([3.0, 2.0, 2.0, 2.0], {"patience": 2}, 4),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.1], {"patience": 2}, 6),
        ([3.0, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([3.0, 2.9, 2.8, 2.4], {"patience": 3, "min_delta": 0.5}, None),  # against the best, not the last one
        ([0.1, 0.2, 0.2, 0.1], {"patience": 2, "mode": "max"}, 4),
        ([1.0, math.nan], {}, 2),
        ([-math.inf], {}, 1),
        ([1.0, math.nan, math.nan, 0.5], {"stops_at_nonfinite": False, "patience": 3}, None),
        ([math.nan, math.nan], {"stops_at_nonfinite": False, "patience": 2}, 2),
        ([math.nan, 5.0, 6.0], {"stops_at_nonfinite": False, "patience": 2}, None),
    ],
)
def test_early_stopping(values: list[float], options: dict[str, Any], stops_after: int | None) -> None:
    callback = EarlyStoppingCallback(metric="val/x", **options)
    trainer = stand_in()
    for number, value in enumerate(values, 1):
        callback.post_validation(trainer, {"val/x": value, "other": 0.0})
        assert bool(trainer.reasons) == (stops_after == number), number
        resumed = EarlyStoppingCallback(metric="val/x", **options)  # nothing is lost in between
        resumed.load_state_dict(json.loads(json.dumps(callback.state_dict())))
        callback = resumed
    if stops_after is not None:
        assert "val/x" in trainer.reasons[0]
        fresh = stand_in()
        callback.pre_train(fresh)
        assert fresh.reasons == trainer.reasons  # a run that had stopped does not go on when it is resumed


def test_a_run_that_had_stopped_goes_on_where_it_is_asked_for_something_else(caplog: pytest.LogCaptureFixture) -> None:
    stopped, trainer = EarlyStoppingCallback(metric="val/x", patience=1), stand_in()
    for value in (0.5, 0.6):
        stopped.post_validation(trainer, {"val/x": value})
    state = json.loads(json.dumps(stopped.state_dict()))
    assert trainer.reasons and not caplog.records
    for options, best, waited in (
        ({"metric": "val/x", "patience": 3}, 0.5, 1),
        ({"metric": "val/x", "patience": 1, "min_delta": 0.1}, 0.5, 1),
        ({"metric": "val/x", "patience": 1, "mode": "max"}, None, 0),
        ({"metric": "val/y", "patience": 1}, None, 0),
    ):
        again, trainer = EarlyStoppingCallback(**options), stand_in()  # type: ignore[arg-type]
        again.load_state_dict(state)
        again.pre_train(trainer)
        assert not trainer.reasons and (again.monitored.best, again.waited) == (best, waited)
    assert len(caplog.records) == 2 and "best value of val/x (min); that of val/y (min) is determined" in caplog.text
    older = {name: value for name, value in state.items() if name != "asked"}
    del older["metric"]["of"]
    again = EarlyStoppingCallback(metric="val/x", patience=1)
    again.load_state_dict(older)
    again.pre_train(trainer)
    assert trainer.reasons  # a state of before, which does not say


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no metric 'val/loss', but val/accuracy"):
        EarlyStoppingCallback().post_validation(stand_in(), {"val/accuracy": 1.0})


def test_cells_decide_at_rounds() -> None:
    callback = EarlyStoppingCallback(patience=1)
    trainer = stand_in(cells=2, every=1)
    report: Any = SimpleNamespace(is_last=False)
    theirs = iter([(1.0, 1.0), (0.0, 0.0), (9.0, 1.0)])  # sums and counts of the other cell
    trainer.world.all_reduce = lambda tensor, op, mesh: tensor + torch.tensor(next(theirs), dtype=torch.float64)
    callback.post_validation(trainer, {"val/loss": 3.0})
    assert callback.monitored.best is None
    callback.post_round(trainer, report)
    assert callback.monitored.best == 2.0 and not trainer.reasons
    callback.post_round(trainer, report)  # no cell has validated since
    assert callback.waited == 0
    callback.post_validation(trainer, {"val/loss": 1.0})
    callback.post_round(trainer, report)
    assert len(trainer.reasons) == 1
    alone = EarlyStoppingCallback(patience=1, over="cell")
    for value in (3.0, 4.0):
        alone.post_validation(trainer, {"val/loss": value})
    assert len(trainer.reasons) == 2


# Time -----------------------------------------------------------------------------------------------------------------


class TimedThroughput(ThroughputCallback):
    clock = Clock()

    def make_clock(self) -> TrainingClock:
        return TrainingClock(self.clock)


def test_throughput_counts_training_only() -> None:
    callback = TimedThroughput(window=4, skip=2)
    trainer = stand_in()
    trainer.world.dp_size = 3
    # Two ranks share their data: six ranks, of which each has seen the same here.
    trainer.world.all_gather = lambda tensor, mesh: torch.stack([tensor * part for part in (1, 1, 1, 1, 1, 1)])
    clock = callback.clock
    callback.pre_train(trainer)
    for step in range(10):
        for micro in range(2):
            callback.pre_train_batch(trainer, {"input_ids": torch.zeros(5, 7)}, micro)
            clock.now += 60.0 if step < 2 else 0.25
        trainer.samples += 30
        trainer.global_step += 1
        if step == 3:
            callback.pre_val_epoch(trainer)
            clock.now += 1000.0
            callback.pre_save_checkpoint(trainer, "best")  # inside the validation
            clock.now += 1000.0
            callback.post_save_checkpoint(trainer, "best")
            callback.post_validation(trainer, {})
        callback.post_optimizer_step(trainer)
    # A step takes 0.5 s: 2 steps, 60 samples and, on 3 ranks with data of their own, 2 * 2 * 35 * 3 tokens a second.
    expected = {
        "throughput/samples_per_s": 60.0,
        "throughput/steps_per_s": 2.0,
        "throughput/tokens_per_s": 420.0,
    }
    assert trainer.logged == [pytest.approx(expected)] * 2


def test_throughput_without_tokens() -> None:
    callback = TimedThroughput(window=1, skip=0)
    trainer = stand_in()
    callback.pre_train(trainer)
    callback.pre_train_batch(trainer, torch.zeros(2, 2), 0)
    callback.pre_train_batch(trainer, {"labels": torch.zeros(2, 2)}, 0)
    callback.clock.now += 2.0
    trainer.samples = 8
    callback.post_optimizer_step(trainer)
    assert trainer.logged == [{"throughput/samples_per_s": 4.0, "throughput/steps_per_s": 0.5}]


def test_memory_grows_with_what_is_held() -> None:
    trainer = stand_in()
    callback = MemoryCallback(every=1)
    callback.post_optimizer_step(trainer)
    held = torch.ones(2**24)  # 64 MiB
    callback.post_optimizer_step(trainer)
    before, after = (found["memory/resident_bytes"] for found in trainer.logged)
    assert after - before > 0.8 * held.numel() * 4
    assert "memory/device_bytes" not in trainer.logged[0]


# Pictures of a run ----------------------------------------------------------------------------------------------------


def test_the_profiler_writes_the_batches_that_were_asked_for(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=1, warmup=1, active=2, repeat=2, with_shapes=True)
    trainer = stand_in()
    trainer.config.experiment.output_dir = str(tmp_path)
    callback.pre_train(trainer)
    for number in range(12):
        torch.zeros(number + 1).cumsum(0)
        callback.post_train_batch(trainer, None, None, number)
    callback.post_train(trainer)
    found = {}
    for path in sorted((tmp_path / "traces").iterdir()):
        events = json.loads(path.read_text())["traceEvents"]
        sums = [event for event in events if event.get("name") == "aten::cumsum"]
        found[path.name] = [event["args"]["Input Dims"][0] for event in sums]
    assert found == {"rank_0.json": [[3], [4]], "rank_0_2.json": [[7], [8]]}


def test_the_profiler_keeps_what_there_is_when_a_run_fails(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=0, warmup=1, active=50)
    trainer = stand_in()
    trainer.config.experiment.output_dir = str(tmp_path)
    callback.pre_train(trainer)
    for number in range(2):
        callback.post_train_batch(trainer, None, None, number)
        torch.zeros(3).cumsum(0)
    callback.exception(trainer, ValueError())
    callback.post_train(trainer)
    assert "cumsum" in (tmp_path / "traces" / "rank_0.json").read_text()


# Progress -------------------------------------------------------------------------------------------------------------


class ShownProgress(ProgressCallback):
    def __init__(self, *, is_terminal: bool, **arguments: Any) -> None:
        self.clock = Clock()
        self.file = io.StringIO()
        self.is_terminal = is_terminal
        super().__init__(**arguments)

    def make_console(self) -> Console:
        return Console(file=self.file, force_terminal=self.is_terminal, width=150, legacy_windows=False, _environ={})

    def make_clock(self) -> Callable[[], float]:
        return self.clock


def run_steps(callback: ShownProgress, trainer: Any, steps: int, *, seconds: float, loss: float = 0.25) -> None:
    """Make optimizer steps of two micro-batches each."""
    for _ in range(steps):
        for micro in range(2):
            callback.clock.now += seconds / 2
            trainer.samples += 8
            output = {"loss": torch.tensor(loss, requires_grad=True)}
            callback.post_train_batch(trainer, output, {"input_ids": torch.zeros(2, 8)}, micro)
        trainer.global_step += 1
        trainer.steps_since_round += 1


def test_progress_on_a_pipe_is_a_line_now_and_then() -> None:
    callback = ShownProgress(is_terminal=False, every_s=5.0)
    trainer = stand_in()
    callback.pre_train(trainer)
    assert not callback.file.getvalue()
    run_steps(callback, trainer, 40, seconds=0.5)
    lines = callback.file.getvalue().splitlines()
    assert len(lines) == 4 and all("\x1b" not in line for line in lines)  # 20 s
    # 100 steps of 0.5 s are 2 * 50 batches of two epochs; 32 samples and 64 tokens a second.
    assert lines[3] == "demo  epoch 1/2  step 39/100  loss 0.25  64 tokens/s  0:00:31 left"
    callback.post_fit(trainer)
    assert callback.file.getvalue().splitlines()[4].startswith("demo  epoch 1/2  step 40/100  finished  loss 0.25")
    callback.post_fit(trainer)
    callback.exception(trainer, ValueError())
    assert len(callback.file.getvalue().splitlines()) == 5


def test_progress_shows_validations_checkpoints_and_rounds() -> None:
    callback = ShownProgress(is_terminal=False, every_s=1.0, tokens=None)
    trainer = stand_in(cells=2, every=30)
    callback.pre_train(trainer)
    run_steps(callback, trainer, 3, seconds=1.0)
    callback.pre_val_epoch(trainer)
    for batch in range(4):
        callback.clock.now += 50.0
        callback.post_val_batch(trainer, None, None, batch)
    callback.post_validation(trainer, {})
    callback.clock.now += 1.0
    callback.pre_save_checkpoint(trainer, "path")
    callback.post_save_checkpoint(trainer, "path")
    report: Any = SimpleNamespace(bytes_across=2_500_000)
    trainer.rounds, trainer.steps_since_round = 1, 0
    callback.clock.now += 1.0
    callback.post_round(trainer, report)
    run_steps(callback, trainer, 1, seconds=1.0)
    callback.post_train(trainer)
    lines = callback.file.getvalue().splitlines()
    assert all(line.startswith("cell 0  epoch 1/2  step ") for line in lines)
    assert [line.split("  ")[3] for line in lines[3:8]] == [
        *(f"validation {number} of 4" for number in (1, 2, 3, 4)),
        "saving",
    ]
    assert "16 samples/s" in lines[6]  # not slower for the validation
    assert "round 1, next in 30 steps  sent 2.5 MB" in lines[8]
    callback.post_fit(trainer)
    assert "finished" in callback.file.getvalue().splitlines()[-1]


def test_progress_of_an_elastic_cell_names_it_and_who_took_part() -> None:
    callback = ShownProgress(is_terminal=False, every_s=1.0, tokens=None)
    trainer = stand_in(every=30)
    trainer.world.lone_cell = 2
    callback.pre_train(trainer)
    callback.clock.now += 1.0
    callback.post_round(trainer, ElasticRoundReport(1, (3.0, 0.0, 0.0, 2.0), 0, 0, 0.5, cells=(0, 2, 3)))
    callback.post_fit(trainer)
    _, line = callback.file.getvalue().splitlines()
    assert line.startswith("demo cell 2  epoch 1/2  step 0/100  finished  ")
    assert "cells 4 known, 3 alive, 2 averaged" in line


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {
                "cells": 2,
                "validations": [{"val/loss": 2.11, "val/accuracy": 0.5}],
                "rounds": 12,
                "bytes_sent": 1_300_000,
            },
            "2 cells  val/loss 2.11  val/accuracy 0.5  12 rounds  sent 1.3 MB between cells  took",
        ),
        (
            {"cells": 3, "validations": [{"val/loss": 2.5}, {"val/loss": 2.0}, {"val/loss": 2.25}], "rounds": 1},
            "3 cells  val/loss 2 to 2.5  1 round  sent 0 bytes between cells  took",
        ),
        ({"validations": [{f"val/{number}": 1.0 for number in range(7)}]}, "val/3 1  3 more values  took"),
        ({"validations": [{"val/two\nlines": 1.0}]}, "demo  finished  val/two lines 1  took"),
        ({"validations": [{"val/loss": math.nan}], "rounds": 0}, "demo  finished  val/loss nan  0 rounds  took"),
        (
            {"seconds": 3671.2, "folder": "runs/a b"},
            "demo  finished  took 1:01:11  records in 'runs/a b'; xffl report 'runs",
        ),
    ],
)
def test_the_last_line_is_the_federations(given: dict[str, Any], told: str) -> None:
    common = {"name": "demo", "how": "finished", "cells": 1, "validations": [], "rounds": None, "bytes_sent": 0}
    line = ending_line(**{**common, "seconds": 1.0, "folder": "runs/demo", **given})
    assert told in line
    callback = ShownProgress(is_terminal=True)
    callback.show_ending(line)
    assert callback.file.getvalue() == f"{line}\n"  # in one piece, whatever the terminal's width


def test_progress_on_a_terminal_is_live_and_gives_the_terminal_back() -> None:
    callback = ShownProgress(is_terminal=True)
    trainer = stand_in()
    callback.pre_train(trainer)
    began = callback.file.getvalue()
    assert "\x1b[?25l" in began and "demo" in began  # the cursor is hidden
    run_steps(callback, trainer, 40, seconds=0.05)  # two seconds
    drawn = callback.file.getvalue().removeprefix(began).count("demo")
    assert 3 <= drawn <= 4  # at most twice a second
    assert "\x1b[?25h" not in callback.file.getvalue()
    callback.exception(trainer, RuntimeError("planted"))
    told = callback.file.getvalue()
    assert told.endswith("\x1b[?25h") and "failed: RuntimeError" in told
    assert callback._run is None


def test_progress_tells_why_a_run_stopped_early() -> None:
    callback = ShownProgress(is_terminal=False, every_s=5.0)
    trainer = stand_in(stop_reason="val/loss was not better than 1 3 times")
    callback.pre_train(trainer)
    callback.post_train(trainer)
    callback.post_fit(trainer)
    assert "finished, as val/loss was not better than 1 3 times" in callback.file.getvalue()


def test_progress_reads_the_loss_only_to_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: reads.append(1) or 1.5)
    callback = ShownProgress(is_terminal=False, every_s=5.0)
    trainer = stand_in()
    callback.pre_train(trainer)
    run_steps(callback, trainer, 100, seconds=0.125)
    assert len(reads) == len(callback.file.getvalue().splitlines()) == 2


def test_progress_is_shown_by_the_first_rank_of_each_cell() -> None:
    shown = {}
    for rank in range(5):
        callback = ShownProgress(is_terminal=True, every_s=1.0)
        trainer = stand_in(state=SimpleNamespace(topology=Topology(5, (3, 2))))
        trainer.world.rank = rank
        callback.pre_train(trainer)
        run_steps(callback, trainer, 4, seconds=1.0)
        shown[rank] = callback.file.getvalue()
        callback.post_fit(trainer)
    assert [rank for rank, text in shown.items() if text] == [0, 3]
    assert "\x1b[?25l" in shown[0]  # only rank 0 draws on a terminal that several share
    assert "\x1b[?25l" not in shown[3] and shown[3].startswith("cell 1  ")


def test_progress_of_outputs_without_a_loss_and_loaders_without_a_length() -> None:
    callback = ShownProgress(is_terminal=False, every_s=1.0)
    trainer = stand_in(train_dataloader=iter(()))
    callback.pre_train(trainer)
    for output in (None, {"accuracy": 1}, torch.zeros(3), "text"):
        callback.clock.now += 2.0
        callback.post_train_batch(trainer, output, None, 0)
    assert "loss" not in callback.file.getvalue() and "left" not in callback.file.getvalue()
    assert "step 0" in callback.file.getvalue()
    trainer.config.training.max_steps = 10
    callback.pre_train(trainer)
    run_steps(callback, trainer, 5, seconds=1.0)
    assert "step 4/10" in callback.file.getvalue()


def test_time_left_begins_anew_after_a_resume() -> None:
    callback = ShownProgress(is_terminal=False, every_s=1.0)
    trainer = stand_in(global_step=90, samples=10_000, current_epoch=1, train_dataloader=Standing(epoch=1, position=80))
    callback.pre_train(trainer)
    run_steps(callback, trainer, 5, seconds=1.0)
    # When it was written the fourth of ten steps was made, in 5 s.
    assert callback.file.getvalue().splitlines()[-1].endswith("0:00:08 left")


class Standing:
    """A loader of 100 batches that knows its place."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position

    def __len__(self) -> int:
        return 100


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ({"current_epoch": 0, "train_dataloader": Standing(0, 0)}, 100),
        ({"current_epoch": 1, "train_dataloader": Standing(1, 0)}, 50),
        ({"current_epoch": 1, "train_dataloader": Standing(1, 99)}, 1),
        ({"current_epoch": 0, "train_dataloader": Standing(1, 0)}, 50),  # the end of the epoch is owed
        ({"current_epoch": 2, "train_dataloader": Standing(2, 0)}, 0),
        ({"current_epoch": 1, "train_dataloader": range(100)}, 50),  # begins its epoch anew
    ],
)
def test_steps_that_were_made_in_another_layout_count_as_they_are(place: dict[str, Any], steps: int) -> None:
    callback = ShownProgress(is_terminal=False, every_s=0.1)
    trainer = stand_in(global_step=7, **place)
    callback.pre_train(trainer)
    callback.clock.now += 1.0
    callback.post_fit(trainer)
    assert f"step 7/{7 + steps}" in callback.file.getvalue()


# States ---------------------------------------------------------------------------------------------------------------


class Failing(Callback):
    """Fails when it is told of a failure."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        raise OSError("disk full")


def test_all_are_told_of_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    progress, trainer = ShownProgress(is_terminal=True), stand_in()
    progress.pre_train(trainer)
    CallbackCollection([Failing(), progress]).exception(trainer, KeyboardInterrupt())
    assert progress.file.getvalue().endswith("\x1b[?25h")  # the cursor is back
    assert "disk full" in caplog.text


def test_states_go_through_a_collection() -> None:
    made = CallbackCollection([EarlyStoppingCallback(), CheckpointCallback(best="val/loss", save_frequency=2)])
    saved = made.state_dict()
    saved["CheckpointCallback"]["saved"]["step"] = 8
    saved["CheckpointCallback"]["best"]["best"] = 0.5
    again = CallbackCollection([EarlyStoppingCallback(), CheckpointCallback(best="val/loss", save_frequency=2)])
    again.load_state_dict(json.loads(json.dumps(saved)))
    _, checkpoint = again
    assert isinstance(checkpoint, CheckpointCallback) and checkpoint.monitored is not None
    assert checkpoint.monitored.best == 0.5
    assert [step for step in range(8, 13) if checkpoint._is_due(step=step)] == [10, 11, 12]


def ema_of(model: nn.Module, **arguments: Any) -> EMACallback:
    callback = EMACallback(**arguments)
    callback.post_setup(stand_in(named_models=lambda: {"model": model}))
    return callback


def test_averages_of_another_model_are_refused() -> None:
    callback = ema_of(nn.Linear(2, 3))
    saved = callback.state_dict()
    with pytest.raises(StateError, match="set the trainer up"):
        EMACallback().load_state_dict(saved)
    with pytest.raises(CheckpointError, match="model.bias"):
        ema_of(nn.Linear(2, 3, bias=False)).load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"\(3, 2\), not \(3, 4\)"):
        ema_of(nn.Linear(4, 3)).load_state_dict(saved)
    callback.swap_in()
    with pytest.raises(StateError, match="swap_out"):
        callback.swap_in()


def test_averages_of_narrow_weights_are_wide() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    callback = ema_of(model, decay=0.9)
    trainer = stand_in()
    callback.pre_train(trainer)
    expected = model.weight.detach().float().clone()
    for _ in range(3):
        with torch.no_grad():
            model.weight += 1.0
        callback.post_optimizer_step(trainer)
        expected = 0.9 * expected + 0.1 * model.weight.detach().float()
    weights = model.weight.detach().clone()
    average = callback.averages["model.weight"]
    assert average.dtype == torch.float32 and torch.allclose(average, expected, rtol=1e-6, atol=1e-6)
    callback.pre_val_epoch(trainer)
    assert torch.equal(model.weight, average.to(torch.bfloat16))
    callback.exception(trainer, ValueError())
    assert torch.equal(model.weight, weights) and torch.equal(callback.averages["model.weight"], average)


# The pages -----------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.rst"
TRAINER_PAGE = PAGE.with_name("trainer.rst")


def test_the_page_has_every_stage_and_every_callback() -> None:
    text = PAGE.read_text()
    stages = re.findall(r"\* - ``(\w+)``\n +- ``(on_\w+)``", text)
    assert len(stages) == len(STAGES) and dict(stages) == STAGES
    told = text.count("\n.. code-block:: yaml\n")
    blocks = re.findall(r"code-block:: yaml\n\n((?:   .*\n|\n)+)", text)
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    made: list[Callback] = []
    for block in blocks:
        read = yaml.safe_load(block)
        listed = read["callbacks"] if isinstance(read, dict) else read
        made += parser.instantiate(parser.parse_object({"callbacks": listed})).callbacks
    assert len(blocks) == told > 5
    assert {type(one).__name__ for one in made} == set(SHIPPED)


def test_the_page_of_the_trainer_has_every_hook_and_who_has_it() -> None:
    rows = re.findall(r"\* - ``(\w+)(?:\(.*\))?``\n +- .*\n +- ((?:``\w+``,?\s+)+)", TRAINER_PAGE.read_text())
    shown = {name: set(re.findall(r"\w+", owners)) for name, owners in rows}
    hooks = [
        name
        for name, value in vars(TrainerMixin).items()
        if (inspect.isfunction(value) or isinstance(value, property)) and not name.startswith("_")
    ]
    parts = [*BaseTrainer.__mro__, *SetupMixin.__mro__, *FederatedMixin.__mro__, EvalMetricMixin, QuantizeMixin]
    owners = {name: {part.__name__ for part in parts if name in vars(part)} - {"TrainerMixin"} for name in hooks}
    assert shown == {name: owner for name, owner in owners.items() if owner}
    # These are what every mixin may use as it is.
    assert [name for name in hooks if not owners[name]] == ["world", "state", "device", "section", "train_context"]
