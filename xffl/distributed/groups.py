"""Process groups and meshes, made for a topology in the same order on every rank, and what goes with them.

That is the checks of backends and devices, and the threads that still communicate when the process leaves its groups.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from xffl.checks import index_of, integer
from xffl.compat.gloo_connections import Form, connect_as, form_of_group
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
OF_STREAM = "_stream"
"""How the names of their further handles end, which carry tensors on GPUs alone."""
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
        name = f"xffl_{group.kind}" if group.member else f"xffl_{group.kind}_placeholder"
        names = [name]
        if group.kind in streamed:
            names += [name + OF_STREAM] * (handles - 1)
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

    Threads of one process make their groups one after another, and in the same order on all ranks (:func:`in_turn`).
    ``has_messages`` tells whether single ranks send to each other in it, instead of collectives alone. RuntimeError
    where another rank does not come within ``timeout_s``, or is lost before it is connected.
    """
    members = list(ranks)
    world = dist.group.WORLD
    assert world is not None, "groups are made in a world"
    with in_turn(), fresh_group_name(members) as name:

        def make() -> dist.ProcessGroup:
            group: dist.ProcessGroup = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,
                group_desc=group_desc,
            )
            return group

        return connect_ranks(
            make,
            Gathering(world.get_group_store(), f"xffl_connect/{name}", len(members), timeout_s),
            backend or dist.get_backend_config(),
            has_messages=has_messages,
        )


_turn = threading.Condition()
_turns: deque[object] = deque()
"""Blocks of :func:`in_turn` of all threads, the first of them the one that runs: state of the process, as is what they
guard."""
_LOOK_S = 1.0
"""How often a thread looks whether it is its turn, also if an interrupt has kept the one before from saying so."""


@contextmanager
def in_turn() -> Iterator[None]:
    """Make or connect groups in the block while no other thread of this process does; local, first come first served.

    Threads would change for each other what is the process's: the name that torch gives to the next group, the
    variables that gloo reads, and the timeout of the one connection to the store, over which a request of one waits
    until that of the other is answered. Names count the groups that a rank has made, so threads that make groups at the
    same time begin in the same order on all ranks, or give up after the timeout of the group.

    :yield: Nothing.
    """
    here = object()
    try:  # from the first moment on: an interrupt may come at each of them, and a turn that stays would be nobody's
        with _turn:
            _turns.append(here)
            while not _turn.wait_for(lambda: _turns[0] is here, _LOOK_S):
                pass
        yield
    finally:
        with suppress(ValueError):  # an interrupt came before it was there
            _turns.remove(here)  # which needs no lock, and comes first, since an interrupt may end the wait for that
        with _turn:
            _turn.notify_all()


@dataclass(frozen=True)
class Gathering:
    """The ranks of a group that is to be made, or connected, and the store where they tell each other of it."""

    store: Store
    name: str
    """Of its keys there; no other group has them, or had"""
    size: int
    timeout_s: float
    """How long a rank waits for the others"""

    @property
    def arrivals(self) -> str:
        """The key that counts ranks that have come."""
        return f"{self.name}/here"

    @property
    def failure(self) -> str:
        """The key by which a rank tells that it cannot make the group."""
        return f"{self.name}/failed"


Made = TypeVar("Made", bound="dist.ProcessGroup | None")
"""A group, or nothing where one that is there is connected"""


def connect_ranks(
    make: Callable[[], dist.ProcessGroup],
    gathering: Gathering,
    backend: str,
    *,
    has_messages: bool = False,
) -> dist.ProcessGroup:
    """Make a group, and connect it where gloo would do so later; collective over its ranks, :func:`in_turn`.

    Over gloo a large group that runs collectives alone gets the connections of these, and no others: about two for each
    doubling of its ranks. One in which single ranks send to each other gets all.
    """
    if "gloo" not in backend or gathering.size == 1:
        return make()
    world_size = dist.get_world_size() if dist.is_initialized() else None
    form = form_of_group(gathering.size, world_size=world_size, has_messages=has_messages)

    def connect() -> dist.ProcessGroup:
        group = make()
        if form is Form.LAZY:
            from xffl.distributed.lazy_connections import open_connections

            open_connections(group, has_messages=has_messages)
        return group

    with connect_as(form):
        return watched(connect, gathering)


def watched(connect: Callable[[], Made], gathering: Gathering) -> Made:
    """Make or connect a group over gloo in a thread, and return what that returns.

    Collective over its ranks, :func:`in_turn`.

    RuntimeError where a rank does not come in time, or is lost meanwhile: gloo itself waits for that one for five times
    the group's timeout, and nothing ends its wait.
    """
    store = gathering.store
    store.add(gathering.arrivals, 1)
    usual: timedelta = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=gathering.timeout_s))  # what asks for many values at once has no other limit
    try:
        making = Making(connect)
        try:
            if not making.wait(SLOW_S):
                from xffl.distributed.failures.lost_in_connecting import await_group

                await_group(making, gathering)
        except BaseException:  # a KeyboardInterrupt, too: nobody would know the group
            making.leave()
            raise
    finally:
        store.set_timeout(usual)
    try:
        return making.result()
    except BaseException as error:
        with suppress(RuntimeError):  # the store has gone with rank 0
            store.set(gathering.failure, str(error))
        raise


SLOW_S = 1.0
"""How long a group is waited for before a rank looks for what the others say."""


class Making(Generic[Made]):
    """A group that is being made in a thread of this process, which nothing can stop.

    :param make: Makes the group.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_left = False
        self._outcome: tuple[Made] | BaseException | None = None
        # The GPU in use is one of each thread.
        is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._gpu = torch.cuda.current_device() if is_on_gpu else None
        threading.Thread(target=self._run, name="xffl-connect", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the group is made or has failed; tell whether that is so."""
        return self._ended.wait(seconds)

    def result(self) -> Made:
        """Return the group, or raise what has ended the thread, when :meth:`wait` has said that it has ended; once."""
        outcome = self._outcome
        self._outcome = None  # the error's traceback refers to this
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome
        assert outcome is not None, "it has ended"
        return outcome[0]

    def leave(self) -> None:
        """Let the thread end when it does; a group that it still makes is destroyed."""
        with self._lock:
            self._is_left = True
            is_made = self._ended.is_set()
        if is_made:
            self._destroy()

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._outcome = (self._make(),)
        except BaseException as error:  # noqa: BLE001 - raised in result()
            self._outcome = error
        with self._lock:
            is_left = self._is_left
            self._ended.set()
        if is_left:
            self._destroy()

    def _destroy(self) -> None:
        outcome = self._outcome
        self._outcome = None
        if isinstance(outcome, tuple) and outcome[0] is not None:
            with suppress(RuntimeError, ValueError):  # its world has gone
                dist.destroy_process_group(outcome[0])


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


def without_host_side(backend: str) -> str:
    """Return the part of a backend that sends from GPUs, if there is one: NCCL connects a group at its first use."""
    of_gpus = [part for part in backend.split(",") if part.startswith("cuda:") and part != "cuda:gloo"]
    return of_gpus[0] if of_gpus else backend


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
