"""Runs that a signal asks to leave: all ranks stop after the same step, and going on is as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xffl
from tests.ranks.test_resume import Case, configure, curves
from tests.ranks.test_strategies import joined
from tests.rows import some_of
from tests.tasks import TaskTrainer, whole_weights
from tests.worlds import run_script, run_world
from xffl.checkpoint import find_latest_checkpoint
from xffl.errors import CheckpointError
from xffl.training import Callback, PreemptedExit, Preemption
from xffl.training import preemption as consensus

ROOT = Path(__file__).parents[2]
STEPS = 22
MOMENTS = ("pre_train_batch", "post_train_batch", "pre_optimizer_step", "post_optimizer_step")
OTHER_MOMENTS = ("pre_setup", "pre_val_batch", "pre_save_checkpoint", "post_train", "post_fit")

CASES: dict[str, Case] = {
    "single": {"ranks": 1, "strategy": "single"},
    "fsdp, accumulating, saving in the background": {
        "ranks": 2,
        "strategy": "fsdp",
        "accumulation": 3,
        "batch_size": 4,
        "is_async": True,
    },
    "hsdp, two unequal cells": {
        "ranks": 6,
        "strategy": "hsdp",
        "mesh": {"dp_shard": 2, "dp_replicate": "auto"},
        "federated": (4, 2),
        "federation": {"every": 9},
        "batch_size": 8,
    },
    "rounds that are always under way": {  # in cell 0, which makes fewer steps than a round takes
        "ranks": 3,
        "federated": (1, 2),
        "strategy": "fsdp",
        "federation": {"every": "per_cell:counts=[3, 5]", "delay": 4, "aggregator": {"overlap": True}},
        "saving": {"every_rounds": 1, "save_final": True},
    },
    "starts that are owed, without signals": {  # the last run is started with none to listen to
        "ranks": 2,
        "federated": (1, 1),
        "federation": {"every": "per_cell:counts=[2, 2]", "delay": 2, "aggregator": {"overlap": True}},
        "saving": {"save_final": False},
        "is_deaf": True,
    },
}


class Asker(Callback):
    """Send this process a signal at a moment of a step, each once."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.is_mine = plan, rank in plan["ranks"]

    def _at(self, moment: str, trainer: Any) -> None:
        step = trainer.global_step - (moment == "post_optimizer_step")
        if self.is_mine and moment == self.plan["moment"] and step == self.plan["step"]:
            self.is_mine = False
            waits_for = self.plan.get("waits_for")
            deadline = time.monotonic() + 60.0
            while waits_for is not None and not Path(waits_for).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            for name in self.plan.get("signals", ["SIGUSR2"]):
                os.kill(os.getpid(), getattr(signal, name))
            threading.Event().wait(self.plan.get("waits_s", 0.0))


for _moment in (*MOMENTS, *OTHER_MOMENTS):
    setattr(Asker, _moment, lambda self, trainer, *_, moment=_moment: self._at(moment, trainer))


class Witness(Callback):
    """Keep the weights of the end, and what was told of leaving."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.told: list[str] = []

    def post_fit(self, trainer: Any) -> None:
        self.weights.update(whole_weights(trainer.model))

    def preemption(self, trainer: Any, path: str | None) -> None:
        self.told.append(Path(path or "").name)

    def on_preemption(self, trainer: Any, path: str | None) -> None:
        self.told.append("again")

    def exception(self, trainer: Any, error: BaseException) -> None:
        self.told.append(repr(error))


def train(rank: int, world_size: int, case: Case, folder: str, plan: dict[str, Any] | None) -> dict[str, Any]:
    consensus.INTERVAL_S = 0.01  # steps are short here
    witness = Witness()
    askers = [] if plan is None else [Asker(plan, rank)]
    config = configure(case, Path(folder))
    config.training = replace(config.training, **case.get("training", {}))
    if case.get("is_deaf") and plan is None:
        config.experiment = replace(config.experiment, preempt_signals=[])
    trainer = TaskTrainer(config, callbacks=[*askers, witness])
    code, reason = 0, " "
    before = signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(joined(rank, world_size))
    except PreemptedExit as left:
        code, reason = int(left.code), left.reason
    assert reason.partition(" ")[0] in ["", *(plan or {}).get("signals", ["SIGUSR2"])], reason
    assert (signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1
    place = {"step": trainer.global_step, "since": trainer.steps_since_round, "rounds": trainer.rounds}
    saved = {
        "latest": find_latest_checkpoint(folder),
        "has_final": (Path(folder) / "checkpoints" / "final").exists(),
    }
    return {"code": code, "weights": witness.weights, "told": witness.told, **place, **saved}


def scenes(rank: int, world_size: int, folder: str, cases: dict[str, tuple[Case, dict[str, Any] | None]]) -> Any:
    """Train several times in one process, in a world of its own each."""
    found = {}
    for number, (name, (case, plan)) in enumerate(cases.items()):
        store = dist.FileStore(f"{folder}/store_{number}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        try:
            found[name] = train(rank, world_size, case, f"{folder}/{case.get('run', name)}", plan)
        except CheckpointError as error:
            found[name] = {"error": str(error)}
        if dist.is_initialized():  # the state was not the trainer's own
            dist.barrier()
            dist.destroy_process_group()
    return found


def compare(found: list[Any], expected: list[Any], told: str) -> None:
    assert {one["code"] for one in found} == {0}, told
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert theirs["weights"], "the run without a signal has come to its end"
        assert mine["weights"].keys() == theirs["weights"].keys()
        for key, tensor in theirs["weights"].items():
            assert torch.equal(mine["weights"][key], tensor), f"{key} of rank {rank} differs, {told}"


def check_left(found: list[Any], case: Case, folder: Path) -> None:
    """All ranks have left after the same step of their cell, with a checkpoint of it."""
    assert {one["code"] for one in found} == {75}
    sizes = case.get("federated", (len(found),))
    first = 0
    for size in sizes:
        assert len({(one["step"], one["rounds"]) for one in found[first : first + size]}) == 1
        first += size
    name = f"step_{max(one['step'] for one in found)}"
    assert all(one["told"] == [name, "again"] for one in found), [one["told"] for one in found]
    assert all(one["latest"] == folder / "checkpoints" / name and not one["has_final"] for one in found), found


@pytest.mark.parametrize("name", some_of(CASES, "hsdp, two unequal cells"))
def test_a_run_that_left_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ranks = case["ranks"]
    draw = random.Random(name)
    one, other = draw.randrange(1, 7), draw.randrange(12, 17)
    leaves = [(range(ranks), one), ([draw.randrange(ranks)], other)]
    plans = {
        f"asked at step {step}": {"ranks": list(asked), "step": step, "moment": draw.choice(MOMENTS)}
        for asked, step in (leaves if ranks < 3 else leaves[1:])
    }
    left: Case = {**case, "run": "left"}
    asking = {name: (left, plan) for name, plan in plans.items()}
    by_rank = run_world(
        ranks, scenes, str(tmp_path), {"whole": (case, None), **asking, "resumed": (left, None)}, init=False
    )
    found = {name: [one[name] for one in by_rank] for name in by_rank[0]}
    assert {one["step"] for one in found["whole"]} == {STEPS}
    for name in plans:
        check_left(found[name], case, tmp_path / "left")
    compare(found["resumed"], found["whole"], str(plans))
    assert curves(tmp_path / "left") == curves(tmp_path / "whole")


APART: Case = {"federated": (1, 1), "federation": {"every": 8}, "saving": {"save_final": False}}
ALONE: Case = {"strategy": "ddp", "saving": {"save_frequency": 4, "save_final": True}}
UNEQUAL: Case = {**APART, "federation": {"every": "per_cell:counts=[9, 3]"}}
EPOCHS: Case = {  # the last step is that of an epoch
    **ALONE,
    "batch_size": 25,
    "interval": "epoch",
    "training": {"epochs": 9, "max_steps": 6, "validate_every_steps": None, "validate_every_epochs": 1},
}
LAST = {"ranks": [0, 1], "step": 5, "moment": "pre_train_batch", "waits_s": 2.0}
SCENES: dict[str, tuple[Case, dict[str, Any] | None]] = {
    "nobody asks": (ALONE, None),
    "during setup": (ALONE, {"ranks": [1], "step": 0, "moment": "pre_setup", "waits_s": 1.0}),
    "and again": ({**ALONE, "run": "during setup"}, None),
    "during a validation": (ALONE, {"ranks": [0], "step": 5, "moment": "pre_val_batch"}),
    "during a checkpoint, twice": (
        ALONE,
        {"ranks": [1], "step": 8, "moment": "pre_save_checkpoint", "signals": ["SIGUSR2", "SIGTERM", "SIGUSR2"]},
    ),
    "a terminate": (ALONE, {"ranks": [0, 1], "step": 2, "moment": "pre_optimizer_step", "signals": ["SIGTERM"]}),
    "at the last step": (ALONE, {"ranks": [1], "step": STEPS - 1, "moment": "pre_optimizer_step"}),
    "after the end": (ALONE, {"ranks": [0, 1], "step": STEPS, "moment": "post_fit"}),
    "between two rounds": (APART, {"ranks": [0, 1], "step": 10, "moment": "pre_train_batch", "waits_s": 1.0}),
    "in one cell": ({**ALONE, "run": "between two rounds"}, None),
    "one cell has finished": (UNEQUAL, {"ranks": [0], "step": STEPS, "moment": "post_train"}),
    "the others of it": ({**UNEQUAL, "run": "one cell has finished"}, None),
    "unequal cells": (UNEQUAL, None),
    "after a validation": ({**ALONE, "run": "during a validation"}, None),
    "after a terminate": ({**ALONE, "run": "a terminate"}, None),
    "at the end of an epoch": (EPOCHS, LAST),
    "whose end follows": ({**EPOCHS, "run": "at the end of an epoch"}, None),
    "epochs": (EPOCHS, None),
}


def test_signals_at_all_times(tmp_path: Path) -> None:
    by_rank = run_world(2, scenes, str(tmp_path), SCENES, init=False)
    found = {name: [one[name] for one in by_rank] for name in SCENES}
    assert [(one["code"], one["step"]) for one in found["nobody asks"]] == [(0, STEPS)] * 2
    setup = found["during setup"]
    assert [(one["code"], one["step"], one["told"]) for one in setup] == [(75, 0, ["", "again"])] * 2
    assert find_latest_checkpoint(tmp_path / "during setup") is not None, "the run that went on has saved"
    compare(found["and again"], found["nobody asks"], "after a start that was cut short")
    for name in ("during a validation", "during a checkpoint, twice", "a terminate"):
        check_left(found[name], ALONE, tmp_path / name)
    for name in ("at the last step", "after the end"):
        codes = {(one["code"], one["step"]) for one in found[name]}
        assert len(codes) == 1 and codes <= {(0, STEPS), (75, STEPS)}, codes
    assert {one["code"] for one in found["after the end"]} == {0}
    apart = found["between two rounds"]
    check_left(apart, APART, tmp_path / "between two rounds")
    # A cell that was slow may stop right behind the round.
    assert any(one["since"] > 0 for one in apart) and all(one["rounds"] == 1 for one in apart), apart
    assert all("each cell holds other weights" in one["error"] for one in found["in one cell"])
    check_left(found["one cell has finished"], UNEQUAL, tmp_path / "one cell has finished")
    compare(found["the others of it"], found["unequal cells"], "where one cell had finished")
    for name in ("after a validation", "after a terminate"):
        compare(found[name], found["nobody asks"], name)
    check_left(found["at the end of an epoch"], EPOCHS, tmp_path / "at the end of an epoch")
    compare(found["whose end follows"], found["epochs"], "at the end of an epoch")
    assert curves(tmp_path / "at the end of an epoch") == curves(tmp_path / "epochs")


def alone_at_the_end(rank: int, world_size: int, folder: str, plan: dict[str, Any] | None) -> dict[str, Any]:
    """Cells without rounds, of which one has no more to do: the other one's signal finds it waiting."""
    consensus.INTERVAL_S = 0.01
    case: Case = {"federated": (1, 1), "saving": {"save_final": True}}
    config = configure(case, Path(folder))
    stopper = [Stopper(Path(folder) / "has_ended")] if rank == 1 else []
    trainer = TaskTrainer(config, callbacks=[*([] if plan is None else [Asker(plan, rank)]), *stopper, Witness()])
    try:
        trainer.fit(joined(rank, world_size))
    except PreemptedExit as left:
        return {"code": left.code, "step": trainer.global_step, "rounds": 0}
    return {"code": 0, "step": trainer.global_step, "rounds": 0}


class Stopper(Callback):
    """End this cell early, and leave a file where it has."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def pre_train(self, trainer: Any) -> None:
        if trainer.global_step >= 4:
            trainer.stop("done")

    def post_optimizer_step(self, trainer: Any) -> None:
        if trainer.global_step >= 4:
            trainer.stop("done")
            self.told.touch()


def test_a_cell_without_rounds_waits_for_the_others(tmp_path: Path) -> None:
    ended = str(tmp_path / "has_ended")
    plan = {"ranks": [0], "step": 15, "moment": "pre_train_batch", "waits_for": ended}
    found = run_world(2, alone_at_the_end, str(tmp_path), plan)
    assert [one["code"] for one in found] == [75, 75]
    assert found[0]["step"] >= 15 and found[1]["step"] == 4
    assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / f"step_{found[0]['step']}"
    found = run_world(2, alone_at_the_end, str(tmp_path), None)
    assert [(one["code"], one["step"]) for one in found] == [(0, STEPS), (0, 4)]


class Breaker(Callback):
    """Fail on rank 1, and be asked to end on rank 0, as a launcher does that cleans up."""

    def __init__(self, rank: int, how: str, folder: str) -> None:
        self.rank, self.how, self.gone = rank, how, Path(folder) / "gone"

    def exception(self, trainer: Any, error: BaseException) -> None:
        self.gone.touch()

    def pre_train_batch(self, trainer: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and self.rank == 1:
            if self.how == "kill":
                self.gone.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")
        if trainer.global_step == 12 and self.rank == 0:
            never = threading.Event()  # nobody sets it: a main thread that runs no handler
            while not self.gone.exists():
                never.wait(0.01)
            never.wait(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            never.wait(30.0)
            raise AssertionError("still there")


def broken(rank: int, world_size: int, folder: str, how: str) -> None:
    consensus.INTERVAL_S, consensus.TERM_PATIENCE_S = 0.01, 0.5
    config = configure({"federated": (1, 1), "saving": {"save_final": False}}, Path(folder))
    TaskTrainer(config, callbacks=[Breaker(rank, how, folder)]).fit(joined(rank, world_size))


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_where_a_rank_has_failed_a_signal_ends_the_others(how: str, tmp_path: Path) -> None:
    found = run_world(2, broken, str(tmp_path), how, mortal=range(2))
    assert "died with exit code -15" in found[0]
    assert "planted" in found[1] if how == "raise" else "exit code -9" in found[1]


def own_loop(rank: int, world_size: int, folder: str, asks: int) -> Any:
    """A loop of one's own with rounds; cell 1 has half of the batches."""
    consensus.INTERVAL_S = 0.01
    state = joined(rank, world_size)
    state.set_federated_scaling(federated_group_size=(1, 1))
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    steps = 40 - 20 * rank
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(steps, 8, 4, generator=generator)
    done = 0
    rounds = xffl.FederatedScaling(model, optimizer, state, every=12)

    def save() -> None:
        xffl.checkpoint.save_checkpoint(folder, parts, state, own={"rounds": rounds, "done": Done})

    class Done:
        @staticmethod
        def state_dict() -> dict[str, int]:
            return {"step": done}

        @staticmethod
        def load_state_dict(found: dict[str, int]) -> None:
            nonlocal done
            done = found["step"]

    def run() -> None:
        nonlocal done
        with Preemption(state, ["USR2"]) as preemption, rounds:
            if Path(folder).exists():
                xffl.checkpoint.load_checkpoint(folder, parts, state, own={"rounds": rounds, "done": Done})
            preemption.follow(rounds, save)
            for batch in data[done:]:
                if done == asks and rank == 0:
                    os.kill(os.getpid(), signal.SIGUSR2)
                if done > asks >= 0:
                    threading.Event().wait(0.02)  # else all may be over before the ranks have heard
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if preemption.is_due(done):
                    save()
                    preemption.leave()

    try:
        run()
    except PreemptedExit as left:
        return left.code, done, rounds.meetings
    return 0, done, [one.detach().clone() for one in model.parameters()]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    whole = run_world(2, own_loop, str(tmp_path / "none"), -1)
    for asks in (3, 17, 33):
        left = run_world(2, own_loop, str(tmp_path / f"save {asks}"), asks)
        assert [code for code, _, _ in left] == [75, 75], left
        resumed = run_world(2, own_loop, str(tmp_path / f"save {asks}"), -1)
        for (code, _, mine), (_, _, theirs) in zip(resumed, whole, strict=True):
            assert code == 0
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True)), left


TASK = """
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from xffl.training import preemption as consensus

consensus.INTERVAL_S = 0.01


def make_model():
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches_from(step):
    steps = 450 - 200 * dist.get_rank()
    data = torch.randn(steps, 8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    print(f"rank {dist.get_rank()} goes on at {step}", flush=True)
    return list(enumerate(data))[step:]


def train(model, optimizer, batch):
    number, data = batch
    asks = int(os.environ["ASKS"])
    if number == asks and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    if number > asks > 0:
        threading.Event().wait(0.05)  # else all is over before the ranks have heard
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_loop_of_the_page_leaves_and_goes_on(tmp_path: Path) -> None:
    shown = re.search(r":caption: loop\.py\n\n((?:   .*\n|\n)+)", (ROOT / "docs" / "preemption.rst").read_text())
    assert shown is not None
    report = "\nprint(f'rank {state.rank}:', [one.tolist() for one in model.parameters()])\n"
    (tmp_path / "loop.py").write_text(textwrap.dedent(shown[1]) + report)
    (tmp_path / "task.py").write_text(TASK)

    def run(folder: str, asks: int, code: int) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        ran = run_script(2, ["../loop.py"], tmp_path / folder, XFFL_FEDERATED="1,1", ASKS=str(asks))
        assert [ended for ended, _ in ran] == [code] * 2, ran
        return [line for _, told in ran for line in told.splitlines()]

    whole = run("whole", -1, 0)
    for asks in (120, 310):  # while both cells train, and after the round for which cell 1 must have finished
        run(f"left at {asks}", asks, 75)
        resumed = run(f"left at {asks}", -1, 0)
        steps = [int(line.rpartition(" ")[2]) for line in resumed if "goes on at" in line]
        assert len(steps) == 2 and steps[0] > asks and (0 < steps[1] < 250 if asks == 120 else steps[1] == 250), steps
        assert [line for line in resumed if "goes on" not in line] == [line for line in whole if "goes on" not in line]


def several(rank: int, world_size: int, every: int, local_steps: int) -> list[str]:
    """Each step of the loop is several local steps; return what was said of it."""
    state = joined(rank, world_size)
    state.set_federated_scaling(federated_group_size=(1, 1))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    try:
        with (
            Preemption(state, ["USR2"]) as preemption,
            xffl.FederatedScaling(model, optimizer, state, every=every) as of,
        ):
            preemption.follow(of, lambda: None)
            for step in range(4):
                preemption.is_due(step)
                for _ in range(local_steps):
                    model(torch.ones(3, 2)).sum().backward()
                    optimizer.step()
    except xffl.errors.StateError as error:
        told.append(str(error))
    dist.barrier()
    try:
        with Preemption(state, ["USR2"]):
            pass
    except xffl.errors.StateError as error:
        told.append(str(error))
    return told


def test_what_a_loop_must_not_do() -> None:
    forgotten = "is_due_at_end was not called"
    for told in run_world(2, several, 2, 4):
        assert len(told) == 2 and "has entered round 2" in told[0] and forgotten in told[1], told
    for told in run_world(2, several, 4, 4):
        assert len(told) == 1 and forgotten in told[0], told


LEAVER = """
import atexit, os, signal, threading
from pathlib import Path

from tests.tasks import TaskConfig, TaskTrainer
from xffl.training import Callback, EvalMetricMixin


def hear_nothing():
    Path(f"here_{os.environ['RANK']}").touch()
    while signal.SIGUSR2 not in signal.sigpending() and not Path("sent").exists():
        threading.Event().wait(0.01)
    threading.Event().wait(0.5)  # for the launcher to pass it on


if "RANK" in os.environ and os.environ["HOW"] == "early":
    hear_nothing()  # while a rank imports what it needs
if "RANK" in os.environ and os.environ["HOW"] == "late":
    atexit.register(hear_nothing)


class Asker(Callback):
    def pre_train_batch(self, trainer, batch, batch_idx):
        if trainer.global_step >= 8 and os.environ["HOW"] == "exec":
            Path(f"here_{trainer.world.rank}").touch()
        if os.environ["HOW"] == "exec":
            threading.Event().wait(0.05)  # else all is over before the signal comes


class Leaver(TaskTrainer):
    config: TaskConfig

    def __init__(self, config, **named):
        super().__init__(config, callbacks=[Asker()], **named)

    configure_metrics = EvalMetricMixin.configure_metrics  # none: torchmetrics takes seconds to load

    def configure_dataloaders(self):
        return super().configure_dataloaders()[0], None
"""

LEAVING = """
trainer: leaver.Leaver
experiment: {name: leaving}
training: {epochs: 40, max_steps: 150, batch_size: 16}
federation: {every: 10}
callbacks: [{class_path: ProgressCallback}]
"""


FEW = ["--training.max_steps", "10"]
LEAVES: list[tuple[str, int, int, list[str]]] = [("early", 75, 1, FEW), ("exec", 75, 2, []), ("late", 0, 1, FEW)]
"""When the signal comes, the code of the command, its ranks, and what they are given"""


@pytest.mark.parametrize(("how", "code", "ranks", "words"), some_of(LEAVES, LEAVES[0], LEAVES[2]))
def test_exec_tells_that_its_ranks_have_left(how: str, code: int, ranks: int, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "leaver.py").write_text(LEAVER)
    (tmp_path / "config.yaml").write_text(LEAVING)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "TORCHELASTIC"))}
    environ["PYTHONPATH"] = str(ROOT)
    cells = ",".join("1" * ranks)
    command = [sys.executable, "-m", "xffl", "exec", "--processes", str(ranks), "--federated", cells]
    command += ["config.yaml", "--experiment.output_dir", how, *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ | {"HOW": how}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        while job.poll() is None and len(list(tmp_path.glob("here_*"))) < ranks:
            threading.Event().wait(0.05)
        job.send_signal(signal.SIGTERM if how == "exec" else signal.SIGUSR2)
        if how == "late":
            (tmp_path / "sent").touch()
        out, told = job.communicate(timeout=120)
    assert job.returncode == code, (how, job.returncode, out, told)
    assert "Traceback" not in told and "Warning" not in told, told
    found = find_latest_checkpoint(tmp_path / how)
    ending = {"early": "stopped early  0 rounds  ", "late": "finished  1 round  "}.get(
        how, f"stopped early, saved as {found and found.name}  2 cells  "
    )
    told = out.splitlines()[-1]
    assert told.startswith(f"leaving  {ending}"), told
    assert f"records in {how}; xffl report {how} makes" in told, told
    if how == "exec":
        assert found is not None and 0 < int(found.name.removeprefix("step_")) < 150, found
