"""Cells from a real SLURM: its network, rules on its names, uneven allocations, and what a job is told of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import slurm_up

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANK = [sys.executable, str(HERE / "cell_rank.py")]
XFFL = [sys.executable, "-m", "xffl"]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def slurm(base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Bring up a SLURM of two cells of four nodes, two on each leaf switch."""
    with slurm_up("a:4 b:4", base_environ, tmp_path_factory.mktemp("slurm") / "s", MS_LEAF="2") as environ:
        yield environ


def told_by(found: list[dict[str, Any]], at: int) -> list[tuple[Any, ...]]:
    """Sizes, cell and sum of the cell's ranks, as each rank found them by one of the rules."""
    return [(rank["found"][at]["sizes"], rank["found"][at]["cell"], rank["found"][at]["total"]) for rank in found]


def errors_of(found: list[dict[str, Any]], at: int) -> set[str]:
    return {rank["found"][at]["error"] for rank in found}


def test_an_uneven_allocation(slurm: dict[str, str], run: Run, tmp_path: Path) -> None:
    """3 nodes in one cell and 1 in the other: the same cells by SLURM's network, by names and by a file."""
    file = tmp_path / "my cells"
    file.write_text("left a[1-3]\nright b1\n")
    rules = ["auto", "hosts:^[a-z]", f"file:{file}", "auto:2", "3,1"]
    found = run(["srun", "-w", "a[1-3],b1", "-N4", "-n4", *RANK, *rules], slurm)
    assert [rank["host"] for rank in found] == ["a1", "a2", "a3", "b1"]
    uneven = [([3, 1], 0, 3)] * 3 + [([3, 1], 1, 3)]
    for at in (0, 1, 2, 4):
        assert told_by(found, at) == uneven, rules[at]
    # One level further down: a1 and a2 are on one switch, a3 on another.
    assert told_by(found, 3) == [([2, 1, 1], 0, 1), ([2, 1, 1], 0, 1), ([2, 1, 1], 1, 2), ([2, 1, 1], 2, 3)]


def test_uneven_tasks_and_wrong_rules(slurm: dict[str, str], run: Run) -> None:
    # The last two as where SLURM has no topology plugin: no address, or one that is the node's name alone.
    alone = ["SLURM_TOPOLOGY_ADDR= auto", "SLURM_TOPOLOGY_ADDR=a1 SLURM_TOPOLOGY_ADDR_PATTERN=node auto"]
    rules = ["auto", "hosts:^a", "auto:3", *alone]
    found = run(["srun", "-w", "a1,b1", "-N2", "-n3", *RANK, *rules], slurm)
    assert [rank["host"] for rank in found] == ["a1", "a1", "b1"]
    assert told_by(found, 0) == [([2, 1], 0, 1), ([2, 1], 0, 1), ([2, 1], 1, 2)]
    (error,) = errors_of(found, 1)
    assert "names no cell for host b1" in error
    (error,) = errors_of(found, 2)
    assert "3 levels below the top" in error and "1 to 2" in error
    for at in (3, 4):
        (error,) = errors_of(found, at)
        assert "no SLURM_TOPOLOGY_ADDR" in error and "HINT" in error and "topology/tree" in error


def test_ranks_that_take_turns(slurm: dict[str, str], run: Run) -> None:
    found = run(["srun", "-w", "a1,b1", "-N2", "-n3", "--distribution=cyclic", *RANK, "auto"], slurm)
    assert [rank["host"] for rank in found] == ["a1", "b1", "a1"]
    (error,) = errors_of(found, 0)
    assert "ranks 0 and 2 into cell cell_a" in error and "HINT: start with xffl exec" in error


def test_two_components(slurm: dict[str, str], run: Run) -> None:
    """A step over both components of a heterogeneous job is one world; xffl puts no order on their hosts."""
    job = ["salloc", "-Q", "-w", "a1", "-n2", ":", "-w", "b1", "-n1"]
    found = run([*job, "srun", "--het-group=0,1", *RANK, "auto"], slurm)
    assert told_by(found, 0) == [([2, 1], 0, 1), ([2, 1], 0, 1), ([2, 1], 1, 2)]
    ran = xffl(slurm, job, "plan", "--federated", "auto")
    assert ran.returncode == 2 and "is heterogeneous: it has 2 components" in ran.stderr


def xffl(environ: dict[str, str], launcher: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher, *XFFL, *words],
        env=environ,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_plan_of_a_running_job(slurm: dict[str, str]) -> None:
    ran = xffl(slurm, ["salloc", "-Q", "-w", "a[1-3],b1", "-N4", "-n7"], "plan", "--federated", "auto", "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    first, second = told["placement"]["cells"]
    assert [host["name"] for host in first["hosts"]] == ["a1", "a2", "a3"] and (first["name"], second["name"]) == (
        "cell_a",
        "cell_b",
    )
    assert sum(told["federated_sizes"]) == told["world_size"] == 7 and len(told["federated_sizes"]) == 2
    assert second["hosts"] == [
        {"name": "b1", "switches": ["core", "cell_b", "b_s1"], "ranks": second["ranks"], "replicas": [0]}
    ]
    # The tasks of each node are those of the allocation: a step of all of them has the same.
    job = ["salloc", "-Q", "-w", "a[1-3],b1", "-N4", "-n7"]
    step = subprocess.run(
        [*job, "srun", "printenv", "SLURMD_NODENAME"], env=slurm, capture_output=True, text=True, timeout=60, check=True
    )
    names = sorted(step.stdout.split())
    assert names == [host["name"] for cell in (first, second) for host in cell["hosts"] for _ in range(_slots(host))]


def _slots(host: dict[str, Any]) -> int:
    return int(host["ranks"][1] - host["ranks"][0] + 1)


def test_the_order_can_be_started(slurm: dict[str, str], run: Run, tmp_path: Path) -> None:
    """What the plan orders is what srun starts by a host file: replicas of two nodes stay below one switch."""
    job = ["salloc", "-Q", "-w", "a[1-4]", "-N4", "--ntasks-per-node=1"]
    hosts = "a1:1,a3:1,a2:1,a4:1"
    ran = xffl(slurm, job, "plan", "--federated", "auto", "--hosts", hosts, "--hsdp", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    (cell,) = json.loads(ran.stdout)["placement"]["cells"]
    names = [host["name"] for host in cell["hosts"]]
    assert names == ["a1", "a2", "a3", "a4"]
    file = tmp_path / "hosts"
    file.write_text("\n".join(names[::-1]) + "\n")
    environ = {**slurm, "SLURM_HOSTFILE": str(file)}
    tell = 'echo "{\\"rank\\": $SLURM_PROCID, \\"host\\": \\"$SLURMD_NODENAME\\"}"'
    started = run([*job, "srun", "-n4", "--distribution=arbitrary", "sh", "-c", tell], environ)
    assert [rank["host"] for rank in started] == names[::-1]


@pytest.mark.parametrize("tasks", [["--ntasks-per-node=2"], ["-n", "3"]])
def test_plan_of_a_batch_job(slurm: dict[str, str], tmp_path: Path, tasks: list[str]) -> None:
    output = tmp_path / "told"
    script = f"#!/bin/sh\ncd {ROOT}\nexec {' '.join(XFFL)} plan --federated auto --json\n"
    submitted = subprocess.run(
        ["sbatch", "--parsable", "-w", "a1,b4", "-N2", *tasks, "-o", str(output)],
        input=script,
        env=slurm,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    job = submitted.stdout.strip()
    # A step that waits for the job to end ends as soon as it has.
    subprocess.run(
        ["srun", "-n1", "-w", "b4", f"--dependency=afterany:{job}", "true"],
        env=slurm,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=True,
    )
    told = json.loads(output.read_text())
    expected = [2, 2] if len(tasks) == 1 else [2, 1]
    assert told["federated_sizes"] == expected, told
    assert [cell["name"] for cell in told["placement"]["cells"]] == ["cell_a", "cell_b"]
