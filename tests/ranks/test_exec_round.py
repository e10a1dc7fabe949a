"""A job whose rank dies in the middle of a round, as the user of ``xffl exec`` sees it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXEC = [sys.executable, "-m", "xffl", "exec"]

SCRIPT = """
import torch
import xffl
from xffl.aggregation.engine.exchange import RoundRun

class Planted(BaseException):
    "What no round catches."

def die(*_, **__):
    raise Planted("in the middle of round 2")

with xffl.session(timeout_s=60) as state:
    model = xffl.shard(torch.nn.Linear(64, 64), state)
    aggregator = xffl.Aggregator(model, state, bucket_bytes=512)
    aggregator.aggregate()
    if state.rank == 2:
        RoundRun.read = die
    aggregator.aggregate()
    print("the second round took place", flush=True)
"""


def test_a_rank_that_fails_in_mid_round_ends_the_job_with_its_own_story(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [*EXEC, "--processes", "3", "--federated", "2,1", str(tmp_path / "train.py")]
    start = time.monotonic()
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert time.monotonic() - start < 150  # the collectives' timeout is 60 s, and a dead peer is noticed at once
    assert job.returncode == 1 and job.stderr.count("Traceback") == 1, job.stderr
    # The others fail, too, within the time in which the launcher looks at the ranks once.
    told = "xffl: rank 2 (cell 1) failed with Planted: in the middle of round 2; all other ranks were stopped"
    assert job.stderr.splitlines()[-1] == told
    assert "took place" not in job.stdout


OWN_LOOP = """
import os, sys
import torch
import torch.distributed as dist
import xffl
from xffl.distributed.distributed_state import DistributedState

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
state = DistributedState()
state.set_global(
    backend="gloo",
    device_type=torch.device("cpu"),
    master_addr=os.environ["MASTER_ADDR"],
    master_port=int(os.environ["MASTER_PORT"]),
    rank=rank,
    world_size=world_size,
)
state.set_node(node_local_rank=rank, node_local_size=world_size, node_rank=0, node_world_size=1)
dist.init_process_group("gloo")
state.set_federated_scaling(federated_group_size=(1, 1))
aggregator = xffl.Aggregator(torch.nn.Linear(3000, 3000), state, overlap=True)
aggregator.aggregate()
pending = aggregator.aggregate_async()
sys.exit(int(sys.argv[1 + rank]))
"""


def test_a_loop_of_ones_own_may_end_with_a_round_under_way(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    command = [*EXEC, "--processes", "2", "--federated", "1,1", str(tmp_path / "train.py"), "0", "3"]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert job.returncode == 3, job.stderr
    assert "terminate called" not in job.stderr
