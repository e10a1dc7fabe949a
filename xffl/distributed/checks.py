"""What the setters of the state accept: pure checks that return the value in its one form, or raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xffl.checks import index_of, integer
from xffl.errors import ConfigError, TopologyError
from xffl.topology import Topology

__all__ = [
    "DEFAULT_STREAMS",
    "check_backend",
    "check_device",
    "check_init_device",
    "check_mesh",
    "check_node",
    "check_place",
    "check_ranks",
    "check_rendezvous",
    "check_replicas",
    "check_streams",
    "check_world",
]

DEFAULT_STREAMS = 4
"""CUDA streams of a rank, if not asked for otherwise."""


def check_place(what: str, place: object, size_name: str, size: object) -> tuple[int, int]:
    """Return a place counted from 0 and the number of places."""
    whole = integer(size_name, size, error=TopologyError)
    part = integer(what, place, None, hint=f"give 0 to {whole - 1}", error=TopologyError)
    if not 0 <= part < whole:
        raise TopologyError(f"{what} {part} is outside {size_name} {whole}; give 0 to {whole - 1}")
    return part, whole


def check_world(place: tuple[int, int]) -> None:
    """Raise where torch.distributed is initialized for another rank or world than the state."""
    if dist.is_initialized() and place != (dist.get_rank(), dist.get_world_size()):
        raise TopologyError(
            f"rank {place[0]} of {place[1]} is not what torch.distributed was initialized with, rank {dist.get_rank()} "
            f"of {dist.get_world_size()}; give set_global the same"
        )


def check_node(node: tuple[int | None, int | None, int | None, int | None], world_size: int | None) -> None:
    """Raise where nodes of at least one rank each cannot make up the world.

    :param node: Local rank, local size, node's rank and number of nodes; unknown ones are ``None``.
    :param world_size: Ranks of the world, if known.
    """
    _, local_size, _, nodes = node
    if local_size is None or nodes is None or world_size is None:
        return
    if local_size > world_size - (nodes - 1) or (nodes == 1 and local_size != world_size):
        raise TopologyError(
            f"a node of {local_size} ranks among {nodes} nodes does not fit the world of {world_size} ranks; give "
            "sizes where every node holds at least one rank and all together hold the world"
        )


def check_backend(backend: object) -> dist.Backend:
    """Return a backend that this build of torch has; pairs such as ``cpu:gloo,cuda:nccl`` are taken apart."""
    if not isinstance(backend, str):
        raise ConfigError(f"backend {backend!r} is no name; give 'gloo' or 'nccl'")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        known = sorted(set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED})
        if name not in known:
            raise ConfigError(f"backend {backend!r} is unknown; torch has {', '.join(known)}")
        if not dist.is_backend_available(name):
            raise ConfigError(f"backend {backend!r} is not in this build of torch {torch.__version__}; give 'gloo'")
    return dist.Backend(backend)


def check_rendezvous(master_addr: object, master_port: object) -> tuple[str | None, int | None]:
    """Return where ranks meet; an empty address with port 0, or ``None`` for both, where they meet otherwise."""
    if master_addr is not None and not isinstance(master_addr, str):
        raise ConfigError(f"master_addr {master_addr!r} is no host name or address; give rank 0's")
    if master_port is None:
        port = None
    else:
        port = integer("master_port", master_port, None, hint="give 1 to 65535")
        if not 0 <= port < 65536:
            raise ConfigError(f"master_port {port} is no port; give 1 to 65535")
    if bool(master_addr) != bool(port):
        raise ConfigError(f"master_addr {master_addr!r} and master_port {port} belong together; give both or neither")
    return master_addr, port


def check_device(what: str, device: object, kind: str | None = None, *, may_be_meta: bool = False) -> torch.device:
    """Return a device that this process can use.

    :param what: Name of the argument, for the message.
    :param device: A device, its name, or the index of a CUDA device.
    :param kind: The kind of device that the state is set up for, if any.
    :param may_be_meta: Whether the meta device will do.
    :return: The device.
    :raises ConfigError: if there is no such device, or it is of another kind.
    """
    shown = str(device)
    number = index_of(device)
    if number is not None:
        if number < 0:
            raise ConfigError(f"{what} {number} is negative; give the index of a GPU, counted from 0")
        device = f"cuda:{number}"
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ConfigError(f"{what} {device!r} is no device; give 'cpu', 'cuda' or 'cuda:0'") from None
    if not isinstance(device, torch.device):
        raise ConfigError(f"{what} {device!r} is no device; give 'cpu', 'cuda' or 'cuda:0'")
    if device.type not in ("cpu", "cuda") and not (may_be_meta and device.type == "meta"):
        raise ConfigError(f"{what} {str(device)!r} computes nothing here; give 'cpu' or 'cuda'")
    if kind is not None and device.type != kind:
        raise ConfigError(f"{what} {str(device)!r} is no {kind} device; give one, or another device_type to set_global")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not 0 <= (device.index or 0) < count:  # torch lets large indices overflow
            raise ConfigError(f"{what} {shown!r} does not exist: torch sees {count} GPUs; give another, or 'cpu'")
    return device


def check_init_device(device: object, is_meta: object) -> tuple[torch.device | None, bool]:
    """Return where models are initialized: on the meta device where that is asked for and no device is given."""
    if not isinstance(is_meta, bool):
        raise ConfigError(f"meta_initialization {is_meta!r} is no truth value; give True or False")
    if device is None:
        return (torch.device("meta") if is_meta else None), is_meta
    found = check_device("init_device", device, may_be_meta=True)
    if found.type == "meta" and not is_meta:
        raise ConfigError("init_device 'meta' holds no values; give meta_initialization=True with it, or a real device")
    return found, is_meta


def check_streams(streams: object, device: torch.device) -> int | None:
    """Return how many CUDA streams to make: none on CPU."""
    if streams is None:
        return DEFAULT_STREAMS if device.type == "cuda" else None
    count = integer("streams", streams, hint=f"give at least 1, or None for {DEFAULT_STREAMS}")
    if device.type != "cuda":
        raise ConfigError(f"streams {count} were asked for, but {device} has none; leave streams out")
    return count


def check_ranks(ranks: object, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a group that holds this rank."""
    if isinstance(ranks, torch.Tensor):
        ranks = ranks.flatten().tolist()
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise TopologyError(f"ranks {ranks!r} name no group; give a tuple of ranks")
    members = tuple(
        integer("rank", member, None, hint=f"give 0 to {world_size - 1}", error=TopologyError) for member in ranks
    )
    for member in members:
        if not 0 <= member < world_size:
            raise TopologyError(f"rank {member} is outside the world of {world_size}; give 0 to {world_size - 1}")
    if len(set(members)) != len(members):
        raise TopologyError(f"ranks {members} name a rank twice; give each once")
    if rank not in members:
        raise TopologyError(f"rank {rank} is none of the group's ranks {members}; only members make a group")
    return members


def check_replicas(
    shard: object, size: object, replica: object, counts: object, place: tuple[int, int], inside: Topology | None
) -> Topology:
    """Return the topology of cells of ``counts`` replicas of ``size`` ranks, in which this rank stands as told.

    The order of the ranks in a cell is that of ``inside``, if any: its shape.
    """
    rank, world_size = place
    knob = "give the replicas of each federated group, (n,) without federation"
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Sequence) or not counts:
        raise TopologyError(f"replica_world_size {counts!r} counts no replicas; {knob}")
    numbers = [check_place("replica 0", 0, "replica_world_size", count)[1] for count in counts]
    shard, ranks = check_place("replica_local_rank", shard, "replica_local_size", size)
    if sum(numbers) * ranks != world_size:
        raise TopologyError(
            f"{tuple(numbers)} replicas of {ranks} ranks need {sum(numbers) * ranks} ranks, but the world has "
            f"{world_size}; {knob}"
        )
    shape = None if inside is None else inside.cell_shape
    topology = Topology(world_size, tuple(number * ranks for number in numbers), ranks, shape)
    at = topology.coordinates(rank)
    if (at.shard, at.replica) != (shard, replica):
        raise TopologyError(
            f"replica_local_rank {shard} and replica_rank {replica!r} are not those of rank {rank}, which are "
            f"{at.shard} and {at.replica}; give those, or call set_hsdp({ranks})"
        )
    return topology


def check_mesh(mesh: object, kind: str) -> DeviceMesh:
    """Return a mesh that FSDP can shard over."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh {mesh!r} is no DeviceMesh; give a one-dimensional one, or None for all ranks")
    if mesh.ndim != 1:
        raise ConfigError(f"mesh {mesh!r} has {mesh.ndim} dimensions; give a one-dimensional one, or call set_hsdp")
    if mesh.device_type != kind:
        raise ConfigError(f"mesh {mesh!r} is on {mesh.device_type}, the state on {kind}; give a mesh on {kind}")
    if mesh.get_coordinate() is None:
        raise TopologyError(f"mesh {mesh!r} does not hold rank {mesh.get_rank()}; give each rank its own mesh")
    return mesh
