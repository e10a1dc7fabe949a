"""A state for a process group that somebody else has made, such as accelerate or Lightning."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from xffl.cluster.environment import complete_federation, is_lone_cell_requested, sources_named
from xffl.cluster.network import Timeouts, host_identity
from xffl.cluster.recognition.find import find_launcher
from xffl.cluster.sizes import Federation, read_federation, read_replica_size
from xffl.distributed.agreement.consistency import gather_objects, run_on_all_ranks
from xffl.distributed.distributed_state import DEFAULT_TIMEOUT_S, DistributedState, make_state
from xffl.distributed.groups import check_device
from xffl.distributed.parameters import ElasticParameters
from xffl.distributed.session import set_up_cells
from xffl.distributed.startup.isolation import find_isolated, take_isolated_cell
from xffl.errors import StateError

__all__ = ["adopt"]


def adopt(
    *,
    federated: Federation | None = None,
    hsdp: int | None = None,
    device: torch.device | str | int | None = None,
    streams: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    cell: int | None = None,
    cells: int | Sequence[int] | None = None,
    elastic: str | ElasticParameters | None = None,
) -> DistributedState:
    """Return a state for the default process group that a script or a framework has made; collective over its ranks.

    In place of :func:`xffl.session`, where ``accelerate``, Lightning or the script itself calls
    ``init_process_group``, and leaves the group again. A process that is alone and has no group gets one of itself.
    The variables of ``xffl exec`` count as in a session: those of isolated cells (:doc:`/isolate`), which then are the
    default group, of one cell of an elastic federation or of rounds over files, and of the cells of one world.

    .. code-block:: python

       trainer = Trainer(model=model, args=args, train_dataset=dataset)  # makes the process group
       state = xffl.adopt()
       with xffl.FederatedScaling(trainer.model_wrapped, trainer.optimizer, state, every=100):
           ...

    :param federated: Sizes of the cells of one world, as for :func:`xffl.session`.
    :param hsdp: Size of a replica; by default what ``XFFL_HSDP`` says, else none.
    :param device: Device of this process; by default torch's current GPU where there are GPUs, else the CPU.
    :param streams: CUDA streams for the groups of a round.
    :param timeout_s: Seconds after which what rounds do gives up; the group itself keeps its own timeout.
    :param cell: As for :func:`xffl.session`.
    :param cells: As for :func:`xffl.session`.
    :param elastic: As for :func:`xffl.session`.
    :return: The state; :func:`xffl.distributed.cleanup_distributed_process_group` is not called for it.
    :raises StateError: if there is no process group, and this process is one of several.
    :raises ConfigError: if the group is not like the cell that it is to be; on all ranks.
    """
    timeouts = Timeouts.within(timeout_s)
    if not dist.is_initialized():
        if (started := _count_started()) != "1":
            raise StateError(
                f"this process is one of {started}, and no process group is initialized; call adopt() "
                "when the framework or init_process_group has made it, or open xffl.session() in its place"
            )
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    with run_on_all_ranks("arguments of adopt") as share:
        sizes, replica_size, sources = complete_federation(
            read_federation(federated, "federated"), read_replica_size(hsdp, "hsdp")
        )
        default = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        chosen = check_device("device", default if device is None else device)
        isolated = find_isolated(federated)
        share(f"{sizes}, {replica_size}, {chosen.type}, {timeouts}")
    hosts = gather_objects(host_identity())
    nodes = list(dict.fromkeys(hosts))
    here = hosts[rank]
    state = make_state(timeouts)
    state.set_global(
        backend=_backend_of_world(),
        device_type=torch.device(chosen.type),
        master_addr=None,
        master_port=None,
        rank=rank,
        world_size=world_size,
    )
    state.set_node(hosts[:rank].count(here), hosts.count(here), nodes.index(here), len(nodes))
    state.set_exec_device(chosen, streams)
    state.set_init_device(None)
    if isolated is not None:
        set_up_cells(state, None, replica_size)
        take_isolated_cell(state, isolated)
        return state
    asked = sizes
    if isinstance(sizes, str):
        from xffl.distributed.startup.hosts_of_ranks import find_sizes

        sizes = find_sizes(sizes, nodes.index(here))
    with sources_named(sources):
        set_up_cells(state, sizes, replica_size, asked=asked)
    if is_lone_cell_requested() or any(given is not None for given in (cell, cells, elastic)):
        from xffl.distributed.startup.lone_cell import read_lone_cell

        lone_cell = read_lone_cell(cell, cells, elastic)
        if lone_cell is not None:
            lone_cell.take(state)
    return state


def _count_started() -> str:
    """Return how many processes a launcher, of any kind, has started with this one, as it says."""
    row = find_launcher(os.environ)
    told = os.environ.get("WORLD_SIZE") if row is None else row.read(os.environ).get("world_size")
    return str(told or 1).strip()


def _backend_of_world() -> str:
    """Return the default group's backend, also where none was named and torch has chosen one for each device."""
    named = str(dist.get_backend())
    return str(dist.get_backend_config()) if named == dist.Backend.UNDEFINED else named
