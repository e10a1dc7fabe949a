"""Who started this process: recordings of real launchers, written ones where none was at hand, and bad values."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xffl.cluster import hosts
from xffl.cluster.environment import (
    ProcessEnvironment,
    accept_cells,
    checks_world,
    detect_environment,
    requested_federation,
)
from xffl.cluster.host_lists import expand_counts, expand_hosts
from xffl.cluster.hosts import node_address
from xffl.cluster.lighthouse.address import elastic_cell, meeting_timeout_of, parse_lighthouse, restarts_of
from xffl.cluster.network import interface_address, use_interface
from xffl.cluster.recognition.claims import Claim
from xffl.cluster.run_token import make_token_file, token_of
from xffl.cluster.sizes_text import parse_sizes
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.session import setup_distributed_process_group
from xffl.errors import ConfigError, LaunchError, XfflError
from xffl.training.config.variables import requested_settings

RECORDED = Path(__file__).parent / "recorded"
"""Environments of real processes: common variables first, then a block for each process, in rank order."""


def recording(name: str) -> list[dict[str, str]]:
    common, *processes = (RECORDED / f"{name}.env").read_text().split("[process]\n")
    return [dict(line.split("=", 1) for line in (common + process).splitlines()) for process in processes]


def places(found: list[ProcessEnvironment]) -> list[tuple[int, ...]]:
    return [(e.rank, e.world_size, e.node_local_rank, e.node_local_size, e.node_rank, e.node_world_size) for e in found]


class FakeWorld:
    """MPI.COMM_WORLD of a recorded launch, played through by one process after the other, rank 0 first."""

    def __init__(self, size: int, claims: list[Claim], names: list[str]) -> None:
        self.size, self.rows, self.told = (size, list(zip(claims, names, strict=True)), None)

    def Get_size(self) -> int:
        return self.size

    def allgather(self, mine: tuple[Claim, str]) -> list[tuple[Claim, str]]:
        assert mine[0][:3] in [row[0][:3] for row in self.rows]
        return self.rows

    def bcast(self, told: Any, root: int) -> Any:
        self.told = told if told is not None else self.told
        return self.told


def fake_mpi(monkeypatch: pytest.MonkeyPatch, world: FakeWorld) -> None:
    package = ModuleType("mpi4py")
    package.MPI = SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "Toy MPI 1.0\nmore")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)


# Recorded launches ----------------------------------------------------------------------------------------------------


def test_torchrun_on_one_node() -> None:
    found = [detect_environment(environ) for environ in recording("torchrun_one_node")]
    assert places(found) == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
    assert {(e.launcher, e.master_addr, e.master_port) for e in found} == {("torchrun", "localhost", 37415)}
    assert "LOCAL_WORLD_SIZE" in found[0].reason


def test_torchrun_on_uneven_nodes() -> None:
    found = [detect_environment(environ) for environ in recording("torchrun_uneven_nodes")]
    assert places(found) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]


SLURM_STEPS = {
    "srun_even": [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)],
    "srun_uneven_3_1": [(0, 4, 0, 3, 0, 2), (1, 4, 1, 3, 0, 2), (2, 4, 2, 3, 0, 2), (3, 4, 0, 1, 1, 2)],
    "srun_two_cells": [(0, 4, 0, 3, 0, 2), (1, 4, 1, 3, 0, 2), (2, 4, 2, 3, 0, 2), (3, 4, 0, 1, 1, 2)],
    "srun_part_of_allocation": [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)],
    "srun_in_sbatch": [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)],
    "srun_het_job": [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)],
    # PMI_RANK and PMI_SIZE are set here, or PMIX_RANK, but no local rank of theirs.
    "srun_pmi2": [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)],
    "srun_pmix": [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)],
}


@pytest.mark.parametrize("name", SLURM_STEPS)
def test_slurm_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.cluster.recognition.launchers.node_address", lambda node: f"addr-of-{node}")
    found = [detect_environment(environ) for environ in recording(name)]
    assert places(found) == SLURM_STEPS[name]
    assert {e.launcher for e in found} == {"slurm"}
    assert {e.master_addr for e in found} == {"addr-of-a1"}
    ports = {e.master_port for e in found}
    assert len(ports) == 1 and 20000 <= (ports.pop() or 0) < 32000


def test_steps_and_jobs_have_their_own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.cluster.recognition.launchers.node_address", lambda node: node)
    environ = recording("srun_even")[0]
    ports = {
        detect_environment({**environ, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(900_000, 900_100)
        for step in range(16)
    }
    assert len(ports) == 1600


@pytest.mark.parametrize("name", ["salloc_shell", "sbatch_script", "sbatch_from_inside_a_step"])
def test_an_allocation_without_srun_is_a_single_process(name: str) -> None:
    (environ,) = recording(name)
    assert detect_environment(environ) == ProcessEnvironment()


def test_an_interactive_step_is_a_single_process() -> None:
    # A salloc shell as a step of its own (use_interactive_step): written after the manual, its id is 0xfffffffa.
    environ = {**recording("srun_part_of_allocation")[0], "SLURM_STEP_ID": str(0xFFFFFFFA)}
    assert detect_environment(environ) == ProcessEnvironment()


MPI_LAUNCHES = {
    # name: (launcher, expected places)
    "openmpi4": ("openmpi", [(r, 4, r, 4, 0, 1) for r in range(4)]),
    # Open MPI 5 numbered these local ranks 0, 2, 1: a local rank is never rank % n.
    "openmpi5": ("openmpi", [(0, 3, 0, 3, 0, 1), (1, 3, 2, 3, 0, 1), (2, 3, 1, 3, 0, 1)]),
    "openmpi_in_sbatch": ("openmpi", [(r, 3, r, 3, 0, 1) for r in range(3)]),
    "mpich_one_host": ("mpich", [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]),
    "mpich_two_hosts": ("mpich", [(0, 4, 0, 3, 0, 2), (1, 4, 1, 3, 0, 2), (2, 4, 2, 3, 0, 2), (3, 4, 0, 1, 1, 2)]),
    "mpich_in_sbatch": ("mpich", [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)]),
    # Hydra starts its proxies with srun, so each process has a SLURM step of another size.
    "mpich_over_srun": ("mpich", [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]),
}
KEYS = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@pytest.mark.parametrize("name", MPI_LAUNCHES)
def test_mpi_launchers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, expected = MPI_LAUNCHES[name]
    environs = recording(name)
    claims = [Claim(*(int(environ[key]) for key in KEYS[launcher]), host="vm/1") for environ in environs]
    fake_mpi(monkeypatch, FakeWorld(len(environs), claims, ["vm"] * len(environs)))
    found = [detect_environment(environ) for environ in environs]
    assert places(found) == expected
    assert {(e.launcher, e.master_addr) for e in found} == {(launcher, "127.0.0.1")}
    assert len({e.master_port for e in found}) == 1


def test_mpi_without_mpi4py_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environ = recording("openmpi4")[1]
    with pytest.raises(LaunchError, match="pip install mpi4py"):
        detect_environment(environ)
    # One node and a rendezvous from outside leave nothing to ask.
    found = detect_environment({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (found.rank, found.node_rank, found.master_addr, found.master_port) == (1, 0, "10.0.0.1", 4000)


def test_mpi4py_of_another_mpi_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, FakeWorld(1, [Claim(0, 0, 1)], ["vm"]))
    with pytest.raises(LaunchError, match=r"started 4 ranks, but mpi4py has loaded 'Toy MPI 1.0' and sees 1"):
        detect_environment(recording("openmpi4")[0])


def test_rank_zero_without_an_address_fails_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    environs = recording("mpich_two_hosts")
    claims = [
        Claim(*(int(environ[key]) for key in KEYS["mpich"]), host=environ["PMI_HOSTNAME"]) for environ in environs
    ]
    fake_mpi(monkeypatch, FakeWorld(4, claims, ["vm", "vm", "vm", "elsewhere"]))
    monkeypatch.setattr(hosts, "resolve", lambda name: ("127.0.1.1",))
    for environ in environs:
        with pytest.raises(LaunchError, match="rank 0 has no rendezvous: .*XFFL_IFNAME"):
            detect_environment(environ)


def test_rank_zero_listens_at_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**recording("mpich_two_hosts")[0], "XFFL_IFNAME": "lo"}
    claims = [Claim(0, 0, 3, "x"), Claim(1, 1, 3, "x"), Claim(2, 2, 3, "x"), Claim(3, 0, 1, "y")]
    fake_mpi(monkeypatch, FakeWorld(4, claims, ["x", "x", "x", "y"]))
    assert detect_environment(environ).master_addr == "127.0.0.1"


# Arguments ------------------------------------------------------------------------------------------------------------


def test_nothing_is_a_single_process() -> None:
    found = detect_environment({})
    assert found == ProcessEnvironment(0, 1, 0, 1, 0, 1, None, None, "none", "no launcher's variables are set")
    assert detect_environment({}, rank=0, world_size=1).master_addr is None


def test_arguments_beat_single_variables() -> None:
    environ = recording("torchrun_one_node")[0]
    found = detect_environment(environ, rank=1, master_port=1234)
    assert (found.rank, found.world_size, found.master_addr, found.master_port) == (1, 2, "localhost", 1234)


def test_own_processes_inside_a_launcher_take_nothing_from_it() -> None:
    # One SLURM task that starts four processes by itself.
    environ = recording("srun_even")[2]
    found = detect_environment(environ, rank=3, world_size=8, master_addr="127.0.0.1", master_port=5000)
    assert (found.launcher, *places([found])[0]) == ("arguments", 3, 8, 3, 8, 0, 1)


def test_ranks_of_one_node_have_a_place_of_their_own_there() -> None:
    found = detect_environment({}, rank=1, world_size=2, node_local_size=2, master_addr="a", master_port=1)
    assert (found.node_local_rank, found.node_rank, found.node_world_size) == (1, 0, 1)


def test_arguments_for_two_nodes() -> None:
    given = {"node_local_rank": 1, "node_local_size": 3, "node_rank": 1, "node_world_size": 2}
    found = detect_environment({}, rank=4, world_size=6, master_addr="h", master_port=5000, **given)
    assert places([found]) == [(4, 6, 1, 3, 1, 2)]


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "4000",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
TWO = {"rank": 1, "world_size": 2}
BAD = [
    ({**TORCHRUN, "RANK": "one"}, {}, "RANK is 'one'"),
    ({**TORCHRUN, "RANK": ""}, {}, "RANK is ''"),
    ({**TORCHRUN, "RANK": "4"}, {}, "RANK=4 is outside 0 to 3, as WORLD_SIZE=4"),
    ({**TORCHRUN, "RANK": "-1"}, {}, "RANK=-1"),
    ({**TORCHRUN, "WORLD_SIZE": "0"}, {}, "WORLD_SIZE=0"),
    ({**TORCHRUN, "LOCAL_RANK": "2"}, {}, "LOCAL_RANK=2"),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, {}, "LOCAL_WORLD_SIZE=4 ranks on this node do not fit WORLD_SIZE=4"),
    ({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}, {}, "LOCAL_WORLD_SIZE=2"),
    ({**TORCHRUN, "GROUP_RANK": "2"}, {}, "GROUP_RANK=2"),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, {}, "MASTER_PORT=70000"),
    ({**TORCHRUN, "MASTER_PORT": "http"}, {}, "MASTER_PORT is 'http'"),
    (TORCHRUN, {"rank": 9}, "argument rank=9"),
    (TORCHRUN, {"world_size": 8}, "rank and world_size"),
    ({**SRUN, "SLURM_PROCID": "x"}, {}, "SLURM_PROCID"),
    ({**SRUN, "SLURM_PROCID": "4"}, {}, "SLURM_PROCID=4"),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "3"}, {}, "SLURM_STEP_TASKS_PER_NODE=3"),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x2", "SLURM_TASKS_PER_NODE": "2x2"}, {}, "2x2"),
    ({**SRUN, "SLURM_STEP_NODELIST": "a[1-"}, {}, r"a\[1-"),
    ({}, {"rank": 1}, "rank=1 .* rank and world_size"),
    ({}, {"world_size": 2}, "rank and world_size"),
    ({}, {"rank": 1, "world_size": 2}, "master_addr, master_port"),
    ({}, {"rank": 2, "world_size": 2, "master_addr": "h", "master_port": 1}, "argument rank=2"),
    ({}, {"rank": True, "world_size": 2}, "argument rank must be an integer, got True"),
    ({}, {"rank": "0", "world_size": 2}, "argument rank must be an integer, got '0'"),
    ({}, {"rank": 0, "world_size": 4, "node_rank": 0}, "node_local_rank, node_local_size, node_world_size"),
    ({}, {"rank": 0, "world_size": 0}, "world_size=0"),
    ({"MASTER_PORT": "99999", "MASTER_ADDR": "h"}, TWO, "MASTER_PORT=99999 must be a port"),
    ({"MASTER_PORT": "9.5", "MASTER_ADDR": "h"}, TWO, "MASTER_PORT is '9.5'"),
    ({"MASTER_PORT": "9"}, {**TWO, "master_port": 99999, "master_addr": "h"}, "argument master_port=99999 must be"),
    ({**SRUN, "MASTER_PORT": "99999"}, {}, "MASTER_PORT=99999 must be a port"),
    ({**SRUN, "MASTER_PORT": "9"}, {"master_port": 0}, "argument master_port=0 must be a port"),
    ({**SRUN, "SLURM_LOCALID": "2"}, {}, "SLURM_LOCALID=2 .* 0 to 1, as SLURM_STEP_TASKS_PER_NODE=2 says"),
    ({**SRUN, "SLURM_PROCID": "9"}, {"world_size": 4}, "SLURM_PROCID=9 .* 0 to 3, as argument world_size=4 says"),
    (TORCHRUN, {"node_local_rank": 7}, "argument node_local_rank=7 .* as LOCAL_WORLD_SIZE=2 says"),
    ({**TORCHRUN, "MASTER_PORT": "0"}, {"rank": 0}, "MASTER_PORT=0 must be a port"),
    ({}, {**TWO, "node_rank": 0, "node_world_size": 1}, "node_rank=0, node_world_size=1 leaves node_local_rank, node_"),
]


@pytest.mark.parametrize(("environ", "given", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_wrong_value_is_told_with_where_it_came_from(
    environ: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        detect_environment(environ, **given)


def test_callers_name_their_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        LaunchError, match="argument group_local_rank=2 is outside 0 to 1, as argument group_local_size=2"
    ):
        setup_distributed_process_group(0, 2, group_local_rank=2, group_local_size=2)
    with pytest.raises(
        LaunchError, match="group_rank=0 leaves group_local_rank, group_local_size, group_world_size, mas"
    ):
        setup_distributed_process_group(0, 2, group_rank=0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(LaunchError, match="^MASTER_PORT=99999 must be a port from 1 to 65535"):
        setup_distributed_process_group(0, 2)


CELLS = [
    ("3,3", None, {}, r"sizes \(3, 3\) sum to 6, .* sum to 1 \(asked for by XFFL_FEDERATED=3,3\)"),
    ("4,4", None, {"federated": (3, 3)}, r"sizes \(3, 3\) sum to 6, .* give sizes that sum to 1$"),
    (None, "2", {}, r"replica size .* \(asked for by XFFL_HSDP=2\)"),
    (None, "2", {"hsdp": 3}, r"replica size .* divides all$"),
    ("1", "2", {}, r"replica size .* \(asked for by XFFL_FEDERATED=1 and XFFL_HSDP=2\)"),
    (None, "2", {"device_parameters": DeviceParameters()}, "^XFFL_HSDP=2 was asked for, .* leave XFFL_HSDP out"),
    (None, None, {"hsdp": 2, "device_parameters": DeviceParameters()}, "^hsdp=2 was asked for, .* leave hsdp out"),
    ("x", None, {}, "XFFL_FEDERATED is 'x'"),
    (None, "x", {}, "XFFL_HSDP is 'x'"),
]


@pytest.mark.parametrize(("sizes", "hsdp", "given", "message"), CELLS, ids=[message for *_, message in CELLS])
def test_cells_that_do_not_fit_are_told_with_where_they_came_from(
    sizes: str | None, hsdp: str | None, given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("XFFL_FEDERATED", sizes), ("XFFL_HSDP", hsdp)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(XfflError, match=message):
        setup_distributed_process_group(device="cpu", **given)


def test_port_0_is_none() -> None:
    with pytest.raises(LaunchError, match="must be a port"):
        detect_environment({}, rank=0, world_size=2, master_addr="a", master_port=0)


# Hosts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ("login",)),
        ("a[1-3,7],b09,login", ("a1", "a2", "a3", "a7", "b09", "login")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("r[1-2]n[1,3]x", ("r1n1x", "r1n3x", "r2n1x", "r2n3x")),
        ("b,a", ("b", "a")),
        ("[1-2]", ("1", "2")),
    ],
)
def test_host_lists(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["", "a[1-", "a]", "a[3-1]", "a[x]", "a,,b", "a[1-2]],b", "a[]", ",a"])
def test_bad_host_lists(text: str) -> None:
    with pytest.raises(LaunchError, match="host list"):
        expand_hosts(text)


def test_counts() -> None:
    assert expand_counts("4(x2),3") == (4, 4, 3)
    assert expand_counts("1") == (1,)
    for text in ("", "4x2", "4(x)", "4,,1"):
        with pytest.raises(LaunchError, match="tasks per node"):
            expand_counts(text)


def test_node_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_address("localhost") == "localhost"
    monkeypatch.setattr(hosts, "resolve", lambda name: ())
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None)
    assert node_address("a1") == "a1"
    shown = "NodeName=a1 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.0.0.7 NodeHostName=vm Port=17001"
    monkeypatch.setattr(hosts.shutil, "which", lambda name: "/usr/bin/scontrol")
    monkeypatch.setattr(
        hosts.subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(command, 0, stdout=shown)
    )
    assert node_address("a1") == "10.0.0.7"


def test_interfaces() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(LaunchError, match="XFFL_IFNAME: .* give one of: .*lo"):
        interface_address("nosuch0")
    environ: dict[str, str] = {}
    assert use_interface(None, environ) is None and environ == {}
    assert use_interface("lo", environ) == "lo"
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert use_interface(None, {"XFFL_IFNAME": "lo"}) == "lo"
    with pytest.raises(LaunchError, match=f"'nosuch0' does not exist on {socket.gethostname()}"):
        use_interface(None, {"XFFL_IFNAME": "nosuch0"})


# The federation that is asked for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4", 4), ("4,4", (4, 4)), ("(4, 2)", (4, 2)), ("[1,2,3]", (1, 2, 3)), (" 8 ", 8), ("(4,)", 4), ("-1", -1)],
)
def test_sizes(text: str, sizes: object) -> None:
    assert parse_sizes(text, "--federated") == sizes


@pytest.mark.parametrize("text", ["", "four", "4;4", "4,,4", "4.0", "(4", "()"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--federated"):
        parse_sizes(text, "--federated")


def test_requested_federation() -> None:
    assert requested_federation({}) == (None, None)
    assert requested_federation({"XFFL_FEDERATED": "", "XFFL_HSDP": " "}) == (None, None)
    assert requested_federation({"XFFL_FEDERATED": "4,2", "XFFL_HSDP": "2"}) == ((4, 2), 2)
    with pytest.raises(ConfigError, match="XFFL_FEDERATED"):
        requested_federation({"XFFL_FEDERATED": "4 and 4"})
    with pytest.raises(ConfigError, match="XFFL_HSDP"):
        requested_federation({"XFFL_HSDP": "two"})


# A cell of an elastic run ---------------------------------------------------------------------------------------------


def test_how_long_a_cell_waits_for_others() -> None:
    assert meeting_timeout_of({}) is meeting_timeout_of({"XFFL_MEETING_TIMEOUT": " "}) is None
    assert meeting_timeout_of({"XFFL_MEETING_TIMEOUT": "2.5"}) == 2.5
    for text in ("0", "long", "-1", "nan", "inf"):
        with pytest.raises(LaunchError, match=r"XFFL_MEETING_TIMEOUT must be .*give seconds"):
            meeting_timeout_of({"XFFL_MEETING_TIMEOUT": text})


def test_elastic_cell_and_its_restarts() -> None:
    lighthouse = {"XFFL_LIGHTHOUSE": "http://a:1"}
    assert elastic_cell({}) is elastic_cell(lighthouse) is elastic_cell({"XFFL_CELL": "1/3"}) is None
    assert (
        elastic_cell({"XFFL_CELL": "1/3", **lighthouse})
        == elastic_cell({"XFFL_CELL": "1/4,2,2", **lighthouse})
        == (1, 3)
    )
    with pytest.raises(ConfigError, match="XFFL_CELL is '3/3'"):
        elastic_cell({"XFFL_CELL": "3/3", **lighthouse})
    assert (
        parse_lighthouse("it", " file:a/b ") == f"file:{Path.cwd()}/a/b"
        and parse_lighthouse("it", "a:1") == "http://a:1"
    )
    assert restarts_of({}) == restarts_of({"XFFL_RESTARTS": " "}) == 0
    assert restarts_of({"XFFL_RESTARTS": "2", "SLURM_RESTART_COUNT": "1"}) == 2
    assert restarts_of({"SLURM_RESTART_COUNT": "1"}) == 1
    # Submitted for the third time, and then requeued: the cell starts for the fourth time.
    assert restarts_of({"XFFL_EARLIER_JOBS": "2", "SLURM_RESTART_COUNT": "1"}) == 3
    # In a cell that xffl exec has started, all that was before is in its count.
    assert restarts_of({"XFFL_RESTARTS": "4", "XFFL_EARLIER_JOBS": "2", "SLURM_RESTART_COUNT": "1"}) == 4
    for name in ("XFFL_RESTARTS", "XFFL_EARLIER_JOBS", "SLURM_RESTART_COUNT"):
        for text in ("-1", "two"):
            with pytest.raises(LaunchError, match=f"{name} must be an integer of 0 or more, got '{text}'"):
                restarts_of({name: text})


@pytest.mark.parametrize(
    ("environ", "asked", "is_said"),
    [
        ({}, None, True),
        ({}, (1, 1), False),
        ({"XFFL_FEDERATED": "1,1"}, None, False),
        ({"XFFL_CELL": "0/2"}, None, False),
    ],
)
def test_sizes_in_the_variable_of_the_upstream_project_are_told(
    environ: dict[str, str],
    asked: tuple[int, ...] | None,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("XFFL_FEDERATED", "XFFL_CELL"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"XFFL_FEDERATED_LOCAL_WORLD_SIZE": "1,1", **environ}.items():
        monkeypatch.setenv(name, text)
    accept_cells(asked, 2, 2, None)
    told = capfd.readouterr().err
    assert ("set XFFL_FEDERATED=1,1" in told) == is_said
    assert told.count("\n") == int(is_said)
    accept_cells(asked, 2, 2, None, is_speaker=False)
    assert capfd.readouterr().err == ""
    assert "XFFL_FEDERATED_LOCAL_WORLD_SIZE" not in requested_settings()  # no key of a configuration


def test_check_world_is_on_or_off() -> None:
    assert [checks_world({"XFFL_CHECK_WORLD": text}) for text in ("", "0", " 1 ")] == [False, False, True]
    assert not checks_world({})
    with pytest.raises(ConfigError, match="XFFL_CHECK_WORLD is 'yes'; give 1 .* or 0"):
        checks_world({"XFFL_CHECK_WORLD": "yes"})


def test_a_token_that_is_no_text_or_endless_is_told_without_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="^XFFL_TOKEN has a token that is not UTF-8 text; make one") as told:
        token_of({"XFFL_TOKEN": "secret" * 3 + "\udcff"})
    assert told.value.__cause__ is None and told.value.__suppress_context__
    path = tmp_path / "token"
    path.touch(mode=0o600)
    os.truncate(path, 2**40)
    with pytest.raises(LaunchError, match="XFFL_TOKEN_FILE .* cannot be read .*at most 65536 are read"):
        token_of({"XFFL_TOKEN_FILE": str(path)})
    with pytest.raises(LaunchError, match="at most 65536 are read"):
        make_token_file(path)


def test_mode_and_text_of_a_token_are_those_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, own = tmp_path / "shown", tmp_path / "own"
    shown.write_text("a" * 32)
    shown.chmod(0o644)
    own.write_text("b" * 32)
    own.chmod(0o600)
    stat_file = os.stat

    def stat_then_replace(path: Any, **options: Any) -> os.stat_result:
        found = stat_file(path, **options)
        if path == str(own):
            shown.replace(own)
        return found

    monkeypatch.setattr(os, "stat", stat_then_replace)
    assert token_of({"XFFL_TOKEN_FILE": str(own)}) == b"b" * 32


def test_a_token_file_is_made_whole_and_an_empty_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "token"
    make_token_file(path)
    token = token_of({"XFFL_TOKEN_FILE": str(path)})
    make_token_file(path)
    assert token_of({"XFFL_TOKEN_FILE": str(path)}) == token and os.listdir(path.parent) == ["token"]
    for left in ("", "\n"):  # of a kill, or a full disk
        path.write_text(left)
        make_token_file(path)
        assert len(token_of({"XFFL_TOKEN_FILE": str(path)})) == 64 and path.stat().st_mode & 0o777 == 0o600

    def refuse(*paths: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    def fill(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        path.unlink()
        make_token_file(path)
    assert len(token_of({"XFFL_TOKEN_FILE": str(path)})) == 64
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LaunchError, match="cannot be read .*a FIFO"):
        make_token_file(path)
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        with pytest.raises(LaunchError, match=rf"{path} cannot be written .*No space left on device: '{path}'"):
            make_token_file(path)
    assert not list(path.parent.iterdir())
