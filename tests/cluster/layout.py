"""Open a session, add over all ranks, and print one JSON line: what the tests of real launchers run on every rank."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import xffl
from tests.listening import find_listeners


def main(sizes: str) -> None:
    if {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        from mpi4py import MPI  # noqa: F401 - its own sockets are no matter of ours
    before = find_listeners({os.getpid()})
    with xffl.session(federated=tuple(map(int, sizes.split(","))), backend="gloo", device=torch.device("cpu")) as state:
        total = torch.tensor([float(state.rank + 1)])
        dist.all_reduce(total)
        told = {
            "rank": state.rank,
            "world_size": state.world_size,
            "node": [state.node_local_rank, state.node_local_size, state.node_rank, state.node_world_size],
            "cell": state.federated_rank,
            "total": total.item(),
            "listens": sorted({one.address for one in find_listeners({os.getpid()}) - before}),
        }
        # One write, so that lines of ranks do not mix.
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
