"""What a strategy does beside the plain step: windows of micro-batches, float16, gradient compression, meta weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import xffl
from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.ranks.test_strategies import configure, full_weights, joined
from tests.worlds import run_world
from xffl.errors import ConfigError, StateError
from xffl.parallel import DDPConfig, DistributedStrategy

ACCUMULATIONS = (1, 3, 4)
BATCHES = 10
"""So that the last window is incomplete for 3 and for 4."""

MESHES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {"dp_replicate": 2}, {}),
    "fsdp": (2, "fsdp", {"dp_shard": 2}, {"wrap": (Block,)}),
    "hsdp": (4, "hsdp", {"dp_shard": 2, "dp_replicate": 2}, {"wrap": (Block,)}),
}


def train_large_batches(accumulation: int) -> dict[str, torch.Tensor]:
    """Train by hand with the batches of each window as one."""
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [text_batch(step, batch=4) for step in range(BATCHES)]
    for start in range(0, BATCHES, accumulation):
        tokens, targets = (torch.cat(parts) for parts in zip(*batches[start : start + accumulation], strict=True))
        loss_of(model(tokens), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def train_windows(rank: int, world_size: int, name: str) -> list[tuple[dict[str, torch.Tensor], int, int]]:
    _, strategy_name, mesh, options = MESHES[name]
    state = joined(rank, world_size)
    found = []
    for accumulation in ACCUMULATIONS:
        config = configure(strategy_name, mesh, options, gradient_accumulation=accumulation, batch_size=4)
        strategy = DistributedStrategy.from_config(config)
        strategy.setup(state)
        world = strategy.world
        torch.manual_seed(0)
        model = strategy.wrap_model(Decoder(layers=2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = [
            {"x": x.chunk(world.dp_size)[world.dp_rank], "y": y.chunk(world.dp_size)[world.dp_rank]}
            for x, y in (text_batch(step, batch=4) for step in range(BATCHES))
        ]
        steps = 0
        for batch in strategy.micro_batches(batches, model):
            strategy.backward(loss_of(model(batch["x"]), batch["y"]))
            if not strategy.is_accumulating_gradients:
                strategy.clip_grad_norm(model, 0.5)
                steps += strategy.step(optimizer)
        found.append((full_weights(model), steps, strategy.effective_batch_size))
        strategy.teardown()
    return found


@pytest.mark.parametrize("name", MESHES)
def test_windows_equal_large_batches(name: str) -> None:
    expected = [train_large_batches(accumulation) for accumulation in ACCUMULATIONS]
    size = MESHES[name][0]
    for found in run_world(size, train_windows, name):
        for accumulation, (weights, steps, batch), dense in zip(ACCUMULATIONS, found, expected, strict=True):
            assert max((weights[key] - dense[key]).abs().max().item() for key in dense) < 1e-5
            assert steps == -(-BATCHES // accumulation)
            assert batch == 4 * accumulation * size


def overflow(rank: int, world_size: int, name: str) -> list[Any]:
    """Let a gradient overflow on the last rank alone, then go on."""
    _, strategy_name, mesh, options = MESHES[name]
    strategy = DistributedStrategy.from_config(configure(strategy_name, mesh, options, mixed_precision="fp16"))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(0)
    model = strategy.wrap_model(Decoder(layers=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    told: list[Any] = []
    for step in range(4):
        tokens, targets = text_batch(step, batch=4)
        before = full_weights(model)
        with strategy.train_context():
            loss = loss_of(model(tokens), targets)
        strategy.backward(loss)
        last = [parameter for parameter in model.parameters() if parameter.grad is not None][-1]
        assert last.grad is not None
        local = last.grad.to_local() if hasattr(last.grad, "to_local") else last.grad
        if step == 1 and rank == world_size - 1:
            local.view(-1)[0] = torch.inf
        norm = strategy.clip_grad_norm(model, 1e6) if step % 2 else None
        has_stepped = strategy.step(optimizer)
        after = full_weights(model)
        moved = max((after[key] - before[key]).abs().max().item() for key in after)
        scale = strategy._parts({"model": model}, {})["loss_scale"].scale
        told.append((has_stepped, moved > 0, None if norm is None else norm.item(), scale))
    told.append(full_weights(model))
    strategy.teardown()
    return told


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(name: str) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (0, 2, 3):
        tokens, targets = text_batch(step, batch=4)
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    dense = full_weights(model)
    for *steps, weights in run_world(MESHES[name][0], overflow, name):
        assert [has_stepped for has_stepped, *_ in steps] == [True, False, True, True]
        assert [has_moved for _, has_moved, *_ in steps] == [True, False, True, True]
        assert steps[1][2] == torch.inf and 0 < steps[3][2] < 1e3
        scales = [scale for *_, scale in steps]
        assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        # float16 has 11 bits, so that steps of 0.5 times the gradient differ a little from float32's.
        assert max((weights[key] - dense[key]).abs().max().item() for key in dense) < 0.01


def compressed(rank: int, world_size: int, hook: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    options = {"ddp": DDPConfig(communication_hook=hook, powersgd_start=2)}
    strategy = DistributedStrategy.from_config(configure("ddp", {"dp_replicate": 2}, options))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(0)
    model = strategy.wrap_model(Decoder(layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients: list[torch.Tensor] = []
    for step in range(12):
        tokens, targets = (part.chunk(2)[rank] for part in text_batch(step % 3, batch=8))
        loss = loss_of(model(tokens), targets)
        strategy.backward(loss)
        if step in (0, 11):
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        strategy.step(optimizer)
    strategy.teardown()
    return gradients, full_weights(model), loss.item()


@pytest.mark.parametrize(("hook", "error"), [("none", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 1e-6)])
def test_communication_hooks(hook: str, error: float) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    tokens, targets = text_batch(0, batch=8)
    loss_of(model(tokens), targets).backward()
    dense = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    first, second = run_world(2, compressed, hook)
    # PowerSGD's first steps are whole.
    assert (first[0][0] - dense).norm() <= error * dense.norm()
    if hook in ("fp16", "bf16"):
        assert (first[0][0] - dense).norm() > 0
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])
    assert first[2] < 4.0
    if hook == "powersgd":  # of rank 1 from then on: a matrix has one singular value
        sizes = [p.numel() for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        head = torch.split(first[0][1], sizes)[names.index("lm_head.weight")].view(256, 32)
        values = torch.linalg.svdvals(head)
        assert values[1] < 1e-3 * values[0]


def leave_windows(rank: int, world_size: int, name: str) -> None:
    """Leave loops in the middle of a window, by all ways, and train on: as if nothing had been."""
    _, strategy_name, mesh, options = MESHES[name]
    strategy = DistributedStrategy.from_config(configure(strategy_name, mesh, options, gradient_accumulation=4))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(0)
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [text_batch(rank, batch=2)] * 6

    def norm_of_a_step() -> float:
        optimizer.zero_grad()
        strategy.forward_backward(model, batches[0][0], target=batches[0][1])
        norm: float = strategy.clip_grad_norm(model, 1e9).item()
        return norm

    before = norm_of_a_step()
    optimizer.zero_grad()
    for tokens, targets in strategy.micro_batches(batches, model):  # windows of 4 and 2
        strategy.forward_backward(model, tokens, target=targets)
        if not strategy.is_accumulating_gradients:
            assert abs(strategy.clip_grad_norm(model, 1e9).item() - before) < 1e-4
            optimizer.zero_grad()
    assert norm_of_a_step() == pytest.approx(before, rel=1e-5)
    for _ in strategy.micro_batches(batches, model):
        assert strategy.is_accumulating_gradients
        break
    assert not strategy.is_accumulating_gradients
    assert norm_of_a_step() == pytest.approx(before, rel=1e-5)
    generator = strategy.micro_batches(batches, model)
    next(generator)
    with pytest.raises(StateError, match=r"middle of a window.*close\(\)"):
        strategy.step(optimizer)
    generator.close()
    assert norm_of_a_step() == pytest.approx(before, rel=1e-5)
    assert strategy.step(optimizer)
    weights = full_weights(model)
    assert torch.equal(*strategy.world.all_gather(weights["norm.weight"])[[0, -1]])
    strategy.teardown()


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_loops_that_are_left_early(name: str) -> None:
    run_world(2, leave_windows, name)


def test_two_optimizers_in_float16_step_together() -> None:
    with DistributedStrategy.from_config(configure("single", {}, {}, mixed_precision="fp16")) as strategy:
        one, other = (strategy.wrap_model(nn.Linear(3, 1, bias=False)) for _ in range(2))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (one, other)]
        x = torch.tensor([[1.0, 2.0, 3.0]])
        for poison, steps in ((False, True), (True, False), (False, True)):
            before = [layer.weight.detach().clone() for layer in (one, other)]
            strategy.backward((one(x) + other(x)).sum())
            if poison:
                one.weight.grad[0, 0] = torch.inf
            assert (strategy.clip_grad_norm(one, 1e9).isfinite().item()) == steps
            assert strategy.step(*optimizers) == steps
            for layer, was in zip((one, other), before, strict=True):
                assert torch.allclose(was - layer.weight, x * steps, atol=1e-6)
        strategy.backward((one(x) + other(x)).sum())
        strategy.step(optimizers[0])
        with pytest.raises(StateError, match="give all optimizers to one call of step"):
            strategy.step(optimizers[1])
    with strategy:  # a world of its own has a scale of its own
        assert strategy._parts({"one": one}, {})["loss_scale"].scale == 2.0**16


class Tied(nn.Module):
    """Two modules with one weight, attention that initializes its child, and a module that only has children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 6, bias=False)
        self.block = Scaled()
        self.head.weight = self.embed.weight


class Scaled(nn.Module):
    """Initializes its children after their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)


def build_tied(rank: int, world_size: int, strategy_name: str, mesh: dict[str, Any]) -> dict[str, torch.Tensor]:
    strategy = DistributedStrategy.from_config(configure(strategy_name, mesh, {}))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(rank)
    with torch.device("meta"):
        bare = Tied()
    model = strategy.wrap_model(bare)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert inner.head.weight is inner.embed.weight
    weights = full_weights(model)
    with torch.device("meta"):
        bare = Tied()
    # What init_weights leaves is initialized as modules do it themselves.
    left = full_weights(strategy.wrap_model(bare, init_weights=lambda module: None))
    assert left.keys() == weights.keys() and all(bool(values.isfinite().all()) for values in left.values())
    with torch.device("meta"):
        bare_block = Scaled()
    with pytest.raises(ConfigError, match=r"Scaled.reset_parameters initializes all of the model at once"):
        strategy.wrap_model(bare_block)
    strategy.teardown()
    return weights


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_ties_and_modules_that_initialize_their_children(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    eager = full_weights(Tied())
    mesh = {"ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}}.get(name, {})
    for made in run_world(ranks, build_tied, name, mesh):
        assert set(made) == set(eager)
        for key, values in eager.items():
            assert torch.equal(made[key], values), key


def uneven(rank: int, world_size: int) -> None:
    """FSDP in cells of one and of two ranks, in bfloat16, and a reduction in bfloat16."""
    options = {"federated": (1, 2), "wrap": (Block,)}
    config = configure("fsdp", {"dp_shard": "auto"}, options, mixed_precision="bf16")
    strategy = DistributedStrategy.from_config(config)
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(0)
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    loss = strategy.forward_backward(model, text_batch(0)[0], target=text_batch(0)[1])
    assert 5.5 < loss.item() < 6.2
    xffl.Aggregator(model, strategy.state).aggregate(1.0)
    strategy.teardown()
    narrow = configure("fsdp", {"dp_shard": 3, "reduce_dtype": "bfloat16"}, {})
    strategy = DistributedStrategy.from_config(narrow)
    strategy.setup(joined(rank, world_size))
    model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
    strategy.forward_backward(model, text_batch(rank)[0], target=text_batch(rank)[1])
    gradient = model.norm.weight.grad.full_tensor()
    assert torch.equal(gradient.bfloat16().float(), gradient)
    strategy.teardown()


def test_cells_of_one_rank_and_narrow_sums() -> None:
    run_world(3, uneven)


def two_models(rank: int, world_size: int) -> None:
    """Each model has the loss that it was wrapped with."""
    strategy = DistributedStrategy.from_config(configure("single", {}, {}))
    strategy.setup(joined(rank, world_size))
    losses = {factor: lambda output, target, factor=factor: factor * (output - target).sum() for factor in (1.0, 3.0)}
    models = {factor: strategy.wrap_model(nn.Linear(2, 1), loss=loss) for factor, loss in losses.items()}
    silent = strategy.wrap_model(nn.Linear(2, 1))
    for factor, model in models.items():
        strategy.forward_backward(model, torch.ones(1, 2), target=torch.zeros(1, 1))
        assert model.bias.grad.tolist() == [factor]
    with pytest.raises(StateError, match="needs a loss"):
        strategy.forward_backward(silent, torch.ones(1, 2), target=torch.zeros(1, 1))


def test_each_model_has_its_own_loss() -> None:
    run_world(1, two_models)


class Custom(nn.Module):
    """A module whose parameters nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def build_on_meta(
    rank: int, world_size: int, name: str
) -> tuple[dict[str, torch.Tensor], bool, dict[str, torch.Tensor]]:
    _, strategy_name, mesh, options = MESHES[name]
    strategy = DistributedStrategy.from_config(configure(strategy_name, mesh, options))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(rank)
    with torch.device("meta"):
        bare = Decoder(layers=2)
    model = strategy.wrap_model(bare)
    made = full_weights(model)
    own = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(rank).get_state())

    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.fill_(float(parameter.numel()))

    with torch.device("meta"):
        bare = Decoder(layers=2)
    counted = full_weights(strategy.wrap_model(bare, init_weights=ones))
    with torch.device("meta"):
        custom = Custom()
    with pytest.raises(ConfigError, match=r"module 'model' \(Custom\) .* init_weights"):
        strategy.wrap_model(custom)
    mixed = Decoder(layers=2)
    mixed.norm = nn.RMSNorm(32, device="meta")
    with pytest.raises(ConfigError, match=r"tensor 'norm.weight' is on the meta device and .* is not"):
        strategy.wrap_model(mixed)
    strategy.teardown()
    return made, own, counted


@pytest.mark.parametrize("name", MESHES)
def test_weights_made_part_by_part_are_those_of_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    eager = full_weights(Decoder(layers=2))
    for made, keeps_generator, counted in run_world(MESHES[name][0], build_on_meta, name):
        assert set(made) == set(eager)
        for key, values in eager.items():
            assert torch.equal(made[key], values), key
            assert torch.equal(counted[key], torch.full_like(values, values.numel())), key
        assert keeps_generator


class Forked(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def fork(rank: int, world_size: int) -> list[torch.Tensor]:
    options = {"ddp": DDPConfig(find_unused_parameters=True, gradient_as_bucket_view=False)}
    strategy = DistributedStrategy.from_config(configure("ddp", {"dp_replicate": 2}, options))
    strategy.setup(joined(rank, world_size))
    torch.manual_seed(0)
    model = strategy.wrap_model(Forked())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        strategy.backward(model(torch.full((1, 3), 1.0 + rank), (rank + step) % 2).sum())
        strategy.step(optimizer)
    weights = list(full_weights(model).values())
    strategy.teardown()
    return weights


def test_ddp_finds_parameters_that_a_rank_does_not_use() -> None:
    torch.manual_seed(0)
    before = list(full_weights(Forked()).values())
    first, second = run_world(2, fork)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Rank 0 sends ones through layers 0, 1, 0 and rank 1 twos through the others; each counts half.
    assert torch.allclose(before[0] - first[0], torch.full((1, 3), (1 + 2 + 1) / 2))
    assert torch.allclose(before[2] - first[2], torch.full((1, 3), (2 + 1 + 2) / 2))


def test_compiled_layers_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    as_torch_does = nn.Module.compile

    def compile_without_a_compiler(module: nn.Module) -> None:
        compiled.append(type(module).__name__)
        as_torch_does(module, backend="aot_eager")  # no C++ is compiled

    monkeypatch.setattr(nn.Module, "compile", compile_without_a_compiler)
    losses = {}
    for is_compiled in (False, True):
        mesh = {"dp_shard": "auto", "compile": is_compiled}
        with DistributedStrategy.from_config(configure("fsdp", mesh, {"wrap": (Block,)})) as strategy:
            torch.manual_seed(0)
            model = strategy.wrap_model(Decoder(layers=2), loss=loss_of)
            assert set(full_weights(model)) == set(full_weights(Decoder(layers=2)))
            losses[is_compiled] = [
                strategy.forward_backward(model, tokens, target=targets).item()
                for tokens, targets in map(text_batch, range(2))
            ]
    assert compiled == ["Block", "Block"]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
