"""Real mpirun: Debian's Open MPI and MPICH from its PyPI wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.exec_jobs import finish, start
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

HERE = Path(__file__).parent
Run = Callable[..., list[dict[str, Any]]]
WHERE = [sys.executable, str(HERE / "where.py")]
LAYOUT = [sys.executable, str(HERE / "layout.py")]


def test_four_ranks_find_each_other(mpi: Mpi, run: Run) -> None:
    found = run([*mpi.command(4), *WHERE], mpi.environ)
    assert [(e["rank"], e["world_size"], e["node_local_size"]) for e in found] == [(r, 4, 4) for r in range(4)]
    assert sorted(e["node_local_rank"] for e in found) == [0, 1, 2, 3]
    assert {(e["node_rank"], e["node_world_size"], e["master_addr"]) for e in found} == {(0, 1, "127.0.0.1")}
    assert len({e["master_port"] for e in found}) == 1


def test_uneven_pretended_hosts(mpich: Mpi, run: Run) -> None:
    hosts = ("-launcher", "fork", "-hosts", "127.0.0.2:3,127.0.0.3:1")
    found = run([*mpich.command(4, *hosts), *WHERE], mpich.environ)
    places = [(e["node_local_rank"], e["node_local_size"], e["node_rank"], e["node_world_size"]) for e in found]
    assert places == [(0, 3, 0, 2), (1, 3, 0, 2), (2, 3, 0, 2), (0, 1, 1, 2)]


def test_one_rank_needs_no_rendezvous(mpi: Mpi, run: Run) -> None:
    (found,) = run([*mpi.command(1), *WHERE], mpi.environ)
    assert (found["world_size"], found["master_addr"]) == (1, None) and found["launcher"] in ("openmpi", "mpich")


def test_a_session_over_mpi(mpi: Mpi, run: Run) -> None:
    found = run([*mpi.command(3), *LAYOUT, "2,1"], mpi.environ)
    assert [e["cell"] for e in found] == [0, 0, 1]
    assert {e["total"] for e in found} == {6.0}
    assert {tuple(e["listens"]) for e in found} == {("127.0.0.1",)}  # beside what MPI listens at


PROCESS = (
    "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE} "
    "LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}"
)


def test_variables_of_a_wrapper_under_mpirun(mpi: Mpi, run: Run) -> None:
    meeting = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    found = run([*mpi.command(3), "sh", "-c", f"{PROCESS} {meeting} exec $0 $@", *LAYOUT, "2,1"], mpi.environ)
    assert [(e["node"][1:], e["cell"], e["total"]) for e in found] == [
        ([3, 0, 1], 0, 6.0), ([3, 0, 1], 0, 6.0), ([3, 0, 1], 1, 6.0),
    ]  # fmt: skip
    assert sorted(e["node"][0] for e in found) == [0, 1, 2]


def test_ranks_that_tell_too_little(mpi: Mpi, tmp_path: Path) -> None:
    """As those of a launcher of the same kind that sets a rank alone: none of them trains by itself."""
    lone = "unset OMPI_COMM_WORLD_SIZE MPI_LOCALRANKID PMI_SIZE; exec $0 $@"
    code, out, err = finish(start([*mpi.command(2), "sh", "-c", lone, *WHERE], mpi.environ, tmp_path))
    assert code != 0 and "world_size" not in out and "looks like " in err and "set RANK, WORLD_SIZE" in err
