"""The doctor's judgement, part by part: without launchers, without other hosts, and mostly without torch."""

from __future__ import annotations

import configparser
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from xffl.cli.doctor import _text
from xffl.cluster.doctor import member as member_module
from xffl.cluster.doctor.compare import (
    Survey,
    compare_clocks,
    compare_environments,
    compare_folders,
    compare_links,
    compare_pairs,
    compare_ports,
    compare_runtimes,
    compare_versions,
    merge,
)
from xffl.cluster.doctor.examine import examine, examine_hosts
from xffl.cluster.doctor.member import Part, _outlive
from xffl.cluster.doctor.messages import ERROR, OK, WARNING, Answer, Finding, Member, PairResult, Place, Plan, Report
from xffl.cluster.doctor.probe import (
    REQUIRED,
    Request,
    check_gpus,
    check_interfaces,
    check_limits,
    check_packages,
    check_threads,
    check_torch,
    examine_host,
    find_physical,
    find_versions,
    nccl_of,
    partners,
    rank_facts,
    try_others,
    visit_folder,
)
from xffl.cluster.network import Interface
from xffl.cluster.runtimes import Runtime
from xffl.cluster.slurm.allocation import Host

ROOT = Path(__file__).resolve().parents[2]


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH by which no process can import torch."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')\n")
    return f"{folder}:{ROOT}"


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start it with no program on its path but what is given."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "", **variables}
    command, pipe = [sys.executable, "-m", "xffl", "doctor", *words], subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True)


def doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    with start(*words, **variables) as process:
        output, errors = process.communicate(timeout=50)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def findings_of(output: str) -> dict[str, dict[str, str]]:
    """Return the findings that it printed as JSON, one for each check."""
    return {finding["check"]: finding for finding in json.loads(output)["findings"]}


def test_alone_without_torch_and_without_slurm(tmp_path: Path, broken_torch: str) -> None:
    ran = doctor("--json", "--skip-torch", "--shared", str(tmp_path), PYTHONPATH=broken_torch)
    told = json.loads(ran.stdout)
    assert ran.returncode == told["exit_code"] == 0, ran.stdout
    found = {finding["check"]: finding for finding in told["findings"]}
    assert {"python", "packages", "gpus", "interface", "threads", "shared folder"} <= found.keys()
    assert found["gpus"]["text"].startswith("none")
    assert not {"mpi", "slurm"} & found.keys()  # what srun and mpirun say by themselves
    assert not list(tmp_path.iterdir())


def test_what_is_needed_and_missing_is_an_error(tmp_path: Path) -> None:
    ran = doctor("--skip-torch", "--need", "gpu", "--shared", str(tmp_path / "nowhere"))
    assert ran.returncode == 1
    wrong = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith("error ")}
    assert wrong == {"gpus", "shared"}
    lines = ran.stdout.splitlines()
    for at, line in enumerate(lines):
        assert not line.startswith(("error ", "warning ")) or lines[at + 1].lstrip().startswith("-> "), line
    assert lines[-1].endswith("2 error")


def test_options_that_cannot_be_meant() -> None:
    for words, told in (
        (("--need", "mpi"), "srun and mpirun report by themselves"),
        (("--timeout", "0"), "--timeout"),
        (("--federated", "x"), "x"),
    ):
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
    assert ran.returncode == 1 and "looks like a launcher that sets RANK" in told["launcher"]["text"]


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
    monkeypatch.setattr("xffl.cluster.doctor.probe.resolve", lambda name: ("127.0.1.1",))
    (found,), address = check_interfaces({}, 2, KNOWN)
    assert found.status == ERROR and "127.0.1.1" in found.text and "XFFL_IFNAME" in found.advice and address is None
    (found,), address = check_interfaces({}, 1, KNOWN)
    assert found.status == OK and address == "127.0.0.1"
    monkeypatch.setattr("xffl.cluster.doctor.probe.resolve", lambda name: ("127.0.1.1", "10.9.0.1"))
    (found,), address = check_interfaces({}, 2, KNOWN)
    assert found.status == ERROR and "127.0.1.1" in found.text and address is None  # gloo takes the first
    monkeypatch.setattr("xffl.cluster.doctor.probe.resolve", lambda name: ("10.7.7.7", "10.9.0.1"))
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
    monkeypatch.setattr("xffl.cluster.doctor.probe.resource.getrlimit", lambda kind: (1024, 4096))
    enough = check_limits(900)[0]  # 3856 files
    assert enough.status == OK and enough.text == "4096 at most, to which a session raises the limit of 1024"
    few = check_limits(1025)[0]
    assert few.status == WARNING and "ulimit -n" not in few.text
    assert few.advice == "ask the site to raise the hard limit (ulimit -Hn) to 4356"
    assert check_limits(4097)[0].status == ERROR


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


def place(name: str, ports: list[int], address: str = "127.0.0.1") -> Place:
    return Place(number=0, name=name, address=address, ports=ports)


def plan(token: str, *hosts: Place) -> Plan:
    return Plan(token=token, hosts=list(hosts), pairs=[])


def test_hosts_connect_and_tell_why_they_cannot(tmp_path: Path) -> None:
    request = Request(shared=str(tmp_path), with_torch=False, timeout_s=2.0)
    report, _, listeners = examine_host(request, {}, 1, 2)
    ports = report["ports"]
    assert 20000 <= ports[0] <= 31999 and len(ports) == 2
    assert {str(listener.getsockname()[0]) for listener in listeners} == {"127.0.0.1"}  # of one host
    for _ in range(50):  # peers that reset the connection do not end the listener
        with socket.create_connection(("127.0.0.1", ports[1])) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        refused = unused.getsockname()[1]
    hosts = [place("me", []), place("good", ports), place("shut", [refused])]
    answer = try_others(replace(request, timeout_s=0.2), plan("0123abcd", *hosts), 0)
    for listener in listeners:
        listener.close()
    assert answer["tried"] == 3 and answer["failures"] == [("shut", refused, "Connection refused")]
    by_name = {host["name"]: host for host in hosts}
    (found,) = compare_ports(by_name, {"me": answer})
    assert found.status == ERROR and found.host == "me" and "shut (127.0.0.1:" in found.text
    assert compare_ports(by_name, {"me": {**answer, "failures": []}})[0].status == OK


def test_large_jobs_try_a_few_hosts_that_join_all() -> None:
    assert partners(1, 3) == [0, 2]
    found = {own: partners(own, 1000) for own in range(1000)}
    assert all(len(set(others)) == 10 and own not in others for own, others in found.items())
    reached, edge = {0}, {0}
    while edge:
        edge = {other for own in edge for other in found[own]} - reached
        reached |= edge
    assert reached == set(range(1000))


@pytest.mark.parametrize(
    "ahead, doubt, status",
    [(0.05, 0.0, OK), (-0.2, 0.0, WARNING), (0.2, 0.15, OK), (30, 0.1, ERROR), (-30, 0.1, ERROR)],
)
def test_clocks(ahead: float, doubt: float, status: str) -> None:
    found = compare_clocks({"a": (7.0, 0.0), "b": (7.0 + ahead, doubt), "c": (7.0, 0.0)})
    assert statuses(found) == [status]
    assert status == OK or (found[0].host == "b" and ("behind" if ahead < 0 else "ahead") in found[0].text)


def test_versions_that_differ() -> None:
    same = {"a": {"torch": "2.13", "numpy": "2"}, "b": {"torch": "2.13", "numpy": "2"}}
    assert statuses(compare_versions(same)) == [OK]
    found = compare_versions({**same, "c": {"torch": "2.12"}})
    assert {(f.status, f.text) for f in found} == {(WARNING, "numpy differs: 2 on a, b; not installed on c")}
    # An edited copy of one version is told; another version has other files.
    one = {"xffl": "1.0", "xffl source": "aa", "exchange format": "1"}
    (found,) = compare_versions({"a": one, "b": {**one, "xffl source": "bb"}})
    assert (found.status, found.text) == (WARNING, "xffl source differs: aa on a; bb on b")
    (found,) = compare_versions({"a": one, "b": {**one, "xffl": "1.0.1", "xffl source": "bb"}})
    assert (found.status, found.text) == (OK, "1 packages are the same on 2 hosts")
    (found,) = compare_versions({"a": one, "b": {"xffl": "2.0", "xffl source": "bb", "exchange format": "2"}})
    assert (found.status, found.text) == (ERROR, "exchange format differs: 1 on a; 2 on b")


def test_what_may_differ_between_cells() -> None:
    one = Runtime("NVIDIA A100", "2.11.0", "12.6", "2.27.5", "0.1.0", "3.11.7")
    other = replace(one, processor="NVIDIA H100", torch="2.13.0")
    hosts = {"a1": one, "a2": one, "b1": other}
    assert compare_runtimes({"a1": one, "a2": one}, {}) == []
    table = ["hosts   processor    torch", "a1, a2  NVIDIA A100  2.11.0", "b1      NVIDIA H100  2.13.0"]
    for cells in ({}, {"a1": {0}, "a2": {0, 1}, "b1": {2}}):
        (found,) = compare_runtimes(hosts, cells)
        assert (found.status, found.text.splitlines()) == (OK, ["may differ between cells:", *table])
    (found,) = compare_runtimes(hosts, {"a1": {0}, "a2": {1}, "b1": {1}})
    assert (found.status, found.text.splitlines()) == (WARNING, ["differ inside cell 1:", *table])


def test_cells_that_do_not_speak_one_nccl() -> None:
    told = {"gpus": 4, "nccl": [2, 27, 3]}
    assert nccl_of(told) == "nccl 2.27.3" and nccl_of({**told, "is_rccl": True}) == "rccl 2.27.3"
    assert nccl_of({**told, "gpus": 0}) is None is nccl_of({"error": "no torch"})
    units = [("cell 0 (a)", "a"), ("cell 1 (b)", "b"), ("cell 2 (c)", "c")]
    assert compare_links(units, {"a": "nccl 2.27.3", "b": "nccl 2.27.3", "c": None}) == []
    (found,) = compare_links(units, {"a": "nccl 2.27.3", "b": "nccl 2.30.0", "c": "nccl 2.27.3"})
    assert (found.status, found.check) == (WARNING, "links") and "link_backend=gloo" in found.advice
    assert found.text == "GPUs do not speak one NCCL: cell 0 (a), cell 2 (c): nccl 2.27.3; cell 1 (b): nccl 2.30.0"


# A shared folder ------------------------------------------------------------------------------------------------------


def visit_both(path: Path, other: Path, token: str = "t0", patience_s: float = 1.0) -> dict[str, Any]:
    with ThreadPoolExecutor() as pool:
        second = pool.submit(visit_folder, str(other), token, 1, 2, patience_s)
        return {"a": visit_folder(str(path), token, 0, 2, patience_s), "b": second.result()}


def test_a_folder_that_two_hosts_share(tmp_path: Path) -> None:
    answers = visit_both(tmp_path, tmp_path)
    assert answers["a"]["unseen"] == [] and not list(tmp_path.iterdir())
    assert statuses(compare_folders(str(tmp_path), answers)) == [OK]


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for other, word in ((tmp_path / "no", "is not there"), (empty, "is not seen")):
        answers = visit_both(tmp_path, other, patience_s=0.2)
        assert answers["a"]["unseen"] == [1] and word in answers["b"]["error"]
        (found,) = compare_folders(str(tmp_path), answers)
        assert found.status == ERROR and found.host == "b" and word in found.text
    good = {"seen_s": 0.0, "torn": 0, "error": None, "free": 2**40, "kind": "nfs", "unseen": []}
    for changes, status in (
        ({}, OK),
        ({"torn": 2}, ERROR),
        ({"error": "read-only"}, ERROR),
        ({"seen_s": 4.0}, WARNING),
        ({"free": 2**20}, WARNING),
    ):
        assert compare_folders("/s", {"a": good, "b": {**good, **changes}})[0].status == status
    (found,) = compare_folders("/s", {"a": {**good, "unseen": ["b"]}, "b": good})
    assert found.status == ERROR and "does not see what b wrote" in found.text


def test_a_reader_sees_a_torn_file(tmp_path: Path) -> None:
    own = tmp_path / ".xffl-doctor-t3"
    own.mkdir()
    (own / "turning").write_text("ab" * 2048)
    (own / "seen").write_text("t3")
    assert visit_folder(str(tmp_path), "t3", 1, 2, 1.0)["torn"] > 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    answer = visit_folder(str(tmp_path / "none"), "t", 0, 1, 0.1)
    assert "No such file or directory" in answer["error"]
    assert statuses(compare_folders("/s", {"a": answer})) == [ERROR]
    assert statuses(compare_folders("/s", {"a": answer}, is_named=False)) == [WARNING]


# The survey -----------------------------------------------------------------------------------------------------------

ANSWER = Answer(
    folder={"seen_s": 0.1, "torn": 0, "error": None, "free": 2**40, "kind": "nfs", "unseen": []},
    failures=[],
    tried=1,
    pairs={"0-1.0": {"seconds": 0.1, "mib": 4.0}, "0-1.1": {"seconds": 0.1, "mib": 4.0}},
    run=None,
)


def member(name: str, number: int, **runtime: str) -> Member:
    """Return what a rank on a host of its own tells."""
    facts = rank_facts({}, [number], number, 1)
    report, *_ = examine_host(Request(), {"PATH": ""}, 1, 1)
    report["runtime"] = replace(report["runtime"], **runtime)
    return {**facts, "host": Host(name), "report": report}


@pytest.mark.parametrize("federated, status", [((1, 1), OK), ((2,), WARNING)])
def test_the_report_has_a_table_of_what_differs(federated: tuple[int, ...], status: str) -> None:
    members = {0: member("a", 0), 1: member("b", 1, torch="2.11.0")}
    survey = Survey(Request(federated=federated), members, 2, answers={0: ANSWER, 1: ANSWER}, clocks={1: (0.0, 0.1)})
    report = survey.report(survey.plan())
    (found,) = [finding for finding in report.findings if finding.check == "runtimes"]
    assert found.status == status and report.exit_code == 0, report
    lines = _text(report).splitlines()
    first = next(number for number, line in enumerate(lines) if "runtimes" in line)
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["hosts", "torch"],
        ["a", metadata.version("torch")],
        ["b", "2.11.0"],
    ]


def test_a_host_that_fails_and_ranks_that_are_missing_are_told() -> None:
    members = {0: member("a", 0), 1: member("b", 1), 3: member("b", 3)}
    survey = Survey(
        Request(federated=(2, 3)), members, 5, failures={1: "lost: it did not answer in time", 2: "nonsense"}
    )
    plan = survey.plan()
    assert [host["name"] for host in plan["hosts"]] == ["a", "b#2"]
    survey.answers[0] = ANSWER
    findings = {(finding.check, finding.host): finding for finding in survey.report(plan).findings}
    assert findings["host", "b#1"].text == "lost: it did not answer in time" and ("host", "rank 2") in findings
    assert findings["cells", ""].text == "not checked, since 2 of 5 ranks are missing"
    assert findings["all-reduce", ""].text == "a and b#2: b#2: no answer"


@pytest.mark.parametrize("half", [{}, {"seconds": 0.0, "mib": 4.0}])
def test_an_all_reduce_that_a_host_says_nothing_of_has_failed(half: PairResult) -> None:
    members = {0: member("a", 0), 1: member("b", 1)}
    survey = Survey(Request(), members, 2, answers={0: ANSWER, 1: {**ANSWER, "pairs": {"0-1.1": half}}})
    (found,) = [each for each in survey.report(survey.plan()).findings if each.check == "all-reduce"]
    assert (found.status, found.text) == (ERROR, "a and b: b: it sent no result")


def test_ranks_that_differ_in_a_secret() -> None:
    environs = [
        {"XFFL_TRACKING__TOKEN": "hush-1", "XFFL_KEY": "hush-3", "XFFL_IFNAME": "eth0", "NCCL_DEBUG": "INFO"},
        {"XFFL_TRACKING__TOKEN": "hush-2", "XFFL_IFNAME": "ib0", "NCCL_DEBUG": "INFO"},
    ]
    told = [rank_facts(environ, [0], 0, 1) for environ in environs]
    assert "hush" not in str(told)
    (found,) = compare_environments(told)
    assert found.text.endswith("XFFL_TRACKING__TOKEN (differs), XFFL_KEY (set, unset), XFFL_IFNAME (eth0, ib0)")


def test_cells_of_a_job_from_its_batch_script(tmp_path: Path) -> None:
    environ = {"PATH": "", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2],b1", "SLURM_TASKS_PER_NODE": "2(x3)"}
    environ |= {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6"}
    for variables, asked, status, word in (
        (environ, "hosts:([a-z])", OK, "2 cells of 4, 2"),
        (environ, (3, 3), OK, "2 cells of 3, 3"),
        (environ, (3, 4), ERROR, "7"),
        (environ, "hosts:x([a-z])", ERROR, "a1"),
        ({"PATH": ""}, "hosts:([a-z])", WARNING, "not checked"),
    ):
        reports: list[Report] = []
        request = Request(shared=str(tmp_path), federated=asked, with_torch=False)
        examine(request, reports.append, variables)
        (found,) = [finding for finding in reports[0].findings if finding.check == "cells"]
        assert found.status == status and word in found.text, found


def ranks_on_hosts(*ranks: dict[str, str]) -> list[dict[str, str]]:
    """Return variables by which ranks take this machine for several hosts, named a, b and so on."""
    job = {
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": str(len(ranks)),
    }
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "XFFL_IFNAME": "lo"}
    own = ({"RANK": str(at), "GROUP_RANK": str(at), "XFFL_HOST": "abcdefgh"[at]} for at in range(len(ranks)))
    return [{**job, **place, **rank} for place, rank in zip(own, ranks, strict=True)]


def test_hosts_that_meet_and_those_that_do_not(tmp_path: Path, broken_torch: str) -> None:
    """Rank 1 has another version of xffl, rank 2 a torch that is broken; a stranger connects to rank 0."""
    (tmp_path / "sitecustomize.py").write_text(
        "import xffl, xffl.costs\nxffl.costs.EXCHANGE_FORMAT += 1\nxffl.__version__ += '.9'\n"
    )
    variables = ranks_on_hosts({}, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, {"PYTHONPATH": broken_torch})
    (shared := tmp_path / "shared").mkdir()
    words = ("--json", "--timeout", "5", "--shared", str(shared), "--federated", "1,1,1")
    running = [start(*words, **each) for each in variables]
    deadline = time.monotonic() + 30
    while True:
        try:
            stranger = socket.create_connection(("127.0.0.1", int(variables[0]["MASTER_PORT"])))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n\r\n{"rank": 1, "world_size": 7}\n')
        ended = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [1, 0, 1], ended
    assert ended[1][0] == "" and json.loads(ended[0][0])["hosts"] == ["a", "b"]
    found = findings_of(ended[0][0])
    assert "rank 2 did not connect to 127.0.0.1:" in found["meeting"]["text"]
    assert found["versions"]["text"].startswith("exchange format differs: ")
    assert "xffl" in found["runtimes"]["text"] and "1 of 3 ranks are missing" in found["cells"]["text"]
    assert {found[check]["status"] for check in ("clock", "ports", "shared folder", "all-reduce", "torch")} == {OK}, (
        found
    )
    assert found["all-reduce"]["text"].startswith("1 pair of 2 over gloo, ")
    other = findings_of(ended[2][0])
    assert "undefined symbol" in other["torch"]["text"] and other["torch"]["host"] == "c"
    assert {"packages", "interface", "shared folder"} <= other.keys() and not list(shared.iterdir())


def test_rank_0_that_is_not_there_or_cannot_listen(tmp_path: Path) -> None:
    variables = ranks_on_hosts({}, {})
    words = ("--json", "--timeout", "0.3", "--shared", str(tmp_path))
    port = int(variables[0]["MASTER_PORT"])
    with socket.create_server(("", port)):
        first = doctor(*words, **variables[0])
    other = doctor(*words, **variables[1])
    for ran, word in ((first, f"cannot listen at port {port}"), (other, f"rank 0 at 127.0.0.1:{port} (Connection ref")):
        found = findings_of(ran.stdout)
        assert ran.returncode == 1 and word in found["meeting"]["text"], found
        assert {"packages", "interface", "torch"} <= found.keys()


def test_hosts_are_not_compared_without_torch(tmp_path: Path) -> None:
    (first, _) = ranks_on_hosts({}, {})
    ran = doctor("--json", "--skip-torch", "--shared", str(tmp_path), **first)
    assert findings_of(ran.stdout)["meeting"]["status"] == WARNING and json.loads(ran.stdout)["hosts"] == ["a"]


def test_a_host_whose_ssh_is_cut_off_is_not_well(tmp_path: Path) -> None:
    """It starts there, and ends before the report has come."""
    program(
        tmp_path,
        "ssh",
        """case $(cat) in *'"part": null'*) echo '{"ready": 20000}' ;; *) echo '{"report": null}'; exit 255 ;; esac""",
    )
    report = examine_hosts([Host("a")], Request(), {"PATH": os.environ["PATH"], "XFFL_SSH": str(tmp_path / "ssh")})
    found = {finding.status: finding for finding in report.findings}
    assert report.exit_code == 1 and found[ERROR].text == "cannot be used: exit code 255", report
    assert found[ERROR].host == "a"


def test_rank_0_without_an_interface_is_known_by_where_it_was_met() -> None:
    part = Part(count=2, world_size=2, machines=2, address="127.0.0.2", port=free_port())
    host = member_module._Host(Request(), part, [], lambda report: None)
    host._me["report"], *_ = examine_host(Request(), {"PATH": "", "XFFL_IFNAME": "none"}, 2, 1)
    assert host._me["report"]["address"] is None
    host._take_torch(
        {"torch": "2.13", "import_s": 2.0, "backends": ["gloo"], "gpus": 0, "nccl": None}
        | {"cuda": "none", "processor": "x86_64"}
    )
    assert host._me["report"]["address"] == "127.0.0.2"


# torch ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "code"), [("abort()", -6), ("_exit(1)", 1)])
def test_a_torch_that_ends_its_process_is_told_beside_the_rest(end: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"import os\nos.{end}\n")
    ran = doctor("--json", "--shared", str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}")
    found = findings_of(ran.stdout)
    assert ran.returncode == 1 and found["torch"]["text"] == f"torch cannot be loaded: exit code {code}"
    assert found["packages"]["status"] == found["shared folder"]["status"] == OK and "all-reduce" not in found


def test_a_doctor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(30)\n")
    with start("--shared", str(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}") as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        process.communicate(timeout=10)  # a child would keep its output open


@pytest.mark.parametrize(("says", "is_loaded"), [(b"", False), (b"x", True)])
def test_a_torch_that_hangs_is_not_waited_for(says: bytes, is_loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "PATIENCE_S", 0.2)
    reader, writer = os.pipe()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[writer])
    os.write(writer, says)
    os.close(writer)
    assert _outlive(sleeper.pid, reader, 0.2) == ("it did not answer in time", is_loaded)


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


def test_pairs_that_failed_or_are_slow_are_named_by_host() -> None:
    good = {"seconds": 0.5, "mib": 4.0}
    bad, silent = {"error": "refused"}, {"error": "silent", "is_silent": True}
    results = {(0, 1): (good, good), (0, 2): (bad, good), (1, 2): (bad, silent), (0, 3): (good, bad)}
    found = compare_pairs(["x", "y", "z", "w"], results)
    assert [(f.status, f.text) for f in found[:2]] == [(ERROR, "x and z, w: refused"), (ERROR, "y and z: silent")]
    assert found[2].status == OK and "8 MiB/s" in found[2].text
    (well,) = compare_pairs(["x", "y", "z"], {(0, 1): (good, good), (0, 2): ({**good, "seconds": 2.0}, good)})
    assert well.status == OK  # the faster side counts: the other may have started late
    slow, well = compare_pairs(["x", "y", "z"], {(0, 1): (good, good), (0, 2): ({**good, "seconds": 2.0},) * 2})
    assert slow.status == WARNING and slow.text == "slow: x and z: 2.0 MiB/s"
    assert well.text == "2 pairs of 3 over gloo, 2 MiB/s (x and z) to 8 MiB/s (x and y)"
