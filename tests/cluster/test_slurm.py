"""A real SLURM: four virtual nodes in two cells, on this host. Sessions in its cells are in ``test_cells.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.exec_jobs import finish, start
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

HERE = Path(__file__).parent
Run = Callable[..., list[dict[str, Any]]]
WHERE = [sys.executable, str(HERE / "where.py")]
LAYOUT = [sys.executable, str(HERE / "layout.py")]


def places(found: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [(e["node_local_rank"], e["node_local_size"], e["node_rank"], e["node_world_size"]) for e in found]


def test_even_step(slurm: dict[str, str], run: Run) -> None:
    found = run(["srun", "-N2", "--ntasks-per-node=2", *WHERE], slurm)
    assert {(e["launcher"], e["world_size"]) for e in found} == {("slurm", 4)}
    assert places(found) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
    # The nodes' names do not resolve: the controller was asked.
    assert {e["master_addr"] for e in found} == {"127.0.0.1"} and len({e["master_port"] for e in found}) == 1


def test_uneven_step(slurm: dict[str, str], run: Run) -> None:
    found = run(["srun", "-w", "a1,b1", "-N2", "-n4", *WHERE], slurm)
    assert places(found) == [(0, 3, 0, 2), (1, 3, 0, 2), (2, 3, 0, 2), (0, 1, 1, 2)]


@pytest.mark.parametrize("plugin", ["pmi2", "pmix"])
def test_steps_with_a_process_manager(plugin: str, slurm: dict[str, str], run: Run) -> None:
    found = run(["srun", "-N2", "-n2", f"--mpi={plugin}", *WHERE], slurm)
    assert {e["launcher"] for e in found} == {"slurm"} and places(found) == [(0, 1, 0, 2), (0, 1, 1, 2)]


def test_an_allocation_without_srun_is_a_single_process(slurm: dict[str, str], run: Run) -> None:
    (found,) = run(["salloc", "-Q", "-N2", "-n4", *WHERE], slurm)
    assert (found["launcher"], found["world_size"]) == ("none", 1)


def test_a_step_of_part_of_an_allocation(slurm: dict[str, str], run: Run) -> None:
    found = run(["salloc", "-Q", "-N2", "-n4", "srun", "-N1", "-n2", *WHERE], slurm)
    assert places(found) == [(0, 2, 0, 1), (1, 2, 0, 1)]


def test_mpirun_inside_an_allocation(mpi: Mpi, slurm: dict[str, str], run: Run) -> None:
    # Both start their daemons with srun, whose variables the ranks inherit: those of another step.
    environ = {**slurm, **mpi.environ}
    found = run(["salloc", "-Q", "-N2", "--ntasks-per-node=2", *mpi.command(4), *WHERE], environ)
    assert {e["launcher"] for e in found} < {"openmpi", "mpich"} and {e["world_size"] for e in found} == {4}
    assert places(found) == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]


OWN = (
    "RANK={rank} WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=127.0.0.1 MASTER_PORT={port} exec $0 $@"
)


def test_variables_of_a_wrapper_in_a_step(slurm: dict[str, str], run: Run) -> None:
    by_hand = OWN.format(rank="$SLURM_PROCID", port=free_port())
    found = run(["srun", "-N1", "-n2", "sh", "-c", by_hand, *LAYOUT, "1,1"], slurm)
    assert [(e["node"], e["cell"], e["total"]) for e in found] == [([0, 2, 0, 1], 0, 3.0), ([1, 2, 0, 1], 1, 3.0)]
    wrong = OWN.format(rank="0", port=free_port())
    code, _, err = finish(start(["srun", "-N1", "-n2", "sh", "-c", wrong, *WHERE], slurm, HERE))
    assert (
        code != 0 and "LaunchError: RANK=0, but SLURM_PROCID=1, of 2 processes in both; set RANK=$SLURM_PROCID" in err
    )
