"""Server optimizers and combiners on shards, against dense implementations in one process, over ten rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.worlds import run_world

Array = npt.NDArray[np.float64]
Cells = list[Array]
Memory = dict[str, Any]

ROUNDS = 10
TWO_CELLS = [((4, 2), 2), ((3, 1), None)]
MORE_CELLS = [((2, 1, 1, 1, 1), None)]


class Net(nn.Module):
    """Tensors that no cell cuts evenly, a buffer, and a parameter that does not train but is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.deep = nn.Linear(5, 3, bias=False)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)


# The papers, densely. A step takes the global vector, the cells' vectors, weights and local steps, and what it keeps.


def mean(cells: Cells, weights: Array) -> Array:
    return np.asarray(weights @ np.stack(cells) / weights.sum())


def plain(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
    return mean(cells, weights)


def momentum(lr: float, beta: float, *, is_nesterov: bool = False) -> Callable[..., Array]:
    def step(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
        way = mean(cells, weights) - old
        kept["v"] = beta * kept.get("v", 0.0) + way
        return old + lr * (way + beta * kept["v"] if is_nesterov else kept["v"])

    return step


def adaptive(rule: str, beta1: float) -> Callable[..., Array]:
    lr, beta2, tau = 0.1, 0.99, 1e-3

    def step(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
        way = mean(cells, weights) - old
        kept["m"] = beta1 * kept.get("m", 0.0) + (1 - beta1) * way
        v = kept.get("v", np.full_like(old, tau**2))
        square = way**2
        kept["v"] = {
            "adagrad": v + square,
            "adam": beta2 * v + (1 - beta2) * square,
            "yogi": v - (1 - beta2) * square * np.sign(v - square),
        }[rule]
        return np.asarray(old + lr * kept["m"] / (np.sqrt(kept["v"]) + tau))

    return step


def adamw(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
    """Loshchilov and Hutter, as torch.optim.AdamW with lr 0.01 and no other option computes it."""
    gradient = old - mean(cells, weights)
    kept["t"] = kept.get("t", 0) + 1
    kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * gradient
    kept["v"] = 0.999 * kept.get("v", 0.0) + 0.001 * gradient**2
    m, v = kept["m"] / (1 - 0.9 ** kept["t"]), kept["v"] / (1 - 0.999 ** kept["t"])
    return np.asarray(old * (1 - 0.01 * 0.01) - 0.01 * m / (np.sqrt(v) + 1e-8))


def median(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
    return np.asarray(np.median(np.stack(cells), axis=0))


def trimmed(share: float) -> Callable[..., Array]:
    def step(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
        cut = int(share * len(cells))
        return np.asarray(np.sort(np.stack(cells), axis=0)[cut : len(cells) - cut].mean(0))

    return step


def krum(faulty: int, selected: int) -> Callable[..., Array]:
    def step(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
        table = [sorted(float(((one - other) ** 2).sum()) for other in cells) for one in cells]
        scores = [sum(row[1 : len(cells) - faulty - 1]) for row in table]  # the first is the cell itself
        chosen = sorted(range(len(cells)), key=lambda cell: (scores[cell], cell))[:selected]
        return np.asarray(np.mean([cells[cell] for cell in chosen], axis=0))

    return step


def geometric_median(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
    """The point itself, by steps of Weiszfeld's from the mean until it stands."""
    table, point = np.stack(cells), mean(cells, weights)
    for _ in range(2000):
        shares = weights / np.maximum(1e-12, np.sqrt(((table - point) ** 2).sum(1)))
        before, point = point, np.asarray(shares @ table / shares.sum())
        if np.abs(point - before).max() <= 1e-15:
            break
    return point


def clipped(clip: float) -> Callable[..., Array]:
    def step(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
        return old + mean([(c - old) * min(1.0, clip / float(np.linalg.norm(c - old))) for c in cells], weights)

    return step


def nova(old: Array, cells: Cells, weights: Array, steps: Array, kept: Memory) -> Array:
    shares = weights / weights.sum()
    return old + (shares @ steps) * mean([(c - old) / a for c, a in zip(cells, steps, strict=True)], weights)


ALGORITHMS: dict[str, tuple[dict[str, Any], Callable[..., Array]]] = {
    "fedavg": ({"norms": True}, plain),
    "lr 1": ({"server": "sgd"}, plain),
    "fedavgm": ({"server": "fedavgm"}, momentum(1.0, 0.9)),
    "fedadagrad": ({"server": "fedadagrad"}, adaptive("adagrad", 0.0)),
    "fedadam": ({"server": "fedadam"}, adaptive("adam", 0.9)),
    "fedyogi": ({"server": "fedyogi"}, adaptive("yogi", 0.9)),
    "diloco": ({"server": "diloco"}, momentum(0.7, 0.9, is_nesterov=True)),
    "AdamW": ({"server": "torch.optim.AdamW:lr=0.01"}, adamw),
    "median": ({"combine": "median"}, median),
    "trimmed_mean": ({"combine": "trimmed_mean:share=0"}, trimmed(0.0)),
    "geometric_median": ({"combine": "geometric_median:iterations=2000"}, geometric_median),
    "norm_clipping": ({"combine": "norm_clipping:clip=0.5"}, clipped(0.5)),
    "fednova": ({"combine": "fednova"}, nova),
    "median, rails": ({"combine": "median", "form": "two_hop", "rails": True}, median),
    "fedyogi, small buckets": ({"server": "fedyogi", "bucket_bytes": 24}, adaptive("yogi", 0.9)),
}
MORE: dict[str, tuple[dict[str, Any], Callable[..., Array]]] = {
    "trimmed_mean, one at each end": ({"combine": "trimmed_mean:share=0.34"}, trimmed(0.34)),
    "krum": ({"combine": "krum:faulty=1"}, krum(1, 1)),
    "krum, rails": ({"combine": "krum:faulty=1", "rails": True, "bucket_bytes": 24}, krum(1, 1)),
    "krum, in place": ({"combine": "krum:faulty=1", "atomic": False, "bucket_bytes": 40}, krum(1, 1)),
    "multi_krum": ({"combine": "multi_krum:faulty=1,selected=3"}, krum(1, 3)),
}


def build(state: xffl.DistributedState) -> nn.Module:
    torch.manual_seed(0)
    return xffl.shard(Net(), state, wrap=[nn.Linear])


def move(parameter: torch.Tensor, step: Array) -> None:
    """Add a whole tensor to what may be a shard of one."""
    whole = torch.from_numpy(step.reshape(parameter.shape)).float()
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        parameter.to_local().add_(whole)
    else:
        parameter.add_(whole)


def vector(model: nn.Module) -> Array:
    """All parameters that train, end to end."""
    return np.concatenate([complete(p).double().numpy().reshape(-1) for p in model.parameters() if p.requires_grad])


@torch.no_grad()
def rounds(state: xffl.DistributedState, options: dict[str, Any], dense: Callable[..., Array]) -> float:
    """Run rounds of cells that move at random; return the largest difference from the dense run, relative."""
    cell, cells = state.topology.cell_of(state.rank), state.topology.cells
    model = build(state)
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    aggregator = xffl.Aggregator(model, state, policies={"*fixed": "average"}, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = np.arange(1.0, cells + 1)
    steps = 1.0 + np.arange(cells) % 3
    old, kept, worst = vector(model), {}, 0.0
    for number in range(ROUNDS):
        draws = np.random.default_rng(number).normal(size=(cells, len(old))) * 0.1 * (np.arange(len(old)) % 5 > 0)
        sizes = np.cumsum([parameter.numel() for parameter in trained])[:-1]
        for parameter, step in zip(trained, np.split(draws[cell], sizes), strict=True):
            move(parameter, step)
        bare.get_parameter("fixed").fill_(float(cell))
        bare.get_buffer("norm.running_mean").fill_(float(state.rank))
        share = float(weights[cell]) / state.topology.sizes[cell]
        report = aggregator.aggregate(share, steps=float(steps[cell]))
        old = dense(old, [old + draw for draw in draws], weights, steps, kept)
        worst = max(worst, float(np.abs(vector(model) - old).max() / np.abs(old).max()))
        if report.update_norms is not None:
            np.testing.assert_allclose(report.update_norms, np.linalg.norm(draws, axis=1), rtol=1e-3)
        assert math.fsum(report.shares) == pytest.approx(1.0) and report.steps == tuple(steps)
        by_cell = [np.mean(state.topology.federation(c)) for c in range(cells)]
        if options.get("combine") is None:  # what does not train takes no server step
            for name, values in (("fixed", list(range(cells))), ("norm.running_mean", by_cell)):
                tensor = dict([*bare.named_parameters(), *bare.named_buffers()])[name]
                assert torch.allclose(complete(tensor), torch.tensor(float(np.average(values, weights=weights))))
    mine, all_digests = digests(model), [None] * state.world_size
    dist.all_gather_object(all_digests, mine)
    assert all(other == mine for other in all_digests), "the ranks hold different bits"
    return worst


def all_algorithms(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, names: list[str]
) -> dict[str, float]:
    state = make_state(rank, sizes, hsdp)
    return {name: rounds(state, *(ALGORITHMS | MORE)[name]) for name in names}


@pytest.mark.parametrize("sizes, hsdp", TWO_CELLS, ids=str)
def test_ten_rounds_equal_the_dense_algorithm(sizes: tuple[int, ...], hsdp: int | None) -> None:
    few = ["fedavg", "fedadam", "geometric_median", "fednova", "median, rails"]
    names = list(ALGORITHMS) if hsdp is None else few
    for found in run_world(sum(sizes), all_algorithms, sizes, hsdp, names, timeout_s=240.0):
        assert {name: error for name, error in found.items() if not error <= 1e-6} == {}


@pytest.mark.parametrize("sizes, hsdp", MORE_CELLS, ids=str)
def test_five_cells_equal_the_dense_algorithm(sizes: tuple[int, ...], hsdp: int | None) -> None:
    names = [*MORE, "median", "geometric_median", "norm_clipping", "fednova", "fedadam"] if hsdp is None else list(MORE)
    for found in run_world(sum(sizes), all_algorithms, sizes, hsdp, names, timeout_s=240.0):
        assert {name: error for name, error in found.items() if not error <= 1e-6} == {}


def against_flwr(rank: int, world_size: int) -> dict[str, float]:
    """One round of five cells on shards, and what flwr's functions make of the same arrays."""
    from flwr.server.strategy import aggregate as flwr

    state = make_state(rank, (2, 1, 2, 1, 2), None)
    ways: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
        "fedavg": ({}, flwr.aggregate),
        "median": ({"combine": "median"}, flwr.aggregate_median),
        "trimmed_mean": ({"combine": "trimmed_mean:share=0.2"}, lambda all_of: flwr.aggregate_trimmed_avg(all_of, 0.2)),
        "krum": ({"combine": "krum:faulty=1"}, lambda all_of: flwr.aggregate_krum(all_of, 1, 0)),
    }
    found = {}
    for name, (options, published) in ways.items():
        model = build(state)
        aggregator = xffl.Aggregator(model, state, **options)
        cell = state.topology.cell_of(rank)
        with torch.no_grad():
            for parameter in (one for one in model.parameters() if one.requires_grad):
                move(parameter, np.random.default_rng((cell, parameter.numel())).normal(size=tuple(parameter.shape)))
        mine = [complete(parameter).numpy().copy() for parameter in model.parameters() if parameter.requires_grad]
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, mine)
        of_cells = [(everyone[ranks[0]], 10 * c + 10) for c in range(5) for ranks in (state.topology.federation(c),)]
        aggregator.aggregate((10 * cell + 10) / state.topology.sizes[cell])
        wanted = np.concatenate([np.asarray(layer, dtype=np.float64).reshape(-1) for layer in published(of_cells)])
        found[name] = float(np.abs(vector(model) - wanted).max() / np.abs(wanted).max())
    return found


def test_rounds_on_shards_equal_the_published_flwr() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed; it has no release for Python 3.10")
    for found in run_world(8, against_flwr):
        assert {name: error for name, error in found.items() if not error <= 1e-6} == {}
