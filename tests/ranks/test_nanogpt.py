"""The single-file script and its diff: the federated form trains isolated cells to one model, and continues."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.worlds import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/08_nanogpt"
SMALL = (
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=4",
    "--eval_iters=2",
    "--warmup_iters=2",
    "--lr_decay_iters=16",
)
"""A model that trains in a second."""
DIGEST = """
import hashlib, runpy
model = runpy.run_path("train.py", run_name="__main__")["model"]
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest())
"""


def train(folder: Path, *options: str) -> list[str]:
    """Train in two isolated cells of two ranks, and return what each rank has printed."""
    words = ["-m", "xffl", "exec", "--isolate", "--federated", "2,2", "digest.py", f"--dataset={ROOT / 'CHANGELOG.md'}"]
    ran = run_script(4, [*words, *SMALL, "--eval_interval=6", *options], folder)
    assert [code for code, _ in ran] == [0] * 4
    return [written for _, written in ran]


def test_the_diff_makes_cells_of_the_script_and_they_continue_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("train.py", "federate.diff"):
        shutil.copy(EXAMPLE / name, tmp_path)
    subprocess.run(["git", "apply", "federate.diff"], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "digest.py").write_text(DIGEST)
    whole = train(tmp_path, "--max_iters=16", "--out_dir=whole")
    digests = [re.findall("^weights (.*)", written, re.MULTILINE) for written in whole]
    assert len(digests[0]) == 1 and digests == [digests[0]] * 4
    validated = [re.findall(r"^step (\d+): .* val loss (\S+)", whole[rank], re.MULTILINE) for rank in (0, 2)]
    assert validated[0] != validated[1], "the cells have parts of the text"
    for losses in validated:
        assert [step for step, _ in losses] == ["0", "6", "12", "16"]
        assert float(losses[-1][1]) < float(losses[0][1]) - 0.5

    train(tmp_path, "--max_iters=12", "--out_dir=parts")  # stops two steps after a round
    resumed = train(tmp_path, "--max_iters=16", "--out_dir=parts", "--init_from=resume")
    assert all(f"weights {digests[0][0]}" in written for written in resumed)
    assert not any("step 6:" in written for written in resumed)

    # Without the line that parts the text, the seeds of RANK give all cells the same batches.
    lines = (tmp_path / "train.py").read_text().splitlines(keepends=True)
    (tmp_path / "train.py").write_text("".join(line for line in lines if "array_split" not in line))
    launch = [sys.executable, "-m", "xffl", "exec", "--processes", "2", "--isolate", "--federated", "1,1"]
    words = ["train.py", f"--dataset={ROOT / 'CHANGELOG.md'}", *SMALL, "--max_iters=11", "--out_dir=alike"]
    ended = subprocess.run([*launch, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and "all 2 cells have made steps and hold the same bits" in ended.stderr, ended.stderr
