"""Cells by a rule: the running ranks tell each other where they are, and find the sizes that the rule makes of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from xffl.cluster.allocation import Host, own_host
from xffl.cluster.cells import Federation, sizes_of_ranks
from xffl.distributed.agreement import agree
from xffl.errors import TopologyError, XfflError

__all__ = ["find_sizes"]


def find_sizes(federated: Federation | None, node_rank: int | None) -> int | tuple[int, ...] | None:
    """Return the sizes of the cells; with a rule, those that it makes of the hosts on which the ranks run.

    With a rule collective over the world: an all-gather of a few names, and the comparison of the sizes. With sizes
    nothing moves.

    :param federated: Sizes, or a rule as :func:`xffl.cluster.cells.parse_federation` returns it; ``None`` for none.
    :param node_rank: Number of this rank's node, where it is known.
    :return: The sizes, the same on all ranks.
    :raises ConfigError: if the rule or its file cannot be read.
    :raises TopologyError: if the rule does not fit the hosts, or their ranks.
    """
    if not isinstance(federated, str):
        return federated
    own = own_host()
    places: list[Any] = [(own, node_rank)]
    if dist.is_initialized():
        places *= dist.get_world_size()
        dist.all_gather_object(places, (own, node_rank))
    error: XfflError | None = None
    sizes: tuple[int, ...] = ()
    try:
        _check_names(places, federated)
        sizes = sizes_of_ranks([host for host, _ in places], federated)
    except XfflError as wrong:  # a file may differ from host to host
        error = wrong
    agree(f"cells by {federated}", str(sizes), error=error)
    return sizes


def _check_names(places: list[tuple[Host, int | None]], rule: str) -> None:
    """Raise where several nodes have one name: no rule could tell them apart."""
    nodes: dict[str, int | None] = {}
    for host, node in places:
        if nodes.setdefault(host.name, node) != node:
            raise TopologyError(
                f"rule {rule!r} finds cells by hosts, but nodes {nodes[host.name]} and {node} are both called "
                f"{host.name}. HINT: set XFFL_HOST on each, or give sizes such as 4,4"
            )
