"""What is done in the cases of the goldens, and the table of them; by public names only, so that it runs on any tree.

A case is run by all ranks of a world in which torch.distributed is initialized. What it gives are plain values: digests
of the bits that a rank holds, reports without times, and the class of an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import xffl
from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.golden.launch import TIMES, records_of
from tests.golden.table import CASES, Case
from tests.tasks import TaskConfig, TaskTrainer
from xffl.aggregation import Levels
from xffl.checkpoint import load_checkpoint, save_checkpoint
from xffl.distributed import DeviceParameters
from xffl.parallel import DistributedConfig, DistributedStrategy, StrategyConfig
from xffl.topology import Topology
from xffl.training import ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback

__all__ = ["by_size", "run_cases"]

Told = dict[str, Any]
DIGESTS = ("bits", "bits before")
"""What is told of the bits that each rank holds."""
ROUNDS = 3


class Half(nn.Linear):
    """A unit of FSDP of its own: it trains in another data type."""


class Net(nn.Module):
    """Tensors that no cell cuts evenly, buffers, a parameter that does not train, and on demand other data types."""

    def __init__(self, is_exact: bool, is_mixed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(7, 9)
        self.norm = nn.BatchNorm1d(9)
        self.deep = nn.Linear(9, 3, bias=False)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        if is_mixed:
            self.half = Half(5, 4, dtype=torch.bfloat16)
            self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        if is_exact:
            with torch.no_grad():
                for number, parameter in enumerate(self.parameters()):
                    parameter.copy_(draw(True, number, 7, parameter.shape))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.deep(torch.tanh(self.norm(self.wide(inputs))))  # type: ignore[no-any-return]


def draw(is_exact: bool, number: int, source: int, shape: torch.Size) -> torch.Tensor:
    """Return values that depend on the arguments alone; exact ones are eighths below 16 that differ in size."""
    if is_exact:
        index = torch.arange(shape.numel())
        return (((index * 37 + 11 * source + 5 * number) % 251 - 125) / 8).view(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + source)) * 0.1


def place_of(state: xffl.DistributedState) -> tuple[Topology, int]:
    """Return all cells, and this rank among their ranks, also where its world has those of its own cell only."""
    assert state.rank is not None, "the state of a world"
    place = getattr(state, "data_place", None)  # which older trees do not have
    return (state.topology, state.rank) if place is None else (place.topology, place.rank)


def build(state: xffl.DistributedState, *, exact: bool = False, mixed: bool = False) -> nn.Module:
    return xffl.shard(Net(exact, mixed), state, wrap=[nn.Linear, Half] if mixed else [nn.Linear])


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor by its bare name, sorted."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    yield from sorted((name.replace("module.", ""), tensor.detach()) for name, tensor in found.items())


def bits(*models: nn.Module) -> str:
    """Return a digest of all that this rank holds."""
    told = hashlib.sha256()
    for model in models:
        for name, tensor in tensors(model):
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            told.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
            told.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


@torch.no_grad()
def move(parameter: torch.Tensor, step: torch.Tensor) -> None:
    """Add a whole tensor to what may be a shard of one."""
    step = step.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        part = distribute_tensor(step, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().add_(part.to_local())
    else:
        parameter.add_(step)


@torch.no_grad()
def move_all(model: nn.Module, state: xffl.DistributedState, number: int, is_exact: bool) -> None:
    """Let a cell make steps of its own, and each rank have buffers of its own."""
    topology, rank = place_of(state)
    cell = topology.cell_of(rank)
    buffers = {name for name, _ in model.named_buffers()}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for index, name in enumerate(sorted(found)):
        tensor = found[name]
        if name in buffers and not tensor.is_floating_point():
            tensor.copy_(torch.full_like(tensor, (rank + number) % 2, dtype=tensor.dtype))
        elif name in buffers:
            tensor.fill_(float(rank + number))
        else:
            move(tensor, draw(is_exact, 10 * number + index, cell, tensor.shape))


def told_of(report: xffl.RoundReport | None) -> Told | None:
    """Return what stands in a report but for times."""
    if report is None:
        return None
    found = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name not in TIMES}
    return dict(json.loads(json.dumps({**found, "phases": sorted(report.phases)})))


def weight_of(state: xffl.DistributedState, weights: str | None) -> float | None:
    """Return a rank's own count: of its cell's first rank all of it, or of each rank an equal part."""
    if weights is None:
        return None
    topology, rank = place_of(state)
    cell = topology.cell_of(rank)
    first, size = sum(topology.sizes[:cell]), topology.sizes[cell]
    if weights == "equal parts":
        return (cell + 1.0) / size
    # 1, 3; 3, 4, 9; 9, 12, 16, 27: taken from the heaviest on, each is a quarter of the sum so far, which no step of a
    # mean rounds, and so no processor with fused steps rounds otherwise.
    last = topology.cells - 1
    whole = 3.0**last if cell == last else 3.0 ** (last - 1 - cell) * 4.0**cell
    return whole if rank == first else 0.0


def aggregator_of(
    model: nn.Module, state: xffl.DistributedState, options: Mapping[str, Any]
) -> xffl.Aggregator | Levels:
    given = dict(options)
    if given.get("policies") == "by layer":
        given["policies"] = {nn.BatchNorm1d: "local", "deep*": "first"}
    levels = given.pop("levels", None)
    return xffl.Aggregator(model, state, **given) if levels is None else Levels(model, state, levels, **given)


def rounds(
    state: xffl.DistributedState,
    folder: Path,
    *,
    exact: bool = False,
    mixed: bool = False,
    weights: str | None = "whole",
    count: int = ROUNDS,
    bad: int | None = None,
    late: bool = False,
    alpha: float | None = None,
    **options: Any,
) -> Told:
    """Move the cells by hand and average them, in the second round with a cell that is not finite where asked for."""
    model = build(state, exact=exact, mixed=mixed)
    aggregator = aggregator_of(model, state, options)
    topology, rank = place_of(state)
    cell = topology.cell_of(rank)
    told: Told = {"reports": [], "bits": []}
    for number in range(count):
        move_all(model, state, number, exact)
        if number == 1 and cell == bad:
            with torch.no_grad():
                dict(tensors(model))["wide.bias"].fill_(float("nan"))
        given: Told = {"weight": weight_of(state, weights), "steps": 1.0 + cell % 3}
        try:
            if late:
                pending = aggregator.aggregate_async(**given, alpha=alpha)
                move_all(model, state, 100 + number, exact)
                report = pending.merge()
            else:
                report = aggregator.aggregate(**given)
            told["reports"].append(told_of(report))
            if isinstance(aggregator, Levels):
                told["reports"][-1]["levels"] = [told_of(one) for one in aggregator.reports]
        except xffl.RoundError as error:
            told["reports"].append(type(error).__name__)
        told["bits"].append(bits(model))
    told |= {"rounds": aggregator.rounds, "next": aggregator.next_fragment, "torn": aggregator.is_torn}
    if aggregator.accountant is not None:
        told["accountant"] = json.loads(json.dumps(aggregator.accountant.state_dict(), default=str))
    aggregator.close()
    return told


def batch(number: int, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(False, number, source, torch.Size((4, 7))) * 10, draw(False, number, 50 + source, torch.Size((4, 3)))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], numbers: range, rank: int, cell: int) -> None:
    """Make local steps: of a real loss, or, with no optimizer but plain SGD by hand, of gradients that are exact."""
    for number in numbers:
        if getattr(model, "is_exact", False):
            for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)
                move(parameter.grad, draw(True, 10 * number + index, cell, parameter.shape))
        else:
            inputs, targets = batch(number, rank)
            nn.functional.mse_loss(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def loop(
    state: xffl.DistributedState,
    folder: Path,
    *,
    exact: bool = False,
    steps: tuple[int, ...] = (9, 9),
    momentum: float = 0.0,
    adam: bool = False,
    weighed: bool = False,
    save: str = "",
    load: str = "",
    at: int = 5,
    **options: Any,
) -> Told:
    """Train with rounds between; save a checkpoint on the way, or go on from one."""
    model = build(state, exact=exact)
    model.is_exact = exact  # type: ignore[assignment]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.5 if exact else 0.05, momentum=momentum)
    if adam:
        optimizer = torch.optim.AdamW(trained, lr=0.01)
    topology, rank = place_of(state)
    cell = topology.cell_of(rank)
    told: Told = {"reports": [], "bits": []}

    def note(report: xffl.RoundReport) -> None:
        told["reports"].append(told_of(report))
        told["bits"].append(bits(model))

    weight = (lambda: float(2**cell) if exact else 1.0 + rank) if weighed else None
    scaling = xffl.FederatedScaling(model, optimizer, state, weight=weight, on_round=note, **options)
    parts = {"model": model, "optimizer": optimizer}
    with scaling:
        first = 0
        if load:
            told["values"] = load_checkpoint(folder / load, parts, state, own={"scaling": scaling})
            first = at
        else:
            train(model, [optimizer], range(min(at, steps[cell % len(steps)])), rank, cell)
            first = at
            scaling.settle()
            told["bits before"] = bits(model)
        if save:
            save_checkpoint(folder / save, parts, state, values={"step": at}, own={"scaling": scaling})
        if save or load:
            told["reports"], told["bits"] = [], []
        train(model, [optimizer], range(first, steps[cell % len(steps)]), rank, cell)
    return {**told, "rounds": scaling.aggregator.rounds}


def moved_in(state: xffl.DistributedState, folder: Path, *, save: str = "", load: str = "") -> Told:
    """Save right after a round, or load that in whatever layout this is; then go on with rounds."""
    model = build(state)
    aggregator = xffl.Aggregator(model, state)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    parts = {"model": model, "optimizer": optimizer}
    topology, rank = place_of(state)
    cell = topology.cell_of(rank)
    train(model, [optimizer], range(2), rank, cell)
    if load:
        load_checkpoint(folder / load, parts, state)
    else:
        aggregator.aggregate()
        save_checkpoint(folder / save, parts, state, after_round=True)
    before = bits(model)
    train(model, [optimizer], range(2, 4), rank, cell)
    return {"bits before": before, "reports": [told_of(aggregator.aggregate())], "bits": [bits(model)]}


def strategy(
    state: xffl.DistributedState, folder: Path, *, name: str, mesh: Told, cells: tuple[int, ...], **options: Any
) -> Told:
    """Train a decoder with a strategy, and average it twice: a mesh may lie inside the cells."""
    parameters = DeviceParameters(**mesh) if mesh else None
    wrap = (Block,) if mesh.get("dp_shard") else ()
    distributed = DistributedConfig(strategy=name, device_parameters=parameters, federated=cells or None, wrap=wrap)
    way = DistributedStrategy.from_config(StrategyConfig(distributed=distributed))
    way.setup(state)
    torch.manual_seed(state.rank)
    model = way.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = way.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=5e-4))
    cell = way.state.topology.cell_of(state.rank) if cells else 0
    aggregator = xffl.Aggregator(model, way.state, **options) if cells else None
    told: Told = {"reports": [], "bits": [], "losses": []}
    for number in range(2):
        place = 20 * cell + 2 * number
        for step in range(2):
            tokens = (p.chunk(way.world.dp_size)[way.world.dp_rank] for p in text_batch(place + step, batch=24))
            parts = way.split_sequence(*tokens)
            loss = way.forward_backward(model, parts[0], target=parts[1])
            told["losses"].append(float(way.world.all_reduce(loss, "mean", "dp_cp")).hex())
            way.step(optimizer)
        if aggregator is not None:
            told["reports"].append(told_of(aggregator.aggregate(weight=1.0 + cell)))
        told["bits"].append(bits(model))
    if aggregator is not None:
        aggregator.close()
    way.teardown()
    return told


def trainer(
    state: xffl.DistributedState,
    folder: Path,
    *,
    cells: tuple[int, ...] = (),
    save: str = "",
    load: str = "",
    optimizer: str = "AdamW",
    steps: int = 14,
    export: str = "",
    **federation: Any,
) -> Told:
    """Train with the trainer; to load is to go on from the first checkpoint of a copy of the run."""
    run = folder / (f"again {load}" if load else f"run {save or export}")
    if state.rank == 0:
        shutil.rmtree(run, ignore_errors=True)
    if load and state.rank == 0:
        shutil.copytree(folder / f"run {load}", run)
        kept = sorted((run / "checkpoints").glob("step_*"), key=lambda one: int(one.name.removeprefix("step_")))
        for one in (*kept[1:], run / "checkpoints" / "final"):
            shutil.rmtree(one)
        (run / "checkpoints" / "latest").unlink()
    dist.barrier()
    strategy = "single" if cells and set(cells) == {1} else "fsdp"
    config = TaskConfig(
        experiment=ExperimentConfig(name="golden", output_dir=str(run)),
        distributed=DistributedConfig(strategy=strategy, federated=cells or None),
        training=TrainingParameters(
            epochs=4, max_steps=steps, batch_size=8, max_grad_norm=1.0, log_every=3, validate_every_steps=5
        ),
        federation=FederationConfig(**federation, export_to=str(folder / "made" / export) if export else None),
        callbacks=[CheckpointCallback(every_rounds=1, keep_last_n=9)] if cells else [],
        samples=150,
        optimizer=optimizer,
    )
    made = TaskTrainer(config)
    made.fit(state)
    told: Told = {"bits": [bits(made.model)]}
    return told if load else {**told, "records": records_of(run)}


def wrong(state: xffl.DistributedState, folder: Path, *, options: list[Told], loops: list[Told]) -> Told:
    """Ask for what cannot be meant; the class of each error, or what was made of it."""
    told: Told = {"errors": []}
    for given in (*options, *loops):
        model = build(state)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = "taken"
        try:
            if given in loops:
                xffl.FederatedScaling(model, optimizer, state, **given)
            else:
                aggregator_of(model, state, given).close()
        except Exception as error:  # noqa: BLE001 - whatever it is is what is told
            found = type(error).__name__
        told["errors"].append([json.dumps(given, sort_keys=True), found])
    return told


KINDS: dict[str, Callable[..., Told]] = {
    "rounds": rounds,
    "loop": loop,
    "moved": moved_in,
    "strategy": strategy,
    "trainer": trainer,
    "wrong": wrong,
}


def state_of(case: Case) -> xffl.DistributedState:
    state = xffl.DistributedState()
    cpu = torch.device("cpu")
    if case.kind in ("strategy", "trainer"):
        state.set_global("gloo", cpu, None, None, dist.get_rank(), dist.get_world_size())
        state.set_node(dist.get_rank(), dist.get_world_size(), 0, 1)
        return state
    state.set_global("gloo", cpu, "", 0, dist.get_rank(), dist.get_world_size())
    state.set_exec_device(cpu)
    state.set_federated_scaling(case.sizes, case.hsdp)
    return state


def run_case(case: Case, folder: Path) -> Told:
    """Run a case on this rank; an error is told by its class."""
    try:
        told = KINDS[case.kind](state_of(case), folder, **case.options)
    except Exception as error:  # noqa: BLE001 - the class is what is compared
        traceback.print_exc(file=sys.stderr)
        told = {"error": type(error).__name__}
    return told


def together(values: list[Any]) -> Any:
    """Return what all ranks have told as one: the digests of weights as a digest, the rest by rank where it differs."""
    first = values[0]
    if all(isinstance(one, dict) and one.keys() == first.keys() for one in values):
        columns = {key: [one[key] for one in values] for key in first}
        return {key: (digests_of if key in DIGESTS else together)(column) for key, column in columns.items()}
    if all(isinstance(one, list) and len(one) == len(first) for one in values):
        return [together(list(column)) for column in zip(*values, strict=True)]
    return first if all(json.dumps(one) == json.dumps(first) for one in values) else {"by rank": values}


def digests_of(values: list[Any]) -> Any:
    """Return one digest for those of all ranks, of each step."""
    if isinstance(values[0], str):
        return hashlib.sha256(" ".join(values).encode()).hexdigest()
    if len({len(one) for one in values}) > 1:
        return [digests_of(one) for one in values]
    return [digests_of(list(column)) for column in zip(*values, strict=True)]


def run_cases(names: list[str], folder: Path) -> Iterator[tuple[str, Told]]:
    """Run cases of one size of world, one after the other; collective over it."""
    for name in names:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, run_case(CASES[name], folder))
        yield name, together(told)


def by_size(names: list[str]) -> dict[int, list[str]]:
    """Return the names of cases by the size of their worlds."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(sum(CASES[name].sizes), []).append(name)
    return found
