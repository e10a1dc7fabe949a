"""Where the processes of a job listen, for each way to start one on this machine: the table of docs/security.rst.

Under mpirun, srun and ssh the ranks of test_mpi.py, test_exec_slurm.py and test_exec_ssh.py tell it themselves; replica
groups are in tests/ranks/test_fault_tolerance.py, the doctor in tests/unit/test_doctor_exchange.py. The processes of a
job are found by a variable that all of them have, whoever has started them, and looked at as long as the job runs, so
that a socket of a moment is seen, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tests.cluster.conftest import DEADLINE_S, require
from tests.cluster.exec_jobs import XFFL
from tests.listening import Listener, find_listeners
from xffl.cluster.network import list_interfaces

MARK = "LISTENING_OF_JOB"
SCRIPT = """\
import os
import sys
import time

import torch

import xffl
from xffl.distributed import ElasticParameters

torch.manual_seed(0)
url = os.environ.get("XFFL_LIGHTHOUSE")
# However busy the machine is, neither cell makes its rounds before the other one has come.
elastic = ElasticParameters(lighthouse=url, least_cells=2) if url else None
with xffl.session(device="cpu", elastic=elastic) as state:
    model = xffl.shard(torch.nn.Linear(4, 4), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xffl.FederatedScaling(model, optimizer, state, every=2):
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    time.sleep(1)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
LOOPBACK = {"127.0.0.1"}

EXPECTED = {
    ("exec", "rank"): LOOPBACK,
    ("one process", "rank"): LOOPBACK,
    ("torchrun", "torchrun"): {"::"},  # torch's own: no option of torchrun names an address
    ("torchrun", "rank"): LOOPBACK,
    ("elastic", "lighthouse"): LOOPBACK,
    ("elastic", "rank"): LOOPBACK,
}


def kind_of(process: int) -> str:
    """Name what a process of a job is by its command line."""
    words = Path("/proc", str(process), "cmdline").read_text(errors="replace").split("\0")
    for word, kind in (("torch.distributed.run", "torchrun"), ("lighthouse", "lighthouse")):
        if word in words:
            return kind
    return "rank" if "train.py" in words else "other"


def jobs_of_processes() -> dict[int, str]:
    """Return the processes that have the mark, with what it says."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                environ = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                for one in environ:
                    if one.startswith(f"{MARK}=".encode()):
                        found[int(entry)] = os.fsdecode(one.partition(b"=")[2])
    return found


def watch(jobs: dict[str, subprocess.Popen[bytes]]) -> dict[tuple[str, str], set[Listener]]:
    """Return all sockets that listened while the jobs ran, by job and kind of process."""
    seen: defaultdict[tuple[str, str], set[Listener]] = defaultdict(set)
    deadline = time.monotonic() + DEADLINE_S
    while any(job.poll() is None for job in jobs.values()):
        assert time.monotonic() < deadline, [name for name, job in jobs.items() if job.poll() is None]
        named = jobs_of_processes()
        for one in find_listeners(set(named)):
            with suppress(OSError):
                seen[named[one.process], kind_of(one.process)].add(one)
        time.sleep(0.1)
    return dict(seen)


def test_the_table_of_what_listens_where(base_environ: dict[str, str], tmp_path: Path) -> None:
    """On a host whose name is an address of its network, where gloo and stores would listen by themselves."""
    require(os.geteuid() == 0, "root, which a host's name of one's own needs,")
    require(find_spec("torchft"), "torchft")
    address = next((one.address for one in list_interfaces() if one.address and not one.is_loopback), None)
    require(address, "an interface besides loopback")
    (tmp_path / "train.py").write_text(SCRIPT)
    named = ["unshare", "--uts", "sh", "-c", f'hostname {address}; exec "$@"', "sh"]
    ways = {
        "exec": [*XFFL, "exec", "--processes", "2", "--federated", "1,1", "train.py"],
        "one process": [sys.executable, "train.py"],
        "torchrun": [*TORCHRUN, "train.py"],
        "elastic": [*XFFL, "exec", "--elastic", "--federated", "1,1", "train.py"],
    }
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in ways.items():
            environ = {**base_environ, MARK: name, "XFFL_TOKEN": "a token that is known to both of the cells"}
            with open(tmp_path / f"{name}.log", "wb") as log:
                command = [*named, *words]
                jobs[name] = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=log, stderr=subprocess.STDOUT)
        seen = watch(jobs)
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ways}
    failed = [f"{name}:\n{logs[name]}" for name, job in jobs.items() if job.returncode != 0]
    assert not failed, "\n".join(failed)
    table = {where: {one.address for one in found} for where, found in seen.items()}
    for name in ways:  # what a process starts has its sockets for a moment
        assert table.pop((name, "other"), LOOPBACK) == LOOPBACK
    assert table == EXPECTED
