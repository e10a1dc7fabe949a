"""Pipelines over gloo ranks against one process that trains the whole model on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from tests.decoder import Block, Decoder, loss_of, text_batch
from tests.worlds import run_world
from xffl.errors import ConfigError, StateError
from xffl.parallel.axes.pipeline import PipelineModel, Skip, split_model

STEPS = 8
TIGHT = 1e-5


def dense(layers: int = 4) -> Decoder:
    """The whole model, the same everywhere."""
    torch.manual_seed(0)
    return Decoder(layers=layers)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained_alone(steps: int = STEPS, layers: int = 4, batch: int = 8) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The oracle: losses and weights of one process."""
    model = dense(layers)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        tokens, targets = text_batch(step, batch)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def collected(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """All stages' tensors by name; no name may be on two stages."""
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, {name: whole(tensor) for name, tensor in tensors.items()}, group=mesh.get_group())
    union: dict[str, torch.Tensor] = {}
    for part in told:
        assert not union.keys() & part.keys()
        union |= part
    return union


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, atol=TIGHT, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def dense_gradients(batch: tuple[torch.Tensor, torch.Tensor], state: Any = None, layers: int = 4) -> dict[str, Any]:
    """The oracle of one step."""
    model = dense(layers)
    if state is not None:
        model.load_state_dict(state)
    loss_of(model(batch[0]), batch[1]).backward()
    return gradients(model)


def pipeline(mesh: DeviceMesh, schedule: str = "1f1b", layers: int = 4, **more: Any) -> PipelineModel:
    module = split_model(dense(layers), mesh.get_local_rank(), mesh.size())
    return PipelineModel(module, mesh, loss_of, **{"micro_batches": 4, "schedule": schedule} | more)


def moved(traffic: profile, name: str) -> int:
    """How many collectives and messages of a kind a profile saw."""
    return sum(event.count for event in traffic.key_averages() if event.key.startswith(name))


def train(model: PipelineModel, batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        losses.append(float(model.step(tokens, target=targets)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trains(rank: int, world_size: int, want: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    for schedule in ("gpipe", "1f1b"):
        model = pipeline(mesh, schedule)
        losses = train(model, text_batch)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want[0]), atol=TIGHT, rtol=0)
        assert_equal(collected(model.state_dict(), mesh), want[1])
        assert not any(name.startswith("module") for name, _ in model.named_parameters())


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_training_equals_one_process(stages: int) -> None:
    want = trained_alone()
    assert want[0][-1] < want[0][0] - 1
    run_world(stages, trains, want)


def data_parallel(rank: int, world_size: int, want: tuple[list[float], dict[str, torch.Tensor]], form: str) -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mesh, spread = world["pp"], world["dp"]
    module: nn.Module = split_model(dense(), mesh.get_local_rank(), mesh.size())
    if form == "ddp":
        module = nn.parallel.DistributedDataParallel(module, process_group=spread.get_group())
    else:
        for part in list(module.modules()):
            if isinstance(part, Block):
                fully_shard(part, mesh=spread)
        fully_shard(module, mesh=spread)
    model = PipelineModel(module, mesh, loss_of, micro_batches=2, schedule="1f1b")
    half = slice(4 * spread.get_local_rank(), 4 * spread.get_local_rank() + 4)

    def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = text_batch(step)
        return tokens[half], targets[half]

    losses = torch.tensor(train(model, batch_of))
    dist.all_reduce(losses, group=spread.get_group())
    torch.testing.assert_close(losses / 2, torch.tensor(want[0]), atol=TIGHT, rtol=0)
    state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    assert_equal(collected(state, mesh), want[1])

    # Two calls make one gradient, reduced at the end of the second only. (At new sizes torch 2.15 reduces a vote.)
    tokens, targets = (tensor[half][:2] for tensor in text_batch(99))
    model.step(tokens, target=targets)
    model.zero_grad()
    reductions = []
    for place in (0, 2):
        tokens, targets = (tensor[half][place : place + 2] for tensor in text_batch(99))
        with profile() as traffic:
            model.step(tokens, target=targets, scale_loss=lambda loss: loss / 2, sync=place == 2)
        reductions.append(moved(traffic, "c10d::allreduce_" if form == "ddp" else "c10d::_reduce_scatter_base_"))
    assert reductions == [0, 1 if form == "ddp" else 3]  # one bucket; two blocks and what is around them
    found = {name.removeprefix("module."): tensor for name, tensor in gradients(model).items()}
    assert_equal(collected(found, mesh), dense_gradients(text_batch(99), want[1]))


@pytest.mark.parametrize("form", ["fsdp", "ddp"])
def test_data_parallel_stages(form: str) -> None:
    run_world(4, data_parallel, trained_alone(), form)


def one_step(rank: int, world_size: int) -> None:
    """Gradients, norms, evaluation and sizes that change, on two stages."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    group = mesh.get_group()
    batch = text_batch(0)
    want = dense_gradients(batch)
    for schedule in ("gpipe", "1f1b"):
        model = pipeline(mesh, schedule)
        loss = model.step(batch[0], target=batch[1])
        assert_equal(collected(gradients(model), mesh), want)
        assert loss.dtype == torch.float32 and not loss.requires_grad

        # The total norm: squares add up over the stages.
        total = torch.stack([gradient.square().sum() for gradient in gradients(model).values()]).sum()
        dist.all_reduce(total, group=group)
        dense_norm = torch.nn.utils.get_total_norm(list(want.values()))
        assert math.isclose(float(total.sqrt()), float(dense_norm), rel_tol=1e-6)

        # Evaluating and other sizes in the middle of a window neither lose nor touch gradients, and then they add up.
        other = text_batch(1, batch=4, sequence=9)
        with torch.no_grad():
            alone = dense()(other[0])
        torch.testing.assert_close(model.evaluate(other[0], target=other[1]), loss_of(alone, other[1]))
        logits = model(other[0])
        assert (logits is None) == (rank == 0)
        if logits is not None:
            torch.testing.assert_close(logits, alone, atol=TIGHT, rtol=0)
        assert_equal(collected(gradients(model), mesh), want)
        for _ in range(2):
            model.step(other[0], target=other[1])
        extra = dense_gradients(other)
        assert_equal(collected(gradients(model), mesh), {name: want[name] + 2 * extra[name] for name in want})

        # A text is cut into tokens and targets that have gaps.
        model.zero_grad()
        text = text_batch(2, sequence=9)[0]
        model.step(text[:, :-1], target=text[:, 1:])
        assert_equal(collected(gradients(model), mesh), dense_gradients((text[:, :-1], text[:, 1:])))

        # A scaler multiplies what goes backward, not what is told.
        model.zero_grad()
        assert model.step(batch[0], target=batch[1], scale_loss=lambda value: value * 8) == loss
        assert_equal(collected(gradients(model), mesh), {name: 8 * tensor for name, tensor in want.items()})


def test_one_step() -> None:
    run_world(2, one_step)


def uneven(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    batch = text_batch(0)
    want = dense_gradients(batch, layers=5)
    module = split_model(dense(5), rank, 2)
    assert len(module.layers) == (3 if rank == 0 else 2)
    model = PipelineModel(module, mesh, loss_of, micro_batches=2)
    model.step(batch[0], target=batch[1])
    assert_equal(collected(gradients(model), mesh), want)

    # A frozen first stage gets no gradients, and the other does as if it were not.
    model = pipeline(mesh, layers=5)
    if rank == 0:
        model.requires_grad_(False)
    model.step(batch[0], target=batch[1])
    assert_equal(
        gradients(model), {name: want[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    )


def test_uneven_layers_and_frozen_stages() -> None:
    run_world(2, uneven)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.arange(64), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.all[: hidden.shape[1]]


class Scaled(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        self.seen += self.training
        return self.block(hidden, positions) * scale + shift


class Inner(nn.Module):
    """As Hugging Face nests it: a ModuleList with what is around it, and buffers that all stages need."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(Scaled(layer) for layer in decoder.layers.values())
        self.norm = decoder.norm
        self.rotary = Rotary()

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, offset: float) -> torch.Tensor:
        hidden = self.drop(self.embed_tokens(input_ids))
        positions = self.rotary(hidden)
        for index, layer in enumerate(self.layers[: len(self.layers)]):
            hidden = layer(hidden, positions=positions * (1.0 + index) + offset, scale=scale, shift=shift)
        return self.norm(hidden).transpose(0, 1).contiguous().transpose(0, 1)  # what is sent has gaps


class Nested(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = Inner(decoder)
        self.lm_head = decoder.lm_head

    def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.lm_head(self.model(input_ids, **more))


def nested(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    batch = text_batch(0)
    oracle = Nested(dense())
    oracle.eval()
    scale = torch.linspace(0.1, 1.0, 8)[:, None, None]
    shift = torch.linspace(0.1, 1.0, 32)
    loss = loss_of(oracle(batch[0], scale=scale, shift=shift, offset=0.5), batch[1])
    loss.backward()
    module = split_model(Nested(dense()), rank, 2)
    assert len(module.model.layers) == 4 and [isinstance(layer, Skip) for layer in module.model.layers] == [
        (index > 1) == (rank == 0) for index in range(4)
    ]
    model = PipelineModel(module, mesh, loss_of, micro_batches=4, schedule="gpipe")
    model.train()
    drop = module.model.drop
    assert isinstance(drop, nn.Dropout) == (rank == 0)  # it acts once
    if rank == 0:
        drop.p = 0.0
    state = torch.get_rng_state()
    got = model.step(batch[0], target=batch[1], scale=scale, offset=0.5, shared={"shift": shift})
    torch.testing.assert_close(got, loss.detach())
    assert_equal(collected(gradients(model), mesh), gradients(oracle))
    # Finding the sizes left no traces: four micro-batches were seen.
    assert torch.equal(torch.get_rng_state(), state) and all(part.training for part in model.modules())
    assert [int(buffer) for name, buffer in model.named_buffers() if name.endswith("seen")] == [4, 4]


def test_nested_lists_and_arguments() -> None:
    run_world(2, nested)


def wrong(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    module = split_model(dense(), rank, 2)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    static = nn.parallel.DistributedDataParallel(module, process_group=alone["dp"].get_group(), static_graph=True)
    for more, text in (
        ({"module": static}, "static_graph"),
        ({"schedule": "1f1B"}, "must be one of '1f1b', 'gpipe', got '1f1B'"),
        ({"micro_batches": 1}, "over 2 stages must be an integer of 2 or more, got 1"),
        ({"micro_batches": 0, "schedule": "gpipe"}, "over 2 stages must be a positive integer, got 0"),
        ({"mesh": alone}, "2 dimensions; give a mesh of one"),
    ):
        with pytest.raises(ConfigError, match=text):
            PipelineModel(**{"module": module, "mesh": mesh, "loss": loss_of, "micro_batches": 2} | more)
    model = PipelineModel(module, mesh, loss_of, micro_batches=4)
    tokens, targets = text_batch(0)
    with profile() as traffic:
        for inputs, target, named, text in (
            ((tokens[:6],), targets[:6], {}, "a batch of 6 rows cannot be cut into 4"),
            ((tokens[:0],), targets[:0], {}, "a batch of 0 rows cannot be cut into 4"),
            ((), targets, {}, "no inputs"),
            ((tokens,), targets[:4], {}, "the target has the shape"),
            ((tokens, None), targets, {}, "input 1 is NoneType"),
            ((tokens,), targets, {"positions": torch.arange(16)}, "what is not cut goes into shared="),
        ):
            with pytest.raises(ConfigError, match=text):
                model.step(*inputs, target=target, **named)
        with pytest.raises(StateError, match="evaluate"), torch.no_grad():
            model.step(tokens, target=targets)
    assert moved(traffic, "c10d::") == 0

    # What only one stage notices is raised on all of them, and the model still works afterwards.
    with pytest.raises(ConfigError, match="different batches: stage 0"):
        model.step(*text_batch(rank)[:1], target=targets)
    other = PipelineModel(module, mesh, loss_of, micro_batches=4, schedule=("gpipe", "1f1b")[rank])
    with pytest.raises(ConfigError, match="stage 0: gpipe in 4 .*; stage 1: 1f1b in 4"):
        other.step(tokens, target=targets)
    with pytest.raises(ConfigError, match="stage 0 of 2 fails .* IndexError"):
        model.step(tokens + 1000, target=targets)
    for loss in (lambda out, target: out, lambda out, target: 1.0):
        with pytest.raises(ConfigError, match="stage 1 of 2 fails .* scalar tensor"):
            PipelineModel(module, mesh, loss, micro_batches=4).step(tokens, target=targets)
    listed = module.register_forward_hook(lambda part, inputs, output: [output])
    with pytest.raises(ConfigError, match="stage 0 of 2 fails .* the model return plain tensors"):
        PipelineModel(module, mesh, loss_of, micro_batches=4).step(tokens, target=targets)
    listed.remove()
    model.step(tokens, target=targets)
    assert_equal(collected(gradients(model), mesh), dense_gradients((tokens, targets)))


def test_wrong_arguments() -> None:
    run_world(2, wrong)


def changing(rank: int, world_size: int) -> str:
    """Fewer bytes than the next stage waits for: it would compute on what its memory held."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    model = pipeline(mesh)
    model.module.register_forward_hook(lambda part, inputs, output: output.bfloat16() if part.training else output)
    tokens, targets = text_batch(0)
    with pytest.raises((ConfigError, RuntimeError)) as caught:  # the other stage loses its neighbour
        model.step(tokens, target=targets)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_stage_that_sends_something_else_in_training() -> None:
    told = run_world(2, changing, mortal=(0, 1), timeout_s=30)[0]
    assert "ConfigError: stage 0 sends [([2, 16, 32], torch.bfloat16)], but the next one expects" in told
    assert "torch.float32" in told and "in training as in evaluation" in told
