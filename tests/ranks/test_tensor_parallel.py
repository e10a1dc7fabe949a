"""Tensor parallelism alone, under FSDP2 and under HSDP: the losses, weights and gradient norms of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from tests.decoder import Decoder, loss_of, text_batch
from tests.worlds import run_world
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError
from xffl.parallel.axes.tensor_parallel import Replicated, apply_tensor_parallel, plan_for

STEPS = 6
BATCH = 8

Told = tuple[list[float], list[float], dict[str, torch.Tensor]]
"""Losses of the steps, gradient norms of the first, and the full weights at the end."""


def make_decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers=2)


class Tied(Decoder):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        assert isinstance(self.lm_head, nn.Linear) and isinstance(self.embed_tokens, nn.Embedding)
        self.lm_head.weight = self.embed_tokens.weight


class Counting(Decoder):
    """Counts positions from the length behind the embedding, as the models of transformers do."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        positions = torch.arange(hidden.shape[1]) if positions is None else positions
        for layer in self.layers.values():
            hidden = layer(hidden, positions)
        return self.lm_head(self.norm(hidden))


class Counted(nn.Module):
    """Attention that knows its numbers of heads, has fewer for keys, norms for each head, and biases."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = heads, key_heads
        size = width // heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, key_heads * size), nn.Linear(width, key_heads * size)
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)

    def forward(self, *, hidden_states: torch.Tensor) -> torch.Tensor:
        batch, sequence = hidden_states.shape[:2]
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        k = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (self.num_key_value_heads, -1)))
        v = self.v_proj(hidden_states).unflatten(-1, (self.num_key_value_heads, -1))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class Gpt(nn.Module):
    """The names of GPT-2 with separate projections; the last norm is frozen, and weights are not what they begin as."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, width), nn.Embedding(19, width)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Counted(width), nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width))
        self.lm_head = nn.Linear(width, 64, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.ln_f.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens % 64
        hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        hidden = hidden + self.attn(hidden_states=self.ln_1(hidden))
        hidden = hidden + self.mlp(self.ln_2(hidden))
        return self.lm_head(self.ln_f(hidden))


class Flat(nn.Module):
    """A block whose norms, attention and MLP stand beside each other: each projection gathers for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, 16)
        self.norm, self.up_proj = nn.RMSNorm(16), nn.Linear(16, 32)
        self.down_proj = nn.Linear(32, 16)
        self.output = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        return self.output(hidden + self.down_proj(self.up_proj(self.norm(hidden)).relu()))


MODELS: dict[str, Callable[[], nn.Module]] = {"tied": Tied, "gpt": Gpt, "flat": Flat}


loss_parallel: Any = partial(DistributedWorld.loss_parallel, SimpleNamespace(loss_parallel_enabled=True))


def train(
    model: nn.Module,
    steps: int,
    part: slice = slice(None),
    group: dist.ProcessGroup | None = None,
    is_loss_parallel: bool = False,
) -> Told:
    """Train on a part of each batch; losses are averaged over the group that has the others."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW blows up the rounding of gradients near zero, which the other models have.
    is_adam = isinstance(model, Decoder) and not isinstance(model, Tied)
    optimizer = torch.optim.AdamW(weights, lr=1e-2) if is_adam else torch.optim.SGD(weights, lr=0.1)
    losses, norms = [], []
    for step in range(steps):
        tokens, targets = (rows[part] for rows in text_batch(step, BATCH))
        with loss_parallel() if is_loss_parallel else nullcontext():
            loss = loss_of(model(tokens), targets % 64 if isinstance(model, Gpt) else targets)
            loss.backward()
        mean = whole(loss).clone()
        if group is not None:
            dist.all_reduce(mean, group=group)
            mean /= group.size()
        losses.append(mean.item())
        if step < 3:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(whole(nn.utils.get_total_norm(gradients)).item())
            assert norm_by_one_reduction(gradients) == pytest.approx(norms[-1], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: whole(p) for name, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def norm_by_one_reduction(gradients: Iterable[torch.Tensor]) -> float:
    """Each element counts on one rank, the first of those that hold it; one sum over all ranks."""
    square = torch.zeros(())
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            coordinate = gradient.device_mesh.get_coordinate() or []
            copies = zip(gradient.placements, coordinate, strict=True)
            if any(placement.is_replicate() and place for placement, place in copies):
                continue
            assert not any(placement.is_partial() for placement in gradient.placements)
            gradient = gradient.to_local()
        square += gradient.square().sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    return square.sqrt().item()


@cache
def single(name: str = "decoder", steps: int = STEPS) -> Told:
    """The whole batches in this process."""
    torch.manual_seed(0)
    return train(make_decoder() if name == "decoder" else MODELS[name](), steps)


def same(got: Told, want: Told) -> None:
    assert got[0] == pytest.approx(want[0], abs=1e-5)
    assert got[1] == pytest.approx(want[1], rel=1e-5)
    assert got[2].keys() == want[2].keys()
    for name, weight in want[2].items():
        assert (got[2][name] - weight).abs().max() < 1e-5, name


def mesh_of(shape: dict[str, int], rank: int) -> DeviceMesh:
    """One mesh from groups, as a cell has it."""
    ranks = torch.arange(dist.get_world_size()).view(*shape.values())
    mine = []
    for dim, size in enumerate(shape.values()):
        for row in ranks.movedim(dim, -1).reshape(-1, size).tolist():
            group = dist.new_group(row)
            mine += [group] if rank in row else []
    return DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=tuple(shape))


def two_ranks(rank: int, world_size: int) -> dict[Any, Told]:
    mesh = mesh_of({"tp": 2}, rank)["tp"]
    told: dict[Any, Told] = {}
    for sequence in (True, False):
        for loss in (True, False):
            model = apply_tensor_parallel(make_decoder(), mesh, sequence_parallel=sequence, loss_parallel=loss)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            told[sequence, loss] = train(model, STEPS, is_loss_parallel=loss)
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model = apply_tensor_parallel(make(), mesh, sequence_parallel=sequence)
            told[name, sequence] = train(model, 3)
    return told


def test_two_ranks_are_a_single_process() -> None:
    for told in run_world(2, two_ranks):
        for key, got in told.items():
            same(got, single(key[0], 3) if isinstance(key[0], str) else single())


def under_fsdp(model: nn.Module, mesh: DeviceMesh, **more: Any) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def fsdp(rank: int, world_size: int) -> dict[Any, Told]:
    mesh = mesh_of({"dp_shard": 2, "tp": 2}, rank)
    group, place = mesh.get_group("dp_shard"), mesh.get_local_rank("dp_shard")
    part = slice(place * BATCH // 2, (place + 1) * BATCH // 2)
    told: dict[Any, Told] = {}
    for steps, sequence, loss in ((STEPS, True, False), (3, False, True)):
        model = apply_tensor_parallel(make_decoder(), mesh["tp"], sequence_parallel=sequence, loss_parallel=loss)
        told[steps] = train(under_fsdp(model, mesh["dp_shard"]), steps, part, group, loss)
    torch.manual_seed(0)
    model = fully_shard(apply_tensor_parallel(Gpt(), mesh["tp"]), mesh=mesh["dp_shard"])
    told["gpt"] = train(model, 3, part, group)
    model = apply_tensor_parallel(make_decoder(), mesh["tp"])
    under_fsdp(model, mesh["dp_shard"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    told["bf16"] = train(model, 3, part, group)
    return told


def test_fsdp_and_tensor_parallel_are_a_single_process() -> None:
    for told in run_world(4, fsdp):
        bf16 = told.pop("bf16")
        for key, got in told.items():
            same(got, single("gpt", 3) if key == "gpt" else single("decoder", key))
        assert bf16[0] == pytest.approx(single()[0][:3], abs=0.05) and bf16[0] != pytest.approx(
            single()[0][:3], abs=1e-6
        )


def checked(rank: int, world_size: int) -> None:
    """What is not seen by training."""
    mesh = mesh_of({"tp": 2}, rank)["tp"]
    with CommDebugMode() as moved:
        model = apply_tensor_parallel(make_decoder(), mesh)
    assert moved.get_total_counts() == 0
    with CommDebugMode() as moved:
        model(text_batch(0)[0])
    counts = {str(kind).rpartition(".")[2]: count for kind, count in moved.get_comm_counts().items()}
    # Two of each for each of two blocks; the head gathers its input and the logits, the embedding scatters.
    assert counts == {"all_gather_into_tensor": 6, "reduce_scatter_tensor": 5}, counts
    q_proj = model.get_submodule("layers.0.self_attn.q_proj").weight
    assert q_proj.placements == (Shard(0),) and torch.equal(
        q_proj.to_local(), make_decoder().get_submodule("layers.0.self_attn.q_proj").weight.chunk(2)[rank]
    )
    assert q_proj.to_local().untyped_storage().nbytes() == q_proj.nbytes // 2, "the part keeps the whole's memory"
    with pytest.raises(ConfigError, match=r"sequence of 15 tokens .* 2 ranks .*sequence_parallel=False"):
        model(text_batch(0)[0][:, :15])
    want = make_decoder()(text_batch(0)[0][:, :15])
    model = apply_tensor_parallel(make_decoder(), mesh, sequence_parallel=False)
    assert torch.allclose(model(text_batch(0)[0][:, :15]), want, atol=1e-5)

    torch.manual_seed(0)
    model = apply_tensor_parallel(Counting(layers=2), mesh)
    assert torch.allclose(model(text_batch(0)[0]), make_decoder()(text_batch(0)[0]), atol=1e-5)

    with torch.autocast("cpu", torch.bfloat16):
        tokens, targets = text_batch(0)
        for sequence in (True, False):
            model = apply_tensor_parallel(make_decoder(), mesh, sequence_parallel=sequence)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            assert abs(loss - loss_of(make_decoder()(tokens), targets)) < 0.02

    torch.manual_seed(0)
    tied = apply_tensor_parallel(Tied(), mesh)
    assert tied.lm_head.weight is tied.embed_tokens.weight and tied.lm_head.weight.to_local().shape == (128, 32)
    gpt = apply_tensor_parallel(Gpt(), mesh)
    assert (gpt.attn.num_heads, gpt.attn.num_key_value_heads) == (2, 1)
    assert not gpt.ln_f.weight.requires_grad and gpt.ln_1.weight.requires_grad

    with torch.device("meta"):
        model = Decoder(layers=1)
    apply_tensor_parallel(model, mesh)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    assert model.lm_head.weight.to_local().shape == (128, 32)

    own: dict[str, ParallelStyle] = {
        "*": Replicated(),
        "*_proj": ColwiseParallel(),
        "*.[od]*_proj": RowwiseParallel(),
    }
    with pytest.raises(RuntimeError, match="block"), loss_parallel():
        raise RuntimeError("block")
    del own["*"]
    own |= {"*norm": Replicated(), "embed_tokens": Replicated(), "lm_head": Replicated()}
    model = apply_tensor_parallel(make_decoder(), mesh, plan=own)
    assert torch.allclose(model(tokens), make_decoder()(tokens), atol=1e-5)
    assert model.lm_head.weight.placements[0].is_replicate()
    mixed: dict[str, ParallelStyle] = {**plan_for(make_decoder(), sequence_parallel=False), "lm_head": Replicated()}
    model = apply_tensor_parallel(make_decoder(), mesh, plan=mixed)
    assert torch.allclose(model(tokens), make_decoder()(tokens), atol=1e-5)
    wrong(mesh)


def with_layer(name: str, layer: nn.Module, layers: int = 1) -> nn.Module:
    model = Decoder(layers=layers)
    model.get_submodule(name.rpartition(".")[0]).add_module(name.rpartition(".")[2], layer)
    return model


class Conv1D(nn.Linear):
    pass


def wrong(mesh: DeviceMesh) -> None:
    attention = "layers.0.self_attn"
    cases: list[tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = [
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, ("no layers of a transformer", "q_proj")),
        (lambda: with_layer(f"{attention}.c_attn", nn.Linear(4, 12)), {}, (f"{attention}.c_attn", "separate")),
        (lambda: with_layer("router", nn.Linear(4, 4)), {}, ("router.weight", "does not know", "Replicated()")),
        (lambda: Decoder(width=36, heads=3, layers=1), {}, ("3 heads of width 12", "2 ranks")),
        (lambda: with_layer(f"{attention}.v_proj", nn.Linear(32, 8)), {}, ("v_proj has 1 heads", "2 ranks")),
        (lambda: with_layer(f"{attention}.q_norm", nn.RMSNorm(32)), {}, ("q_norm spans all heads",)),
        (lambda: with_layer("layers.0.mlp.down_proj", nn.Bilinear(4, 4, 4)), {}, ("is a Bilinear", "nn.Linear")),
        (lambda: Decoder(vocabulary=257, layers=1), {}, ("embed_tokens.weight (257, 32)", "257", "2 ranks", "pad")),
        (lambda: with_layer(f"{attention}.o_proj", nn.Identity()), {}, ("without one of o_proj", attention)),
        (make_decoder, {"plan": {"layers.*.self_atn.q_proj": ColwiseParallel()}}, ("self_atn", "nearest is 'layers.")),
        (make_decoder, {"plan": {"*_proj": ColwiseParallel()}}, ("embed_tokens.weight", "does not say")),
        (make_decoder, {"plan": {"lm_head": "columns"}}, ("got 'lm_head': 'columns'",)),
        (make_decoder, {"plan": {"*norm": ColwiseParallel()}}, ("does not say",)),
        (Tied, {"plan": {**plan_for(Tied()), "lm_head": Replicated()}}, ("one tied parameter", "Replicated")),
    ]
    for make, more, parts in cases:
        model = make()
        with pytest.raises(ConfigError) as caught:
            apply_tensor_parallel(model, mesh, **more)
        assert all(part in str(caught.value) for part in parts), caught.value
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ConfigError, match="spread already"):
        apply_tensor_parallel(apply_tensor_parallel(make_decoder(), mesh), mesh)
    with pytest.raises(ConfigError, match="one dimension"):
        apply_tensor_parallel(make_decoder(), None)  # type: ignore[arg-type]


def test_parts_plans_and_wrong_arguments() -> None:
    run_world(2, checked)
