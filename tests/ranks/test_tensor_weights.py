"""Weights of single tensors and slices in rounds: experts are averaged by the tokens that they have seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import xffl
from tests.ranks.test_round import complete, make_state
from tests.worlds import run_world
from xffl.aggregation.arithmetic import weighted_mean
from xffl.aggregation.exports import RoundPlan
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.errors import CheckpointError, ConfigError, XfflError

EXPERTS = 5
Counts = Mapping[str, Any]


class Net(nn.Module):
    """Fused experts, single ones, and a layer that all tokens go through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(7, 6)
        self.fused = nn.Parameter(torch.randn(EXPERTS, 6, 4))
        self.offsets = nn.Parameter(torch.randn(EXPERTS))
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))


TOKENS: list[dict[str, list[float]]] = [
    {"fused": [8, 0, 0, 3, 100], "offsets": [1, 2, 0, 0, 5], "experts.0.*": [0], "experts.1.*": [7]},
    {"fused": [1, 6, 0, 3, 0], "offsets": [0, 2, 0, 1, 5], "experts.0.*": [0], "experts.1.*": [0]},
    {"fused": [1, 1, 0, 0, 2.5], "offsets": [0, 0, 0, 9, 5], "experts.0.*": [0], "experts.1.*": [1]},
]
"""What the cells have counted; nobody has anything for the third fused expert and the first single one."""
WEIGHTS = (1.0, 3.0, 2.0)


def counts_of(cell: int, ranks: int, times: float = 1.0) -> Counts:
    """Return a rank's part of what its cell has counted."""
    told: dict[str, Any] = {}
    for name, counts in TOKENS[cell].items():
        per_rank = torch.tensor(counts, dtype=torch.float64) * times / ranks
        told[name] = per_rank if len(counts) > 1 else float(per_rank)
    return told


def fill(model: nn.Module, seed: int) -> None:
    """Give all weights other values, the same in all cuts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=generator)
            if hasattr(tensor, "placements"):
                values = torch.distributed.tensor.distribute_tensor(
                    values, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
            tensor.copy_(values)


def by_hand(start: Mapping[str, torch.Tensor], cells: int, tokens: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the mean of what the cells hold, by the counts of each slice, and by the cells' weights for the rest."""
    held = []
    for cell in range(cells):
        model = Net()
        fill(model, 1 + cell)
        held.append(dict(model.named_parameters()))
    means: dict[str, Any] = {}
    for name, before in start.items():
        values = [one[name].detach() for one in held]
        key = f"{name.rsplit('.', 1)[0]}.*" if name.startswith("experts") else name
        if key not in TOKENS[0]:
            means[name] = mean_of(values, WEIGHTS[:cells])
            continue
        counts = [one[key] for one in tokens]
        parts = [slice(row, row + 1) for row in range(len(counts[0]))] if len(counts[0]) > 1 else [slice(None)]
        mean = before.clone()
        for row, part in enumerate(parts):
            of_row = [float(one[row]) for one in counts[:cells]]
            if any(of_row):
                mean[part] = mean_of([one[part] for one in values], of_row)
        means[name] = mean
    return means


def mean_of(values: list[torch.Tensor], weights: Any) -> torch.Tensor:
    out = torch.empty(values[0].numel())
    weighted_mean([one.flatten() for one in values], tuple(weights), out)
    return out.view(values[0].shape)


def spread(model: nn.Module, state: Any, cut: int | None) -> nn.Module:
    if cut is None:
        return xffl.shard(model, state, wrap=[nn.Linear])
    mesh = state.fsdp_mesh if state.hsdp_mesh is None else state.hsdp_mesh

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(cut if parameter.dim() > 2 else 0)

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model


def averaged(rank: int, world: int, sizes: tuple[int, ...], options: dict[str, Any], cut: int | None) -> list[int]:
    options = dict(options)
    hsdp = options.pop("hsdp", None)
    state = make_state(rank, sizes, hsdp)
    cell = state.cell
    model = spread(Net(), state, cut)
    start = {name: complete(one).clone() for name, one in model.named_parameters()}
    aggregator = xffl.Aggregator(
        model, state, tensor_weights=lambda: counts_of(cell, sizes[cell]), gradients_reduced_by_caller=True, **options
    )
    fill(model, 1 + cell)
    across = []
    for _ in range(options.get("fragments", 1)):
        across.append(aggregator.aggregate(WEIGHTS[cell] / sizes[cell]).bytes_across)
    expected = by_hand(start, len(sizes), TOKENS)
    for name, tensor in model.named_parameters():
        assert torch.equal(complete(tensor), expected[name]), name
    return across


@pytest.mark.parametrize(
    "sizes, options, cut",
    [
        ((1, 1), {}, None),
        ((2, 2), {}, None),
        ((2, 2), {"form": "two_hop"}, 1),
        ((1, 2, 3), {"bucket_bytes": 64}, None),
        ((4, 4), {"hsdp": 2, "rails": True}, 2),
        ((3, 1), {"bucket_bytes": 16, "form": "two_hop"}, 1),
        ((2, 1), {"fragments": 3}, None),
    ],
    ids=str,
)
def test_experts_are_averaged_by_their_tokens_to_the_last_bit(
    sizes: tuple[int, ...], options: dict[str, Any], cut: int | None
) -> None:
    run_world(sum(sizes), averaged, sizes, options, cut)


def combined_with(rank: int, world: int) -> None:
    """Counts beside server rules, delays, codecs and moments."""
    state = make_state(rank, (1, 1), None)

    def make(**options: Any) -> tuple[nn.Module, xffl.Aggregator, dict[str, torch.Tensor]]:
        model = Net()
        start = {name: one.detach().clone() for name, one in model.named_parameters()}
        options = {"gradients_reduced_by_caller": True, **options}
        return model, xffl.Aggregator(model, state, tensor_weights=lambda: counts_of(rank, 1), **options), start

    # A server rule sees the mean by tokens; what nobody has trained stays.
    model, aggregator, start = make(server="sgd:lr=0.7,momentum=0.9,nesterov=true")
    fill(model, 1 + rank)
    aggregator.aggregate(WEIGHTS[rank])
    means = by_hand(start, 2, TOKENS)
    outer = [nn.Parameter(one.clone()) for one in start.values()]
    for parameter, name in zip(outer, start, strict=True):
        parameter.grad = start[name] - means[name]
    torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True).step()
    for (name, tensor), parameter in zip(model.named_parameters(), outer, strict=True):
        torch.testing.assert_close(tensor, parameter, rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(model.fused[2], start["fused"][2])

    # A delayed round takes the counts of when it began.
    model, aggregator, start = make(overlap=True)
    fill(model, 1 + rank)
    aggregator.aggregate_async(WEIGHTS[rank]).merge()
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, means[name]), name

    # A codec's steps are combined so, too; the first round is exact.
    model, aggregator, start = make(codec="int8")
    fill(model, 1 + rank)
    aggregator.aggregate(WEIGHTS[rank])
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    assert all(torch.equal(before[name], means[name]) for name in means)
    fill(model, 1 + rank)
    report = aggregator.aggregate(WEIGHTS[rank])
    means = by_hand(before, 2, TOKENS)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), means[name], rtol=0, atol=0.08, msg=name)
        several: list[Any] = [None] * world
        dist.all_gather_object(several, tensor.detach())
        assert torch.equal(*several), name
    assert torch.equal(model.fused[2], before["fused"][2]) and report.codec_error

    # The moments of experts move by the same counts; of what nobody has trained, by the cells' weights.
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=1,
        weight=lambda: WEIGHTS[rank],
        moments="average",
        aggregator={"tensor_weights": lambda: counts_of(rank, 1), "gradients_reduced_by_caller": True},
    ):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        optimizer.step()
    first = [float(row.mean()) * 10 for row in optimizer.state[model.fused]["exp_avg"]]
    assert first == pytest.approx([(8 + 2) / 9, 2.0, (1 + 6) / 4, 1.5, 1.0], rel=1e-5)

    # Experts that stay at home cross no link.
    model = Net()
    policies = {"fused": "local", "experts.*": "local"}
    aggregator = xffl.Aggregator(model, state, policies=policies, gradients_reduced_by_caller=True)
    fill(model, 1 + rank)
    own = {name: one.detach().clone() for name, one in model.named_parameters()}
    report = aggregator.aggregate(WEIGHTS[rank])
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, own[name])}
    assert moved == {"dense.weight", "dense.bias", "offsets"}
    assert report.bytes_across == 4 * sum(own[name].numel() for name in moved)


def test_counts_go_with_servers_delays_codecs_and_moments_and_experts_may_stay_at_home() -> None:
    run_world(2, combined_with)


class Routed(nn.Module):
    """Two layers of experts, single ones and fused ones, that hooks count the tokens of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 3)
        self.single = nn.Module()
        self.single.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fused = nn.Module()
        self.fused.experts = Fused()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(tokens).softmax(-1).max(-1)
        hidden = torch.zeros_like(tokens)
        for number, expert in enumerate(self.single.experts):
            rows = (chosen == number).nonzero().flatten()
            hidden = hidden.index_add(0, rows, expert(tokens[rows]))
        return self.fused.experts(hidden * scores[:, None], chosen[:, None])


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.einsum("td,tdh->th", hidden, self.up[chosen[:, 0]])


def resumed(rank: int, world: int, folder: str, stage: str) -> list[torch.Tensor]:
    """Train 11 steps with rounds after each 4; save at 6 and stop there, or go on from what was saved."""
    state = make_state(rank, (2, 2), None)
    model = xffl.shard(Routed(), state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tokens = xffl.aggregation.ExpertTokens(model)
    path = f"{folder}/{rank}.pt"
    options = {"tensor_weights": tokens, "fragments": 2}
    with xffl.FederatedScaling(model, optimizer, state, every=4, aggregator=options) as scaling:
        first = 0
        if stage == "second":
            saved = torch.load(path, weights_only=False)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaling.load_state_dict(saved["scaling"])
            first = 6
        for number in range(first, 6 if stage == "first" else 11):
            generator = torch.Generator().manual_seed(10 * number + rank)
            model(torch.randn(5, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if stage == "first":
            told = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaling": scaling.state_dict()}
            torch.save(told, path)
            assert told["scaling"]["aggregator"]["tensor_weights"]["waiting"].sum(1).tolist() == [20, 60]
            told["scaling"]["aggregator"]["tensor_weights"]["patterns"] = "x"
            with pytest.raises(CheckpointError, match="other tensors"):
                scaling.load_state_dict(told["scaling"])
    return [complete(one).clone() for one in model.parameters()]


def test_a_killed_run_goes_on_with_its_counts_to_the_same_bits(tmp_path: Any) -> None:
    whole = run_world(4, resumed, str(tmp_path), "whole")
    run_world(4, resumed, str(tmp_path), "first")
    again = run_world(4, resumed, str(tmp_path), "second")
    for one, other in zip(whole[0] + whole[3], again[0] + again[3], strict=True):
        assert torch.equal(one, other)


def refused(rank: int, world: int) -> list[str]:
    state = make_state(rank, (1, 1), None)
    model = Net()
    told: list[str] = []
    counts: dict[str, Any] = {"fused": [0.0] * EXPERTS}

    def ask() -> Any:
        return counts

    cases: list[dict[str, Any]] = [
        {"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 1.0}},
        {"combine": "median"},
        {"atomic": False},
        {"tensor_weights": 3},
        {"tensor_weights": lambda: {"fused": [1.0] * 4}},
        {"tensor_weights": lambda: {"fuzed": 1.0}},
        {"tensor_weights": lambda: {"fused": -1.0}},
        {"tensor_weights": lambda: {"fused": [1.0 + rank] * (1 if rank else EXPERTS)}},
    ]
    for options in cases:
        with pytest.raises(XfflError) as caught:
            xffl.Aggregator(model, state, gradients_reduced_by_caller=True, **{"tensor_weights": ask, **options})
        told.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        xffl.aggregation.Levels(model, state, [{}], tensor_weights=ask)
    told.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        ElasticAggregator(model, state, tensor_weights=ask)
    told.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        RoundPlan(None, {"tensor_weights": ask}).check()
    told.append(str(caught.value))
    # What is wrong in a round is told to all, and the counts of before wait on.
    aggregator = xffl.Aggregator(model, state, gradients_reduced_by_caller=True, tensor_weights=ask)
    start = model.fused.detach().clone()
    with torch.no_grad():
        model.fused.add_(1.0 + rank)
    if rank:
        counts = {"fused": [1.0, 1.0, 1.0, 1.0, float("nan")]}
    with pytest.raises(XfflError) as caught:
        aggregator.aggregate()
    told.append(str(caught.value))
    counts = {"fused": [float(rank)] * EXPERTS}
    report = aggregator.aggregate()
    assert torch.equal(model.fused.detach(), start + 2.0)
    assert report.bytes_across == 4 * sum(one.numel() for one in model.parameters()) + 8 * EXPERTS
    return told


def test_what_counts_do_not_go_with_is_refused_by_name() -> None:
    told = run_world(2, refused)[0]
    for said, expected in zip(
        told,
        [
            "privacy and secure sums are to hide",
            "combines otherwise",
            "atomic=False",
            "must be a function",
            "has 4 counts for 'fused'",
            "match no parameter that trains",
            "finite and not negative",
            "tensor_counts",
            "tensor_weights",
            "not supported in an elastic federation",
            "not supported in rounds over files",
            "finite and not negative",
        ],
        strict=True,
    ):
        assert expected in said, said
