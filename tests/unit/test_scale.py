"""The benchmark that draws utilization over bandwidth and compares forecasts with measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def texts(path: Path) -> list[str]:
    nodes = ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in nodes]


def scale(*words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", str(ROOT / "benchmarks" / "scale.py"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert not any(line.rpartition("|")[2].strip() == "torch" for line in ran.stderr.splitlines())
    return ran.stdout


def test_scale_draws_and_tells_what_it_takes_for_granted(tmp_path: Path) -> None:
    told = scale("--out", str(tmp_path), "--points", "5", "--every", "40")
    assert "4 equal cells" in told and "100B parameters, 4096 GPUs" in told
    record = json.loads((tmp_path / "scale.json").read_text())
    assert record["date"] and record["versions"]["xffl"] and record["assumptions"]
    assert len(record["records"]) == 3 * 5 * 5
    for panel in {row["panel"] for row in record["records"]}:
        by_run: dict[str, list[float]] = {}
        for row in record["records"]:
            if row["panel"] == panel:
                by_run.setdefault(row["run"], []).append(row["utilization"])
        assert all(shares == sorted(shares) for shares in by_run.values())
        exact, plain = by_run["round every 40 steps, exact (fp32)"], by_run["data parallelism, every step (bf16)"]
        assert all(mine > its for mine, its in zip(exact[:-1], plain, strict=False))
    for text in ("100B parameters, 4096 GPUs", "data parallelism, every step (bf16)", "time spent on local steps (%)"):
        assert texts(tmp_path / "scale.svg").count(text) == 1
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_scale_compares_with_measurements(tmp_path: Path) -> None:
    """A record as wan.py writes it, for a link of exactly 200 Mbit/s: the ratio is the forecast over what it says."""
    model = 12 * 4 * 1024 * 1025
    rows = {"tcp": {"seconds": model * 8 / 200e6 + 0.01}, "round": {"seconds": 2.0}, "hsdp_step": {"seconds": 5.0}}
    record = {
        "benchmark": "wan",
        "date": "2026-11-21",
        "machine": "none",
        "link": {"rate_mbit": 200.0, "delay_ms": 10.0},
        "cells": [4, 4],
        "hsdp": 2,
        "model_bytes": model,
        "tensors": 24,
        "rows": rows,
    }
    (tmp_path / "wan.json").write_text(json.dumps(record))
    told = scale("--validate", str(tmp_path / "wan.json"))
    # 2.015 s for the bytes, a round trip for each vote, the first word and the last byte on their way; no pause.
    expected = 2.015 + 2 * 0.02 + 0.02
    name, measured, found, ratio = told.splitlines()[-1].split()
    assert (name, measured) == ("round", "2.000s")
    assert float(found[:-1]) == pytest.approx(expected, rel=0.02)
    assert float(ratio) == pytest.approx(float(found[:-1]) / 2, abs=1e-3)


@pytest.mark.parametrize(
    "record", sorted((ROOT / "benchmarks" / "results").glob("wan*.json")), ids=lambda path: path.stem
)
def test_forecasts_are_within_a_tenth_of_what_was_measured(record: Path) -> None:
    """All records that are kept; codes are left out, since they wait for cores that ranks and link share (the docs)."""
    rows = [line.split() for line in scale("--validate", str(record)).splitlines()[2:]]
    ratios = {name: float(ratio) for name, _, _, ratio in rows}
    exact = {name: ratio for name, ratio in ratios.items() if name not in ("bf16", "int8", "int4")}
    assert "round" in exact and exact.keys() & {"in_place", "one_replica"}
    assert all(0.9 <= ratio <= 1.1 for ratio in exact.values()), exact


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--validate", "nowhere.json"), "cannot be read"),
        (("--validate", str(ROOT / "setup.cfg")), "cannot be read as JSON"),
        (("--validate", str(ROOT / "tests" / "reference" / "distributed_state.json")), "is no record of wan.py"),
        (("--out", str(ROOT / "setup.cfg")), "setup.cfg cannot be written into: [Errno 17]"),
        (("--every", "23"), "--every 23 is no number from 24 on"),
        (("--points", "0"), "--points 0 is no number from 1 on"),
        (("--latency-ms", "-1"), "--latency-ms -1.0 is no number from 0 on"),
        (("--latency-ms", "nan"), "--latency-ms nan is no number from 0 on"),
    ],
)
def test_scale_says_what_it_cannot_read(words: tuple[str, ...], told: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scale.py"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode != 0 and "Traceback" not in ran.stderr
    assert told in ran.stderr
