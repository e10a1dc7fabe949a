"""What the tests of ``xffl exec`` with real launchers share: starting it, and reading what its ranks wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANK = str(HERE / "exec_rank.py")
ISOLATED = str(HERE / "isolated_rank.py")
SESSION = str(HERE / "exec_session.py")
LAYOUT = str(HERE / "layout.py")
XFFL = [sys.executable, "-m", "xffl"]
DEADLINE_S = 180
"""Ranks that import torch at once take a minute on two busy cores; a group's timeout is ten."""
HOSTILE = [":", "a b", "$HOME ${x} $$", 'it\'s "q"', "", "-", "--", "*", "\n", "é", "`id`;", "%u", "\\"]
OWN_ERROR = """\
import socket, time, xffl
with xffl.session(timeout_s=60) as state:
    if state.rank == 1:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            socket.create_connection(closed.getsockname(), 2)
    time.sleep(5)
"""
"""A script that cannot reach a server of its own, which is no other rank."""
ALIKE = """\
import xffl
with xffl.session(federated=(2, 1)):
    pass
"""
"""A script that all ranks end in the same way, as one that is started in two processes."""
FOLDER = 'a\'; echo "foo" $(id) é'
Ended = tuple[int, str, str]


def start(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start a command in a folder."""
    return subprocess.Popen(
        list(command), cwd=folder, env=dict(environ), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Ended:
    """Wait for its end; exit code, standard output and error."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {deadline_s} s\n{out}\n{err}") from None
    return process.returncode, out, err


def seconds_since_one_left(out: str) -> float:
    """Seconds since the lost rank of ``exec_session.py`` went: how long the others and the launcher took to end."""
    return time.time() - float(out.split("leaves at ")[1].split()[0])


def check_isolated(folder: Path, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Read what the ranks of ``isolated_rank.py`` wrote, and check what does not depend on who has started them."""
    ranks = told(folder, sum(sizes))
    first = 0
    for cell, size in enumerate(sizes):
        of_cell = ranks[first : first + size]
        assert [one["cell"] for one in of_cell] == [[cell, len(sizes), rank, size] for rank in range(size)]
        assert [one["RANK"] for one in of_cell] == [str(rank) for rank in range(size)]
        assert {one["sum"] for one in of_cell} == {float(sum(range(first, first + size)))}, "the cell is the world"
        assert {one["mean"] for one in of_cell} == {first + (size - 1) / 2}
        first += size
    mean = sum(range(len(sizes))) / len(sizes)
    assert all(one["weights"] == [mean, mean] for one in ranks), "the round has crossed"
    assert all(one["SLURM_PROCID"] is None for one in ranks), "frameworks would take it for the rank"
    return ranks


def told(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Read what the ranks wrote, once all have."""
    deadline = time.monotonic() + DEADLINE_S
    while not all((folder / f"told.{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline, f"not all ranks wrote: {os.listdir(folder)}"
        time.sleep(0.05)
    return [json.loads((folder / f"told.{rank}").read_text()) for rank in range(ranks)]
