"""What one GPU shows of strategies: NCCL in a world of one rank, FSDP2 on CUDA, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import xffl
from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.ranks.test_single_process import ALONE
from tests.ranks.test_strategies import configure, full_weights
from xffl.distributed import DeviceParameters, DistributedWorld
from xffl.parallel import DistributedStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def train(device: str, name: str, precision: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    strategy_name, mesh, options = ALONE[name]
    config = configure(strategy_name, mesh, {**options, "device": device}, mixed_precision=precision)
    with DistributedStrategy.from_config(config) as strategy:
        assert dist.get_backend() == ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        torch.manual_seed(0)
        with torch.device("meta"):
            bare = Decoder()
        model = strategy.wrap_model(bare, loss=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        aggregator = xffl.Aggregator(model, strategy.state)
        losses = []
        for tokens, targets in strategy.micro_batches(map(text_batch, range(10)), model):
            losses.append(strategy.forward_backward(model, tokens, target=targets).item())
            assert strategy.clip_grad_norm(model, 0.5).device.type == device
            strategy.step(optimizer)
            aggregator.aggregate(1.0)
        return losses, {key: values.cpu() for key, values in full_weights(model).items()}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("precision", "error"), [(None, 1e-4), ("bf16", 0.05), ("fp16", 0.05)])
def test_a_strategy_on_a_gpu_trains_as_on_the_cpu(name: str, precision: str | None, error: float) -> None:
    losses, weights = train("cpu", name, None)
    found, held = train("cuda", name, precision)
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < error
    if precision is None:
        assert max((held[key] - values).abs().max().item() for key, values in weights.items()) < 1e-4


def test_fsdp2_on_nccl() -> None:
    """FSDP2 over a mesh of one GPU, gathered and reduced by NCCL, its norm and a round."""
    with DistributedWorld(DeviceParameters.FSDP(), device="cuda") as world:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Decoder().cuda())
        dense, model = models
        for layer in model.modules():
            if isinstance(layer, Block):
                fully_shard(layer, **world.get_fsdp_config())
        fully_shard(model, **world.get_fsdp_config())
        tokens, targets = (part.cuda() for part in text_batch(0))
        for one in models:
            loss_of(one(tokens), targets).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in dense.parameters() if p.grad is not None])
        assert world.get_total_norm(model.parameters()).item() == pytest.approx(expected.item(), rel=1e-4)
        assert xffl.Aggregator(model, world.state).aggregate(2.0).weights == (2.0,)
