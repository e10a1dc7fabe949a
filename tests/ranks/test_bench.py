"""``xffl bench`` as a user runs it, what it says about bytes, and the benchmark of rounds."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.test_round import make_state
from tests.worlds import WorldError, run_script, run_world
from xffl.aggregation.bench import CODECS, Effort, build_model, measure
from xffl.cli import bench
from xffl.cli.bench import _show
from xffl.cli.main import main
from xffl.errors import ConfigError
from xffl.extras import install_command
from xffl.jobs.request import JobRequest
from xffl.planning import bench_figure, bench_table, codec_ratio, round_traffic
from xffl.topology import Topology

ROOT = Path(__file__).parents[2]
TINY = ["--megabytes", "0.5", "--repeats", "2", "--warmup", "1"]
EXACT = ["all-gather", "two-hop", "in place"]
ROUNDS = [*EXACT, *(f"codec {codec}" for codec in CODECS)]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words at the repository's root, without another launcher's variables."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "TORCHELASTIC"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False
    )


def xffl(*words: str) -> subprocess.CompletedProcess[str]:
    return command("-m", "xffl", *words)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Two cells of one process, with a table and a folder."""
    folder = tmp_path_factory.mktemp("bench") / "it's a folder"
    return xffl("bench", "--processes", "2", "--federated", "1,1", *TINY, "--out", str(folder)), folder


def check(record: dict[str, Any], kinds: list[str], rounds: list[str]) -> None:
    """All rows are there, hang together, and moved what is predicted from sizes alone."""
    rows, model = record["rows"], record["model"]["bytes"]
    names = [(row["kind"], row["name"], row["payload_bytes"]) for row in rows]
    paths = [("ring", "to the next rank"), *(("all-reduce", kind) for kind in ["world", *kinds])]
    expected = {(*path, payload) for path in paths for payload in (8, model)}
    assert set(names) == expected | {("round", name, model) for name in rounds} and len(names) == len(set(names))
    world = {row["payload_bytes"]: row["seconds"] for row in rows if row["name"] == "world"}
    for row in rows:
        assert len(row["samples"]) == record["effort"]["repeats"]
        assert 0 < min(row["samples"]) <= row["seconds"] <= max(row["samples"])
        assert row["ratio"] == pytest.approx(row["seconds"] / world[row["payload_bytes"]])
        assert row["gbytes_per_s"] == pytest.approx(row["payload_bytes"] / row["seconds"] / 1e9)
    check_bytes(record)


def check_bytes(record: dict[str, Any]) -> None:
    layout = record["layout"]
    topology = Topology(layout["world_size"], tuple(layout["federated_sizes"]), layout["replica_size"])
    traffic = round_traffic(topology, record["model"]["parameters"])
    for row in record["rows"]:
        if row["kind"] != "round":
            continue
        form = row["options"]["form"]
        if form == "auto":  # two hops for three cells and more, where a lane is not tiny
            form = "two_hop" if topology.cells > 2 else "all_gather"
        ratio = codec_ratio(row["options"]["codec"])
        # Scales of blocks that are not full, and of every bucket, come on top.
        assert row["bytes_across"]["total"] == pytest.approx(ratio * traffic[form]["bytes_total"], rel=0.02)
        assert row["bytes_home"]["total"] == traffic["home_bytes_total"]
        if ratio == 1 and form == "all_gather" and topology.is_cut_alike and not row["options"]["rails"]:
            assert row["bytes_across"]["total"] == traffic[form]["bytes_total"]
            assert row["bytes_across"]["busiest"] == traffic["cell_kinds"][-1]["all_gather_bytes_per_sender"]
        if ratio < 1:
            assert 0 < row["codec_error"] < 1
        assert {"vote", "pack", "across"} <= row["phases"].keys()
        # Two cells without replicas take the mean when they write it.
        is_alone = topology.cells == 2 and max(topology.replica_counts) == 1
        is_late = is_alone and ratio == 1 and row["options"]["form"] != "two_hop" and not row["options"]["rails"]
        assert "combine" in row["phases"] or (is_late and row["options"].get("atomic", True))
        assert sum(row["phases"].values()) > 0


def test_two_processes_give_a_table_and_files(pair: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ran, folder = pair
    assert ran.returncode == 0, ran.stderr
    record = json.loads((folder / "bench.json").read_text())
    assert record["layout"] == {"world_size": 2, "federated_sizes": [1, 1], "replica_size": None, "backend": "gloo"}
    check(record, ["federated"], ROUNDS)
    cells = [[cell.strip() for cell in line.split("|")] for line in ran.stdout.splitlines()]
    for row in record["rows"]:
        milliseconds = 1e3 * row["seconds"]
        shown = f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"
        assert any(shown in line and f"{row['ratio']:.2f}" in line and row["kind"] in line for line in cells), row
    when = f"{record['date']}; load {record['load_before']:.1f} before"
    for told in (when, record["hosts"][0]["host"], f"torch {record['versions']['torch']}"):
        assert told in ran.stdout
    assert "\x1b" not in ran.stdout and ran.stdout.isascii()  # no terminal
    assert "wrote bench.json, bench.svg, bench.png" in ran.stderr
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    drawn = {element.text for element in ET.parse(folder / "bench.svg").iter() if element.text}
    assert {f"{row['kind']}: {row['name']}" for row in record["rows"]} <= drawn


def test_four_ranks_of_a_launcher_with_replicas_as_json() -> None:
    words = ["-m", "xffl", "bench", "--federated", "2,2", "--hsdp", "1", "--device", "cpu"]
    words += ["--backend", "cpu:gloo", "--link-backend", "gloo"]  # another one, as far as that goes without GPUs
    (_, told), *others = run_script(4, [*words, *TINY, "--json"], ROOT)
    assert others == [(0, "")] * 3
    record = json.loads(told)
    assert record["hosts"][0]["ranks"] == "ranks 0-3" and record["hosts"][0]["cores"] == os.cpu_count()
    check(record, ["federation", "replica", "federated"], [*ROUNDS, "rails"])
    assert (record["layout"]["backend"], record["layout"]["link_backend"]) == ("cpu:gloo", "gloo")
    bench_table(record, table := io.StringIO())
    assert "cpu:gloo, gloo between cells; xffl" in table.getvalue()


def test_what_is_started_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[JobRequest] = []

    def note(request: JobRequest) -> int:
        started.append(request)
        return 0

    monkeypatch.setattr(bench, "carry_out", note)
    words = "--processes 4 --federated 2,2 --hsdp 1 --backend gloo --link-backend gloo --device cpu --json"
    assert main(["bench", *words.split(), *TINY]) == 0
    [request] = started
    layout, (script, *passed) = request.started.layout, request.command
    assert (layout.sizes, layout.replica_size) == ((2, 2), 1) and Path(script).is_file()
    given = {"--megabytes=0.5", "--repeats=2", "--warmup=1", "--backend=gloo", "--device=cpu", "--json"}
    assert given | {"--link-backend=gloo"} <= set(passed), passed


# In worlds of other shapes --------------------------------------------------------------------------------------------


def measured(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, megabytes: float) -> Any:
    return measure(make_state(rank, sizes, hsdp), Effort(megabytes, repeats=1, warmup=1))


@pytest.mark.parametrize(
    ("sizes", "hsdp", "kinds", "more"),
    [
        ((1, 1, 1), None, ["federated"], []),
        ((4, 4), 2, ["federation", "shard", "replica", "federated"], ["rails"]),
    ],
    ids=str,
)
def test_other_layouts(sizes: tuple[int, ...], hsdp: int | None, kinds: list[str], more: list[str]) -> None:
    first, *others = run_world(sum(sizes), measured, sizes, hsdp, 0.3)
    assert others == [None] * len(others)
    check(json.loads(json.dumps(first)), kinds, [*ROUNDS, *more])
    assert first["rows"][0]["bytes_across"]["total"] == 8 * len(sizes)  # the ring leaves each cell once


def test_one_cell_has_no_rounds() -> None:
    first, _ = run_world(2, measured, (2,), None, 0.05)
    check(first, [], [])
    written = io.StringIO()
    bench_table(first, written)
    assert "no round to time: give --federated" in written.getvalue()


def differing(rank: int, world_size: int) -> Any:
    return measure(make_state(rank, (1,) * world_size, None), Effort(0.05, repeats=1 + rank))


@pytest.mark.parametrize(
    ("ranks", "message"), [(1, "has nobody to talk to"), (2, "ranks were given different efforts")]
)
def test_ranks_refuse_together(ranks: int, message: str) -> None:
    with pytest.raises(WorldError, match=message):
        run_world(ranks, differing)


@pytest.mark.parametrize("megabytes", [0.01, 0.5, 5, 64, 400])
def test_models_come_out_near_their_size(megabytes: float) -> None:
    import torch

    with torch.device("meta"):
        parameters = list(build_model(megabytes).parameters())
    large, small = ([p.numel() for p in parameters if (p.dim() == 2) is matrix] for matrix in (True, False))
    assert 4 * sum(large + small) / 2**20 == pytest.approx(megabytes, rel=0.15)
    assert len(small) == 2 * len(large) and sum(small) < 0.15 * sum(large)


# What is shown --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours(
    pair: tuple[subprocess.CompletedProcess[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = Terminal()
    bench_table(json.loads((pair[1] / "bench.json").read_text()), written)
    assert "\x1b[1m" in written.getvalue() and "codec int4" in written.getvalue()


def test_numbers_stand_without_matplotlib(
    pair: tuple[subprocess.CompletedProcess[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = json.loads((pair[1] / "bench.json").read_text())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _show(record, tmp_path, as_json=False)
    told = capsys.readouterr()
    assert install_command("report") in told.err and "wrote bench.json in" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"] and "codec int8" in told.out
    assert json.loads((tmp_path / "bench.json").read_text()) == record


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"rows": []}, "x.svg", "no rows"),
        ({"rows": [{"kind": "ring"}]}, "x.svg", "lacks name"),
        ({}, "x.pdf", "no known format"),
    ],
)
def test_figures_refuse(
    change: dict[str, Any],
    name: str,
    message: str,
    pair: tuple[subprocess.CompletedProcess[str], Path],
    tmp_path: Path,
) -> None:
    record = json.loads((pair[1] / "bench.json").read_text())
    with pytest.raises(ConfigError, match=message):
        bench_figure({**record, **change}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


# benchmarks/round.py --------------------------------------------------------------------------------------------------


def round_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("round_benchmark", ROOT / "benchmarks" / "round.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_models_of_the_round_benchmark() -> None:
    sizes = round_script().tensor_sizes(157, 100e6, None)
    assert len(sizes) == 157 and sum(sizes) == 100_000_000
    tiny = [size for size in sizes if size <= 640]
    assert len(tiny) == 57 and min(tiny) > 0 and min(size for size in sizes if size > 640) > 900_000
    assert round_script().tensor_sizes(2000, 100e6, 512) == [512] * 2000
    with pytest.raises(SystemExit, match="too few for 157 tensors"):
        round_script().tensor_sizes(157, 1000, None)


@pytest.mark.parametrize(
    ("layout", "words", "raw_bytes"),
    [
        ({"XFFL_FEDERATED": "1,1"}, "--parameters 2e5 --codec int8", 800_000),
        (
            {"XFFL_FEDERATED": "2,2", "XFFL_HSDP": "1"},
            "--tensors 8 --elements 512 --form two_hop --rails",
            16_384,
        ),
        ({"XFFL_FEDERATED": "2,2"}, "--tensors 8 --elements 512 --plain", 16_384),
    ],
)
def test_the_round_benchmark_runs(layout: dict[str, str], words: str, raw_bytes: int, tmp_path: Path) -> None:
    out = tmp_path / "new" / "round.json"
    script = str(ROOT / "benchmarks" / "round.py")
    ranks = sum(map(int, layout["XFFL_FEDERATED"].split(",")))
    ran = run_script(ranks, [script, *words.split(), "--repeats", "2", "--out", str(out)], tmp_path, **layout)
    assert [code for code, _ in ran] == [0] * ranks
    record = json.loads(out.read_text())
    assert record["raw_bytes"] == raw_bytes  # what one rank sends in a round
    # Between two cells, shards are also swapped without all else.
    alone = [] if "--plain" in words else ["messages alone"]
    names = ["raw all-reduce", "by parameter", *alone, "round, atomic", "round, in-place"]
    assert list(record["ratios"]) == names and record["ratios"]["raw all-reduce"] == 1
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["seconds"].values())
    assert [line[:16].strip() for line in ran[0][1].splitlines()] == names


def alone(rank: int, world_size: int) -> None:
    script = round_script()
    for kind in (script.Messages, script.Packed):
        parts = [torch.arange(700.0 + number) * (1 + 2 * rank) for number in range(20)]
        assert dist.group.WORLD is not None
        kind(parts, dist.group.WORLD)()
        assert all(torch.equal(part, torch.arange(len(part)) * 2.0) for part in parts), kind


def test_the_least_messages_take_the_mean() -> None:
    run_world(2, alone)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_an_atomic_round_takes_one_copy_and_values_arrive_there(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    script = str(ROOT / "benchmarks" / "round.py")
    words = ["--parameters", "25e6", "--memory", "--out", str(out)]
    ran = run_script(2, [script, *words], tmp_path, XFFL_FEDERATED="1,1")
    assert [code for code, _ in ran] == [0, 0]
    found = json.loads(out.read_text())["memory"]
    atomic, in_place = (found[kind]["peak_bytes"] for kind in ("atomic", "in-place"))
    assert found["atomic"]["shard_bytes"] == 100_000_000
    # One copy, buckets, and the memory of temporaries: by far no second copy.
    assert 0.9e8 < atomic < 1e8 + 14 * 2**20
    assert 2**20 < in_place <= 32 * 2**20  # the buckets
