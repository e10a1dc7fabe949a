"""Which ranks stand on which node: what each rank claims of itself, and what that makes of all of them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xffl.checks import group
from xffl.cluster.recognition.claims import Claim
from xffl.errors import LaunchError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = ["Place", "place_ranks", "read_claim"]

_SHOWN = 8  # ranks that a message writes out
_NAME_LENGTH = 100
_CLAIM_BYTES = 4096  # of a claim as text
_MOST = 2**31


class Place(NamedTuple):
    """What all claims together tell of one rank's node."""

    local_size: int
    node_rank: int
    node_world_size: int


def read_claim(text: bytes | str) -> Claim:
    """Read a claim that another rank has made."""
    try:
        values = Fields(parse_json(text, limit=_CLAIM_BYTES), "the place that a rank claims", error=LaunchError)
    except ValueError as error:
        raise LaunchError(f"the place that a rank claims cannot be read: {error}; see who uses its port") from error
    return Claim(
        rank=values.integer("rank", 0, _MOST),
        local_rank=values.integer("local_rank", 0, _MOST),
        local_size=values.optional("local_size", Fields.integer, 1, _MOST),
        host=values.text("host", 1024),
        node_rank=values.optional("node_rank", Fields.integer, 0, _MOST),
        node_world_size=values.optional("node_world_size", Fields.integer, 1, _MOST),
        world_size=values.optional("world_size", Fields.integer, 1, _MOST),
    )


def place_ranks(claims: Sequence[Claim], world_size: int) -> dict[int, Place]:
    """Return the node of each rank, or raise what is wrong with the claims: the same on whoever has all of them.

    The nodes are those that the launcher has numbered. Where it has not, they are the machines, in the order of their
    lowest rank; see :func:`number_nodes`.
    """
    _check_ranks(claims, world_size)
    claimed = {claim.rank: claim.node_rank for claim in claims}
    if None not in claimed.values():
        nodes = {rank: node for rank, node in claimed.items() if node is not None}
    elif len({*claimed.values()}) > 1:
        silent = [rank for rank, node in sorted(claimed.items()) if node is None]
        raise LaunchError(
            f"ranks {_few(silent)} do not tell the number of their node, but the others do; set GROUP_RANK for all "
            "ranks, or for none"
        )
    else:
        nodes = number_nodes(claims)
    _check_nodes(claims, nodes)
    sizes = Counter(nodes.values())
    return {rank: Place(sizes[node], node, len(sizes)) for rank, node in nodes.items()}


def number_nodes(claims: Sequence[Claim]) -> dict[int, int]:
    """Give numbers to the nodes, in the order of their lowest rank.

    Ranks on one machine with the same local size form a node. Where a local rank occurs several times there (several
    pretended hosts on one machine), the machine holds several nodes: the k-th rank, in rank order, with that local rank
    belongs to the k-th of them. Without a local size that would be a guess, and is refused.
    """
    seen: Counter[tuple[str, int | None, int]] = Counter()
    members: defaultdict[tuple[str, int | None, int], list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.rank):
        place = claim.host, claim.local_size, claim.local_rank
        members[claim.host, claim.local_size, seen[place]].append(claim)
        seen[place] += 1
    _refuse_shared_places(claims)
    nodes: dict[int, int] = {}
    for number, ((host, claimed, _), node) in enumerate(members.items()):
        size = len(node) if claimed is None else claimed
        if sorted(claim.local_rank for claim in node) != list(range(size)):
            shown_ranks = _few_items({claim.rank: claim.local_rank for claim in node})
            raise LaunchError(
                f"host {_name(host)} should have local ranks 0 to {size - 1}, but its ranks have {shown_ranks} "
                "(rank: local rank); give node_rank and node_world_size as arguments, or start with torchrun"
            )
        nodes.update((claim.rank, number) for claim in node)
    return nodes


def _refuse_shared_places(claims: Sequence[Claim]) -> None:
    """Raise where two ranks of a machine claim one place there, or only some of its ranks tell how many there are."""
    for host, there in group((claim.host, claim) for claim in claims).items():
        silent = sorted(claim.rank for claim in there if claim.local_size is None)
        if not silent:
            continue
        if len(silent) < len(there):
            raise LaunchError(
                f"ranks {_few(silent)} on host {_name(host)} do not tell how many ranks there are on their host, but "
                "its other ranks do; set LOCAL_WORLD_SIZE for all ranks, or for none"
            )
        for local_rank, ranks in group((claim.local_rank, claim.rank) for claim in there).items():
            if len(ranks) > 1:
                raise LaunchError(
                    f"ranks {_few(sorted(ranks))} on host {_name(host)} all have local rank {local_rank}; give each "
                    f"rank of a host a local rank (LOCAL_RANK) of its own, from 0 to {len(there) - 1}, or set "
                    "LOCAL_WORLD_SIZE where these are several nodes on one host"
                )


def _check_ranks(claims: Sequence[Claim], world_size: int) -> None:
    sizes = group((claim.world_size, claim.rank) for claim in claims if claim.world_size is not None)
    if len(sizes) > 1:
        sizes_text = "; ".join(f"{size} (ranks {_few(sorted(ranks))})" for size, ranks in sizes.items())
        raise LaunchError(f"ranks have different world sizes: {sizes_text}; set WORLD_SIZE to the same on all ranks")
    ranks = sorted(claim.rank for claim in claims)
    if ranks != list(range(world_size)):
        twice = [rank for rank, count in Counter(ranks).items() if count > 1]
        lacking = sorted({*range(world_size)} - {*ranks})
        detail = f"{_few(twice)} occur several times, {_few(lacking)} not at all"
        listed = f"ranks {ranks}" if len(ranks) <= _SHOWN else f"the ranks of {len(ranks)} processes"
        raise LaunchError(
            f"{listed} are not 0 to {world_size - 1}, each once ({detail}); give every process its own rank"
        )


def _check_nodes(claims: Sequence[Claim], nodes: Mapping[int, int]) -> None:
    """Raise if what launchers say of ranks' nodes does not fit the ranks that are on them."""
    numbers = sorted({*nodes.values()})
    if numbers != list(range(len(numbers))):
        raise LaunchError(
            f"the nodes of all ranks are numbered {_few(numbers)}, which is not 0 to {len(numbers) - 1}; give each "
            "node its number (GROUP_RANK), the same on all of its ranks"
        )
    for node, there in group((nodes[claim.rank], claim) for claim in claims).items():
        locals_of = {claim.rank: claim.local_rank for claim in there}
        hosts = ", ".join(sorted({_name(claim.host) for claim in there}))
        if sorted(locals_of.values()) != list(range(len(there))):
            raise LaunchError(
                f"node {node} (host {hosts}) should have local ranks 0 to {len(there) - 1}, but its ranks have "
                f"{_few_items(locals_of)} (rank: local rank); give each rank of a node a local rank of its own"
            )
        for claim in there:
            if claim.local_size not in (None, len(there)):
                raise LaunchError(
                    f"rank {claim.rank} counts {claim.local_size} ranks on node {node} (host {hosts}), but "
                    f"{len(there)} are; set LOCAL_WORLD_SIZE to {len(there)}, the same on all of its ranks"
                )
            if claim.node_world_size not in (None, len(numbers)):
                raise LaunchError(
                    f"rank {claim.rank} counts {claim.node_world_size} nodes, but there are {len(numbers)}; set "
                    f"GROUP_WORLD_SIZE to {len(numbers)} on all ranks"
                )


def _name(host: str) -> str:
    """Return the name of a host from its identity, which the kernel's boot id may follow."""
    return host.partition("/")[0][:_NAME_LENGTH]


def _few(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return ", ".join(map(str, numbers[:_SHOWN])) + more


def _few_items(values: Mapping[int, int]) -> str:
    first = dict(list(values.items())[:_SHOWN])
    return f"{first}" + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
