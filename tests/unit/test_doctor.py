"""The doctor's judgement, part by part: without launchers, without other hosts, without torch."""

from __future__ import annotations

import configparser
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from xffl.cluster.doctor.examine import examine
from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, Report, merge
from xffl.cluster.doctor.folder import Folder, compare_folders, find_file_system, visit
from xffl.cluster.doctor.host import (
    REQUIRED,
    check_interfaces,
    check_limits,
    check_packages,
    check_threads,
    find_physical,
    find_versions,
)
from xffl.cluster.doctor.lead import LOOK_S, Lead, meeting_s, patience_s
from xffl.cluster.doctor.meeting import Hub, answer, join
from xffl.cluster.doctor.pairs import TorchProcess, check_torch, compare_pairs
from xffl.cluster.doctor.programs import MPI_LIMIT_S, check_gpus, check_mpi, check_slurm, find_family
from xffl.cluster.doctor.reach import (
    Listeners,
    compare_clocks,
    compare_names,
    compare_ports,
    compare_versions,
    peers_of,
    try_hosts,
)
from xffl.cluster.doctor.rounds import ROUNDS_S, Unit, add_in_rounds, pair_up
from xffl.cluster.doctor.side import HostSide, Request, import_limit_s, introduce
from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.network import Interface
from xffl.errors import LaunchError

ROOT = Path(__file__).resolve().parents[2]
PAIR_PROGRAM = ROOT / "xffl" / "cli" / "doctor_pair.py"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from xffl.cli.main import main; sys.exit(main(sys.argv[1:]))"


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


# The command ----------------------------------------------------------------------------------------------------------


def doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that cannot import torch, with no program on its path but what is given."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "", **variables}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "doctor", *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_alone_without_torch_and_without_slurm(tmp_path: Path) -> None:
    ran = doctor("--json", "--skip-torch", "--shared", str(tmp_path))
    told = json.loads(ran.stdout)
    assert ran.returncode == told["exit_code"] == 0, ran.stdout
    found = {finding["check"]: finding for finding in told["findings"]}
    assert {"python", "packages", "mpi", "slurm", "gpus", "interface", "threads", "shared folder"} <= found.keys()
    assert found["slurm"]["text"].startswith("no SLURM") and found["gpus"]["text"].startswith("none")
    assert not list(tmp_path.iterdir())


def test_what_is_needed_and_missing_is_an_error(tmp_path: Path) -> None:
    ran = doctor("--skip-torch", "--need", "mpi,slurm,gpu", "--shared", str(tmp_path / "nowhere"))
    assert ran.returncode == 1
    wrong = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith("error ")}
    assert wrong == {"mpi", "slurm", "gpus", "shared"}
    lines = ran.stdout.splitlines()
    for at, line in enumerate(lines):
        assert not line.startswith(("error ", "warning ")) or lines[at + 1].lstrip().startswith("-> "), line
    assert lines[-1].endswith("4 error")


def test_options_that_cannot_be_meant() -> None:
    for words, told in ((("--need", "tpu"), "tpu"), (("--timeout", "0"), "--timeout"), (("--federated", "x"), "x")):
        ran = doctor(*words)
        assert ran.returncode == 2 and told in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize(("federated", "status"), [("3,3", "error"), ("1,1", "ok")])
def test_cells_are_looked_at_without_torch(federated: str, status: str, tmp_path: Path) -> None:
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("--json", "--skip-torch", "--federated", federated, "--shared", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(doctor, *words, RANK=rank, LOCAL_RANK=rank, **job) for rank in "01"]
    ran = ranks[0].result()
    (found,) = (finding for finding in json.loads(ran.stdout)["findings"] if finding["check"] == "cells")
    assert found["status"] == status, found
    assert ran.returncode == (1 if status == "error" else 0)


def test_half_a_launcher_is_told(tmp_path: Path) -> None:
    ran = doctor("--json", "--skip-torch", "--shared", str(tmp_path), RANK="0", WORLD_SIZE="2")
    told = {finding["check"]: finding for finding in json.loads(ran.stdout)["findings"]}
    assert ran.returncode == 1 and "looks like torchrun" in told["launcher"]["text"]


# Findings -------------------------------------------------------------------------------------------------------------


def test_what_hosts_have_in_common_is_one_line() -> None:
    hosts = ["a", "b", "c"]
    found = [Finding("x", OK, "same", host=host) for host in hosts]
    found += [Finding("y", ERROR, "here", "do", "b"), Finding("x", OK, "other", host="a"), Finding("z", OK, "of all")]
    merged = merge(found, hosts)
    assert [(f.check, f.host) for f in merged] == [("x", "all 3 hosts"), ("x", "a"), ("y", "b"), ("z", "")]
    report = Report(merged, tuple(hosts), 3)
    assert report.exit_code == 1 and report.as_json()["counts"] == {OK: 3, WARNING: 0, ERROR: 1}
    assert Report(merged[:2]).exit_code == 0


# This host ------------------------------------------------------------------------------------------------------------


def test_required_packages_are_those_of_the_setup() -> None:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.read(ROOT / "setup.cfg")
    lines = [line for line in parser["options"]["install_requires"].split("\n") if line]
    wanted = {}
    for line in lines:
        name, _, least = line.partition(">=")
        wanted[name] = tuple(int(part) for part in least.split(".") if part)
    assert wanted == REQUIRED


def test_packages_that_are_missing_or_old() -> None:
    versions = dict.fromkeys(REQUIRED, "99.0") | {"python": "3.11.0", "xffl": "1", "xffl source": "a"}
    assert statuses(check_packages(versions)) == [OK, OK]
    assert check_packages({**versions, "torch": "2.11.0+cu126"})[1].status == OK
    (_, old) = check_packages({**versions, "torch": "2.9.1+cpu", "mpi4py": ""})
    assert old.status == ERROR and "mpi4py not installed" in old.text and "torch 2.9.1+cpu (needs 2.11)" in old.text


def test_versions_of_this_host() -> None:
    versions = find_versions()
    assert set(REQUIRED) < set(versions) and re.fullmatch(r"[0-9a-f]{12}", versions["xffl source"])


ETH = Interface("eth0", True, "10.0.0.1", 1000)
IB = Interface("ib0", True, "10.9.0.1", 200000)
LO = Interface("lo", True, "127.0.0.1")
DOWN = Interface("eth1", False, "10.0.1.1")
BARE = Interface("eth2", True)
KNOWN = (ETH, IB, LO, DOWN, BARE)
CARDS = ("eth0", "eth1", "eth2", "ib0")


@pytest.mark.parametrize(
    "name, nodes, status, word",
    [
        ("ib0", 2, OK, "200 Gbit/s"),
        ("eth0", 2, WARNING, "ib0 10.9.0.1 up 200 Gbit/s is faster"),
        ("ib7", 1, ERROR, "no such interface"),
        ("eth1", 2, ERROR, "down"),
        ("eth2", 2, ERROR, "no IPv4 address"),
        ("lo", 2, ERROR, "loopback"),
        ("lo", 1, OK, "127.0.0.1"),
    ],
)
def test_interfaces_by_name(name: str, nodes: int, status: str, word: str) -> None:
    (found,), address = check_interfaces({"XFFL_IFNAME": name}, nodes, KNOWN, CARDS)
    assert found.status == status and word in found.text
    assert address == {i.name: i.address for i in KNOWN}.get(name)
    assert status != ERROR or "eth0, ib0" in found.advice


def test_control_and_data_are_both_looked_at() -> None:
    found, address = check_interfaces({"XFFL_IFNAME": "ib0", "XFFL_CONTROL_IFNAME": "eth0"}, 2, KNOWN, CARDS)
    assert statuses(found) == [OK, OK] and address == "10.9.0.1"
    (found_,), _ = check_interfaces({"XFFL_IFNAME": "eth0,ib0"}, 2, KNOWN, CARDS)
    assert found_.status == ERROR and "eth0,ib0" in found_.text and "one name" in found_.text  # as use_interface does
    found, address = check_interfaces({"XFFL_CONTROL_IFNAME": "eth9", "GLOO_SOCKET_IFNAME": "ib0,eth0"}, 2, KNOWN)
    assert statuses(found) == [ERROR, OK] and address == "10.9.0.1"


def test_a_name_that_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.cluster.doctor.host.resolve", lambda name: ("127.0.1.1",))
    (found,), address = check_interfaces({}, 2, KNOWN)
    assert found.status == ERROR and "127.0.1.1" in found.text and "XFFL_IFNAME" in found.advice and address is None
    (found,), address = check_interfaces({}, 1, KNOWN)
    assert found.status == OK and address == "127.0.0.1"
    monkeypatch.setattr("xffl.cluster.doctor.host.resolve", lambda name: ("127.0.1.1", "10.9.0.1"))
    (found,), address = check_interfaces({}, 2, KNOWN)
    assert found.status == ERROR and "127.0.1.1" in found.text and address is None  # gloo takes the first
    monkeypatch.setattr("xffl.cluster.doctor.host.resolve", lambda name: ("10.7.7.7", "10.9.0.1"))
    (found,), address = check_interfaces({}, 2, KNOWN)
    assert found.status == OK and address == "10.9.0.1"  # it cannot listen at an address of nobody


def test_a_bridge_that_says_it_is_faster_is_not(tmp_path: Path) -> None:
    bridge = Interface("docker0", True, "172.17.0.1", 10000)
    for name, kind in (("eth0", "device"), ("bond0", "bonding"), ("docker0", "bridge")):
        (tmp_path / name / kind).mkdir(parents=True)
    for name, number, told in (("docker0", "1", ""), ("ib0", "32", ""), ("eth0.7", "1", "DEVTYPE=vlan\nIFINDEX=9\n")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "type").write_text(f"{number}\n")
        (tmp_path / name / "uevent").write_text(told)
    cards = find_physical(tmp_path)
    assert cards == {"eth0", "bond0", "ib0", "eth0.7"}
    (found,), _ = check_interfaces({"XFFL_IFNAME": "eth0"}, 2, (ETH, bridge), cards)
    assert found.status == OK


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1024}
    module = "xffl.cluster.doctor.host.resource.getrlimit"
    monkeypatch.setattr(module, lambda kind: (limits["soft"], 4096))
    assert check_limits(8)[0].status == OK
    assert check_limits(1000)[0].status == WARNING and "ulimit -n 4256" not in check_limits(1000)[0].text
    assert check_limits(1025)[0].status == ERROR and "hard limit" in check_limits(1025)[0].advice


def rank(cpus: list[int], threads: int | None = None) -> dict[str, Any]:
    return {"cpus": cpus, "threads": threads}


@pytest.mark.parametrize(
    "ranks, status",
    [
        ([rank([0, 1, 2, 3])], OK),
        ([rank([0, 1, 2, 3], 2)] * 2, OK),
        ([rank([0, 1]), rank([2, 3])], OK),  # bound: torch takes what each has
        ([rank([0, 1, 2, 3])] * 2, WARNING),  # 8 threads on 4
        ([rank([0, 1, 2, 3], 4)] * 2, WARNING),
        ([rank([0], 2), rank([1, 2, 3], 1)], WARNING),  # enough in all, not for the first
        ([rank([0, 1], 1)] * 3, WARNING),
    ],
)
def test_threads(ranks: list[dict[str, Any]], status: str) -> None:
    found = check_threads(ranks)
    assert found.status == status and bool(found.advice) == (status != OK)


# Programs -------------------------------------------------------------------------------------------------------------


def test_whose_mpi_it_is() -> None:
    assert find_family("Open MPI v4.1.4, package: Debian") == find_family("mpirun (Open MPI) 4.1.4") == "openmpi"
    assert find_family("mpirun (PRRTE) 3.0") == "openmpi"
    assert find_family("MPICH Version: 4.2") == find_family("HYDRA build details:") == "mpich"
    assert find_family("Intel(R) MPI Library 2021.9") == "intel" and find_family("toy") is None


def test_an_mpi_that_did_not_start_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    library = "print('MPICH Version: 4.2')"
    monkeypatch.setattr("xffl.cluster.doctor.programs._ASK_MPI", library)
    assert check_mpi("mpich", False, {}).status == OK
    found = check_mpi("openmpi", False, {})
    assert found.status == ERROR and "mpirun of openmpi" in found.text
    monkeypatch.setattr("xffl.cluster.doctor.programs._ASK_MPI", "import os; os.abort()")
    assert check_mpi("none", False, {}).status == WARNING and check_mpi("openmpi", False, {}).status == ERROR


def test_slurm_commands_and_controller(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert check_slurm("none", False, environ).status == OK
    assert check_slurm("none", True, environ).status == ERROR
    assert check_slurm("slurm", False, environ).status == WARNING
    for name in ("srun", "sbatch", "squeue"):
        program(tmp_path, name, "echo slurm 24.05")
    found = check_slurm("none", False, environ)
    assert found.status == WARNING and "scontrol" in found.text
    program(tmp_path, "scontrol", "echo 'Slurmctld(primary) at h is DOWN'; exit 1")
    assert check_slurm("none", False, environ).status == OK, "commands without a cluster harm nobody"
    assert check_slurm("none", True, environ).status == ERROR
    program(tmp_path, "scontrol", "echo 'Slurmctld(primary) at h is UP'")
    found = check_slurm("none", True, environ)
    assert found.status == OK and "slurm 24.05" in found.text


def test_gpus(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert [check_gpus(needed, environ)[0].status for needed in (False, True)] == [OK, ERROR]
    found, count = check_gpus(False, {**environ, "SLURM_GPUS_ON_NODE": "4"})
    assert found.status == ERROR and "SLURM_GPUS_ON_NODE=4" in found.text and count == 0
    program(tmp_path, "rocm-smi", "echo device,series; echo card0,MI300; echo card1,MI300")
    assert check_gpus(True, environ)[1] == 2
    program(tmp_path, "nvidia-smi", "echo 'H100, 81559 MiB, 570.1'; echo 'H100, 81559 MiB, 570.1'")
    found, count = check_gpus(True, environ)
    assert (found.status, found.text, count) == (OK, "2 x H100, 81559 MiB, 570.1", 2)
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: driver mismatch'; exit 18")
    assert check_gpus(True, environ) == (Finding("gpus", OK, "2 x card0,MI300 / card1,MI300"), 2)  # a node of AMD's
    (tmp_path / "rocm-smi").unlink()
    assert check_gpus(False, environ)[0].status == WARNING and "NVML" in check_gpus(True, environ)[0].text


# Between hosts --------------------------------------------------------------------------------------------------------


def host(name: str, address: str | None, ports: list[int], token: str = "", *addresses: str) -> dict[str, Any]:
    return {"name": name, "address": address, "ports": ports, "token": token, "addresses": list(addresses)}


def test_listeners_are_reached_and_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        refused = unused.getsockname()[1]
    listeners = Listeners("right")
    try:
        assert 20000 <= listeners.ports[0] <= 31999 and len(listeners.ports) == 2
        hosts = {
            "0": host("me", "127.0.0.1", [refused]),
            "1": host("good", "127.0.0.1", listeners.ports, "right"),
            "2": host("other", "127.0.0.1", listeners.ports[:1], "wrong"),
            "3": host("shut", "127.0.0.1", [refused], "right"),
            "4": host("lost", None, [1], "right"),
        }
        found = try_hosts({number: each for number, each in hosts.items() if number != "0"}, 2.0)
    finally:
        listeners.close()
    assert found["tried"] == 5
    failures = {number: reason for number, _, reason in found["failures"]}
    assert failures == {"2": "another program answers", "3": "Connection refused", "4": "it has no address"}
    told = compare_ports({int(number): each for number, each in hosts.items()}, {0: found})
    assert statuses(told) == [ERROR] * 3 and all(finding.host == "me" for finding in told)
    assert compare_ports({0: hosts["0"], 1: hosts["1"]}, {0: {"failures": [], "tried": 2}})[0].status == OK


def test_a_listener_outlives_a_peer_that_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = Listeners("right")
    try:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", listeners.ports[1])) as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        found = try_hosts({"1": host("good", "127.0.0.1", listeners.ports, "right")}, 2.0)
    finally:
        listeners.close()
    assert found["failures"] == []


def test_names_that_do_not_resolve_or_lead_elsewhere() -> None:
    hosts = {0: host("a", "1.1.1.1", [], "", "1.1.1.1"), 1: host("b", "1.1.1.2", [], "", "1.1.1.2", "127.0.0.1")}
    good = {"names": {"1": ["1.1.1.2"]}}
    assert statuses(compare_names(hosts, {0: good, 1: {"names": {"0": ["1.1.1.1"]}}})) == [OK]
    found = compare_names(hosts, {0: good, 1: {"names": {"0": []}}})
    assert [(f.status, f.host) for f in found] == [(WARNING, "b")] and "a not found" in found[0].text
    (found_,) = compare_names(hosts, {0: {"names": {"1": ["9.9.9.9"]}}})
    assert found_.status == WARNING and "b is 9.9.9.9, none of its 1.1.1.2" in found_.text
    assert compare_names({0: hosts[0], 1: {**hosts[1], "name": "a"}}, {})[0].status == OK


def test_large_jobs_try_a_few_hosts_that_join_all() -> None:
    assert peers_of(1, range(3)) == [0, 2]
    nodes = list(range(1000))
    found = {node: peers_of(node, nodes) for node in nodes}
    assert all(len(set(others)) == 10 and node not in others for node, others in found.items())
    reached, edge = {0}, {0}
    while edge:
        edge = {other for node in edge for other in found[node]} - reached
        reached |= edge
    assert reached == set(nodes)


@pytest.mark.parametrize(
    "ahead, doubt, status",
    [(0.05, 0.0, OK), (-0.2, 0.0, WARNING), (0.2, 0.15, OK), (30, 0.1, ERROR), (-30, 0.1, ERROR)],
)
def test_clocks(ahead: float, doubt: float, status: str) -> None:
    found = compare_clocks({"b": (ahead, doubt), "c": (0.0, 0.0)})
    assert statuses(found) == [status]
    assert status == OK or (found[0].host == "b" and ("behind" if ahead < 0 else "ahead") in found[0].text)
    assert compare_clocks({}) == []


def test_versions_that_differ() -> None:
    same = {"a": {"torch": "2.13", "numpy": "2"}, "b": {"torch": "2.13", "numpy": "2"}}
    assert statuses(compare_versions(same)) == [OK]
    found = compare_versions({**same, "c": {"torch": "2.12"}})
    assert {(f.status, f.text) for f in found} == {
        (ERROR, "torch differs: 2.13 on a, b; 2.12 on c"),
        (WARNING, "numpy differs: 2 on a, b; not installed on c"),
    }


# A shared folder ------------------------------------------------------------------------------------------------------


def test_a_folder_that_two_hosts_share(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "t0")
    assert folder.open() is None
    question = {"folder": str(tmp_path), "token": "t0", "node": 1, "patience_s": 1.0}
    answers: dict[int, dict[str, Any]] = {}
    other = threading.Thread(target=lambda: answers.update({1: visit(question)}))
    other.start()
    answers[0] = folder.turn()
    other.join()
    names = {0: "a", 1: "b"}
    unseen = folder.close(names, 1.0)
    assert unseen == [] and not list(tmp_path.iterdir())
    assert statuses(compare_folders(tmp_path, names, answers, unseen)) == [OK]


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "t1")
    assert folder.open() is None
    other = visit({"folder": str(tmp_path / "no"), "token": "t1", "node": 1, "patience_s": 0.1})
    assert other["seen_s"] is None and "not there" in other["error"]
    blind = visit({"folder": str(tmp_path), "token": "t2", "node": 1, "patience_s": 0.1})
    assert blind["seen_s"] is None and "not seen" in blind["error"]
    assert folder.close({1: "b"}, 0.1) == ["b"]
    good = {"seen_s": 0.0, "torn": 0, "error": None, "free": 2**40, "kind": "nfs"}
    names = {0: "a", 1: "b"}
    for changes, status in (
        ({}, OK),
        ({"torn": 2}, ERROR),
        ({"error": "read-only"}, ERROR),
        ({"seen_s": 4.0}, WARNING),
        ({"free": 2**20}, WARNING),
    ):
        assert compare_folders(tmp_path, names, {0: good, 1: {**good, **changes}}, [])[0].status == status
    assert compare_folders(tmp_path, names, {0: good, 1: good}, ["b"])[0].status == ERROR


def test_a_reader_sees_a_torn_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "t3")
    assert folder.open() is None
    (folder.own / "turning").write_text("ab" * 2048)
    assert visit({"folder": str(tmp_path), "token": "t3", "node": 1, "patience_s": 1.0})["torn"] > 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    assert Folder(tmp_path / "none", "t").open() == "No such file or directory"
    assert find_file_system(Path("/proc/self")) == "proc"


# The meeting ----------------------------------------------------------------------------------------------------------


def spoke(port: int, number: int, world_size: int, handlers: dict[str, Callable[[Any], Any]]) -> threading.Thread:
    def run() -> None:
        connection = join("127.0.0.1", port, number, world_size, {"mine": number}, 5.0)
        answer(connection, handlers, 5.0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_ranks_meet_answer_and_leave() -> None:
    port = free_port()
    threads = [spoke(port, number, 3, {"double": lambda q: {"is": 2 * q["x"]}}) for number in (1, 2)]
    hub = Hub(port, 3)
    # A stranger who says something else, and one who says nothing.
    with socket.create_connection(("127.0.0.1", port)) as stranger, socket.create_connection(("127.0.0.1", port)):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert hub.wait_for_ranks(5.0) == {1: {"mine": 1}, 2: {"mine": 2}}
    assert hub.ask({n: {"do": "double", "x": n} for n in (1, 2)}, 5.0, lambda: {"is": 0}) == {
        0: {"is": 0},
        1: {"is": 2},
        2: {"is": 4},
    }
    ahead = hub.measure_clock(2, 5.0)
    assert ahead is not None and abs(ahead[0]) <= ahead[1] + 0.01 and ahead[1] < 0.5
    hub.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert hub.lost == {}


def test_who_does_not_come_or_goes_is_not_waited_for() -> None:
    port = free_port()
    hub = Hub(port, 4)
    spoke(port, 1, 4, {"wait": lambda q: time.sleep(3) or {}})
    connection = join("127.0.0.1", port, 2, 4, {}, 5.0)
    started = time.monotonic()
    assert set(hub.wait_for_ranks(2.0)) == {1, 2}
    connection.close()
    assert set(hub.ask({n: {"do": "wait"} for n in (1, 2, 3)}, 0.5, dict)) == {0}
    assert set(hub.lost) == {1, 2} and "no answer to 'wait'" in hub.lost[1]
    assert hub.measure_clock(1, 0.1) is None and time.monotonic() - started < 6.5
    hub.close()


def test_an_error_of_a_host_is_told_and_the_host_goes_on() -> None:
    port = free_port()
    hub = Hub(port, 2)

    def forbidden(question: Any) -> dict[str, Any]:
        raise PermissionError(13, "Permission denied", "/scratch")

    spoke(port, 1, 2, {"look": forbidden, "add": lambda q: {"is": 1}})
    hub.wait_for_ranks(5.0)
    failed = hub.ask({1: {"do": "look"}}, 5.0, dict)[1]["failed"]
    assert "PermissionError" in failed and "/scratch" in failed
    assert hub.ask({1: {"do": "add"}}, 5.0, dict)[1] == {"is": 1} and hub.lost == {}
    hub.close()


def test_rank_0_tells_of_a_host_whose_look_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    request = Request(pair_program=PAIR_PROGRAM, shared=tmp_path, federated=1, with_torch=False, timeout_s=3.0)
    place = ProcessEnvironment(0, 2, 0, 1, 0, 2, "127.0.0.1", port, "torchrun")
    side = HostSide(request, place, "torchrun", Finding("mpi", OK, ""), {})

    def other() -> None:
        there = ProcessEnvironment(1, 2, 0, 1, 1, 2, "127.0.0.1", port, "torchrun")
        facts = {**introduce(there, {}), "host": {**introduce(there, {})["host"], "name": "b"}}

        def forbidden(question: Any) -> dict[str, Any]:
            raise OSError(24, "Too many open files")

        own = HostSide(request, there, "torchrun", Finding("mpi", OK, ""), {})
        answer(join("127.0.0.1", port, 1, 2, facts, 5.0), {**own.handlers, "look": forbidden}, 20.0)

    threading.Thread(target=other, daemon=True).start()
    report = Lead(side, place, Hub(port, 2), port).examine()
    side.close()
    wrong = [finding for finding in report.findings if finding.status == ERROR]
    assert [(finding.check, finding.host) for finding in wrong] == [("host", "b")], wrong
    assert "Too many open files" in wrong[0].text


def test_rank_0_is_patient_for_as_long_as_it_may_take() -> None:
    for timeout_s in (1.0, 15.0, 60.0):
        assert meeting_s(timeout_s) >= timeout_s + MPI_LIMIT_S
        assert patience_s(timeout_s) > meeting_s(timeout_s) + LOOK_S + import_limit_s(timeout_s) + ROUNDS_S


def test_no_files_left_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        hub = Hub(port, 200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        connections = [join("127.0.0.1", port, number, 200, {}, 5.0) for number in range(1, 100)]
        taken = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, hard))
        told = hub.wait_for_ranks(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < len(told) < 99 and hub.refused == "Too many open files"
    place = ProcessEnvironment(0, 200, 0, 100, 0, 2, "127.0.0.1", port, "torchrun")
    request = Request(pair_program=PAIR_PROGRAM, with_torch=False)
    side = HostSide(request, place, "torchrun", Finding("mpi", OK, ""), {})
    assert [f.check for f in Lead(side, place, hub, port)._judge_meeting()] == ["open files", "meeting"]
    hub.close()
    for connection in connections:
        connection.close()


def test_ranks_that_differ_in_a_secret() -> None:
    place = ProcessEnvironment(0, 3, 0, 1, 0, 3, "h", 1, "torchrun")
    request = Request(pair_program=PAIR_PROGRAM, with_torch=False)
    side = HostSide(request, place, "torchrun", Finding("mpi", OK, ""), {})
    environs: list[dict[str, str]] = [
        {"XFFL_TRACKING__TOKEN": "hush-1", "XFFL_KEY": "hush-3", "XFFL_IFNAME": "eth0", "NCCL_DEBUG": "INFO"},
        {"XFFL_TRACKING__TOKEN": "hush-2", "XFFL_IFNAME": "ib0", "NCCL_DEBUG": "INFO"},
    ]
    told = [introduce(place, environ) for environ in environs]
    assert "hush" not in json.dumps(told)
    with closing(Hub(free_port(), 3)) as hub:
        lead = Lead(side, place, hub, 1)
        lead.told = dict(enumerate(told))
        (found,) = lead._compare_environments()
    assert found.text.endswith("XFFL_TRACKING__TOKEN (differs), XFFL_KEY (set, unset), XFFL_IFNAME (eth0, ib0)")


def test_cells_are_not_dropped_in_silence() -> None:
    place = ProcessEnvironment(0, 3, 0, 1, 0, 3, "h", 1, "torchrun")
    request = Request(pair_program=PAIR_PROGRAM, with_torch=False, federated=(1, 2))
    side = HostSide(request, place, "torchrun", Finding("mpi", OK, ""), {})
    with closing(Hub(free_port(), 3)) as hub:
        lead = Lead(side, place, hub, 1)
        lead.told = {0: introduce(place, {})}
        lead._name_hosts()
        lead.hosts = {0: {}}
        (found,) = lead._places()[1]
    assert found.status == WARNING and "2 of 3 ranks are missing" in found.text


def test_cells_of_a_job_from_its_batch_script(tmp_path: Path) -> None:
    environ = {"PATH": "", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2],b1", "SLURM_TASKS_PER_NODE": "2(x3)"}
    environ |= {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6"}
    for variables, asked, status, word in (
        (environ, "hosts:([a-z])", OK, "2 cells of 4, 2"),
        (environ, (3, 3), OK, "2 cells of 3, 3"),
        (environ, (3, 4), ERROR, "7"),
        (environ, "hosts:x([a-z])", ERROR, "a1"),
        ({"PATH": ""}, "hosts:([a-z])", WARNING, "not looked at"),
    ):
        reports: list[Report] = []
        request = Request(pair_program=PAIR_PROGRAM, shared=tmp_path, federated=asked, with_torch=False)
        examine(request, reports.append, variables)
        (found,) = [finding for finding in reports[0].findings if finding.check == "cells"]
        assert found.status == status and word in found.text, found


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    hub = Hub(port, 2)
    connection = join("127.0.0.1", port, 1, 2, {}, 5.0)

    def skewed() -> None:
        with connection, connection.makefile("rw") as lines:
            for _ in range(8):
                lines.readline()
                time.sleep(0.01)
                lines.write(json.dumps({"time": time.time() + 100}) + "\n")
                lines.flush()

    threading.Thread(target=skewed, daemon=True).start()
    hub.wait_for_ranks(5.0)
    measured = hub.measure_clock(1, 5.0)
    assert measured is not None and abs(measured[0] - 100) <= measured[1] + 0.01
    hub.close()


def test_rank_0_that_is_not_there_or_cannot_listen() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=rf"rank 1 cannot reach rank 0 at 127.0.0.1:{port} .*refused.*firewall"):
        join("127.0.0.1", port, 1, 2, {}, 0.3)
    with socket.create_server(("", port)), pytest.raises(LaunchError, match=f"port {port} .*MASTER_PORT"):
        Hub(port, 2)


# torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 12))
def test_all_pairs_meet_once_and_nobody_is_in_two_pairs_at_once(count: int) -> None:
    rounds = pair_up(count)
    assert len(rounds) <= max(1, count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    for pairs in rounds:
        assert len({number for pair in pairs for number in pair}) == 2 * len(pairs)


def test_of_many_a_few_pairs_meet() -> None:
    rounds = pair_up(1000)
    met = [pair for pairs in rounds for pair in pairs]
    assert set(met) == {(min(a, b), max(a, b)) for a in range(1000) for b in peers_of(a, range(1000))}
    assert len(met) == len(set(met)) <= 10_000 and len(rounds) < 40
    for pairs in rounds:
        assert len({number for pair in pairs for number in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("silent", [0, 3])
def test_a_silent_partner_does_not_spoil_the_others(silent: int) -> None:
    """0 would lend its store to the others, 3 would come to theirs."""
    limit_s = 6.0
    asked: list[set[str]] = []
    processes = [TorchProcess(PAIR_PROGRAM, dict(os.environ), limit_s) for _ in range(4)]
    side = HostSide(
        Request(pair_program=PAIR_PROGRAM, with_torch=False, timeout_s=limit_s),
        None,
        "none",
        Finding("mpi", OK, ""),
        {},
    )
    side._torch = processes
    try:
        told = [process.hear(time.monotonic() + 60) for process in processes]
        units = [Unit("abcd"[at], 0, at, ("127.0.0.1", found["port"])) for at, found in enumerate(told)]
        os.kill(processes[silent]._process.pid, signal.SIGSTOP)

        def ask(questions: Mapping[int, Any], _: float) -> dict[int, Any]:
            asked.append(set(questions[0]["processes"]))
            return {0: side.pairs(questions[0])}

        found = add_in_rounds(units, ask, limit_s)
    finally:
        side.close()
    # It is waited for in the first round, and not asked again.
    assert len(asked) == 3 and [str(silent) in processes for processes in asked] == [True, False, False]
    assert statuses(found) == [ERROR, OK], found
    others = [unit.name for unit in units if unit is not units[silent]]
    name = units[silent].name
    assert found[0].text == f"{name} and {', '.join(others)}: {name}: it did not answer in time"
    assert found[1].text.startswith("3 pairs of 4")


def test_pairs_without_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.cluster.doctor.rounds.ROUNDS_S", 0.05)
    units = [Unit("abcd"[at], at, 0, ("h", 1)) for at in range(4)]

    def ask(questions: Mapping[int, Any], limit_s: float) -> dict[int, Any]:
        time.sleep(0.1)
        assert limit_s > 9
        turn = questions[0]["turn"]
        return {node: {"results": {"0": {"turn": turn, "seconds": 1.0, "mib": 1.0}}} for node in questions}

    found = add_in_rounds(units, ask, 9.0)
    assert statuses(found) == [WARNING, OK] and "4 of 6 pairs" in found[0].text and "2 pairs" in found[1].text


def test_a_torch_that_cannot_be_loaded_or_hangs(tmp_path: Path) -> None:
    for script, word in (
        ("raise ImportError('libtorch.so: undefined symbol')", "undefined symbol"),
        ("import os; os.abort()", "ended with code -6"),
        ("import time; time.sleep(60)", "did not answer in time"),
    ):
        (tmp_path / "torch_process.py").write_text(script)
        process = TorchProcess(tmp_path / "torch_process.py", dict(os.environ), 1.0)
        told = process.hear(time.monotonic() + (1.0 if "sleep" in script else 20.0))
        process.tell({"unit": 0})
        process.end()
        found = check_torch(told, 0, {})
        assert found.status == ERROR and word in found.text


@pytest.mark.parametrize(
    "changes, listed, status",
    [
        ({}, 0, OK),
        ({}, 4, ERROR),
        ({"gpus": 4}, 4, WARNING),
        ({"backends": []}, 0, ERROR),
        ({"import_s": 90}, 0, WARNING),
    ],
)
def test_judging_torch(changes: dict[str, Any], listed: int, status: str) -> None:
    told = {"torch": "2.13", "import_s": 2.0, "backends": ["gloo"], "gpus": 0, "port": 1, **changes}
    assert check_torch(told, listed, {}).status == status


def test_a_torch_without_gpus_where_none_are_wanted() -> None:
    told = {"torch": "2.13", "import_s": 2.0, "backends": ["gloo"], "gpus": 0, "port": 1}
    assert check_torch(told, 4, {"CUDA_VISIBLE_DEVICES": ""}).status == OK
    assert check_torch(told, 4, {"CUDA_VISIBLE_DEVICES": "0"}).status == ERROR


@pytest.mark.parametrize(
    "nccl, environ, told, status",
    [
        ([2, 28, 9], {}, "NCCL 2.28.9; ranks that share a GPU need backend='gloo'", OK),
        ([2, 30, 7], {}, "need backend='gloo' or NCCL_MULTI_RANK_GPU_ENABLE=1", OK),
        ([2, 30, 7], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "rounds behind local steps are refused", WARNING),
    ],
)
def test_what_gpus_can_do_is_told(nccl: list[int], environ: dict[str, str], told: str, status: str) -> None:
    here = {"torch": "2.13", "import_s": 2.0, "backends": ["gloo", "nccl"], "gpus": 1, "port": 1, "nccl": nccl}
    found = check_torch(here, 1, environ)
    assert found.status == status and found.text.endswith(told)


def test_pairs_that_failed_are_named_by_host() -> None:
    good = {"turn": 0, "seconds": 0.5, "mib": 4.0}
    bad = {"turn": 0, "error": "refused"}
    results = {(0, 1): (good, good), (0, 2): (bad, good), (1, 2): (good, {"error": "silent"}), (0, 3): (good, bad)}
    found = compare_pairs(["x", "y", "z", "w"], results)
    assert [(f.status, f.text) for f in found[:2]] == [(ERROR, "x and z, w: refused"), (ERROR, "y and z: silent")]
    assert found[2].status == OK and "8 MiB/s" in found[2].text
