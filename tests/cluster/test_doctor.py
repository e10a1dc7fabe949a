"""``xffl doctor`` on real components: hosts that are well, and faults that are planted on one of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.conftest import DEADLINE_S, ROOT
from tests.cluster.exec_jobs import finish, start
from tests.cluster.hosts import ADDRESSES, RSH, Hosts
from xffl.costs import EXCHANGE_FORMAT

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

DOCTOR = [sys.executable, "-m", "xffl", "doctor", "--json"]
QUICK = [*DOCTOR, "--timeout", "4"]
PORT = 41873
"""Where the ranks meet on hosts that nobody else uses; below the ports that Linux hands out there."""


class Told:
    """What one run of the doctor said."""

    def __init__(self, exit_code: int, output: str, errors: str, seconds: float) -> None:
        assert "{" in output, f"exit code {exit_code}\n{output}\n{errors}"
        self.exit_code, self.seconds = exit_code, seconds
        self.report: dict[str, Any] = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]

    def find(self, check: str) -> list[dict[str, str]]:
        return [finding for finding in self.report["findings"] if finding["check"] == check]

    def wrong(self) -> set[str]:
        """Return the checks that found an error."""
        return {finding["check"] for finding in self.report["findings"] if finding["status"] == "error"}

    def statuses(self, check: str) -> set[str]:
        return {finding["status"] for finding in self.find(check)}


def ask(command: Sequence[str], environ: Mapping[str, str], cwd: Path = ROOT) -> Told:
    """Run a command whose first rank tells."""
    started = time.monotonic()
    return Told(*finish(start(command, environ, cwd), DEADLINE_S), time.monotonic() - started)


def ask_hosts(
    hosts: Hosts,
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    before: Mapping[str, Sequence[str]] | None = None,
    own: Mapping[str, Mapping[str, str]] | None = None,
    port: int = PORT,
    cwd: Path = ROOT,
) -> dict[str, Told | None]:
    """Run a rank on each of the hosts a1 and b1 as torchrun would, and return who told what.

    ``before`` are words that stand before a host's command, ``own`` variables of a host.
    """
    started = time.monotonic()
    running = {}
    for rank, host in enumerate(("a1", "b1")):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        place |= {"GROUP_WORLD_SIZE": 2, "MASTER_ADDR": ADDRESSES["a1"], "MASTER_PORT": port}
        variables = {**hosts.environ, **{name: str(value) for name, value in place.items()}}
        variables |= {**(environ or {}), **(own or {}).get(host, {})}
        words = hosts.command(host, *(before or {}).get(host, ()), *command)
        running[host] = subprocess.Popen(
            words,
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    found: dict[str, Told | None] = {}
    for host, process in running.items():
        output, errors = process.communicate(timeout=DEADLINE_S)
        told = Told(process.returncode, output, errors, time.monotonic() - started) if output else None
        if told is None:
            assert process.returncode == 0, errors
        found[host] = told
    return found


def on_hosts(hosts: Hosts, command: Sequence[str], environ: Mapping[str, str] | None = None, **more: Any) -> Told:
    """Do as :func:`ask_hosts`, where rank 0 alone tells."""
    found = ask_hosts(hosts, command, environ, **more)
    assert found["b1"] is None and found["a1"] is not None, found
    return found["a1"]


@contextmanager
def closed(hosts: Hosts, host: str, ports: str, action: str) -> Iterator[None]:
    """Keep a host from connecting to ports of others, as a firewall would, by a rule of routing."""
    rule = ["pref", "1", "ipproto", "tcp", "dport", ports, action]
    base = ["ip", "-n", f"{hosts.prefix}-{host}", "rule"]
    subprocess.run([*base, "add", *rule], check=True, timeout=DEADLINE_S)
    try:
        yield
    finally:
        subprocess.run([*base, "del", *rule], check=True, timeout=DEADLINE_S)


@pytest.fixture
def on_one_node(tmp_path: Path) -> list[str]:
    """Return a command that sets $PLANTED for the second node of a step only."""
    script = tmp_path / "one_node.sh"
    script.write_text('#!/bin/sh\n[ "$SLURM_NODEID" = 1 ] && export $PLANTED\nexec "$@"\n')
    script.chmod(0o755)
    return [str(script)]


EXECUTE = ["srun", "-w", "a1,b1", "-N2", "-n3"]


# Hosts that are well --------------------------------------------------------------------------------------------------


def test_two_hosts_that_are_well(two_hosts: Hosts, tmp_path: Path) -> None:
    told = on_hosts(two_hosts, [*DOCTOR, "--federated", "1,1", "--shared", str(tmp_path)], {"XFFL_IFNAME": "eth0"})
    assert told.exit_code == 0 and told.wrong() == set(), told.report
    assert told.report["hosts"] == ["a1", "b1"] and told.report["ranks"] == 2
    for check in ("meeting", "interface", "versions", "clock", "ports", "shared folder", "torch", "cells"):
        assert told.statuses(check) == {"ok"}, (check, told.find(check))
    (added,) = told.find("all-reduce")
    # 4 MiB cross a link of 200 Mbit/s, 24 MiB/s, from each to the other.
    rate = float(added["text"].rpartition(" MiB/s")[0].split()[-1])
    assert added["status"] == "ok" and 1 < rate < 30, added
    assert not list(tmp_path.iterdir())


def test_a_step_in_cells_of_the_network(slurm: dict[str, str]) -> None:
    told = ask([*EXECUTE, *DOCTOR, "--federated", "auto"], slurm)
    assert told.exit_code == 0, told.report
    assert told.report["hosts"] == ["a1", "b1"] and told.report["ranks"] == 3
    assert [finding["text"] for finding in told.find("cells")] == ["2 cells of 2, 1"]
    assert told.statuses("all-reduce") == {"ok"}


def test_ranks_of_mpirun(openmpi: Mpi) -> None:
    told = ask([*openmpi.command(3), *QUICK], openmpi.environ)
    assert told.exit_code == 0 and told.report["ranks"] == 3 and len(told.report["hosts"]) == 1


def test_hosts_of_a_list(two_hosts: Hosts, tmp_path: Path) -> None:
    """Over what stands in for ssh there; the third host does not exist."""
    environ = {**two_hosts.environ, "XFFL_SSH": str(RSH), "XFFL_IFNAME": "eth0", "XFFL_FEDERATED": "1,2"}
    command = two_hosts.command("head", *QUICK, "--shared", str(tmp_path))
    told = ask([*command, "--hosts", "a1:1,b1:2"], environ)
    assert told.exit_code == 0 and told.report["hosts"] == ["a1", "b1"] and told.report["ranks"] == 3, told.report
    for check in ("ports", "shared folder", "ssh", "clock", "cells"):
        assert told.statuses(check) == {"ok"}, (check, told.report)
    told = ask([*command, "--hosts", "a1:1,b1:2,c1:1"], environ)
    assert told.exit_code == 1 and {"ssh"} <= told.wrong(), told.report
    assert [finding["host"] for finding in told.find("ssh") if finding["status"] == "error"] == ["c1"]
    assert told.statuses("ports") == {"ok"}


# An elastic run -------------------------------------------------------------------------------------------------------

CELL = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from xffl.elastic.lighthouse_client import Lighthouse
from xffl.elastic.roster import CellRecord
url, host = sys.argv[1:]
store = TCPStore(host, 0, None, True, timedelta(seconds=10), False)
line = Lighthouse(url, "0.0a", b"")
line.meet(CellRecord(0, 1, "0.0a", address=f"{host}:{store.port}"), 60.0)
print("met", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_an_elastic_run_is_reached_from_one_host_and_not_from_the_other(two_hosts: Hosts) -> None:
    """The lighthouse and a cell are on a1."""
    address, environ = f"{ADDRESSES['a1']}:29510", {**two_hosts.environ, "XFFL_IFNAME": "eth0"}
    words = [*QUICK, "--elastic", address]
    lighthouse = two_hosts.command("a1", sys.executable, "-m", "xffl", "lighthouse", "--bind", address)
    cell = two_hosts.command("a1", sys.executable, "-c", CELL, f"http://{address}", ADDRESSES["a1"])
    started = []
    try:
        started.append(subprocess.Popen(lighthouse, env=environ, cwd=ROOT))
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(cell, env=environ, cwd=ROOT, stdin=pipe, stdout=pipe, text=True))
        assert started[1].stdout is not None and started[1].stdout.readline() == "met\n"
        command = [*two_hosts.command("head", *words), "--hosts", "a1:1,b1:1"]
        told = ask(command, {**environ, "XFFL_SSH": str(RSH)})
        for check in ("lighthouse", "heartbeats", "stores", "ports"):
            assert told.statuses(check) == {"ok"}, (check, told.report)
        with closed(two_hosts, "b1", "32768-60999", "prohibit"):
            told = on_hosts(two_hosts, words, {"XFFL_IFNAME": "eth0"}, port=20317)
        assert told.exit_code == 1 and told.wrong() == {"ports", "stores", "all-reduce"}, told.report
        (finding,) = told.find("stores")
        assert finding["host"] == "b1" and f"that of cell 0 at {ADDRESSES['a1']}:" in finding["text"], finding
        with closed(two_hosts, "b1", "29510", "blackhole"):
            told = on_hosts(two_hosts, words, {"XFFL_IFNAME": "eth0"}, port=20317)
        assert told.exit_code == 1 and told.wrong() == {"lighthouse"}, told.report
        assert told.find("lighthouse")[0]["host"] == "b1" and told.statuses("stores") == {"ok"}
    finally:
        for one in started:
            one.kill()
            one.communicate()


# Planted faults -------------------------------------------------------------------------------------------------------


def test_a_closed_store(two_hosts: Hosts) -> None:
    """The ports that Linux hands out are closed from one side: the all-reduce names both hosts."""
    with closed(two_hosts, "b1", "32768-60999", "prohibit"):
        told = on_hosts(two_hosts, QUICK, {"XFFL_IFNAME": "eth0"}, port=20317)
    assert told.exit_code == 1 and told.wrong() == {"ports", "all-reduce"}
    (finding,) = told.find("all-reduce")
    assert "a1 and b1" in finding["text"] and ADDRESSES["a1"] in finding["text"], finding


def test_no_mpi_runtime(openmpi: Mpi) -> None:
    environ = {name: text for name, text in openmpi.environ.items() if name != "MPI4PY_MPIABI"}
    environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
    started = ask([*openmpi.command(2), *QUICK, "--skip-torch"], environ)
    assert started.exit_code == 1 and "launcher" in started.wrong() and started.seconds < 30
    assert "mpi4py cannot be loaded" in started.find("launcher")[0]["text"]


def test_ports_that_are_closed_from_one_side(two_hosts: Hosts) -> None:
    """Each host's own way, and not the ports of the other range."""
    range_ = "20000-31999"
    with closed(two_hosts, "b1", range_, "prohibit"), closed(two_hosts, "a1", range_, "blackhole"):
        told = on_hosts(two_hosts, QUICK, {"XFFL_IFNAME": "eth0"})
    assert told.exit_code == 1 and told.wrong() == {"ports"} and told.seconds < 60, told.report
    found = {finding["host"]: finding for finding in told.find("ports")}
    for host, other in (("a1", "b1"), ("b1", "a1")):
        assert found[host]["text"].count(ADDRESSES[other]) == 1 and range_ in found[host]["advice"]
    reasons = {host: finding["text"].rpartition(": ")[2] for host, finding in found.items()}
    assert reasons == {"a1": "Invalid argument", "b1": "Permission denied"}  # what Linux says of such routes


def test_a_closed_rendezvous(two_hosts: Hosts) -> None:
    with closed(two_hosts, "b1", str(PORT), "prohibit"):
        found = ask_hosts(two_hosts, QUICK, {"XFFL_IFNAME": "eth0"})
    first, other = found["a1"], found["b1"]
    assert first is not None and other is not None
    assert first.exit_code == other.exit_code == 1
    assert "rank 1 did not connect" in first.find("meeting")[0]["text"]
    assert f"{ADDRESSES['a1']}:{PORT}" in other.find("meeting")[0]["text"] and first.seconds < 60


def test_a_wrong_interface(two_hosts: Hosts) -> None:
    told = on_hosts(two_hosts, QUICK, {"XFFL_IFNAME": "eth7"})
    assert told.exit_code == 1 and "interface" in told.wrong()
    (finding,) = told.find("interface")
    assert finding["host"] == "both hosts" and "no such interface" in finding["text"] and "eth0" in finding["advice"]


def test_a_wrong_interface_on_one_host(two_hosts: Hosts) -> None:
    own = {"a1": {"XFFL_IFNAME": "eth0"}, "b1": {"XFFL_IFNAME": "ib0"}}
    told = on_hosts(two_hosts, QUICK, own=own)
    assert (
        told.wrong() == {"interface", "all-reduce"} and "XFFL_IFNAME (eth0, ib0)" in told.find("environment")[0]["text"]
    )
    assert {finding["host"] for finding in told.find("interface") if finding["status"] == "error"} == {"b1"}


def test_a_missing_shared_folder(two_hosts: Hosts, tmp_path: Path) -> None:
    shared, empty = tmp_path / "with space" / "runs", tmp_path / "empty"
    shared.mkdir(parents=True)
    empty.mkdir()
    # Each host has mounts of its own: b1 does not see the folder, or sees another in its place.
    for target, word in ((shared.parent, "is not there"), (shared, "is not seen")):
        mount = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(empty), str(target)]
        words = [*QUICK, "--timeout", "2", "--shared", str(shared)]
        told = on_hosts(two_hosts, words, {"XFFL_IFNAME": "eth0"}, before={"b1": mount})
        assert told.exit_code == 1 and told.wrong() == {"shared folder"}
        (finding,) = told.find("shared folder")
        assert finding["host"] == "b1" and word in finding["text"], finding
    assert not list(shared.iterdir()) and not list(empty.iterdir())


def test_another_version_and_another_clock_on_one_host(
    slurm: dict[str, str], on_one_node: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time, xffl, xffl.costs\nxffl.costs.EXCHANGE_FORMAT += 1\nxffl.__version__ = '9.9.9'\n"
        "real = time.time\ntime.time = lambda: real() + 30\n"
    )
    path = f"PYTHONPATH={tmp_path}:{slurm['PYTHONPATH']}"
    told = ask([*EXECUTE, *on_one_node, *QUICK], {**slurm, "PLANTED": path})
    assert told.exit_code == 1 and told.wrong() == {"clock", "versions"}
    (finding,) = told.find("clock")
    assert finding["host"] == "b1" and float(finding["text"].split()[0]) == pytest.approx(30, abs=0.1)
    (finding,) = told.find("versions")
    assert finding["text"] == f"exchange format differs: {EXCHANGE_FORMAT} on a1; {EXCHANGE_FORMAT + 1} on b1"
    (finding,) = told.find("runtimes")
    title, head, *rows = finding["text"].splitlines()
    assert title == "may differ between cells:" and head.split() == ["hosts", "xffl"]
    assert [row.split()[0] for row in rows] == ["a1", "b1"] and rows[1].split()[1] == "9.9.9"
