"""What depends on which ranks share a host: cells that a rule finds, and GPUs that two ranks must not share."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from xffl.checks import group
from xffl.cluster.cells import sizes_of_ranks
from xffl.cluster.slurm.allocation import Host, own_host
from xffl.distributed.agreement.consistency import ranks_text, run_on_all_ranks
from xffl.errors import ConfigError, TopologyError
from xffl.topology import Topology

__all__ = ["check_gpus", "find_sizes"]


def check_gpus(device: torch.device, cells: Topology | None = None) -> None:
    """Raise, on all ranks alike, where two have one GPU: NCCL says so in its first call, without naming them.

    Where NCCL stays inside ``cells``, those of one cell count.
    """
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    gpus: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(gpus, (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)))
    ranks_of = group(((*gpu, 0 if cells is None else cells.cell_of(rank)), rank) for rank, gpu in enumerate(gpus))
    for (host, *_), sharing in ranks_of.items():
        if len(sharing) > 1:
            raise ConfigError(
                f"{ranks_text(sharing)} have the same GPU of {host}, which NCCL refuses; give each its own "
                "(device='cuda' counts by the rank on the node), or backend='gloo'"
            )


def find_sizes(rule: str, node_rank: int | None) -> tuple[int, ...]:
    """Return the sizes of the cells that a rule makes of the hosts on which the ranks run.

    Collective over the world: an all-gather of a few names.
    """
    own = own_host()
    places: list[tuple[Host, int | None]] = [(own, node_rank)]
    if dist.is_initialized():
        places *= dist.get_world_size()
        dist.all_gather_object(places, (own, node_rank))
    nodes: dict[str, int | None] = {}
    with run_on_all_ranks(f"cells by {rule}") as share:  # a rule's file may differ from host to host
        for host, node in places:
            if nodes.setdefault(host.name, node) != node:
                raise TopologyError(
                    f"rule {rule!r} finds cells by hosts, but nodes {nodes[host.name]} and {node} are both called "
                    f"{host.name}. HINT: set XFFL_HOST on each, or give sizes such as 4,4"
                )
        sizes = sizes_of_ranks([host for host, _ in places], rule)
        share(sizes)
    return sizes
