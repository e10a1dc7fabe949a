"""Who may read what a run writes: every file alike, as the user's umask says, and a secret its owner alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.ports import free_port
from tests.worlds import be_launched, run_world
from xffl.cli.main import main

SECRETS = {"token"}
UMASK = 0o027
"""Neither what most users have nor the strictest: a mode that is written down somewhere differs from it."""


def modes_below(folder: Path) -> dict[str, int]:
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return {str(file.relative_to(folder)): file.stat().st_mode & 0o777 for file in files}


def run_xffl(rank: int, world_size: int, port: int, folder: str, environ: dict[str, str], words: list[str]) -> int:
    """Run a command of xffl, or be a rank of it, in a process that need not import torch for it."""
    os.umask(UMASK)
    os.environ.update(environ)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    if world_size > 1:
        be_launched(rank, world_size, port)
    return main(words)


def test_every_file_of_a_run_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    """A project is written, submitted to a pretended SLURM, trained and reported on; a launcher writes logs."""
    program = tmp_path / "bin"
    program.mkdir()
    (program / "sbatch").write_text("#!/bin/sh\ncat >/dev/null; echo 12\n")
    (program / "squeue").write_text("#!/bin/sh\n")
    for file in program.iterdir():
        file.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environ = {"PATH": f"{program}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def xffl(*words: str, ranks: int = 1) -> None:
        place = folder / "demo" if words[0] != "init" else folder
        arguments = (free_port(), str(place), environ, list(words))
        assert run_world(ranks, run_xffl, *arguments, init=False) == [0] * ranks, words

    xffl("init", "demo")
    values = ["--training.max_steps=4", "--federation.every=2", "--experiment.output_dir=runs/demo"]
    xffl("submit", "config.yaml", "--elastic", "--cells", "2", "--no-follow", *values)
    two_cells = ["--launch.processes=2", "--launch.federated=[1,1]"]
    xffl("exec", "config.yaml", *two_cells, *values, ranks=2)
    xffl("report", "runs/demo")
    (folder / "hello.py").write_text("print('hello')")
    xffl("exec", "--processes", "2", "--federated", "1,1", "--log-dir", "logs", "../hello.py")
    (folder / "hello.py").unlink()
    modes = modes_below(folder)
    told = {Path(name).name for name in modes}
    assert {"config.yaml", "12.sbatch", "jobs", "token", "report.html", "rank_00000_cell_0.log"} <= told
    assert any(name.endswith(".jsonl") for name in told) and any("checkpoints" in name for name in modes)
    wrong = {
        name: oct(mode)
        for name, mode in modes.items()
        if mode != (0o600 if Path(name).name in SECRETS else 0o666 & ~UMASK)
    }
    assert not wrong
