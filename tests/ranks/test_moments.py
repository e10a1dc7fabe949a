"""Moments of optimizers in rounds: means by hand, a saddle where local ones do worse, late cells, resumed runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import complete, make_state
from tests.worlds import run_world
from xffl.aggregation.optimizer_moments import OptimizerMoments
from xffl.errors import ConfigError

WEIGHTS = (1.0, 3.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))  # [1, N] on the second of two shards is empty


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, cell: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + cell)
    inputs = torch.randn(4, 6, generator=generator)
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True) * (1 + cell)).backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all that an optimizer keeps, whole, by the parameter's name and its own."""
    return {
        f"{name.removeprefix('module.')} {key}": complete(value).clone()
        if isinstance(value, torch.Tensor)
        else torch.tensor(float(value))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def whole_cells(spec: dict[str, int], rounds: int) -> list[dict[str, torch.Tensor]]:
    """Train two cells without shards, and average weights and moments by hand."""
    cells = [net() for _ in WEIGHTS]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in cells]
    number = 0
    for made in range(1, rounds + 1):
        for _ in range(2):
            for cell, (model, optimizer) in enumerate(zip(cells, optimizers, strict=True)):
                step(model, optimizer, number, cell)
            number += 1
        with torch.no_grad():
            for several in zip(*(one.parameters() for one in cells), strict=True):
                tensors = [list(several)]
                for key, period in spec.items():
                    if made % period == 0:
                        tensors.append([o.state[p][key] for o, p in zip(optimizers, several, strict=True)])
                for alike in tensors:
                    mean = sum(w * one for w, one in zip(WEIGHTS, alike, strict=True)) / sum(WEIGHTS)
                    for one in alike:
                        one.copy_(mean)
    return [moments(model, optimizer) for model, optimizer in zip(cells, optimizers, strict=True)]


def by_hand(rank: int, world: int, sizes: tuple[int, ...], hsdp: int | None, fragments: int) -> list[int]:
    state = make_state(rank, sizes, hsdp)
    cell = state.cell
    spec = {"exp_avg": 2, "exp_avg_sq": 3}
    model = xffl.shard(net(), state, wrap=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    reports: list[xffl.RoundReport] = []
    words = ",".join(f"{key}={period}" for key, period in spec.items())
    with xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=2,
        weight=lambda: WEIGHTS[cell] / sizes[cell],
        on_round=reports.append,
        moments=f"average:{words}",
        aggregator={"fragments": fragments},
    ):
        for number in range(12):
            step(model, optimizer, number, cell)
    if fragments == 1:
        expected = whole_cells(spec, 6)[cell]
        found = moments(model, optimizer)
        assert found.keys() == expected.keys() and len(found) == 12
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7, msg=name)
        # In the sixth round all have moved: the cells hold the same bits.
        for name, tensor in found.items():
            several: list[Any] = [None] * world
            dist.all_gather_object(several, tensor)
            assert all(torch.equal(one, tensor) for one in several), name
    return [report.bytes_across for report in reports]


@pytest.mark.parametrize("sizes, hsdp", [((1, 1), None), ((2, 2), None), ((4, 2), 2), ((2, 2), 1)], ids=str)
def test_moments_move_in_their_rounds_by_the_same_mean(sizes: tuple[int, ...], hsdp: int | None) -> None:
    told = run_world(sum(sizes), by_hand, sizes, hsdp, 1)
    across = [sum(of_round) for of_round in zip(*told, strict=True)]
    model = across[0]
    assert across[:6] == [model * count for count in (1, 2, 2, 2, 1, 3)]


def test_moments_of_a_fragment_move_with_it() -> None:
    told = run_world(2, by_hand, (1, 1), None, 2)
    across = [sum(of_round) for of_round in zip(*told, strict=True)]
    assert across[2] == 2 * across[0] and across[3] == 2 * across[1]  # the second round of each
    assert across[4] == 2 * across[0] and across[5] == 2 * across[1]  # and the third


def restarted(rank: int, world: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = xffl.shard(net(), state)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    seen: list[float] = []

    def look(report: xffl.RoundReport) -> None:
        seen.append(sum(float(value.abs().sum()) for value in moments(model, optimizer).values()))

    with xffl.FederatedScaling(model, optimizer, state, every=2, on_round=look, moments="reset:every=2"):
        for number in range(8):
            step(model, optimizer, number, rank)
    assert [one > 0 for one in seen[:4]] == [True, False, True, False]


def test_a_restart_forgets_moments_and_counts_of_steps() -> None:
    run_world(2, restarted)


def unchanged(rank: int, world: int) -> None:
    """What an aggregator makes before the first step is what optimizers make in it."""
    state = make_state(rank, (1, 1), None)
    kinds: list[Any] = [
        lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), weight_decay=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.Adamax(p, lr=0.01),
    ]
    for make in kinds:
        ends = []
        for options in ({}, {"moments": "average:every=100"}):
            model = net()
            optimizer = make(model.parameters())
            with xffl.FederatedScaling(
                model, optimizer, state, every=3, aggregator={"gradients_reduced_by_caller": True}, **options
            ):
                for number in range(5):
                    step(model, optimizer, number, rank)
            ends.append([*(p.detach() for p in model.parameters()), *moments(model, optimizer).values()])
        assert all(map(torch.equal, *ends)), type(optimizer).__name__


def test_states_that_are_made_early_are_those_of_a_first_step() -> None:
    run_world(2, unchanged)


class Rebinding(torch.optim.Optimizer):
    """Puts a new tensor in its state in each step, as optimizers written by hand do."""

    def __init__(self, params: Any, in_place: bool) -> None:
        super().__init__(params, {"lr": 0.05})
        self._is_in_place = in_place

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                old = state.get("m", torch.zeros_like(parameter))
                new = 0.9 * old + parameter.grad
                state["m"] = old.copy_(new) if self._is_in_place else new
                parameter.sub_(0.05 * new)


def delayed(rank: int, world: int) -> None:
    state = make_state(rank, (1, 1), None)
    ends = []
    for in_place in (True, False):
        model = net()
        optimizer = Rebinding(model.parameters(), in_place)
        with xffl.FederatedScaling(
            model,
            optimizer,
            state,
            every=4,
            delay=2,
            alpha=0.5,
            moments="average",
            aggregator={"gradients_reduced_by_caller": True},
        ):
            for number in range(11):
                step(model, optimizer, number, rank)
        ends.append([*(p.detach() for p in model.parameters()), *moments(model, optimizer).values()])
    assert len(ends[0]) == 8 and all(map(torch.equal, *ends))


def in_inference(rank: int, world: int) -> None:
    state = make_state(rank, (1, 1), None)
    for spec in ("average", "reset"):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with torch.inference_mode():
            beside = OptimizerMoments(spec, optimizer)
            aggregator = xffl.Aggregator(model, state, moments=beside, gradients_reduced_by_caller=True)
        for number in range(3):
            step(model, optimizer, number, rank)
            with torch.inference_mode():
                aggregator.aggregate()


@pytest.mark.parametrize("run", [delayed, in_inference], ids=["new tensors meanwhile", "inference mode"])
def test_moments_are_found_where_they_are(run: Any) -> None:
    run_world(2, run)


class Valley(nn.Module):
    """f = (1 - x)^2 + 100 (y - x^2)^2, whose least value is 0, and a pull of the cell's own that has no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        x, y = self.point
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def in_a_valley(rank: int, world: int) -> dict[str, float]:
    """Return the mean of the function behind the last rounds, by what rounds do with moments."""
    state = make_state(rank, (1, 1), None)
    pull = torch.tensor([4.0, 2.0], dtype=torch.float64) * (1 - 2 * rank)
    ends: dict[str, float] = {}
    for moments in ("local", "average", "average:exp_avg=3,exp_avg_sq=6", "reset"):
        model = Valley()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        noise = torch.Generator().manual_seed(rank)
        values: list[float] = []
        with xffl.FederatedScaling(
            model,
            optimizer,
            state,
            every=8,
            moments=moments,
            on_round=lambda report, model=model, values=values: values.append(float(model())),
            aggregator={"gradients_reduced_by_caller": True},
        ):
            for _ in range(1200):
                model().backward()
                gradient = model.point.grad
                gradient += pull + 1.5 * torch.randn(2, generator=noise, dtype=torch.float64)
                optimizer.step()
                optimizer.zero_grad()
        ends[moments] = sum(values[-30:]) / 30
    return ends


@pytest.mark.long  # a training to its end; the tests above hold each round's moments against means by hand
def test_averaged_moments_reach_the_ground_of_a_valley_that_local_ones_miss() -> None:
    ends = run_world(2, in_a_valley)[0]
    assert ends["average"] < 0.05 and ends["average:exp_avg=3,exp_avg_sq=6"] < 0.05, ends
    assert ends["local"] > 0.1 and ends["reset"] > 0.1, ends


def refused(rank: int, world: int) -> list[str]:
    state = make_state(rank, (1, 1), None)
    model = xffl.shard(net(), state)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    adam = torch.optim.AdamW(model.parameters())
    cases: list[tuple[torch.optim.Optimizer | None, dict[str, Any]]] = [
        (sgd, {"moments": "average"}),
        (torch.optim.Adafactor(model.parameters()), {"moments": "average"}),
        (torch.optim.NAdam(model.parameters()), {"moments": "average"}),
        (torch.optim.ASGD(model.parameters()), {"moments": "average"}),
        (adam, {"moments": "average:exp_avq=2"}),
        (adam, {"moments": "average:exp_avg=0"}),
        (adam, {"moments": "mean"}),
        (adam, {"moments": "reset:exp_avg=2"}),
        (adam, {"moments": "average", "delay": 1}),
        (adam, {"moments": "average", "aggregator": {"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 1.0}}}),
        (adam, {"aggregator": {"moments": "average"}}),
        (None, {"moments": "average"}),
    ]
    said = []
    for optimizer, options in cases:
        with pytest.raises(ConfigError) as caught, xffl.FederatedScaling(model, optimizer, state, every=2, **options):
            pass
        said.append(str(caught.value))
    with (
        pytest.raises(ConfigError, match="different steps between rounds"),
        xffl.FederatedScaling(model, adam, state, every=2, moments=f"average:exp_avg={2 + rank}"),
    ):
        pass
    return said


def test_what_has_no_moments_and_what_goes_not_with_them_is_refused_by_name() -> None:
    said = run_world(2, refused)[0]
    words = [
        "optimizer SGD keeps no tensor",
        "optimizer Adafactor keeps 'row_var'",
        "optimizer NAdam keeps mu_product",
        "optimizer ASGD keeps eta, mu",
        "exp_avq",
        "exp_avg of moments must be a positive integer, got 0",
        "'mean'",
        "reset:every=2",
        "needs alpha",
        "privacy",
        "beside aggregator",
        "optimizer is None",
    ]
    for text, word in zip(said, words, strict=True):
        assert word in text, text
