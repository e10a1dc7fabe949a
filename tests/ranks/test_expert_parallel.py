"""Experts of Mixtral- and OLMoE-shaped models: dealt out over an axis of the cell's mesh, and averaged by tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import xffl
from tests.ranks.test_round_mesh import make_state
from tests.worlds import run_world
from xffl.aggregation.arithmetic import weighted_mean
from xffl.parallel.axes.expert_parallel import apply_expert_parallel, meshes_of_cell

EXPERTS = 4
STEPS = 20
ROWS = 2
"""Sequences of a rank in a step"""


class Experts(nn.Module):
    """Fused experts, called as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 16, 8) / 3)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            rows = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, token, rows * factors[token, place, None])
        return result


class Layer(nn.Module):
    """A layer of experts with OLMoE's router, whose factors are not normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate = nn.Linear(16, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.norm(hidden).flatten(0, 1)
        factors, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        return hidden + self.experts(rows, chosen, factors).view(hidden.shape)


class Plain(nn.Module):
    """A model of two such layers, without attention and without imports that eight ranks would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.head(hidden))


def build(kind: str) -> nn.Module:
    """Return a tiny model: Mixtral's loops over its experts, OLMoE's multiplies their weights as groups."""
    if kind == "plain":
        torch.manual_seed(3)
        return Plain()
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 16,
        "pad_token_id": None,
        "experts_implementation": "eager" if kind == "mixtral" else "grouped_mm",
    }
    torch.manual_seed(3)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS)
        model: nn.Module = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, num_experts=EXPERTS))
    return model.train()


def batch(step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(0, 32, (ROWS, 8), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def one_process(kind: str, places: range) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Train on what all ranks of a cell have; return the routers' gradients by step, and the weights."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    gradients = []
    for step in range(STEPS):
        loss_of(model, torch.cat([batch(step, place) for place in places])).backward()
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if ".gate." in name})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: one.detach() for name, one in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def spread(kind: str, state: xffl.DistributedState) -> nn.Module:
    """Deal the experts out over ep, cut them over dp_shard, and the rest over the cell."""
    meshes = meshes_of_cell(state)
    model = apply_expert_parallel(build(kind), meshes["ep"])
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    ignored = {one for module in experts for one in module.parameters()}
    if meshes["dp_shard"].size() > 1:
        for module in experts:
            fully_shard(module, mesh=meshes["dp_shard"])
        ignored = set()
    fully_shard(model, mesh=state.hsdp_mesh, ignored_params=ignored)
    return model


def dealt(rank: int, world: int, kind: str, sizes: tuple[int, ...], shape: dict[str, int]) -> None:
    state = make_state(rank, sizes, shape)
    first = state.topology.offsets[state.cell]
    places = range(first, first + sizes[state.cell])
    gradients, weights = one_process(kind, places)
    start = {name: one.detach().clone() for name, one in build(kind).named_parameters()}
    model = spread(kind, state)
    tokens = xffl.aggregation.ExpertTokens(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    counted: dict[str, torch.Tensor] = {}

    def count() -> Any:
        now = tokens()
        for name, counts in now.items():
            counted[name] = counted.get(name, 0) + counts
        return now

    aggregator = xffl.Aggregator(model, state, tensor_weights=count)
    routers = {name: one for name, one in model.named_parameters() if ".gate." in name}
    assert len(routers) == 2
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        for name, router in routers.items():
            torch.testing.assert_close(whole(router.grad), gradients[step][name], rtol=1e-4, atol=1e-5, msg=name)
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: whole(one).clone() for name, one in model.named_parameters()}
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-5, msg=name)
    # A round: the mean by the tokens that each expert has seen in each cell.
    aggregator.aggregate()
    per_cell: list[Any] = [None] * world
    dist.all_gather_object(per_cell, (state.cell, trained, counted))
    held = [next(one for cell, one, _ in per_cell if cell == number) for number in range(len(sizes))]
    assert all(float(counts.sum()) == STEPS * ROWS * 8 * 2 for counts in counted.values())
    for name, tensor in model.named_parameters():
        values = [one[name] for one in held]
        rows = [slice(None)]
        if ".experts." in name:
            rows = [slice(row, row + 1) for row in range(EXPERTS)]
        mean = start[name].clone()
        for place, row in enumerate(rows):
            by_cell = [1.0] * len(sizes)
            if ".experts." in name:
                pattern = f"{name.rsplit('.', 1)[0]}.*"
                by_cell = [sum(float(c[pattern][place]) for at, _, c in per_cell if at == n) for n in range(len(sizes))]
            if any(by_cell):
                out = torch.empty(mean[row].numel())
                weighted_mean([one[row].flatten() for one in values], by_cell, out)
                mean[row] = out.view(mean[row].shape)
        assert torch.equal(whole(tensor), mean), name


@pytest.mark.parametrize(
    "kind, sizes, shape",
    [
        ("mixtral", (2, 2), {"dp_replicate": 1, "dp_shard": 1, "ep": 2}),
        ("olmoe", (2, 2), {"dp_replicate": 1, "dp_shard": 1, "ep": 2}),
        ("plain", (4, 4), {"dp_replicate": 1, "dp_shard": 2, "ep": 2}),
    ],
    ids=["mixtral, ep 2", "olmoe, ep 2", "ep 2 and dp_shard 2"],
)
def test_experts_on_other_ranks_train_as_in_one_process(
    kind: str, sizes: tuple[int, ...], shape: dict[str, int]
) -> None:
    run_world(sum(sizes), dealt, kind, sizes, shape)
