"""Roots, quotients and powers that are the same everywhere, and the mode that refuses what is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from xffl.aggregation.arithmetic import CHUNK, ElementaryOnly, divide, power, square_root
from xffl.errors import ConfigError


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
    with ElementaryOnly("rule Mine"):
        ALLOWED[name]()


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"rule Mine calls .*{message}"), ElementaryOnly("rule Mine"):
        call()
    call()  # not refused outside
