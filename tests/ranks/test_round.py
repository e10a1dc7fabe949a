"""A round is the weighted mean, to the last bit, in every layout (DESIGN.md, section 5.1)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import xffl
from tests.rounds import aggregator_of
from tests.rows import some_of
from tests.worlds import run_world
from xffl.distributed.distributed_state import DistributedState

Layout = tuple[tuple[int, ...], int | None]

LAYOUTS: list[Layout] = [
    ((1, 1), None),
    ((2, 2), None),
    ((4, 4), 2),
    ((3, 1), 1),
    ((3, 1), None),
    ((2, 4, 2), 2),
    ((1, 2, 3), None),
]
DTYPES = ["float32", "bfloat16", "float16", "mixed"]
"""All of them in two layouts; in the others ``mixed`` alone, which has a tensor of each."""


def is_full(sizes: tuple[int, ...], hsdp: int | None) -> bool:
    return sizes in ((1, 1), (3, 1)) and hsdp is None


class Wide(nn.Linear):
    """A layer that is sharded as a unit of its own."""


class One(nn.Linear):
    """Another one: a unit of FSDP trains in one data type."""


class Zoo(nn.Module):
    """A tensor of every kind that a round treats in its own way."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        kinds = [torch.float32, torch.bfloat16, torch.float16] if dtype == "mixed" else [getattr(torch, dtype)] * 3
        self.wide = Wide(17, 13, dtype=kinds[0])
        self.narrow = nn.Linear(13, 7, bias=False, dtype=kinds[1])
        self.tied = nn.Linear(13, 7, bias=False, dtype=kinds[1])
        self.tied.weight = self.narrow.weight
        self.one = One(1, 1, bias=False, dtype=kinds[2])  # fewer rows than ranks: empty shards
        self.norm = nn.BatchNorm1d(7, dtype=kinds[2])
        self.frozen = nn.Linear(3, 3, dtype=kinds[0]).requires_grad_(False)
        self.register_buffer("clock", torch.zeros((), dtype=torch.int16))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(4, dtype=kinds[0]), persistent=False)


def make_state(rank: int, sizes: tuple[int, ...], hsdp: int | None) -> DistributedState:
    state = DistributedState()
    cpu = torch.device("cpu")
    state.set_global(
        backend="gloo", device_type=cpu, master_addr="", master_port=0, rank=rank, world_size=dist.get_world_size()
    )
    state.set_exec_device(cpu)
    state.set_federated_scaling(sizes, hsdp)
    return state


def whole(name: str, like: torch.Tensor, source: int) -> torch.Tensor:
    """The full value of a tensor that ``source`` (a cell for parameters, a rank for buffers) holds before the round."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {source}".encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    if like.is_floating_point():
        scale = torch.exp2(torch.randint(-8, 8, like.shape, generator=generator).double())
        return (torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale).to(like.dtype)
    if like.is_complex():
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Each parameter and buffer, with its name as the user gave it."""
    yield from ((name.removeprefix("module."), p, False) for name, p in model.named_parameters())
    yield from ((name.removeprefix("module."), b, True) for name, b in model.named_buffers())


@torch.no_grad()
def fill(model: nn.Module, rank: int, cell: int) -> None:
    for name, tensor, is_buffer in tensors(model):
        value = whole(name, tensor, rank if is_buffer else cell)
        if isinstance(tensor, DTensor):
            shard = tensor.placements[-1]
            mesh_dim = tensor.device_mesh.ndim - 1
            parts = torch.chunk(value, tensor.device_mesh.size(mesh_dim), dim=shard.dim)  # type: ignore[attr-defined]
            index = tensor.device_mesh.get_local_rank(mesh_dim)
            local = tensor.to_local()
            local.copy_(parts[index] if index < len(parts) else value[:0])
        else:
            tensor.copy_(value)


def complete(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor, of which ranks hold rows or columns; torch's full_tensor takes four times as long."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    *others, cut = tensor.placements
    if not isinstance(cut, Shard) or not all(isinstance(other, Replicate) for other in others):
        return tensor.detach().full_tensor()
    size, ranks = tensor.shape[cut.dim], tensor.device_mesh.size(-1)
    rows = tensor.to_local().detach().movedim(cut.dim, 0)
    mine = rows.new_zeros(-(-size // ranks), *rows.shape[1:])
    mine[: len(rows)] = rows
    every = torch.cat([mine] * ranks)
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    dist.all_gather_into_tensor(every.view(torch.uint8), mine.view(torch.uint8), group)
    return every[:size].movedim(0, cut.dim)


def digests(model: nn.Module) -> dict[str, str]:
    """The bits of every complete tensor."""
    return {
        name: hashlib.sha256(complete(t).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t, _ in tensors(model)
    }


def reference(
    name: str, like: torch.Tensor, is_buffer: bool, sizes: tuple[int, ...], weights: list[float]
) -> list[torch.Tensor]:
    """``[mean, bound]`` of a tensor in 64 bits, by one process; ``[value]`` where nothing is averaged."""
    offsets = [0, *itertools.accumulate(sizes)]
    if not (like.is_floating_point() or like.is_complex()):
        return [whole(name, like, 0)]  # rank 0 is cell 0's first sender
    double = torch.complex128 if like.is_complex() else torch.float64
    mean, bound = torch.zeros(like.shape, dtype=double), torch.zeros(like.shape, dtype=torch.float64)
    for cell, weight in enumerate(weights):
        if is_buffer:
            ranks = range(offsets[cell], offsets[cell + 1])
            value = sum(whole(name, like, rank).to(double) for rank in ranks) / len(ranks)
            assert isinstance(value, torch.Tensor)
            value = (value if like.is_complex() or like.dtype == torch.float32 else value.float()).to(like.dtype)
        else:
            value = whole(name, like, cell)
        mean += weight * value.to(double)
        bound += weight * value.abs().double()
    return [mean / sum(weights), bound / sum(weights)]


def kept_local(model: nn.Module) -> dict[str, torch.Tensor]:
    """The complete values of what a round must leave alone."""
    held = ((name, tensor) for name, tensor, _ in tensors(model) if name.startswith("frozen") or name == "scratch")
    return {name: complete(tensor).clone() for name, tensor in held}


def check_values(
    model: nn.Module, before: dict[str, torch.Tensor], sizes: tuple[int, ...], weights: list[float]
) -> None:
    for name, tensor, is_buffer in tensors(model):
        got = complete(tensor)
        if name.startswith("frozen") or name == "scratch":
            assert torch.equal(got, before[name]), f"{name} should have stayed local"
            continue
        expected = reference(name, got, is_buffer, sizes, weights)
        if len(expected) == 1:
            assert torch.equal(got, expected[0]), f"{name} is not rank 0's"
        elif got.dtype in (torch.bfloat16, torch.float16):
            rounded = expected[0].float().to(got.dtype)
            assert torch.equal(got, rounded), f"{name}: {(got.double() - expected[0]).abs().max()} off"
        else:
            error = (got.to(expected[0].dtype) - expected[0]).abs()
            assert (error <= 1e-6 * expected[1]).all(), f"{name}: {error.max()} off"


def weightings(sizes: tuple[int, ...], rank: int, cell: int) -> list[tuple[float | None, list[float]]]:
    """This rank's weight and the weights of all cells, for three rounds."""
    offsets = [0, *itertools.accumulate(sizes)]
    counted = [float(sum(range(offsets[c] + 1, offsets[c + 1] + 1))) for c in range(len(sizes))]
    lopsided = [1e-3 if c == 0 else 0.0 if c == 2 else 7e5 for c in range(len(sizes))]
    return [
        (None, [1.0] * len(sizes)),
        (rank + 1.0, counted),
        (lopsided[cell] if rank == offsets[cell] else 0.0, lopsided),
    ]


def build(kind: str, dtype: str, state: DistributedState) -> nn.Module:
    torch.manual_seed(0)
    model = Zoo(dtype)
    if kind == "shard":
        return xffl.shard(model, state, wrap=[Wide, One, nn.BatchNorm1d])
    if kind == "fully_shard":
        mesh = state.hsdp_mesh or state.fsdp_mesh
        for layer in (model.wide, model.norm):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def one_layout(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> int:
    state = make_state(rank, sizes, hsdp)
    cell = state.federated_rank
    assert cell is not None
    rounds = 0
    dtypes = DTYPES if is_full(sizes, hsdp) else DTYPES[-1:]
    for kind, dtype in itertools.product(["plain", "shard", "fully_shard"], dtypes):
        model = build(kind, dtype, state)
        for number, (weight, weights) in enumerate(weightings(sizes, rank, cell)):
            # A bucket size and mode for each: a few elements at a time, tensors that do not fit, everything at once.
            bucket_bytes, atomic, form = [(24, True, "auto"), (100, False, "two_hop"), (1 << 20, True, "auto")][number]
            aggregator = aggregator_of(model, state, bucket_bytes=bucket_bytes, atomic=atomic, form=form)
            fill(model, rank, cell)
            before = kept_local(model)
            report = aggregator.aggregate(weight)
            assert report.round == 1 and list(report.weights) == weights
            check_values(model, before, sizes, weights)
            mine = {n: d for n, d in digests(model).items() if not n.startswith("frozen") and n != "scratch"}
            gathered: list[dict[str, str]] = [{}] * world_size
            dist.all_gather_object(gathered, mine)
            assert all(other == mine for other in gathered), [n for n in mine if len({g[n] for g in gathered}) > 1]
            rounds += 1
        for again in range(5 if dtype == "mixed" else 1):
            report = aggregator.aggregate(0.1 + 3.7 * again + 1.3 * rank)
            assert report.round == again + 2
            assert {n: d for n, d in digests(model).items() if n in mine} == mine
    return rounds


@pytest.mark.parametrize("sizes, hsdp", some_of(LAYOUTS, ((2, 2), None), ((4, 4), 2)), ids=str)
def test_a_round_is_the_weighted_mean(sizes: tuple[int, ...], hsdp: int | None) -> None:
    assert run_world(sum(sizes), one_layout, sizes, hsdp) == [36 if is_full(sizes, hsdp) else 9] * sum(sizes)


def traffic(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> tuple[int, int]:
    state = make_state(rank, sizes, hsdp)
    model = xffl.shard(nn.Linear(64, 96, bias=False), state)
    report = xffl.Aggregator(model, state, bucket_bytes=1000).aggregate()
    return report.bytes_across, report.bytes_home


@pytest.mark.parametrize(
    "sizes, hsdp", [((2, 2), 2), ((4, 4), 2), ((4, 2), 2), ((2, 4, 2), 2), ((4, 2), None), ((3, 3), 1)], ids=str
)
def test_each_shard_leaves_its_cell_once_for_each_peer(sizes: tuple[int, ...], hsdp: int | None) -> None:
    sent = run_world(sum(sizes), traffic, sizes, hsdp)
    size, offsets = 64 * 96 * 4, [0, *itertools.accumulate(sizes)]
    for cell, (start, stop) in enumerate(itertools.pairwise(offsets)):
        across = [across for across, _ in sent[start:stop]]
        assert sum(across) == size * (len(sizes) - 1), f"cell {cell}"  # however many replicas it has
        replicas = 1 if hsdp is None else sizes[cell] // hsdp
        assert sum(home for _, home in sent[start:stop]) == size * (replicas - 1)
        assert sum(bytes_ > 0 for bytes_ in across) == (hsdp or sizes[cell])
