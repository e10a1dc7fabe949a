"""Starts the jobs of this example, and reads what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["read_records", "start"]

HERE = Path(__file__).resolve().parent


def start(script: str, cells: int, *arguments: object) -> None:
    """Run a script of this folder in cells of one process each; leave with its exit code if it fails."""
    job = [sys.executable, "-m", "xffl", "exec", "--processes", str(cells), "--federated", ",".join(["1"] * cells)]
    # Ranks share the cores: one thread for each.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    words = [str(HERE / script), *map(str, arguments)]
    if code := subprocess.run([*job, *words], check=False, env=environ).returncode:
        sys.exit(code)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
