"""What others wrote runs nothing: hostile inputs for every reader, in a process with an audit hook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_nothing_of_a_file_or_message_runs_and_nothing_is_written_outside() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hostile"], cwd=REPO, capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode in (0, 1), ran.stderr
    table = json.loads(ran.stdout)
    assert len(table) > 40 and all(one["inputs"] for one in table.values())
    # The hook is shown to work: a reader that is meant to be unsafe is caught with the same inputs.
    assert [name for name, one in table.items() if not one["is_caught"]] == []
    assert {name: one["told"] for name, one in table.items() if one["told"]} == {}
    assert [name for name, one in table.items() if one["is_marked"]] == []
    assert ran.returncode == 0
