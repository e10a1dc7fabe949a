"""The examples of the trainer run as their READMEs say, here for a few steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.worlds import run_script
from xffl.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEW = ["--training.max_steps=4", "--federation.every=2", "--training.validate_every_rounds=null"]
SHORT = {
    "02_cnn": ["--training.epochs=1", "--training.max_steps=12", "--federation.every=5"],
    "03_language_model": FEW,
    "04_llama": FEW,
}


@pytest.mark.parametrize("example", SHORT)
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["-m", "xffl", "exec", "config.yaml", *SHORT[example], f"--experiment.output_dir={folder}"]
    processes = yaml.safe_load((EXAMPLES / example / "config.yaml").read_text())["launch"]["processes"]
    ran = run_script(processes, words, EXAMPLES / example)
    assert [code for code, _ in ran] == [0] * processes and "finished" in ran[0][1]
    if example == "02_cnn":
        counts = json.loads((folder / "partition.json").read_text())["counts"]
        assert [len(row) for row in counts] == [10, 10]
        assert sum(map(sum, counts)) == 1438
        assert abs(counts[0][0] - counts[1][0]) + abs(counts[0][1] - counts[1][1]) > 20  # dealt out unevenly
    assert (folder / "checkpoints" / "latest").read_text().strip() == "final"
    for cell in (0, 1):
        rounds = [json.loads(line) for line in (folder / "rounds" / f"cell_{cell}.jsonl").open()]
        assert len(rounds) >= 2
        assert all(one["bytes_across"] > 0 for one in rounds)
    last = json.loads((folder / "metrics" / "federation.jsonl").read_text().splitlines()[-1])
    assert math.isfinite(last["values"]["val/loss"])
    assert main(["report", str(folder)]) == 0
    assert (folder / "pictures" / "report.html").stat().st_size > 10_000


def test_the_examples_are_short() -> None:
    for example in SHORT:
        lines = (EXAMPLES / example / "train.py").read_text().splitlines()
        assert len([line for line in lines if line.strip()]) <= 62, example
