"""SLURM's own commands: a script is submitted, a job cancelled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from xffl.cluster.slurm.submit import Job
from xffl.errors import LaunchError

__all__ = ["cancel_job", "find_busy", "run_slurm", "submit_job"]

_DEADLINE_S = 120.0


def submit_job(script: str, job: Job, *, is_chained: bool = False) -> str:
    """Hand a batch script to SLURM, and keep a copy of it beside the job's output.

    :param script: Its text.
    :param job: What it runs.
    :param is_chained: Whether the job waits for others, which may write to the same folder before it.
    :return: The job's number.
    :raises LaunchError: if there is no SLURM here, it refuses the job, or another job writes to the same folder.
    """
    import fcntl  # POSIX only

    folder = Path(job.run_folder) / "slurm"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(job.log).parent.mkdir(parents=True, exist_ok=True)
        jobs = (folder / "jobs").open("a+", encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be written: {error.strerror}; give another experiment.output_dir"
        ) from error
    with jobs:
        with suppress(OSError):  # not every shared file system locks; two submissions at one moment are rare
            fcntl.flock(jobs, fcntl.LOCK_EX)
        jobs.seek(0)
        busy = find_busy(jobs.read().split()) if job.is_exclusive and not is_chained else None
        if busy is not None:
            raise LaunchError(
                f"job {busy}, which has not ended, writes to {job.run_folder}; give another experiment.output_dir or "
                f"experiment.name, scancel {busy}, or --slurm.dependency afterany:{busy}"
            )
        ran = run_slurm(["sbatch", "--parsable"], script)
        if ran.returncode != 0:
            lines = (line.removeprefix("sbatch: ").removeprefix("error: ") for line in ran.stderr.splitlines())
            raise LaunchError(f"sbatch refused the job: {'; '.join(lines)}; change the section slurm (--dry-run)")
        number = ran.stdout.strip().partition(";")[0]
        try:
            os.write(jobs.fileno(), f"{number}\n".encode())  # without a buffer that would be written at the file's end
            _keep_script(folder / f"{number}.sbatch", script)
        except OSError as error:
            raise LaunchError(
                f"job {number} is submitted, but {folder} cannot be written: {error.strerror}; squeue -j {number} "
                f"shows the job, scancel {number} ends it"
            ) from error
    return number


def _keep_script(file: Path, script: str) -> None:
    """Write a script for its owner alone: it holds the words of the command line, some of which may be secret."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as kept:
        kept.write(script)


def find_busy(jobs: Sequence[str]) -> str | None:
    """Return the first of some jobs of this user that has not ended yet.

    :param jobs: Numbers of jobs.
    :return: The number, or ``None``.
    :raises LaunchError: if SLURM cannot be asked.
    """
    if not jobs:
        return None
    ran = run_slurm(["squeue", "--me", "--noheader", "--format=%F"])
    if ran.returncode != 0:
        raise LaunchError(f"squeue failed: {' '.join(ran.stderr.split())}; try again when the controller answers")
    alive = set(ran.stdout.split())
    return next((job for job in jobs if job in alive), None)


def cancel_job(job: str) -> None:
    """Cancel a job, with all tasks of an array.

    :param job: Its number.
    :raises LaunchError: if SLURM does not do it.
    """
    ran = run_slurm(["scancel", job])
    if ran.returncode != 0:
        raise LaunchError(f"scancel {job} failed: {' '.join(ran.stderr.split())}; the job may still be there")


def run_slurm(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands.

    :param command: The command.
    :param text: Its standard input.
    :return: How it ended.
    :raises LaunchError: if there is no such command, or it does not end.
    """
    environ = dict(os.environ)
    if "SLURM_JOB_ID" in environ:
        # A job that is submitted from inside another is not to inherit its tasks and places.
        kept = ("SLURM_CONF", "SLURM_CLUSTERS")
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM_") or name in kept}
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]} is not there; HINT: submit from a login node of a SLURM cluster, or see --dry-run"
        )
    try:
        return subprocess.run(
            list(command), input=text, env=environ, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} did not answer in {_DEADLINE_S:.0f} s; see whether SLURM is up") from error
