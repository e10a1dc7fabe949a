"""The store at which a rank of an isolated cell tells the ranks of all cells that it fails."""

from __future__ import annotations

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from xffl.cluster.reaching import connection_error
from xffl.distributed.failures.first_failure import JoinedWorld
from xffl.distributed.several_worlds.isolated_cell import read_isolated_cell
from xffl.distributed.several_worlds.job_ranks import connect_job_store
from xffl.topology import Topology

__all__ = ["find_job"]


def find_job(timeout_s: float) -> JoinedWorld | None:
    """Return the ranks of all cells, of which this process is one; ``None`` where their store has gone; local."""
    isolated = read_isolated_cell()
    if isolated is None:
        return None
    host, _, port = isolated.store.rpartition(":")
    # torch writes lines of its own about a store that has gone.
    if connection_error(host, port, timeout_s) is not None:
        return None
    try:
        store = connect_job_store(isolated, timeout_s)
    except RuntimeError:  # it has gone with rank 0
        return None
    topology = Topology(sum(isolated.sizes), isolated.sizes)
    return JoinedWorld(PrefixStore("failures", store), isolated.rank, topology.world_size, topology, has_worlds=True)
