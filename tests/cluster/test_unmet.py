"""Mistakes that end ranks before they have met, where a launcher shows what all ranks print: told once, in a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.exec_jobs import XFFL, finish, start
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

JOIN = "import sys, xffl\nwith xffl.session(backend=sys.argv[1], federated=(1, 1)):\n    pass\n"
NOWHERE = "MASTER_ADDR=no.such.host.invalid MASTER_PORT=29400"
PLACE = "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank}"
PYTHON = [sys.executable, "train.py"]
EXEC = [*XFFL, "exec"]
CASES = {
    "a shape": (["env", "XFFL_FEDERATED=3,x"], [*EXEC, "train.py", "gloo"], "XFFL_FEDERATED is '3,x'"),
    "a script": ([], [*EXEC, "nothing.py"], "script 'nothing.py' does not exist"),
    "a backend": ([], [*PYTHON, "glo"], "backend 'glo' is unknown"),
    "no port": (["sh", "-c", f"{PLACE} exec $0 $@"], [*PYTHON, "gloo"], "but MASTER_ADDR, MASTER_PORT is missing"),
    "half a place": (["sh", "-c", "RANK={rank} exec $0 $@"], [*PYTHON, "gloo"], "would train alone"),
    "an address": (["sh", "-c", f"{PLACE} {NOWHERE} exec $0 $@"], [*PYTHON, "gloo"], "does not resolve"),
}
KINDS = ("a shape", "a script", "a backend", "an address")


def make_mistake(
    launch: Sequence[str], case: str, rank: str, environ: Mapping[str, str], folder: Path
) -> tuple[int, str]:
    """Start two ranks that make a mistake; return the exit code of their launcher, and what they print as errors."""
    (folder / "train.py").write_text(JOIN)
    before, words, _ = CASES[case]
    code, _, err = finish(start([*launch, *(word.format(rank=rank) for word in before), *words], environ, folder))
    return code, err


def tells_once(err: str, case: str) -> bool:
    """Tell whether one line says all of the mistake, and the other rank its first words at most."""
    lines = [line for line in err.splitlines() if CASES[case][2] in line]
    whole = [line for line in lines if line.startswith("xffl: ") and "xffl: rank 1 has not met" not in line]
    # On a busy machine one rank may leave, and mpirun end the other, before that has told its own.
    return "Traceback" not in err and len(whole) <= 1 <= len(lines) <= 2


@pytest.mark.parametrize("case", KINDS)
def test_mpirun(case: str, mpi: Mpi, tmp_path: Path) -> None:
    # MASTER_PORT: without mpi4py the ranks meet all the same.
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if case == "a backend" else {}
    rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    code, err = make_mistake(mpi.command(2), case, rank, {**mpi.environ, **meeting}, tmp_path)
    assert code != 0 and tells_once(err, case), err


@pytest.mark.parametrize("case", KINDS)
def test_srun(case: str, slurm: dict[str, str], tmp_path: Path) -> None:
    code, err = make_mistake(["srun", "-N1", "-n2"], case, "$SLURM_PROCID", slurm, tmp_path)
    assert code != 0 and tells_once(err, case), err


@pytest.mark.parametrize("case", ["no port", "half a place", "an address"])
def test_variables_set_by_hand(case: str, base_environ: dict[str, str], tmp_path: Path) -> None:
    """As wrappers of sites set them, of which nothing is known."""
    each = 'for r in 0 1; do R=$r "$@" & all="$all $!"; done'
    launch = f"{each}; code=1; for one in $all; do wait $one && code=0; done; exit $code"  # 0 if any rank ends with 0
    code, err = make_mistake(["sh", "-c", launch, "launch"], case, "$R", base_environ, tmp_path)
    assert code != 0 and tells_once(err, case), err
