"""One cell of an elastic run for each job: ``--elastic URL --cell C/CELLS`` under mpirun, and with ``--hosts``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.conftest import Mpi
from tests.cluster.exec_jobs import XFFL, finish, start
from tests.cluster.test_exec_ssh import A, B, ssh  # noqa: F401 - a fixture
from tests.ranks.test_elastic import start_lighthouse

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

SCRIPT = [str(Path(__file__).parent / "elastic_rank.py"), "3"]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = start_lighthouse(0)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def environ_of_run(environ: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the variables that the jobs of a run share: its token, and the folder of its journal."""
    return {**environ, "XFFL_TOKEN": "the token of this run", "XFFL_JOURNAL": str(folder / "journal")}


def exec_cell(url: str, cell: int, *words: str) -> list[str]:
    return [*XFFL, "exec", "--elastic", url, "--cell", f"{cell}/2", *words, *SCRIPT]


def check(jobs: dict[int, tuple[int, str, str]], sizes: tuple[int, ...]) -> None:
    """Check that the jobs have ended well, and which ranks have told what."""
    for cell, (code, out, err) in jobs.items():
        assert code == 0, err
        told = [line for line in out.splitlines() if "shared rounds" in line]
        assert sorted(told) == [
            f"cell {cell}/2 rank {rank}/{sizes[cell]} shared rounds" for rank in range(sizes[cell])
        ], out


def test_a_cell_whose_ranks_mpirun_has_started(mpi: Mpi, lighthouse: str, tmp_path: Path) -> None:
    """Of the other one xffl exec starts the ranks."""
    environ = environ_of_run(mpi.environ, tmp_path)
    running = {
        0: start([*mpi.command(2), *exec_cell(lighthouse, 0)], environ, tmp_path),
        1: start(exec_cell(lighthouse, 1, "--processes", "1"), environ, tmp_path),
    }
    check({cell: finish(process) for cell, process in running.items()}, (2, 1))


def test_a_cell_whose_ranks_are_on_two_hosts(
    ssh: dict[str, str],  # noqa: F811
    lighthouse: str,
    tmp_path: Path,
) -> None:
    environ = environ_of_run(ssh, tmp_path)
    running = {
        0: start(exec_cell(lighthouse, 0, "--hosts", f"{A}:1,{B}:1"), environ, tmp_path),
        1: start(exec_cell(lighthouse, 1, "--hosts", f"{B}:1"), environ, tmp_path),
    }
    check({cell: finish(process) for cell, process in running.items()}, (2, 1))
