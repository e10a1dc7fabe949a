"""Server optimizers against dense implementations written here, and against those of the ``flwr`` package."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR, StepLR

from xffl.aggregation.algorithms.server import RULES, Adaptive, ServerOptimizer, server_of
from xffl.aggregation.engine.global_model import VECTORS
from xffl.errors import ConfigError
from xffl.naming import Writer

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 10
SIZES = (7, 12)
WEIGHTS = (3.0, 1.0, 2.0)
Arrays = list[np.ndarray]
PRESETS = ("sgd", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "diloco")


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
    optimizer = server.make(tensors)
    schedule = server.make_schedule(optimizer)
    found = []
    for steps in updates():
        step_torch(optimizer, schedule, tensors, steps)
        found.append([tensor.double().numpy().copy() for tensor in tensors])
    return found


def step_torch(optimizer: Any, schedule: Any, tensors: Sequence[torch.Tensor], steps: list[Arrays]) -> None:
    before = [tensor.double().numpy() for tensor in tensors]
    mean = weighted_mean([[old + move for old, move in zip(before, cell, strict=True)] for cell in steps])
    for tensor, new in zip(tensors, mean, strict=True):
        tensor.grad = tensor - torch.tensor(new, dtype=tensor.dtype)
    optimizer.step()
    if schedule is not None:
        schedule.step()


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


@pytest.mark.parametrize("name", PRESETS)
def test_fp32_pieces_step_like_the_whole(name: str) -> None:
    """To the last bit: replicas of a shard, and ranks that hold it in other pieces, must not part."""
    server = server_of(name, writer=Writer.USER)
    assert server is not None
    start, draws = torch.linspace(-3, 3, 1000), torch.Generator().manual_seed(0)
    cuts = [1, 130, 131, 700]
    whole, pieces = start.clone(), [piece.clone() for piece in start.tensor_split(cuts)]
    optimizers = [server.make([whole]), *(server.make([piece]) for piece in pieces)]
    for _ in range(ROUNDS):
        whole.grad = torch.randn(1000, generator=draws)
        for piece, grad in zip(pieces, whole.grad.tensor_split(cuts), strict=True):
            piece.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(pieces), whole) and not torch.equal(whole, start)


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

    options = {"lr": 0.1, "tau": 1e-3, "betas": (0.9, 0.99), "rule": "adam", "initial": 0.0}
    assert_same(run_torch(ServerOptimizer(Adaptive, options, lambda one: LambdaLR(one, corrected))), wanted)


@pytest.mark.parametrize(("spec", "strategy"), [("fedadam", "FedAdam"), ("fedyogi", "FedYogi")])
def test_the_paper_is_not_flwr(spec: str, strategy: str) -> None:
    """What the docstring of Adaptive says of flwr is so, or it has come closer to the paper."""
    wanted = run_flwr(strategy, beta_1=0.9, beta_2=0.99, **FLWR)
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    assert not np.allclose(run_torch(server)[0][0], wanted[0][0], rtol=1e-6)


# Adaptive -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    grads=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    initial=st.one_of(st.none(), st.just(0.0)),
)
def test_moments_stay_finite_and_squares_positive(rule: str, grads: list[float], initial: float | None) -> None:
    tensor = torch.zeros(1)
    optimizer = Adaptive([tensor], rule=rule, initial=initial)
    for grad in grads:
        tensor.grad = torch.tensor([grad])
        optimizer.step()
    assert optimizer.state[tensor]["v"].item() >= 0 and torch.isfinite(tensor).all()


def test_a_tensor_without_gradient_stays_and_a_closure_is_called_with_gradients() -> None:
    still, moved = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Adaptive([still, moved], lr=0.5)

    def closure() -> float:
        loss = moved.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert still.tolist() == [1.0, 1.0] and (moved < 1).all() and still not in optimizer.state


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rule": "rmsprop"}, "'adagrad', 'adam', 'yogi'"),
        ({"lr": -0.1}, "lr .* got -0.1"),
        ({"lr": math.inf}, "lr .* got inf"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"tau": 0.0}, "tau .* got 0.0"),
        ({"initial": -1.0}, "initial .* got -1.0"),
        ({"rule": "adagrad", "is_bias_corrected": True}, "needs rule adam or yogi"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Adaptive([torch.zeros(1)], **options)


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, "AdamW", "fedadam:is_bias_corrected=true"])
def test_resuming_equals_never_having_stopped(name: str) -> None:
    spec = server_of(name, writer=Writer.USER)
    assert spec is not None
    server = ServerOptimizer(spec.factory, spec.options, lambda one: StepLR(one, 3, 0.5))
    wanted = run_torch(server, torch.float32)[-1]
    tensors = [torch.tensor(array, dtype=torch.float32) for array in starting_weights()]
    optimizer = server.make(tensors)
    schedule = server.make_schedule(optimizer)
    for number, steps in enumerate(updates()):
        if number == 5:
            saved = (optimizer.state_dict(), schedule.state_dict())
            tensors = [tensor.detach().clone() for tensor in tensors]
            optimizer = server.make(tensors)
            schedule = server.make_schedule(optimizer)
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        step_torch(optimizer, schedule, tensors, steps)
    for got, array in zip(tensors, wanted, strict=True):
        assert torch.equal(got.double(), torch.from_numpy(array))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_have_the_tensors_dtype(rule: str, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    tensor.grad = torch.ones(3, dtype=dtype)
    optimizer = Adaptive([tensor], rule=rule)
    optimizer.step()
    assert {key: value.dtype for key, value in optimizer.state[tensor].items() if key != "step"} == dict.fromkeys(
        ("m", "v"), dtype
    )


# What is asked for, and what is refused -------------------------------------------------------------------------------


class Sign(torch.optim.Optimizer):
    """Somebody's own optimizer: one step of ``lr`` in the direction of the sign."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor -= group["lr"] * self.direction(tensor.grad)

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


class Normed(Sign):
    """One that cannot step pieces: it divides by the norm."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class Noisy(Sign):
    """One that would take the replicas of a shard apart."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.randn_like(grad)


class Counting(torch.optim.SGD):
    """One that counts its steps beside its state; it is stepped once for each bucket."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for tensor in self.param_groups[0]["params"]:
            tensor.grad /= self.steps
        super().step(closure)


def made_by_function(tensors: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=lr)


@pytest.mark.parametrize("spec", [None, "none", "fedavg", {"name": "fedavg"}])
def test_the_plain_mean_needs_no_optimizer(spec: object) -> None:
    assert server_of(spec, writer=Writer.USER) is None


ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_of_torch_by_name_and_path(name: str) -> None:
    found = [server_of(f"{prefix}{name}:lr=0.25", writer=Writer.USER) for prefix in ("", "torch.optim.")]
    for server in found:
        assert server is not None and server.factory is getattr(torch.optim, name) and server.options == {"lr": 0.25}
        made = server.make([torch.zeros(3)])
        assert type(made) is getattr(torch.optim, name) and made.param_groups[0]["lr"] == 0.25
    assert len({str(server) for server in found}) == 1


def test_every_optimizer_of_torch_is_taken_or_refused_with_a_reason() -> None:
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    refused = {}
    for name in kinds:
        try:
            server_of(name, writer=Writer.USER)
        except ConfigError as error:
            refused[name] = str(error)
    assert kinds.keys() - refused.keys() == set(ELEMENTWISE)
    reasons = {"LBFGS": "closure", "Adafactor": "rows and columns", "Muon": "matrices", "SparseAdam": "sparse"}
    assert refused.keys() == reasons.keys()
    for name, why in reasons.items():
        assert "cannot step flat pieces" in refused[name] and why in refused[name]


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}.Sign:lr=0.5",
        {"name": f"{__name__}.Sign", "lr": 0.5},
        f"{__name__}.made_by_function:lr=0.5",
        lambda tensors: Sign(tensors, lr=0.5),
        ServerOptimizer(Sign, {"lr": 0.5}),
    ],
)
def test_ones_own_optimizer(spec: object) -> None:
    server = server_of(spec, writer=Writer.USER)
    assert server is not None
    tensor = torch.zeros(2)
    optimizer = server.make([tensor])
    tensor.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    assert tensor.tolist() == [-0.5, 0.5]
    assert server_of(server, writer=Writer.USER) is server


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (f"{__name__}.Normed", "cannot step flat pieces"),
        (f"{__name__}.Noisy", "cannot step flat pieces"),
        (f"{__name__}.Counting:lr=0.5", "keeps more than what is in its state"),
        (f"{__name__}.made_by_function", "lr"),
        ("fedadm", "choose one of sgd, fedavgm, fedadagrad, fedadam, fedyogi, diloco, a class of torch.optim"),
        ("fedadam:mu=1", "no option mu; there are: lr, betas, tau"),
        ("fedadam:lr=fast", "lr='fast'"),
        ("fedadam:lr", "write name:option=value"),
        ("fedadam:betas=(0.9,x)", "not a list of values"),
        ("AdamW:lr=-1", "Invalid learning rate"),
        ("none:lr=1", "no options such as lr"),
        ("torch.optim.Nope", "cannot be imported"),
        ("builtins.len", "must be a class, or a function that returns an object, of torch.optim.optimizer.Optimizer"),
        ({"lr": 0.1}, "has no name"),
        ({"name": "sgd", "device": "nowhere"}, "device 'nowhere'"),
        ({"name": "sgd", "schedule": "StepLR"}, "required: step_size"),
        ({"name": "sgd", "schedule": "Steps"}, "a class of torch.optim.lr_scheduler"),
        ({"name": "sgd", "schedule": "ReduceLROnPlateau"}, "cannot step"),
        ({"name": "sgd", "schedule": lambda optimizer: None}, "must make an LRScheduler"),
        ({"name": "sgd", "schedule": 3}, "schedule of the server must be .* got 3"),
        (lambda tensors: tensors, "must make a torch.optim.Optimizer"),
        (3, "server must be .* got 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        server_of(spec, writer=Writer.USER)


def test_the_device_is_kept() -> None:
    server = server_of({"name": "fedadam", "device": "cpu"}, writer=Writer.USER)
    assert server is not None and server.device == torch.device("cpu")
    assert ServerOptimizer(torch.optim.SGD).device is None


SPECS = ["fedadam", "fedadam:lr=0.2", "fedyogi", "AdamW", "sgd:foreach=true"]


def test_the_text_is_the_same_in_other_processes_and_tells_options_apart() -> None:
    code = (
        "import sys, torch\n"
        "from xffl.aggregation.algorithms.server import ServerOptimizer, server_of\n"
        "from torch.optim.lr_scheduler import LambdaLR\n"
        "from xffl.naming import Writer\n"
        f"texts = [str(server_of(spec, writer=Writer.USER)) for spec in {SPECS!r}]\n"
        "rates = (lambda n: 1 / (n + 1), lambda n: 1 / (n + 2))\n"
        "texts += [str(ServerOptimizer(torch.optim.SGD, {}, lambda o, f=f: LambdaLR(o, f))) for f in rates]\n"
        "texts.append(str(server_of({'name': 'sgd', 'device': 'cpu'}, writer=Writer.USER)))\n"
        "texts.append(str(server_of({'name': 'sgd', 'schedule': 'CosineAnnealingLR:T_max=9'}, writer=Writer.USER)))\n"
        "print('\\n'.join(texts))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT, env=environ
    )
    with redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    found = here.getvalue().splitlines()
    assert ran.stdout.splitlines() == found
    assert len(set(found)) == len(SPECS) + 4 and not any(" 0x" in text for text in found)
    assert "lr=0.2" in found[1] and "T_max=9" in found[-1]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_steps_of_whole_vectors_have_the_bits_of_plain_ones(options: dict[str, Any], dtype: torch.dtype) -> None:
    """However they are cut, and with any number of threads: what a global model relies on."""
    generator = torch.Generator().manual_seed(0)
    numel, threads = 640 * VECTORS, torch.get_num_threads()
    start, *gradients = (torch.randn(numel, dtype=dtype, generator=generator) for _ in range(4))

    def stepped(fused: bool, length: int) -> torch.Tensor:
        pieces = [piece.clone() for piece in torch.split(start, length)]
        for number, piece in enumerate(pieces):
            optimizer = torch.optim.SGD([piece], lr=0.7, fused=fused, **options)
            for gradient in gradients:
                piece.grad = torch.split(gradient, length)[number].clone()
                optimizer.step()
        return torch.cat(pieces)

    plain = stepped(False, numel)
    try:
        for length, count in ((numel, 1), (numel, 3), (64 * VECTORS, 2), (VECTORS, 1)):
            torch.set_num_threads(count)
            assert torch.equal(stepped(True, length), plain), (length, count)
    finally:
        torch.set_num_threads(threads)
