"""Join the others, and let rank 2 raise or be killed between two all-reduces, in which the others learn of it."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import xffl

if __name__ == "__main__":
    with xffl.session(device="cpu") as state:
        x = torch.ones(1)
        dist.all_reduce(x)
        print("joined", state.rank, state.federated_rank, flush=True)
        dist.all_reduce(x)  # all have said so before one goes
        if state.rank == 2:
            print("leaves at", time.time(), flush=True)
        if state.rank == 2 and sys.argv[1] == "raise":
            raise ValueError("mine")
        if state.rank == 2 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            dist.all_reduce(x)
        signal.pause()
