"""Combiners against dense numpy, against the published flwr where it follows the paper, and at their edges."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.algorithms.combiners import (
    AggregationWeights,
    CellStats,
    Combiner,
    Coordinatewise,
    Mean,
    WeightedCombiner,
)
from xffl.aggregation.algorithms.robust import CoordinateMedian, GeometricMedian, Krum, MultiKrum, TrimmedMean
from xffl.aggregation.algorithms.scaled_means import NormalizedMean, NormClipping
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.weighing import weigh_cells
from xffl.errors import ConfigError, RoundError

Floats = npt.NDArray[np.float64]

LARGEST = float(torch.finfo(torch.float32).max)

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
alike = st.floats(-1.0, 1.0, width=32)


@st.composite
def columns(draw: st.DrawFn) -> Floats:
    """[cells, numel] that fp32 holds; often with ties."""
    cells, numel = draw(st.integers(1, 17)), draw(st.integers(0, 5))
    element = draw(st.sampled_from([numbers, alike, st.sampled_from([-1.0, 0.0, 2.0])]))
    rows = draw(st.lists(st.lists(element, min_size=numel, max_size=numel), min_size=cells, max_size=cells))
    return np.array(rows, dtype=np.float64).reshape(cells, numel)


@st.composite
def federations(draw: st.DrawFn, least: int = 1) -> tuple[Floats, Floats, Floats]:
    """Models [cells, numel], their weights, and the model they started from."""
    cells, numel, seed = draw(st.integers(least, 12)), draw(st.integers(1, 7)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    spread = 10.0 ** generator.integers(-3, 4, (cells, 1))
    models = generator.normal(size=(cells, numel)) * spread
    if draw(st.booleans()):
        models = np.round(models)
    return models, generator.uniform(0.1, 10.0, cells), generator.normal(size=numel)


def combined(combiner: Coordinatewise, values: Floats, dtype: torch.dtype = torch.float32) -> Floats:
    combiner.check(len(values))
    out = torch.full((values.shape[1],), float("nan"), dtype=dtype)
    combiner.combine(torch.from_numpy(values).to(dtype, copy=True), out)
    result: Floats = out.double().numpy()
    return result


def seen_of(models: Floats, weights: Floats, start: Floats | None = None, steps: Floats | None = None) -> CellStats:
    return CellStats(
        weights=tuple(weights.tolist()),
        steps=tuple(np.ones(len(models)).tolist() if steps is None else steps.tolist()),
        norms=None if start is None else tuple(np.linalg.norm(models - start, axis=1).tolist()),
        distances=tuple(tuple(row) for row in ((models[:, None] - models[None]) ** 2).sum(-1).tolist()),
    )


def mean_of(models: Floats, weighed: AggregationWeights) -> Floats:
    shares = np.array(weighed.weights) / sum(weighed.weights)
    result: Floats = shares @ models
    return result


def stepped(weighting: WeightedCombiner, models: Floats, weights: Floats, start: Floats, steps: Floats) -> Floats:
    weighed = weighting.weigh(seen_of(models, weights, start, steps))
    return start + weighed.scale * (mean_of(models, weighed) - start)


def kept_of(values: Floats, cut: int) -> Floats:
    return np.sort(values, axis=0)[cut : len(values) - cut]


# Coordinatewise


@settings(max_examples=150, deadline=None)
@given(columns(), st.sampled_from([torch.float32, torch.float64]), st.randoms(use_true_random=False))
def test_the_median_is_numpys_and_does_not_depend_on_the_order_of_cells(
    values: Floats, dtype: torch.dtype, random: Any
) -> None:
    got = combined(CoordinateMedian(), values, dtype)
    middle = kept_of(values, (len(values) - 1) // 2)
    assert np.all(np.abs(got - np.median(values, axis=0)) <= 2e-7 * np.abs(middle).mean(0) + 2.0**-148)
    order = list(range(len(values)))
    random.shuffle(order)
    assert np.array_equal(combined(CoordinateMedian(), values[order], dtype), got)


@settings(max_examples=150, deadline=None)
@given(columns(), st.floats(0.0, 0.49))
def test_the_trimmed_mean_leaves_out_as_many_at_each_end(values: Floats, share: float) -> None:
    cut = int(share * len(values))
    share = share if cut else 0.0
    kept = kept_of(values, cut)
    got = combined(TrimmedMean(share), values)
    assert np.all(np.abs(got - kept.mean(0)) <= 2e-7 * np.abs(kept).mean(0) + 2.0**-148)


@pytest.mark.parametrize("cells", range(1, 12))
def test_rows_of_zeros_and_ones_are_sorted_in_every_pattern(cells: int) -> None:
    # What sorts all zeros and ones sorts everything (Knuth's 0-1 principle); each cut shows another part of the order.
    values = np.array(list(itertools.product((0.0, 1.0), repeat=cells))).T
    for cut in range((cells + 1) // 2):
        # A little above the fraction, so that int(share * cells) is the cut.
        got = combined(TrimmedMean((cut + 1e-9) / cells if cut else 0.0), values)
        np.testing.assert_allclose(got, kept_of(values, cut).mean(0), rtol=1e-6)


@pytest.mark.parametrize("numel", [0, 1, 2**16 - 1, 2**16, 150_001])
def test_every_element_of_a_long_bucket_is_combined(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(6, numel, generator=generator)
    expected = torch.from_numpy(np.median(values.numpy(), axis=0))
    out = torch.full((numel,), float("nan"))
    # Rows of a wider buffer: what lies behind them is not touched.
    wide = torch.cat([values, torch.full((6, 3), 9.0)], dim=1)
    CoordinateMedian().combine(wide[:, :numel], out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(wide[:, numel:], torch.full((6, 3), 9.0))


def test_the_sign_of_zero_does_not_depend_on_the_processor() -> None:
    # Vector units and what is left over beside them take different ones of 0 and -0 for the smaller.
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 1003, generator=generator) * (torch.rand(5, 1003, generator=generator) < 0.4)
    values *= torch.where(torch.rand(5, 1003, generator=generator) < 0.5, -1.0, 1.0)
    for combiner in (CoordinateMedian(), TrimmedMean(0.2)):
        whole = torch.empty(1003)
        combiner.combine(values.clone(), whole)
        alone = torch.empty(1003)
        for index in range(1003):
            combiner.combine(values[:, index : index + 1].clone(), alone[index : index + 1])
        assert torch.equal(torch.signbit(whole), torch.signbit(alone))
        first = values[0][whole == 0.0]
        assert torch.equal(torch.signbit(whole[whole == 0.0]), torch.signbit(first) & (first == 0.0))
        assert (whole == 0.0).any()


@pytest.mark.parametrize("combiner", [CoordinateMedian(), TrimmedMean(), TrimmedMean(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_keep_every_bit(combiner: Coordinatewise, dtype: torch.dtype) -> None:
    value = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, LARGEST, -LARGEST, 0.1, math.pi], dtype=dtype)
    for cells in (5, 6, 7):
        out = torch.empty_like(value)
        combiner.combine(value.repeat(cells, 1), out)
        assert torch.equal(out.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_numbers_do_not_overflow(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    for signs in ([1, 1], [-1, 1], [1, 1, 1, 1], [-1, 1, 1, -1], [-1, -1, -1, 1, 1], [1, -1, 1, 1, 1, -1]):
        values = top * np.array(signs, dtype=np.float64)[:, None]
        for combiner, cut in ((CoordinateMedian(), (len(signs) - 1) // 2), (TrimmedMean(0.0), 0)):
            expected = top * kept_of(np.array(signs), cut).mean()
            assert combined(combiner, values, dtype)[0] == pytest.approx(expected, rel=1e-6, abs=1e-7 * top)


def test_infinite_values_in_the_minority_do_no_harm() -> None:
    values = np.array([[1.0, math.inf], [2.0, -math.inf], [math.inf, 3.0], [4.0, 5.0], [-math.inf, 4.0]])
    assert combined(CoordinateMedian(), values).tolist() == [2.0, 4.0]
    np.testing.assert_allclose(combined(TrimmedMean(), values), [7 / 3, 4.0], rtol=1e-6)


def test_nan_is_not_hidden() -> None:
    values = torch.tensor([[1.0, 1.0], [math.nan, 2.0], [3.0, 3.0]])
    out = torch.empty(2)
    CoordinateMedian().combine(values, out)
    assert out.isnan().tolist() == [True, False]


# Krum


def scores_of(models: Floats, faulty: int) -> Floats:
    """As in the paper: over the other cells, the n - f - 2 nearest."""
    cells = len(models)
    scores = np.empty(cells)
    for cell in range(cells):
        others = np.delete(models, cell, axis=0)
        squares = np.sort(((others - models[cell]) ** 2).sum(1))
        scores[cell] = squares[: cells - faulty - 2].sum()
    return scores


@settings(max_examples=150, deadline=None)
@given(federations(least=3), st.integers(0, 4), st.integers(1, 12) | st.none())
def test_krum_is_the_papers(federation: tuple[Floats, Floats, Floats], faulty: int, selected: int | None) -> None:
    models, weights, _ = federation
    faulty = min(faulty, (len(models) - 3) // 2)
    selected = None if selected is None else min(selected, len(models))
    krum, multi = Krum(faulty), MultiKrum(faulty, selected)
    krum.check(len(models))
    multi.check(len(models))
    scores = scores_of(models, faulty)
    count = len(models) - faulty if selected is None else selected
    for weighting, number in ((krum, 1), (multi, count)):
        weighed = weighting.weigh(seen_of(models, weights))
        chosen = np.flatnonzero(weighed.weights)
        assert len(chosen) == number and weighed.scale == 1.0
        assert {weighed.weights[cell] for cell in chosen} == {1.0}, "those chosen count alike"
        # numpy may sum in another order: scores that are equal but for rounding may change places.
        assert np.all(scores[chosen] <= np.sort(scores)[number - 1] * (1 + 1e-12))


def test_of_equal_scores_the_lowest_cell_wins() -> None:
    corners = np.array([[9.0, 9.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    seen = seen_of(corners, np.ones(5))
    assert np.flatnonzero(Krum().weigh(seen).weights).tolist() == [1]
    for selected in range(1, 5):
        assert np.flatnonzero(MultiKrum(1, selected).weigh(seen).weights).tolist() == list(range(1, selected + 1))
    assert Krum().weigh(seen_of(np.ones((5, 3)), np.ones(5))).weights == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_multi_krum_of_one_is_krum_and_of_all_is_the_plain_mean() -> None:
    models = np.random.default_rng(5).normal(size=(7, 4))
    seen = seen_of(models, np.arange(1.0, 8.0))
    assert MultiKrum(2, 1).weigh(seen) == Krum(2).weigh(seen)
    assert MultiKrum(2, 7).weigh(seen).weights == (1.0,) * 7


@pytest.mark.parametrize("size", [1e3, 1e38])
def test_what_is_far_off_is_not_chosen(size: float) -> None:
    models = np.random.default_rng(6).normal(size=(5, 8))
    for bad in range(5):
        models_here = models.copy()
        models_here[bad] = size
        seen = seen_of(models_here, np.where(np.arange(5) == bad, 1e6, 1.0))
        assert Krum().weigh(seen).weights[bad] == 0.0
        assert MultiKrum().weigh(seen).weights == tuple(float(cell != bad) for cell in range(5))


# The published package


@pytest.fixture(scope="module")
def flwr() -> Any:
    pytest.importorskip("flwr", reason="flwr is not installed; it has no release for Python 3.10")
    from flwr.server.strategy import aggregate

    return aggregate


@pytest.fixture
def results() -> list[tuple[list[npt.NDArray[np.float32]], int]]:
    generator = np.random.default_rng(7)
    shapes = [(3, 4), (5,), (1, 2, 2)]
    return [
        ([generator.normal(size=shape).astype(np.float32) for shape in shapes], examples)
        for examples in (10, 40, 5, 25, 31, 8, 16)
    ]


def flat(layers: list[Any]) -> Floats:
    return np.concatenate([np.asarray(layer, dtype=np.float64).ravel() for layer in layers])


def test_median_and_trimmed_mean_equal_flwrs(flwr: Any, results: Any) -> None:
    for cells in range(1, 8):
        some = results[:cells]
        values = np.stack([flat(layers) for layers, _ in some])
        expected = flat(flwr.aggregate_median(some))
        np.testing.assert_allclose(combined(CoordinateMedian(), values), expected, rtol=1e-6, atol=1e-7)
        for share in (0.0, 0.2, 0.3, 0.49):
            if share == 0.0 or int(share * cells):
                expected = flat(flwr.aggregate_trimmed_avg(some, share))
                np.testing.assert_allclose(combined(TrimmedMean(share), values), expected, rtol=1e-6, atol=1e-7)


def test_krum_equals_flwrs(flwr: Any, results: Any) -> None:
    for cells, faulty in ((3, 0), (5, 0), (5, 1), (6, 1), (7, 1), (7, 2)):
        some = results[:cells]
        values = np.stack([flat(layers) for layers, _ in some])
        got = mean_of(values, Krum(faulty).weigh(seen_of(values, np.ones(cells))))
        assert np.array_equal(got, flat(flwr.aggregate_krum(some, faulty, 0)))


def test_multi_krum_chooses_as_flwr_but_weighs_as_the_paper(flwr: Any, results: Any) -> None:
    values = np.stack([flat(layers) for layers, _ in results])
    for keep in range(1, 8):
        weighed = MultiKrum(2, keep).weigh(seen_of(values, np.array([float(n) for _, n in results])))
        alike = [(layers, 1) for layers, _ in results]
        np.testing.assert_allclose(
            mean_of(values, weighed), flat(flwr.aggregate_krum(alike, 2, keep)), rtol=1e-6, atol=1e-7
        )
        by_examples = flat(flwr.aggregate_krum(results, 2, keep))
        chosen = np.array(weighed.weights) * [n for _, n in results]
        np.testing.assert_allclose(chosen @ values / chosen.sum(), by_examples, rtol=1e-6, atol=1e-6)


def test_flwr_takes_too_few_cells_where_we_refuse(flwr: Any, results: Any) -> None:
    assert flwr.aggregate_krum(results[:3], 1, 0)
    with pytest.raises(ConfigError, match="it takes 2 \\* faulty \\+ 3, 5"):
        Krum(1).check(3)


# Geometric median


def weiszfeld(models: Floats, weights: Floats, iterations: int, smoothing: float) -> Floats:
    """The paper's steps, on the models themselves."""
    point: Floats = weights @ models / weights.sum()
    for _ in range(iterations):
        pulls = weights / np.maximum(smoothing, np.linalg.norm(models - point, axis=1))
        point = pulls @ models / pulls.sum()
    return point


@settings(max_examples=100, deadline=None)
@given(federations(), st.integers(1, 6), st.sampled_from([1e-3, 1.0, 50.0]))
def test_steps_on_distances_are_steps_on_models(
    federation: tuple[Floats, Floats, Floats], iterations: int, smoothing: float
) -> None:
    models, weights, _ = federation
    weighed = GeometricMedian(iterations, smoothing).weigh(seen_of(models, weights))
    assert weighed.scale == 1.0 and sum(weighed.weights) == pytest.approx(1.0)
    np.testing.assert_allclose(
        mean_of(models, weighed),
        weiszfeld(models, weights, iterations, smoothing),
        rtol=1e-6,
        atol=1e-6 * np.abs(models).max(),
    )


def test_the_geometric_median_is_nearer_to_all_than_any_point_around() -> None:
    generator = np.random.default_rng(8)
    models, weights = generator.normal(size=(7, 5)), generator.uniform(1.0, 3.0, 7)

    def total(point: Floats) -> float:
        return float(weights @ np.linalg.norm(models - point, axis=1))

    found = mean_of(models, GeometricMedian().weigh(seen_of(models, weights)))
    for size in (1e-1, 1e-2, 1e-3):
        for direction in generator.normal(size=(50, 5)):
            assert total(found) < total(found + size * direction)


def test_geometric_medians_that_are_known() -> None:
    def found(models: Floats, weights: Floats) -> Floats:
        return mean_of(models, GeometricMedian().weigh(seen_of(models, weights)))

    diamond = np.array([[0.0, 3.0], [0.0, -1.0], [5.0, 0.0], [-2.0, 0.0]])
    np.testing.assert_allclose(found(diamond, np.ones(4)), [0.0, 0.0], atol=1e-5)
    line = np.array([[0.0], [1.0], [10.0], [11.0], [500.0]])
    np.testing.assert_allclose(found(line, np.ones(5)), [10.0], atol=1e-3)
    # More than half of the weight decides alone.
    np.testing.assert_allclose(found(diamond, np.array([1.0, 1.0, 1.0, 4.0])), [-2.0, 0.0], atol=1e-3)
    np.testing.assert_allclose(found(diamond, np.array([1e-9, 1e-9, 1e9, 1e-300])), [5.0, 0.0], atol=1e-12)
    assert np.array_equal(found(np.full((3, 2), 0.1), np.array([1.0, 2.0, 3.0])), [0.1, 0.1])
    assert np.array_equal(found(diamond[:1], np.array([3.0])), diamond[0])


@pytest.mark.parametrize("size", [1e2, 1e5, 1e10, 1e16, 1e20, 1e30, 1e38, 1e153, 1e200])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_garbage_of_any_size_moves_the_geometric_median_little(size: float) -> None:
    generator = np.random.default_rng(9)
    for cells in (5, 6, 7, 8, 9) * 8:
        models = generator.normal(size=(cells, 40))
        order = generator.permutation(cells)
        bad, good = np.split(order, [generator.integers(1, (cells - 1) // 2 + 1)])
        models[bad] = size * generator.normal(size=(len(bad), 40))
        found = mean_of(models, GeometricMedian().weigh(seen_of(models, np.ones(cells))))
        honest = models[good].mean(0)
        spread = np.linalg.norm(models[good] - honest, axis=1).max()
        # Lopuhaä and Rousseeuw, 1991: 2 k / (2 k - n) times the honest spread, with k honest cells of n.
        assert np.linalg.norm(found - honest) <= 2 * len(good) / (2 * len(good) - cells) * spread


# Norms, steps, the mean


@settings(max_examples=100, deadline=None)
@given(federations(), st.floats(1e-3, 1e3))
def test_norm_clipping_is_the_mean_of_clipped_updates(federation: tuple[Floats, Floats, Floats], clip: float) -> None:
    models, weights, start = federation
    updates = models - start
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    expected = start + np.average(updates / np.maximum(1.0, lengths / clip), axis=0, weights=weights)
    got = stepped(NormClipping(clip), models, weights, start, np.ones(len(models)))
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_short_updates_are_not_changed_by_clipping() -> None:
    seen = CellStats((0.5, 0.75, 0.0), (1.0,) * 3, norms=(0.0, 2.0, 1.0))
    assert NormClipping(2.0).weigh(seen) == AggregationWeights((0.5, 0.75, 0.0), 1.0)
    assert NormClipping(1.0).weigh(seen) == AggregationWeights((0.5, 0.375, 0.0), 0.7)
    huge = NormClipping(1.0).weigh(CellStats((1e300, 1e300), (1.0, 1.0), norms=(1.0, 1e43)))
    assert huge.weights[1] / huge.weights[0] == pytest.approx(1e-43) and huge.scale == pytest.approx(0.5)


@settings(max_examples=100, deadline=None)
@given(federations(), st.lists(st.floats(0.5, 1e4), min_size=12, max_size=12))
def test_normalized_mean_is_fednovas(federation: tuple[Floats, Floats, Floats], counts: list[float]) -> None:
    models, weights, start = federation
    steps = np.array(counts[: len(models)])
    parts = weights / weights.sum()
    expected = start + (parts @ steps) * (parts @ ((models - start) / steps[:, None]))
    got = stepped(NormalizedMean(), models, weights, start, steps)
    largest = max(np.abs(models).max(), np.abs(start).max())  # what cancels leaves rounding of this size
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * largest * steps.max() / steps.min())


@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=9).filter(any), st.floats(1e-3, 1e6))
def test_with_equal_steps_the_normalized_mean_is_the_mean(weights: list[float], steps: float) -> None:
    weighed = NormalizedMean().weigh(CellStats(tuple(weights), (steps,) * len(weights)))
    assert weighed.scale == 1.0
    exponent = math.frexp(max(weights))[1]
    assert weighed.weights == tuple(math.ldexp(weight, -exponent) for weight in weights)


def test_steps_of_cells_without_weight_do_not_matter() -> None:
    assert NormalizedMean().weigh(CellStats((1.0, 0.0, 3.0), (1.0, 0.0, 2.0))) == AggregationWeights(
        (0.25, 0.0, 0.375), 1.09375
    )
    for steps in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"cell 1 reports {steps} local steps.*steps="):
            NormalizedMean().weigh(CellStats((1.0, 1.0), (3.0, steps)))


def test_the_mean_takes_weights_as_they_are() -> None:
    assert Mean().weigh(CellStats((1e-300, 3.0, 0.0), (1.0,) * 3)) == AggregationWeights((1e-300, 3.0, 0.0), 1.0)


# All of them


@pytest.mark.parametrize("weighting", [Mean(), NormalizedMean(), NormClipping(1.0), GeometricMedian()])
def test_a_single_cell_is_taken(weighting: WeightedCombiner) -> None:
    weighting.check(1)
    model = np.array([[3.0, 4.0]])
    got = stepped(weighting, model, np.array([0.1]), np.zeros(2), np.array([7.0]))
    # A clipped one is shortened to its limit.
    np.testing.assert_allclose(got, model[0] / (5.0 if isinstance(weighting, NormClipping) else 1.0), rtol=1e-15)


def test_a_single_row_is_copied() -> None:
    for combiner in (CoordinateMedian(), TrimmedMean(0.0)):
        assert combined(combiner, np.array([[3.0, LARGEST]])).tolist() == [3.0, LARGEST]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-300, 300), min_size=5, max_size=9), st.integers(0, 99))
def test_weights_of_very_different_size_give_finite_numbers(exponents: list[float], seed: int) -> None:
    weights = 10.0 ** np.array(exponents)
    generator = np.random.default_rng(seed)
    models, start = generator.normal(size=(len(weights), 3)), generator.normal(size=3)
    for weighting in (Mean(), NormalizedMean(), NormClipping(0.5), GeometricMedian(), Krum(), MultiKrum()):
        seen = seen_of(models, weights, start, generator.uniform(1.0, 9.0, len(weights)))
        weighed = weighting.weigh(seen)
        assert weighed == weighting.weigh(seen)
        assert sum(weighed.weights) > 0.0 and 0.0 < weighed.scale < 100.0


@pytest.mark.parametrize(
    "combiner, cells, message",
    [
        (CoordinateMedian(), 0, "0 cells contribute.*weight"),
        (TrimmedMean(), 4, "share 0.2 leaves out nothing of 4 .*at least 5 cells"),
        (TrimmedMean(0.3), 3, "at least 4 cells"),
        (Krum(), 4, "4 contributing cells are too few.*faulty=1.*5; give"),
        (Krum(0), 2, "takes 2 \\* faulty \\+ 3, 3"),
        (MultiKrum(2), 6, "faulty=2.*7; give"),
        (MultiKrum(1, 6), 5, "select 6 of 5 .*selected=5"),
        (GeometricMedian(), 0, "0 cells"),
        (Mean(), 0, "0 cells"),
    ],
)
def test_too_few_cells_are_refused(combiner: Combiner, cells: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combiner.check(cells)


@pytest.mark.parametrize(
    "combiner, cells",
    [
        (CoordinateMedian(), 1),
        (TrimmedMean(), 5),
        (TrimmedMean(0), 1),
        (TrimmedMean(0.34), 3),
        (Krum(), 5),
        (Krum(0), 3),
        (MultiKrum(2), 7),
        (MultiKrum(1, 5), 5),
        (GeometricMedian(), 1),
        (NormClipping(1.0), 1),
    ],
)
def test_enough_cells_are_accepted(combiner: Combiner, cells: int) -> None:
    combiner.check(cells)


@pytest.mark.parametrize(
    "make, options, message",
    [
        (TrimmedMean, {"share": 0.5}, "share must be a number >= 0 and < 0.5, got 0.5"),
        (TrimmedMean, {"share": -0.1}, "share .* got -0.1"),
        (TrimmedMean, {"share": math.nan}, "share .* got nan"),
        (TrimmedMean, {"share": False}, "share .* got False"),
        (Krum, {"faulty": -1}, "faulty must be an integer of 0 or more, got -1"),
        (Krum, {"faulty": 1.0}, "faulty must be an integer of 0 or more, got 1.0"),
        (MultiKrum, {"faulty": True}, "faulty must be an integer of 0 or more, got True"),
        (MultiKrum, {"selected": 0}, "selected must be a positive integer, got 0"),
        (GeometricMedian, {"iterations": 0}, "iterations must be a positive integer, got 0"),
        (GeometricMedian, {"smoothing": 0.0}, "smoothing must be a number > 0, got 0.0"),
        (NormClipping, {"clip": math.inf}, "clip must be a number > 0, got inf"),
        (NormClipping, {"clip": "1"}, "clip must be a number > 0, got '1'"),
        (AggregationWeights, {"weights": (0.0, 0.0)}, "weights .0.0, 0.0."),
        (AggregationWeights, {"weights": (1.0, -1.0)}, "none negative"),
        (AggregationWeights, {"weights": (1.0, math.nan)}, "finite"),
        (AggregationWeights, {"weights": (1.0,), "scale": math.inf}, "scale inf"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_combiner_that_returns_too_many_weights_is_told_so() -> None:
    class Bad(WeightedCombiner):
        def weigh(self, given: CellStats) -> AggregationWeights:
            return AggregationWeights((1.0,) * 5)

    with pytest.raises(RoundError, match=r"Bad.weigh returned 5 weights for 2 cells; return one for each$"):
        weigh_cells(RoundContext((1.0, 0.0, 2.0), 0, steps=(5.0, 6.0, 7.0)), Bad())


def test_cells_that_give_nothing_are_not_weighed() -> None:
    seen: list[CellStats] = []

    class Watching(WeightedCombiner):
        def weigh(self, given: CellStats) -> AggregationWeights:
            seen.append(given)
            return AggregationWeights((3.0, 4.0), 0.5)

    context = RoundContext((1.0, 0.0, 2.0), 0, steps=(5.0, 6.0, 7.0), norms=(0.1, 0.2, 0.3))
    found = weigh_cells(context, Watching(), [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    assert seen == [CellStats((1.0, 2.0), (5.0, 7.0), (0.1, 0.3), ((0.0, 2.0), (2.0, 0.0)))]
    assert (found.counts, found.scale) == ((3.0, 0.0, 4.0), 0.5)
    assert weigh_cells(context, CoordinateMedian()).counts == (1.0, 0.0, 1.0)
