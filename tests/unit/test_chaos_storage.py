"""The short form of the command that saves and reads on storage that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chaos.storage import KINDS, Kind, LostError, MixtureError, SkipError, Try, run_kind
from xffl.errors import CheckpointError

REPO = Path(__file__).resolve().parents[2]


def test_no_try_loses_or_mixes_anything() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.chaos.storage"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {line.split()[0]: line for line in ran.stdout.splitlines()}
    assert rows.keys() >= KINDS.keys()
    for name, one in KINDS.items():
        assert "skipped: " in rows[name] or int(rows[name].split()[1]) == one.short, rows[name]


def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    errors = [None, CheckpointError("it"), OSError("it"), MixtureError("it"), LostError("it")]

    def run(one: Try) -> None:
        if (error := errors[one.number]) is not None:
            raise error

    tally = run_kind(Kind("it", run, 5, 5), 5, tmp_path, 1)
    assert dict(tally.counts) == {"ok": 1, "named": 1, "raw": 1, "mixture": 1, "lost": 1}
    assert tally.notes["raw"] == "try 2: OSError: it" and not list(tmp_path.iterdir())
    errors[0] = SkipError("needs root")
    tally = run_kind(Kind("it", run, 5, 5), 5, tmp_path, 1)
    assert tally.counts.total() == 0 and tally.skipped == "needs root"
