"""Server optimizers against dense implementations written here, and against those of the ``flwr`` package."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from xffl.aggregation.algorithms import server_rules
from xffl.aggregation.algorithms.combiners import Mean
from xffl.aggregation.algorithms.server_optimizer import (
    SavedServer,
    ServerOptimizer,
    read_saved_server,
    server_of,
    take_step,
)
from xffl.aggregation.algorithms.server_rules import Adaptive
from xffl.aggregation.options import Options
from xffl.errors import CheckpointError, ConfigError
from xffl.naming import Writer
from xffl.reading import Fields

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 10
SIZES = (7, 12)
WEIGHTS = (3.0, 1.0, 2.0)
Arrays = list[np.ndarray]


# Rounds ---------------------------------------------------------------------------------------------------------------


def starting_weights() -> Arrays:
    draws = np.random.default_rng(0)
    return [draws.normal(size=size) for size in SIZES]


def updates() -> Iterator[list[Arrays]]:
    """Yield for each round what each cell adds to the global weights; some coordinates never move."""
    draws = np.random.default_rng(1)
    for _ in range(ROUNDS):
        yield [[draws.normal(size=size) * (np.arange(size) % 5 > 0) for size in SIZES] for _ in WEIGHTS]


def weighted_mean(cells: Sequence[Arrays]) -> Arrays:
    return [np.average(np.stack(of_cells), axis=0, weights=WEIGHTS) for of_cells in zip(*cells, strict=True)]


def run_torch(server: ServerOptimizer, dtype: torch.dtype = torch.float64) -> list[Arrays]:
    """Return the global weights after each round, with the server optimizer."""
    tensors = [torch.tensor(array, dtype=dtype) for array in starting_weights()]
    states = [server.rule.init(tensor) for tensor in tensors]
    found = []
    for number, steps in enumerate(updates()):
        before = [tensor.double().numpy() for tensor in tensors]
        mean = weighted_mean([[old + move for old, move in zip(before, cell, strict=True)] for cell in steps])
        for tensor, new, state in zip(tensors, mean, states, strict=True):
            take_step(server.rule, tensor, torch.tensor(new, dtype=dtype), state, server.numbers(number))
        found.append([tensor.double().numpy().copy() for tensor in tensors])
    return found


def run_numpy(step: Callable[[int, np.ndarray, np.ndarray, dict[str, Any]], np.ndarray]) -> list[Arrays]:
    """Return the global weights after each round, by ``step(round, weights, delta, memory)``; rounds count from 1."""
    weights = starting_weights()
    memories: list[dict[str, Any]] = [{} for _ in weights]
    found = []
    for number, steps in enumerate(updates(), start=1):
        mean = weighted_mean([[old + move for old, move in zip(weights, cell, strict=True)] for cell in steps])
        weights = [
            step(number, old, new - old, memory) for old, new, memory in zip(weights, mean, memories, strict=True)
        ]
        found.append(weights)
    return found


def assert_same(got: list[Arrays], wanted: list[Arrays]) -> None:
    assert len(got) == len(wanted) == ROUNDS
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-12)


# The papers' formulas -------------------------------------------------------------------------------------------------


def momentum(lr: float, beta: float, *, is_nesterov: bool = False) -> Callable[..., np.ndarray]:
    def step(number: int, weights: np.ndarray, delta: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
        memory["v"] = beta * memory.get("v", 0.0) + delta
        return weights + lr * (delta + beta * memory["v"] if is_nesterov else memory["v"])

    return step


def adaptive(
    rule: str, *, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Callable[..., np.ndarray]:
    """Algorithm 2 of Reddi et al., 2021, with ``v`` from ``tau^2``."""

    def step(number: int, weights: np.ndarray, delta: np.ndarray, memory: dict[str, Any]) -> np.ndarray:
        m = beta1 * memory.get("m", 0.0) + (1 - beta1) * delta
        v = memory.get("v", np.full_like(delta, tau**2))
        square = delta**2
        if rule == "adagrad":
            v = v + square
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * square
        else:
            v = v - (1 - beta2) * square * np.sign(v - square)
        memory.update(m=m, v=v)
        return weights + lr * m / (np.sqrt(v) + tau)

    return step


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        ("sgd", momentum(1.0, 0.0)),
        ("sgd:lr=0.3", momentum(0.3, 0.0)),
        ("fedavgm", momentum(1.0, 0.9)),
        ("fedavgm:momentum=0.5", momentum(1.0, 0.5)),
        ("diloco", momentum(0.7, 0.9, is_nesterov=True)),
        ("fedadagrad", adaptive("adagrad", beta1=0.0)),
        ("fedadam", adaptive("adam")),
        ("fedyogi", adaptive("yogi")),
        ("fedyogi:lr=0.03,betas=(0.8,0.95),tau=0.1", adaptive("yogi", lr=0.03, beta1=0.8, beta2=0.95, tau=0.1)),
    ],
)
def test_ten_rounds_equal_the_paper(spec: str, formula: Callable[..., np.ndarray]) -> None:
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    assert_same(run_torch(server), run_numpy(formula))


def test_lr_1_without_momentum_is_the_mean() -> None:
    server = server_of("diloco:lr=1.0,momentum=0.0,nesterov=false", writer=Writer.USER)
    assert server is not None
    assert_same(run_torch(server), run_numpy(lambda number, weights, delta, memory: weights + delta))


def test_a_schedule_takes_one_step_for_each_round() -> None:
    server = server_of({"name": "sgd", "schedule": "StepLR:step_size=3,gamma=0.5"}, writer=Writer.USER)
    assert server is not None
    assert_same(run_torch(server), run_numpy(lambda n, weights, delta, memory: weights + 0.5 ** ((n - 1) // 3) * delta))


# flwr -----------------------------------------------------------------------------------------------------------------


def run_flwr(name: str, first_round: int = 1, **options: Any) -> list[Arrays]:
    """Return the global weights after each round, by a strategy of flwr."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    common = pytest.importorskip("flwr.common")
    strategies = pytest.importorskip("flwr.server.strategy")
    weights = starting_weights()
    strategy = getattr(strategies, name)(initial_parameters=common.ndarrays_to_parameters(weights), **options)
    found = []
    for number, steps in enumerate(updates(), start=first_round):
        results = []
        for cell, weight in zip(steps, WEIGHTS, strict=True):
            parameters = common.ndarrays_to_parameters([old + move for old, move in zip(weights, cell, strict=True)])
            status = common.Status(common.Code.OK, "")
            results.append((None, common.FitRes(status, parameters, int(weight), {})))
        parameters, _ = strategy.aggregate_fit(number, results, [])
        weights = common.parameters_to_ndarrays(parameters)
        found.append(weights)
    return found


FLWR = {"eta": 0.1, "tau": 1e-3}


@pytest.mark.parametrize(
    ("spec", "strategy", "options"),
    [
        ("fedavgm", "FedAvgM", {"server_learning_rate": 1.0, "server_momentum": 0.9}),
        ("fedavgm:lr=0.5,momentum=0.7", "FedAvgM", {"server_learning_rate": 0.5, "server_momentum": 0.7}),
        ("fedadagrad:initial=0.0", "FedAdagrad", FLWR),
        ("fedyogi:initial=0.0", "FedYogi", {**FLWR, "beta_1": 0.9, "beta_2": 0.99}),
    ],
)
def test_ten_rounds_equal_flwr(spec: str, strategy: str, options: dict[str, Any]) -> None:
    wanted = run_flwr(strategy, **options)
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    assert_same(run_torch(server), wanted)


def test_fedadam_equals_flwr_where_it_counts_rounds_as_kingma_and_ba_do() -> None:
    wanted = run_flwr("FedAdam", first_round=0, beta_1=0.9, beta_2=0.99, **FLWR)
    server = server_of("fedadam:initial=0.0,is_bias_corrected=true", writer=Writer.USER)
    assert server is not None
    assert_same(run_torch(server), wanted)


def test_fedadam_equals_flwr_by_a_schedule_with_its_correction() -> None:
    """Its correction is a learning rate that depends on the round; flwr takes the first for the second."""
    wanted = run_flwr("FedAdam", beta_1=0.9, beta_2=0.99, **FLWR)

    def corrected(taken: int) -> float:
        return math.sqrt(1 - 0.99 ** (taken + 2)) / (1 - 0.9 ** (taken + 2))

    assert_same(run_torch(ServerOptimizer(Adaptive(initial=0.0), corrected)), wanted)


@pytest.mark.parametrize(("spec", "strategy"), [("fedadam", "FedAdam"), ("fedyogi", "FedYogi")])
def test_the_paper_is_not_flwr(spec: str, strategy: str) -> None:
    """What the docstring of Adaptive says of flwr is so, or it has come closer to the paper."""
    wanted = run_flwr(strategy, beta_1=0.9, beta_2=0.99, **FLWR)
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    assert not np.allclose(run_torch(server)[0][0], wanted[0][0], rtol=1e-6)


# What is asked for, and what is refused -------------------------------------------------------------------------------


class Sign:
    """Somebody's own rule: one step of ``lr`` in the direction of the sign."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def numbers(self, step: int) -> dict[str, float]:
        return {"lr": self.lr}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> None:
        values.sub_(self.direction(pseudo_gradient).mul_(numbers["lr"]))

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class Normed(Sign):
    """One that cannot step pieces: it divides by the norm."""

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class Noisy(Sign):
    """One that would take the replicas of a shard apart."""

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Counting(Sign):
    """One that counts its steps beside its state; it is called once for each piece."""

    calls = 0

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient / self.calls


class Narrow(Sign):
    """One whose state is not like the values."""

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": torch.zeros(1)}


class Many(Sign):
    """One with more numbers than a vote has room for."""

    def numbers(self, step: int) -> dict[str, float]:
        return {str(place): 0.0 for place in range(9)}


class Nameless(Sign):
    """One whose learning rate no schedule finds."""

    def numbers(self, step: int) -> dict[str, float]:
        return {"rate": self.lr}


def made_by_function(lr: float) -> Sign:
    return Sign(lr)


def falling(step: int, pace: float = 1.0) -> float:
    return 1.0 / (1.0 + pace * step)


@pytest.mark.parametrize("spec", [None, "none", "fedavg", {"name": "fedavg"}])
def test_the_plain_mean_needs_no_optimizer(spec: object) -> None:
    assert server_of(spec, writer=Writer.USER) is None


STEPPED = ("SGD", "Adam", "AdamW", "Adagrad")


@pytest.mark.parametrize("name", STEPPED)
def test_rules_by_torchs_names_and_paths(name: str) -> None:
    found = [server_of(f"{prefix}{name}:lr=0.25", writer=Writer.USER) for prefix in ("", "torch.optim.")]
    for server in found:
        assert server is not None and server.rule == getattr(server_rules, name)(lr=0.25)
    assert len({str(server) for server in found}) == 1


def names_of(module: Any, base: type) -> list[str]:
    kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base)}
    return [name for name, kind in kinds.items() if kind is not base and not name.startswith("_")]


@pytest.mark.parametrize("home", ["", "torch.optim."])
def test_every_optimizer_of_torch_is_taken_or_refused_by_name(home: str) -> None:
    for name in sorted({*names_of(torch.optim, torch.optim.Optimizer)} - {*STEPPED}):
        told = f"server '{home}{name}' of torch is not supported: choose one of sgd, .* as a ServerRule of your own"
        with pytest.raises(ConfigError, match=told):
            server_of(f"{home}{name}", writer=Writer.USER)


@pytest.mark.parametrize("home", ["", "torch.optim.lr_scheduler."])
def test_every_schedule_of_torch_is_taken_or_refused_by_name(home: str) -> None:
    taken = {"ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LinearLR"}
    taken |= {"MultiStepLR", "PolynomialLR", "StepLR"}
    names = names_of(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert taken < {*names}
    for name in sorted({*names} - taken):
        told = f"server schedule '{home}{name}' of torch is not supported: .*function of the step that returns"
        with pytest.raises(ConfigError, match=told):
            server_of({"name": "sgd", "schedule": f"{home}{name}"}, writer=Writer.USER)


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}.Sign:lr=0.5",
        {"name": f"{__name__}.Sign", "lr": 0.5},
        f"{__name__}.made_by_function:lr=0.5",
        Sign(lr=0.5),
        ServerOptimizer(Sign(0.5)),
    ],
)
def test_ones_own_rule(spec: object) -> None:
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    values = torch.zeros(2)
    server.rule.step(values, torch.tensor([1.0, -1.0]), {}, server.numbers(0))
    assert values.tolist() == [-0.5, 0.5]
    assert server_of(server, writer=Writer.USER) is server
    assert str(server) == f"{__name__}.Sign(lr=0.5)"


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (falling, [0.5, 0.25]),
        (f"{__name__}.falling", [0.5, 0.25]),
        (f"{__name__}.falling:pace=3", [0.5, 0.125]),
        ("torch.optim.lr_scheduler.ExponentialLR:gamma=0.5", [0.5, 0.25]),
        ("exponential:gamma=0.1", [0.5, 0.05]),
        ({"name": "warmup", "steps": 2, "then": falling}, [0.25, 0.5, 0.5, 0.25]),
    ],
)
def test_schedules_are_functions_of_the_step(schedule: object, rates: list[float]) -> None:
    server = server_of({"name": f"{__name__}.Sign", "lr": 0.5, "schedule": schedule}, writer=Writer.USER)
    assert server is not None
    assert [server.numbers(step)["lr"] for step in range(len(rates))] == rates


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (f"{__name__}.Normed", "cannot step flat pieces"),
        (f"{__name__}.Noisy", "cannot step flat pieces"),
        (
            f"{__name__}.Counting:lr=0.5",
            "Counting changes its attribute calls in its steps, .* without counts of its own",
        ),
        (f"{__name__}.Narrow", r"state 'sum' of server .*Narrow must be like the values, which are \(7,\) of"),
        (f"{__name__}.Many", r"numbers\(\) of .*Many must be a dict of at most 8"),
        ({"name": f"{__name__}.Nameless", "schedule": falling}, "changes the number lr, and .*Nameless has rate;"),
        (f"{__name__}.made_by_function", "lr"),
        ("fedadm", "choose one of sgd, fedavgm, fedadagrad, fedadam, fedyogi, adam, adamw, adagrad, diloco, SGD"),
        ("fedadam:mu=1", "no option mu; there are: lr, betas, tau"),
        ("fedadam:rule=yogi", "'fedadam' has the rule adam, got the option rule=yogi; leave rule out"),
        ({"name": "fedyogi", "rule": "yogi"}, "'fedyogi' has the rule yogi"),
        ("fedadam:lr=fast", "lr='fast'"),
        ("fedadam:lr", "write name:option=value"),
        ("fedadam:betas=(0.9,x)", "not a list of values"),
        ("AdamW:lr=-1", "lr must be a number >= 0, got -1.0"),
        ("AdamW:fused=true", "server 'AdamW' has no option fused; there are: lr, betas, eps, weight_decay, amsgrad"),
        ("SGD:maximize=true", "server 'SGD' has no option maximize"),
        ("none:lr=1", "no options such as lr"),
        ("torch.optim.Nope", "'torch.optim.Nope' of torch is not supported: choose one of sgd"),
        ("RMSprop:lr=0.1", "'RMSprop' of torch is not supported: .* as a ServerRule of your own"),
        (torch.optim.AdamW, "server torch.optim.adamw.AdamW is an optimizer of torch, .*, such as 'adamw:lr=0.01'"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "server torch.optim.sgd.SGD is an optimizer of torch"),
        ("builtins.len", "must be a class, or a function that returns an object, of .*server_rules.ServerRule"),
        ({"lr": 0.1}, "has no name"),
        ({"name": "sgd", "device": "nowhere"}, "device 'nowhere'"),
        (
            {"name": "sgd", "schedule": "StepLR"},
            "needs the option step_size; it takes step_size: int, gamma: float = 0.1",
        ),
        ({"name": "sgd", "schedule": "StepLR:step_size=0"}, "step_size must be a positive integer, got 0"),
        ({"name": "sgd", "schedule": "Steps"}, "choose one of constant, cosine, .*, warmup, step, ConstantLR"),
        ({"name": "sgd", "schedule": "ReduceLROnPlateau"}, "give a function of the step that returns the factor"),
        ({"name": "sgd", "schedule": lambda optimizer: optimizer.lr}, "fails at step 0: AttributeError: .*; give a fu"),
        ({"name": "sgd", "schedule": lambda step: None}, "returns at step 0 must be a number >= 0, got None"),
        ({"name": "sgd", "schedule": lambda step: -step}, "returns at step 1 must be a number >= 0, got -1"),
        ({"name": "sgd", "schedule": CosineAnnealingLR}, "CosineAnnealingLR is a .* give schedule='cosine:T_max=100'"),
        ({"name": "sgd", "schedule": partial(StepLR, step_size=2)}, "StepLR is a .* give schedule='cosine:T_max=100'"),
        ({"name": "sgd", "schedule": CosineAnnealingLR(SGD([torch.zeros(1)], lr=0.1), 3)}, "give schedule='cosine:T_"),
        ({"name": "sgd", "schedule": 3}, "the server's schedule must be .* got 3"),
        (
            lambda tensors: tensors,
            "server .*lambda>: a server is no factory of an optimizer; give a name such as 'sgd:lr=0.7', or",
        ),
        (
            partial(Sign, 0.1),
            "a server is no factory of an optimizer; give a name such as 'sgd:lr=0.7', or an object of",
        ),
        (Sign, r"server .*Sign is a class; give an object of it: write Sign\(\)$"),
        (3, "server must be .* got 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        server_of(spec, writer=Writer.USER)


class Rebinding(Sign):
    """A rule whose step ends with a tensor that nobody sees."""

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> None:
        values = values - pseudo_gradient  # the mistake


class Slotted:
    """A rule whose one attribute is in a slot."""

    __slots__ = ("calls",)

    def __init__(self, calls: int | None = None) -> None:
        self.calls = calls

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def numbers(self, step: int) -> dict[str, float]:
        return {"lr": 0.5}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> None:
        if self.calls is not None:
            self.calls += 1
        values.sub_(pseudo_gradient.mul_(numbers["lr"]))


def test_a_rule_that_steps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Rebinding leaves values as they are, .*; write into values in place: val"):
        ServerOptimizer(Rebinding())
    ServerOptimizer(Rebinding(0.0))  # which asks for no step


def test_slots_are_options_like_other_attributes() -> None:
    with pytest.raises(ConfigError, match="Slotted changes its attribute calls in its steps"):
        ServerOptimizer(Slotted(0))
    assert ServerOptimizer(Slotted()).asked["calls"] == "None"


def test_an_object_has_clip_and_a_schedule_by_name_from_the_server_optimizer() -> None:
    made = ServerOptimizer(Sign(0.5), schedule="linear:start_factor=0.5,total_iters=2", clip=2.0)
    named = server_of(
        {"name": f"{__name__}.Sign", "lr": 0.5, "schedule": "linear:start_factor=0.5,total_iters=2", "clip": 2.0},
        writer=Writer.USER,
    )
    assert named is not None and str(made) == str(named) and "clip=2.0" in str(made)
    assert [made.numbers(step)["lr"] for step in range(3)] == [0.25, 0.375, 0.5]


class Kept(Sign):
    """One with a state, whose step does what it is told to with it."""

    def __init__(self, does: Callable[[Any, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.does = does

    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"m": torch.zeros_like(values)}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> Any:
        return self.does(self, values, state)


class NoNumbers:
    def init(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: Any, numbers: Any) -> None:
        pass


def rebinds_data(rule: Any, values: torch.Tensor, state: Any) -> None:
    values.data = values * 2


def rebinds_state_data(rule: Any, values: torch.Tensor, state: Any) -> None:
    state["m"].data = values * 2


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (lambda rule, values, state: state.update(m=state["m"] * 0.9), r"Kept puts another object in .* state 'm'"),
        (lambda rule, values, state: state.update(n=values), "Kept adds a state 'n'"),
        (lambda rule, values, state: state.clear(), "Kept removes the state 'm'"),
        (lambda rule, values, state: values * 0.9, "Kept returns a Tensor, which is ignored"),
        (rebinds_data, "Kept moves values to other memory"),
        (rebinds_state_data, "Kept moves state 'm' to other memory"),
        (lambda rule, values, state: setattr(rule, "t", 1), "Kept changes its attribute t in its steps"),
        (lambda rule, values, state: setattr(rule, "lr", rule.lr * 2), "Kept changes its attribute lr in its steps"),
    ],
)
def test_a_rule_that_does_not_write_in_place_is_refused(does: Any, told: str) -> None:
    rule = Kept(does)
    with pytest.raises(ConfigError, match=f"server {__name__}.{told}|of server {__name__}.{told}"):
        ServerOptimizer(rule)
    assert rule.lr == 0.1 and not hasattr(rule, "t")


class Caching(Sign):
    """One that keeps a list, an array and an object that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [torch.ones(2), np.ones(3), math.nan]
        self.lines = (line for line in "ab")


class Growing(Sign):
    """One that counts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        self.seen.append(0.0)
        return gradient.sign()


def test_attributes_that_stay_are_taken_and_those_that_grow_are_refused() -> None:
    ServerOptimizer(Caching())
    with pytest.raises(ConfigError, match="Growing changes its attribute seen in its steps"):
        ServerOptimizer(Growing())


def test_a_rule_without_a_method_is_refused_by_the_methods_name() -> None:
    rule: Any = NoNumbers()
    with pytest.raises(ConfigError, match=f"^{__name__}.NoNumbers has no method numbers; ") as refused:
        server_of(rule, writer=Writer.USER)
    assert "0x" not in str(refused.value)


def test_a_scheduler_of_torch_is_refused_beside_an_object_of_a_rule() -> None:
    scheduler: Any = CosineAnnealingLR(SGD([torch.zeros(1)], lr=0.1), 3)
    with pytest.raises(ConfigError, match="^server schedule torch.* of torch, .* give schedule='cosine:T_max=100'"):
        ServerOptimizer(Adaptive(), scheduler)


def test_a_class_in_the_place_of_a_combiner_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^combine .*Mean is a class; give an object of it: write Mean\(\)$"):
        Options.of(combine=Mean, server=None, privacy=None, secure=False, **PLAIN)


PLAIN: dict[str, Any] = {
    "bucket_bytes": 1024,
    "atomic": True,
    "nonfinite": "reject",
    "form": "auto",
    "rails": False,
    "fragments": 1,
    "overlap": False,
    "norms": False,
}
"""Options of an aggregator"""


# Saved states ---------------------------------------------------------------------------------------------------------


def of_before(**changes: Any) -> dict[str, Any]:
    """The state of a server that torch's AdamW stepped, as it was saved for a fragment before there were rules."""
    tensors = {"weight": torch.ones(3)}
    state = {
        "elements": {"exp_avg": tensors, "exp_avg_sq": tensors},
        "numbers": {"step": torch.tensor(4.0)},
        "options": {"lr": 0.05, "betas": (0.9, 0.999), "fused": None},
        "schedule": {"last_epoch": 4, "step_size": 2, "gamma": 0.1},
        "ended": None,
        "asked": {
            "class": "AdamW",
            "lr": "0.05",
            "initial_lr": "0.1",
            "betas": "(0.9, 0.999)",
            "weight_decay": "0.01",
            "fused": "None",
            "eps": "1e-08",
            "amsgrad": "False",
            "schedule": "StepLR",
            "schedule's step_size": "2",
            "schedule's gamma": "0.1",
            "schedule's last_epoch": "0",
        },
    }
    return {**state, **changes}


def test_states_of_torchs_optimizers_are_read() -> None:
    server = server_of({"name": "AdamW", "lr": 0.1, "schedule": "StepLR:step_size=2"}, writer=Writer.USER)
    assert server is not None
    saved = read_saved_server(Fields(of_before(), "a state", error=CheckpointError))
    assert saved.step == 4 and {*saved.elements} == {"m", "v"}
    server.check_saved(saved, "it", "begin anew")
    again = read_saved_server(Fields(saved.plain, "a state", error=CheckpointError))
    assert again == saved
    counted = (  # by the optimizer, by the schedule, or by nobody, where nothing depends on it
        ({"numbers": {"step": {"dtype": "float32", "value": 3.0}}}, 3),
        ({"numbers": {}}, 4),
        ({"numbers": {}, "schedule": None}, 1),
        ({"numbers": {}, "schedule": None, "elements": {}}, 0),
        ({"elements": ["exp_avg", "exp_avg_sq"], "numbers": {"step": 7}}, 7),
    )
    for changes, step in counted:
        assert read_saved_server(Fields(of_before(**changes), "a state")).step == step
    other = server_of("adamw:lr=0.2", writer=Writer.USER)
    assert other is not None
    with pytest.raises(CheckpointError, match=r"lr=0.1, schedule=step_decay, and this one has lr=0.2, schedule=none;"):
        other.check_saved(saved, "it", "begin anew")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"numbers": {"step": math.nan}}, "step of a state must be a number of steps, got nan"),
        ({"numbers": {"step": -1}}, "step of a state must be a number of steps, got -1"),
        ({"numbers": {"step": torch.zeros(10**6)}}, "step of a state must be a number of steps"),
        ({"numbers": [1]}, "numbers of a state must be a mapping"),
        ({"elements": {"m": {}, "exp_avg": {}}}, "has two names of the same state: exp_avg, m"),
        ({"elements": {str(place): {} for place in range(100)}}, "elements of a state must be at most 64 names"),
        ({"elements": {"m": 3}}, "elements.m of a state must be a mapping"),
        ({"elements": [3]}, "elements of a state must be at most 64 names"),
        ({"asked": {"class": 3}}, "asked.class of a state must be a text, got 3"),
        ({"asked": [1]}, "asked of a state must be a mapping"),
        ({"step": 1.5}, "step of a state must be .* integer"),
        ({"step": -1}, "step of a state must be .* integer"),
    ],
)
def test_states_that_are_damaged_are_refused_with_the_value(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        read_saved_server(Fields(of_before(**changes), "a state", error=CheckpointError))


def test_a_state_without_what_the_rule_keeps_is_refused() -> None:
    server = server_of("adam", writer=Writer.USER)
    assert server is not None
    saved = SavedServer(3, {"m": {}}, server.asked)
    with pytest.raises(CheckpointError, match="it has m for each element after 3 steps, and the server keeps m, v;"):
        server.check_saved(saved, "it", "begin anew")


# What is asked for, on all ranks --------------------------------------------------------------------------------------


def test_the_device_is_kept() -> None:
    server = server_of({"name": "fedadam", "device": "cpu"}, writer=Writer.USER)
    assert server is not None and server.device == torch.device("cpu")
    assert ServerOptimizer(server_rules.SGD()).device is None


SPECS = ["fedadam", "fedadam:lr=0.2", "fedyogi", "AdamW", "adamw:amsgrad=true"]


def test_the_text_is_the_same_in_other_processes_and_tells_options_apart() -> None:
    code = (
        "import sys, torch\n"
        "from xffl.aggregation.algorithms.server_optimizer import ServerOptimizer, server_of\n"
        "from xffl.aggregation.algorithms.server_rules import SGD\n"
        "from xffl.naming import Writer\n"
        f"texts = [str(server_of(spec, writer=Writer.USER)) for spec in {SPECS!r}]\n"
        "rates = (lambda n: 1 / (n + 1), lambda n: 1 / (n + 2))\n"
        "texts += [str(ServerOptimizer(SGD(), f)) for f in rates]\n"
        "texts.append(str(server_of({'name': 'sgd', 'device': 'cpu'}, writer=Writer.USER)))\n"
        "texts.append(str(server_of({'name': 'sgd', 'schedule': 'CosineAnnealingLR:T_max=9'}, writer=Writer.USER)))\n"
        "print('\\n'.join(texts))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT, env=environ
    )
    with redirect_stdout(io.StringIO()) as here:
        exec(code, {"__name__": "__main__"})
    found = here.getvalue().splitlines()
    assert ran.stdout.splitlines() == found
    assert len(set(found)) == len(SPECS) + 4 and not any(" 0x" in text for text in found)
    assert "lr=0.2" in found[1] and "T_max=9" in found[-1]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("AdamW", {"maximize": "True"}), ("SGD", {"maximize": "True"}), ("Adam", {"decoupled_weight_decay": "True"})],
)
def test_states_of_torchs_optimizers_with_options_that_are_gone_are_refused(name: str, asked: dict[str, str]) -> None:
    (option,) = asked
    given = of_before(asked={**of_before()["asked"], "class": name, **asked})
    with pytest.raises(CheckpointError, match=f"is of {name} with {option}=True, which no server has any more"):
        read_saved_server(Fields(given, "a state", error=CheckpointError))
    given["asked"][option] = "False"
    assert read_saved_server(Fields(given, "a state", error=CheckpointError)).step == 4
