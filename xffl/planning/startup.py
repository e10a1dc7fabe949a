"""What ranks do beside training, from the number of ranks alone: start-up over rank 0's store, and votes of rounds.

One model of costs: ``xffl plan --startup`` prints it, and a simulator in the tests plays xffl's own code and compares
what it counts. What gloo does for a call is read from its sources (torch 2.11 to 2.13, ``third_party/gloo``):
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/context.cc (``createAndConnectAllPairs``),
``allreduce.cc``, ``allgather.cc``, ``broadcast.cc`` and ``barrier.cc``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xffl.compat import gloo_connections
from xffl.compat.gloo_connections import BATCH
from xffl.costs import MOST_IN_TABLES, neighbours_of_barrier, peers_in_votes
from xffl.message_sizes.ballots import ranks_below, vote_message_bytes
from xffl.topology import Topology

__all__ = [
    "RankStartup",
    "StartupForecast",
    "forecast_rank",
    "forecast_startup",
    "is_mesh",
    "messages_of_all_gather",
    "messages_of_all_reduce",
    "messages_of_broadcast",
    "store_bytes_of_group",
    "store_requests_of_group",
    "vote_of_rank",
]

ADDRESS_BYTES = 154
"""What a rank stores of itself for a group of gloo, without the numbers of its pairs."""
PAIR_BYTES = 8
"""What it stores for each pair of a mesh."""
MEETING_REQUESTS = 14
"""Requests of a rank while the ranks meet and compare what they ask for; the last one to come makes some more."""
MEETING_BYTES = 1500
"""What these carry, both ways, about."""

STARTUP_ASSUMPTIONS = (
    "ranks meet at a store of rank 0 and connect over gloo; connections of NCCL and of training are left out",
    "with at most 256 ranks a group of gloo is a mesh: each rank reads what all others have stored, 128 at once; with "
    "more, one of more than 32 ranks that runs collectives alone connects a rank with about two others for each "
    "doubling of them",
    "a vote goes up a binary tree in each cell, once between the cells' first ranks, and down again; up to "
    f"{MOST_IN_TABLES} ranks a message has 192 bytes for each, above that what ranks say alike stands once; where each "
    "rank gives a count of its own, 8 bytes a rank of the world come to it",
)
"""What the numbers of :func:`forecast_startup` rest on."""


def is_mesh(size: int, world_size: int) -> bool:
    """Tell whether gloo makes a group as a mesh whatever it is for, by the limits of xffl; pure.

    Others are meshes where their ranks message each other, with short addresses.
    """
    if world_size <= gloo_connections.MESH_LIMIT:
        return True
    return size <= min(gloo_connections.MESH_LIMIT, gloo_connections.MESH_LIMIT_OF_MANY)


def store_requests_of_group(size: int, connections: int | None = None) -> int:
    """Return how many requests a rank makes of the store for a group of gloo; pure.

    :param size: Ranks of the group.
    :param connections: To how many others it connects at its first messages; ``None`` in a mesh.
    :return: One that says that it has come, one that stores its address, and those that read others': in a mesh its
        own, too, and many at once.
    """
    if size == 1:
        return 0
    return 2 + (math.ceil(size / BATCH) if connections is None else connections)


def store_bytes_of_group(size: int, connections: int | None = None, *, is_short: bool = False) -> int:
    """Return how many bytes the addresses have that a rank stores and reads for a group of gloo; pure.

    :param size: Ranks of the group.
    :param connections: To how many others it connects at its first messages; ``None`` in a mesh.
    :param is_short: Whether the addresses of a mesh have no numbers of pairs.
    :return: The bytes.
    """
    if size == 1:
        return 0
    address = ADDRESS_BYTES + (PAIR_BYTES * size if connections is None and not is_short else 0)
    return address * (1 + (size if connections is None else connections))


def messages_of_all_reduce(size: int, elements: int) -> int:
    """Return how many messages a rank sends at most in an all-reduce over gloo's ring: none that are empty; pure."""
    return 0 if size == 1 else min(4 * (size - 1), 2 * elements)


def messages_of_all_gather(size: int) -> int:
    """Return how many messages a rank sends in an all-gather over gloo's ring: two halves in each step; pure."""
    return 2 * (size - 1)


def messages_of_broadcast(size: int) -> int:
    """Return how many messages the source of a broadcast sends; others send fewer. Pure."""
    return math.ceil(math.log2(size)) if size > 1 else 0


@dataclass(frozen=True)
class RankStartup:
    """What one rank does until its groups are made and the votes' connections are open.

    :param requests: Requests to rank 0's store for its groups.
    :param store_bytes: Bytes of these, both ways.
    :param connections: Connections to other ranks, for each group anew.
    """

    requests: int
    store_bytes: int
    connections: int


@dataclass(frozen=True)
class StartupForecast:
    """What it takes to start a world over gloo and to vote in it.

    :param ranks: Ranks of the world.
    :param cells: Cells.
    :param requests: Requests that rank 0's stores serve in all.
    :param store_bytes: Bytes that they take and hand out.
    :param store_connections: Connections of rank 0's store.
    :param connections: Connections to other ranks, of the rank that has most.
    :param vote_messages: Messages that the rank with most of them sends in a vote.
    :param vote_bytes: Bytes that the rank with most of them sends in a vote.
    :param vote_steps: Messages of a vote that wait for each other.
    :param assumptions: What the numbers rest on.
    """

    ranks: int
    cells: int
    requests: int
    store_bytes: int
    store_connections: int
    connections: int
    vote_messages: int
    vote_bytes: int
    vote_steps: int
    assumptions: tuple[str, ...] = STARTUP_ASSUMPTIONS


def forecast_rank(topology: Topology, rank: int) -> RankStartup:
    """Forecast what one rank of a federation over gloo does at its start; pure."""
    requests = nbytes = connections = 0
    world = topology.world_size
    for size, has_messages in _groups_of(topology, rank):
        is_small = is_mesh(size, world)
        opened = size - 1 if has_messages or is_small else _doublings(size)
        known = None if has_messages or is_small else opened
        requests += store_requests_of_group(size, known)
        nbytes += store_bytes_of_group(size, known, is_short=not is_small)
        connections += opened
    opened = world - 1
    if not is_mesh(world, world):
        opened = len(neighbours_of_barrier(rank, world) | peers_in_votes(topology, rank).ranks)
    known = None if is_mesh(world, world) else opened
    return RankStartup(
        requests=requests + store_requests_of_group(world, known),
        store_bytes=nbytes + store_bytes_of_group(world, known),
        connections=connections + opened,
    )


def _groups_of(topology: Topology, rank: int) -> list[tuple[int, bool]]:
    """Return the sizes of a rank's groups, and whether single ranks send in them; see Topology.groups_of. Pure."""
    at = topology.coordinates(rank)
    sizes = [(topology.sizes[at.cell], False)]
    if topology.is_hsdp:
        sizes += [(topology.shards(at.cell), False), (topology.replicas(at.cell), False)]
    if at.is_sender:
        sizes.append((topology.cells if topology.is_cut_alike else topology.world_size, True))
    return sizes


def _doublings(size: int) -> int:
    """Return with how many others a barrier connects a rank; pure."""
    return len(neighbours_of_barrier(0, size))


def vote_of_rank(topology: Topology, rank: int) -> tuple[int, int]:
    """Return how many messages a rank sends in a vote, and their bytes; pure."""
    peers = peers_in_votes(topology, rank)
    below = len(peers.below)
    above = len(peers.ranks) - below
    cell = topology.cell_of(rank)
    size = topology.sizes[cell]
    world = topology.world_size
    told_above = ranks_below(rank - topology.offsets[cell], size) if world > MOST_IN_TABLES else size
    return (
        below + above,
        below * vote_message_bytes(world, world) + above * vote_message_bytes(told_above, world),
    )


def forecast_startup(topology: Topology) -> StartupForecast:
    """Forecast what it takes to start a federation over gloo, and to vote in it; pure.

    :param topology: The federation.
    :return: The forecast: sums over the ranks for the store, and the rank with most of each for the rest.
    """
    starts = [forecast_rank(topology, rank) for rank in range(topology.world_size)]
    votes = [vote_of_rank(topology, rank) for rank in range(topology.world_size)]
    deepest = max(size.bit_length() - 1 for size in topology.sizes)
    return StartupForecast(
        ranks=topology.world_size,
        cells=topology.cells,
        requests=sum(start.requests for start in starts) + MEETING_REQUESTS * topology.world_size,
        store_bytes=sum(start.store_bytes for start in starts) + MEETING_BYTES * topology.world_size,
        store_connections=topology.world_size - 1,
        connections=max(start.connections for start in starts),
        vote_messages=max(messages for messages, _ in votes),
        vote_bytes=max(nbytes for _, nbytes in votes),
        vote_steps=2 * deepest + (topology.cells > 1),
    )
