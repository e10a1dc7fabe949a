"""What other programs tell: the MPI that mpi4py loads and the mpirun that belongs to it, SLURM's commands, GPUs.

Every program gets a time limit, and what may abort the process that loads it is loaded in a child.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding
from xffl.extras import install_command

__all__ = ["check_gpus", "check_mpi", "check_slurm", "find_family"]

MPI_LAUNCHERS = ("openmpi", "mpich", "pals", "mvapich")
"""Rows of the table of launchers that are an ``mpirun``."""

_LIMIT_S = 20.0
MPI_LIMIT_S = _LIMIT_S
"""How long a rank may look at its MPI before it comes to the others."""

_ASK_MPI = """\
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\\0 ").splitlines()[0])
"""
"""Only asks for the name: MPI_Init in a child of a rank would speak for the rank."""

_FAMILIES = {
    "openmpi": r"open ?mpi|openrte|prrte|prte",
    "intel": r"intel\(r\) mpi",
    "mpich": r"mpich|hydra|mvapich|cray",
}
"""MPIs by what their libraries and launchers say of themselves; those of a family can start each other's ranks."""


class _Ran(NamedTuple):
    exit_code: int
    output: str
    """Standard output, then standard error."""


def check_mpi(launcher: str, needed: bool, environ: Mapping[str, str]) -> Finding:
    """Look at the MPI that mpi4py loads, whether ``mpirun`` belongs to it, and whether it started this process.

    :param launcher: Row of the table of launchers that started this process.
    :param needed: Whether a missing MPI is an error even where no MPI started this process.
    :param environ: Environment to read.
    :return: The finding.
    """
    started = launcher in MPI_LAUNCHERS
    bad = ERROR if started or needed else WARNING
    advice = (
        f"load the site's MPI module and run pip install mpi4py ({install_command('mpich')} where there is no MPI); "
        "MPI4PY_MPIABI=openmpi or mpich chooses among several"
    )
    ran = _run([sys.executable, "-c", _ASK_MPI], environ)
    if ran is None or ran.exit_code != 0:
        reason = "it did not answer" if ran is None else _reason(ran.output)
        rest = "" if started or needed else "; only jobs that mpirun starts need it"
        return Finding("mpi", bad, f"mpi4py finds no MPI runtime ({reason}){rest}", advice)
    library = (ran.output.strip().splitlines() or ["no name"])[0]
    library = re.split(r", package|, ident", library)[0][:80]
    family = find_family(library)
    if started:
        expected = "openmpi" if launcher == "openmpi" else "mpich"
        if family is not None and family != expected and not (expected == "mpich" and family == "intel"):
            return Finding(
                "mpi", ERROR, f"mpi4py loads {library}, but an mpirun of {launcher} started this process", advice
            )
        return Finding("mpi", OK, f"{library}, started by its own launcher")
    program = shutil.which("mpirun", path=environ.get("PATH")) or shutil.which("mpiexec", path=environ.get("PATH"))
    if program is None:
        return Finding(
            "mpi", bad, f"mpi4py loads {library}, but there is no mpirun on PATH", "load the module of that MPI"
        )
    told = _run([program, "--version"], environ)
    other = find_family(told.output) if told is not None else None
    if other is None:
        return Finding("mpi", WARNING, f"mpi4py loads {library}; {program} does not tell whose it is", advice)
    if family is not None and {family, other} not in ({family}, {"intel", "mpich"}):
        return Finding("mpi", bad, f"mpi4py loads {library}, but {program} is of {other}: each rank is alone", advice)
    return Finding("mpi", OK, f"{library}; {program} belongs to it")


def find_family(text: str) -> str | None:
    """Tell whose MPI a library's or launcher's version text is of.

    :param text: What ``MPI_Get_library_version`` or ``mpirun --version`` says.
    :return: ``openmpi``, ``intel`` or ``mpich`` with its relatives, ``None`` where it is another.
    """
    return next((name for name, words in _FAMILIES.items() if re.search(words, text.lower())), None)


def check_slurm(launcher: str, needed: bool, environ: Mapping[str, str]) -> Finding:
    """Look whether SLURM's commands are there, and its controller answers.

    :param launcher: Row of the table of launchers that started this process.
    :param needed: Whether a missing SLURM is an error.
    :param environ: Environment to read.
    :return: The finding.
    """
    inside = launcher == "slurm" or "SLURM_JOB_ID" in environ
    names = ("srun", "sbatch", "squeue", "scontrol")
    missing = [name for name in names if shutil.which(name, path=environ.get("PATH")) is None]
    bad = ERROR if needed else WARNING
    advice = "load the site's slurm module, or run it on a login node"
    if len(missing) == len(names):
        if inside or needed:
            return Finding("slurm", bad, "none of SLURM's commands is on PATH", advice)
        return Finding("slurm", OK, "no SLURM on this machine; none is needed here")
    if missing:
        return Finding("slurm", bad, f"SLURM's commands {', '.join(missing)} are not on PATH", advice)
    version = _run(["srun", "--version"], environ)
    answer = _run(["scontrol", "ping"], environ)
    named = version.output.strip() if version is not None and version.exit_code == 0 else "SLURM"
    # Commands that are installed without a cluster behind them harm nobody who starts with ssh or mpirun.
    if answer is None or answer.exit_code != 0 or "UP" not in answer.output:
        status = bad if inside or needed or "SLURM_CONF" in environ else OK
        reason = "no answer" if answer is None else _reason(answer.output)
        advice = "ask the site, or set SLURM_CONF" if status != OK else ""
        return Finding("slurm", status, f"{named} is installed, but no controller answers ({reason})", advice)
    return Finding("slurm", OK, f"{named}, the controller answers")


def check_gpus(needed: bool, environ: Mapping[str, str]) -> tuple[Finding, int]:
    """Look for GPUs with the vendors' own commands.

    :param needed: Whether no GPU is an error.
    :param environ: Environment to read.
    :return: The finding, and how many GPUs there are.
    """
    asked = [name for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS") if environ.get(name)]
    queries: dict[str, Sequence[str]] = {
        "nvidia-smi": ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "rocm-smi": ("rocm-smi", "--showproductname", "--csv"),
    }
    failures = []
    for program, command in queries.items():
        if shutil.which(program, path=environ.get("PATH")) is None:
            continue
        ran = _run(command, environ)
        lines = [] if ran is None else [line.strip() for line in ran.output.splitlines() if line.strip()]
        if program == "rocm-smi":
            lines = [line for line in lines if re.match(r"card\d+,", line)]
        if ran is None or ran.exit_code != 0 or not lines:
            reason = "it did not answer" if ran is None else _reason(ran.output)
            failures.append(f"{program} fails: {reason}")  # a node of AMD's may have NVIDIA's command as well
            continue
        return Finding("gpus", OK, f"{len(lines)} x {_most_common(lines)}"), len(lines)
    if failures:
        advice = "load the driver on this node, or take the node out of the job"
        return Finding("gpus", ERROR if needed or asked else WARNING, "; ".join(failures), advice), 0
    if needed or asked:
        why = f"{asked[0]}={environ[asked[0]]} promises some" if asked else "they are needed"
        advice = "ask for them (--gpus-per-node), and see that the driver's commands are on PATH"
        return Finding("gpus", ERROR, f"neither nvidia-smi nor rocm-smi is here, but {why}", advice), 0
    return Finding("gpus", OK, "none; training will use the CPU"), 0


def _most_common(lines: Collection[str]) -> str:
    kinds = list(dict.fromkeys(lines))
    return kinds[0] if len(kinds) == 1 else " / ".join(kinds)


def _run(command: Sequence[str], environ: Mapping[str, str]) -> _Ran | None:
    """Run a program; ``None`` where it cannot be started or does not end."""
    try:
        ran = subprocess.run(
            list(command),
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _Ran(ran.returncode, ran.stdout + ran.stderr)


def _reason(output: str) -> str:
    """Return the line of an output that says what is wrong: the last one that is no loader's detail."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(\w+Error|error|fatal)\b", line, re.IGNORECASE)]
    return (telling or lines or ["no message"])[-1][:160]
