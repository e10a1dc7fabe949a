"""Ranks on unlike processors end with equal bits, or are told at the start what they compute otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import xffl
from tests.ranks.test_protected import build, moved, same_bits
from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.aggregation.algorithms.combiners import Coordinatewise
from xffl.aggregation.arithmetic import divide
from xffl.aggregation.compression import Codec
from xffl.aggregation.engine.alike import arithmetic_check
from xffl.compat.pytorch import DispatchMode


class OtherProcessor(DispatchMode):
    """A processor that rounds fused operations, powers and fp32 roots otherwise, by a unit in each value."""

    FUSED = ("addcmul", "addcdiv", "lerp", "pow", "rsqrt", "_foreach_addcmul", "_foreach_addcdiv", "_foreach_lerp")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].rstrip("_")
        is_fused = name in self.FUSED or (name in ("add", "sub") and (kwargs or {}).get("alpha", 1) != 1)
        if is_fused or (name == "sqrt" and result.dtype == torch.float32):
            for one in result if isinstance(result, list) else [result]:
                if one.is_floating_point():
                    one.copy_(torch.nextafter(one, torch.full_like(one, 9.0)))
        return result


class WrongProduct(DispatchMode):
    """A processor that rounds products of subnormal numbers otherwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "aten.mul" in str(func) and result.dtype == torch.float32:
            result.copy_(torch.where(result.abs() < 1e-38, 0.0, result))
        return result


WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "diloco, clipped": {"server": "diloco:clip=0.2"},
    "adamw, cosine": {"server": {"name": "adamw", "lr": 0.05, "schedule": "cosine:T_max=9"}},
    "fedyogi": {"server": "fedyogi"},
    "adagrad of medians": {"server": "adagrad", "combine": "median", "codec": "int4"},
    "fednova": {"combine": "fednova", "server": "fedadam:is_bias_corrected=true"},
    "norm clipping": {"combine": "norm_clipping:clip=0.3"},
    "trimmed mean": {"combine": "trimmed_mean:share=0.34"},
    "geometric median": {"combine": "geometric_median"},
    "secure": {"secure": True},
}


def refused(call: Callable[[], object], kind: type[Exception] = xffl.ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def on_unlike_processors(rank: int, world_size: int) -> dict[str, bool]:
    state = make_state(rank, (1, 1, 1), None)
    found = {}
    for name, way in WAYS.items():
        with OtherProcessor() if rank == 1 else nullcontext():
            model = build(state)
            aggregator = xffl.Aggregator(model, state, **way)
            for number in range(2):
                moved(model, state, number)
                aggregator.aggregate(steps=1.0 + rank)
        found[name] = same_bits(model, world_size)
    return found


def test_ranks_that_round_fused_operations_otherwise_end_with_equal_bits() -> None:
    assert run_world(3, on_unlike_processors) == [dict.fromkeys(WAYS, True)] * 3


@contextmanager
def flushing(is_on: bool) -> Iterator[None]:
    torch.set_flush_denormal(is_on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def told_at_the_start(rank: int, world_size: int) -> dict[str, str]:
    """What is refused before the first round, or between two of them."""
    state = make_state(rank, (1, 1), None)
    model = build(state)
    told = {}
    with flushing(rank == 1):
        told["flushing"] = refused(lambda: xffl.Aggregator(model, state))
    with flushing(True):  # alike on all ranks
        xffl.Aggregator(model, state).aggregate()
    aggregator = xffl.Aggregator(model, state)
    aggregator.aggregate()
    with flushing(rank == 1):
        told["flushing later"] = refused(aggregator.aggregate, xffl.RoundError)
    aggregator.aggregate()
    assert same_bits(model, world_size)
    with WrongProduct() if rank == 0 else nullcontext():
        told["product"] = refused(lambda: xffl.Aggregator(model, state))
    return told


def test_ranks_that_compute_otherwise_are_refused_by_name() -> None:
    told, other = run_world(2, told_at_the_start)
    assert told == other
    assert "rank 0 and rank 1 compute different bits of 4096 fixed patterns (add, sub, mul" in told["flushing"]
    for text in (told["flushing"], told["flushing later"]):
        assert "flushed to zero on rank 1 and nowhere else" in text and "torch.set_flush_denormal" in text
    assert "rank 0 and rank 1 compute different bits of 4096 fixed patterns (mul, mul by a number" in told["product"]
    assert "torch 2." in told["product"]


class Elementary(Coordinatewise):
    """A mean of one's own, of elementary operations."""

    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values[0])
        for row in values[1:]:
            out.add_(row)
        divide(out, float(len(values)), out=out)


class Reducing(Coordinatewise):
    """A mean of one's own, whose order is the processor's."""

    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        torch.mean(values, 0, out=out)


class Own(Codec):
    """A codec of one's own; ``is_exact`` decodes by elementary operations."""

    def __init__(self, is_exact: bool) -> None:
        self.is_exact = is_exact

    def __str__(self) -> str:
        return f"own:{self.is_exact}"

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        out.copy_(values.exp().view(torch.uint8))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        values = data.clone().view(torch.float32)
        out.copy_(values - 1.0 if self.is_exact else values.log())


def of_the_users_own(rank: int, world_size: int) -> dict[str, str]:
    """Combiners and codecs of the user's own, on ranks whose processors are alike, or not."""
    state = make_state(rank, (1, 1), None)
    model = build(state)
    ways: dict[str, dict[str, Any]] = {
        "elementary": {"combine": Elementary()},
        "reducing": {"combine": Reducing()},
        "exact codec": {"codec": Own(is_exact=True)},
        "codec": {"codec": Own(is_exact=False)},
    }
    told = {}
    for name, way in ways.items():
        xffl.Aggregator(model, state, **way)
        with mock.patch.object(arithmetic_check, "processor_number", return_value=float(rank)):
            try:
                xffl.Aggregator(model, state, **way)
                told[name] = ""
            except xffl.ConfigError as wrong:
                told[name] = str(wrong)
    return told


def test_what_is_of_the_users_own_has_to_be_elementary_on_unlike_processors() -> None:
    told, other = run_world(2, of_the_users_own)
    assert told == other
    assert told["elementary"] == told["exact codec"] == ""
    assert "unlike processors" in told["reducing"] and "combine Reducing calls aten.mean" in told["reducing"]
    assert "codec own:False calls aten.log" in told["codec"]
