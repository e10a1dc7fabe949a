"""DeepSpeed's ZeRO in a cell trains like one process, and its rounds are weighted means of the master weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import xffl
from tests.decoder import Decoder, loss_of, text_batch
from tests.ranks.test_strategies import RATE, STEPS, full_weights, joined, train_alone
from tests.ranks.test_strategy_steps import ACCUMULATIONS, BATCHES, train_large_batches
from tests.worlds import run_world
from xffl.aggregation.engine.decision.inconsistent import find_inconsistent
from xffl.aggregation.engine.decision.inconsistent_model import InconsistentModel
from xffl.distributed.parameters import DeviceParameters
from xffl.errors import ConfigError, StateError
from xffl.extras import install_command
from xffl.parallel import DistributedConfig, DistributedStrategy, StrategyConfig, TrainingConfig
from xffl.parallel.zero.deepspeed import ZeroModel
from xffl.parallel.zero.mark import find_masters, mark

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install deepspeed")

STAGES = (0, 1, 2, 3)


def configure(
    stage: int, *, offload: bool = False, federated: tuple[int, ...] | None = None, **training: Any
) -> StrategyConfig:
    return StrategyConfig(
        distributed=DistributedConfig(strategy="deepspeed", zero_stage=stage, offload=offload, federated=federated),
        training=TrainingConfig(**training),
    )


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by its name, whole, as the forward pass sees it."""
    module = model.module
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return full_weights(module)
    return full_weights(module)


def train(rank: int, world_size: int) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    told = []
    state = joined(rank, world_size)
    for stage in STAGES:
        strategy = DistributedStrategy.from_config(configure(stage, batch_size=24 // world_size))
        strategy.setup(state)
        torch.manual_seed(rank)  # only rank 0's weights count
        model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
        optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=RATE))
        world, losses = strategy.world, []
        for step in range(STEPS):
            tokens, targets = (part.chunk(world.dp_size)[world.dp_rank] for part in text_batch(step, batch=24))
            loss = strategy.forward_backward(model, tokens, target=targets)
            assert strategy.step(optimizer)
            losses.append(world.all_reduce(loss, "mean", "dp_cp").item())
        told.append((losses, whole_weights(model)))
        strategy.teardown()
    return told


def test_every_stage_trains_like_one_process() -> None:
    torch.manual_seed(0)
    losses, weights = train_alone(STEPS)
    for ranks in run_world(2, train):
        for found, held in ranks:
            assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-5
            assert set(held) == set(weights)
            assert max((held[key] - weights[key]).abs().max().item() for key in held) < 1e-5
    assert losses[-1] < losses[0] - 0.2


ROUNDS, EVERY = 2, 3
COUNTS = (3.0, 1.0)


def cell_batch(cell: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return text_batch(2 * step + cell, batch=8)


def average_alone(kind: type[torch.optim.Optimizer], **options: Any) -> list[dict[str, torch.Tensor]]:
    """Train two cells by hand, and average their weights after every third step; return the means."""
    models, means = [], []
    for _ in COUNTS:
        torch.manual_seed(0)
        models.append(Decoder(layers=2))
    optimizers = [kind(model.parameters(), **options) for model in models]
    for step in range(ROUNDS * EVERY):
        for cell, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            tokens, targets = cell_batch(cell, step)
            loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            with torch.no_grad():
                for parts in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(w * part.double() for w, part in zip(COUNTS, parts, strict=True)) / sum(COUNTS)
                    for part in parts:
                        part.copy_(mean)
            means.append(full_weights(models[0]))
    return means


def average(rank: int, world_size: int, cells: tuple[int, ...], stages: tuple[int, ...]) -> list[Any]:
    return [average_with(stage, rank, world_size, cells) for stage in stages]


def average_with(stage: int, rank: int, world_size: int, cells: tuple[int, ...]) -> Any:
    strategy = DistributedStrategy.from_config(configure(stage, federated=cells))
    strategy.setup(joined(rank, world_size))
    cell, world = strategy.state.federated_rank, strategy.world
    torch.manual_seed(rank)
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    means, reports, weight = [], [], COUNTS[cell] / cells[cell]

    def note(report: xffl.RoundReport) -> None:
        means.append(whole_weights(model))
        reports.append(report)

    every = EVERY if stage % 2 else 2 * ROUNDS * EVERY  # some rounds by hand, others between steps
    scaling = xffl.FederatedScaling(model, optimizer, strategy.state, every=every, weight=lambda: weight, on_round=note)
    with scaling:
        for step in range(ROUNDS * EVERY):
            tokens, targets = (part.chunk(world.dp_size)[world.dp_rank] for part in cell_batch(cell, step))
            strategy.forward_backward(model, tokens, target=targets)
            strategy.step(optimizer)
            if every != EVERY and step % EVERY == EVERY - 1:
                note(scaling.aggregator.aggregate(weight))
    strategy.teardown()
    return means[:ROUNDS], reports[0].weights


@pytest.mark.parametrize(("cells", "stages"), [((2, 2), (0, 3)), ((2, 1), (1, 2))])
def test_rounds_are_weighted_means(cells: tuple[int, ...], stages: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    expected = average_alone(torch.optim.AdamW, lr=1e-3)
    for ranks in run_world(sum(cells), average, cells, stages):
        for means, weights in ranks:
            assert tuple(weights) == COUNTS
            for held, mean in zip(means, expected, strict=True):
                assert max((held[key] - mean[key]).abs().max().item() for key in mean) < 1e-5


def train_windows(
    rank: int, world_size: int
) -> dict[tuple[int, int], tuple[dict[str, torch.Tensor], int, list[float]]]:
    told = {}
    state = joined(rank, world_size)
    for stage in STAGES:
        for accumulation in ACCUMULATIONS:
            clips_itself = accumulation == 3
            limit = 0.5 if clips_itself else None
            config = configure(stage, gradient_accumulation=accumulation, batch_size=2, max_grad_norm=limit)
            strategy = DistributedStrategy.from_config(config)
            strategy.setup(state)
            world = strategy.world
            torch.manual_seed(0)
            model = strategy.wrap_model(Decoder(layers=2))
            optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
            batches = [
                tuple(part.chunk(world.dp_size)[world.dp_rank] for part in text_batch(step, batch=4))
                for step in range(BATCHES)
            ]
            steps, norms = 0, []
            for x, y in strategy.micro_batches(batches, model):
                strategy.backward(loss_of(model(x), y))
                if not strategy.is_accumulating_gradients:
                    norms.append(9.0 if clips_itself else strategy.clip_grad_norm(model, 0.5).item())
                    steps += strategy.step(optimizer)
            assert strategy.effective_batch_size == 4 * accumulation
            told[stage, accumulation] = whole_weights(model), steps, norms
            strategy.teardown()
    return told


def test_windows_equal_large_clipped_batches() -> None:
    expected = {accumulation: train_large_batches(accumulation) for accumulation in ACCUMULATIONS}
    for told in run_world(2, train_windows):
        for (stage, accumulation), (weights, steps, norms) in told.items():
            dense = expected[accumulation]
            assert max((weights[key] - dense[key]).abs().max().item() for key in dense) < 1e-5, (stage, accumulation)
            assert steps == -(-BATCHES // accumulation)
            assert norms[0] > 0.5 and norms == pytest.approx(told[0, accumulation][2], rel=1e-4)


def overflow(rank: int, world_size: int) -> dict[int, Any]:
    """Let the loss overflow on the last rank alone, then go on."""
    from deepspeed.accelerator import get_accelerator

    told = {}
    state = joined(rank, world_size)
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed says no of most CPUs, where torch can
    for stage in (1, 2, 3):
        strategy = DistributedStrategy.from_config(configure(stage, mixed_precision="fp16", max_grad_norm=1e6))
        strategy.setup(state)
        torch.manual_seed(0)
        model = strategy.wrap_model(Decoder(layers=2))
        optimizer = strategy.wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
        steps = []
        for step in range(4):
            before = whole_weights(model)
            loss = loss_of(model(text_batch(step, batch=4)[0]), text_batch(step, batch=4)[1])
            strategy.backward(loss * torch.inf if step == 1 and rank == world_size - 1 else loss)
            norm = strategy.clip_grad_norm(model, 1e6).item()
            has_stepped = strategy.step(optimizer)
            after = whole_weights(model)
            has_moved = any(not torch.equal(after[key], before[key]) for key in after)
            steps.append((has_stepped, has_moved, norm, strategy.model_engine.optimizer.loss_scale))
        told[stage] = steps, after
        strategy.teardown()
    return told


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in (0, 2, 3):
        tokens, targets = text_batch(step, batch=4)
        loss_of(model(tokens), targets).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    dense = full_weights(model)
    for told in run_world(2, overflow):
        for steps, weights in told.values():
            assert [(stepped, moved) for stepped, moved, *_ in steps] == [
                (True, True),
                (False, False),
                *[(True, True)] * 2,
            ]
            assert [scale for *_, scale in steps] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
            assert steps[1][2] == torch.inf
            assert [norm for _, _, norm, _ in (steps[0], *steps[2:])] == pytest.approx(norms, rel=0.02)
            assert max((weights[key].float() - dense[key]).abs().max().item() for key in dense) < 0.01
            assert {held.dtype for held in weights.values()} == {torch.float16}


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the masters as they are now, whole, and leave what a round under way has taken of them."""
    masters = find_masters(model)
    assert masters is not None
    rows = [parameter.detach().to_local() for parameter in masters.view.parameters()]
    kept, steps = [row.clone() for row in rows], masters._steps
    masters.read()
    found = full_weights(masters.view)
    for row, before in zip(rows, kept, strict=True):
        row.copy_(before)
    masters._steps = steps
    return found


def average_bf16(rank: int, world_size: int) -> list[Any]:
    return [average_bf16_with(stage, rank, world_size) for stage in (1, 2, 3)]


def average_bf16_with(stage: int, rank: int, world_size: int) -> Any:
    strategy = DistributedStrategy.from_config(configure(stage, federated=(2, 2), mixed_precision="bf16"))
    strategy.setup(joined(rank, world_size))
    cell, world = strategy.state.federated_rank, strategy.world
    torch.manual_seed(0)
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    aggregator = xffl.Aggregator(model, strategy.state, overlap=True)

    def train_on(steps: range) -> None:
        for step in steps:
            tokens, targets = (part.chunk(2)[world.dp_rank] for part in cell_batch(cell, step))
            strategy.forward_backward(model, tokens, target=targets)
            strategy.step(optimizer)

    told = []
    for start in (0, 3):
        train_on(range(start, start + 3))
        before = masters_of(model)
        aggregator.aggregate(COUNTS[cell] / 2)
        told.append((before, masters_of(model), whole_weights(model)))
    train_on(range(6, 8))
    begun = masters_of(model)
    pending = aggregator.aggregate_async(COUNTS[cell] / 2, alpha=0.25)
    train_on(range(8, 10))
    local = masters_of(model)
    pending.merge()
    merged = begun, local, masters_of(model), whole_weights(model)
    aggregator.close()
    strategy.teardown()
    return told, merged


def test_rounds_average_master_weights() -> None:
    ranks = run_world(4, average_bf16)
    for one in (0, 1):
        for (rounds, late), (others, others_late) in zip(ranks[one], ranks[2 + one], strict=True):
            for (a, after, weights), (b, *_) in zip(rounds, others, strict=True):
                for key, mean in after.items():
                    exact = (COUNTS[0] * a[key].double() + COUNTS[1] * b[key].double()) / sum(COUNTS)
                    assert ((mean - exact).abs() <= 1e-6 * exact.abs() + 1e-9).all()
                    assert torch.equal(weights[key].flatten(), mean.bfloat16())
                assert any(not torch.equal(mean, mean.bfloat16().float()) for mean in after.values())
            begun, local, merged, weights = late
            for key, value in merged.items():
                exact = (COUNTS[0] * begun[key].double() + COUNTS[1] * others_late[0][key].double()) / sum(COUNTS)
                assert (value - (0.25 * local[key] + 0.75 * exact)).abs().max() < 1e-6
                assert torch.equal(weights[key].flatten(), value.bfloat16())
    for rank in (1, 3):
        for (rounds, _), (others, _) in zip(ranks[rank], ranks[rank - 1], strict=True):
            for (_, after, weights), (_, same, same_weights) in zip(rounds, others, strict=True):
                assert all(torch.equal(after[key], same[key]) for key in same)
                assert all(torch.equal(weights[key], same_weights[key]) for key in same)


def keep(rank: int, world_size: int, cases: list[tuple[str, int, bool]]) -> list[dict[str, torch.Tensor]]:
    """For each folder and stage train six steps, and save after three; or load that, and make the last three."""
    return [keep_one(rank, world_size, *case) for case in cases]


def keep_one(rank: int, world_size: int, folder: str, stage: int, saves: bool) -> dict[str, torch.Tensor]:
    strategy = DistributedStrategy.from_config(configure(stage))
    strategy.setup(joined(rank, world_size))
    world = strategy.world
    torch.manual_seed(rank + 5 * (not saves))
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3 if saves else 1.0))
    if not saves:
        InconsistentModel(model, "planted")
        given = (model, optimizer) if stage == 1 else ()  # else what it has wrapped
        assert strategy.load_checkpoint(folder, *given) == {"step": 3}
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert find_inconsistent(model) is None
    for step in range(0 if saves else 3, 6):
        tokens, targets = (part.chunk(world.dp_size)[world.dp_rank] for part in text_batch(step, batch=6))
        strategy.forward_backward(model, tokens, target=targets)
        strategy.step(optimizer)
        if saves and step == 2:
            strategy.save_checkpoint(folder, model, optimizer, step=3)
    weights = whole_weights(model)
    strategy.teardown()
    return weights


def test_a_checkpoint_is_read_by_other_stages_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    folder = {stage: str(tmp_path / str(stage)) for stage in STAGES}
    again = [(2, 2), (2, 1), (2, 3), (3, 3), (3, 2), (0, 0)]
    saved = (0, 2, 3)
    cases = [*((folder[stage], stage, True) for stage in saved), *((folder[old], new, False) for old, new in again)]
    for told in run_world(2, keep, cases):
        whole = dict(zip(saved, told, strict=False))
        for (old, new), weights in zip(again, told[len(saved) :], strict=True):
            for key, value in whole[old].items():
                if old == new:
                    assert torch.equal(weights[key], value), (old, key)
                else:
                    assert (weights[key] - value).abs().max() < 1e-5, (old, new, key)
    for told in run_world(3, keep, [(folder[2], 3, False), (folder[3], 2, False)]):
        for weights, old in zip(told, (2, 3), strict=True):
            assert max((weights[key] - whole[old][key]).abs().max().item() for key in weights) < 1e-5


class Tied(nn.Module):
    """Tied weights, parameters that do not train, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.own = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.own(self.norm(self.embedding(tokens)))) * self.frozen[0]


def average_tied(rank: int, world_size: int) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    told = []
    for stage in (2, 3):
        strategy = DistributedStrategy.from_config(configure(stage, federated=(2, 1)))
        strategy.setup(joined(rank, world_size))
        torch.manual_seed(rank)
        model = strategy.wrap_model(Tied(), loss=nn.functional.cross_entropy)
        optimizer = strategy.wrap_optimizer(
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        aggregator = xffl.Aggregator(model, strategy.state, policies={nn.LayerNorm: "local"})
        tokens = (torch.arange(6) + rank) % 7
        for _ in range(2 if rank < 2 else 0):  # the other cell makes its first step later, if any
            strategy.forward_backward(model, tokens, target=tokens.flip(0))
            strategy.step(optimizer)
            scheduler.step()
        before = {**whole_weights(model), **dict(model.module.named_buffers())}
        before = {name: tensor.clone() for name, tensor in before.items()}
        aggregator.aggregate()
        told.append((before, {**whole_weights(model), **dict(model.module.named_buffers())}))
        assert strategy.model_engine.optimizer.param_groups[0]["lr"] == (0.25 if rank < 2 else 1.0)
        # What a script may hold instead of the wrapped model counts as the same.
        assert {find_masters(one) for one in (model, model.module, strategy.model_engine)} == {find_masters(model)}
        strategy.teardown()
    return told


def test_tied_frozen_and_buffered_tensors() -> None:
    ranks = run_world(3, average_tied)
    for stage in (0, 1):
        befores = [told[stage][0] for told in ranks]
        for rank, told in enumerate(ranks):
            after = told[stage][1]
            assert set(after) == {
                *("embedding.weight", "norm.weight", "norm.bias", "own.weight", "own.bias", "frozen"),
                *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
            }
            for name, value in after.items():
                if name.startswith(("own", "frozen")):
                    mean = befores[rank][name]
                elif "num_batches" in name:  # a whole number: the first cell's
                    mean = befores[0][name]
                elif "running" in name:  # of all ranks of a cell first
                    mean = ((befores[0][name] + befores[1][name]) / 2 + befores[2][name]) / 2
                else:
                    mean = (befores[0][name] + befores[2][name]) / 2
                assert torch.allclose(value.float(), mean.float(), rtol=1e-6, atol=1e-6), name
        assert not torch.equal(befores[0]["embedding.weight"], befores[2]["embedding.weight"])


def offload(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    told = []
    for stage in (1, 2, 3):
        strategy = DistributedStrategy.from_config(configure(stage, offload=True, batch_size=12))
        strategy.setup(joined(rank, world_size))
        torch.manual_seed(0)
        model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
        optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=RATE))
        for step in range(5):
            tokens, targets = (part.chunk(2)[rank] for part in text_batch(step, batch=24))
            strategy.forward_backward(model, tokens, target=targets)
            strategy.clip_grad_norm(model, 1e6)
            strategy.step(optimizer)
        told.append(whole_weights(model))
        strategy.teardown()
    return told


def test_offloaded_optimizers_train_alike() -> None:
    _, dense = train_alone(5)
    for told in run_world(2, offload):
        for weights in told:
            assert max((weights[key] - dense[key]).abs().max().item() for key in dense) < 1e-5


def misuse(rank: int, world_size: int) -> None:
    variables = dict(os.environ)
    strategy = DistributedStrategy.from_config(configure(3))
    with pytest.raises(StateError, match="call wrap_model and wrap_optimizer first"):
        _ = strategy.model_engine  # type: ignore[attr-defined]
    strategy.setup(joined(rank, world_size))
    with pytest.raises(ConfigError, match="ranks were given different models|wrap_model"):
        strategy.wrap_model(nn.Linear(3 + rank, 2))
    with torch.device("meta"):
        bare = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="meta device"):
        strategy.wrap_model(bare)
    model = strategy.wrap_model(Tied())
    for use in (lambda: model(torch.arange(3)), lambda: xffl.Aggregator(model, strategy.state)):
        with pytest.raises(StateError, match="call optimizer = strategy.wrap_optimizer"):
            use()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    for wrong, given, told in (
        (model.module, optimizer, "give what wrap_model returned"),
        (model, torch.optim.SGD(Tied().parameters()), "holds a parameter that the model has not"),
        (model, torch.optim.SGD([model.module.embedding.weight]), "lacks parameter 'norm.weight'"),
        (model, None, "must be a torch.optim.Optimizer, got NoneType"),
    ):
        with pytest.raises(ConfigError, match=told):
            strategy.wrap_optimizer(wrong, given)
    wrapped = strategy.wrap_optimizer(model, optimizer)
    with pytest.raises(ConfigError, match="has an engine already"):
        strategy.wrap_optimizer(model, optimizer)
    with pytest.raises(ConfigError, match="wrap a model once"):
        strategy.wrap_model(model.module)
    with pytest.raises(StateError, match="what wrap_optimizer"):
        strategy.step(optimizer)
    with pytest.raises(StateError, match="strategy.save_checkpoint"):
        wrapped.state_dict()
    with pytest.raises(ConfigError, match="takes no closure"):
        wrapped.step(lambda: 0.0)
    masters = find_masters(model)
    mark(model.module, None)  # as if somebody else had made the engine
    with pytest.raises(ConfigError, match="parameter 'module.frozen' is cut by a DeepSpeed engine"):
        xffl.Aggregator(model, strategy.state)
    mark(model.module, masters)
    with pytest.raises(ConfigError, match="max_norm 0"):
        strategy.clip_grad_norm(model, 0)
    with (
        pytest.raises(ConfigError, match="a client cannot change the gradients of ZeRO"),
        xffl.FederatedScaling(model, wrapped, strategy.state, every=1, client="fedprox:mu=0.1"),
    ):
        pass
    kept, model.module.own = model.module.own, nn.LayerNorm(5)
    with pytest.raises(ConfigError, match=r"parameter 'own.weight' was replaced by another object"):
        xffl.Aggregator(model, strategy.state)
    model.module.own = kept
    strategy.teardown()
    assert dict(os.environ) == variables


def test_wrong_calls_tell_what_to_do() -> None:
    run_world(2, misuse)


@pytest.mark.parametrize(
    ("distributed", "training", "told"),
    [
        ({"device_parameters": DeviceParameters(dp_shard=2, tp=2)}, {}, "tp is 2; .* strategy='fsdp'"),
        ({"device_parameters": DeviceParameters(dp_replicate=2)}, {}, "dp_replicate is 2"),
        ({"device_parameters": DeviceParameters(dp_shard=2, cpu_offload=True)}, {}, "does not know cpu_offload"),
        ({"wrap": (Tied,)}, {}, "does not know wrap"),
        ({"zero_stage": 4}, {}, "zero_stage must be an integer from 0 to 3, got 4"),
        ({"zero_stage": 0}, {"mixed_precision": "bf16"}, "zero_stage 0 with 'bfloat16'"),
        ({"zero_stage": 0, "offload": True}, {}, "zero_stage is 0"),
        ({"strategy": "deepsped"}, {}, "did you mean 'deepspeed'"),
    ],
)
def test_what_cannot_be_meant_is_refused(distributed: Any, training: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DistributedStrategy.from_config({"distributed": {"strategy": "deepspeed", **distributed}, "training": training})


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("deepspeed"))):
        DistributedStrategy.from_config(configure(2))
    world: Any = SimpleNamespace(device=torch.device("cpu"), local_rank=0, get_group=lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(install_command("deepspeed"))):
        ZeroModel(nn.Linear(1, 1)).make_engine(None, {"fp16": {"enabled": False}}, world)


def test_the_package_is_imported_only_where_it_is_used() -> None:
    code = "import sys, xffl.parallel; xffl.parallel.DeepSpeedStrategy(); assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
