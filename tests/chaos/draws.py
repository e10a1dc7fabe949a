"""Draw rounds at random, and compare each with what numpy computes from the inputs of all cells.

    python -m tests.chaos.draws [--draws 300] [--seed 0] [--only NUMBER ...]

A draw is a layout of cells, options of an aggregator, and some rounds of cells that take random steps. The options are
a combiner, a server rule with a clip and a schedule, fragments, a codec, delayed rounds, secure sums, privacy, levels,
and cells that are left out: for weighing nothing, or for a value that is not finite.

The numpy computation (:class:`Oracle`) is in fp64, from the formulas of the papers, and shares no code with xffl.

Printed as JSON: a line for each draw that differs, or whose ranks end with models of different bits, or that fails;
then one with the counts. Draws whose options do not go together are refused, and count as such if the message is
one line. ``--only`` runs single draws again, and prints them. The exit code is 1 where a draw was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_algorithms import move, vector
from tests.ranks.test_round import digests, make_state
from tests.worlds import run_world
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.aggregation.privacy import Privacy
from xffl.errors import ConfigError

Array = npt.NDArray[np.float64]

LAYOUTS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    *(((1, 1), None), ((2, 2), None), ((2, 2), 1), ((1, 1, 1), None), ((3, 1), None), ((1, 2, 1), None)),
    *(((2, 1, 2), 1), ((1, 1, 1, 1), None)),
)
SHAPES = ((7, 5), (5,), (3, 5))  # of different sizes, so that only one deal of fragments is the smallest
ENDS = (35, 40)
CODECS = {"none": 2e-5, "fp16": 3e-3, "bf16": 3e-2, "int8": 3e-2}
"""Codecs, and by how much a value may differ after some rounds of steps of about 0.1."""
TOGETHER = 20
"""Draws for which ranks are started once."""


@dataclass(frozen=True)
class Draw:
    """What is run; all of it follows from the number."""

    number: int
    sizes: tuple[int, ...]
    hsdp: int | None
    rounds: int
    combine: dict[str, Any]
    server: dict[str, Any] | None
    options: dict[str, Any]  # further keywords of the aggregator
    delayed: bool = False
    alpha: float | None = None
    privacy_clip: float | None = None
    groups: tuple[int, ...] | None = None  # of the upper level
    every: int = 1  # rounds of the lower level between two of the upper one
    weights: tuple[tuple[float, ...], ...] | None = None  # of the cells, by round; None for cells that count alike
    steps: tuple[tuple[int, ...], ...] = ()  # local steps of the cells, by round
    broken: dict[int, int] = field(default_factory=dict)  # by round, the cell that has a value which is not finite

    @property
    def cells(self) -> int:
        return len(self.sizes)

    @property
    def tolerance(self) -> float:
        return CODECS[self.options["codec"]]


def draw(number: int) -> Draw:
    """Draw what is run."""
    dice = random.Random(number)
    sizes, hsdp = LAYOUTS[number // TOGETHER % len(LAYOUTS)]
    cells, rounds = len(sizes), dice.randint(2, 5)
    combine = dice.choice(
        [
            *({"name": "mean"}, {"name": "mean"}, {"name": "fednova"}, {"name": "norm_clipping", "clip": 0.5}),
            *({"name": "median"}, {"name": "trimmed_mean", "share": 0.34}, {"name": "krum", "faulty": 0}),
        ]
    )
    server = dice.choice([None, *([_server(dice)] * 3)])
    options: dict[str, Any] = {
        "bucket_bytes": dice.choice([24, 40, 4 * 2**20]),
        "form": dice.choice(["auto", "all_gather", "two_hop"]),
        "rails": dice.random() < 0.3,
        "fragments": dice.choice([1, 1, 2, 3]),
        "codec": dice.choice(["none", "none", *CODECS]),
        "nonfinite": dice.choice(["reject", "drop_cell"]),
        "secure": dice.random() < 0.15,
        "norms": dice.random() < 0.2,
    }
    more: dict[str, Any] = {}
    if dice.random() < 0.15:
        more |= {"privacy_clip": 0.5}
    if dice.random() < 0.3:
        more |= {"delayed": True, "alpha": dice.choice([None, 0.0, 0.5])}
    elif cells == 4 and dice.random() < 0.6:
        more |= {"groups": dice.choice([(2, 2), (1, 3)]), "every": dice.choice([1, 2])}
        options |= {"fragments": 1, "codec": "none", "secure": False, "norms": False}
        more.pop("privacy_clip", None)
        combine = dice.choice([combine, {"name": "mean"}])
        if combine["name"] not in ("mean", "norm_clipping"):
            combine = {"name": "mean"}
    if options["codec"] != "none":  # what it rounds is made larger by few rules and combiners only
        combine = {"name": "mean"}
        server = None if server is None else {**server, "name": "sgd"}
        if server is not None:
            server = {key: value for key, value in server.items() if key in ("name", "lr", "momentum", "schedule")}
    if "privacy_clip" not in more and dice.random() < 0.7:
        weights = [[float(dice.randint(1, 4)) for _ in sizes] for _ in range(rounds)]
        if cells > 3 and "groups" not in more and not options["secure"]:
            for row in weights:
                row[dice.randrange(cells)] *= dice.random() < 0.7
        more["weights"] = tuple(tuple(row) for row in weights)
    # A cell that is left out keeps steps that nobody can tell where delayed rounds add them to the mean.
    if options["nonfinite"] == "drop_cell" and not more.get("delayed") and cells > 3 and "groups" not in more:
        more["broken"] = {number: dice.randrange(cells) for number in range(rounds) if dice.random() < 0.3}
        if more["broken"] and "weights" in more:
            more["weights"] = tuple(tuple(max(weight, 1.0) for weight in row) for row in more["weights"])
    steps = tuple(tuple(dice.randint(1, 5) for _ in sizes) for _ in range(rounds))
    return Draw(number, sizes, hsdp, rounds, combine, server, options, steps=steps, **more)


def _server(dice: random.Random) -> dict[str, Any]:
    """Draw a server rule; its ``eps`` is large enough that fp32 and fp64 stay close."""
    decay = {"weight_decay": dice.choice([0.0, 0.01])}
    server = dice.choice(
        [
            {"name": "sgd", "lr": 0.7, "momentum": dice.choice([0.0, 0.9]), **decay},
            {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
            {"name": "sgd", "lr": 0.7, "momentum": 0.9, "dampening": 0.3},
            {"name": "adam", "lr": 0.03, "eps": 1e-3, "amsgrad": dice.random() < 0.5, **decay},
            {"name": "adamw", "lr": 0.03, "eps": 1e-3, **decay},
            {"name": "adagrad", "lr": 0.03, "eps": 1e-3, "lr_decay": 0.1},
            {"name": "fedadam", "lr": 0.03, "tau": 1e-2, "is_bias_corrected": dice.random() < 0.5},
            {"name": "fedyogi", "lr": 0.03, "tau": 1e-2},
            {"name": "fedadagrad", "lr": 0.03, "tau": 1e-2},
        ]
    )
    schedules = ["cosine:T_max=6", "step:step_size=2,gamma=0.5", "linear:total_iters=3", "warmup:steps=3"]
    schedule = dice.choice([None, None, *schedules, "exponential:gamma=0.8"])
    if schedule is not None:
        server["schedule"] = schedule
    if dice.random() < 0.4:
        server["clip"] = dice.choice([0.2, 99.0])
    return server


def rate_of(server: dict[str, Any], step: int) -> float:
    """Return the learning rate of a step."""
    lr = float(server["lr"])
    name = server.get("schedule", "none").partition(":")[0]
    return {
        "none": lr,
        "cosine": lr * (1.0 + math.cos(math.pi * step / 6)) / 2.0,
        "step": lr * 0.5 ** (step // 2),
        "linear": lr * (1 / 3 + (2 / 3) * min(step, 3) / 3),
        "warmup": lr * min(1.0, (step + 1) / 3),
        "exponential": lr * 0.8**step,
    }[name]


class Server:
    """A server rule in numpy, with its state of one fragment."""

    def __init__(self, options: dict[str, Any], numel: int) -> None:
        self.options = options
        self.steps = 0
        start = options["tau"] ** 2 if "tau" in options else 0.0
        self.first: Array = np.zeros(numel)
        self.second: Array = np.full(numel, start)
        self.largest: Array = np.zeros(numel)

    def step(self, values: Array, gradient: Array) -> Array:
        """Return the next global values."""
        options, name, lr = self.options, self.options["name"], rate_of(self.options, self.steps)
        self.steps += 1
        norm = float(np.linalg.norm(gradient))
        if "clip" in options and norm > options["clip"]:
            gradient = gradient * (options["clip"] / norm)
        decay = options.get("weight_decay", 0.0)
        if name == "adamw":
            values = values * (1.0 - lr * decay)
        else:
            gradient = gradient + decay * values
        if name == "sgd":
            return values - lr * self._momentum(gradient)
        if name in ("adagrad", "fedadagrad"):
            self.second = self.second + gradient**2
        elif name == "fedyogi":
            self.second = self.second - 0.01 * gradient**2 * np.sign(self.second - gradient**2)
        else:
            beta2 = 0.99 if name == "fedadam" else 0.999
            self.second = beta2 * self.second + (1.0 - beta2) * gradient**2
        beta1 = 0.0 if name == "fedadagrad" else 0.9
        self.first = beta1 * self.first + (1.0 - beta1) * gradient
        if name == "adagrad":
            lr /= 1.0 + (self.steps - 1) * options["lr_decay"]
            return values - lr * gradient / (np.sqrt(self.second) + options["eps"])
        if "tau" in options:
            if options.get("is_bias_corrected"):
                lr *= math.sqrt(1.0 - 0.99**self.steps) / (1.0 - 0.9**self.steps)
            return values - lr * self.first / (np.sqrt(self.second) + options["tau"])
        self.largest = np.maximum(self.largest, self.second)
        second = self.largest if options.get("amsgrad") else self.second
        root = np.sqrt(second / (1.0 - 0.999**self.steps))
        return values - lr * self.first / (1.0 - 0.9**self.steps) / (root + options["eps"])

    def _momentum(self, gradient: Array) -> Array:
        momentum = self.options.get("momentum", 0.0)
        if not momentum:
            return gradient
        inflow = 1.0 if self.steps == 1 else 1.0 - self.options.get("dampening", 0.0)
        self.first = momentum * self.first + inflow * gradient
        return gradient + momentum * self.first if self.options.get("nesterov") else self.first


def combined(draw: Draw, start: Array, values: list[Array], weights: list[float], steps: list[int]) -> Array:
    """Return what a combiner makes of the values of the cells that contribute."""
    kept = [cell for cell, weight in enumerate(weights) if weight > 0.0 and np.isfinite(values[cell]).all()]
    updates = np.stack([values[cell] - start for cell in kept])
    shares = np.array([weights[cell] for cell in kept]) / sum(weights[cell] for cell in kept)
    norms = np.linalg.norm(updates, axis=1)
    if draw.privacy_clip is not None:
        updates = updates * np.minimum(1.0, draw.privacy_clip / norms)[:, None]
    name = draw.combine["name"]
    if name == "fednova":
        counts = np.array([float(steps[cell]) for cell in kept])
        shares = shares * (shares @ counts) / counts
    elif name == "norm_clipping":
        shares = shares * np.minimum(1.0, draw.combine["clip"] / norms)
    elif name == "median":
        return start + np.median(updates, axis=0)
    elif name == "trimmed_mean":
        cut = int(draw.combine["share"] * len(kept))
        return start + np.sort(updates, axis=0)[cut : len(kept) - cut].mean(axis=0)
    elif name == "krum":
        squares = ((updates[:, None] - updates[None]) ** 2).sum(axis=2)
        scores = np.sort(squares, axis=1)[:, 1 : len(kept) - 1].sum(axis=1)
        return start + updates[int(scores.argmin())]
    return start + shares @ updates


def fragments_of(count: int) -> list[list[int]]:
    """Return the parameters of each fragment: the largest first, each to the smallest fragment."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [math.prod(shape) for shape in SHAPES]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        min(parts, key=lambda part: sum(sizes[one] for one in part)).append(index)
    return parts


class Oracle:
    """The models of all cells, and the global model."""

    def __init__(self, draw: Draw, start: Array) -> None:
        self.draw = draw
        places = np.split(np.arange(len(start)), ENDS)
        self.places = [
            np.concatenate([places[index] for index in sorted(part)])
            for part in fragments_of(draw.options["fragments"])
        ]
        self.models = [start.copy() for _ in draw.sizes]
        self.counts = [0.0] * draw.cells
        groups = draw.groups or (draw.cells,)
        firsts = np.cumsum((0, *groups))
        self.units = [list(range(first, first + size)) for first, size in zip(firsts, groups, strict=False)]
        # The last agreed model and the servers, of each unit of the lowest level and, behind them, of the upper one.
        self.agreed = [start.copy() for _ in range(len(groups) + 1)]
        self.servers = [
            [None if draw.server is None else Server(draw.server, len(part)) for part in self.places]
            for _ in range(len(groups) + 1)
        ]

    def round(self, number: int, models: list[Array]) -> list[Array]:
        """Return what each cell gets in place of its own model, after round ``number``, from 0."""
        part = number % self.draw.options["fragments"]
        weights = list(self.draw.weights[number]) if self.draw.weights else [1.0] * self.draw.cells
        steps = list(self.draw.steps[number])
        results = [model.copy() for model in models]
        for unit, cells in enumerate(self.units):
            mean = self._agree(unit, part, [models[cell] for cell in cells], *_of(cells, weights, steps))
            for cell in cells:
                results[cell][self.places[part]] = mean
                self.counts[cell] += weights[cell]
        if self.draw.groups and (number + 1) % self.draw.every == 0:
            above = len(self.units)
            units = [sum(self.counts[cell] for cell in cells) for cells in self.units]
            heads = [results[cells[0]] for cells in self.units]
            mean = self._agree(above, part, heads, units, [1] * len(units))
            for cell in range(self.draw.cells):
                results[cell][self.places[part]] = mean
            for unit in range(len(self.units)):
                self.agreed[unit] = results[0].copy()
            self.counts = [0.0] * self.draw.cells
        return results

    def _agree(self, unit: int, part: int, models: list[Array], weights: list[float], steps: list[int]) -> Array:
        places, server = self.places[part], self.servers[unit][part]
        start = self.agreed[unit][places]
        mean = combined(self.draw, start, [model[places] for model in models], weights, steps)
        if server is not None:
            mean = server.step(start, start - mean)
        self.agreed[unit][places] = mean
        return mean


def _of(cells: list[int], weights: list[float], steps: list[int]) -> tuple[list[float], list[int]]:
    return [weights[cell] for cell in cells], [steps[cell] for cell in cells]


class Net(nn.Module):
    """Parameters of the sizes of :data:`SHAPES`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7, bias=False)
        self.middle = nn.Linear(5, 3, bias=False)
        self.short = nn.Parameter(torch.randn(5))

    def weights(self) -> list[nn.Parameter]:
        return [self.wide.weight, self.short, self.middle.weight]


def _vector(model: nn.Module) -> Array:
    """Return all values, in the order of :data:`SHAPES`."""
    short, wide, middle = np.split(vector(model), [5, 40])
    return np.concatenate([wide, short, middle])


@torch.no_grad()
def _step(model: nn.Module, change: Array) -> None:
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(bare, Net)
    for parameter, values in zip(bare.weights(), np.split(change, ENDS), strict=True):
        move(parameter, values)


def run_draw(draw: Draw, rank: int) -> dict[str, Any]:
    """Make the rounds of a draw as a rank; return how far its cell is from the oracle, at most."""
    state = make_state(rank, draw.sizes, draw.hsdp)
    cell = state.topology.cell_of(rank)
    torch.manual_seed(draw.number)
    model = xffl.shard(Net(), state, wrap=[nn.Linear])
    aggregator = _aggregator(draw, model, state)
    oracle = Oracle(draw, _vector(model))
    worst = 0.0
    for number in range(draw.rounds):
        generator = np.random.default_rng((draw.number, number))
        before, behind = generator.normal(size=(2, draw.cells, sum(map(math.prod, SHAPES)))) * 0.1
        if number in draw.broken:
            before[draw.broken[number], number] = np.nan
        _step(model, before[cell])
        models = [own + change for own, change in zip(oracle.models, before, strict=True)]
        results = oracle.round(number, models)
        weight = None if draw.weights is None else draw.weights[number][cell] / draw.sizes[cell]
        if draw.delayed:
            pending = aggregator.aggregate_async(weight, alpha=draw.alpha, steps=draw.steps[number][cell])
            _step(model, behind[cell])
            pending.merge()
            moved = oracle.places[number % draw.options["fragments"]]
            for own, result, change in zip(models, results, behind, strict=True):
                after = own + change
                blended = result + change if draw.alpha is None else draw.alpha * after + (1 - draw.alpha) * result
                after[moved] = blended[moved]
                result[:] = after
        else:
            aggregator.aggregate(weight, steps=float(draw.steps[number][cell]))
        oracle.models = results
        here, there = _vector(model), oracle.models[cell]
        if not np.array_equal(np.isfinite(here), np.isfinite(there)):
            worst = math.inf
        worst = max(worst, float(np.nanmax(np.abs(here - there))))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (cell, digests(model)))
    alike = draw.cells == 1 or all(bits == gathered[0][1] for _, bits in gathered)
    aggregator.close()
    is_same = not draw.delayed and draw.options["fragments"] == 1 and draw.rounds % draw.every == 0
    return {"error": worst, "unequal": is_same and not alike}


def _aggregator(draw: Draw, model: nn.Module, state: xffl.DistributedState) -> Any:
    options = {**draw.options, "combine": draw.combine, "server": draw.server}
    if draw.privacy_clip is not None:
        options["privacy"] = Privacy(clip=draw.privacy_clip, noise=0.0)
    if draw.groups is None:
        return xffl.Aggregator(model, state, overlap=draw.delayed, **options)
    for name in ("fragments", "codec", "secure", "norms", "privacy"):
        options.pop(name, None)
    return Levels(model, state, [Level(), Level(groups=draw.groups, every=draw.every)], **options)


def run_draws(rank: int, world_size: int, numbers: list[int]) -> list[dict[str, Any]]:
    """Run draws of one layout as a rank."""
    results: list[dict[str, Any]] = []
    for number in numbers:
        try:
            results.append(run_draw(draw(number), rank))
        except ConfigError as refused:
            results.append({"refused": str(refused)})
    return results


def judge(draw: Draw, results: list[dict[str, Any]]) -> str:
    """Return how a draw has ended, from what its ranks tell."""
    refused = [result.get("refused") for result in results]
    if any(refused):
        return "refused" if len({*refused}) == 1 and "\n" not in str(refused[0]) else "refused otherwise on some ranks"
    if any(result["unequal"] for result in results):
        return "unequal"
    return "equal" if max(result["error"] for result in results) <= draw.tolerance else "different"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--only", type=int, nargs="+")
    args = parser.parse_args()
    numbers = args.only or range(args.seed, args.seed + args.draws)
    worlds: dict[int, list[int]] = {}
    for number in numbers:
        worlds.setdefault(number if args.only else number // TOGETHER, []).append(number)
    counts: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    for together in worlds.values():
        try:
            ranks = run_world(sum(draw(together[0]).sizes), run_draws, together)
        except AssertionError as failed:
            counts["failed"] += len(together)
            print(json.dumps({"draws": together, "failed": str(failed)[-1500:]}), flush=True)
            continue
        for number, *results in zip(together, *ranks, strict=True):
            drawn = draw(number)
            verdict = judge(drawn, results)
            counts[verdict] += 1
            messages[str(results[0].get("refused", ""))] += 1
            if args.only or verdict not in ("equal", "refused"):
                line = {"verdict": verdict, "results": results, **asdict(drawn)}
                print(json.dumps(line), flush=True)
    refusals = sorted(message for message in messages if message)
    print(json.dumps({"draws": len(numbers), **counts, "refusals": refusals}), flush=True)
    return int(sum(counts.values()) != counts["equal"] + counts["refused"])


if __name__ == "__main__":
    sys.exit(main())
