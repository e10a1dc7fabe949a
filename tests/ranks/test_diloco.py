"""DiLoCo and Streaming DiLoCo in training loops (arXiv 2311.08105, 2501.18512), on the text of Python's help."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import xffl
from tests.ranks.test_round import complete, digests, make_state
from tests.worlds import run_world
from xffl.distributed.distributed_state import DistributedState

LAYOUTS = [((2, 2), None), ((2, 1), 1)]
SPAN = 6
"""Bytes that the next one is guessed from."""

LR, MOMENTUM = 0.7, 0.9
EVERY = 5


def net(seed: int = 0) -> nn.Module:
    """A small model of the next byte: six tensors of different sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, 6), nn.Flatten(), nn.Linear(6 * SPAN, 24), nn.Tanh(), nn.Linear(24, 10), nn.Linear(10, 256)
    )


def batch(cell: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give 16 pieces of a topic of the cell's, the same on all of its ranks."""
    text = torch.tensor(list(topics[("lambda", "import", "with")[cell]].encode()))
    starts = torch.randint(len(text) - SPAN, (16,), generator=torch.Generator().manual_seed(number))
    rows = text[starts[:, None] + torch.arange(SPAN + 1)]
    return rows[:, :-1], rows[:, -1]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, cell: int, number: int) -> float:
    inputs, targets = batch(cell, number)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make_model(state: DistributedState, seed: int = 0) -> nn.Module:
    return xffl.shard(net(seed), state, wrap=[nn.Linear])


def names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name.removeprefix("module."), parameter) for name, parameter in model.named_parameters())


def trained(state: DistributedState, steps: int, **options: Any) -> tuple[nn.Module, list[xffl.RoundReport]]:
    """Train with AdamW, and with rounds as the options say."""
    model = make_model(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    reports: list[xffl.RoundReport] = []
    with xffl.FederatedScaling(model, optimizer, state, every=EVERY, on_round=reports.append, **options):
        losses = [step(model, optimizer, state.topology.cell_of(state.rank), number) for number in range(steps)]
    assert losses[-1] < losses[0] - 0.5, "a training that learns nothing shows nothing"
    return model, reports


def without_momentum(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> tuple[float, float]:
    state = make_state(rank, sizes, hsdp)
    plain, _ = trained(state, 22)
    start = make_model(state)
    worst = []
    for momentum in (0.0, MOMENTUM):
        algorithm = {"name": "diloco", "lr": 1.0, "momentum": momentum, "nesterov": momentum > 0}
        model, reports = trained(state, 22, algorithm=algorithm)
        assert len(reports) == 5  # the fifth after two steps
        differences = [
            float((complete(ours) - complete(theirs)).norm() / (complete(theirs) - complete(first)).norm())
            for (_, ours), (_, theirs), (_, first) in zip(names(model), names(plain), names(start), strict=True)
        ]
        worst.append(max(differences))
    return worst[0], worst[1]


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS[1:], ids=str)
def test_diloco_without_momentum_is_averaging(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for without, with_momentum in run_world(sum(sizes), without_momentum, sizes, hsdp):
        assert without <= 1e-6
        assert with_momentum > 1e-2  # else the other says nothing


def in_one_piece(rank: int, world_size: int) -> list[dict[str, str]]:
    """One fragment, no delay: by the hooks, and by merging at once with alpha 0."""
    state = make_state(rank, (2, 2), None)
    bits = [digests(trained(state, 13, algorithm={"name": "diloco", "lr": LR})[0])]
    streaming = {"name": "streaming_diloco", "lr": LR, "fragments": 1, "delay": 0, "alpha": None}
    bits.append(digests(trained(state, 13, algorithm=streaming)[0]))
    model = make_model(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    aggregator = xffl.Aggregator(model, state, server={"name": "diloco", "lr": LR}, fragments=1, overlap=True)
    for number in range(13):
        step(model, optimizer, state.topology.cell_of(rank), number)
        if number in (4, 9, 12):
            aggregator.aggregate_async(alpha=0.0).merge()
    bits.append(digests(model))
    return bits


def test_streaming_in_one_piece_without_delay_is_diloco() -> None:
    for bits in run_world(4, in_one_piece):
        assert bits[1] == bits[0] and bits[2] == bits[0]


class Simulation:
    """Streaming DiLoCo of some cells in one process, as the paper has it: fragments in turn, each with its server."""

    def __init__(self, cells: int, parts: Mapping[str, int], *, every: int, delay: int, alpha: float) -> None:
        self.models = [net() for _ in range(cells)]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in self.models]
        self._parts, self._fragments = parts, max(parts.values()) + 1
        self._agreed = {name: value.detach().double() for name, value in net().named_parameters()}
        self._velocity = {name: torch.zeros_like(value) for name, value in self._agreed.items()}
        self._every, self._delay, self._alpha = every, delay, alpha
        self._rounds = self._since = 0
        self._under_way: int | None = None
        self._fresh = [0] * self._fragments

    @torch.no_grad()
    def _serve(self) -> int:
        """Take the server's step for the next fragment, from the cells' values as they are."""
        fragment = self._rounds % self._fragments
        for name in self._names(fragment):
            mean = torch.stack([model.get_parameter(name).double() for model in self.models]).mean(0)
            gradient = self._agreed[name] - mean
            self._velocity[name] = MOMENTUM * self._velocity[name] + gradient
            self._agreed[name] = self._agreed[name] - LR * (gradient + MOMENTUM * self._velocity[name])
        self._rounds += 1
        self._fresh[fragment] = 0
        return fragment

    @torch.no_grad()
    def _merge(self, fragment: int, alpha: float) -> None:
        for model in self.models:
            for name in self._names(fragment):
                parameter = model.get_parameter(name)
                parameter.copy_(alpha * parameter.double() + (1.0 - alpha) * self._agreed[name])

    def _names(self, fragment: int) -> list[str]:
        return [name for name, part in self._parts.items() if part == fragment]

    def run(self, steps: int) -> None:
        for number in range(steps):
            for cell, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
                step(model, optimizer, cell, number)
            self._since += 1
            self._fresh = [count + 1 for count in self._fresh]
            if self._under_way is not None and self._since == self._delay:
                self._merge(self._under_way, self._alpha)
                self._under_way = None
            if self._since == self._every:
                self._under_way, self._since = self._serve(), 0
        if self._under_way is not None:
            self._merge(self._under_way, self._alpha if self._fresh[self._under_way] else 0.0)
        while any(self._fresh):
            if self._fresh[self._rounds % self._fragments]:
                self._merge(self._serve(), 0.0)
            else:
                self._rounds += 1


def parts_of(state: DistributedState, fragments: int) -> dict[str, int]:
    """Find out which tensors a round of each fragment makes the same in all cells."""
    model = make_model(state)
    with torch.no_grad():
        for _, parameter in names(model):
            parameter.fill_(float(state.topology.cell_of(state.rank)))
    aggregator = xffl.Aggregator(model, state, fragments=fragments)
    found: dict[str, int] = {}
    for _ in range(fragments):
        fragment = aggregator.aggregate().fragment
        for name, parameter in names(model):
            if complete(parameter).reshape(-1)[0].item() not in map(float, range(state.topology.cells)):
                found.setdefault(name, fragment)
    assert set(found.values()) == set(range(fragments)) and len(found) == len(list(names(model)))
    return found


def streamed(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, fragments: int, steps: int
) -> tuple[float, float]:
    state = make_state(rank, sizes, hsdp)
    cell = state.topology.cell_of(rank)
    model = make_model(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    algorithm = {"name": "streaming_diloco", "lr": LR, "fragments": fragments, "delay": 1, "alpha": 0.5}
    with xffl.FederatedScaling(model, optimizer, state, every=3, algorithm=algorithm):
        for number in range(steps):
            step(model, optimizer, cell, number)
    parts = parts_of(state, fragments)
    worst = []
    for alpha in (0.5, 0.4):
        oracle = Simulation(len(sizes), parts, every=3, delay=1, alpha=alpha)
        oracle.run(steps)
        expected = dict(oracle.models[cell].named_parameters())
        worst.append(max(float((complete(value) - expected[name]).abs().max()) for name, value in names(model)))
    return worst[0], worst[1]


@pytest.mark.parametrize(
    "sizes, hsdp, fragments, steps",
    [(*LAYOUTS[1], 1, 9), (*LAYOUTS[1], 1, 10), (*LAYOUTS[1], 2, 15), (*LAYOUTS[0], 3, 16)],
)
def test_streaming_is_the_dense_algorithm(sizes: tuple[int, ...], hsdp: int | None, fragments: int, steps: int) -> None:
    for right, wrong in run_world(sum(sizes), streamed, sizes, hsdp, fragments, steps):
        assert right <= 2e-6
        assert wrong > 1e-4  # with another alpha


def flat(value: Any) -> Any:
    """Make a saved state comparable."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: flat(one) for key, one in value.items()}
    return value


def one_fragment_at_a_time(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    fragments = 3
    state = make_state(rank, sizes, hsdp)
    parts = parts_of(state, fragments)
    model = make_model(state)
    aggregator = xffl.Aggregator(model, state, server="diloco", fragments=fragments)
    noise = torch.Generator().manual_seed(10 + state.topology.cell_of(rank))
    for number in range(2 * fragments):
        with torch.no_grad():
            for _, parameter in names(model):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.add_(torch.randn(local.shape, generator=noise), alpha=0.1)
        before, agreed = digests(model), flat(aggregator.state_dict()["agreed"])
        report = aggregator.aggregate()
        assert report.fragment == number % fragments
        after, then = digests(model), flat(aggregator.state_dict()["agreed"])
        for name, part in parts.items():
            assert (before[name] != after[name]) == (part == report.fragment), name
            if agreed["model"].get(name):  # else this rank holds nothing of it
                assert (agreed["model"][name] != then["model"][name]) == (part == report.fragment), name
        for part in range(fragments):
            changed = agreed["optimizers"][part] != then["optimizers"][part]
            assert changed == (part == report.fragment), f"fragment {part} in a round of {report.fragment}"


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_a_fragments_server_step_leaves_the_others_alone(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), one_fragment_at_a_time, sizes, hsdp)


def resumed(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, fragments: int) -> list[bool]:
    """Stop after a round, and in the middle of two; go on with everything made anew, from what was saved."""
    state = make_state(rank, sizes, hsdp)
    cell, steps = state.topology.cell_of(rank), 17
    server = {"name": "diloco", "lr": LR, "schedule": "ExponentialLR:gamma=0.8"}
    options = {"server": server, "fragments": fragments}
    saved: dict[int, Any] = {}

    def run(source: int | None, forgets: bool = False) -> dict[str, str]:
        model = make_model(state, seed=0 if source is None else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        with xffl.FederatedScaling(model, optimizer, state, every=EVERY, aggregator=options) as scaling:
            if source is not None:  # in the block: cells that differ between two rounds are nothing to begin with
                model.load_state_dict(saved[source]["model"])
                optimizer.load_state_dict(copy.deepcopy(saved[source]["optimizer"]))
                kept = copy.deepcopy(saved[source]["rounds"])
                for one in kept["aggregator"]["agreed"]["optimizers"].values() if forgets else ():
                    for value in one["elements"]["momentum"].values():
                        value.zero_()
                scaling.load_state_dict(kept)
            for number in range(source or 0, steps):
                step(model, optimizer, cell, number)
                if source is None and number + 1 in (10, 12):
                    saved[number + 1] = copy.deepcopy(
                        {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "rounds": scaling.state_dict(),
                        }
                    )
        return digests(model)

    whole = run(None)
    return [run(10) == whole, run(12) == whole, run(10, forgets=True) == whole]


@pytest.mark.parametrize("sizes, hsdp, fragments", [(*LAYOUTS[0], 2), (*LAYOUTS[1], 1)])
def test_resuming_is_never_having_stopped(sizes: tuple[int, ...], hsdp: int | None, fragments: int) -> None:
    # The last one has lost the server's momentum.
    assert run_world(sum(sizes), resumed, sizes, hsdp, fragments) == [[True, True, False]] * sum(sizes)


def scheduled(rank: int, world_size: int) -> float:
    """The server's learning rate falls from round to round, and the inner one does not; its state is on the CPU."""
    state = make_state(rank, (2, 2), None)
    cell = state.topology.cell_of(rank)
    model = make_model(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    server = {"name": "diloco", "lr": LR, "schedule": "StepLR:step_size=2,gamma=0.5", "device": "cpu"}
    algorithm = {"name": "diloco", "server": server}
    agreed = {name: complete(parameter).double().clone() for name, parameter in names(model)}
    velocity = {name: torch.zeros_like(value) for name, value in agreed.items()}
    worst, taken = 0.0, 0

    def expect(report: xffl.RoundReport) -> None:
        nonlocal worst, taken
        for name, parameter in names(model):
            gradient = agreed[name] - means[name]
            velocity[name] = MOMENTUM * velocity[name] + gradient
            agreed[name] -= LR * 0.5 ** (taken // 2) * (gradient + MOMENTUM * velocity[name])
            worst = max(worst, float((complete(parameter) - agreed[name]).abs().max()))
        taken += 1

    with xffl.FederatedScaling(model, optimizer, state, every=1, algorithm=algorithm, on_round=expect) as scaling:
        means: dict[str, torch.Tensor] = {}

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            """Before the round of a step: work out what plain SGD makes of both cells, and their mean."""
            for name, parameter in names(model):
                assert parameter.grad is not None
                value = complete(parameter) - 0.3 * complete(parameter.grad)
                dist.all_reduce(value)
                means[name] = value.double() / world_size

        with optimizer.register_step_pre_hook(note):
            for number in range(6):
                step(model, optimizer, cell, number)
        kept = scaling.aggregator.state_dict()["agreed"]["optimizers"][0]
        assert kept["step"] == 6
        assert {value.device.type for value in kept["elements"]["momentum"].values()} == {"cpu"}
    assert optimizer.param_groups[0]["lr"] == 0.3 and taken == 6
    return worst


def test_the_server_has_a_schedule_of_its_own() -> None:
    assert max(run_world(4, scheduled)) <= 2e-6
