"""Roots, quotients and powers that are the same everywhere, and the mode that refuses what is not."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from xffl.aggregation.algorithms.combiners import Coordinatewise, Mean
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.robust import CoordinateMedian
from xffl.aggregation.algorithms.server_rules import power
from xffl.aggregation.arithmetic import CHUNK, combined, divide, flushes_subnormals, square_root, weighted_mean
from xffl.aggregation.compression import codec_of
from xffl.aggregation.elementary import ElementaryOnly
from xffl.aggregation.engine.alike import arithmetic_check
from xffl.aggregation.engine.alike.arithmetic_check import PATTERNS, digest_arithmetic
from xffl.errors import ConfigError
from xffl.naming import Writer


def _patterns(numel: int) -> torch.Tensor:
    """Return random bit patterns: normal and subnormal numbers, both zeros, both infinities, and many NaNs."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (numel,)).to(torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38])
    return torch.cat([bits.view(torch.float32), special])


@pytest.mark.parametrize("in_place", [False, True])
def test_roots_are_the_nearest_fp32_numbers(in_place: bool) -> None:
    values = _patterns(3 * CHUNK + 5)
    with np.errstate(invalid="ignore"):
        right = torch.from_numpy(np.sqrt(values.numpy()))
    roots = square_root(values, out=values) if in_place else square_root(values)
    assert (roots is values) == in_place
    numbers = ~right.isnan()
    assert torch.equal(roots.isnan(), right.isnan())
    assert torch.equal(roots.view(torch.int32)[numbers], right.view(torch.int32)[numbers])


def test_roots_of_fp64_stay_fp64() -> None:
    values = torch.rand(9, dtype=torch.float64)
    torch.testing.assert_close(square_root(values) ** 2, values, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("divisor", [3.0, 1e-40, -7.25])
def test_a_quotient_is_rounded_once(divisor: float) -> None:
    values = _patterns(1000)
    with np.errstate(over="ignore", invalid="ignore"):
        right = torch.from_numpy(values.numpy() / np.float32(divisor))
    numbers = ~right.isnan()
    assert torch.equal(divide(values, divisor).view(torch.int32)[numbers], right.view(torch.int32)[numbers])
    torch.testing.assert_close(divide(values, divisor, out=values), right, rtol=0.0, atol=0.0, equal_nan=True)


def test_powers_are_products() -> None:
    assert power(0.9, 0) == 1.0
    assert power(0.5, 10) == 2.0**-10
    assert power(0.999, 1000) == pytest.approx(0.999**1000, rel=1e-13)
    assert power(3.0, 5) == 243.0


A = torch.tensor([1.0, -2.0, 0.5])
B = torch.tensor([3.0, 0.25, -1.0])
Call = Callable[[], object]

ALLOWED: dict[str, Call] = {
    "sum": lambda: A + B,
    "sum in place": lambda: A.clone().add_(B),
    "sum with a number": lambda: 1.0 - A + 0.5,
    "difference into another": lambda: torch.sub(A, B, out=torch.empty(3)),
    "product": lambda: A * B * 0.1,
    "quotient": lambda: A / B,
    "quotient by a number": lambda: divide(A, 3.0),
    "fp32 root": lambda: square_root(A.abs()),
    "fp64": lambda: A.double().mul_(0.1).sub_(B),
    "lists": lambda: torch._foreach_add_([A.clone()], [B]),  # type: ignore[no-untyped-call]
    "choice": lambda: torch.where(A > B, A, -B).sign(),
    "extremes": lambda: torch.maximum(A, B).minimum(A).clamp(-1.0, 1.0),
    "finite": lambda: bool(A.isfinite().all()),
    "stable order": lambda: torch.stack([A, B]).sort(dim=0, stable=True),
    "views": lambda: torch.split(A.reshape(1, 3).T[:, 0], 2)[0].contiguous(),
    "casts": lambda: A.to(torch.bfloat16).float().copy_(B),
    "constants": lambda: (torch.zeros_like(A), torch.full((2,), 3.0), torch.tensor([1.0])),
}

REFUSED: dict[str, tuple[Call, str]] = {
    "alpha": (lambda: torch.add(A, B, alpha=2), "aten.add.Tensor.*alpha=2.*multiply first"),
    "alpha of a difference": (lambda: A.clone().sub_(B, alpha=0.5), "aten.sub_.Tensor.*alpha=0.5"),
    "alpha of lists": (lambda: torch._foreach_add([A], [B], alpha=2), "alpha=2"),  # type: ignore[no-untyped-call]
    "addcmul": (lambda: A.clone().addcmul_(A, B), "aten.addcmul_.*mul and add"),
    "addcdiv": (lambda: torch.addcdiv(A, A, B), "aten.addcdiv.*div, mul and sub"),
    "lerp": (lambda: A.lerp(B, 0.5), "aten.lerp.*sub, mul and add"),
    "fp32 root": (lambda: A.sqrt(), "aten.sqrt.*square_root"),
    "power": (lambda: A**2, "aten.pow.*products"),
    "reciprocal": (lambda: 1.0 / A, "aten.reciprocal.*divide"),
    "number as divisor": (lambda: A / 3.0, "aten.div.Tensor.*divide"),
    "tensor without dimensions as divisor": (lambda: A / torch.tensor(3.0), "shape \\(1,\\)"),
    "total": (lambda: A.sum(), "aten.sum.*order"),
    "half precision": (lambda: A.bfloat16() + B.bfloat16(), "torch.bfloat16: convert to fp32"),
    "exponential": (lambda: A.exp(), "aten.exp.*none of the operations"),
    "unstable order": (lambda: torch.stack([A, B]).sort(dim=0), "stable=True"),
    "floor": (lambda: A.div(B, rounding_mode="floor"), "several steps"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_elementary_operations_pass(name: str) -> None:
    expected = ALLOWED[name]()
    with ElementaryOnly("rule Mine"):
        found = ALLOWED[name]()
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"rule Mine calls .*{message}"), ElementaryOnly("rule Mine"):
        call()
    call()  # not refused outside


# What ranks compare at the start --------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_operations_on_the_patterns_are_those_of_numpy() -> None:
    digests = digest_arithmetic([CPU], combiner=CoordinateMedian(), cells=5, has_fp64=True).digests
    a, b, _ = (row.numpy() for row in arithmetic_check._patterns(CPU))
    with np.errstate(all="ignore"):
        right = {
            "add": a + b,
            "sub": a - b,
            "mul": a * b,
            "mul by a number": a * np.float32(0.1),
            "div": a / b,
            "div by a number": a / np.float32(3.0),
            "root": np.sqrt(np.abs(a)),
            "cast": (a.astype(np.float64) * b.astype(np.float64)).astype(np.float32),
            "fp64 div": a.astype(np.float64) / 3.0,
        }
    expected = arithmetic_check._digests_of({name: torch.from_numpy(values) for name, values in right.items()})
    assert {name: digests[name] for name in right} == expected
    assert "mean of 3 cells in torch.float32" in digests and "combine CoordinateMedian" in digests
    assert digests == digest_arithmetic([CPU], combiner=CoordinateMedian(), cells=5, has_fp64=True).digests


def test_the_patterns_have_all_kinds_of_numbers() -> None:
    patterns = arithmetic_check._patterns(CPU)
    assert patterns.shape == (3, PATTERNS) and not patterns.isnan().any()
    for row in patterns:
        for found in (row == 0.0, row.isinf(), (row != 0.0) & (row.abs() < 2.0**-126), row.abs() > 1e38):
            assert int((found & row.signbit()).sum()) > 9 and int((found & ~row.signbit()).sum()) > 9
    wide = patterns[0].double() + patterns[1].double()
    half = (wide.abs() - 1.0) * 2.0**24  # sums around one, in halves of its unit
    assert int(((half % 2 == 1) & (half < 64)).sum()) > 9


def test_threads_that_compute_otherwise_are_refused() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(2**18).mul_(2.0)  # makes the other thread, which does not flush
        torch.set_flush_denormal(True)
        assert flushes_subnormals()
        with pytest.raises(ConfigError, match="2 threads of a rank.*torch.set_flush_denormal before"):
            digest_arithmetic([CPU], combiner=Mean())
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert not flushes_subnormals()
    digest_arithmetic([CPU], combiner=Mean())


def test_devices_of_a_rank_that_compute_otherwise_are_refused() -> None:
    places = [CPU, torch.device("cpu", 0)]  # looked at one by one
    found = {place: arithmetic_check._patterns(place).clone() for place in places}
    found[places[1]][0, 0] *= 1.5
    with (
        mock.patch.object(arithmetic_check, "_patterns", lambda device: found[device]),
        pytest.raises(ConfigError, match="devices cpu, cpu:0 of a rank compute other bits .*add.*device of its own"),
    ):
        digest_arithmetic(places, combiner=Mean())


@pytest.mark.parametrize(
    "codec", ["bf16", "fp16", "int8", "int4:block=32", "int4:scale=fp32", "topk:0.1,value=fp16", "int2", "sparseloco"]
)
def test_what_codecs_decode_is_elementary(codec: str) -> None:
    made = codec_of(codec)
    assert made is not None
    values = torch.randn(1000)
    code = torch.empty(made.nbytes(1000), dtype=torch.uint8)
    made.encode(values, code)
    with ElementaryOnly(codec):
        made.decode(code, values)


COMBINERS = ["median", "trimmed_mean:share=0.2", "mean"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", COMBINERS)
def test_what_combiners_make_of_values_is_elementary(name: str, dtype: torch.dtype) -> None:
    combiner = make("combine", name, writer=Writer.USER)
    values = [torch.randn(100).to(dtype) for _ in range(5)]
    out = torch.empty(100, dtype=dtype)
    with ElementaryOnly(name):
        if isinstance(combiner, Coordinatewise):
            combined(combiner.combine, values, out)
        weighted_mean(values, [1.0, 3.0, 0.0, 2.0, 0.7], out)
    assert out.isfinite().all()
