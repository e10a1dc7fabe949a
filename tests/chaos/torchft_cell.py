"""A rank of a replica group of torchft's DiLoCo that is to be killed: the job of ``tests/chaos/cell.py``, beside it.

Started by ``tests/chaos/storm.py --beside torchft``. The model, its spreading over the ranks of a group (FSDP2), the
local steps and what is written are those of ``cell.py``. A sync in which a group takes over the state of another one,
and so repeats that one's steps, is written with a weight of 0 for it; what the others' weights are, only they know.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo


class Group(ProcessGroupGloo):
    """The process group of the replica groups that live, which knows their numbers."""

    members: tuple[int, ...] = ()

    def configure(self, *args: Any) -> None:
        """Note the ranks of the quorum, which are the last argument; those of this place in their group."""
        self.members = tuple(sorted(rank // dist.get_world_size() for rank in args[-1]))
        super().configure(*args)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, which shares its memory."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cell, cells, life = (int(os.environ[name]) for name in ("CELL", "CELLS", "LIFE"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cell + 100 * life)
    wide = args.width
    model = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(1000 * cell + rank)
    base, has_taken_over = 0, False

    def save() -> list[torch.Tensor]:
        return [local(one).clone() for one in model.parameters()]

    def load(saved: list[torch.Tensor]) -> None:
        nonlocal base, has_taken_over
        for one, value in zip(model.parameters(), saved, strict=True):
            local(one).copy_(value)
        base, has_taken_over = manager.current_step(), True

    # Long enough for a busy machine, and an end to the wait for a group that died after the quorum. The manager's own
    # timeout is longer, as by default: the vote of a rank waits for the others of its group, which may still connect.
    group = Group(timeout=timedelta(seconds=10))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=args.least,
        use_async_quorum=False,  # as DiLoCo asks for
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=10),
        rank=rank,
        world_size=ranks,
        replica_id=f"cell_{cell}",
        hostname="127.0.0.1",
    )
    (args.folder / f"{cell}.{rank}.pid").write_text(f"{os.getpid()} {life}")
    steps = tries = 0
    with DiLoCo(manager, [model], inner, outer, sync_every=args.every, pin_memory=False):
        while True:
            model(torch.randn(4, wide, generator=generator)).square().mean().backward()
            base, has_taken_over = manager.current_step(), False
            inner.step()
            inner.zero_grad()
            steps += 1
            tries += steps % args.every == 0
            if (number := manager.current_step()) > base:
                bits = hashlib.sha256()
                for one in model.parameters():
                    whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                    bits.update(whole.detach().numpy().tobytes())
                weights = [float(one in group.members) for one in range(cells)]
                weights[cell] *= not has_taken_over
                if rank == 0:
                    told = [time.time(), number, bits.hexdigest()[:16], group.members, weights, tries]
                    with (args.folder / f"{cell}.{life}.jsonl").open("a") as file:
                        file.write(json.dumps(told) + "\n")
                tries = 0
            time.sleep(args.step_s)


if __name__ == "__main__":
    main()
