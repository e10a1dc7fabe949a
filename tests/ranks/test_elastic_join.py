"""When a cell of an elastic federation joins the others: on entering the block, or at its first local step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import journal, lighthouse, of_all, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.worlds import be_launched, run_world
from xffl.aggregation import LoopHooks
from xffl.aggregation.algorithms.every_steps import EverySteps
from xffl.distributed import ElasticParameters


class Counter(nn.Module):
    """A model that a loop never calls: its value counts the steps that are in it."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), start))


@dataclass
class Block:
    """What a cell has seen in a block: its value, and how many steps were counted, on entering and after each step."""

    values: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    weights: list[tuple[float, ...]] = field(default_factory=list)


def train(state: Any, start: float, steps: int, saved: Any = None, **keywords: Any) -> tuple[Block, Any]:
    """Make steps in a block of their own; what was seen, and what there was to save after the last one."""
    model = Counter(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    block = Block()
    scaling = xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=2,
        on_round=lambda report: block.weights.append(report.weights),
        **keywords,
    )

    def note() -> None:
        block.values.append(model.value.item())
        block.counted.append(scaling.local_steps)

    with scaling:
        if saved is not None:
            model.load_state_dict(saved[0])
            scaling.load_state_dict(saved[1])
        note()
        for _ in range(steps):
            optimizer.zero_grad()
            (-model.value.sum()).backward()
            optimizer.step()
            for group in optimizer.state.values():
                group["momentum_buffer"].zero_()
            note()
        kept = {name: value.clone() for name, value in model.state_dict().items()}, scaling.state_dict()
    return block, kept


def come_three_times(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[Block]:
    """Be a cell in three blocks: with its own start, with a checkpoint, and with a start again."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        first, saved = train(state, 10.0 * (1 + rank), 4)
        second, _ = train(state, 70.0, 2, saved)
        third, _ = train(state, 100.0 * (1 + rank), 2 + rank)
    return [first, second, third]


def test_a_cell_joins_on_entering_unless_it_may_load_a_checkpoint(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, come_three_times, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    for first, second, third in told:
        assert first.values == [10.0, 11.0, 12.0, 13.0, 14.0]  # of the lowest cell, before any step
        assert first.counted == [0, 1, 2, 3, 4]
        assert second.values == [14.0, 15.0, 16.0]  # both hold the newest model: nothing is replaced
        assert second.counted == [0, 1, 2]
        assert first.weights == [(1.0, 1.0)] * 2
        assert second.weights == third.weights == [(1.0, 1.0)]
    # Neither has loaded anything: the run begins anew from the model of cell 0, at the first step of both. That of
    # cell 1 had the gradients of the model that is replaced.
    assert told[0][2].values == [100.0, 101.0, 102.0]
    assert told[1][2].values == [200.0, 100.0, 101.0, 102.0]
    assert told[1][2].counted == [0, 0, 1, 2]


def join_by_itself(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[float]:
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = Counter(1.0 + rank)
        scaling = xffl.FederatedScaling(model, None, state, every=2, hooks=LoopHooks(defers_join=lambda: True))
        values = []
        with scaling:
            values.append(model.value.item())
            if rank == 0:
                assert not scaling.join()
            with torch.no_grad():
                model.value.add_(4.0)
            scaling.step()  # joins first, if the loop has not
            values.append(model.value.item())
            assert scaling.local_steps == 1 - rank
    return values


def test_a_loop_may_join_by_itself(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, join_by_itself, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    assert told == [[1.0, 5.0], [2.0, 1.0]]


def save_while_joining(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[dict[str, Any]]:
    """Load what was saved some steps after a delayed round began; return what is saved in the round of joining."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = Counter(0.0)
        saved: list[dict[str, Any]] = []

        def save(report: xffl.RoundReport) -> None:
            saved.append(scaling.state_dict())

        with xffl.FederatedScaling(model, None, state, every=3, delay=1, on_round=save) as scaling:
            for _ in range(5):
                with torch.no_grad():
                    model.value.add_(1.0)
                scaling.step()
            scaling.load_state_dict(scaling.state_dict())
            saved.clear()
            scaling.join()
            return saved
    raise AssertionError("the block has returned")


def test_what_is_saved_in_the_round_of_joining_counts_steps_from_there(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, save_while_joining, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    assert [[(state["since"], state["target"]) for state in saved] for saved in told] == [[(0, 3)]] * 2


class Longer(EverySteps):
    """One step more before each round than before the last one."""

    def steps(self, rounds: int, cell: int, report: xffl.RoundReport | None) -> int:
        return self.every + rounds


def save_while_catching_up(rank: int, world: int, url: str, ports: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Fall behind in cell 1 before a delayed round starts; return by round what is saved of the steps."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        model = Counter(0.0)
        saved: dict[int, tuple[int, int]] = {}

        def save(report: xffl.RoundReport) -> None:
            steps = scaling.state_dict()
            saved[report.round] = (steps["since"], steps["target"])

        with xffl.FederatedScaling(model, None, state, every=Longer(3), delay=1, on_round=save) as scaling:
            before = scaling.aggregator.state_dict()
            for _ in range(4 + 5):
                with torch.no_grad():
                    model.value.add_(1.0)
                scaling.step()
                if rank == 1 and scaling.aggregator.rounds == 2 and scaling.local_steps < 9:
                    scaling.aggregator.load_state_dict(before)
            saved[0] = (scaling.steps_left, 0)
        return saved
    raise AssertionError("the block has returned")


def test_a_cell_that_takes_over_in_place_of_a_delayed_round_counts_steps_from_there(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, save_while_catching_up, lighthouse, (free_port(), free_port()), init=False, timeout_s=60)
    assert told == [{0: (6, 0), 2: (1, 5), 3: (0, 6)}] * 2


def fail_to_join(rank: int, world: int, url: str, ports: tuple[int, ...]) -> None:
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    elastic = xffl.distributed.ElasticParameters(lighthouse=url, meeting_timeout_s=1.0)
    with xffl.session(cell=0, cells=3, elastic=elastic, timeout_s=60) as state:
        model = Counter(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=1)
        with pytest.raises(xffl.RoundError, match="found no cells for a round"):
            scaling.__enter__()
        model.value.sum().backward()
        optimizer.step()  # which counts for nobody
        assert scaling.local_steps == 0


def test_a_cell_that_cannot_join_has_not_entered_the_block(lighthouse: str) -> None:  # noqa: F811
    run_world(1, fail_to_join, lighthouse, (free_port(),), init=False, timeout_s=60)


class Pair(nn.Module):
    """Two values, each with an optimizer of its own."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((1,), start))
        self.second = nn.Parameter(torch.full((1,), start))


def step_scaled(model: Pair, first: Optimizer, second: Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(-model.first.sum() - model.second.sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    first.zero_grad()
    second.zero_grad()


def step_by_closure(model: Pair, first: Optimizer, second: Optimizer, scaler: torch.amp.GradScaler) -> None:
    def compute() -> torch.Tensor:
        first.zero_grad()
        second.zero_grad()
        loss = -model.first.sum() - model.second.sum()
        loss.backward()
        return loss

    first.step(compute)  # type: ignore[arg-type]
    second.step()


def step_in_turn(model: Pair, first: Optimizer, second: Optimizer, scaler: torch.amp.GradScaler) -> None:
    for optimizer, value in ((first, model.first), (second, model.second)):
        optimizer.zero_grad()
        (-value.sum()).backward()
        optimizer.step()


STEPS = {"scaler": step_scaled, "closure": step_by_closure, "in turn": step_in_turn}


def train_pair(state: Any, start: float, steps: int, how: str) -> list[tuple[float, float, int]]:
    """Make steps of two optimizers in a block; both values, and the steps counted, on entering and after each step."""
    model = Pair(start)
    first = torch.optim.SGD([model.first], lr=1.0)
    second = torch.optim.SGD([model.second], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    with xffl.FederatedScaling(model, [first, second], state, every=2) as scaling:
        seen.append((model.first.item(), model.second.item(), scaling.local_steps))
        for _ in range(steps):
            STEPS[how](model, first, second, scaler)
            seen.append((model.first.item(), model.second.item(), scaling.local_steps))
    return seen


def join_with_two_optimizers(
    rank: int, world: int, url: str, ports: tuple[int, ...], how: str
) -> list[tuple[float, float, int]]:
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        train_pair(state, 1.0, 2, how)
        return train_pair(state, 100.0 * (1 + rank), 2, how)


@pytest.mark.parametrize("how", STEPS)
def test_steps_with_gradients_of_the_model_before_change_nothing_and_others_count(lighthouse: str, how: str) -> None:  # noqa: F811
    """Each optimizer's first step, also where somebody looks at the gradients before it; but not with a closure."""
    told = run_world(2, join_with_two_optimizers, lighthouse, (free_port(), free_port()), how, init=False, timeout_s=60)
    assert [counted for _, _, counted in told[0]] == [0, 1, 2]
    start, joined, *_ = told[1]
    assert start == (200.0, 200.0, 0)
    assert joined == ((101.0, 101.0, 1) if how == "closure" else (100.0, 100.0, 0))


def count_samples(
    rank: int, world: int, url: str, ports: tuple[int, ...], folder: str
) -> tuple[list[tuple[float, ...]], int]:
    """Be one of two cells, of which the second leaves after its first round of steps, and comes back with its model."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    back = Path(folder) / "back"
    counted: list[float] = []

    def weigh() -> float:
        count = sum(counted)
        counted.clear()
        return count

    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        weights: list[tuple[float, ...]] = []
        model = Counter(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def make() -> xffl.FederatedScaling:
            return xffl.FederatedScaling(
                model, optimizer, state, every=2, weight=weigh, on_round=lambda report: weights.append(report.weights)
            )

        def step() -> None:
            optimizer.zero_grad()
            (-model.value.sum()).backward()
            counted.append(1.0)
            optimizer.step()

        scaling = make()
        saved: Any = None
        try:
            with scaling:
                for _ in range(2):
                    step()
                if rank == 1:
                    saved = scaling.state_dict()
                    raise InterruptedError
                while not back.exists():
                    time.sleep(0.05)
                time.sleep(1.0)  # the other cell asks for the round first
                for _ in range(4):
                    step()
        except InterruptedError:
            scaling = make()
            with scaling:
                scaling.load_state_dict(saved)
                back.touch()
                for _ in range(3):
                    step()
        return weights, scaling.local_steps


def test_samples_of_a_step_that_does_not_count_are_not_counted(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    first, second = run_world(
        2, count_samples, lighthouse, (free_port(), free_port()), str(tmp_path), init=False, timeout_s=60
    )
    assert first == ([(2.0, 2.0), (2.0, 0.0), (2.0, 2.0)], 6)
    assert second == ([(2.0, 2.0), (2.0, 2.0)], 2)


class Partly(nn.Module):
    """A model with tensors that no round moves."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.alike = nn.Parameter(torch.ones(4), requires_grad=False)
        self.trained = nn.Linear(5, 2)
        self.own = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mask", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.randint(0, 1000, (2,)), persistent=False)
        for number in range(6):
            self.register_buffer(f"mean_{number}", torch.randn(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.trained(self.frozen(inputs * self.mask))
        return values


def train_partly(
    rank: int, world: int, url: str, ports: tuple[int, ...], folder: str, options: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """Be a rank of one of three cells, of which the first two begin, and the last one comes after some rounds.

    Return what it held when it had joined, and at the end.
    """
    cell = max(rank - 1, 0)
    be_launched(rank if rank < 2 else 0, 2 if cell == 0 else 1, ports[cell])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    late = Path(folder) / "late"
    while cell == 2 and not late.exists():
        time.sleep(0.05)
    with xffl.session(cell=cell, cells=3, elastic=url, timeout_s=60) as state:
        torch.manual_seed(cell)
        model = xffl.shard(Partly(), state)
        own = whole(model.own)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)

        def values() -> dict[str, torch.Tensor]:
            return {name: whole(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}

        with xffl.FederatedScaling(
            model, optimizer, state, every=1, aggregator={"policies": {"own": "local"}, **options}
        ) as scaling:
            joined = values()
            while scaling.aggregator.rounds < 20:
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.1)
                if scaling.aggregator.rounds == 3:
                    late.touch()
        assert whole(model.own).equal(own)
        return [joined, values()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@pytest.mark.parametrize("options", [{}, {"fragments": 3}], ids=["plain", "fragments"])
def test_cells_take_over_what_no_round_moves(lighthouse: str, tmp_path: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """At the beginning, and a cell that comes late, of another number of ranks; with fragments, also their buffers."""
    ports = tuple(free_port() for _ in range(3))
    told = run_world(4, train_partly, lighthouse, ports, str(tmp_path), options, init=False, timeout_s=90)
    # What training does not change is the same in all cells, from the moment on at which each of them has joined.
    fixed = {name: value for name, value in told[0][0].items() if "trained" not in name and "own" not in name}
    assert len(fixed) == 11
    for name, value in fixed.items():
        for joined, ended in told:
            assert joined[name].equal(value), name
            assert ended[name].equal(value), name
    assert not told[0][0]["own"].equal(told[2][0]["own"])


def come_with_moments(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> dict[int, list[Any]]:
    """Train a cell of two shards, and one of a single rank that comes late; by round all that the optimizer keeps."""
    cell = rank // 2
    while cell and not (Path(folder) / "late").exists():
        time.sleep(0.01)
    be_launched(rank % 2, 2 - cell, ports[cell])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    seen: dict[int, list[Any]] = {}
    with xffl.session(cell=cell, cells=2, elastic=ElasticParameters(lighthouse=url), timeout_s=60) as state:
        torch.manual_seed(0)
        model = xffl.shard(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)), state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def note() -> None:
            values = [one for parameter in model.parameters() for one in optimizer.state[parameter].values()]
            whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in values]
            seen[scaling.aggregator.rounds] = [one.tolist() for one in whole]

        def on_round(report: xffl.RoundReport) -> None:
            note()
            if report.round == 3:
                (Path(folder) / "late").touch()

        moments = "average:every=1000"
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, on_round=on_round, moments=moments)
        with scaling:
            note()
            while (len(seen) < 4 if cell else scaling.local_steps < 10_000) and not (Path(folder) / "end").exists():
                model(torch.randn(4, 5)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)
            (Path(folder) / "end").touch()
    return seen


def test_a_late_cell_takes_the_moments_over_with_the_model(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    ports = (free_port(), free_port())
    told = run_world(3, come_with_moments, lighthouse, ports, str(tmp_path), init=False, timeout_s=100)
    first = min(told[2])
    assert first > 3 and told[2][first][0] == 2.0 * (first - 1)  # steps of the other cell, which founded the run alone
    assert told[0][first] == told[1][first] == told[2][first]
    assert told[0][first + 1] != told[2][first + 1]  # they have gone on by themselves
