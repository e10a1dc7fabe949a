"""The store at which a rank of an isolated cell tells the ranks of all cells that it fails."""

from __future__ import annotations

from contextlib import suppress

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from xffl.cluster.reaching import connection_error
from xffl.distributed.failures.first_failure import JoinedWorld
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell, read_isolated_cell
from xffl.distributed.several_worlds.job_ranks import ENDED, connect_job_store
from xffl.errors import LaunchError
from xffl.topology import Topology

__all__ = ["find_job", "tell_ended"]


def find_job(timeout_s: float) -> JoinedWorld | None:
    """Return the ranks of all cells, of which this process is one; ``None`` where their store has gone; local."""
    isolated = read_isolated_cell()
    if isolated is None or not _has_store(isolated, timeout_s):
        return None
    try:
        store = connect_job_store(isolated, timeout_s)
    except (LaunchError, RuntimeError):  # it has gone with rank 0
        return None
    topology = Topology(sum(isolated.sizes), isolated.sizes)
    return JoinedWorld(PrefixStore("failures", store), isolated.rank, topology.world_size, topology, has_worlds=True)


def tell_ended(isolated: IsolatedCell, store: Store, timeout_s: float) -> None:
    """Tell the ranks that wait for this one at the store of the job, now or later, that it will not come; local."""
    # Where it goes with rank 0 in the middle, the others see that, and this rank raises what it ends by.
    with suppress(RuntimeError):
        if _has_store(isolated, timeout_s):
            store.set(ENDED, "")


def _has_store(isolated: IsolatedCell, timeout_s: float) -> bool:
    """Tell whether the store of the job answers: torch writes lines of its own about one that has gone."""
    host, _, port = isolated.store.rpartition(":")
    return connection_error(host, port, timeout_s) is None
