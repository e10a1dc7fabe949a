"""What one GPU shows of rounds: ranks that share it, streams under torch's sanitizer, waits of the host, rates."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xffl
from tests.decoder import Decoder, loss_of, text_batch
from tests.ports import free_port
from tests.ranks.test_strategies import configure
from tests.tasks import whole_weights
from tests.worlds import be_launched, run_world
from xffl.aggregation.compression import codec_of
from xffl.checkpoint import load_checkpoint, save_checkpoint
from xffl.parallel import DistributedStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROOT = Path(__file__).parents[2]
NCCL = torch.cuda.nccl.version() if torch.cuda.is_available() else (0,)
KINDS: dict[str, dict[str, Any]] = {
    "waited for": {"every": 2},
    "behind steps": {"every": 2, "delay": 1, "aggregator": {"overlap": True}},
    "coded": {"every": 2, "aggregator": {"codec": "bf16", "form": "two_hop"}},
    "server": {"every": 2, "algorithm": "diloco"},
}


def train(
    rank: int,
    world_size: int,
    port: int,
    cells: tuple[int, ...],
    hsdp: int | None,
    device: str,
    backend: str | None,
    folder: Path,
) -> dict[str, dict[str, torch.Tensor]]:
    """Train with rounds of each kind, save, and load what was saved; return the weights."""
    be_launched(rank, world_size, port)
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    found = {}
    with xffl.session(backend=backend, device=device, federated=cells, hsdp=hsdp) as state:
        for name, options in KINDS.items():
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 9))
            model = xffl.shard(layers, state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            data = torch.randn(6, 16, 24, generator=torch.Generator().manual_seed(rank))
            with xffl.FederatedScaling(model, optimizer, state, **options):
                for batch in data.to(state.current_device):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            parts = {"model": model, "optimizer": optimizer}
            save_checkpoint(folder / name, parts, state)
            found[name] = {key: values.cpu() for key, values in whole_weights(model).items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load_checkpoint(folder / name, parts, state)
            assert all(torch.equal(values.cpu(), found[name][key]) for key, values in whole_weights(model).items())
            assert {parameter.device.type for parameter in model.parameters()} == {torch.device(device).type}
    return found


OVER_NCCL = pytest.mark.skipif(NCCL < (2, 30), reason="needs NCCL 2.30, see tests/nccl/build_nccl.sh")


@pytest.mark.parametrize("cells", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("backend", ["gloo", pytest.param(None, marks=OVER_NCCL)], ids=["gloo", "nccl"])
def test_ranks_that_share_a_gpu_train_as_on_cpus(cells: tuple[int, ...], backend: str | None, tmp_path: Path) -> None:
    """Gloo gathers no shards of FSDP from GPUs, so cells of several ranks have replicas there."""
    hsdp = 1 if backend == "gloo" and max(cells) > 1 else None
    here, there = (
        run_world(sum(cells), train, free_port(), cells, hsdp, device, over, tmp_path / device, init=False)
        for device, over in (("cpu", "gloo"), ("cuda:0", backend))
    )
    for name in KINDS:
        for rank in there:
            assert rank[name].keys() == here[0][name].keys()
            for key, values in here[0][name].items():
                torch.testing.assert_close(rank[name][key], values, atol=1e-2 if name == "coded" else 1e-4, rtol=1e-3)
                assert torch.equal(rank[name][key], there[0][name][key]), (name, key)


BEHIND = """
import torch, xffl
with xffl.session(device="cuda") as state:
    model = xffl.shard(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), state)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"overlap": True, "bucket_bytes": 4096}
    with xffl.FederatedScaling(model, optimizer, state, every=2, delay=1, aggregator=options) as scaling:
        for _ in range(6):
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("rounds", scaling.aggregator.rounds)
"""


def test_the_sanitizer_finds_no_race_of_streams(tmp_path: Path) -> None:
    (tmp_path / "behind.py").write_text(BEHIND)
    ran = subprocess.run(
        [sys.executable, "behind.py"],
        cwd=tmp_path, env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and "rounds 3" in ran.stdout, ran.stderr
    assert "CSAN" not in ran.stderr, ran.stderr


def waits(call: Callable[[], object]) -> int:
    """Return how often torch says that the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in told)


def test_a_step_and_a_round_seldom_wait_for_the_gpu() -> None:
    """A step in fp16 reads whether gradients overflow, a round whether values are finite; each once."""
    config = configure("single", {}, {"device": "cuda"}, mixed_precision="fp16")
    with DistributedStrategy.from_config(config) as strategy:
        model = strategy.wrap_model(Decoder(), loss=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        aggregator = xffl.Aggregator(model, strategy.state)
        tokens, targets = (part.cuda() for part in text_batch(0))

        def step() -> None:
            strategy.forward_backward(model, tokens, target=targets)
            strategy.clip_grad_norm(model, 0.5)
            strategy.step(optimizer)

        step()
        aggregator.aggregate(1.0)
        assert waits(lambda: torch.ones(1, device="cuda").item()) == 1
        assert waits(step) <= 3
        assert waits(lambda: aggregator.aggregate(1.0)) <= 3
        aggregator.close()


def seconds(call: Callable[[], object]) -> float:
    """Return how long the GPU takes for a call, the best of five."""
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


@pytest.mark.parametrize(("name", "least"), [("bf16", 0.2), ("int8", 0.05), ("int4", 0.05), ("topk:0.01", 0.005)])
def test_codecs_are_a_part_of_a_copy_s_rate(name: str, least: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 256 MiB, in buckets of 4; the bounds are guesses until a GPU has told its rates."""
    codec = codec_of(name)
    assert codec is not None
    values, back = (torch.randn(64, 2**20, device="cuda") for _ in range(2))
    data = torch.empty(codec.nbytes(2**20), dtype=torch.uint8, device="cuda")

    def through() -> None:
        for bucket, out in zip(values, back, strict=True):
            codec.encode(bucket, data, 1)
            codec.decode(data, out)

    through()
    ratio = seconds(lambda: back.copy_(values)) / seconds(through)
    with capsys.disabled():
        print(f"\n{name}: {ratio:.3f} of a copy's rate, {torch.cuda.get_device_name()}")
    assert ratio > least
