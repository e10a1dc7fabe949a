"""Server rules, bit for bit against the same operations in numpy, and beside the optimizers of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.algorithms import server_schedules
from xffl.aggregation.algorithms.server_optimizer import server_of, take_step
from xffl.aggregation.algorithms.server_rules import RULES, SGD, Adagrad, Adam, AdamW, Adaptive, ServerRule
from xffl.aggregation.arithmetic import CHUNK
from xffl.aggregation.elementary import ElementaryOnly
from xffl.errors import ConfigError
from xffl.naming import Writer

Array = np.ndarray
ROUNDS = 10

ALL: dict[str, ServerRule] = {
    "sgd": SGD(lr=0.7),
    "momentum": SGD(lr=0.3, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": SGD(lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.02),
    "adam": Adam(lr=0.03, weight_decay=0.01),
    "amsgrad": Adam(lr=0.03, betas=(0.5, 0.6), amsgrad=True),
    "adamw": AdamW(lr=0.03, weight_decay=0.1),
    "adamw, amsgrad": AdamW(lr=0.03, betas=(0.5, 0.6), eps=1e-4, amsgrad=True),
    "adagrad": Adagrad(lr=0.03, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "fedadagrad": Adaptive(betas=(0.0, 0.99), rule="adagrad"),
    "fedadam": Adaptive(is_bias_corrected=True, initial=0.0),
    "fedyogi": Adaptive(rule="yogi", tau=1e-2),
}


# In numpy -------------------------------------------------------------------------------------------------------------


def step_in_numpy(rule: Any, x: Array, g: Array, state: dict[str, Array], numbers: dict[str, float]) -> Array:
    """The same elementary operations, in the type of ``x``: each sum, product, quotient and root is rounded once."""
    f = x.dtype.type
    root = np.sqrt  # IEEE 754 prescribes it, and numpy's are the processor's own instructions
    if isinstance(rule, SGD):
        g = g + x * f(rule.weight_decay) if rule.weight_decay else g
        way = g
        if rule.momentum:
            entering = g if numbers["inflow"] == 1.0 else g * f(numbers["inflow"])
            state["momentum"] = state["momentum"] * f(rule.momentum) + entering
            way = g + state["momentum"] * f(rule.momentum) if rule.nesterov else state["momentum"]
        return x - way * f(numbers["lr"])
    if isinstance(rule, Adam):
        if isinstance(rule, AdamW):
            x = x * f(1.0 - numbers["lr"] * rule.weight_decay) if rule.weight_decay else x
        else:
            g = g + x * f(rule.weight_decay) if rule.weight_decay else g
        one, two = rule.betas
        state["m"] = state["m"] * f(one) + g * f(1.0 - one)
        state["v"] = v = state["v"] * f(two) + (g * g) * f(1.0 - two)
        if rule.amsgrad:
            state["v_max"] = v = np.maximum(state["v_max"], v)
        scale = root(v) * f(numbers["root_factor"]) + f(rule.eps)
        return x - (state["m"] / scale) * f(numbers["lr"] * numbers["m_factor"])
    if isinstance(rule, Adagrad):
        g = g + x * f(rule.weight_decay) if rule.weight_decay else g
        state["v"] = state["v"] + g * g
        return x - (g / (root(state["v"]) + f(rule.eps))) * f(numbers["lr"] * numbers["decay"])
    one, two = rule.betas
    square = g * g
    if rule.rule == "adagrad":
        state["v"] = state["v"] + square
    elif rule.rule == "adam":
        state["v"] = state["v"] * f(two) + square * f(1.0 - two)
    else:
        state["v"] = state["v"] - (np.sign(state["v"] - square) * square) * f(1.0 - two)
    state["m"] = state["m"] * f(one) + g * f(1.0 - one)
    return x - (state["m"] / (root(state["v"]) + f(rule.tau))) * f(numbers["lr"] * numbers["correction"])


def patterns(numel: int, seed: int) -> Array:
    """Random bits: normals of all sizes, subnormals, infinities and NaN; and zeros of both signs among them."""
    draws = np.random.default_rng(seed)
    bits = draws.integers(0, 2**32, numel, dtype=np.uint32)
    kinds = draws.integers(0, 8, numel)
    bits[kinds == 0] &= 0x807FFFFF  # subnormal
    bits[kinds == 1] &= 0x80000000  # zero
    bits[kinds == 2] = (bits[kinds == 2] & 0x807FFFFF) | 0x3F800000  # near one
    bits[kinds == 3] = (bits[kinds == 3] & 0x80000000) | 0x7F800000  # infinite
    return bits.view(np.float32)


def same_bits(got: torch.Tensor, wanted: Array) -> bool:
    """Whether both have the same bits; a NaN is one, whatever its sign and payload."""
    mine, numbers = got.numpy(), np.isnan(wanted)
    kind = np.uint32 if wanted.dtype == np.float32 else np.uint64
    return bool(
        np.array_equal(np.isnan(mine), numbers)
        and np.array_equal(mine[~numbers].view(kind), wanted[~numbers].view(kind))
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float32) for name in ALL), *((name, np.float64) for name, rule in ALL.items() if type(rule) is SGD)],
)
def test_rules_have_the_bits_of_numpys_elementary_operations(name: str, dtype: Any) -> None:
    """In fp64 those without roots, which are the processor's."""
    rule, numel = ALL[name], 40_003
    with np.errstate(invalid="ignore"):
        start = patterns(numel, 0).astype(dtype)
    values = torch.from_numpy(start.copy())
    state = rule.init(values)
    wanted, kept = start, {key: one.numpy().copy() for key, one in state.items()}
    with np.errstate(all="ignore"):
        for step in range(4):
            gradient = patterns(numel, 1 + step).astype(dtype)
            numbers = rule.numbers(step)
            wanted = step_in_numpy(rule, wanted, gradient, kept, numbers)
            with ElementaryOnly(f"rule {name}"):
                rule.step(values, torch.from_numpy(gradient.copy()), state, numbers)
            assert same_bits(values, wanted), step
            assert all(same_bits(one, kept[key]) for key, one in state.items()), step


@pytest.mark.parametrize("name", ALL)
def test_pieces_step_like_the_whole_to_the_bit(name: str) -> None:
    """However a model is cut, and with any number of threads: replicas of a shard must not part."""
    rule, numel, threads = ALL[name], 2 * CHUNK + 77, torch.get_num_threads()
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=draws)
    means = [start + 0.1 * torch.randn(numel, generator=draws) for _ in range(3)]

    def stepped(cuts: list[int]) -> torch.Tensor:
        pieces = [piece.clone() for piece in start.tensor_split(cuts)]
        states = [rule.init(piece) for piece in pieces]
        for step, mean in enumerate(means):
            for piece, state, new in zip(pieces, states, mean.clone().tensor_split(cuts), strict=True):
                take_step(rule, piece, new, state, rule.numbers(step))
        return torch.cat(pieces)

    whole = stepped([])
    assert not torch.equal(whole, start)
    try:
        for count, cuts in ((3, []), (2, [1, 130, 131, CHUNK + 3]), (1, [7])):
            torch.set_num_threads(count)
            assert torch.equal(stepped(cuts), whole), (count, cuts)
    finally:
        torch.set_num_threads(threads)


# Beside torch ---------------------------------------------------------------------------------------------------------

TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.7}),
    ("SGD", {"lr": 0.3, "momentum": 0.9}),
    ("SGD", {"lr": 0.3, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {}),
    ("Adam", {"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.03, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-6}),
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2, "eta_min": 0.01},
    "ExponentialLR": {"gamma": 0.8},
    "LinearLR": {"start_factor": 0.1, "end_factor": 0.9, "total_iters": 4},
    "MultiStepLR": {"milestones": [2, 2, 5], "gamma": 0.5},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "StepLR": {"step_size": 3, "gamma": 0.5},
}


def beside_torch(name: str, options: dict[str, Any], schedule: str | None = None) -> float:
    """Return how far ten fp32 rounds are from those of torch's own optimizer, whose fused kernels round otherwise."""
    spec = {"name": name, **options}
    if schedule is not None:
        spec["schedule"] = {"name": schedule, **SCHEDULES[schedule]}
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=draws)
    twin = values.clone()
    optimizer = getattr(torch.optim, name)([twin], **options)
    rates = None
    if schedule is not None:
        rates = getattr(torch.optim.lr_scheduler, schedule)(optimizer, **SCHEDULES[schedule])
    state = server.rule.init(values)
    apart = 0.0
    for step in range(ROUNDS):
        gradient = torch.randn(1000, generator=draws)
        twin.grad = gradient.clone()
        optimizer.step()
        if rates is not None:
            rates.step()
        server.rule.step(values, gradient, state, server.numbers(step))
        apart = max(apart, float(((values - twin).abs() / (1.0 + twin.abs())).max()))
    return apart


@pytest.mark.parametrize(("name", "options"), TORCHS, ids=str)
def test_ten_rounds_equal_torch(name: str, options: dict[str, Any]) -> None:
    assert beside_torch(name, options) <= 1e-6
    assert beside_torch(name, {**options, "lr": 0.3}, "StepLR") <= 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_equal_torchs(schedule: str) -> None:
    assert beside_torch("SGD", {"lr": 0.7, "momentum": 0.9}, schedule) <= 1e-6


def test_a_warm_up_goes_on_with_another_schedule() -> None:
    then = {"name": "step", "step_size": 1, "gamma": 0.5}
    server = server_of({"name": "sgd", "schedule": {"name": "warmup", "steps": 4, "then": then}}, writer=Writer.USER)
    assert server is not None
    assert [server.numbers(step)["lr"] for step in range(7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.25]
    assert server_schedules.warmup(9, 0.7, 4) == 0.7


# The paper's ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    gradients=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    initial=st.one_of(st.none(), st.just(0.0)),
)
def test_moments_stay_finite_and_squares_positive(rule: str, gradients: list[float], initial: float | None) -> None:
    server = Adaptive(rule=rule, initial=initial)
    values = torch.zeros(1)
    state = server.init(values)
    for step, gradient in enumerate(gradients):
        server.step(values, torch.tensor([gradient]), state, server.numbers(step))
    assert state["v"].item() >= 0 and torch.isfinite(values).all()


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (Adaptive, {"rule": "rmsprop"}, "'adagrad', 'adam', 'yogi'"),
        (Adaptive, {"lr": -0.1}, "lr .* got -0.1"),
        (Adaptive, {"lr": math.inf}, "lr .* got inf"),
        (Adaptive, {"betas": (0.9, 1.0)}, "betas"),
        (Adaptive, {"betas": (0.9,)}, "betas"),
        (Adaptive, {"tau": 0.0}, "tau .* got 0.0"),
        (Adaptive, {"initial": -1.0}, "initial .* got -1.0"),
        (Adaptive, {"rule": "adagrad", "is_bias_corrected": True}, "needs rule adam or yogi"),
        (SGD, {"nesterov": True}, "nesterov needs momentum above 0 and no dampening, got momentum 0.0"),
        (SGD, {"momentum": -0.1}, "momentum must be a number >= 0, got -0.1"),
        (SGD, {"weight_decay": -1}, "weight_decay must be a number >= 0, got -1"),
        (Adam, {"betas": 0.9}, "betas must be two numbers >= 0 and < 1, got 0.9"),
        (AdamW, {"eps": -1.0}, "eps must be a number >= 0"),
        (Adagrad, {"lr_decay": -1.0}, "lr_decay must be a number >= 0"),
    ],
)
def test_options_outside_their_range_are_refused(kind: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        kind(**options)
