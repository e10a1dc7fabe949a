"""Context parallelism: attention over parts equals attention over the whole, and training a single process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.decoder import Decoder, loss_of, text_batch
from tests.ranks.test_tensor_parallel import Counting, Told, make_decoder, mesh_of, whole
from tests.worlds import run_world
from xffl.errors import ConfigError
from xffl.parallel.axes.context_parallel import context_parallel, give_positions, split_sequence
from xffl.parallel.axes.tensor_parallel import apply_tensor_parallel

STEPS = 5
BATCH = 8


def spread(mesh: DeviceMesh, step: int, rows: slice) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
    tokens, targets = (values[rows] for values in text_batch(step, BATCH))
    positions = torch.arange(tokens.shape[1])
    return context_parallel(mesh, buffers=(tokens, targets, positions), buffer_seq_dims=(1, -1, 0))


def train(
    model: nn.Module,
    mesh: DeviceMesh,
    steps: int,
    rows: slice = slice(None),
    *,
    by_hand: bool = False,
    is_filled: bool = False,
) -> Told:
    """Train on this rank's part of each sequence of its rows; losses are averaged over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        with spread(mesh, step, rows) as (tokens, targets, positions):
            loss = loss_of(model(tokens) if is_filled else model(tokens, positions), targets)
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in gradients if by_hand else ():
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=mesh.get_group())
        losses.append(averaged(loss))
        norms.append(whole(nn.utils.get_total_norm(gradients)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: whole(parameter) for name, parameter in model.named_parameters()}


def averaged(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@cache
def single() -> Told:
    """Whole sequences and batches in this process, without positions."""
    model = make_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = text_batch(step, BATCH)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(got: Told) -> None:
    want = single()
    assert got[0] == pytest.approx(want[0], abs=1e-5)
    assert got[1] == pytest.approx(want[1], rel=1e-5)
    assert got[2].keys() == want[2].keys()
    for name, weight in want[2].items():
        assert (got[2][name] - weight).abs().max() < 1e-5, name


def sharded(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def two_ranks(rank: int, world_size: int) -> list[Told]:
    mesh = mesh_of({"cp": 2}, rank)["cp"]
    return [
        train(make_decoder(), mesh, STEPS, by_hand=True),
        train(sharded(make_decoder(), mesh), mesh, STEPS),
    ]


def test_two_ranks_are_a_single_process() -> None:
    for told in run_world(2, two_ranks):
        for got in told:
            same(got)


def four_ranks(rank: int, world_size: int) -> list[Told]:
    """FSDP over the ranks of both data and context parallelism; then over context parallelism, with cut layers."""
    mesh = mesh_of({"dp_shard": 2, "cp": 2}, rank)
    flat = DeviceMesh.from_group(dist.new_group(list(range(4))), "cpu", mesh_dim_names=("dp_shard_cp",))
    half = BATCH // 2 * mesh.get_local_rank("dp_shard")
    told = [train(sharded(make_decoder(), flat), mesh["cp"], STEPS, slice(half, half + BATCH // 2))]
    mesh = mesh_of({"cp_2": 2, "tp": 2}, rank)
    torch.manual_seed(0)
    model = Counting(layers=2)
    give_positions(model, mesh["cp_2"])
    sharded(apply_tensor_parallel(model, mesh["tp"]), mesh["cp_2"])  # type: ignore[arg-type]
    told.append(train(model, mesh["cp_2"], STEPS, is_filled=True))

    torch.manual_seed(0)
    model = apply_tensor_parallel(Counting(layers=2), mesh["tp"])  # the other order
    give_positions(model, mesh["cp_2"])
    with spread(mesh["cp_2"], 0, slice(None)) as (tokens, targets, _):
        assert averaged(loss_of(model(tokens), targets)) == pytest.approx(told[-1][0][0], abs=1e-5)
    return told


def test_with_fsdp_and_tensor_parallel_they_are_a_single_process() -> None:
    for told in run_world(4, four_ranks):
        for got in told:
            same(got)


ATTENTION: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "scale": 0.1, "width": 6, "value_width": 4},
    {"is_causal": True, "key_heads": 2, "enable_gqa": True},
    {"key_heads": 1, "enable_gqa": True},
    {"is_causal": True, "dtype": torch.float64},
    {"is_causal": True, "dtype": torch.bfloat16},
]


def attention(rank: int, world_size: int) -> None:
    """Three ranks, so nothing rests on powers of two; against the same function on whole sequences."""
    mesh = mesh_of({"cp": world_size}, rank)
    for case in ATTENTION:
        dtype, more = case.get("dtype", torch.float32), {"is_causal", "scale", "enable_gqa"}
        shapes = [(2, 4, 12, case.get("width", 8)), *[(2, case.get("key_heads", 4), 12, case.get("width", 8))] * 2]
        shapes[2] = (*shapes[2][:3], case.get("value_width", 8))
        torch.manual_seed(1)
        tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
        weights = torch.randn(*shapes[0][:3], shapes[2][3], dtype=dtype)
        call = {name: value for name, value in case.items() if name in more}
        for tensor in tensors:
            tensor.requires_grad_()
        want = F.scaled_dot_product_attention(*tensors, **call)
        (want * weights).sum().backward()
        parts = [part.requires_grad_() for part in split_sequence([t.detach() for t in tensors], mesh, 2)]
        with context_parallel(mesh, buffers=(weights, want), buffer_seq_dims=(2, 2)) as (own_weights, own_want):
            got = F.scaled_dot_product_attention(*parts, **call)
            (got * own_weights).sum().backward()
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
        assert torch.allclose(got, own_want, atol=tolerance), case
        for part, gradient in zip(parts, split_sequence([t.grad for t in tensors], mesh, [2, -2, 2]), strict=True):
            assert part.grad.dtype == dtype and torch.allclose(part.grad, gradient, atol=tolerance), case
    with context_parallel(mesh), torch.no_grad():  # by position, and without gradients
        got = F.scaled_dot_product_attention(*parts, None, 0.0, True)
    assert torch.allclose(got, own_want, atol=0.05)


def test_attention_over_parts_is_attention() -> None:
    run_world(3, attention)


class Recomputed(Decoder):
    """Keeps no activations of its layers."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers.values():
            hidden = checkpoint(layer, hidden, positions, use_reentrant=False)
        return self.lm_head(self.norm(hidden))


def checked(rank: int, world_size: int) -> None:
    mesh = mesh_of({"cp": 2}, rank)
    tokens, targets = text_batch(0)
    model = make_decoder()
    want = model(tokens)
    loss_of(want, targets).backward()

    (own_want,) = split_sequence([want.detach()], mesh)
    (own,) = split_sequence([tokens], mesh)
    with context_parallel(mesh, buffers=(tokens,), buffer_seq_dims=(1,)) as (part,):
        assert torch.equal(part, own) and part.is_contiguous() and tokens.shape == (8, 16)
        assert torch.allclose(model(part), own_want, atol=1e-5) == (rank == 0)  # without positions: the first rank only
        handle = give_positions(model, mesh)
        for call in ((part,), (part, None)):
            assert torch.allclose(model(*call), own_want, atol=1e-5)
        assert torch.allclose(model(tokens=part, positions=None), own_want, atol=1e-5)
        assert not torch.allclose(model(part, torch.arange(8) * 2), own_want, atol=1e-5)
        handle.remove()
        assert torch.allclose(model(part), own_want, atol=1e-5) == (rank == 0)
    assert torch.allclose(model(tokens), want, atol=1e-6)  # nothing stays behind

    recomputed = Recomputed(layers=2)
    recomputed.load_state_dict(model.state_dict())
    with spread(mesh, 0, slice(None)) as (part, target, positions):
        loss_of(recomputed(part, positions), target).backward()
    for got, dense in zip(recomputed.parameters(), model.parameters(), strict=True):
        dist.all_reduce(got.grad, op=dist.ReduceOp.AVG)
        assert torch.allclose(got.grad, dense.grad, atol=1e-6)
    with spread(mesh, 0, slice(None)) as (part, target, positions):
        loss = loss_of(recomputed(part, positions), target)
    with pytest.raises(CheckpointError):
        loss.backward()

    with torch.autocast("cpu", torch.bfloat16), spread(mesh, 0, slice(None)) as (part, target, positions):
        loss = loss_of(model(part, positions), target)
        loss.backward()
    assert abs(averaged(loss) - loss_of(want, targets)) < 0.02
    wrong(mesh, model, tokens)


class Ids(nn.Module):
    def forward(self, tokens: torch.Tensor, *, position_ids: torch.Tensor | None = None) -> Any:
        return position_ids


def wrong(mesh: DeviceMesh, model: nn.Module, tokens: torch.Tensor) -> None:
    def raises(*parts: str) -> Any:
        return pytest.raises(ConfigError, match=".*".join(parts))

    ids = Ids()
    give_positions(ids, mesh, activation_parts=4)
    start = 8 * mesh.get_local_rank()
    for first in (tokens[:, :8], torch.randn(8, 2, 32)):
        assert torch.equal(ids(first), torch.arange(start, start + 8)[None])
    with raises("Linear.forward takes neither", "cp=1"):
        give_positions(nn.Linear(2, 2), mesh)
    with (
        raises("sequence of 15", "2 ranks", "pad"),
        context_parallel(mesh, buffers=(tokens[:, :15],), buffer_seq_dims=(1,)),
    ):
        pass
    with raises("no dimension 2"):
        split_sequence([tokens], mesh, 2)
    with raises("1 tensors came with 2"):
        split_sequence([tokens], mesh, [1, 1])
    with raises("1 tensors came with 0"), context_parallel(mesh, buffers=(tokens,)):
        pass
    with raises("needs CUDA", "ring=False"), context_parallel(mesh, ring=True):
        pass
    with raises("one dimension"), context_parallel(None):  # type: ignore[arg-type]
        pass
    with raises("no attention was computed"), context_parallel(mesh, buffers=(tokens,), buffer_seq_dims=(1,)):
        pass

    query = torch.randn(1, 2, 4, 8)
    spread_query = distribute_tensor(query, mesh)
    attend = F.scaled_dot_product_attention
    with context_parallel(mesh):
        with raises("a mask (4, 4)".replace("(", r"\(").replace(")", r"\)"), "is_causal"):
            attend(query, query, query, torch.ones(4, 4, dtype=torch.bool))
        with raises("drops out 0.1", "dropout to 0"):
            attend(query, query, query, dropout_p=0.1)
        with raises("4 queries, 2 keys", "cross-attention"):
            attend(query, query[:, :, :2], query[:, :, :2])
        with raises("DTensors", "use_local_output=True"):
            attend(spread_query, spread_query, spread_query)
        with raises("nn.MultiheadAttention"):
            nn.MultiheadAttention(8, 2)(query[0], query[0], query[0])
        for softmax in (F.softmax, torch.softmax, torch.Tensor.softmax):
            with raises("softmax of scores", "sdpa"):
                softmax(query @ query.transpose(2, 3), dim=-1)
        assert F.softmax(query, dim=-1).sum() > 0
    with pytest.raises(RuntimeError, match="block"), context_parallel(mesh, buffers=(tokens,), buffer_seq_dims=(1,)):
        raise RuntimeError("block")
    assert attend is F.scaled_dot_product_attention
    assert attend(query, query, query, dropout_p=0.1).shape == query.shape  # nothing stays behind


def test_positions_recomputation_and_wrong_arguments() -> None:
    run_world(2, checked)
