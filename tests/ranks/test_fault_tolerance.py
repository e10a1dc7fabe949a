"""Replica groups that are lost and come back: each group is a job of ranks of its own, beside a real lighthouse."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import pickle
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import xffl
from tests.ports import free_port
from tests.rows import some_of
from tests.tasks import TaskConfig, TaskTrainer, whole_weights
from tests.worlds import WorldError, be_launched, run_world
from xffl.distributed import (
    CommParameters,
    DeviceParameters,
    DistributedWorld,
    FaultToleranceParameters,
    FaultTolerantWorld,
)
from xffl.distributed.replicas.fault_tolerance import CommittedOptimizer, _make_group
from xffl.distributed.replicas.replica_transport import (
    MOST_SILENT,
    NONCE_BYTES,
    START_S,
    ShardTransport,
    prove_members,
)
from xffl.errors import CheckpointError, ConfigError, LaunchError, RoundError, StateError, XfflError
from xffl.parallel import DistributedConfig
from xffl.topology import Topology
from xffl.training import Callback, CellLoader, ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback

pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft (the extra elastic), which has wheels for x86-64 Linux"
)

HEARTBEAT_S = 5.0
"""As xffl lighthouse takes it where nothing is said."""
TOKEN = "known to both of them"


class Lighthouse:
    """``xffl lighthouse``, as a user starts it; its port stays the same when it is started again."""

    def __init__(self, *words: str) -> None:
        self.address, self._words = f"127.0.0.1:{free_port()}", words
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "xffl", "lighthouse", "--bind", self.address, *self._words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"lighthouse at {self.address}\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse("--heartbeat-timeout", str(HEARTBEAT_S))
    yield made
    made.kill()


class Groups:
    """Replica groups under way, each in a thread that waits for its ranks."""

    def __init__(self, ranks: int, lighthouse: Lighthouse, most: int = 2) -> None:
        self._ranks, self._lighthouse, self._most = ranks, lighthouse, most
        self._pool = ThreadPoolExecutor(8)

    def start(self, group: int, act: Any, *args: Any) -> Future[list[Any]]:
        environ = {
            "XFFL_LIGHTHOUSE": self._lighthouse.address,
            "XFFL_TOKEN": TOKEN,
            "XFFL_ISLAND": f"{group}/{self._most}",
            "RUST_LOG": os.environ.get("FT_LOG", "error"),
        }
        call = (free_port(), environ, act, *args)
        mortal = range(self._ranks)
        return self._pool.submit(run_world, self._ranks, be_group, *call, init=False, mortal=mortal, timeout_s=200)


def be_group(rank: int, ranks: int, port: int, environ: dict[str, str], act: Any, *args: Any) -> Any:
    be_launched(rank, ranks, port)
    os.environ.update(environ)
    return act(*args)


def told_by(group: Future[list[Any]]) -> list[dict[str, Any]]:
    """Return what a group's ranks have told; the first traceback is the test's failure."""
    results = group.result()
    failed = [result for result in results if not isinstance(result, dict)]
    if failed:
        raise WorldError(str(failed[0]))
    return results


def digest(values: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, value in sorted(values.items()):
        whole.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def build(form: str) -> nn.Module:
    del form
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


def train(
    form: str, last: int, sizes: int, die_at: int = -1, die_after_s: float | None = None, pause_s: float = 0.02
) -> dict[str, Any]:
    """Train until all groups have come to a step together, or until this rank kills itself."""
    torch.manual_seed(os.getpid())  # all begin elsewhere, and end at the same weights
    parameters = DeviceParameters.FSDP() if form == "fsdp" else DeviceParameters.SINGLE_DEVICE()
    with FaultTolerantWorld(parameters, FaultToleranceParameters()) as world:
        manager = world.ft_manager
        assert manager is not None
        model = world.average_gradients(xffl.shard(build(form), world.state, wrap=[nn.Linear]))
        optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            world.register(name, part)
        held_out = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
        gap, before, participants = 0.0, 0.0, set()
        while not (manager.current_step() >= last and world.dp_size == sizes):
            step = manager.current_step()
            if 0 <= die_at <= step:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            inputs = torch.randn(8, 16)
            F.mse_loss(model(inputs), inputs[:, :1].tanh()).backward()
            optimizer.step()
            time.sleep(pause_s)
            if manager.current_step() > step:
                schedule.step()
                if die_after_s is not None:
                    threading.Timer(die_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                    die_after_s = None
                now = time.monotonic()
                gap, before = max(gap, now - before) if before else gap, now
                participants.add(world.dp_size)
        whole = {name: one.full_tensor() if form == "fsdp" else one for name, one in model.named_parameters()}
        moments = {
            f"{number}/{key}": value.full_tensor() if form == "fsdp" and value.dim() else value
            for number, values in optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        return {
            "step": manager.current_step(),
            "gap": gap,
            "sizes": participants,
            "weights": digest(whole),
            "moments": digest(moments),
            "rate": schedule.get_last_lr(),
            "loss": F.mse_loss(model(held_out), held_out[:, :1].tanh()).item(),
        }


@pytest.mark.parametrize("form", some_of(("fsdp", "ddp"), "ddp"))
def test_a_group_is_killed_and_comes_back(form: str, lighthouse: Lighthouse) -> None:
    ranks = 2 if form == "fsdp" else 1
    groups = Groups(ranks, lighthouse)
    stays, goes = groups.start(0, train, form, 200, 2 * ranks), groups.start(1, train, form, 200, 2 * ranks, 40)
    assert all("exit code -9" in str(one) for one in goes.result())
    time.sleep(HEARTBEAT_S + 1)  # the other one goes on alone meanwhile
    back = groups.start(1, train, form, 200, 2 * ranks)
    told = told_by(stays) + told_by(back)
    for what in ("step", "weights", "moments", "rate"):
        assert len({str(one[what]) for one in told}) == 1, (what, told)
    assert HEARTBEAT_S - 1 < told[0]["gap"] < HEARTBEAT_S + 15  # some 6 s on a free machine
    assert told[0]["sizes"] == {ranks, 2 * ranks}
    assert max(one["loss"] for one in told) < 0.05  # 200 steps in one process: 0.022, with a deviation of 0.0015


def test_kills_at_random_and_a_lighthouse_that_is_gone_for_a_while() -> None:
    """Seven kills: whoever is left goes on, and in the end all hold the same bits."""
    draws = random.Random(7)
    light = Lighthouse("--heartbeat-timeout", "1", "--join-timeout", "3")
    try:
        groups = Groups(1, light)
        stays = groups.start(0, train, "ddp", 400, 2)
        for life in range(7):
            dies = groups.start(1, train, "ddp", 10**9, 2, -1, draws.uniform(0.0, 0.3))
            assert all("exit code -9" in str(one) for one in dies.result())
            if life == 2:
                time.sleep(2.0)  # long enough to go on alone
            if life == 5:
                light.kill()
                time.sleep(2.0)
                light.start()
        back = groups.start(1, train, "ddp", 400, 2)
        told = told_by(stays) + told_by(back)
    finally:
        light.kill()
    assert told[0]["sizes"] == {1, 2}
    for what in ("step", "weights", "moments"):
        assert len({str(one[what]) for one in told}) == 1, (what, told)


def test_a_store_that_went_with_its_group_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that dies after the agreement and before all have connected takes the store along."""
    monkeypatch.setattr("xffl.distributed.replicas.fault_tolerance.CONNECT_S", 1.0)
    group = _make_group(torch.device("cpu"), timedelta(seconds=600), None, 1, b"token")
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="client socket has timed out|Connection refused"):
        group.configure(f"127.0.0.1:{free_port()}/torchft/1/0", "island_0", 0, 2, 1, 0, 1, [1, 2])
    assert time.monotonic() - begun < 60


EPOCHS = 12
"""Of 10 steps each, in which a group that was killed comes back."""


class Watch(Callback):
    """Keep count, as a callback with a state does, slow steps down, and kill the rank after one, if asked."""

    def __init__(self, die_after: int = -1) -> None:
        self.seen, self.sizes, self._die_after = 0, set[int](), die_after

    def post_optimizer_step(self, trainer: Any) -> None:
        self.seen += 1
        self.sizes.add(trainer.world.dp_size)
        if 0 <= self._die_after <= trainer.global_step:
            os.kill(os.getpid(), signal.SIGKILL)
        is_to_wait = trainer.global_step > 60 and trainer.world.dp_size < 4  # the other group is still to come
        time.sleep(1.0 if is_to_wait else 0.02)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def fit(folder: str, how: dict[str, Any], die_after: int = -1, epochs: int = EPOCHS) -> dict[str, Any]:
    config = TaskConfig(
        experiment=ExperimentConfig(name="test", output_dir=folder, seed=3),
        training=TrainingParameters(epochs=epochs, batch_size=5, validate_every_epochs=10, gradient_accumulation=2),
        distributed=DistributedConfig(strategy="fsdp"),
        samples=400,
        **how,
    )
    watch, kept = Watch(die_after), dict[str, Any]()

    class Last(Callback):
        def post_train(self, trainer: Any) -> None:
            kept["weights"] = digest(whole_weights(trainer.model))
            state = trainer.state_dict()
            kept["trainer"], kept["loader"] = state["trainer"], state["dataloaders"]["train"]
            kept["schedulers"] = state["schedulers"]
            kept["taken"] = trainer.world.ft_manager.current_step()
            kept["moments"] = digest(
                {
                    f"{number}/{key}": value.full_tensor() if isinstance(value, DTensor) else value
                    for number, values in trainer.optimizer.state_dict()["state"].items()
                    for key, value in values.items()
                }
            )

    trainer = TaskTrainer(config, callbacks=[watch, Last(), CheckpointCallback()])
    if "fault_tolerance" not in how and "enable_fault_tolerance" not in how:
        trainer.world = FaultTolerantWorld(trainer.world)  # as in the reference documents
    trainer.fit()
    assert Path(folder, f"island_{os.environ['XFFL_ISLAND'][0]}", "metrics").is_dir()
    return {**kept, "sizes": watch.sizes}


@pytest.mark.parametrize(
    "how",
    some_of(({"fault_tolerance": FaultToleranceParameters(min_replica_size=1)}, {}), {}),
    ids=["configured", "replaced"],
)
def test_a_trainers_group_takes_all_over(how: dict[str, Any], lighthouse: Lighthouse, tmp_path: Path) -> None:
    groups = Groups(2, lighthouse)
    stays, goes = (groups.start(group, fit, str(tmp_path), how, -1 if group == 0 else 30) for group in (0, 1))
    assert all("exit code -9" in str(one) for one in goes.result())
    back = groups.start(1, fit, str(tmp_path), how)
    told = told_by(stays) + told_by(back)
    for what in ("weights", "moments", "trainer", "schedulers", "loader"):
        assert len({str(one[what]) for one in told}) == 1, (what, told)
    trainer = told[0]["trainer"]
    assert trainer["current_epoch"] == EPOCHS and trainer["callbacks"], trainer
    # A step that is lost with a group is made again: each epoch has all of its steps.
    assert trainer["global_step"] == told[0]["taken"] == EPOCHS * 10


def test_groups_go_on_from_their_checkpoints(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """Both are started again: each resumes from its own, and they are at one step."""
    how = {"fault_tolerance": FaultToleranceParameters(min_replica_size=2)}
    for epochs in (3, 6):
        both = [Groups(2, lighthouse).start(group, fit, str(tmp_path), how, -1, epochs) for group in (0, 1)]
        told = [one for group in both for one in told_by(group)]
        for what in ("weights", "moments", "trainer", "schedulers", "loader"):
            assert len({str(one[what]) for one in told}) == 1, (what, told)
        assert told[0]["trainer"]["global_step"] == told[0]["taken"] == epochs * 10
        time.sleep(HEARTBEAT_S)  # until the lighthouse has forgotten them


def test_a_trainer_takes_no_step_before_there_are_enough_groups(lighthouse: Lighthouse, tmp_path: Path) -> None:
    """Steps of a group that is alone are lost, and cost neither batches nor epochs."""
    how = {"fault_tolerance": FaultToleranceParameters(min_replica_size=2)}
    groups = Groups(2, lighthouse)
    first = groups.start(0, fit, str(tmp_path), how, -1, 4)
    time.sleep(6.0)
    second = groups.start(1, fit, str(tmp_path), how, -1, 4)
    told = told_by(first) + told_by(second)
    for what in ("weights", "moments", "trainer", "schedulers", "loader"):
        assert len({str(one[what]) for one in told}) == 1, (what, told)
    assert told[0]["trainer"]["global_step"] == told[0]["taken"] == 4 * 10


def alone(failures: int) -> dict[str, Any]:
    """Take steps that need two groups, where there is one."""
    asked = FaultToleranceParameters(min_replica_size=2, max_consecutive_failures=failures)
    joined: list[tuple[str, int]] = []  # where a job listens that is no replica group
    connect = FaultTolerantWorld._connect
    FaultTolerantWorld._connect = lambda self: (joined.extend(listening()), connect(self))[1]  # type: ignore[method-assign]
    with FaultTolerantWorld(DeviceParameters.SINGLE_DEVICE(), asked) as world:
        model = world.average_gradients(xffl.shard(nn.Linear(4, 1), world.state))
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        world.register("model", model)
        before = [one.detach().clone() for one in model.parameters()]
        for _ in range(failures):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RoundError, match=rf"{failures + 1} steps failed .* max_consecutive_failures={failures}"):
            optimizer.step()
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
        return {"ports": [place for place in listening() if place not in joined]}


def test_steps_that_fail_one_after_the_other_end_and_nothing_listens_outside(lighthouse: Lighthouse) -> None:
    (told,) = told_by(Groups(1, lighthouse).start(0, alone, 2))
    assert len(told["ports"]) >= 3  # the manager, the store, the state
    assert {host for host, _ in told["ports"]} == {"127.0.0.1"}, told["ports"]


def listening() -> list[tuple[str, int]]:
    """Return the addresses at which this process listens."""
    own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_there(name)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                host, _, port = words[1].partition(":")
                address = socket.inet_ntoa(struct.pack("<I", int(host, 16))) if table == "tcp" else host
                found.append((address, int(port, 16)))
    return found


def _is_there(name: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # what listed the folder
        return False
    return True


def one_for_all(store: str) -> dict[str, Any]:
    """What the reference documents show, and what is asked of a world between."""
    device_params = DeviceParameters.FSDP()
    ft_params = FaultToleranceParameters(enable=True, min_replica_size=2, max_consecutive_failures=3)
    world = FaultTolerantWorld(device_params, ft_params)
    world.setup()
    ft_manager = world.ft_manager
    assert ft_manager is not None and world.replica_group is not None
    model = world.average_gradients(xffl.shard(build("fsdp"), world.state))
    optimizer = world.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    assert isinstance(optimizer, CommittedOptimizer)
    world.register("model", model)
    world.register("optimizer", optimizer)
    with pytest.raises(ConfigError, match="part 'model' is registered twice"):
        world.register("model", model)
    with pytest.raises(StateError, match="the world is set up already"):
        FaultTolerantWorld(world)
    assert world.dp_size == 2
    with pytest.raises(ConfigError, match="a step of all replica groups is one optimizer's"):
        world.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(StateError, match="over replica groups there is a sum inside a step only"):
        world.all_reduce(torch.ones(()), "sum", "dp")
    assert world.seed_for(1, "dp") != DistributedWorld.seed_for(world, 1, "dp") and world.seed_for(1) == 1
    # The lighthouse may give the first group a quorum of its own if it has not heard of the second one yet.
    ready = dist.FileStore(store, 4)
    if ready.add("ready", 1) == 4:
        ready.set("all", "")
    ready.wait(["all"], timedelta(seconds=60))
    optimizer.zero_grad()
    number = 2.0 * world.replica_group[0] + world.rank
    mine = torch.tensor([number])
    total, mean = world.all_reduce(mine, "sum", "dp"), world.all_reduce(mine, "mean", "dp")
    assert world.dp_size == 4 and total.item() == 6.0 and mean.item() == 1.5
    assert world.all_reduce(mine, "sum", "world").item() == 4.0 * world.replica_group[0] + 1
    with pytest.raises(ConfigError, match="op over replica groups must be one of 'sum', 'mean', got 'max'"):
        world.all_reduce(mine, "max", "dp")
    with pytest.raises(ConfigError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    # The gradient of all four ranks' inputs, as one process has it.
    inputs = torch.arange(64.0).view(4, 16) / 64
    model(inputs[int(number)]).sum().backward()
    own = torch.nn.utils.parameters_to_vector([one.grad.full_tensor() for one in model.parameters()])  # type: ignore[union-attr]
    plain = build("fsdp")
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        one.data.copy_(other.full_tensor())  # type: ignore[attr-defined]
    (plain(inputs).sum() / 4).backward()
    whole = torch.nn.utils.parameters_to_vector([one.grad for one in plain.parameters()])  # type: ignore[misc]
    torch.testing.assert_close(own, whole)
    assert world.commit_step()
    world.teardown()
    with pytest.raises(StateError, match="not set up"):
        _ = world.ft_manager
    return {}


def test_two_groups_are_one_data_parallel_world(lighthouse: Lighthouse, tmp_path: Path) -> None:
    groups = Groups(2, lighthouse)
    both = [groups.start(group, one_for_all, str(tmp_path / "store")) for group in (0, 1)]
    assert [told_by(group) for group in both] == [[{}, {}], [{}, {}]]


def odd(case: str, group: int) -> dict[str, Any]:
    """One of two groups that do not go together."""
    if case == "island":
        os.environ["XFFL_ISLAND"] = "1/2"
    comm = CommParameters(train_timeout_seconds=20)
    with FaultTolerantWorld(DeviceParameters.SINGLE_DEVICE(comm=comm)) as world:
        manager = world.ft_manager
        assert manager is not None
        model = world.average_gradients(xffl.shard(nn.Linear(4, 1), world.state))
        if case == "checkpoint":  # of other runs, at one step
            manager.load_state_dict({"step": 7, "batches_committed": 7})
            nn.init.constant_(next(model.parameters()), float(group))
        optimizer = world.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        world.register("model", model)
        if case == "numpy":
            world.register("counts", Counted())
        deadline = time.monotonic() + 30
        try:
            while True:
                assert time.monotonic() < deadline
                _step(model, optimizer)
                time.sleep(0.02)
        except XfflError as error:
            return {"told": f"{type(error).__name__}: {error}"}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Counted:
    def state_dict(self) -> dict[str, Any]:
        return {"counts": np.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never given")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("island", "ConfigError: replica groups ['1/2', '1/2'] (XFFL_ISLAND) do not go together"),
        ("checkpoint", "RoundError: the replica groups are all at step 7, but hold different 'model'"),
        ("numpy", "ConfigError: counts/counts is ndarray, which a checkpoint does not keep"),
    ],
)
def test_groups_that_do_not_go_together(case: str, told: str, lighthouse: Lighthouse) -> None:
    groups = Groups(1, lighthouse)
    both = [groups.start(group, odd, case, group) for group in (0, 1)]
    for (one,) in map(told_by, both):
        assert one["told"].startswith(told), one


def deal(rank: int, ranks: int, axes: dict[str, int]) -> list[list[Any]]:
    """Tell which samples a rank gets in each of two groups, without any lighthouse."""
    world = mock.Mock(world_size=ranks, device_parameters=DeviceParameters(**axes), rank=rank)
    world.state.topology = Topology(ranks)
    found = []
    for group in (0, 1):
        place = FaultTolerantWorld._place_in(world, group, 2)
        assert (place.cell, place.cells, place.cell_size, place.in_job.rank) == (0, 1, 2 * ranks, rank)
        loader = CellLoader(TensorDataset(torch.arange(16)), place, batch_size=1, seed=0)
        found.append([batch[0].tolist() for batch in loader])
    return found


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2}, {"pp": 2, "dp_shard": 2}])
def test_samples_are_dealt_out_to_all_groups(axes: dict[str, int]) -> None:
    """Ranks that share a sample get the same, all others other ones."""
    ranks = math.prod(axes.values())
    by_rank = [deal(rank, ranks, axes) for rank in range(ranks)]
    streams = {str(samples) for both in by_rank for samples in both}
    assert len(streams) == 2 * axes.get("dp_shard", 1)
    seen = [sample for text in streams for sample in ast.literal_eval(text)]
    assert sorted(seen) == [[sample] for sample in range(16)]
    for rank in range(ranks):  # pp is outside, so its mates stand dp_shard ranks apart
        assert by_rank[rank] == by_rank[rank % axes.get("dp_shard", 1)]


def wrong(rank: int, ranks: int, port: int, case: str) -> str:
    be_launched(rank, ranks, port)
    os.environ |= {"XFFL_LIGHTHOUSE": "127.0.0.1:1", "XFFL_TOKEN": TOKEN} | {
        "no lighthouse": {"XFFL_LIGHTHOUSE": ""},
        "lighthouse": {"XFFL_LIGHTHOUSE": "here"},
        "no token": {"XFFL_TOKEN": ""},
        "island": {"XFFL_ISLAND": "2/2"},
        "cells": {"XFFL_FEDERATED": "1,1"},
    }.get(case, {})
    parameters = DeviceParameters.DDP() if case == "replicas" else DeviceParameters.FSDP()
    if case == "no torchft":
        sys.modules["torchft.manager"] = sys.modules["torchft"] = None  # type: ignore[assignment]
    with pytest.raises((ConfigError, LaunchError)) as caught:
        FaultTolerantWorld(parameters).setup()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no lighthouse", "LaunchError: fault tolerance is asked for, but XFFL_LIGHTHOUSE is not set; start xffl lig"),
        ("lighthouse", "LaunchError: XFFL_LIGHTHOUSE is 'here'; give HOST:PORT, such as 127.0.0.1:29510"),
        ("no token", "LaunchError: cells and replica groups give their weights to those that know the run's token"),
        ("island", "LaunchError: XFFL_ISLAND is '2/2'; give this replica group's number, from 0, and the most groups"),
        ("replicas", "ConfigError: dp_replicate is 2 inside this replica group, but replicas are groups of their own"),
        ("cells", "ConfigError: this job has 2 federated groups, but it is one of several replica groups of one model"),
        (
            "no torchft",
            "ConfigError: fault tolerance needs torchft, which has wheels for x86-64 Linux, which cannot be",
        ),
    ],
)
def test_what_cannot_be_meant(case: str, told: str) -> None:
    texts = run_world(2, wrong, free_port(), case, init=False)
    assert texts[0] == texts[1] and texts[0].startswith(told), texts


def plain(rank: int, ranks: int, port: int) -> None:
    be_launched(rank, ranks, port)
    with FaultTolerantWorld(DistributedWorld(DeviceParameters.FSDP()), FaultToleranceParameters(enable=False)) as world:
        assert world.ft_manager is None and world.replica_group is None and world.dp_size == 2
        model = xffl.shard(build("fsdp"), world.state)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert world.average_gradients(model) is model and world.optimizer(optimizer) is optimizer
        world.register("model", model)
        assert not world.begin_step() and world.commit_step()
        assert world.all_reduce(torch.ones(()), "max", "dp").item() == 1
    assert "torchft" not in sys.modules


def test_a_world_that_is_not_enabled_is_a_plain_one() -> None:
    run_world(2, plain, free_port(), init=False)


def test_a_trainer_is_asked_by_either_name_and_takes_no_rounds(tmp_path: Path) -> None:
    experiment = ExperimentConfig(output_dir=str(tmp_path))
    by_alias = TaskConfig(experiment=experiment, enable_fault_tolerance=True)
    assert by_alias.fault_tolerance == FaultToleranceParameters()
    assert isinstance(TaskTrainer(by_alias).world, FaultTolerantWorld)
    assert not isinstance(TaskTrainer(TaskConfig(experiment=experiment)).world, FaultTolerantWorld)
    with pytest.raises(ConfigError, match="federation asks for rounds between cells, but a job with fault_tolerance"):
        TaskConfig(federation=FederationConfig(every=5), enable_fault_tolerance=True)
    with pytest.raises(ConfigError, match="the world is for other device parameters"):
        TaskTrainer(by_alias).world = FaultTolerantWorld(DeviceParameters.FSDP())
    with pytest.raises(ConfigError, match="strategy 'deepspeed' takes no FaultTolerantWorld"):
        TaskTrainer(TaskConfig(distributed=DistributedConfig(strategy="deepspeed"), enable_fault_tolerance=True))
    for wrong, told in (
        ({"min_replica_size": 0}, "fault_tolerance.min_replica_size must be a positive integer, got 0"),
        ({"max_consecutive_failures": -1}, "fault_tolerance.max_consecutive_failures must be an integer of 0 or more"),
        ({"enable": "yes"}, "fault_tolerance.enable must be one of True, False, got 'yes'"),
    ):
        with pytest.raises(ConfigError, match=told):
            FaultToleranceParameters(**wrong)  # type: ignore[arg-type]


# The transport --------------------------------------------------------------------------------------------------------

STATE = {
    "user": {
        "model": {"w": torch.arange(12.0).view(3, 4), "b": torch.tensor(3, dtype=torch.int16), "e": torch.empty(0, 5)},
        "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "cut": torch.arange(20).view(4, 5)[:, ::2],
        "plain": {1: (2, None), "x": [True, float("inf"), "ä"]},
    },
    "torchft": {"step": 7, "batches_committed": 14},
}


@pytest.fixture
def transports() -> Iterator[list[ShardTransport]]:
    made = [ShardTransport("127.0.0.1", token, lambda: STATE["user"]) for token in (b"one", b"one", b"two")]
    yield made
    for one in made:
        one.shutdown()


def test_states_arrive_as_they_were(transports: list[ShardTransport]) -> None:
    giver, taker, _ = transports
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(giver.send_checkpoint, [1, 2], 7, STATE, timedelta(seconds=20))
        got = [taker.recv_checkpoint(0, giver.metadata(), 7, timedelta(seconds=20)) for _ in range(2)]
        sent.result(timeout=START_S / 2)  # what has arrived is not waited for
    for state in got:
        assert state["user"]["plain"] == STATE["user"]["plain"] and state["torchft"] == STATE["torchft"]
        for ours, theirs in ((STATE["user"]["model"], state["user"]["model"]), (STATE["user"], state["user"])):
            for name, tensor in ours.items():
                if isinstance(tensor, torch.Tensor):
                    assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name


def test_who_does_not_know_the_token_gets_nothing(transports: list[ShardTransport]) -> None:
    giver, _, stranger = transports
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(giver.send_checkpoint, [1], 7, STATE, timedelta(seconds=2))
        with pytest.raises(LaunchError, match="does not know the run's token, or knows another one"):
            stranger.recv_checkpoint(0, giver.metadata(), 7, timedelta(seconds=20))
        sent.result(timeout=10)  # and a group that never comes is not waited for longer


@contextmanager
def hostile_giver(taker: ShardTransport, answer: Callable[[socket.socket], None], *, is_known: bool) -> Iterator[str]:
    """Be asked for a state by one taker, prove to know the token or not, and then answer with anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        def give() -> None:
            link, _ = listener.accept()
            with link, suppress(OSError):
                link.sendall(bytes(NONCE_BYTES))
                got = link.recv(4096)
                asked = f"{host}:{port}".encode() + got[NONCE_BYTES : NONCE_BYTES + 8]
                proof = taker._proof(b"giver", bytes(NONCE_BYTES), got[:NONCE_BYTES], asked)
                link.sendall(proof if is_known else bytes(32))
                answer(link)
                link.recv(1)

        thread = threading.Thread(target=give)
        thread.start()
        yield f"{host}:{port}"
        thread.join()


def test_a_giver_without_the_token_and_a_hostile_pickle_are_refused(
    transports: list[ShardTransport], tmp_path: Path
) -> None:
    """Nothing that comes is unpickled, from whomever."""
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {touched}",)

    data = pickle.dumps(Hostile())
    for is_known in (False, True):
        told = "could not be read: (ValueError|UnicodeDecodeError)" if is_known else "does not know the run's token"
        answer = struct.pack("!Q", len(data)) + data
        with (
            hostile_giver(transports[0], methodcaller("sendall", answer), is_known=is_known) as place,
            pytest.raises(CheckpointError if is_known else LaunchError, match=told),
        ):
            transports[0].recv_checkpoint(0, place, 7, timedelta(seconds=20))
    assert not touched.exists()


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"tensors": [["a", "torch.uint8", [10**15]]]}, f"tensors of {10**15} bytes, and at most .*no memory was"),
    "many": ({"tensors": [["a", "torch.uint8", [2**26]]] * 4096}, "no memory was taken"),
    "nothing": ({"tensors": [["a", "torch.uint8", [2**40, 2**40, 0]]]}, "no name, data type and shape of a tensor"),
    "shape": ({"tensors": [["a", "torch.uint8", [-1]]]}, "no name, data type and shape of a tensor"),
    "type": ({"tensors": [["a", "os.system", [1]]]}, "no name, data type and shape of a tensor"),
    "list": ({"tensors": 3}, "tensors of the state of .* must be a list"),
    "step": ({"step": 8}, "gave the state of step 8 for that of step 7"),
    "no step": ({"step": "7"}, "step of the state of .* must be an integer"),
    "part": (
        {"plain": {"user": {"model": 1, "x": 2}, "torchft": {"step": 7, "batches_committed": 1}}},
        "whose part 'bf",
    ),
    "no parts": ({"plain": [1]}, "must be a mapping"),
    "numbers": (
        {"plain": {"user": dict.fromkeys(STATE["user"]), "torchft": {"step": 7}}},
        "batches_committed .* missing",
    ),
    "dtype": ({"plain": {"__dtype__": "os"}}, "'os' is no data type of torch"),
    "name": ({"plain": {"__tensor__": "nobody"}}, "KeyError: 'nobody'"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_giver_claims_is_compared_with_the_own_state(claim: str, transports: list[ShardTransport]) -> None:
    claimed, told = CLAIMS[claim]
    text = json.dumps({"step": 7, "plain": {}, "tensors": []} | claimed).encode()
    answer = struct.pack("!Q", len(text)) + text + b"\1"
    with (
        hostile_giver(transports[0], methodcaller("sendall", answer), is_known=True) as place,
        pytest.raises(CheckpointError, match=told),
    ):
        transports[0].recv_checkpoint(0, place, 7, timedelta(seconds=20))


def test_a_giver_that_is_slow_or_announces_an_endless_text_is_left(transports: list[ShardTransport]) -> None:
    def trickle(link: socket.socket) -> None:
        link.sendall(struct.pack("!Q", 1 << 20))
        while link.send(b" "):
            time.sleep(0.02)

    begun = time.monotonic()
    with (
        hostile_giver(transports[0], trickle, is_known=True) as place,
        pytest.raises(CheckpointError, match="could not be read: TimeoutError"),
    ):
        transports[0].recv_checkpoint(0, place, 7, timedelta(seconds=0.5))
    assert time.monotonic() - begun < 30
    with (
        hostile_giver(transports[0], methodcaller("sendall", b"\xff" * 8), is_known=True) as place,
        pytest.raises(CheckpointError, match=f"announces {2**64 - 1} bytes of text, and at most .*nothing was read"),
    ):
        transports[0].recv_checkpoint(0, place, 7, timedelta(seconds=20))
    for place in ("nowhere", "127.0.0.1:99999", "\0:1"):
        with pytest.raises(CheckpointError, match="could not be read: (ValueError: where the group gives|gaierror)"):
            transports[0].recv_checkpoint(0, place, 7, timedelta(seconds=20))


def test_strangers_who_say_nothing_keep_nobody_away(transports: list[ShardTransport]) -> None:
    giver, taker, _ = transports
    host, port = giver.metadata().split(":")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for _ in range(MOST_SILENT + 40):
            stack.enter_context(socket.create_connection((host, int(port))))
        sent = pool.submit(giver.send_checkpoint, [1], 7, STATE, timedelta(seconds=20))
        assert taker.recv_checkpoint(0, giver.metadata(), 7, timedelta(seconds=5))["torchft"] == STATE["torchft"]
        sent.result(timeout=5)


def test_groups_that_meet_prove_that_they_know_the_token() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        tokens = [b"one", b"one", b"two"]
        told = [pool.submit(prove_members, store, token, "g", rank, 3) for rank, token in enumerate(tokens)]
        for rank, others in enumerate(("[2]", "[2]", "[0, 1]")):
            with pytest.raises(LaunchError, match=f"^replica groups {re.escape(others)} of the 3 that have met do not"):
                told[rank].result(timeout=20)
        # What somebody has read is of no use with other random bytes.
        again = dist.HashStore()
        for key in ("nonce/0", "proof/0"):
            again.set(key, store.get(key).decode())
        with pytest.raises(LaunchError, match=r"^replica groups \[0\] of the 2"):
            prove_members(again, b"one", "g", 1, 2)
        both = [pool.submit(prove_members, dist.PrefixStore("good", store), b"one", "g", rank, 2) for rank in (0, 1)]
        assert [one.result(timeout=20) for one in both] == [None, None]


def test_a_state_of_another_step_is_not_given(
    transports: list[ShardTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.distributed.replicas.replica_transport.START_S", 0.3)
    giver, taker, _ = transports
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(giver.send_checkpoint, [1], 7, STATE, timedelta(seconds=20))
        with pytest.raises(CheckpointError, match="could not be read: ConnectionError"):
            taker.recv_checkpoint(0, giver.metadata(), 8, timedelta(seconds=20))
        sent.result(timeout=5)


def test_the_tokens_file_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xffl.cluster.run_token import make_token_file, token_of

    path = tmp_path / "deep" / "token"
    make_token_file(path)
    token = token_of({"XFFL_TOKEN_FILE": str(path)})
    assert path.stat().st_mode & 0o777 == 0o600 and len(token) == 64
    make_token_file(path)  # stays
    assert token_of({"XFFL_TOKEN_FILE": str(path)}) == token
    path.chmod(0o640)
    for read in (lambda: make_token_file(path), lambda: token_of({"XFFL_TOKEN_FILE": str(path)})):
        with pytest.raises(LaunchError, match="may be read by others"):
            read()
    path.write_text("\n")
    path.chmod(0o600)
    with pytest.raises(LaunchError, match="is empty"):
        token_of({"XFFL_TOKEN_FILE": str(path)})


def test_the_lighthouse_tells_what_is_wrong(lighthouse: Lighthouse, capfd: pytest.CaptureFixture[str]) -> None:
    from xffl.cli.main import main

    for words, told in (
        (["--bind", lighthouse.address], f"--bind '{lighthouse.address}' cannot be bound"),
        (["--bind", "29510"], "--bind is '29510'; give HOST:PORT"),
        (["--min-replicas", "0"], "--min-replicas must be a positive integer, got 0"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout must be a number >= 0.1"),
    ):
        assert main(["lighthouse", *words]) == 2
        assert told in capfd.readouterr().err
