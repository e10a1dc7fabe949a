"""Real launchers. A missing component skips its tests with the reason, or fails them where XFFL_REQUIRE_CLUSTER=1."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.exec_jobs import finish, start
from tests.cluster.hosts import Hosts, slurm_over, two_hosts_up
from tests.ports import WORKER, WORKERS, free_ports
from xffl.cluster.recognition.launchers import launcher_variables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEADLINE_S = 120
JOBS = 750  # with ports of their own, see xffl.cluster.recognition.launchers
MINISLURM = HERE / "slurm" / "minislurm.sh"
TUN = Path("/dev/net/tun")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs system packages (tests/cluster/install.sh)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    # It takes longest, mostly waiting for SLURM: what runs beside it has the processors meanwhile.
    items.sort(key=lambda item: item.path.name != "test_submit.py")


def require(present: object, what: str) -> None:
    """Skip the test where a component is missing, or fail it where all components are required."""
    if present:
        return
    reason = f"{what} is missing; run tests/cluster/install.sh as root"
    if os.environ.get("XFFL_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def base_environ() -> dict[str, str]:
    """Give this process's environment without what a launcher around the tests may have set."""
    foreign = ("SLURM_", "OMPI_", "PMI", "MPI_LOCAL", "MPI4PY_", "XFFL_", "TORCHELASTIC", "MASTER_", "PBS_", "LSB_")
    known = launcher_variables()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in known}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1"}


class Mpi:
    """One MPI: its mpirun, and the variables that make mpi4py load its library."""

    def __init__(self, mpirun: Path, options: Sequence[str], environ: dict[str, str]) -> None:
        self.mpirun, self.options, self.environ = mpirun, list(options), environ

    def command(self, processes: int, *options: str) -> list[str]:
        return [str(self.mpirun), *self.options, *options, "-n", str(processes)]


@pytest.fixture(scope="session")
def openmpi(base_environ: dict[str, str]) -> Mpi:
    """Debian's Open MPI. With MPICH's wheel beside it, mpi4py must be told which of the two to load."""
    found = shutil.which("mpirun.openmpi")
    require(found, "Debian's Open MPI (openmpi-bin)")
    require(importlib.util.find_spec("mpi4py"), "mpi4py")
    # Without ob1 over TCP, Open MPI 4 crashes where several nodes of SLURM are one host.
    transport = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    environ = {**base_environ, **transport, "MPI4PY_MPIABI": "openmpi"}
    return Mpi(Path(str(found)), ["--allow-run-as-root", "--oversubscribe"], environ)


@pytest.fixture(scope="session")
def mpich(base_environ: dict[str, str]) -> Mpi:
    """MPICH from its PyPI wheel, in this virtual environment, where mpi4py finds it first."""
    folder = Path(sys.executable).parent
    require((folder / "mpichversion").exists(), "MPICH's wheel (pip install mpich)")
    require(importlib.util.find_spec("mpi4py"), "mpi4py")
    return Mpi(folder / "mpirun", [], base_environ)


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each of the two, one after the other."""
    chosen: Mpi = request.getfixturevalue(request.param)
    return chosen


def require_slurm() -> None:
    """Require what a SLURM of one's own is made of."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        require(shutil.which(program, path=path), program)
    require(os.geteuid() == 0, "root, which SLURM's daemons need,")


@contextmanager
def slurm_up(
    cells: str, base_environ: dict[str, str], folder: Path, within: Sequence[str] = (), **more: str
) -> Iterator[dict[str, str]]:
    """Bring up a SLURM with the cells that are asked for (``a:2 b:2``), and give the environment for its commands.

    munge's socket has a path limit of 108 characters, so the folder's name must be short. ``within`` stands before its
    commands, to run them in a network namespace.
    """
    require_slurm()
    ports = free_ports(1 + sum(int(nodes) for nodes in re.findall(r":(\d+)", cells)))
    names = {"MS_DIR": str(folder), "MS_CELLS": cells, "MS_PORTS": " ".join(map(str, ports))}
    # A job's number gives the port where its ranks meet, and all these clusters are one host.
    environ = {**base_environ, **names, "MS_FIRST_JOB": str(1 + WORKER * (JOBS // WORKERS)), **more}
    try:
        up = subprocess.run(
            [*within, str(MINISLURM), "up"], env=environ, stderr=subprocess.PIPE, timeout=DEADLINE_S, check=False
        )
        if up.returncode:
            pytest.fail(f"{MINISLURM.name} up: {os.fsdecode(up.stderr)}", pytrace=False)
        yield {**base_environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([*within, str(MINISLURM), "down"], env=environ, check=False, timeout=DEADLINE_S)


@pytest.fixture(scope="session")
def slurm(base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Bring up a SLURM of two cells of two nodes, and give the environment for its commands."""
    with slurm_up("a:2 b:2", base_environ, tmp_path_factory.mktemp("slurm") / "s") as environ:
        yield environ


@pytest.fixture(scope="session")
def slow_link() -> None:
    """Require what cells of network namespaces and the slow link between them are made of."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    require(os.geteuid() == 0, "root, which network namespaces need,")
    require(shutil.which("ip", path=path), "ip (iproute2)")
    require(TUN.is_char_device(), f"the device {TUN}")
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, timeout=DEADLINE_S, check=False
    )
    require(probe.returncode == 0, "the right to make network namespaces (CAP_SYS_ADMIN)")


@pytest.fixture(scope="session")
def two_hosts(
    slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """Bring up two hosts behind a slow link, and a third to log in."""
    with two_hosts_up(base_environ, tmp_path_factory.mktemp("hosts") / "net") as hosts:
        yield hosts


@pytest.fixture(scope="session")
def two_hosts_slurm(two_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Bring up a SLURM over the two hosts, and give the environment for its commands, which run on the head."""
    require_slurm()
    with slurm_over(two_hosts, tmp_path_factory.mktemp("slurm") / "s") as environ:
        yield environ


def output_of(command: Sequence[str], environ: dict[str, str], folder: Path, deadline_s: float = DEADLINE_S) -> str:
    """Run a command in a folder, which has to end well, and return what it prints."""
    code, out, err = finish(start(command, environ, folder), deadline_s)
    assert code == 0, f"{' '.join(command)}\nexit code {code}\n{out}\n{err}"
    return out


@pytest.fixture
def run() -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs a command and gives the JSON lines of its ranks, in rank order."""

    def start(command: Sequence[str], environ: dict[str, str]) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in output_of(command, environ, ROOT).splitlines() if line.startswith("{")]
        return sorted(lines, key=lambda line: int(line["rank"]))

    return start
