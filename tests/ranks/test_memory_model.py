"""What is forecast for a rank's memory and traffic is what ranks hold and send."""

from __future__ import annotations

import ast
from math import prod
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.decoder import VOCABULARY, Block, Decoder, loss_of, text_batch
from tests.ranks.test_strategies import configure, joined
from tests.rows import some_of
from tests.worlds import run_world
from xffl.parallel import DDPConfig, DistributedStrategy
from xffl.planning import ModelSize, TrainingSize, rank_memory, step_traffic

WIDTH, LAYERS, BATCH, SEQUENCE = 32, 4, 8, 16
Case = tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]

CASES: dict[str, Case] = {
    "single": ("single", {}, {}, {}),
    "single, adafactor": ("single", {}, {}, {}),
    "ddp": ("ddp", {"dp_replicate": 2}, {}, {}),
    "ddp, buckets": ("ddp", {"dp_replicate": 3}, {"ddp": DDPConfig(gradient_as_bucket_view=False)}, {}),
    "fsdp, whole": ("fsdp", {"dp_shard": 2}, {}, {}),
    "fsdp": ("fsdp", {"dp_shard": 4}, {"wrap": (Block,)}, {}),
    "fsdp, uneven": ("fsdp", {"dp_shard": 3}, {"wrap": (Block,)}, {}),
    "fsdp, kept": ("fsdp", {"dp_shard": 2}, {"wrap": (Block,)}, {"reshard_after_forward": False}),
    "hsdp": ("hsdp", {"dp_replicate": 2, "dp_shard": 2}, {"wrap": (Block,)}, {}),
    "tensor": ("fsdp", {"tp": 2}, {}, {}),
    "tensor, whole activations": ("fsdp", {"tp": 2}, {}, {"sequence_parallel": False}),
    "tensor, cut loss": ("fsdp", {"tp": 2}, {}, {"loss_parallel": True}),
    "context": ("fsdp", {"cp": 2}, {"wrap": (Block,)}, {}),
    "fsdp and tensor": ("fsdp", {"dp_shard": 2, "tp": 2}, {"wrap": (Block,)}, {}),
    "pipeline": ("fsdp", {"pp": 2}, {}, {"pp_schedule": "gpipe", "pp_micro_batches": 4}),
    "pipeline of three": ("fsdp", {"pp": 3}, {}, {"pp_micro_batches": 4}),
    "pipeline and fsdp": ("fsdp", {"pp": 2, "dp_shard": 2}, {"wrap": (Block,)}, {"pp_schedule": "gpipe"}),
}
AT_NIGHT = (
    *("ddp, buckets", "fsdp, whole", "fsdp", "tensor", "tensor, whole activations", "context", "fsdp and tensor"),
    *("pipeline", "pipeline of three"),
)
"""Cases whose parts others have; ``make nightly ONLY=rows`` measures them, too."""
OPTIMIZER_OF = {"hsdp": "momentum", "single, adafactor": "adafactor"}
Measured = tuple[int, int, int, int, dict[str, float]]


def measure_all(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, Measured]:
    """Measure several cases in one world."""
    return {name: measure(rank, world_size, name, OPTIMIZER_OF.get(name, "adamw")) for name in names}


def measure(rank: int, world_size: int, name: str, optimizer: str) -> Measured:
    """Train two steps; return the rank's parameters, gradients, optimizer's values, rows, and what it sent."""
    strategy_name, mesh, options, others = CASES[name]
    strategy = DistributedStrategy.from_config(configure(strategy_name, {**mesh, **others}, options))
    strategy.setup(joined(rank, world_size))
    world = strategy.world
    model = strategy.wrap_model(Decoder(WIDTH, layers=LAYERS), loss=loss_of)
    stepper = OPTIMIZERS[optimizer](model.parameters())

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (part.chunk(world.dp_size)[world.dp_rank] for part in text_batch(step, BATCH * world.dp_size, SEQUENCE))
        return strategy.split_sequence(*parts)  # type: ignore[return-value]

    tokens, targets = batch(0)
    strategy.forward_backward(model, tokens, target=targets)
    parameters = list(model.parameters())
    gradients = sum(local(parameter.grad).numel() for parameter in parameters if parameter.grad is not None)
    strategy.step(stepper)
    states = [value for state in stepper.state.values() for value in state.values()]
    kept = sum(local(value).numel() for value in states if isinstance(value, torch.Tensor) and value.ndim)
    # How much more than its share a rank may hold of each parameter: a row.
    rows = sum(local(parameter).shape[1:].numel() for parameter in parameters)
    tokens, targets = batch(1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        strategy.forward_backward(model, tokens, target=targets)
    strategy.teardown()
    events = [(event.name, str(event.input_shapes)) for event in profiler.events()]
    return sum(local(p).numel() for p in parameters), gradients, kept, rows, sent(events, world_size)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sent(events: list[tuple[str, str]], world_size: int) -> dict[str, float]:
    """Return the values of each kind of collective: what goes in, all of it, whatever ranks share it.

    A number for each token (a cut loss), norms' gradients and a pipeline's loss are left out, as the forecast does.
    """
    found = dict.fromkeys(("all_gather", "all_reduce", "send"), 0.0)
    for name, shapes in events:
        kind = name.removeprefix("gloo:")
        if kind in found and name != kind:
            first = ast.literal_eval(shapes)[0]
            found[kind] += prod(first) if prod(first) > BATCH * SEQUENCE else 0
    return found


@pytest.fixture(scope="module")
def model() -> ModelSize:
    parameters = sum(parameter.numel() for parameter in Decoder(WIDTH, layers=LAYERS).parameters())
    return ModelSize(parameters=parameters, layers=LAYERS, width=WIDTH, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, list[Measured]]:
    """What the ranks of each case hold and send, by rank; one world for all cases of a size."""
    chosen = [name for name in CASES if name not in AT_NIGHT or "long" in request.config.option.markexpr]
    found: dict[str, list[Measured]] = {}
    for size in (1, 2, 3, 4):
        names = tuple(name for name in chosen if prod(CASES[name][1].values()) == size)
        ranks = run_world(size, measure_all, names)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


def sizes(name: str, model: ModelSize, optimizer: str = "adamw") -> tuple[ModelSize, TrainingSize]:
    _, mesh, options, others = CASES[name]
    if "wrap" not in options and set(mesh) <= {"dp_shard"} and mesh:
        model = ModelSize(parameters=model.parameters)
    training = TrainingSize(
        optimizer=optimizer,
        batch=BATCH,
        sequence=SEQUENCE,
        micro_batches=others.get("pp_micro_batches"),
        reshard_after_forward=others.get("reshard_after_forward", True),
        loss_parallel=others.get("loss_parallel", False),
        gradient_as_bucket_view=options["ddp"].gradient_as_bucket_view if "ddp" in options else True,
    )
    return model, training


@pytest.mark.parametrize("name", some_of([name for name in CASES if "adafactor" not in name], *AT_NIGHT))
def test_ranks_hold_and_send_what_is_forecast(name: str, model: ModelSize, measured: dict[str, list[Measured]]) -> None:
    _, mesh, _, others = CASES[name]
    ranks, optimizer = measured[name], OPTIMIZER_OF.get(name, "adamw")
    found, training = sizes(name, model, optimizer)
    told = {part.what: part.bytes or 0.0 for part in rank_memory(mesh, found, training)}
    values = 1 if optimizer == "momentum" else 2
    assert all(kept == values * parameters for parameters, _, kept, _, _ in ranks)
    # The rank that holds most: what is forecast, or as much more as uneven cuts give it, and never less.
    parameters, gradients, _, rows, _ = max(ranks, key=lambda rank: rank[0])
    assert told["parameters"] == told["optimizer"] / values
    assert gradients - parameters == (told["gradients"] - told["parameters"]) / 4
    assert told["parameters"] / 4 <= parameters <= told["parameters"] / 4 + rows
    assert mesh.get("dp_shard") == 3 or parameters == told["parameters"] / 4
    assert (told["gathered"] > 0) == (name.startswith(("fsdp", "hsdp", "context", "pipeline and")) or "buckets" in name)
    check_traffic(mesh, others, found, training, [rank[-1] for rank in ranks])


def check_traffic(
    mesh: dict[str, int],
    others: dict[str, Any],
    model: ModelSize,
    training: TrainingSize,
    ranks: list[dict[str, float]],
) -> None:
    """Compare what gloo was given with the formulas; it runs a reduce-scatter as an all-reduce."""
    moved: dict[str, float] = {}
    for part in step_traffic(mesh, model, training):
        assert part.bytes is not None
        kind = "weights" if "all-gather of weights" in part.formula else part.what
        moved[kind] = moved.get(kind, 0.0) + part.bytes / 4
    got = max(ranks, key=lambda rank: sum(rank.values()))
    n, replicas, tp = (mesh.get(axis, 1) for axis in ("dp_shard", "dp_replicate", "tp"))
    slack = 1.1 if n == 3 else 1.0 + 1e-9  # rows that fill up uneven shards
    if set(mesh) <= {"dp_replicate"}:
        assert 2 * (replicas - 1) / replicas * got["all_reduce"] == pytest.approx(moved.get("dp_replicate", 0.0))
    elif set(mesh) <= {"dp_shard", "dp_replicate"}:
        assert moved["weights"] <= (n - 1) * got["all_gather"] <= moved["weights"] * slack
        reduced = n / (n - 1) * moved["dp_shard, cp"] + (moved["dp_replicate"] if replicas > 1 else 0.0)
        assert reduced <= got["all_reduce"] <= reduced * slack
    elif mesh == {"tp": 2}:
        whole = others.get("sequence_parallel") is False
        rings = got["all_reduce"] if whole else got["all_reduce"] / 2
        assert rings + got["all_gather"] == pytest.approx(moved["tp"])
    elif mesh == {"cp": 2}:
        assert got["all_gather"] == pytest.approx(moved["weights"] + moved["cp"] / 2)
    elif "pp" in mesh and n == 1:
        assert got["send"] == pytest.approx(moved["pp"])
    elif "pp" in mesh:
        assert got["send"] == pytest.approx(moved["pp"])
        assert got["all_gather"] == pytest.approx(moved["weights"])
        assert got["all_reduce"] / 2 == pytest.approx(moved["dp_shard, cp"])
    else:
        assert mesh == {"dp_shard": 2, "tp": tp}
        gathers = moved["weights"] + moved["tp"] / 2 + BATCH * SEQUENCE * VOCABULARY / 4
        assert got["all_gather"] == pytest.approx(gathers)


def test_adafactor_keeps_rows_and_columns(model: ModelSize, measured: dict[str, list[Measured]]) -> None:
    _, _, kept, _, _ = measured["single, adafactor"][0]
    found, training = sizes("single", model, "adafactor")
    told = {part.what: part.bytes or 0.0 for part in rank_memory({}, found, training)}
    assert kept * 4 == pytest.approx(told["optimizer"], rel=0.5)  # matrices here are twice, or eight times, as long
