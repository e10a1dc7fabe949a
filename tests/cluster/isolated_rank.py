"""A script of an isolated cell: a framework makes the process group of its cell, and a round crosses to the other one.

Each rank writes ``told.N`` of its number N in the job into the folder that is the first argument.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import xffl

dist.init_process_group("gloo")
state = xffl.adopt()
numbers = torch.tensor([float(state.job_rank or 0)])
dist.all_reduce(numbers)
model = nn.Linear(2, 1, bias=False)
nn.init.constant_(model.weight, float(state.cell))
aggregator = xffl.Aggregator(nn.parallel.DistributedDataParallel(model), state)
aggregator.aggregate()
aggregator.close()
told = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")}
told |= {"cell": [state.cell, state.cells, state.cell_rank, state.cell_size], "sum": float(numbers)}
told |= {"mean": xffl.mean_over_cell(float(state.job_rank or 0), state)}
told |= {"weights": model.weight.detach().flatten().tolist(), "argv": sys.argv}
part = Path(sys.argv[1], f".told.{state.job_rank}")
part.write_text(json.dumps(told))
part.rename(part.with_name(part.name[1:]))
dist.barrier()
dist.destroy_process_group()
