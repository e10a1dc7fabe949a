"""Sessions whose cells are found by a rule: the same on all ranks, or the same error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xffl
from tests.ports import free_port
from tests.ranks.test_session import be_rank
from tests.worlds import run_world
from xffl.distributed import DistributedState, cleanup_distributed_process_group, setup_distributed_process_group
from xffl.distributed.parameters import DeviceParameters, ElasticParameters
from xffl.errors import ConfigError
from xffl.journal.folder import JournalFolder
from xffl.journal.records import VoidRecord, make_id
from xffl.parallel.config import DistributedConfig, StrategyConfig
from xffl.parallel.strategy import DistributedStrategy

HOSTS = ("a1", "a1", "a2", "b1")


def be_on(host: str, address: str = "", pattern: str = "") -> None:
    """Pretend to be a task on a host."""
    os.environ.pop("XFFL_HOST", None)
    os.environ.update(SLURMD_NODENAME=host, SLURM_TOPOLOGY_ADDR=address, SLURM_TOPOLOGY_ADDR_PATTERN=pattern)


def by_rules(rank: int, world_size: int, port: int, folder: str) -> None:
    be_rank(rank, world_size, port)
    host = HOSTS[rank]
    be_on(host, f"core[1-2].cell_{host[0]}.s.{host}", "switch.switch.switch.node")
    file = Path(folder, f"cells of rank {rank}.yaml")
    file.write_text("left: 'a[1-2]'\nright: b1\n")
    expected = ((3, 1), rank // 3)
    for rule in ("auto", "auto:1", "hosts:^[a-z]"):
        with xffl.session(federated=rule) as state:
            assert (state.federated_local_size, state.federated_rank) == expected
            assert dist.get_world_size(state.federation) == expected[0][expected[1]]
    # The environment's rule, and one that replicas have to fit.
    os.environ["XFFL_FEDERATED"] = "auto"
    with xffl.session(hsdp=1) as state:
        assert (state.federated_local_size, state.replica_world_size) == ((3, 1), (3, 1))
    with xffl.session(device_parameters=DeviceParameters.HSDP(dp_replicate="auto", dp_shard=1)) as state:
        assert (state.federated_local_size, state.replica_world_size) == ((3, 1), (3, 1))
    # What the variable may say, an argument may, too; and it beats the variable.
    with xffl.session(federated="2,2", hsdp="1") as state:  # type: ignore[arg-type]
        assert (state.federated_local_size, state.replica_world_size) == ((2, 2), (2, 2))
        state.unset_federated_scaling()
        state.set_federated_scaling("3,1", "1")  # type: ignore[arg-type]
        assert (state.federated_local_size, state.replica_world_size) == ((3, 1), (3, 1))
        state.unset_federated_scaling()
        with pytest.raises(ConfigError, match="federated_group_size 'auto' is a rule, .* or give sizes like 4,4 here"):
            state.set_federated_scaling("auto")
    joined = setup_distributed_process_group(federated="(2, 2)", backend="gloo", device="cpu")
    assert joined.federated_local_size == (2, 2)
    cleanup_distributed_process_group(joined)
    with xffl.session(federated=(2, 2)) as state:
        assert state.federated_local_size == (2, 2)
    with xffl.DistributedWorld(DeviceParameters.FSDP()) as world:
        assert world.state.federated_local_size == (3, 1)
    del os.environ["XFFL_FEDERATED"]
    for asked in ("hosts:^[a-z]", "3,1"):
        with xffl.DistributedWorld(DeviceParameters.FSDP(), federated=asked) as world:
            assert world.state.federated_local_size == (3, 1)
    os.environ["XFFL_HOST"] = f"own{rank // 2}"  # beats what SLURM says
    with xffl.session(federated=r"hosts:\d") as state:
        assert state.federated_local_size == (2, 2)


def test_rules(tmp_path: Path) -> None:
    run_world(4, by_rules, free_port(), str(tmp_path), init=False)


def wrong(rank: int, world_size: int, port: int, folder: str) -> list[str]:
    be_rank(rank, world_size, port)
    be_on(HOSTS[rank])
    local = Path(folder, f"rank{rank}")  # a file that differs from host to host, and one that some hosts have
    local.mkdir()
    os.chdir(local)
    Path("cells").write_text("a a[1-2]\nb b1\n" if rank else "a a1\nc a2,b1\n")
    if rank < 2:
        Path("some").write_text("a a[1-2]\nb b1\n")
    told = []
    for arguments in (
        {"federated": "auto"},
        {"federated": "hosts:^a"},
        {"federated": "hosts:("},
        {"federated": "auto" if rank else "auto:1"},
        {"federated": "file:cells"},
        {"federated": "file:some"},
        {"federated": r"hosts:1|2"},
        {"federated": "hosts:^[a-z]", "hsdp": 2},
        {"federated": "hosts:^[a-z]", "device_parameters": DeviceParameters.HSDP(dp_replicate="auto", dp_shard=2)},
    ):
        with pytest.raises(xffl.XfflError) as caught, xffl.session(**arguments, timeout_s=60):
            pass
        assert not dist.is_initialized()
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        del caught  # with the frames that hold the store
    os.environ["GROUP_RANK"] = str(rank // 2)
    os.environ.update(GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2), XFFL_HOST="same")
    with pytest.raises(xffl.TopologyError) as same, xffl.session(federated="hosts:s"):
        pass
    return [*told, str(same.value)]


def test_wrong_rules(tmp_path: Path) -> None:
    told = run_world(4, wrong, free_port(), str(tmp_path), init=False)
    assert all(row == told[0] for row in told), told
    expected: tuple[tuple[str, ...], ...] = (
        ("TopologyError: rule 'auto' needs the switches", "HINT", "a1, a2, b1"),
        ("TopologyError: rule 'hosts:^a' names no cell for host b1",),
        ("ConfigError: federated is 'hosts:('",),
        ("ConfigError: ranks were given different set-ups", "auto:1"),
        ("different cells by file:cells: rank 0: (2, 2); ranks 1-3: (3, 1)",),
        ("ConfigError: rule 'file:some'", "No such file", "(ranks 2-3 of 4)"),
        ("TopologyError: rule 'hosts:1|2' puts ranks 0-1 and 3 into cell 1", "HINT: start with xffl exec"),
        ("TopologyError: replica size (hsdp) 2 does not divide cell 0 of 3 ranks",),
        ("ConfigError: dp_replicate", "cell 0 has 3 ranks, which 2 does not divide"),
        ("nodes 0 and 1 are both called same", "HINT: set XFFL_HOST"),
    )
    for found, parts in zip(told[0], expected, strict=True):
        assert all(part in found for part in parts), (found, parts)


def in_a_world(rank: int, world_size: int) -> list[Any]:
    """A world that is joined already, whose ranks ask for different rules."""
    be_on(HOSTS[rank])
    state = DistributedState()
    told: list[Any] = []
    state.set_global(
        backend=dist.Backend("gloo"),
        device_type=torch.device("cpu"),
        master_addr=None,
        master_port=None,
        rank=rank,
        world_size=world_size,
    )
    for federated in ("hosts:^[a-z]" if rank else (2, 2), "auto:0", "2;2"):
        with pytest.raises(xffl.XfflError) as caught:
            xffl.DistributedWorld(DeviceParameters.FSDP(), federated=federated).setup(state)
        told.append(str(caught.value))
    world = xffl.DistributedWorld(DeviceParameters.FSDP(), federated="hosts:^[a-z]")
    assert world.setup(state).federated_local_size == (3, 1)
    world.teardown()
    return told


def test_rules_in_a_world_that_is_joined() -> None:
    told = run_world(4, in_a_world)
    assert all(row == told[0] for row in told), told
    parts = (
        "different federated sizes: rank 0: (2, 2); ranks 1-3: 'hosts:^[a-z]'",
        "auto:LEVEL",
        "federated is '2;2'; give sizes",
    )
    assert all(part in found for part, found in zip(parts, told[0], strict=True)), told[0]


def with_a_journal(rank: int, world_size: int, port: int, folder: str) -> None:
    be_rank(rank, world_size, port)
    os.environ.update(XFFL_TOKEN="none", XFFL_JOURNAL=f"{folder}/journal")
    name = make_id()
    if rank == 0:
        JournalFolder(Path(folder, "journal")).put(VoidRecord(name, 0, name))
    asked: dict[str, Any] = {"cell": 1, "cells": 2}
    with xffl.session(elastic="http://127.0.0.1:1", **asked) as state:
        assert state.elastic is not None and state.elastic.journal == f"{folder}/journal"
        assert (state.cell_journal is not None) == (rank == 0)
        if state.cell_journal is not None:
            assert (state.cell_journal.holding.cell, state.cell_journal.since) == (1, 0)
    Path(folder, f"file of rank {rank}").touch()
    elastic = ElasticParameters(lighthouse="http://127.0.0.1:1", journal=f"{folder}/file of rank 0")
    told = "the journal's folder .*file of rank 0 cannot be used"
    with pytest.raises(ConfigError, match=told), xffl.session(elastic=elastic, **asked):
        pass


def test_an_elastic_cell_reads_the_journal_before_its_session_begins(tmp_path: Path) -> None:
    run_world(2, with_a_journal, free_port(), str(tmp_path), init=False)


def test_alone() -> None:
    assert run_world(1, alone, init=False) == [(1,)]


def test_a_strategy_by_a_rule() -> None:
    assert run_world(2, by_strategy) == [(1, 1)] * 2
    with pytest.raises(xffl.ConfigError, match="distributed.federated is 'racks'; give auto"):
        DistributedConfig(federated="racks")
    assert DistributedConfig(federated="4,2").federated == (4, 2)


def by_strategy(rank: int, world_size: int) -> tuple[int, ...] | None:
    be_on(HOSTS[2 + rank])
    distributed = DistributedConfig(strategy="fsdp", federated="hosts:^[a-z]")
    strategy = DistributedStrategy.from_config(StrategyConfig(distributed=distributed))
    state = DistributedState()
    state.set_global(dist.Backend("gloo"), torch.device("cpu"), None, None, rank, world_size)
    strategy.setup(state)
    return strategy.state.federated_local_size


def alone(rank: int, world_size: int) -> tuple[int, ...] | None:
    be_on("a1")
    with xffl.session(federated="hosts:^[a-z]") as state:
        return state.federated_local_size
