"""The digits example: its data are split as it says, and the federation reaches what it promises."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.worlds import run_script

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "01_digits"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_digits", EXAMPLE / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_are_the_real_images(digits: ModuleType) -> None:
    images, labels = digits.load()
    assert images.shape == (1797, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_split_is_disjoint_complete_and_stratified(digits: ModuleType, seed: int) -> None:
    _, labels = digits.load()
    training, validation = digits.split(labels, seed)
    assert sorted([*training, *validation]) == list(range(1797))
    for digit in range(10):
        held_out = (labels[validation] == digit).sum()
        assert abs(held_out - 0.2 * (labels == digit).sum()) <= 0.5
    assert 0.19 < len(validation) / 1797 < 0.21


@pytest.mark.parametrize(("setting", "cells"), list(product(["iid", "noniid"], [1, 2, 3])))
def test_cells_share_the_training_data_out(digits: ModuleType, setting: str, cells: int) -> None:
    _, labels = digits.load()
    training, _ = digits.split(labels, 0)
    parts = [digits.part_of_cell(training, labels, setting, cell, cells, 0) for cell in range(cells)]
    assert sorted(np.concatenate(parts)) == sorted(training)
    classes = [set(labels[part].tolist()) for part in parts]
    if setting == "iid":
        assert all(found == set(range(10)) for found in classes)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    elif cells == 2:
        assert classes == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]
    else:
        assert sorted(digit for found in classes for digit in found) == list(range(10))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("samples", [5, 63, 64, 65, 718])
def test_an_epoch_takes_every_sample_once_in_equally_many_steps(digits: ModuleType, ranks: int, samples: int) -> None:
    indices = np.arange(1000, 1000 + samples)
    loaders = [digits.Batches(indices, 16, rank, ranks, (0, digits.SHUFFLING, 0)) for rank in range(ranks)]
    for _ in range(2):
        epochs = [list(loader) for loader in loaders]
        assert {len(epoch) for epoch in epochs} == {len(loaders[0])}
        assert sorted(np.concatenate([batch for epoch in epochs for batch in epoch])) == list(indices)
        for step in zip(*epochs, strict=True):
            assert min(map(len, step)) >= 1 or samples < ranks
            assert max(map(len, step)) <= 16
            assert max(map(len, step)) - min(map(len, step)) <= 1


def test_batches_are_shuffled_anew_each_epoch_in_each_cell_and_by_seed(digits: ModuleType) -> None:
    def epochs(seed: int, cell: int) -> list[list[int]]:
        batches = digits.Batches(np.arange(100), 16, 0, 2, (seed, digits.SHUFFLING, cell))
        return [np.concatenate(list(batches)).tolist() for _ in range(3)]

    orders = [order for seed, cell in product([0, 1], [0, 1]) for order in epochs(seed, cell)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert epochs(0, 1) == epochs(0, 1)


def test_the_random_streams_are_separate(digits: ModuleType) -> None:
    streams = [
        (digits.SPLIT,),
        (digits.PARTS,),
        (digits.INITIALIZATION,),
        (digits.SHUFFLING, 0, 0),
        (digits.SHUFFLING, 1, 0),
    ]
    draws = {digits.random_stream(seed, *stream).integers(2**31) for seed in (0, 1) for stream in streams}
    assert len(draws) == 2 * len(streams)
    _, labels = digits.load()
    one, other = (digits.split(labels, seed)[0] for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, digits.split(labels, 0)[0])


# The whole demo -------------------------------------------------------------------------------------------------------


def run_example(*arguments: str, timeout_s: float) -> str:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("XFFL_")}
    command = [sys.executable, *arguments]
    job = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**environ, "PYTHONPATH": path}, check=False
    )
    assert job.returncode == 0, f"{command}\n{job.stdout}\n{job.stderr}"
    return job.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Give the folder that the demo has written, and what it has printed; CI has run it already, by ``make demo``."""
    if made := os.environ.get("DEMO_RUN"):
        return Path(made), (Path(made) / "told.txt").read_text()
    out = tmp_path_factory.mktemp("runs") / "digits"
    return out, run_example(str(EXAMPLE / "run.py"), "--out", str(out), timeout_s=600)


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_federation_reaches_its_targets(demo: tuple[Path, str]) -> None:
    summary = json.loads((demo[0] / "summary.json").read_text())
    iid, noniid = summary["settings"]["iid"], summary["settings"]["noniid"]
    assert summary["centralized"] >= 0.95
    assert iid["federated"] >= 0.97 * summary["centralized"]
    assert noniid["federated"] >= 0.20 + max(noniid["alone"])
    assert max(noniid["alone"]) <= 0.55, "a cell that never saw half of the classes cannot know them"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_metrics_are_complete_and_agree_with_the_summary(demo: tuple[Path, str], digits: ModuleType) -> None:
    records = read_records(demo[0] / "metrics.jsonl")
    summary = json.loads((demo[0] / "summary.json").read_text())
    curves: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        curves.setdefault((record["run"], record["setting"], record["cell"]), []).append(record)
    settings = ("iid", "noniid")
    assert set(curves) == {
        ("centralized", None, None),
        *(("federated", setting, None) for setting in settings),
        *(("alone", setting, cell) for setting in settings for cell in (0, 1)),
    }
    held_out = len(digits.split(digits.load()[1], 0)[1])
    for (run, setting, _), curve in curves.items():
        assert [record["round"] for record in curve] == list(range(1, len(curve) + 1))
        assert [record["step"] for record in curve] == sorted({record["step"] for record in curve})
        for record in curve:
            correct = record["accuracy"] * held_out
            assert correct == pytest.approx(round(correct)), "accuracy is a count of the held-out images"
            assert (record["bytes_across"] > 0) == (run == "federated")
        if run == "federated":
            assert curve[-1]["accuracy"] == summary["settings"][setting]["federated"]
            # Every round moves the same; each of two cells sends the model once (fp32; integer buffers: cell 0 only).
            assert len({record["bytes_across"] for record in curve}) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_draws_and_tells(demo: tuple[Path, str]) -> None:
    out, told = demo
    for name in ("curves.png", "topology.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "cell 1" in "".join(ET.parse(out / "topology.svg").getroot().itertext())
    summary = json.loads((out / "summary.json").read_text())
    for accuracy in (summary["centralized"], summary["settings"]["noniid"]["federated"]):
        assert f"{accuracy:.1%}" in told
    for name in ("metrics.jsonl", "summary.json", "curves.png", "topology.svg"):
        assert name in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_determined_by_its_seed(demo: tuple[Path, str], tmp_path: Path) -> None:
    """A federation trained again, in another job and for fewer epochs, gives the same numbers to the last digit."""
    again = tmp_path / "again.jsonl"
    words = [str(EXAMPLE / "train.py"), "--setting", "noniid", "--epochs", "3", "--out", str(again)]
    run_script(4, words, tmp_path, XFFL_FEDERATED="2,2")
    first = [r for r in read_records(demo[0] / "metrics.jsonl") if (r["run"], r["setting"]) == ("federated", "noniid")]
    second = read_records(again)[:-1]  # the last round comes after the last step, wherever that is
    for record in (*first, *second):
        del record["seconds"]
    assert first[: len(second)] == second and len(second) > 4
