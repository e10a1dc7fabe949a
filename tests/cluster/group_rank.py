"""One rank of a replica group under a real launcher; one rank of group 1 kills itself once."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xffl
from xffl.distributed import DeviceParameters, FaultTolerantWorld

folder, last = Path(sys.argv[1]), 120
with FaultTolerantWorld(DeviceParameters.FSDP()) as world:
    assert world.replica_group is not None and world.ft_manager is not None
    group = world.replica_group[0]
    torch.manual_seed(os.getpid())
    model = world.average_gradients(xffl.shard(nn.Linear(8, 4), world.state))
    optimizer = world.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    world.register("model", model)
    world.register("optimizer", optimizer)
    while not (world.ft_manager.current_step() >= last and world.dp_size == 4):
        is_far = (group, world.rank) == (1, 1) and world.ft_manager.current_step() >= 20
        if is_far and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 4)).backward()
        optimizer.step()
        time.sleep(0.02)
    weights = b"".join(one.full_tensor().detach().numpy().tobytes() for one in model.parameters())
    told = {"step": world.ft_manager.current_step(), "weights": hashlib.sha256(weights).hexdigest()}
    (folder / f"group_{group}_rank_{world.rank}.json").write_text(json.dumps(told))
