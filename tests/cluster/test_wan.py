"""A slow link between two cells in network namespaces: what crosses it, by its interface counters."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster.benchmark import BENCHMARKS, Benchmark, measure

pytestmark = pytest.mark.alone

REPEATS = 3
CONTENDERS = ("tcp", "round", "one_replica", "every_replica", "all_reduce", "hsdp_step")


def namespaces() -> set[str]:
    """Return the namespaces that ``wan.py`` makes."""
    told = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in told.splitlines() if line.startswith("wan")}


@pytest.fixture(scope="module")
def measured(slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give what a run with a small model has written."""
    out = tmp_path_factory.mktemp("wan") / "wan.json"
    size = ("--megabytes", "16", "--rate-mbit", "400", "--repeats", str(REPEATS))
    return measure("wan.py", base_environ, out, *size, "--contenders", ",".join(CONTENDERS))


def test_a_round_sends_what_a_raw_transfer_sends(measured: dict[str, Any]) -> None:
    # The votes cross, too: twice 128 bytes of each rank, a few kilobytes with their headers.
    assert measured["rows"]["round"]["bytes_ratio"] <= 1.02


def test_the_link_carries_one_copy_of_the_model(measured: dict[str, Any]) -> None:
    # 1,448 of a packet's 1,500 bytes are the model's; the acknowledgements of the other direction come on top.
    for sent in measured["rows"]["round"]["bytes"]:
        assert 1500 / 1448 <= sent / measured["model_bytes"] <= 1.08


def test_replicas_do_not_add_traffic(measured: dict[str, Any]) -> None:
    two, one = (measured["rows"][name]["bytes"] for name in ("round", "one_replica"))
    for direction in range(2):
        assert two[direction] == pytest.approx(one[direction], rel=0.02)


def test_a_round_takes_about_as_long_as_a_raw_transfer(measured: dict[str, Any]) -> None:
    # Of three runs on a machine that does other things as well; benchmarks/wan.py with more is the measurement.
    assert measured["rows"]["round"]["time_ratio"] <= 2.0


@pytest.mark.parametrize("name, factor", [("every_replica", 1.9), ("all_reduce", 1.6), ("hsdp_step", 1.4)])
def test_what_knows_nothing_of_cells_sends_more(name: str, factor: float, measured: dict[str, Any]) -> None:
    # 2, 2 (1 - 1/8) and 2 (1 - 1/4) copies of the model, in theory.
    assert measured["rows"][name]["bytes_ratio"] >= factor


def test_reports_agree_with_the_counters(measured: dict[str, Any]) -> None:
    sample = measured["samples"]["round"][0]
    cells = [sum(told["bytes_across"] for told in half) for half in (sample["told"][:4], sample["told"][4:])]
    assert cells == [measured["model_bytes"]] * 2


@pytest.mark.parametrize(
    "words, told",
    [
        (["wan.py", "--rate-mbit", "0"], "argument --rate-mbit: 0 is not above 0"),
        (["wan.py", "--out", "/proc/x/y.json"], "argument --out: /proc/x cannot be made: No such file or directory"),
        (["overlap.py", "--megabytes", "nan"], "argument --megabytes: 'nan' is no number"),
        (["diloco.py", "link", "--delay-ms=-1"], "argument --delay-ms: -1 is below 0"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_starts(words: list[str], told: str) -> None:
    command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.endswith(f"error: {told}\n"), ran.stderr


@pytest.mark.parametrize("number, stage", [(signal.SIGINT, "up"), (signal.SIGTERM, "ready")])
def test_what_is_stopped_leaves_nothing_behind(
    number: signal.Signals, stage: str, slow_link: None, base_environ: dict[str, str]
) -> None:
    with Benchmark("wan.py", base_environ, "--megabytes", "1", "--repeats", "1000") as benchmark:
        assert benchmark.process.stdout is not None
        first = line = benchmark.process.stdout.readline()
        mine = {name for name in namespaces() if name.startswith(first.split()[1])}
        assert len(mine) == 6
        while not line.endswith(f"{stage}\n"):
            line = benchmark.process.stdout.readline()
            assert line, "wan.py ended by itself"
        benchmark.process.send_signal(number)
        benchmark.output()
        assert benchmark.process.returncode != 0
    assert not mine & namespaces()
