"""Real ``mpirun`` over two hosts, network namespaces with a slow link between them, with and without a SLURM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.hosts import ADDRESSES, RSH, Hosts, spread

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEMO = ROOT / "examples" / "01_digits" / "train.py"
EPOCHS = 2
DEADLINE_S = 120
Run = Callable[..., list[dict[str, Any]]]
WHERE = [sys.executable, str(HERE / "where.py")]
# Gloo warns, once for each connection, that these hosts' addresses have no names.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "XFFL_IFNAME": "eth0", "OMPI_MCA_btl_tcp_if_include": "eth0"}


def ranks_over_ssh(mpi: Mpi, hosts: Hosts, ranks: Sequence[int], **more: str) -> tuple[list[str], dict[str, str]]:
    """Return how ``mpirun`` on the host a1 starts ranks on both, with a stand-in for ssh, and its environment."""
    environ = {**mpi.environ, **hosts.environ, **QUIET, **more}
    if mpi.mpirun.name.endswith("openmpi"):
        kept = [word for name in ("PYTHONPATH", "MPI4PY_MPIABI", "OMP_NUM_THREADS") for word in ("-x", name)]
        kept += [word for name in (*QUIET, *more) for word in ("-x", name)]
        # Both hosts are this machine: the first ranks of both would be bound to the same core.
        options = ["--mca", "plm_rsh_agent", str(RSH), "--host", spread(ranks), "--bind-to", "none", *kept]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(RSH), "-iface", "eth0", "-hosts", spread(ranks)]
    return hosts.command("a1", *mpi.command(sum(ranks), *options)), environ


def ranks_in_allocation(mpi: Mpi, hosts: Hosts, slurm: dict[str, str], ranks: Sequence[int], **more: str) -> Any:
    """Return the same for ``mpirun`` inside of ``salloc`` on the head: it learns the hosts from SLURM."""
    environ = {**mpi.environ, **slurm, **QUIET, **more}
    # With four CPUs on each node, SLURM fills the first and then the second.
    even = [f"--ntasks-per-node={ranks[0]}"] if len(set(ranks)) == 1 else []
    asked = ["salloc", "-Q", "-N", str(len(ranks)), "-n", str(sum(ranks)), *even]
    return hosts.command("head", *asked, *mpi.command(sum(ranks))), environ


def check_places(found: list[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Compare where the ranks say that they are with where they were to be started."""
    expected = [(local, size, node, len(ranks)) for node, size in enumerate(ranks) for local in range(size)]
    names = ("node_local_rank", "node_local_size", "node_rank", "node_world_size")
    assert [tuple(place[name] for name in names) for place in found] == expected
    assert {place["master_addr"] for place in found} == {ADDRESSES["a1"]}
    assert len({place["master_port"] for place in found}) == 1


def measured(out: Path) -> list[dict[str, Any]]:
    """Return what the example has measured, but for the time."""
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.fixture(scope="module")
def on_this_machine(
    base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Sequence[int]], list[dict[str, Any]]]:
    """Return a function that gives what the example measures in local processes, which know of no other host."""
    known: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def give(ranks: Sequence[int]) -> list[dict[str, Any]]:
        sizes = tuple(ranks)
        if sizes not in known:
            out = tmp_path_factory.mktemp("local") / "metrics.jsonl"
            job = ["exec", "--processes", str(sum(sizes)), "--federated", ",".join(map(str, sizes))]
            script = [str(DEMO), "--epochs", str(EPOCHS), "--out", str(out)]
            command = [sys.executable, "-m", "xffl", *job, *script]
            subprocess.run(command, env=base_environ, check=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
            known[sizes] = measured(out)
        return known[sizes]

    return give


def check_training(
    run: Run, hosts: Hosts, command: Sequence[str], environ: dict[str, str], out: Path, expected: list[dict[str, Any]]
) -> None:
    """Train the example, and compare its numbers, and what crossed the link, with those of local processes."""
    before = hosts.crossed()
    run([*command, sys.executable, str(DEMO), "--epochs", str(EPOCHS), "--out", str(out)], environ)
    after = hosts.crossed()
    # The same sums in the same order: nothing but the place of the ranks differs, so not one bit does.
    assert measured(out) == expected
    assert expected[-1]["accuracy"] > 0.85
    # Each round each cell sends a copy of the model. Its headers, the votes and the parting come on top.
    across = sum(record["bytes_across"] for record in expected)
    assert across > 0
    sent = [new - old for new, old in zip(after, before, strict=True)]
    assert all(across / 2 < way < across / 2 + 2**20 for way in sent), (sent, across)


@pytest.mark.parametrize("ranks", [(2, 2), (4, 2)])
def test_places_over_two_hosts(ranks: tuple[int, ...], mpi: Mpi, two_hosts: Hosts, run: Run) -> None:
    command, environ = ranks_over_ssh(mpi, two_hosts, ranks)
    check_places(run([*command, *WHERE], environ), ranks)


def test_training_over_two_hosts(
    openmpi: Mpi, two_hosts: Hosts, run: Run, tmp_path: Path, on_this_machine: Any
) -> None:
    command, environ = ranks_over_ssh(openmpi, two_hosts, (2, 2), XFFL_FEDERATED="2,2")
    out = tmp_path / "metrics.jsonl"
    check_training(run, two_hosts, command, environ, out, on_this_machine((2, 2)))


def test_training_in_an_allocation_of_two_hosts(
    mpich: Mpi, two_hosts: Hosts, two_hosts_slurm: dict[str, str], run: Run, tmp_path: Path, on_this_machine: Any
) -> None:
    """The ranks find the cells as well: what SLURM tells of its network reaches them through mpirun's daemons."""
    command, environ = ranks_in_allocation(mpich, two_hosts, two_hosts_slurm, (1, 1), XFFL_FEDERATED="auto")
    out = tmp_path / "metrics.jsonl"
    check_training(run, two_hosts, command, environ, out, on_this_machine((1, 1)))


@pytest.mark.parametrize("ranks", [(2, 2), (4, 2)])
def test_places_in_an_allocation_of_two_hosts(
    ranks: tuple[int, ...], mpi: Mpi, two_hosts: Hosts, two_hosts_slurm: dict[str, str], run: Run
) -> None:
    command, environ = ranks_in_allocation(mpi, two_hosts, two_hosts_slurm, ranks)
    found = run([*command, *WHERE], environ)
    check_places(found, ranks)
    assert {place["launcher"] for place in found} < {"openmpi", "mpich"}


def test_a_killed_rank_ends_the_job(openmpi: Mpi, two_hosts: Hosts) -> None:
    command, environ = ranks_over_ssh(openmpi, two_hosts, (1, 1), XFFL_FEDERATED="1,1")
    before, others = sum(two_hosts.crossed()), set(two_hosts.processes("a1", "b1"))
    script = [sys.executable, str(DEMO), "--epochs", "1000000"]
    job = subprocess.Popen(
        [*command, *script],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while sum(two_hosts.crossed()) - before < 2**20:  # a few rounds have been made
            assert job.poll() is None and time.monotonic() < deadline, "no round was made"
            time.sleep(0.1)
        (victim,) = (pid for pid in two_hosts.processes("b1") if is_rank(pid))
        os.kill(victim, signal.SIGKILL)
        output, _ = job.communicate(timeout=30)
        assert job.returncode != 0, output
        deadline = time.monotonic() + 10
        while left := set(two_hosts.processes("a1", "b1")) - others:
            assert time.monotonic() < deadline, [command_line(pid) for pid in left]
            time.sleep(0.1)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; none where it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in words.split(b"\0")]


def is_rank(pid: int) -> bool:
    """Tell whether a process runs the example itself; launchers have it on their command lines, too."""
    return command_line(pid)[:2] == [sys.executable, str(DEMO)]
