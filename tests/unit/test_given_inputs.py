"""Files and words that are no good: one line that says what is wrong, at once, wherever they are read."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xffl.cli.main import main
from xffl.cluster.cells import name_cells
from xffl.cluster.host_lists import MAX_HOSTS, expand_counts, expand_hosts
from xffl.cluster.launch.failure import FailureRecord, first_failure, parse_failure, read_failure, record_failure
from xffl.cluster.lighthouse.page import parse_page
from xffl.cluster.sizes_text import parse_cell, parse_federation
from xffl.cluster.slurm.allocation import Host, parse_hosts, read_topology
from xffl.cluster.slurm.submit import earlier_jobs
from xffl.errors import CheckpointError, ConfigError, LaunchError, TopologyError
from xffl.planning import bench_table
from xffl.run_report.reader import read_run
from xffl.topology import MAX_RANKS, Topology
from xffl.training.config.settings import load_file
from xffl.training.data.partition import Partition, iid
from xffl.training.data.tokens import CharacterTokenizer

DIGITS = "9" * 5000


@pytest.fixture(autouse=True)
def _at_once() -> Any:
    since = time.process_time()
    yield
    assert time.process_time() - since < 10


# Lists and numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "n[1-99999999999]",
        f"n[1-{DIGITS}]",
        f"n[{DIGITS}]",
        "n[0-999][0-999]",
        "n[0-9][0-9][0-9][0-9][0-9][0-9]",
        ",".join(f"{name}[1-60000]" for name in "abc"),
        "n[" * 10_000,
    ],
)
def test_host_lists_are_no_longer_than_machines(text: str) -> None:
    with pytest.raises(LaunchError, match="host list 'n|host list 'a") as caught:
        expand_hosts(text)
    assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError):
        parse_hosts(f"{text}:4")


def test_hosts_up_to_the_limit_are_read() -> None:
    assert len(expand_hosts(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS
    assert expand_hosts("n[08-10]") == ("n08", "n09", "n10")


@pytest.mark.parametrize("text", ["4(x99999999999)", f"4(x{DIGITS})", DIGITS, "4(x100000),4"])
def test_counts_of_tasks_are_no_longer_than_machines(text: str) -> None:
    with pytest.raises(LaunchError, match="tasks per node"):
        expand_counts(text)


@pytest.mark.parametrize("slots", ["0", "99999999", DIGITS, "4.5"])
def test_slots_are_counts(slots: str) -> None:
    with pytest.raises(ConfigError, match="give 1 to 999999"):
        parse_hosts(f"a:{slots}")


def test_networks_of_any_text_are_read_at_once() -> None:
    chain = "".join(f"SwitchName=s{at} Switches=s{at + 1}\n" for at in range(3000))
    many = "".join(f"SwitchName=s{at} Nodes=n[1-100000]\n" for at in range(200))
    for text in (chain, many):
        with pytest.raises(LaunchError, match="switches"):
            read_topology(text)
    assert read_topology("x" * 1_000_000) == {}


@pytest.mark.parametrize("text", [DIGITS, f"4,{DIGITS}", f"auto:{DIGITS}"])
def test_sizes_of_thousands_of_digits(text: str) -> None:
    with pytest.raises(ConfigError, match="--federated is"):
        parse_federation(text, "--federated")


@pytest.mark.parametrize("text", [f"0/{DIGITS}", f"{DIGITS}/2", "0/99999999999"])
def test_cells_are_no_more_than_ranks(text: str) -> None:
    with pytest.raises(ConfigError, match="--cell is"):
        parse_cell(text, "--cell")


@pytest.mark.parametrize(("world", "sizes"), [(10**9, 1), (MAX_RANKS + 1, None), (10**4000, None), (8, (10**12, 8))])
def test_worlds_have_a_limit(world: int, sizes: Any) -> None:
    with pytest.raises(TopologyError, match=f"must be at most {MAX_RANKS}, got"):
        Topology(world, sizes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "--world", "1000000000", "--federated", "1"], "world size must be at most 1000000"),
        (["plan", "--world", "1000000", "--federated", "1"], ""),
        (["plan", "--world", "8", "--params", "1e16"], "--params must be at most 1e+15"),
        (["plan", "--world", "8", "--params", "1e9", "--mesh", "pp=8", "--layers", "999999999"], "--layers must be"),
        (["plan", "--world", "8", "--mesh", f"pp={DIGITS}"], "--mesh"),
        (["plan", "--federated", DIGITS], "--federated is"),
        (["plan", "--hosts", "a[1-99999999999]:4"], "hosts"),
        (["logs", "nowhere", "--ranks", "0-99999999999"], ""),
    ],
)
def test_numbers_of_the_command_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(words)
    err = capsys.readouterr().err
    assert told in err and err.count("\n") <= 2 and "Traceback" not in err
    assert code == (2 if told or words[0] == "logs" else 0)


# Workflows ------------------------------------------------------------------------------------------------------------


def record(folder: Path, content: bytes) -> int:
    (folder / "metrics.json").write_bytes(content)
    return main(["workflow", "record", str(folder / "results"), str(folder / "metrics.json")])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (b"\xff", "utf-8"),
        (b"[]", "must be a mapping"),
        (b'{"metrics": {}}', "round of file"),
        (b'{"round": "../../x", "metrics": {}}', "round of file"),
        (b'{"round": -1, "metrics": {}}', "round of file"),
        (b'{"round": 1, "metrics": [1]}', "metrics of file"),
        (b'{"round": 1, "metrics": {"loss": "x"}}', "metrics.loss of file"),
        (b'{"round": 1, "metrics": {"loss": null}}', "metrics.loss of file"),
        (f'{{"round": {DIGITS}, "metrics": {{}}}}'.encode(), "5000 digits"),
    ],
)
def test_metrics_of_a_facility(content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path, content) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_metrics_that_are_not_finite_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"round": 3, "start": None, "metrics": {"val/loss": "NaN", "val/accuracy": 0.5}, "of_later_versions": [1]}
    assert record(tmp_path, json.dumps(told).encode()) == 0
    assert capsys.readouterr().out == "round 3: val/loss nan, val/accuracy 0.5\n"
    assert json.loads((tmp_path / "results" / "metrics" / "round_3.json").read_text()) == told


def test_the_last_round_is_found_among_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("round_7", ".round_8.old", "round_x", f"round_{DIGITS[:200]}", "round_99999999999"):
        (tmp_path / "results" / name).mkdir(parents=True)
    assert main(["workflow", "begin", "results", "--rounds", "99999999"]) == 0
    assert json.loads(Path("cwl.output.json").read_text()) == {"round": 1, "start": None, "more": True}


# Files of runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"3", b"[]", b"null", b"\xff", b"{}", b'{"time": 1}', b'{"time": "x", "exit_code": 1, "headline": "",'],
)
def test_records_of_failures_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_bytes(content)
    assert read_failure(str(tmp_path), 0) is None


def test_records_of_failures_with_more_or_other_fields(tmp_path: Path) -> None:
    own = FailureRecord(1.5, 3, "ValueError: x", "", is_xffl=False, lost_peer=True)
    record_failure(own, str(tmp_path), 0)
    told = json.loads((tmp_path / "0.json").read_text())
    assert parse_failure({**told, "of_later_versions": 1}) == own == read_failure(str(tmp_path), 0)
    for name, value in (("time", None), ("time", "x"), ("exit_code", 10**30), ("headline", 3), ("lost_peer", 1)):
        assert parse_failure({**told, name: value}) is None
    assert first_failure({0: 3}, {0: own}).exit_code == 3


@pytest.mark.parametrize("content", [b"\xff\xfe", b"12 --me", b"12\n-u root\n", b"x", DIGITS.encode()])
def test_jobs_of_a_run_are_numbers(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "jobs").write_bytes(content)
    with pytest.raises(LaunchError, match="slurm/jobs .*; remove the file"):
        earlier_jobs(str(tmp_path))
    (tmp_path / "slurm" / "jobs").write_bytes(b"12\n13_4\n")
    assert earlier_jobs(str(tmp_path)) == ["12", "13_4"]


def test_a_partition_file_that_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "parts.npz"
    iid(100, 4, seed=1).save(file)
    whole = file.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("sizes.npy", np.lib.format.magic(1, 0) + b"\x76\x00{'descr': '<i8', 'shape': (10**12,), }")
    for content in (buffer.getvalue(), whole[: len(whole) // 2], b"", b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(CheckpointError):
            Partition.load(file)
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            Partition.load(file)
        except CheckpointError:
            refused += 1
    assert refused > len(damaged) // 2  # some bytes are read by nobody


def test_a_vocabulary_with_what_json_allows(tmp_path: Path) -> None:
    file = tmp_path / "vocabulary.json"
    for content in ('{"characters": ["a", "b"]}', '{"characters": "ab", "of_later_versions": 1}'):
        file.write_text(content)
        assert CharacterTokenizer.load(file).characters == "ab"
    for content in ('{"characters": 3}', '{"characters": null}', f'{{"characters": {DIGITS}}}', "[" * 100_000):
        file.write_text(content)
        with pytest.raises(ConfigError, match="is not a vocabulary"):
            CharacterTokenizer.load(file)


def test_cells_of_a_yaml_file(tmp_path: Path) -> None:
    hosts = (Host("n1"), Host("n2"))
    file = tmp_path / "cells.yaml"
    for content, told in (
        (f"a: {DIGITS}", "no YAML"),
        ("a: !!timestamp x", "no YAML"),
        ("a: &a [*a]", "no YAML"),
        ("a: n[1-99999999999]", "hosts; give at most"),
        ("a: {}", "give a list"),
        ("- a", "holds no cells"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=told):
            name_cells(hosts, f"file:{file}")


def test_a_configuration_of_aliases(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    rows = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi")]  # noqa: B905
    file.write_text("a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(rows))
    with pytest.raises(ConfigError, match="is not valid YAML: line .* with its aliases has more than"):
        load_file(str(file))
    os.truncate(file, 2**30)
    with pytest.raises(ConfigError, match=r"cannot be read"):
        load_file(str(file))


def test_a_report_of_files_that_are_no_good(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    row = {"time": 1.0, "step": 1, "values": {"train/loss": 1.0}}
    rows = [json.dumps({**row, "epoch": 10**299, "samples": 10**299 * (at % 2)}) for at in range(9)]
    (tmp_path / "metrics" / "cell_0.jsonl").write_text("\n".join(rows) + f'\n{{"time": {DIGITS}}}\n' + "[" * 10_000)
    for name in ("topology", "partition", "origins", "environment"):
        (tmp_path / f"{name}.json").write_text(f'{{"world_size": {DIGITS}}}')
    (tmp_path / "config.yaml").write_text("a: !!bool maybe")
    run = read_run(tmp_path)
    assert sum("cannot be read" in note for note in run.notes) == 6
    assert (run.metrics[0].epoch, run.metrics[0].samples) == (0, 0)


def test_a_page_of_a_lighthouse_with_huge_numbers() -> None:
    text = f"Current quorum_id: 1 Previous quorum id: {DIGITS} Quorum age: 1s<ul>Heartbeats</ul>"
    status = parse_page(text)
    assert status is not None and status.meeting is None


def test_a_record_of_bench_that_lacks_something() -> None:
    for wrong in ({}, {"versions": 3}, {"versions": {}, "hosts": [3]}):
        with pytest.raises(ConfigError, match="of the record of xffl bench"):
            bench_table(wrong, io.StringIO())
