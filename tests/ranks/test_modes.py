"""Who may read what a run writes: every file alike, as the user's umask says, and a secret its owner alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECRETS = {"token"}


def modes_below(folder: Path) -> dict[str, int]:
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return {str(file.relative_to(folder)): file.stat().st_mode & 0o777 for file in files}


UMASK = 0o027
"""Neither what most users have nor the strictest: a mode that is written down somewhere differs from it."""


def test_every_file_of_a_run_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    """A project is written, submitted to a pretended SLURM, trained and reported on."""
    program = tmp_path / "bin"
    program.mkdir()
    (program / "sbatch").write_text("#!/bin/sh\ncat >/dev/null; echo 12\n")
    (program / "squeue").write_text("#!/bin/sh\n")
    for file in program.iterdir():
        file.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "XFFL_"))}
    environ |= {"PATH": f"{program}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def xffl(*words: str) -> None:
        command = [sys.executable, "-B", "-m", "xffl", *words]
        ran = subprocess.run(
            command, cwd=folder / "demo" if words[0] != "init" else folder, env=environ, umask=UMASK,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{words}: {ran.stdout}{ran.stderr}"

    xffl("init", "demo")
    values = ["--training.max_steps=4", "--federation.every=2", "--experiment.output_dir=runs/demo"]
    xffl("submit", "config.yaml", "--elastic", "--cells", "2", "--no-follow", *values)
    xffl("exec", "--processes", "2", "--federated", "1,1", "--log-dir", "logs", "config.yaml", *values)
    xffl("report", "runs/demo")
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
