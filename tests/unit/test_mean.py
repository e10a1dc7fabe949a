"""The weighted mean: accurate, rounded once, and without effect on equal values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.arithmetic import CHUNK, weighted_mean

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
weight_lists = st.lists(st.floats(0, 1e300), min_size=1, max_size=5).filter(any)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=200, deadline=None)
@given(
    weight_lists,
    st.sampled_from(DTYPES),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
)
def test_equal_values_keep_every_bit(weights: list[float], dtype: torch.dtype, numbers: list[float]) -> None:
    limits = torch.finfo(dtype)
    value = torch.tensor(numbers, dtype=torch.float64).clamp(limits.min, limits.max).to(dtype)
    out = torch.empty_like(value)
    weighted_mean([value.clone() for _ in weights], weights, out)
    assert same_bits(out, value)


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    for others in ([-largest], [-largest, largest]):
        values = [torch.tensor([largest, -largest]), *(torch.tensor([other, largest]) for other in others)]
        out = torch.empty(2)
        weighted_mean(values, [1.0] * len(values), out)
        assert out.isfinite().all()


def test_zeros_keep_their_sign_and_subnormals_their_value() -> None:
    value = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, 3.4e38])
    out = torch.empty_like(value)
    weighted_mean([value, value, value], [0.3, 0.1, 7.0], out)
    assert same_bits(out, value)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=6).filter(
        lambda pairs: any(weight for weight, _ in pairs)
    )
)
def test_fp32_against_exact_fractions(pairs: list[tuple[float, float]]) -> None:
    weights, numbers = [weight for weight, _ in pairs], [number for _, number in pairs]
    total = sum(map(Fraction, weights))
    exact = sum(Fraction(w) * Fraction(x) for w, x in pairs) / total
    bound = sum(Fraction(w) * abs(Fraction(x)) for w, x in pairs) / total
    out = torch.empty(1)
    weighted_mean([torch.tensor([number]) for number in numbers], weights, out)
    # Inside the contract's 1e-6, down to the spacing of the smallest numbers.
    assert abs(Fraction(out.item()) - exact) <= Fraction(2e-7) * bound + Fraction(2) ** -148


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 3.0], [5.0, 1.0], [0.0, 1.0], [1.0, 2.0, 1.0]])
def test_values_that_may_be_overwritten_have_the_same_mean(weights: list[float]) -> None:
    values = [torch.randn(CHUNK + 5, generator=torch.Generator().manual_seed(seed)) for seed in range(len(weights))]
    edges = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, 3.4e38, -3.4e38])
    for index, value in enumerate(values):
        value[: len(edges)] = edges
        value[len(edges) : 2 * len(edges)] = edges.roll(index)
    expected, out = torch.empty(2, CHUNK + 5)
    weighted_mean(values, weights, expected)
    weighted_mean(values, weights, out, are_scratch=True)
    assert same_bits(out, expected)


@pytest.mark.parametrize(("weights", "heavier"), [([1.0, 1.0], 0), ([1.0, 3.0], 1), ([5.0, 1.0], 0)])
def test_two_fp32_values_are_combined_in_fp32(weights: list[float], heavier: int) -> None:
    """Four operations, or three where both weigh alike, each rounded to fp32: all cells have these bits."""
    values = [torch.randn(3 * CHUNK + 5, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    out = torch.empty_like(values[0])
    weighted_mean(values, weights, out)
    base, other = (values[index].numpy() for index in (heavier, 1 - heavier))
    half = np.float32(0.5)
    step = base * half - other * half
    share = min(weights) / sum(weights)
    right = base - (step if share == 0.5 else step * np.float32(2.0 * share))
    assert same_bits(out, torch.from_numpy(right))
    wide = (weights[0] * values[0].double() + weights[1] * values[1].double()) / sum(weights)
    assert not torch.equal(out, wide.float())


@pytest.mark.parametrize("light", [1e-20, 1e-42])
def test_of_two_values_one_may_weigh_next_to_nothing(light: float) -> None:
    """Where fp32 cannot hold the share of one of them, the mean is computed in 64 bits."""
    out = torch.empty(1)
    weighted_mean([torch.zeros(1), torch.tensor([3e38])], [1.0, light], out)
    assert out.item() == pytest.approx(3e38 * light, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_the_fp32_mean_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(150_000, generator=generator).to(dtype) for _ in range(3)]
    weights = [0.25, 5.0, 3.0]
    out = torch.empty_like(values[0])
    weighted_mean(values, weights, out)
    mean = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert torch.equal(out, mean.float().to(dtype))  # type: ignore[union-attr]


def test_a_value_of_weight_zero_is_not_read() -> None:
    out = torch.empty(2)
    weighted_mean([torch.full((2,), float("nan")), torch.tensor([1.0, 3.0])], [0.0, 2.0], out)
    assert out.tolist() == [1.0, 3.0]


def test_the_result_may_overwrite_a_value() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]), torch.tensor([5.0, 1.0])]
    expected = torch.empty(2)
    weighted_mean(values, [1.0, 4.0, 2.0], expected)
    for index in range(3):
        aliased = [value.clone() for value in values]
        weighted_mean(aliased, [1.0, 4.0, 2.0], aliased[index])
        assert torch.equal(aliased[index], expected)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 1.0, 3.0, 0.3]), min_size=2, max_size=5).filter(any),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0xFFFFFFFF, 0x80FFFFFF, 0x80000007]),
    st.integers(0, 5),
)
def test_numpy_and_torch_give_the_same_bits(weights: list[float], seed: int, mask: int, alias: int) -> None:
    """Of any fp32 numbers, of small ones and subnormals, and of the smallest; what is not contiguous takes torch."""
    length = CHUNK + 9 if seed % 50 == 0 else 40
    bits = np.random.default_rng(seed).integers(0, 2**32, (len(weights), length), np.uint32)
    values = torch.from_numpy((bits & np.uint32(mask)).view(np.float32))
    means = []
    for every in (1, 2):
        rows = [row.repeat_interleave(every)[::every] for row in values]
        out = rows[alias] if alias < len(rows) else rows[0].new_empty(every * len(rows[0]))[::every]
        assert out.is_contiguous() == (every == 1)
        weighted_mean(rows, weights, out)
        means.append(torch.where(out.isnan(), 0, out.contiguous().view(torch.int32)))
    assert torch.equal(*means)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e6) | st.floats(1, 5), st.floats(-(2.0**60), 2.0**60, width=32)),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_the_mean_does_not_depend_on_place(pairs: list[tuple[float, float]], length: int, alias: int) -> None:
    weights = [weight for weight, _ in pairs]
    total = sum(map(Fraction, weights))
    exact = sum(Fraction(w) * Fraction(x) for w, x in pairs) / total
    bound = sum(Fraction(w) * abs(Fraction(x)) for w, x in pairs) / total
    values = [torch.full((length,), number) for _, number in pairs]
    out = values[alias] if alias < len(values) else torch.empty(length)
    weighted_mean(values, weights, out)
    assert abs(Fraction(out[0].item()) - exact) <= Fraction(1e-6) * bound + Fraction(2) ** -147
    assert same_bits(out, out[:1].repeat(length))
    equal = torch.full((length,), pairs[0][1])
    weighted_mean([equal.clone() for _ in weights], weights, out)
    assert same_bits(out, equal)


def test_equal_zeros_keep_their_sign() -> None:
    value = torch.tensor([-0.0, 0.0] * 20)
    for weights in ([1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [1.0, 1e9], [1.0, 2.0, 1.5], [1.0] * 4):
        out = torch.empty_like(value)
        weighted_mean([value.clone() for _ in weights], weights, out)
        assert same_bits(out, value)
