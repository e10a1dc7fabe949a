"""Open a session by each rule of the command line, and print one JSON line of what came of each."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import xffl
from xffl.cluster.sizes_text import parse_federation


def by_rule(text: str) -> dict[str, object]:
    """Tell the cells, and the sum of the ranks of one's own; or the error.

    Variables for this and all rules after it may stand before it: ``NAME=VALUE auto``; without a value one is unset.
    """
    *settings, text = text.split(" ") if "=" in text else [text]
    for name, _, value in (setting.partition("=") for setting in settings):
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    try:
        with xffl.session(federated=parse_federation(text, "argument"), backend="gloo", device="cpu") as state:
            total = torch.tensor([dist.get_rank()])
            dist.all_reduce(total, group=state.federation)
            return {"sizes": state.federated_local_size, "cell": state.federated_rank, "total": int(total)}
    except xffl.XfflError as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["SLURM_PROCID"]
    told = {"rank": rank, "host": os.environ["SLURMD_NODENAME"]}
    # One write, so that lines of ranks do not mix.
    sys.stdout.write(json.dumps({**told, "found": [by_rule(text) for text in sys.argv[1:]]}) + "\n")
    sys.stdout.flush()
