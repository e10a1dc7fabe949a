"""Cells of one job as worlds of their own: the ranks meet once, and the environment then tells each its cell alone.

Frameworks take torch.distributed's default group for their data parallelism, and make it as the environment says. So
its variables are rewritten before anything reads them: rank, size and rendezvous become those of the cell. What all
cells still share is one store, at which the ranks of a round find each other
(:mod:`xffl.aggregation.engine.several_worlds.isolated_scope`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from xffl.cluster.environment import (
    ProcessEnvironment,
    accept_cells,
    complete_federation,
    detect_environment,
    required_cells,
    sources_named,
)
from xffl.cluster.hosts import reachable_address
from xffl.cluster.launch.affinity import visible_gpus
from xffl.cluster.launch.failure import ExitCode
from xffl.cluster.launch.local import held_port
from xffl.cluster.network import LOOPBACK, control_address, use_interface
from xffl.cluster.recognition.launchers import torchrun_variables
from xffl.cluster.sizes import Federation, read_federation
from xffl.compat.datasets import ENVIRON
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DEFAULT_TIMEOUT_S, DistributedState, set_cell_world
from xffl.distributed.failures.isolated_job import tell_ended
from xffl.distributed.failures.uncaught import tell_once
from xffl.distributed.session import check_timeout
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell, read_isolated_cell
from xffl.distributed.several_worlds.job_ranks import join_job
from xffl.distributed.startup.joining import join_store
from xffl.distributed.startup.meeting import (
    agree_on_store,
    meet,
)
from xffl.distributed.startup.stores import serve_store
from xffl.distributed.startup.unmet import note_meeting_failed, wait_for_readers
from xffl.errors import ConfigError, XfflError
from xffl.topology import Topology

__all__ = ["IsolationRequest", "enter_isolation", "find_isolated", "isolate", "take_isolated_cell"]

_OF_THE_JOB = (
    *("XFFL_FEDERATED", "XFFL_LAUNCHED_CELLS", "XFFL_REQUIRE_CELLS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that would tell frameworks of the whole job, as Lightning reads SLURM's."""
_TELL_S = 2.0
"""How long a rank that ends by an error tries to reach the others' store"""


class IsolationRequest:
    """A session in an isolated cell: the environment tells of the cell from :meth:`join` to :meth:`leave`.

    :param ifname: As for :func:`isolate`.
    :param timeout_s: How long ranks are waited for.
    :raises ConfigError: if that is no number of seconds.
    """

    def __init__(self, *, ifname: str | None, timeout_s: float) -> None:
        self._ifname = ifname
        self._timeout_s = check_timeout(timeout_s)
        self._isolation = ExitStack()
        self._isolated: IsolatedCell | None = None

    def join(self, join: Callable[..., DistributedState], federated: Federation | None) -> DistributedState:
        """Join the ranks of the cell; collective over the job.

        :param join: Joins the world that the environment tells of.
        :param federated: The cells, as for :func:`enter_isolation`.
        :return: The state of the cell's world.
        """
        entered = enter_isolation(federated, ifname=self._ifname, timeout_s=self._timeout_s)
        self._isolated = self._isolation.enter_context(entered)
        return join(federated=None, link_backend=None)

    def take(self, state: DistributedState) -> None:
        """Join the ranks of all cells; collective over the job.

        :param state: The state of the cell's world.
        """
        assert self._isolated is not None, "the cell's ranks are joined first"
        take_isolated_cell(state, self._isolated)

    def leave(self, error: BaseException | None) -> None:
        """Let the environment tell of the job again; local.

        :param error: The error that this rank leaves by, if any: the other ranks hear that it ends.
        """
        if error is None:
            self._isolation.close()
        else:
            self._isolation.__exit__(type(error), error, error.__traceback__)


@contextmanager
def enter_isolation(
    federated: Federation | None = None, *, ifname: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[IsolatedCell]:
    """Be a rank of an isolated cell while the block runs, as the environment says already or else from here on.

    Collective over the job where its cells are not isolated yet.

    :param federated: As for :func:`isolate`; where the cells are isolated already, only compared.
    :param ifname: As for :func:`isolate`.
    :param timeout_s: How long ranks are waited for.
    :yield: The place of this rank.
    :raises ConfigError: if the cells are isolated already, and are other ones.
    """
    isolated = find_isolated(federated)
    if isolated is not None:
        yield isolated
        return
    with isolate(federated, ifname=ifname, timeout_s=timeout_s) as isolated:
        yield isolated


def find_isolated(federated: Federation | None) -> IsolatedCell | None:
    """Return the place of this rank, as the environment tells it; ``None`` if the cells are not isolated. Local.

    :param federated: The cells that are asked for, if any.
    :return: The place.
    :raises ConfigError: if they are other ones than those that are isolated.
    """
    isolated = read_isolated_cell()
    asked = read_federation(federated, "federated")
    if isolated is not None and asked is not None and not _is_same(asked, isolated.sizes):
        raise ConfigError(
            f"the cells of this job are isolated and have {isolated.sizes} ranks, but federated={federated!r} asks for "
            "others; leave it out, or give --federated the same"
        )
    return isolated


def _is_same(federated: Federation, sizes: tuple[int, ...]) -> bool:
    return not isinstance(federated, str) and Topology(sum(sizes), federated).sizes == sizes


@contextmanager
def isolate(
    federated: Federation | None = None,
    *,
    ifname: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    environ: MutableMapping[str, str] = ENVIRON,
) -> Iterator[IsolatedCell]:
    """Let the environment tell this process its cell while the block runs, as if that were the whole job.

    Collective over the job: the ranks meet as the launcher has told them, compare the sizes, and agree where each cell
    meets. Rank 0 serves the store of the job as long as the block runs.

    :param federated: The ranks of each cell, or of every one; by default what ``XFFL_FEDERATED`` says.
    :param ifname: Network interface; by default what ``XFFL_IFNAME`` says.
    :param timeout_s: How long ranks are waited for.
    :param environ: What is rewritten, and put back at the end.
    :yield: The place of this rank in the job.
    :raises ConfigError: if there are no cells to isolate; on all ranks.
    """
    before = dict(environ)
    use_interface(ifname)
    place = detect_environment(environ)
    tell_once()
    with ExitStack() as stack:
        try:
            isolated, store, told = _meet_in_cells(stack, place, federated=federated, timeout_s=timeout_s)
        except XfflError as wrong:
            note_meeting_failed(wrong, place)
            raise
        for name in _OF_THE_JOB:
            environ.pop(name, None)
        environ.update(told)
        try:
            yield isolated
        except BaseException as error:
            if _is_failure(error):
                tell_ended(isolated, store, _TELL_S)
            raise
        finally:
            del store  # which rank 0 has served until here
            for name in (*told, *_OF_THE_JOB):
                environ.pop(name, None)
                if name in before:
                    environ[name] = before[name]


def _is_failure(error: BaseException) -> bool:
    """Tell whether others wait in vain for what this rank was to do, and not whether its script has come to an end."""
    if isinstance(error, SystemExit):
        return error.code not in (None, ExitCode.OK, ExitCode.PREEMPTED)
    return not isinstance(error, GeneratorExit)  # a session that nobody has left


def _meet_in_cells(
    stack: ExitStack, place: ProcessEnvironment, *, federated: Federation | None, timeout_s: float
) -> tuple[IsolatedCell, Store, dict[str, str]]:
    """Meet the other ranks of the job; return this rank's place, the store of the job, and the cell's variables.

    The port at which the cell meets is held, by the cell's first rank, until the end of ``stack``.
    """
    meeting = meet(place, timeout_s, is_own_address=False, is_patient=False)
    place, cells = agree_on_store(meeting, place, partial(_find_cells, federated), timeout_s=timeout_s)
    store, address = _open_job_store(meeting, place, timeout_s)
    del meeting  # so that its port is free for a session that comes after this one
    isolated = IsolatedCell(place.rank, cells.sizes, address)
    nodes = _gather_nodes(store, place, isolated)
    if isolated.cell_rank == 0:
        # Another program that asks for any free port does not get it until the cell's own rank listens there.
        port = stack.enter_context(held_port())
        store.set(f"cell/{isolated.cell}", f"{_address_of(place, nodes)} {port}")
    host, cell_port = store.get(f"cell/{isolated.cell}").decode().split()
    wait_for_readers(store, place.rank, place.world_size, timeout_s)  # rank 0, whose script may be a short one
    variables = _variables_of(isolated, nodes)
    variables |= _gpus_of(place, isolated, nodes)
    variables |= {"MASTER_ADDR": host, "MASTER_PORT": cell_port, **isolated.variables()}
    # Lightning goes by it: without, it may ask MPI for the ranks, which are those of the job.
    variables["TORCHELASTIC_RUN_ID"] = f"cell {isolated.cell}"
    return isolated, store, variables


@dataclass(frozen=True)
class _Cells:
    """What each rank asks for; all ask for the same."""

    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"isolated cells of {self.sizes} ranks"


def _find_cells(federated: Federation | None, place: ProcessEnvironment) -> _Cells:
    asked, _, sources = complete_federation(read_federation(federated, "federated"), None)
    if asked is None:
        raise ConfigError("isolate needs the sizes of the cells; give federated, such as 2,2 (XFFL_FEDERATED)")
    if isinstance(asked, str):
        raise ConfigError(
            f"isolate needs the sizes of the cells before the ranks share a world, but federated is {asked!r}; give "
            "sizes, such as 2,2, or let xffl exec start the ranks, which finds them"
        )
    with sources_named(sources):
        sizes = Topology(place.world_size, asked).sizes
    accept_cells(asked, len(sizes), place.world_size, required_cells(), is_speaker=place.rank == 0)
    if len(sizes) == 1:
        raise ConfigError(f"isolate needs cells, but federated {asked!r} makes a single one; leave isolate out")
    return _Cells(sizes)


def _open_job_store(meeting: Store, place: ProcessEnvironment, timeout_s: float) -> tuple[Store, str]:
    """Serve the store of the job in its rank 0, or join it; return it and its address when all ranks have."""
    timeout = timedelta(seconds=timeout_s)
    if place.rank == 0:
        is_local = place.is_on_one_host and control_address() is None
        host = control_address() or place.master_addr or LOOPBACK
        store = serve_store(host, 0, None, timeout, is_local=is_local)
        address = f"{LOOPBACK if is_local else host}:{store.port}"
        meeting.set("isolated", address)
    else:
        address = meeting.get("isolated").decode()
        host, _, port = address.rpartition(":")
        store = join_store(host, int(port), None, timeout_s, is_local=False)
    if store.add("joined", 1) == place.world_size:
        store.set("all_joined", "")
    store.wait(["all_joined"], timeout)
    return store, address


def _gather_nodes(store: Store, place: ProcessEnvironment, isolated: IsolatedCell) -> list[int]:
    """Return the nodes of this cell's ranks."""
    _, node, _ = place.node()
    store.set(f"node/{place.rank}", str(node))
    first = isolated.rank - isolated.cell_rank
    return [int(store.get(f"node/{rank}")) for rank in range(first, first + isolated.sizes[isolated.cell])]


def _address_of(place: ProcessEnvironment, nodes: Sequence[int]) -> str:
    """Return where the other ranks of the cell, of which this is the first, reach this host."""
    if (named := control_address()) is not None:
        return named
    if len(set(nodes)) == 1:
        return LOOPBACK
    if place.rank == 0 and place.master_addr is not None:
        return place.master_addr
    return reachable_address([] if place.master_addr is None else [place.master_addr])


def _variables_of(isolated: IsolatedCell, nodes: Sequence[int]) -> dict[str, str]:
    """Return torchrun's variables of a rank in its cell."""
    here = nodes[isolated.cell_rank]
    order = list(dict.fromkeys(nodes))
    return torchrun_variables(
        rank=isolated.cell_rank,
        world_size=len(nodes),
        node_local_rank=nodes[: isolated.cell_rank].count(here),
        node_local_size=nodes.count(here),
        node_rank=order.index(here),
        node_world_size=len(order),
    )


def _gpus_of(place: ProcessEnvironment, isolated: IsolatedCell, nodes: Sequence[int]) -> dict[str, str]:
    """Return the variable that leaves a cell its own GPUs, where several cells share a node and each rank has one."""
    local_size, _, _ = place.node()
    here = nodes[isolated.cell_rank]
    size = nodes.count(here)
    gpus = visible_gpus()
    if size == local_size or len(gpus) < local_size:
        return {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"{local_size} ranks of several cells share this node, and CUDA is initialized already, so that "
            "CUDA_VISIBLE_DEVICES cannot leave each cell its own GPUs; open the session before the first call of CUDA, "
            "or start with xffl exec --isolate"
        )
    first = place.node_local_rank - nodes[: isolated.cell_rank].count(here)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + size])}


def take_isolated_cell(state: DistributedState, isolated: IsolatedCell) -> None:
    """Let the world of a state be an isolated cell, and join the ranks of all cells; collective over the job.

    :param state: The state of the cell's world.
    :param isolated: The place of this rank in the job.
    :raises ConfigError: if a world has cells of its own, or other ranks than its cell, or replicas of another size than
        those of another cell; on all ranks.
    :raises LaunchError: if the other cells do not come.
    """
    group = join_job(isolated, "job", state.timeouts.session_s)
    try:
        with run_on_all_ranks("isolated cells", group=group) as share:
            topology = state.topology
            size = isolated.sizes[isolated.cell]
            if topology.cells > 1 or topology.world_size != size:
                raise ConfigError(
                    f"this world is cell {isolated.cell} of an isolated federation and is to have its {size} ranks, "
                    f"but it has {topology.cells} cells and {topology.world_size} ranks; leave federated out"
                )
            if state.rank != isolated.cell_rank:
                raise ConfigError(
                    f"rank {isolated.cell_rank} of cell {isolated.cell} has become rank {state.rank} of its world; "
                    "make the process group by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as they are"
                )
            share(f"cells of {isolated.sizes} ranks, hsdp={topology.replica_size}")
    except BaseException:
        group.close()
        raise
    set_cell_world(state, CellWorld(isolated.cell, isolated.sizes, isolated=isolated, group=group))
