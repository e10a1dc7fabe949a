"""Set-up and teardown of the default process group, with the state that describes it: by calls, or for a block."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from xffl.checks import number
from xffl.cluster.environment import (
    ProcessEnvironment,
    accept_cells,
    complete_federation,
    detect_environment,
    is_isolated,
    is_lone_cell_requested,
    required_cells,
    sources_named,
)
from xffl.cluster.hardware import pick_gpu
from xffl.cluster.network import Timeouts, keep_gloo_local, release_gloo, use_interface
from xffl.cluster.sizes import Federation, read_federation, read_replica_size
from xffl.distributed.agreement.consistency import barrier, gather_runtimes, run_on_all_ranks
from xffl.distributed.distributed_state import (
    DEFAULT_TIMEOUT_S,
    DistributedState,
    leave_job,
    make_state,
    take_off_setups,
)
from xffl.distributed.failures.uncaught import keep_store, note_end, tell_once
from xffl.distributed.groups import (
    ON_GPUS,
    Gathering,
    check_backend,
    check_device,
    check_link_backend,
    check_streams,
    connect_ranks,
    in_turn,
    stop_threads,
    wait_for_threads,
    with_host_side,
)
from xffl.distributed.parameters import DeviceParameters, ElasticParameters
from xffl.distributed.startup.file_limit import is_ample, raise_file_limit
from xffl.distributed.startup.meeting import (
    agree_on_store,
    meet,
    world_store,
)
from xffl.errors import ConfigError, LaunchError, StateError, XfflError
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.distributed.startup.cell_request import CellRequest
    from xffl.distributed.startup.open_files import SessionFiles

__all__ = [
    "cleanup_distributed_process_group",
    "session",
    "setup_distributed_process_group",
]

check_timeout = partial(number, "timeout_s", above=0, below=1e9, hint="give seconds, such as 600")
"""Returns the seconds after which a session gives up."""

_ARGUMENTS = {
    "node_local_rank": "group_local_rank",
    "node_local_size": "group_local_size",
    "node_rank": "group_rank",
    "node_world_size": "group_world_size",
}
"""Arguments that :func:`detect_environment` has other names for."""


@contextmanager
def session(
    *,
    federated: Federation | None = None,
    hsdp: int | None = None,
    backend: str | None = None,
    device: torch.device | str | int | None = None,
    streams: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ifname: str | None = None,
    device_parameters: DeviceParameters | None = None,
    timeouts: Timeouts | None = None,
    cell: int | None = None,
    cells: int | Sequence[int] | None = None,
    elastic: str | ElasticParameters | None = None,
    link_backend: str | None = None,
    isolate: bool = False,
) -> Iterator[DistributedState]:
    """Join the other processes, yield the state, and leave again.

    Entering and leaving are collective over the world. Leaving by an exception (Ctrl-C too) does not communicate, so a
    rank that fails is not kept waiting by the others.

    .. code-block:: python

       with xffl.session(federated=(4, 4), hsdp=2) as state:
           model = xffl.shard(build_model(), state)

    :param federated: Sizes of the federated groups, one size for equal ones, or a rule that finds them: ``auto``
        (SLURM's network), ``auto:LEVEL``, ``hosts:REGEX``, ``file:PATH``; by default what ``XFFL_FEDERATED`` says. All
        forms of that variable are taken, such as ``"4,4"``.
    :param hsdp: Size of a replica; by default what ``XFFL_HSDP`` says, else none.
    :param backend: Communication backend; by default ``gloo``, and ``cpu:gloo,cuda:nccl`` on CUDA: NCCL for what lies
        on GPUs, gloo for the votes of rounds and all else that the host must hear of if a rank is lost.
    :param device: Device of this process; by default the GPU of its local rank where there are GPUs, else the CPU.
    :param streams: CUDA streams, and so handles, for the groups of a round; 4 by default on CUDA.
    :param timeout_s: Seconds after which a collective over the world gives up; within a cell it is half of that,
        between cells three quarters.
    :param ifname: Network interface for gloo and NCCL; by default what ``XFFL_IFNAME`` says.
    :param device_parameters: The mesh inside each cell, in place of ``hsdp``; its timeouts are not read here.
    :param timeouts: How long each level waits (in a cell, between cells, over the world), in place of ``timeout_s``.
    :param cell: Which cell this job is, from 0, where each cell is a job of its own and rounds go over files; by
        default what ``XFFL_CELL`` says, else none. The state keeps it as ``lone_cell``, and its ``data_place`` deals
        samples out as in one job of all cells.
    :param cells: With ``cell``, how many cells there are, or the ranks of each.
    :param elastic: With ``cell``, where the lighthouse of an elastic federation listens, ``http://HOST:PORT``, or
        ``file:PATH`` with a file that names it: rounds are made with the cells that are there, over the network,
        instead of over files. By default what ``XFFL_LIGHTHOUSE`` says. See
        :class:`xffl.distributed.ElasticParameters` for timeouts.
    :param link_backend: Communication backend between federated groups: ``gloo`` keeps NCCL inside them, and what
        crosses goes through the host's memory; ``None`` or ``auto``: that of ``backend``. Cells that are jobs of their
        own use gloo. See :doc:`/network`.
    :param isolate: Make each cell a world of its own, inside this job: torch.distributed's default group, and the
        environment while the block runs, are those of the cell, as frameworks expect that take the default group; only
        rounds cross. ``xffl exec --isolate`` asks for it, too. See :doc:`/isolate`.
    :yield: The state.
    :raises ConfigError: if this job is not like that cell; on all ranks.
    """
    is_process_ending = sys.is_finalizing  # this module's names may be gone when the generator is collected
    request: CellRequest | None = None
    if isolate or is_isolated() or is_lone_cell_requested() or any(arg is not None for arg in (cell, cells, elastic)):
        from xffl.distributed.startup.cell_request import find_cell_request

        request = find_cell_request(
            cell=cell,
            cells=cells,
            elastic=elastic,
            link_backend=link_backend,
            isolate=isolate,
            ifname=ifname,
            timeout_s=timeout_s if timeouts is None else timeouts.session_s,
        )
    join = partial(
        setup_distributed_process_group,
        federated=federated,
        backend=backend,
        device=device,
        hsdp=hsdp,
        streams=streams,
        timeout_s=timeout_s,
        ifname=ifname,
        device_parameters=device_parameters,
        timeouts=timeouts,
        link_backend=link_backend,
    )
    try:
        state = join() if request is None else request.join(join, federated)
        try:
            if request is not None:
                request.take(state)
                state.activity.watch_steps()
            yield state
        except GeneratorExit:
            # Nobody has left the block: its generator, or one of the user's around it, is closed or collected. In a
            # process that ends, modules are gone already, and an error here would be a second one behind that which
            # ends it.
            if not is_process_ending():
                cleanup_distributed_process_group(state, synchronize=False)
            raise
        except BaseException as error:
            note_end(error, state.topology)
            cleanup_distributed_process_group(state, synchronize=False)
            raise
        cleanup_distributed_process_group(state)
    except BaseException as error:
        if request is not None and not is_process_ending():
            request.leave(error)
        raise
    if request is not None:
        request.leave(None)


def setup_distributed_process_group(
    rank: int | None = None,
    world_size: int | None = None,
    group_local_rank: int | None = None,
    group_local_size: int | None = None,
    group_rank: int | None = None,
    group_world_size: int | None = None,
    backend: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    device: torch.device | str | int | None = None,
    hsdp: int | None = None,
    federated: Federation | None = None,
    streams: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ifname: str | None = None,
    device_parameters: DeviceParameters | None = None,
    join_timeout_s: float | None = None,
    timeouts: Timeouts | None = None,
    link_backend: str | None = None,
) -> DistributedState:
    """Find out where this process stands, join the others, and return the state that describes it all.

    Collective over the world: every rank calls it once. Arguments beat the environment (torchrun, MPI, SLURM;
    ``XFFL_FEDERATED`` and ``XFFL_HSDP``); without a launcher the world is this one process, which needs no port. With
    federated sizes federated scaling is set up, else with a replica size HSDP over the world, else FSDP over the world.
    The ranks compare what they were asked for as soon as they meet, so that all raise the same error, and resolve rules
    that find cells (:func:`xffl.cluster.sizes_text.parse_federation`). Rank 0 lists software and processors that
    differ.

    The first six arguments say where this process stands in the world, on its node, and among the nodes; rank 0 listens
    at ``master_addr`` and ``master_port`` (on loopback, if all ranks are on its host), and ranks are waited for
    ``join_timeout_s`` (else ``timeout_s``). An address that does not resolve, a network that is down and a host that
    does not answer end the waiting after 10 to 30 s, unless ``join_timeout_s`` is given. For the other arguments, see
    :func:`session`. Raises StateError if torch.distributed is set up already, LaunchError if joining fails.
    """
    if dist.is_initialized():
        raise StateError(
            "torch.distributed is initialized already; leave init_process_group out of the script, since the session "
            "calls it, or fill a DistributedState with its setters (docs/port_fsdp2.rst, An own init_process_group)"
        )
    error: XfflError | None = None
    release_gloo()  # what a process above this one has set for its own ranks
    try:
        use_interface(ifname)
        levels = Timeouts.within(check_timeout(timeout_s)) if timeouts is None else timeouts
        join_s = levels.session_s if join_timeout_s is None else check_timeout(join_timeout_s)
    except XfflError as wrong:  # raised when the ranks have met, so that the others hear of it
        error, levels, join_s = wrong, Timeouts.within(DEFAULT_TIMEOUT_S), DEFAULT_TIMEOUT_S
    told: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "node_local_rank": group_local_rank,
        "node_local_size": group_local_size,
        "node_rank": group_rank,
        "node_world_size": group_world_size,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    place = _find_place(told)
    most_files = raise_file_limit()
    is_own_address = master_addr is not None or master_port is not None
    files: SessionFiles | None = None
    if place.world_size > 1:
        tell_once()
        if not is_ample(most_files, place.world_size):
            files = _count_files(place, most_files, is_own_address=is_own_address)
    if place.is_on_one_host:
        keep_gloo_local()
    ask = partial(
        _request,
        files=files,
        backend=backend,
        device=device,
        federated=federated,
        hsdp=hsdp,
        streams=streams,
        timeouts=levels,
        parameters=device_parameters,
        link_backend=link_backend,
    )
    try:
        try:
            meeting = meet(
                place,
                join_s,
                is_own_address=is_own_address,
                is_patient=join_timeout_s is not None,
            )
            place, request = agree_on_store(meeting, place, ask, timeout_s=join_s, error=error)
            _join(meeting, place, request)
        except XfflError as wrong:
            from xffl.distributed.startup.unmet import note_meeting_failed

            note_meeting_failed(wrong, place)
            raise
        return _begin(place, request)
    except BaseException:
        release_gloo()
        raise


def _find_place(told: Mapping[str, Any]) -> ProcessEnvironment:
    """Return where this process stands among all; the others hear of it where that cannot be told."""
    try:
        return detect_environment(names=_ARGUMENTS, **told)
    except LaunchError as wrong:
        from xffl.distributed.startup.mistakes import claimed_place, raise_at_meeting

        raise_at_meeting(wrong, claimed_place(told))


def _begin(place: ProcessEnvironment, request: _Request) -> DistributedState:
    """Describe the world that was joined; the group goes where that fails."""
    try:
        state = _describe(place, request)
        _compare_runtimes(state)
        if state.topology.cells > 1:
            state.activity.watch_steps()
        return state
    except BaseException as error:
        note_end(error)
        dist.destroy_process_group()
        raise


def _compare_runtimes(state: DistributedState) -> None:
    """Let rank 0 write what the cells run, where something differs; collective over the world."""
    runtimes = gather_runtimes(state)
    if state.rank == 0 and len(runtimes) > 1:
        from xffl.distributed.agreement.differences import holders_text, tell_runtimes

        tell_runtimes([(holders_text(ranks, state.topology.sizes), one) for one, ranks in runtimes.items()])


def waits_when_destroyed(state: DistributedState) -> bool:
    """Tell whether destroying a group waits for others; local."""
    return "nccl" in str(state.backend) and dist.is_initialized() and dist.get_world_size() > 1


def cleanup_distributed_process_group(
    state: DistributedState, del_obj: Collection[Any] = (), *, synchronize: bool = True
) -> None:
    """Leave the process group and release what the state made; its set-ups are gone afterwards.

    Collective over the world with ``synchronize``: the ranks wait for each other first, and for rounds under way, since
    a process that ends while something still talks to it may abort. Rank 0 then says in a line where optimizers have
    made steps in a federation and there was no round, and where a :class:`~xffl.FederatedScaling` was never entered.

    After an exception give ``synchronize=False``: a round under way is stopped within two seconds, and a world of
    several ranks over NCCL, which could not be left without the others, lasts as long as the process.

    :param state: The state that the set-up returned.
    :param del_obj: Objects to let go of before, such as a model that holds GPU memory; a list is emptied.
    :param synchronize: Whether to wait for all ranks.
    :raises LaunchError: if they do not come; this rank has left then.
    """
    if isinstance(del_obj, list):
        del_obj.clear()
    del del_obj
    gc.collect()
    is_cuda = state.device_type is not None and state.device_type.type == "cuda"
    is_together = False
    try:
        if synchronize and dist.is_initialized():
            if is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
            wait_for_threads()
            try:
                barrier()
                if (job := state.job_group) is not None:
                    barrier(job)
            except RuntimeError as broken:
                raise LaunchError(
                    f"rank {state.job_rank} could not wait for the others before it leaves ({broken}); one of them has "
                    "ended or does something else, see their output"
                ) from broken
            is_together = True
            keep_store()
            if state.activity.end():
                from xffl.distributed.lessons import tell_lesson

                tell_lesson(state)
    finally:
        if not is_together:
            state.activity.drop()
            stop_threads()
        leave_job(state)
        # The groups go with the world, whose store may be gone with rank 0 already. NCCL would wait for what is under
        # way, and so for ranks that may wait for this one: what it holds goes with the process.
        destroys = is_together or not waits_when_destroyed(state)
        if destroys and dist.is_initialized():
            dist.destroy_process_group()
        take_off_setups(state, destroys=destroys)
        release_gloo()


@dataclass(frozen=True)
class _Request:
    """The set-up that was asked for; the same on all ranks but for the device's index."""

    backend: str
    device: torch.device
    federated: Federation | None
    hsdp: int | None
    streams: int | None
    timeouts: Timeouts
    parameters: DeviceParameters | None = None
    link_backend: str | None = None
    """Where cells have another one between them."""
    sources: tuple[str, ...] = ()
    """Which variables the sizes are from, if any."""

    def __str__(self) -> str:
        mesh = "" if self.parameters is None else f", {self.parameters}"
        return (
            f"backend={self.backend!r}, link_backend={self.link_backend!r}, device={self.device.type!r}, "
            f"federated={self.federated!r}, hsdp={self.hsdp!r}, "
            f"streams={self.streams!r}, timeout_s={self.timeouts.session_s:g}, home_s={self.timeouts.home_s:g}, "
            f"across_s={self.timeouts.across_s:g}{mesh}"
        )


def _request(
    place: ProcessEnvironment,
    *,
    files: SessionFiles | None,
    backend: str | None,
    device: torch.device | str | int | None,
    federated: Federation | None,
    hsdp: int | None,
    streams: int | None,
    timeouts: Timeouts,
    parameters: DeviceParameters | None,
    link_backend: str | None,
) -> _Request:
    """Fill in what was not asked for, from the environment and the machine.

    ``files`` counts those that the session needs, where they may be too many.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = check_device("device", default if device is None else device)
    if chosen == torch.device("cuda"):  # without an index
        index = pick_gpu(place.node_local_rank, place.node_local_size, torch.cuda.device_count())
        chosen = torch.device("cuda", index)
    kind = str(check_backend(backend or (ON_GPUS if chosen.type == "cuda" else "gloo")))
    if "cpu" not in kind and "nccl" in kind and chosen.type == "cpu":
        raise ConfigError(f"backend {kind!r} needs a GPU, but the device is the CPU; give backend='gloo'")
    link = check_link_backend(link_backend, kind, chosen)
    count = check_streams(streams, chosen)
    sizes, hsdp, sources = complete_federation(read_federation(federated, "federated"), read_replica_size(hsdp, "hsdp"))
    if sizes is None:  # one cell
        link = None
    elif link is not None:
        kind = with_host_side(kind)
    request = _Request(
        backend=kind,
        device=chosen,
        federated=sizes,
        hsdp=hsdp,
        streams=count,
        timeouts=timeouts,
        parameters=parameters,
        link_backend=link,
        sources=sources,
    )
    mesh: tuple[int | None, dict[str, int] | None] = (None, None)
    if not isinstance(sizes, str):
        with sources_named(sources):
            mesh = _resolve_mesh(request, place.world_size, sizes)  # raises what is wrong before the ranks join
    if files is not None:
        files.check_groups(sizes, mesh, backend=kind, link_backend=link, streams=count)
    return request


def _count_files(place: ProcessEnvironment, most: float, *, is_own_address: bool) -> SessionFiles:
    """Return what counts the files of a session in a process that may open few; ConfigError if it cannot even meet."""
    from xffl.distributed.startup.open_files import SessionFiles

    files = SessionFiles.of(place, most, is_own_address=is_own_address)
    files.check_store()
    return files


def _resolve_mesh(
    request: _Request, world_size: int, sizes: int | tuple[int, ...] | None
) -> tuple[int | None, dict[str, int] | None]:
    """Return the size of a replica, and the shape of a cell where a mesh inside it is asked for."""
    if request.parameters is None:
        return request.hsdp, None
    mesh = request.parameters.resolve(Topology(world_size, sizes).sizes)
    if request.hsdp not in (None, mesh.replica_size):
        asked = next((source for source in request.sources if source.startswith("XFFL_HSDP")), f"hsdp={request.hsdp}")
        raise ConfigError(
            f"{asked} was asked for, but the device parameters make replicas of {mesh.replica_size} ranks (None: the "
            f"whole cell); leave {asked.partition('=')[0]} out"
        )
    return mesh.replica_size, mesh.cell_shape


def _join(meeting: Store, place: ProcessEnvironment, request: _Request) -> None:
    """Make the process group of the world; collective over the ranks that have met."""
    backend = request.link_backend or request.backend
    try:
        store = PrefixStore("world", world_store(meeting, place, request.timeouts))

        def make() -> dist.ProcessGroup:
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=request.timeouts.session_s),
            )
            world = dist.group.WORLD
            assert world is not None, "it was made"
            return world

        gathering = Gathering(store, "xffl_connect", place.world_size, request.timeouts.session_s)
        with in_turn():
            connect_ranks(make, gathering, backend)
    except RuntimeError as broken:
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} could not join over {backend}: {broken}; name the "
            "network interface with XFFL_IFNAME (for the store XFFL_CONTROL_IFNAME), and see the other ranks' output"
        ) from broken


def _describe(place: ProcessEnvironment, request: _Request) -> DistributedState:
    """Fill a state by its setters; collective over the world."""
    if request.device.type == "cuda":
        torch.cuda.set_device(request.device)  # the setters' first collective needs each rank on its own GPU
        if "nccl" in request.backend and request.link_backend is None:
            from xffl.distributed.startup.hosts_of_ranks import check_gpus

            check_gpus(request.device)  # before the first call over NCCL
    state = make_state(request.timeouts)
    state.set_global(
        backend=dist.Backend(request.backend),
        device_type=torch.device(request.device.type),
        master_addr=place.master_addr,
        master_port=place.master_port,
        rank=place.rank,
        world_size=place.world_size,
        link_backend=request.link_backend,
    )
    state.set_node(place.node_local_rank, *place.node())
    state.set_exec_device(request.device, request.streams)
    state.set_init_device(None)
    # Every rank has the same sizes from here on, and so finds the same.
    sizes = request.federated
    if isinstance(sizes, str):
        from xffl.distributed.startup.hosts_of_ranks import find_sizes

        sizes = find_sizes(sizes, place.node_rank)
    if request.link_backend is not None and "nccl" in request.backend:
        from xffl.distributed.startup.hosts_of_ranks import check_gpus

        check_gpus(request.device, Topology(place.world_size, sizes))
    with sources_named(request.sources):
        set_up_cells(state, sizes, *_resolve_mesh(request, place.world_size, sizes), asked=request.federated)
    return state


def set_up_cells(
    state: DistributedState,
    federated: int | tuple[int, ...] | None,
    hsdp: int | None,
    cell_shape: Mapping[str, int] | None = None,
    *,
    asked: Federation | None = None,
) -> None:
    """Call the setter for what is asked for; collective over the world."""
    asked = federated if asked is None else asked
    world_size = state.topology.world_size
    with run_on_all_ranks("numbers of cells to require (XFFL_REQUIRE_CELLS)") as share:
        required = required_cells()
        cells = Topology(world_size, federated, hsdp).cells
        accept_cells(asked, cells, world_size, required, is_speaker=state.rank == 0)
        share(required)
    if federated is not None:
        state.set_federated_scaling(federated, hsdp, cell_shape)
    elif hsdp is not None:
        state.set_hsdp(hsdp, cell_shape)
    else:
        state.set_fsdp()
