"""What an MPI launcher does not tell: which ranks share a node, and where rank 0 listens. Asked over mpi4py."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xffl.cluster.hosts import host_identity, reachable_address
from xffl.cluster.network import control_address
from xffl.errors import LaunchError

__all__ = ["Claim", "Meeting", "meet", "number_nodes"]


class Claim(NamedTuple):
    """What one rank knows of itself."""

    rank: int
    local_rank: int
    local_size: int
    host: str = ""
    """Identity of the machine, the same for all ranks on it; the rank's own finding where empty."""


class Meeting(NamedTuple):
    """What the ranks found out together."""

    node_rank: int
    node_world_size: int
    master_addr: str
    master_port: int


def number_nodes(claims: Sequence[Claim]) -> dict[int, int]:
    """Give numbers to the nodes, in the order of their lowest rank.

    Ranks on one machine with the same local size form a node. Where a local rank occurs several times there (several
    pretended hosts on one machine), the machine holds several nodes: the k-th rank, in rank order, with that local rank
    belongs to the k-th of them.

    :param claims: One claim of each rank.
    :return: Node rank by rank.
    :raises LaunchError: if some node's local ranks are not 0 to its local size.
    """
    seen: dict[tuple[str, int, int], int] = {}
    members: dict[tuple[str, int, int], list[Claim]] = {}
    for claim in sorted(claims):
        occurrence = seen.get((claim.host, claim.local_size, claim.local_rank), 0)
        seen[claim.host, claim.local_size, claim.local_rank] = occurrence + 1
        members.setdefault((claim.host, claim.local_size, occurrence), []).append(claim)
    nodes: dict[int, int] = {}
    for number, ((host, size, _), node) in enumerate(members.items()):
        if sorted(claim.local_rank for claim in node) != list(range(size)):
            told = {claim.rank: claim.local_rank for claim in node}
            raise LaunchError(
                f"host {host.partition('/')[0]} should have local ranks 0 to {size - 1}, but its ranks have {told} "
                "(rank: local rank); give node_rank and node_world_size as arguments, or start with torchrun"
            )
        nodes.update((claim.rank, number) for claim in node)
    return nodes


def meet(
    claim: Claim, world_size: int, environ: Mapping[str, str], *, address: str | None, port: int | None
) -> Meeting:
    """Find the nodes and agree on a rendezvous; collective over ``MPI.COMM_WORLD``: a gather and a broadcast.

    Rank 0 takes the address of the interface that ``XFFL_CONTROL_IFNAME``, ``XFFL_IFNAME`` or ``GLOO_SOCKET_IFNAME``
    names, else 127.0.0.1 where all ranks are on one machine, else an address that the other hosts can reach; and a port
    that is free on its host.

    :param claim: This rank's claim, from the launcher's variables.
    :param world_size: Number of ranks by the launcher's variables.
    :param environ: Environment to read.
    :param address: Rendezvous address where it is already known.
    :param port: Rendezvous port where it is already known.
    :return: This rank's node, and the rendezvous of all.
    :raises LaunchError: if mpi4py is missing, belongs to another MPI than the launcher, or rank 0 has no address.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"started by an MPI launcher, but mpi4py cannot be loaded ({reason}); run pip install mpi4py, or set "
            "MASTER_ADDR and MASTER_PORT and give node_rank and node_world_size as arguments"
        ) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != world_size:
        library = MPI.Get_library_version().partition("\n")[0].strip("\0 ")
        raise LaunchError(
            f"the launcher started {world_size} ranks, but mpi4py has loaded {library!r} and sees {world.Get_size()}; "
            "use the mpirun of that library, or set MPI4PY_MPIABI or MPI4PY_LIBMPI to the launcher's"
        )
    claim = claim if claim.host else claim._replace(host=host_identity())
    rows: list[tuple[Claim, str]] = world.allgather((claim, socket.gethostname()))
    ranks = [row[0].rank for row in rows]
    if sorted(ranks) != list(range(world_size)):
        raise LaunchError(f"ranks {ranks} are not 0 to {world_size - 1}, each once; give every process its own rank")
    # A rank given as an argument may differ from MPI's: whoever is called rank 0 listens.
    root = ranks.index(0)
    told: tuple[str, int] | str | None = None
    if claim.rank == 0:
        try:
            told = _listen_at(root, rows, environ, address, port)
        except LaunchError as error:
            told = str(error)
        except Exception as error:  # noqa: BLE001 - the others wait for whatever it is
            told = f"{type(error).__name__}: {error}; set MASTER_ADDR and MASTER_PORT"
    told = world.bcast(told, root=root)
    if not isinstance(told, tuple):
        raise LaunchError(f"rank 0 has no rendezvous: {told}")
    nodes = number_nodes([row[0] for row in rows])
    return Meeting(nodes[claim.rank], max(nodes.values()) + 1, *told)


def _listen_at(
    root: int, rows: Sequence[tuple[Claim, str]], environ: Mapping[str, str], address: str | None, port: int | None
) -> tuple[str, int]:
    address = control_address(environ) if address is None else address
    if address is None and len({claim.host for claim, _ in rows}) == 1:
        address = "127.0.0.1"
    elif address is None:
        address = reachable_address(dict.fromkeys(name for _, name in rows if name != rows[root][1]))
    if port is None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
    return address, port
