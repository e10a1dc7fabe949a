"""What rounds know beyond the mean: the last agreed model, its norms, and which tensors all this is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_algorithms import vector
from tests.ranks.test_protected import Array, Net, build, moved, same_bits
from tests.ranks.test_round import complete, make_state
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.engine.decision.consensus import RoundInput

UNEVEN = [((4, 2), None), ((2, 4), 2)]


def resumed(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, server: str) -> bool:
    """Six rounds at once, and three and three, over other buckets and a file: the same bits."""
    state = make_state(rank, sizes, hsdp)
    model = build(state)
    aggregator = xffl.Aggregator(model, state, server=server, bucket_bytes=24)
    for number in range(3):
        moved(model, state, number)
        aggregator.aggregate(steps=2.0)
    saved, weights = aggregator.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
    assert all(torch.is_tensor(v) for v in saved["agreed"]["model"].values())
    other = build(state)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    second = xffl.Aggregator(other, state, server=server, bucket_bytes=1 << 20)
    second.load_state_dict(saved)
    for number in range(3, 6):
        for one, runs in ((model, aggregator), (other, second)):
            moved(one, state, number)
            assert runs.aggregate().round == number + 1
    assert same_bits(model, world_size)
    with pytest.raises(xffl.CheckpointError, match="the state lacks the last agreed model"):
        second.load_state_dict({"rounds": 3})
    wrong = {**saved, "agreed": {**saved["agreed"], "model": {}}}
    # Four ranks cut five rows, so that one gets none: it hears of it from the others.
    with pytest.raises(xffl.CheckpointError, match="holds nothing for tensor"):
        second.load_state_dict(wrong)
    with pytest.raises(xffl.XfflError, match="a state could not be loaded"):
        second.aggregate()
    second.load_state_dict(aggregator.state_dict())
    aggregator.aggregate()
    assert second.aggregate().round == 7
    return bool(np.array_equal(vector(model), vector(other)))


@pytest.mark.parametrize("server", ["fedyogi", "diloco", "torch.optim.AdamW:lr=0.01"])
def test_resuming_equals_never_having_stopped(server: str) -> None:
    assert all(run_world(6, resumed, (4, 2), None, server))


class Row(nn.Module):
    """A matrix of one row, which a single rank of a cell holds, and a layer that all ranks hold parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, bias=False)
        self.row = nn.Parameter(torch.randn(1, 30))


def without_counts(rank: int, world_size: int) -> tuple[dict[int, int], int, bool]:
    """Load a state in which, as before, a rank has no count of the fragments that it holds nothing of."""
    state = make_state(rank, (2, 2), None)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(xffl.shard(Row(), state))
    model, other = models
    first, second = (xffl.Aggregator(one, state, server="fedyogi", fragments=2) for one in models)
    for number in range(3):
        moved(model, state, number)
        first.aggregate()
    held = {transfer.group.fragment for transfer in first._exchange.transfers}
    saved = first.state_dict()
    optimizers = saved["agreed"]["optimizers"]
    missing = len(optimizers.keys() - held)
    agreed = {**saved["agreed"], "optimizers": {key: optimizers[key] for key in optimizers if key in held}}
    other.load_state_dict(model.state_dict())
    second.load_state_dict({**saved, "agreed": agreed})
    assert second.global_model is not None
    steps = second.global_model.steps
    for number in range(3, 5):
        for one, runs in ((model, first), (other, second)):
            moved(one, state, number)
            runs.aggregate()
    return steps, missing, bool(np.array_equal(vector(model), vector(other)))


def test_old_states_without_the_steps_of_some_fragments_load_with_the_same_steps_on_all_ranks() -> None:
    results = run_world(4, without_counts)
    assert {missing for _, missing, _ in results} == {0, 1}, "one rank of each cell has no count of the row's fragment"
    for steps, _, is_same in results:
        assert steps == {0: 2, 1: 1}
        assert is_same


def narrow(rank: int, world_size: int) -> tuple[float, int]:
    """In bf16, steps too small for one round add up in the agreed model; without any, nothing moves."""
    state = make_state(rank, (2, 2), None)
    torch.manual_seed(0)
    model = xffl.shard(nn.Linear(64, 64, bias=False).bfloat16(), state)
    aggregator = xffl.Aggregator(model, state, server={"name": "sgd", "lr": 0.01})
    start = vector(model)
    for _ in range(3):
        aggregator.aggregate()
    still = int((vector(model) != start).sum())
    for _ in range(100):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter, alpha=0.1)
        aggregator.aggregate()
    return float(np.linalg.norm(vector(model)) / np.linalg.norm(start)), still


def test_a_narrow_model_is_taken_on_in_32_bits() -> None:
    for grown, still in run_world(4, narrow):
        assert still == 0
        assert grown == pytest.approx(1.001**100, rel=0.01)  # a bf16 step is 0.004 or more: none of these is


def coded(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> dict[str, float]:
    """Lossy codecs go with server optimizers and combiners; their error stays that of the code."""
    state = make_state(rank, sizes, hsdp)
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "server": {"server": "diloco"},
        "median": {"combine": "median"},
        "clipping": {"combine": "norm_clipping:clip=0.3"},
        "geometric": {"combine": "geometric_median"},
    }
    for name, way in ways.items():
        exact, lossy = build(state), build(state)
        runs = [xffl.Aggregator(exact, state, **way), xffl.Aggregator(lossy, state, codec="int8:block=16", **way)]
        for number in range(6):
            for model, aggregator in zip((exact, lossy), runs, strict=True):
                moved(model, state, number)
                report = aggregator.aggregate()
        assert report.codec_error is None or report.codec_error < 0.02  # none where this rank sends nothing
        assert rank > 0 or report.codec_error
        assert same_bits(lossy, world_size), name
        found[name] = float(np.linalg.norm(vector(lossy) - vector(exact)) / np.linalg.norm(vector(exact)))
    return found


@pytest.mark.parametrize("sizes, hsdp", [((2, 1, 1), None), ((2, 4, 2), 2)], ids=str)
def test_codecs_go_with_servers_and_combiners(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), coded, sizes, hsdp):
        assert {name: error for name, error in found.items() if not 0.0 < error < 0.01} == {}


def diverging(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> list[tuple[int, bool]]:
    """Rounds take place where cells have moved far enough; what has not is still there afterwards."""
    state = make_state(rank, sizes, hsdp)
    model = build(state)
    aggregator = xffl.Aggregator(model, state, norms=True)
    sums: list[Array] = [np.zeros_like(vector(model)) for _ in sizes]
    old, found = vector(model), []
    for number, size in enumerate([0.01, 0.01, 0.2, 0.01]):
        sums = [one + step for one, step in zip(sums, moved(model, state, number, size), strict=True)]
        report = aggregator.participate(RoundInput(), least_divergence=0.5)
        assert report is not None and report.update_norms is not None
        norms = [float(np.linalg.norm(one)) for one in sums]
        np.testing.assert_allclose(report.update_norms, norms, rtol=1e-3)
        is_close = math.sqrt(float(np.mean(np.square(norms)))) < 0.5
        assert report.is_skipped == is_close
        sent: list[int] = [0] * world_size
        dist.all_gather_object(sent, report.bytes_across)
        assert any(sent) != is_close and (report.bytes_across == 0 or state.is_sender)
        if not is_close:
            old = old + np.mean(sums, axis=0)
            np.testing.assert_allclose(vector(model), old, atol=1e-6)
            sums = [np.zeros_like(one) for one in sums]
        found.append((report.round, report.is_skipped))
    plain = xffl.Aggregator(model, state)
    with pytest.raises(xffl.StateError, match="norms=True"):
        plain.participate(RoundInput(), least_divergence=0.5)
    return found


@pytest.mark.parametrize("sizes, hsdp", UNEVEN, ids=str)
def test_a_round_waits_until_cells_have_moved_apart(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), diverging, sizes, hsdp):
        assert found == [(1, True), (1, True), (1, False), (2, True)]


class Adapted(nn.Module):
    """A base that is frozen, an adapter, a norm, and a head of each cell's own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.lora_a = nn.Linear(6, 2, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)
        self.base.requires_grad_(False)


PARTIAL: list[tuple[Mapping[Any, str], set[str]]] = [
    ({}, {"lora_a", "norm", "block", "head"}),
    ({nn.BatchNorm1d: "local"}, {"lora_a", "block", "head"}),  # FedBN
    ({"head.*": "local"}, {"lora_a", "norm", "block"}),  # FedPer
    ({"*lora_*": "average", "*": "local"}, {"lora_a"}),  # adapters only
    ({nn.Sequential: "local", "norm.*": "local"}, {"lora_a", "head"}),  # all that lies in a type of module
    ({"block.1.*": "average", nn.Sequential: "local"}, {"lora_a", "norm", "block.1", "head"}),  # the first match wins
]


def partial(rank: int, world_size: int, kind: str, server: str | None) -> int:
    state = make_state(rank, (2, 2), None)
    cell = float(state.topology.cell_of(rank))
    checked = 0
    for policies, shared in PARTIAL:
        torch.manual_seed(0)
        model: nn.Module = Adapted()
        if kind == "shard":
            model = xffl.shard(model, state, wrap=[nn.Linear])
        aggregator = aggregator_of(model, state, policies=policies, server=server)
        start = {name: complete(tensor).clone() for name, tensor in model.named_parameters()}
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1.0 + cell)
        aggregator.aggregate()
        for name, tensor in model.named_parameters():
            is_shared = any(name.startswith(part) for part in shared) and not name.startswith("base")
            step = 1.5 if is_shared else 1.0 + cell
            torch.testing.assert_close(complete(tensor), start[name] + step, rtol=0, atol=1e-6)
            checked += 1
    return checked


@pytest.mark.parametrize("kind, server", [("plain", None), ("shard", None), ("shard", "sgd")])
def test_part_of_a_model_is_shared_by_names_and_types(kind: str, server: str | None) -> None:
    assert run_world(4, partial, kind, server) == [11 * len(PARTIAL)] * 4


class Tied(nn.Module):
    """An embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embed.weight


def tied(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    for policies, is_local in (({"head.*": "local"}, True), ({nn.Linear: "local"}, True), ({"*.bias": "local"}, False)):
        torch.manual_seed(0)
        model = Tied()
        aggregator = xffl.Aggregator(model, state, policies=policies)
        with torch.no_grad():
            model.embed.weight.fill_(float(rank))
        aggregator.aggregate()
        assert model.embed.weight.unique().tolist() == [float(rank) if is_local else 0.5]
    with pytest.raises(xffl.ConfigError, match="under its names embed.weight, head.weight; give these names the same"):
        xffl.Aggregator(Tied(), state, policies={"embed.*": "average", "*": "local"})


def test_a_tied_tensor_is_all_that_its_names_say() -> None:
    run_world(2, tied)


def other_server(rank: int, world_size: int) -> None:
    """The state of one server optimizer is none of another's, and nothing changes where it is refused."""
    state = make_state(rank, (1, 1), None)
    for first, second, what in (
        ("fedavgm", "fedadam", "class="),
        ("fedadam", "fedadagrad", "rule='adam', .*rule='adagrad'"),
        ("AdamW:lr=0.01", "SGD:lr=0.1", "class=AdamW, .*has class=SGD"),
        (
            "sgd",
            {"name": "sgd", "schedule": "StepLR:step_size=1"},
            "schedule=none, and this one has schedule=step_decay",
        ),
        ({"name": "sgd", "schedule": "StepLR:step_size=1"}, "sgd", "schedule=step_decay, and this one has sche"),
        (
            {"name": "sgd", "schedule": "StepLR:step_size=2"},
            {"name": "sgd", "schedule": "StepLR:step_size=1"},
            "size=2",
        ),
        ("diloco", "sgd", "lr=0.7, momentum=0.9, nesterov=True, and this one has lr=1.0, momentum=0.0, nest"),
        ("diloco", "diloco:lr=0.1", "lr=0.7, and this one has lr=0.1"),
    ):
        model = build(state)
        aggregator = xffl.Aggregator(model, state, server=first)
        moved(model, state, 0)
        aggregator.aggregate()
        other = xffl.Aggregator(model, state, server=second)
        assert other.global_model is not None
        before = other.global_model.state_dict()
        with pytest.raises(xffl.CheckpointError, match=f"{what}.*; resume with the same server, options"):
            other.load_state_dict(aggregator.state_dict())
        assert repr(other.global_model.state_dict()) == repr(before)


def test_the_state_of_another_server_is_refused() -> None:
    run_world(2, other_server)


def torn(rank: int, world_size: int) -> None:
    """Ranks that were interrupted at different places of a commit: the model alone does not bring them together."""
    state = make_state(rank, (1, 1), None)
    model = build(state)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    aggregator = xffl.Aggregator(model, state, server="fedavgm")
    saved = aggregator.state_dict()
    moved(model, state, 0)
    target, name = ((aggregator.global_model, "step"), (aggregator._exchange.layout, "unpack"))[rank]
    real = getattr(target, name)

    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    setattr(target, name, stop)
    with pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    setattr(target, name, real)
    model.load_state_dict(start)
    with pytest.raises(xffl.StateError, match="may differ between ranks since a round tore the model"):
        aggregator.aggregate()
    model.load_state_dict(start)
    aggregator.load_state_dict(saved)
    moved(model, state, 0)
    aggregator.aggregate()
    assert same_bits(model, world_size)


def test_after_a_tear_the_server_starts_from_its_state_only() -> None:
    run_world(2, torn)


def unused(rank: int, world_size: int) -> str:
    state = make_state(rank, (1, 1), None)
    with pytest.raises(xffl.ConfigError) as caught:
        xffl.Aggregator(Net(), state, policies={nn.BatchNorm2d: "local"})
    return str(caught.value)


def test_a_type_that_the_model_does_not_have_is_refused() -> None:
    assert all("BatchNorm2d" in text for text in run_world(2, unused))
