"""Process groups and meshes, made for a topology in the same order on every rank, and what goes with them.

That is the checks of backends and devices, and the threads that still communicate when the process leaves its groups.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.checks import index_of, integer
from xffl.compat.gloo_connections import connect_lazily, is_lazy
from xffl.compat.group_names import fresh_group_name, fresh_names
from xffl.errors import ConfigError, StateError
from xffl.topology import Topology

__all__ = [
    "Create",
    "Groups",
    "destroy_group",
    "leave_after",
    "make_groups",
]


Groups = dict[str, tuple[dist.ProcessGroup, ...] | None]
"""Handles by kind of group (see :meth:`xffl.topology.Topology.groups_of`); ``None`` where the rank is not a member."""
Create = Callable[[tuple[int, ...], str], dist.ProcessGroup]
"""Makes the group of some ranks, under a name."""

ALL_KINDS = frozenset({"federation", "shard", "replica", "federated"})
"""Kinds of groups that a federation needs."""
ON_GPUS = "cpu:gloo,cuda:nccl"
"""Backend on GPUs, if not asked for otherwise."""
DEFAULT_STREAMS = 4
"""CUDA streams of a rank, if not asked for otherwise."""

STREAMED = frozenset({"replica", "federated"})
"""Kinds of a state's groups that have one handle for each CUDA stream."""
IN_TURN = frozenset({"federated"})
"""Those that a round's buckets use in turn; of the others it uses the first handle."""
MODEL_AXES = ("dp_replicate", "dp_shard_cp", "tp")
"""Axes of the mesh that FSDP and tensor parallelism share; torch wants both to be parts of one mesh."""


def make_groups(
    create: Create,
    topology: Topology,
    rank: int,
    kinds: Collection[str],
    handles: int,
    streamed: Collection[str] = STREAMED,
) -> Groups:
    """Make this rank's groups of the given kinds: several handles of those that are streamed.

    Collective over the world: every rank makes the same number of groups in the same order, a placeholder of itself
    where it is not a member, since a group is named by how many the rank has made.
    """
    made: Groups = {}
    for group in topology.groups_of(rank):
        if group.kind not in kinds:
            continue
        count = handles if group.kind in streamed else 1
        names = (f"xffl_{group.kind}" if group.member else f"xffl_{group.kind}_placeholder" for _ in range(count))
        groups = tuple([create(group.ranks, name) for name in names])
        made[group.kind] = groups if group.member else None
    return made


def new_group(
    ranks: Iterable[int],
    timeout_s: float,
    group_desc: str | None,
    backend: str | None = None,
    *,
    has_messages: bool = False,
) -> dist.ProcessGroup:
    """Make a group of some ranks, of the world's backend if no other is given; collective over these ranks only.

    ``has_messages`` tells whether single ranks send to each other in it, instead of collectives alone.
    """
    members = list(ranks)
    with fresh_group_name(members), connected(len(members), has_messages=has_messages) as connect:
        group: dist.ProcessGroup = dist.new_group(
            members,
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=True,
            group_desc=group_desc,
        )
        connect(group)
    return group


_TAG = 7_002
"""Tells the messages that connect pairs from those of votes and of callers."""


@contextmanager
def connected(size: int, *, has_messages: bool = False) -> Iterator[Callable[[dist.ProcessGroup | None], None]]:
    """Make a group of so many ranks in the block, and give it to what the block gets; collective over these ranks.

    Over gloo a large group that runs collectives alone gets the connections of these, and no others: about two for each
    doubling of its ranks. One in which single ranks send to each other gets all. ``None`` stands for the world.
    """
    lazily = is_lazy(size, world_size=dist.get_world_size() if dist.is_initialized() else None)

    def connect(group: dist.ProcessGroup | None) -> None:
        # A rank that is lost from here on is noticed as fast as in a mesh: no collective connects first.
        if not lazily or "gloo" not in dist.get_backend_config(group):
            return
        if has_messages and group is not None:
            _connect_all_pairs(group)
        else:
            dist.barrier(group)

    with connect_lazily(lazily):
        yield connect


def _connect_all_pairs(group: dist.ProcessGroup) -> None:
    """Connect all ranks of a group over gloo that connects lazily; collective over the group."""
    rank = group.rank()
    values = torch.zeros(1, dtype=torch.uint8)
    # In this order on all ranks the first pair that is not connected yet is always next for both of its ranks.
    for peer in range(group.size()):
        if peer < rank:
            group.recv([values], peer, _TAG).wait()
        elif peer > rank:
            group.send([values], peer, _TAG).wait()


def cell_mesh(topology: Topology, rank: int, groups: Groups, device_type: str) -> DeviceMesh:
    """Lay a mesh over the groups of this rank's cell. Nothing moves and no group is made.

    The dimensions are ``replica`` and ``shard``, or ``shard`` alone without HSDP.
    """
    cell = topology.cell_of(rank)
    by_replica = [topology.shard_group(cell, one) for one in range(topology.replicas(cell))]
    ranks = torch.tensor(by_replica, dtype=torch.int64, device="cpu")
    name = fresh_names(device_type, topology.federation(cell))
    handles = []
    for kind in ("replica", "shard") if topology.is_hsdp else ("federation",):
        members = groups[kind]
        if members is None:
            raise StateError(f"this rank is not in its own {kind} group; make the groups from one topology")
        handles.append(members[0])
    if topology.is_hsdp:
        names = (name("replica"), name("shard"))
        mesh = DeviceMesh.from_group(handles, device_type, mesh=ranks, mesh_dim_names=names)
    else:
        mesh = DeviceMesh.from_group(handles[0], device_type, mesh_dim_names=(name("shard"),))
    if device_type == "cuda":
        from xffl.compat.dtensor import keep_random_state

        keep_random_state(mesh)
    return mesh


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group, when nobody listens to it any more; nothing moves."""
    dist.destroy_process_group(group)


def check_backend(backend: object, what: str = "backend") -> dist.Backend:
    """Return a backend that this build of torch has; pairs such as ``cpu:gloo,cuda:nccl`` are taken apart."""
    if not isinstance(backend, str):
        raise ConfigError(f"{what} must be a name such as 'gloo' or 'nccl', got {backend!r}")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        known = sorted(set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED})
        if name not in known:
            raise ConfigError(f"{what} {backend!r} is unknown; torch has {', '.join(known)}")
        if not dist.is_backend_available(name):
            raise ConfigError(f"{what} {backend!r} is not in this build of torch {torch.__version__}; give 'gloo'")
    return dist.Backend(backend)


def with_host_side(backend: str) -> dist.Backend:
    """Return a backend of groups in cells whose results come from the host: NCCL alone gets gloo beside it."""
    return dist.Backend(ON_GPUS if "nccl" in backend and "cpu" not in backend else backend)


def check_link_backend(link: object, backend: str, device: torch.device) -> dist.Backend | None:
    """Return the backend between cells where it is another one than inside them; ``None`` and ``auto`` ask for none."""
    if link is None or link == "auto":
        return None
    if device.type == "cpu" and "nccl" in str(link):
        raise ConfigError(f"link_backend {link!r} needs GPUs, but the device is the CPU; leave it out, or give 'gloo'")
    checked = check_backend(link, "link_backend")
    if "nccl" not in checked:
        return None if checked == backend else checked
    if "nccl" not in backend:
        raise ConfigError(f"link_backend {link!r} needs NCCL in the cells, too, but backend is {backend!r}; give one")
    return None


def check_device(what: str, device: object, kind: str | None = None, *, may_be_meta: bool = False) -> torch.device:
    """Return a device that this process can use."""
    shown = str(device)
    if (number := index_of(device)) is not None:
        device = f"cuda:{number}"
    if isinstance(device, str):
        with suppress(RuntimeError):  # refused below, as it is
            device = torch.device(device)
    if not isinstance(device, torch.device):
        raise ConfigError(f"{what} must be a device such as 'cpu', 'cuda' or 'cuda:0', got {device!r}")
    if device.type not in ("cpu", "cuda") and not (may_be_meta and device.type == "meta"):
        raise ConfigError(f"{what} must be 'cpu' or 'cuda', got {str(device)!r}")
    if kind is not None and device.type != kind:
        raise ConfigError(f"{what} must be a {kind} device, got {str(device)!r}; or give set_global another type")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not 0 <= (device.index or 0) < count:  # torch lets large indices overflow
            raise ConfigError(f"{what} {shown!r} does not exist: torch sees {count} GPUs; give another, or 'cpu'")
    return device


def check_streams(streams: object, device: torch.device) -> int | None:
    """Return how many CUDA streams to make: none on CPU."""
    if streams is None:
        return DEFAULT_STREAMS if device.type == "cuda" else None
    count = integer("streams", streams, hint=f"give at least 1, or None for {DEFAULT_STREAMS}")
    if device.type != "cuda":
        raise ConfigError(f"streams {count} were asked for, but {device} has none; leave streams out")
    return count


class _Background(Protocol):
    """Work on a thread of its own that can be waited for."""

    def wait(self) -> None: ...

    def stop(self, within_s: float) -> None: ...


_STOP_S = 2.0
"""How long work may go on where nobody waits for its result, and then to stop when it is asked to."""

_under_way: WeakSet[_Background] = WeakSet()
"""State of the process, not of a world: :mod:`atexit` ends what is left when no object that knows it is left."""


def leave_after(work: _Background) -> None:
    """Have this process wait for something that communicates on a thread of its own when it leaves the world; local."""
    _under_way.add(work)


def wait_for_threads() -> None:
    """Wait until nothing is under way; local, but what is under way may need other ranks."""
    for work in list(_under_way):
        work.wait()


@atexit.register
def stop_threads() -> None:
    """End what is still under way, within seconds; local."""
    # A thread that wakes up in C++ while Python ends its process aborts it (before Python 3.14).
    for work in list(_under_way):
        work.stop(_STOP_S)
