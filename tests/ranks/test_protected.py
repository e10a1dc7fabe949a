"""Rounds that clip, add noise, or show only sums; and what they refuse, on all ranks alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_algorithms import move, vector
from tests.ranks.test_round import digests, make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.combiners import Combiner
from xffl.aggregation.engine.transport import CrossCellTransport
from xffl.aggregation.privacy import Masker, Privacy, SecureSum

Array = npt.NDArray[np.float64]

LAYOUTS = [((2, 2, 4), 2), ((3, 1, 2), None), ((1, 2, 1), 1)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.deep = nn.Linear(5, 3, bias=False)


def build(state: xffl.DistributedState) -> nn.Module:
    torch.manual_seed(0)
    return xffl.shard(Net(), state, wrap=[nn.Linear])


@torch.no_grad()
def moved(model: nn.Module, state: xffl.DistributedState, number: int, size: float = 0.1) -> list[Array]:
    """Let each cell make steps of its own; return the whole updates of all of them."""
    parameters = list(model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    draws = np.random.default_rng(number).normal(size=(state.topology.cells, numel)) * size
    ends = np.cumsum([parameter.numel() for parameter in parameters])[:-1]
    for parameter, step in zip(parameters, np.split(draws[state.topology.cell_of(state.rank)], ends), strict=True):
        move(parameter, step)
    return list(draws)


def same_bits(model: nn.Module, world_size: int) -> bool:
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, digests(model))
    return all(other == gathered[0] for other in gathered)


def secure_rounds(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> list[float]:
    """Return how far secure means are from those of the papers' formula, in all ways of moving them."""
    state = make_state(rank, sizes, hsdp)
    found = []
    ways: list[dict[str, Any]] = [
        {},
        {"form": "all_gather", "bucket_bytes": 24},
        {"form": "two_hop", "bucket_bytes": 40, "rails": True},
        {"atomic": False, "bucket_bytes": 24},
        {"secure": SecureSum(fraction_bits=40)},
        {"combine": "fednova"},
        {"server": "sgd"},
    ]
    for way in ways:
        model = build(state)
        aggregator = xffl.Aggregator(model, state, **({"secure": True} | way))
        worst = 0.0
        for number in range(3):
            before = vector(model)
            steps = moved(model, state, number)
            weights = np.arange(1.0, len(sizes) + 1)
            share = float(weights[state.topology.cell_of(rank)]) / state.topology.sizes[state.topology.cell_of(rank)]
            aggregator.aggregate(share)
            wanted = before + np.average(steps, axis=0, weights=weights)
            worst = max(worst, float(np.abs(vector(model) - wanted).max()))
        assert same_bits(model, world_size), way
        found.append(worst)
    return found


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_a_secure_mean_is_the_mean(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), secure_rounds, sizes, hsdp):
        assert max(found) < 2e-7 and min(found) >= 0.0


def overheard(rank: int, world_size: int) -> tuple[int, float]:
    """Return how many rows this rank sent masked, and how like its values the most telling one looks."""
    state = make_state(rank, (1, 1, 1), None)
    model = nn.Linear(99, 50)
    aggregator = xffl.Aggregator(model, state, secure=True, form="all_gather")
    sent: list[torch.Tensor] = []
    post = CrossCellTransport._post

    def listening(self: Any, transfer: Any, bucket: Any, hop: int, send: Any, receive: Any) -> Any:
        sent.extend(values.clone() for values in send.values())
        return post(self, transfer, bucket, hop, send, receive)

    CrossCellTransport._post = listening  # type: ignore[method-assign]
    moved(model, state, 0)
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    aggregator.aggregate()
    rows = [row for row in sent if row.dtype == torch.int64]
    assert len(rows) == len(sent) == 2
    readings = [row.double() * 2.0**-32 * 3 for row in rows]
    return len(rows), max(float(torch.corrcoef(torch.stack([own.double(), r]))[0, 1].abs()) for r in readings)


def test_what_leaves_a_rank_tells_nothing_about_its_values() -> None:
    for rows, likeness in run_world(3, overheard):
        assert rows == 2 and likeness < 0.1  # 7 standard deviations for 5,000 random numbers; its own values have 1


def fewer_cells(rank: int, world_size: int) -> tuple[str, str, float]:
    """A cell that holds NaN is left out: of four, three go on; of those three, a round of two is refused."""
    state = make_state(rank, (1, 1, 1, 1), None)
    model = build(state)
    aggregator = xffl.Aggregator(model, state, secure=True, nonfinite="drop_cell")
    before = vector(model)
    steps = moved(model, state, 0)
    if rank == 2:
        next(iter(model.parameters())).data[0, 0] = math.nan
    report = aggregator.aggregate()
    assert report.dropped == (2,) and report.nonfinite == {2: ("wide.weight",)}
    error = float(np.abs(vector(model) - before - np.mean([steps[0], steps[1], steps[3]], axis=0)).max())
    held = vector(model)
    try:
        aggregator.aggregate(float(rank < 2))
    except xffl.RoundError as refused:
        assert np.array_equal(vector(model), held)
        again = aggregator.aggregate()  # the next attempt has new masks
        return str(refused), str(again.weights), error
    raise AssertionError("a sum of two cells was shown")


def test_too_few_cells_for_a_secure_sum_are_refused_and_the_next_round_goes_on() -> None:
    for refused, weights, error in run_world(4, fewer_cells):
        assert "needs 3" in refused and weights == "(1.0, 1.0, 1.0, 1.0)" and error < 1e-6


def private_rounds(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> tuple[float, float, float]:
    """Return how far clipping without noise is from the formula, and the noise's size over what was asked for."""
    state = make_state(rank, sizes, hsdp)
    model = build(state)
    aggregator = xffl.Aggregator(model, state, privacy=Privacy(clip=0.5, noise=0.0), overlap=True)
    worst = 0.0
    for number in range(3):
        before = vector(model)
        steps = moved(model, state, number, size=[0.01, 0.1, 1.0][number])
        clipped = [step * min(1.0, 0.5 / float(np.linalg.norm(step))) for step in steps]
        # Of a round in the background, the copy is kept beside what is sent.
        report = aggregator.aggregate_async().merge() if number == 2 else aggregator.aggregate()
        assert report.update_norms is None and len(set(report.weights)) == 1
        worst = max(worst, float(np.abs(vector(model) - before - np.mean(clipped, axis=0)).max()))
    torch.manual_seed(0)
    large = xffl.shard(nn.Linear(200, 200, bias=False), state)
    noisy = xffl.Aggregator(large, state, privacy=Privacy(clip=0.5, noise=2.0, seed=5))
    before = vector(large)
    noisy.aggregate()
    noise = (vector(large) - before) / (0.5 * 2.0 / math.sqrt(len(sizes)))
    assert same_bits(large, world_size)
    accountant = noisy.accountant
    assert accountant is not None
    return worst, float(noise.std()), accountant.epsilon(1e-5)


@pytest.mark.parametrize("sizes, hsdp", [((4, 4), 2), ((3, 1), None)], ids=str)
def test_updates_are_clipped_and_noised_as_wholes(sizes: tuple[int, ...], hsdp: int | None) -> None:
    found = run_world(sum(sizes), private_rounds, sizes, hsdp)
    for worst, deviation, epsilon in found:
        assert worst < 1e-6
        assert deviation == pytest.approx(1.0, abs=0.02)  # 40,000 draws: 0.0035
        assert epsilon == found[0][2] and 1.0 < epsilon < 10.0


def both(rank: int, world_size: int) -> float:
    """Noise that only the sum has in full, under masks; and a saved accountant."""
    state = make_state(rank, (1, 1, 1), None)
    torch.manual_seed(0)
    model = xffl.shard(nn.Linear(200, 200, bias=False), state)
    options: dict[str, Any] = {"privacy": Privacy(clip=1.0, noise=3.0, where="sum", seed=1), "secure": True}
    aggregator = xffl.Aggregator(model, state, **options)
    before = vector(model)
    aggregator.aggregate()
    other = xffl.Aggregator(xffl.shard(nn.Linear(200, 200, bias=False), state), state, **options)
    other.load_state_dict(aggregator.state_dict())
    assert other.accountant is not None and aggregator.accountant is not None
    assert other.accountant.epsilon() == aggregator.accountant.epsilon()
    return float((vector(model) - before).std())


def test_noise_of_the_sum_goes_with_masks() -> None:
    for deviation in run_world(3, both):
        assert deviation == pytest.approx(3.0 / 3, abs=0.02)  # of the sum; the mean divides by three cells


class Neither(Combiner):
    """One that says neither how to weigh cells nor how to combine values."""


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"secure": True, "codec": "int8"}, "goes with no codec"),
    ({"secure": True, "combine": "median"}, "shows only a sum"),
    ({"secure": True, "combine": "geometric_median"}, "shows only a sum"),
    ({"secure": True, "combine": "norm_clipping:clip=1"}, "NormClipping(clip=1.0) needs it, so give another"),
    ({"secure": True, "norms": True}, "leave out norms=True"),
    ({"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 1.0}, "norms": True}, "all cells learn the norm"),
    ({"privacy": Privacy(clip=1.0, noise=1.0, where="sum")}, "use secure sums"),
    ({"privacy": Privacy(clip=1.0, noise=1.0), "fragments": 2}, "needs fragments=1"),
    ({"privacy": Privacy(clip=1.0, noise=1.0), "atomic": False}, "leave atomic=True"),
    ({"server": "fedadam", "atomic": False}, "leave atomic=True"),
    ({"combine": "krum", "form": "two_hop"}, "compares whole models"),
    ({"combine": "krum:faulty=1"}, "5"),
    ({"combine": "fednova", "privacy": Privacy(1.0, 1.0, where="sum"), "secure": True}, "where='cell'"),
    ({"combine": "no_such"}, "no_such"),
    ({"combine": Neither()}, "derive it from Coordinatewise or WeightedCombiner"),
    ({"server": "LBFGS"}, "'LBFGS' of torch is not supported"),
]


def refusals(rank: int, world_size: int) -> list[str]:
    state = make_state(rank, (1, 1, 1), None)
    texts = []
    for options, _ in REFUSED:
        # Only one rank is asked for it: the others have to hear of it all the same.
        model = build(state)
        with pytest.raises(xffl.ConfigError) as caught:
            xffl.Aggregator(model, state, **(options if rank == 1 else {}))
        texts.append(str(caught.value))
    with pytest.raises(xffl.ConfigError) as caught:
        xffl.Aggregator(xffl.shard(nn.BatchNorm1d(3), state), state, privacy=Privacy(clip=1.0, noise=1.0))
    texts.append(str(caught.value))
    model = build(state)
    aggregator = xffl.Aggregator(model, state, privacy=Privacy(clip=1.0, noise=1.0))
    with pytest.raises(xffl.ConfigError) as caught:
        aggregator.aggregate(3.0)
    texts.append(str(caught.value))
    return texts


def test_what_would_undo_the_protection_is_refused_on_all_ranks() -> None:
    for texts in run_world(3, refusals):
        for text, (_, told) in zip(texts, REFUSED, strict=False):
            assert told in text
        assert "running_mean" in texts[-2] and "'local'" in texts[-2] and "give no weight" in texts[-1]


def other_start(rank: int, world_size: int) -> str:
    state = make_state(rank, (2, 2), None)
    model = build(state)
    if state.federated_rank == 1:
        with torch.no_grad():
            list(model.parameters())[2].mul_(1.5)
    with pytest.raises(xffl.ConfigError) as caught:
        xffl.Aggregator(model, state, server="fedadam")
    return str(caught.value)


def test_a_server_needs_one_model_to_start_from() -> None:
    for text in run_world(4, other_start):
        assert "cells [1] start from other values of tensor 'deep.weight'" in text


def fails_while_protecting(rank: int, world_size: int, step: str) -> tuple[str, list[float]]:
    """A rank fails before its update is protected, and sends on: what it sends must hold nothing of the update."""
    from xffl.aggregation.engine.stages import privacy as protection

    state = make_state(rank, (2, 2), None)
    model = build(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    aggregator = xffl.Aggregator(model, state, privacy=Privacy(clip=0.01, noise=0.0), bucket_bytes=24)
    sent: list[torch.Tensor] = []
    post = CrossCellTransport._post

    def listening(self: Any, transfer: Any, bucket: Any, hop: int, send: Any, receive: Any) -> Any:
        sent.extend(values.clone() for values in send.values())
        return post(self, transfer, bucket, hop, send, receive)

    def fails(*args: Any, **named: Any) -> Any:
        raise MemoryError("planted")

    CrossCellTransport._post = listening  # type: ignore[method-assign]
    if rank == 1 and step == "noise":
        protection.privatize = fails
    if rank == 1 and step == "norm":
        aggregator.global_model.squared_distance = fails  # type: ignore[union-attr,method-assign]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    with pytest.raises(xffl.RoundError) as caught:
        aggregator.aggregate()
    return str(caught.value), [float(row.view(torch.float32).abs().max()) for row in sent]


@pytest.mark.parametrize("step", ["noise", "norm"])
def test_what_could_not_be_protected_does_not_leave(step: str) -> None:
    for text, sent in run_world(4, fails_while_protecting, step):
        assert "planted" in text and sent and max(sent) <= 0.01


def fails_under_masks(rank: int, world_size: int) -> float:
    """A cell that fails sends no masked zeros: with its own row taken off the sum, each would read the third one's."""
    from xffl.aggregation.engine.stages import privacy as protection

    state = make_state(rank, (1, 1, 1), None)
    torch.manual_seed(0)
    model = xffl.shard(nn.Linear(50, 50, bias=False), state)
    privacy = Privacy(clip=1.0, noise=1e-4, where="sum")
    aggregator = xffl.Aggregator(model, state, privacy=privacy, secure=True, form="all_gather")
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1e-3 * (rank + 1))

    def fails(*args: Any, **named: Any) -> Any:
        raise MemoryError("planted")

    if rank == 0:
        protection.privatize = fails
    sums: list[torch.Tensor] = []
    decode = Masker.decode

    def listening(self: Masker, rows: Any, out: torch.Tensor) -> None:
        total = torch.stack(list(rows)).sum(0)  # modulo 2**64, as the masks are
        sums.append(total.double() * 2.0 ** -SecureSum().fraction_bits)
        decode(self, rows, out)

    Masker.decode = listening  # type: ignore[method-assign]
    with pytest.raises(xffl.RoundError, match="planted"):
        aggregator.aggregate()
    assert torch.equal(model.weight, before + 1e-3 * (rank + 1))
    theirs = (2.0 * before.flatten() + 2e-3 + 3e-3) / 3.0
    return float((sums[0] - theirs).abs().median())


def test_a_cell_that_fails_does_not_bare_the_others() -> None:
    # Had all masks cancelled, it would be the sum of two updates to some 1e-4.
    assert min(run_world(3, fails_under_masks)) > 1.0


def dropped(rank: int, world_size: int) -> tuple[float, tuple[int, ...], int]:
    """A cell with NaN is left out of a private round, which is that of the others."""
    state = make_state(rank, (2, 1, 2), None)
    model = build(state)
    start = vector(model)
    privacy = Privacy(clip=1e-2, noise=0.0)
    aggregator = xffl.Aggregator(model, state, privacy=privacy, nonfinite="drop_cell")
    updates = moved(model, state, 0)
    if state.federated_rank == 1:
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
    report = aggregator.aggregate()
    mean = sum(updates[cell] * 1e-2 / np.linalg.norm(updates[cell]) for cell in (0, 2)) / 2
    assert aggregator.accountant is not None
    assert same_bits(model, world_size)
    return float(np.abs(vector(model) - start - mean).max()), report.dropped, aggregator.accountant.rounds


def test_a_private_round_leaves_a_broken_cell_out() -> None:
    for off, left_out, spent in run_world(5, dropped):
        assert off <= 1e-7 and left_out == (1,) and spent == 1


def elsewhere(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A default device that torch was given is not where rounds keep their numbers."""
    state = make_state(rank, (1,) * world_size, None)
    model = Net()
    aggregator = xffl.Aggregator(model, state, **options)
    torch.set_default_device("meta")
    for number in range(1, 3):
        assert aggregator.aggregate().round == number
    state_dict = aggregator.state_dict()
    torch.set_default_device("cpu")
    aggregator.load_state_dict(state_dict)
    assert aggregator.aggregate().round == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"secure": True},
        {"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 1.0}},
        {"codec": "int8:rounding=stochastic"},
        {"server": "fedadam"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_default_device_changes_nothing(options: dict[str, Any]) -> None:
    run_world(3, elsewhere, options)
