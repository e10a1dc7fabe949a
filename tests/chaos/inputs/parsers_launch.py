"""What jobs read as they start and end: hosts, variables of launchers, records of ranks, the lighthouse's page."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from tests.chaos.inputs.parser import Parser, command
from tests.chaos.inputs.parsers_planning import words_of
from tests.unit.test_lighthouse_page import FULL
from xffl.cluster.environment import detect_environment, requested_federation, required_cells
from xffl.cluster.host_lists import expand_counts, expand_hosts
from xffl.cluster.launch.failure import FailureRecord, first_failure, read_failure, record_failure
from xffl.cluster.launch.logs import MarkedLines, mark
from xffl.cluster.lighthouse.address import elastic_cell, resolve_lighthouse, restarts_of
from xffl.cluster.lighthouse.page import parse_page
from xffl.cluster.over_files import read_over_files
from xffl.cluster.sizes_text import parse_federation
from xffl.cluster.slurm.allocation import find_allocation, own_host, parse_hosts, read_topology
from xffl.cluster.slurm.submit import earlier_jobs

RECORDED = Path(__file__).parents[2] / "unit" / "recorded"
LAUNCHERS = (
    "srun_even",
    "srun_uneven_3_1",
    "salloc_shell",
    "sbatch_script",
    "torchrun_one_node",
    "srun_part_of_allocation",
)
FEDERATION = (
    b"XFFL_FEDERATED=2,2\nXFFL_HSDP=2\nXFFL_REQUIRE_CELLS=2\nXFFL_CELL=0/2\nXFFL_ELASTIC=1\n",
    b"XFFL_FEDERATED=auto:1\nXFFL_RESTARTS=3\nXFFL_ELASTIC_CELL=0/2\n",
)
SUBMIT = (
    "--dry-run --federated 2,2 --slurm.nodes 2 --slurm.gpus_per_node 4 --slurm.time 1:00:00 train.py",
    "--dry-run --elastic --cells 2 --slurm.nodes 2 --slurm.partition a train.py --lr 0.1",
    "--dry-run --require-cells 2 --federated auto --slurm.nodes 8 train.py",
)


def environment_of(content: bytes) -> dict[str, str]:
    lines = content.decode("utf-8", errors="replace").replace("\0", "").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def recorded(folder: Path) -> list[bytes]:
    """Return the variables of the first process of each launch."""
    blocks = ((RECORDED / f"{name}.env").read_bytes().split(b"[process]\n") for name in LAUNCHERS)
    return [b"".join(block[:2]) for block in blocks]


def read_environment(content: bytes, folder: Path) -> None:
    environ = environment_of(content)
    own_host(environ)
    find_allocation(environ)
    # How long a name server or SLURM's controller takes for a name that it does not know says nothing about the reader.
    no_names = mock.patch("socket.getaddrinfo", side_effect=socket.gaierror("no such name"))
    no_controller = mock.patch("shutil.which", return_value=None)
    with no_names, no_controller:
        detect_environment(environ)


def read_federation(content: bytes, folder: Path) -> None:
    environ = environment_of(content)
    requested_federation(environ)
    required_cells(environ)
    elastic_cell(environ)
    restarts_of(environ)
    read_over_files(environ)


def read_hosts(content: bytes, folder: Path) -> None:
    parse_hosts(content.decode("utf-8", errors="replace"))


def read_list(content: bytes, folder: Path) -> None:
    text = content.decode("utf-8", errors="replace")
    expand_hosts(text)


def read_counts(content: bytes, folder: Path) -> None:
    expand_counts(content.decode("utf-8", errors="replace"))


def read_switches(content: bytes, folder: Path) -> None:
    read_topology(content.decode("utf-8", errors="replace"))


def read_sizes(content: bytes, folder: Path) -> None:
    parse_federation(content.decode("utf-8", errors="replace"), "--federated")


def failure_examples(folder: Path) -> list[bytes]:
    record = FailureRecord(1.5, 1, "ValueError: x", "Traceback ...", is_xffl=False, lost_peer=False)
    record_failure(record, str(folder), 1)
    return [(folder / "1.json").read_bytes()]


def read_failures(content: bytes, folder: Path) -> None:
    (folder / "0.json").write_bytes(content)
    records = {rank: record for rank in (0, 1) if (record := read_failure(str(folder), rank)) is not None}
    first = first_failure({0: 1, 1: 1}, records)
    first.describe()
    if first.record is not None:
        json.dumps(asdict(first.record)).encode()


def marked(folder: Path) -> list[bytes]:
    return [b"before\n" + b"".join(mark(3, {"failure": {"headline": "x" * 1000}})) + b"after\n"]


def read_marked(content: bytes, folder: Path) -> None:
    lines = MarkedLines()
    for line in content.splitlines(keepends=True):
        lines.take(line)


def read_page(content: bytes, folder: Path) -> None:
    status = parse_page(content.decode("utf-8", errors="replace"))
    for cell in () if status is None else status.cells:
        status.lag_of(cell)


def read_address(content: bytes, folder: Path) -> None:
    (folder / "address").write_bytes(content)
    resolve_lighthouse(f"file:{folder / 'address'}")


def read_jobs(content: bytes, folder: Path) -> None:
    (folder / "slurm").mkdir(exist_ok=True)
    (folder / "slurm" / "jobs").write_bytes(content)
    earlier_jobs(str(folder))


def submit_examples(folder: Path) -> list[bytes]:
    (folder / "train.py").write_text("print()\n")
    return [words.encode() for words in SUBMIT]


def submit(content: bytes, folder: Path) -> None:
    words = words_of(content)
    before = os.getcwd()
    os.chdir(folder)
    try:
        command("submit", "--dry-run", *words)
    finally:
        os.chdir(before)


PARSERS = (
    Parser("launch: variables", "text", recorded, read_environment),
    Parser("launch: federation", "text", lambda folder: list(FEDERATION), read_federation),
    Parser("launch: --hosts", "text", lambda folder: [b"a:4,b[01-04]:4,me@c:2"], read_hosts),
    Parser("launch: host list", "text", lambda folder: [b"a[1-3,07],b09,n[0-1][0-2]"], read_list),
    Parser("launch: counts of tasks", "text", lambda folder: [b"4(x2),3,2(x10)"], read_counts),
    Parser("launch: sizes", "text", lambda folder: [b"4,4,2", b"auto:1", b"hosts:(a|b)", b"4"], read_sizes),
    Parser(
        name="launch: topology",
        form="text",
        examples=lambda folder: [b"SwitchName=s[1-2] Nodes=a[1-2]\nSwitchName=t Switches=s[1-2]\n"],
        read=read_switches,
    ),
    Parser("launch: failures", "json", failure_examples, read_failures),
    Parser("launch: marked lines", "bytes", marked, read_marked),
    Parser("lighthouse: page", "text", lambda folder: [FULL.encode()], read_page),
    Parser(
        "lighthouse: address file", "text", lambda folder: [b"http://127.0.0.1:4000\n", b"host:29510"], read_address
    ),
    Parser("submit: words", "text", submit_examples, submit),
    Parser("submit: earlier jobs", "text", lambda folder: [b"123\n124\n"], read_jobs),
)
