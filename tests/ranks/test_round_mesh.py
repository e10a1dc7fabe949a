"""Rounds of cells with a mesh inside: tensors cut along two dimensions, and pipelines whose stages differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.decoder import Decoder
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.algorithms.server_rules import Adaptive
from xffl.distributed.distributed_state import DistributedState

Shape = dict[str, int]
Full = dict[str, torch.Tensor]

PLAN = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}

LAYOUTS: list[tuple[tuple[int, ...], Shape]] = [
    ((4, 4), {"dp_replicate": 1, "dp_shard": 2, "tp": 2}),
    ((4, 4), {"dp_replicate": 2, "tp": 2}),
    ((4, 2), {"dp_replicate": -1, "dp_shard": 1, "tp": 2}),
    ((2, 2), {"pp": 2, "dp_replicate": 1}),
    ((4, 4), {"pp": 2, "dp_replicate": 1, "dp_shard": 2}),
    ((4, 4), {"pp": 2, "dp_replicate": 2}),
    ((4, 4), {"pp": 2, "dp_replicate": 1, "tp": 2}),
]


def make_state(rank: int, sizes: tuple[int, ...], shape: Shape) -> DistributedState:
    state = DistributedState()
    cpu = torch.device("cpu")
    state.set_global(
        backend="gloo", device_type=cpu, master_addr="", master_port=0, rank=rank, world_size=dist.get_world_size()
    )
    state.set_exec_device(cpu)
    state.set_federated_scaling(sizes, cell_shape=shape)
    return state


class Mesh:
    """The mesh of a rank's cell, made without the code under test: groups of equal coordinates along all other axes."""

    def __init__(self, rank: int, sizes: tuple[int, ...], shape: Shape, *, names: str = "") -> None:
        first = cell = 0
        while rank >= first + sizes[cell]:
            first, cell = first + sizes[cell], cell + 1
        self.cell, self._names, self._shape = cell, names, dict(shape)
        if shape.get("dp_replicate") == -1:
            self._shape["dp_replicate"] = -sizes[cell] // math.prod(shape.values())
        self._ranks = torch.arange(first, first + sizes[cell]).view(tuple(self._shape.values()))
        where = (self._ranks == rank).nonzero()[0].tolist()
        self.at = dict(zip(self._shape, where, strict=True))
        self._groups = {
            axis: dist.new_group(self._along((axis,)).tolist(), use_local_synchronization=True) for axis in self._shape
        }

    def size(self, axis: str) -> int:
        return self._shape.get(axis, 1)

    def _along(self, axes: tuple[str, ...]) -> torch.Tensor:
        return self._ranks[tuple(slice(None) if axis in axes else self.at[axis] for axis in self._shape)]

    def of(self, *axes: str) -> DeviceMesh:
        groups = [self._groups[axis] for axis in axes]
        names = tuple(f"{axis}{self._names}" for axis in axes)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
        return DeviceMesh.from_group(groups, "cpu", mesh=self._along(axes), mesh_dim_names=names)


class Zoo(nn.Module):
    """A decoder, and tensors of sizes that nothing divides; a stage of a pipeline lacks some of it."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.decoder = Decoder(width=12, heads=2, layers=2, vocabulary=34)
        self.odd = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(13, 7)) for name in ("rows", "both", "columns", "grid", "turned", "copied")}
        )
        self.odd["narrow"] = nn.Parameter(torch.empty(13, 7, dtype=torch.bfloat16))
        self.odd["wave"] = nn.Parameter(torch.empty(5, 3, dtype=torch.complex64))
        self.odd["scalar"] = nn.Parameter(torch.empty(()))
        self.tied = nn.Parameter(torch.empty(7, 3))
        self.register_buffer("running", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if stage == 0:
            del self.decoder.layers["1"], self.count
            self.decoder.norm = self.decoder.lm_head = None
        elif stage == 1:
            del self.decoder.layers["0"], self.odd, self.running
            self.decoder.embed_tokens = None


@torch.no_grad()
def build(mesh: Mesh, source: int, rank: int = 0) -> nn.Module:
    """A model that is spread over a cell's mesh, with values that depend on their names and ``source``.

    The running buffer of each rank is its own: ``rank`` is added.
    """
    torch.manual_seed(0)
    model = Zoo(mesh.at["pp"] if mesh.size("pp") > 1 else None)
    for name, tensor in model.state_dict().items():
        seed = int.from_bytes(hashlib.sha256(f"{name} {source}".encode()).digest()[:6], "big")
        generator = torch.Generator().manual_seed(seed)
        if tensor.dtype == torch.int64:
            tensor.fill_(source + 3)
        else:
            kind = torch.promote_types(tensor.dtype, torch.float32)
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=kind))
        if name == "running":
            tensor.add_(rank)
    data = ("dp_replicate", "dp_shard") if mesh.size("dp_replicate") > 1 and "dp_shard" in mesh.at else ("dp_shard",)
    data = data if mesh.size("dp_shard") > 1 else ()
    if mesh.size("tp") > 1:
        grid = mesh.of(*data, "tp")
        along = grid[f"tp{mesh._names}"] if data else grid
        parallelize_module(model.decoder, along, PLAN)
        odd = {"rows": Shard(0), "columns": Shard(1), "both": Shard(0), "narrow": Shard(1), "wave": Shard(0)}
        if data and hasattr(model, "odd"):
            pairs = {
                "rows": [Shard(0), Replicate()],
                "columns": [Replicate(), Shard(1)],
                "both": [Shard(0), Shard(0)],
                "grid": [Shard(0), Shard(1)],
                "turned": [Shard(1), Shard(0)],
                "copied": [Replicate(), Replicate()],
                "narrow": [Shard(1), Shard(1)],
                "wave": [Shard(1), Shard(0)],
            }
            for name, placements in pairs.items():
                model.odd[name] = nn.Parameter(distribute_tensor(model.odd[name].detach(), grid, placements))
        elif hasattr(model, "odd"):
            for name, placement in odd.items():
                model.odd[name] = nn.Parameter(distribute_tensor(model.odd[name].detach(), along, [placement]))
        if data:
            for layer in (*model.decoder.layers.values(), model.decoder):
                fully_shard(layer, mesh=grid[f"dp_shard{mesh._names}"])
    elif data:
        along = mesh.of(*data)
        model.tied = nn.Parameter(distribute_tensor(model.tied.detach(), along, [Shard(0)]))
        for layer in (*model.decoder.layers.values(), model.decoder):
            fully_shard(layer, mesh=along)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def full(model: nn.Module) -> Full:
    """All tensors of a rank, complete: torch itself puts them together."""
    return {
        name: (tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()
        for name, tensor in tensors(model).items()
    }


@torch.no_grad()
def train(model: nn.Module, cell: int, turn: int) -> None:
    """Change all floating-point values in a way that depends on the cell and the round, not on the cut."""
    for name, tensor in tensors(model).items():
        if "scratch" not in name and (tensor.is_floating_point() or tensor.is_complex()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.mul_(1.0 + 0.25 * cell - 0.125 * turn)
            local.add_(local * local, alpha=0.03125)


def everywhere(mine: Full) -> list[Full]:
    """What each rank has."""
    told: list[Full] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def digests(mine: Full) -> dict[str, str]:
    """The bits of every tensor that takes part in rounds."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in mine.items()
        if "scratch" not in name
    }


def check_alike(mine: Full) -> None:
    """All ranks that have a tensor have the same bits of it."""
    told: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, digests(mine))
    for name in {name for one in told for name in one}:
        assert len({one[name] for one in told if name in one}) == 1, name


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def check_mean(before: list[Full], after: Full, cells: list[int], weights: list[float]) -> None:
    """Each tensor is the weighted mean over the cells; a cell's buffer is the mean over its ranks that have it."""
    for name, value in after.items():
        if "scratch" in name:
            continue
        held = [
            [one[name] for one, at in zip(before, cells, strict=True) if at == c and name in one]
            for c in range(len(weights))
        ]
        own = [torch.stack([wide(one) for one in several]).mean(0) for several in held]
        if not (value.is_floating_point() or value.is_complex()):
            assert torch.equal(value, held[0][0]), name
            continue
        mean = sum(w * x for w, x in zip(weights, own, strict=True)) / sum(weights)
        scale = sum(w * x.abs() for w, x in zip(weights, own, strict=True)) / sum(weights)
        relative = 2.0**-8 if value.dtype == torch.bfloat16 else 1e-6
        assert ((wide(value) - mean).abs() <= relative * scale).all(), name


OPTIONS: list[dict[str, Any]] = [
    {},
    {"atomic": False},
    {"bucket_bytes": 100, "form": "two_hop"},
    {"rails": True, "bucket_bytes": 300},
    {"fragments": 3},
    {"overlap": True},
]


def means(rank: int, world_size: int, sizes: tuple[int, ...], shape: Shape, options: list[dict[str, Any]]) -> None:
    """Three rounds with unequal weights, and one for each further set of options, against dense means."""
    state = make_state(rank, sizes, shape)
    mesh = Mesh(rank, sizes, shape)
    cells = [cell for cell, size in enumerate(sizes) for _ in range(size)]
    for kwargs in options:
        model = build(mesh, mesh.cell, rank)
        aggregator = aggregator_of(model, state, **kwargs)
        for turn in range(1 if kwargs else 3):
            train(model, mesh.cell, turn)
            before = everywhere(full(model))
            weight = (1.0 + 2.0 * mesh.cell + turn) / sizes[mesh.cell]
            sent = 0
            for _ in range(kwargs.get("fragments", 1)):
                if kwargs.get("overlap"):
                    report = aggregator.aggregate_async(weight).merge()
                else:
                    report = aggregator.aggregate(weight)
                sent += report.bytes_across
            after = full(model)
            check_alike(after)
            if mesh.cell == 0 and not any(at for axis, at in mesh.at.items() if axis != "pp"):
                # Of each stage one rank: all others have the same bits.
                check_mean(before, after, cells, [1.0 + 2.0 * cell + turn for cell in range(len(sizes))])
            check_bytes(before, sent, cells)
        aggregator.close()


def check_bytes(before: list[Full], sent: int, cells: list[int]) -> None:
    """Each element has left its cell once, however many ranks hold it; what is taken from cell 0 has left that only."""
    told = [0] * len(cells)
    dist.all_gather_object(told, sent)
    whole = {name: tensor for one in before for name, tensor in one.items() if "scratch" not in name}
    for cell in set(cells):
        crossed = sum(nbytes for nbytes, at in zip(told, cells, strict=True) if at == cell)
        expected = sum(t.nbytes for t in whole.values() if t.is_floating_point() or t.is_complex() or cell == 0)
        assert crossed == expected, (cell, crossed, expected)


@pytest.mark.parametrize("sizes, shape", LAYOUTS, ids=str)
def test_rounds_are_the_dense_mean(sizes: tuple[int, ...], shape: Shape) -> None:
    is_full = shape.get("dp_shard") == shape.get("tp") == 2
    run_world(sum(sizes), means, sizes, shape, OPTIONS if is_full else OPTIONS[:2])


def algorithms(rank: int, world_size: int, sizes: tuple[int, ...], shape: Shape) -> None:
    """What looks at more than one value at a time."""
    state = make_state(rank, sizes, shape)
    mesh = Mesh(rank, sizes, shape)
    cell = mesh.cell

    # Equal models stay as they are.
    model = build(mesh, 7)
    before = digests(full(model))
    aggregator = aggregator_of(model, state)
    for weight in (1.0, 3.0):
        aggregator.aggregate(weight + cell)
    assert digests(full(model)) == before
    aggregator.close()

    # A codec: all ranks read the same codes, also of what several shards hold. The second round is the first lossy one.
    model = build(mesh, 7)
    policies = {"running": "local", "odd.narrow": "average"} if mesh.size("pp") == 1 else {"running": "local"}
    aggregator = aggregator_of(model, state, codec={"decoder.lm_head.*": "int4", "*": "int8"}, policies=policies)
    for turn in range(2):
        train(model, cell, turn)
        held = everywhere({name: tensor for name, tensor in full(model).items() if name != "running"})
        aggregator.aggregate()
        after = {name: tensor for name, tensor in full(model).items() if name != "running"}
        check_alike(after)
    for name, value in after.items():
        if value.is_floating_point() and "scratch" not in name:
            mean = torch.stack([one[name].double() for one in held if name in one]).mean(0)
            assert (value.double() - mean).abs().max() < 0.2 * mean.abs().max(), name
    aggregator.close()

    # Norms count each element once, and noise is the same on all holders.
    model = build(mesh, 7)
    start = full(model)
    aggregator = aggregator_of(model, state, norms=True)
    train(model, cell, 0)
    moved = everywhere({name: wide(value) - wide(start[name]) for name, value in full(model).items()})
    report = aggregator.aggregate()
    ranks = [[one for place, one in enumerate(moved) if (place >= sizes[0]) == other] for other in (False, True)]
    parameters = {name for one in moved for name in one} - {"running", "count", "scratch"}
    for norm, here in zip(report.update_norms or (), ranks, strict=True):
        steps = [next(one[name] for one in here if name in one) for name in parameters]
        assert norm == pytest.approx(math.sqrt(sum(float(step.square().sum()) for step in steps)), rel=1e-9)
    aggregator.close()

    model = build(mesh, 7)
    privacy = {"name": "dp_fedavg", "clip": 1.0, "noise": 0.1, "seed": 1}
    aggregator = aggregator_of(model, state, privacy=privacy, policies={"running": "local", "*count": "local"})
    train(model, cell, 0)
    aggregator.aggregate()
    check_alike({name: value for name, value in full(model).items() if name not in ("running", "count")})
    aggregator.close()


def server(rank: int, world_size: int, sizes: tuple[int, ...], shape: Shape) -> None:
    """FedAdam over three rounds, resumed after the first, against the rule on whole tensors."""
    state = make_state(rank, sizes, shape)
    mesh = Mesh(rank, sizes, shape)
    model = build(mesh, 7)
    skipped = ("running", "count", "scratch", "odd.narrow", "odd.wave")
    dense = {name: nn.Parameter(value) for name, value in full(model).items() if name not in skipped}
    rule = Adaptive(lr=0.03)
    states = {name: rule.init(parameter.detach().view(-1)) for name, parameter in dense.items()}
    aggregator = aggregator_of(model, state, server="fedadam:lr=0.03")
    for turn in range(3):
        train(model, mesh.cell, turn)
        told = everywhere(full(model))
        aggregator.aggregate(1.0 + mesh.cell)
        for name, parameter in dense.items():
            own = [next(one[name] for one in told[start:] if name in one) for start in (0, sizes[0])]
            mean = (own[0].double() * sizes[0] + own[1].double() * 2 * sizes[1]) / (sizes[0] + 2 * sizes[1])
            values = parameter.detach().view(-1)
            rule.step(values, values - mean.float().view(-1), states[name], rule.numbers(turn))
        after = full(model)
        check_alike(after)
        for name, parameter in dense.items():
            torch.testing.assert_close(after[name], parameter.detach(), rtol=2e-5, atol=2e-6, msg=name)
        if turn == 0:
            saved = aggregator.state_dict()
            aggregator.close()
            copy = build(mesh, 7)
            aggregator = aggregator_of(copy, state, server="fedadam:lr=0.03")
            with torch.no_grad():
                for new, old in zip(copy.parameters(), model.parameters(), strict=True):
                    new.copy_(old)
            aggregator.load_state_dict(saved)
            model = copy


@pytest.mark.parametrize(
    "case, sizes, shape",
    [(algorithms, *LAYOUTS[-1]), (server, *LAYOUTS[0])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_algorithms(case: Callable[..., None], sizes: tuple[int, ...], shape: Shape) -> None:
    run_world(sum(sizes), case, sizes, shape)
