"""Partitions deal every sample once, alike on every machine, and as unevenly as they were asked to."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.errors import CheckpointError, ConfigError
from xffl.planning.partition import cell_shares
from xffl.training.data import partition
from xffl.training.data.partition import Partition
from xffl.training.data.rng import ORDER, PROPORTIONS, Draws, portions

METHODS: dict[str, Callable[..., Partition]] = {
    "iid": partition.iid,
    "quantity": lambda data, cells, **more: partition.quantity(data, cells, alpha=0.5, **more),
    "dirichlet": lambda data, cells, **more: partition.dirichlet(data, cells, alpha=0.3, **more),
    "inner_dirichlet": lambda data, cells, **more: partition.inner_dirichlet(data, cells, alpha=0.3, **more),
    "shards": partition.shards,
    "by_key": partition.by_key,
}
MENDING = ("iid", "quantity", "dirichlet", "inner_dirichlet")
"""These reach any minimum for which there are enough samples."""

GOLDEN = {
    "iid": "8eaaf85596c0c841",
    "quantity": "ef6008ad64ce22ac",
    "dirichlet": "0f6f6f1a5bc16e37",
    "inner_dirichlet": "67e7ec6f8ffbb66e",
    "shards": "adc58a5933dda51d",
    "by_key": "91838ead41d2369d",
}
"""First digits of the digests: the same on every machine and with every numpy."""


def labels_of(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    """Labels that need no random generator: they mix, and come equally often."""
    return (np.arange(samples) * 7 + seed) % classes


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Labels of up to 300 samples, a number of cells, a seed."""
    labels = draw(st.lists(st.integers(-3, 8), max_size=300))
    return np.array(labels, dtype=np.int64), draw(st.integers(1, 12)), draw(st.integers(0, 2**70))


def owners_of(found: Partition) -> np.ndarray:
    """The oracle's view: for each sample, in how many parts it is."""
    times = np.zeros(found.samples, dtype=int)
    for part in found.parts:
        for index in part:
            times[index] += 1
    return times


# All methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_every_sample_is_dealt_once(name: str, problem: tuple[np.ndarray, int, int]) -> None:
    labels, cells, seed = problem
    found = METHODS[name](labels, cells, seed=seed, minimum=0)
    assert found.cells == cells and found.samples == len(labels)
    assert (owners_of(found) == 1).all()
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in found.parts)


@pytest.mark.parametrize("name", METHODS)
@given(problem=problems())
@settings(max_examples=20, deadline=None)
def test_the_same_seed_deals_alike(name: str, problem: tuple[np.ndarray, int, int]) -> None:
    labels, cells, seed = problem
    first, again = (METHODS[name](labels, cells, seed=seed, minimum=0) for _ in range(2))
    assert first == again and hash(first) == hash(again)
    assert all(np.array_equal(one, other) for one, other in zip(first.parts, again.parts, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_another_seed_deals_otherwise(name: str) -> None:
    labels = labels_of(300, 30)
    assert len({METHODS[name](labels, 4, seed=seed).digest for seed in range(8)}) == 8


@pytest.mark.parametrize("name", METHODS)
def test_a_seed_deals_alike_on_every_machine(name: str) -> None:
    found = METHODS[name](labels_of(1000, 10), 4, seed=2026)
    assert found.digest[:16] == GOLDEN[name]


@pytest.mark.parametrize("name", MENDING)
@given(problem=problems(), minimum=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_no_cell_is_below_the_minimum(name: str, problem: tuple[np.ndarray, int, int], minimum: int) -> None:
    labels, cells, seed = problem
    if cells * minimum > len(labels):
        with pytest.raises(ConfigError, match=f"{len(labels)} samples are too few for {cells} cells"):
            METHODS[name](labels, cells, seed=seed, minimum=minimum)
        return
    found = METHODS[name](labels, cells, seed=seed, minimum=minimum)
    assert min(found.sizes) >= minimum and sum(found.sizes) == len(labels)


@pytest.mark.parametrize("name", MENDING)
@given(problem=problems(), slack=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_a_minimum_that_takes_nearly_all(name: str, problem: tuple[np.ndarray, int, int], slack: int) -> None:
    labels, cells, seed = problem
    minimum = max(0, len(labels) // cells - slack)
    found = METHODS[name](labels, cells, seed=seed, minimum=minimum)
    assert min(found.sizes) >= minimum and (owners_of(found) == 1).all() and found.samples == len(labels)


@pytest.mark.parametrize("name", METHODS)
def test_labels_of_any_kind_deal_alike(name: str) -> None:
    labels = labels_of(200, 10)
    strings = np.array([f"class {label}" for label in labels])
    assert METHODS[name](labels, 3) == METHODS[name](strings, 3) == METHODS[name](list(labels), 3)


def test_numpy_numbers_deal_alike() -> None:
    labels = np.arange(40) % 4
    wide = {"seed": np.int64(3), "minimum": np.int32(2)}
    plain = {"seed": 3, "minimum": 2}
    for deal, options in (
        (partition.iid, {}),
        (partition.by_key, {"shares": np.array([1.0, 2.0])}),
        (partition.dirichlet, {"alpha": np.float32(0.5)}),
        (partition.shards, {"shards_per_cell": np.array([1, 3])}),
    ):
        other = {key: value.tolist() for key, value in options.items()}
        first = deal(labels, np.int64(2), **wide, **options)
        second = deal(labels, 2, **plain, **other)
        assert first.digest == second.digest and first.method == second.method


def test_all_of_one_cell() -> None:
    for method in METHODS.values():
        assert np.array_equal(method(labels_of(50, 5), 1).parts[0], np.arange(50))


# Shares, sizes, keys --------------------------------------------------------------------------------------------------


@given(
    samples=st.integers(0, 500), shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), seed=st.integers(0, 9)
)
@settings(deadline=None)
def test_iid_sizes_are_the_shares(samples: int, shares: list[float], seed: int) -> None:
    found = partition.iid(samples, len(shares), shares=shares, seed=seed, minimum=0)
    for size, share in zip(found.sizes, shares, strict=True):
        assert abs(size - samples * share / math.fsum(shares)) < 1 + 1e-6


def test_iid_takes_a_count_or_anything_of_that_length() -> None:
    assert partition.iid(10, 3) == partition.iid(range(10), 3) == partition.iid(["x"] * 10, 3)
    assert partition.iid(10, 3).sizes == (4, 3, 3)


def test_iid_mixes_the_labels() -> None:
    table = partition.iid(4000, 4, seed=5).table(labels_of(4000, 10))
    # 100 of each expected; hypergeometric, sigma = 8.2.
    assert np.abs(table - 100).max() < 5 * 8.2


@given(problem=problems(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_inner_dirichlet_honours_sizes(problem: tuple[np.ndarray, int, int], data: st.DataObject) -> None:
    labels, cells, seed = problem
    cuts = sorted(data.draw(st.lists(st.integers(0, len(labels)), min_size=cells, max_size=cells)))
    sizes = tuple(int(size) for size in np.diff([0, *cuts]))
    found = partition.inner_dirichlet(labels, cells, alpha=0.2, sizes=sizes, seed=seed, minimum=0)
    assert found.sizes == sizes
    assert owners_of(found).max(initial=0) <= 1
    assert np.array_equal(found.unused, np.flatnonzero(owners_of(found) == 0))


def test_a_minimum_is_filled_with_samples_of_all_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    table = partition.dirichlet(labels, 2, alpha=1e9, shares=(1, 1e-9), minimum=100).table(labels)
    assert (table[1] > 0).sum() == 10


def test_what_is_left_over_goes_to_as_many_shards() -> None:
    assert sorted(partition.shards(labels_of(1003, 10), 10, shards_per_cell=1).sizes) == [100] * 7 + [101] * 3


def test_shards_of_equal_classes_hold_few_of_them() -> None:
    # 10 classes of 100; 20 shards of 50: none holds two classes.
    table = partition.shards(labels_of(1000, 10), 10, shards_per_cell=2, seed=1).table(labels_of(1000, 10))
    assert (table.sum(axis=1) == 100).all()
    assert ((table > 0).sum(axis=1) <= 2).all()
    assert (table % 50 == 0).all()


def test_shards_make_unequal_cells() -> None:
    found = partition.shards(labels_of(1000, 10), 4, shards_per_cell=(1, 2, 3, 4))
    assert found.sizes == (100, 200, 300, 400)


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_keys_are_not_split(problem: tuple[np.ndarray, int, int]) -> None:
    keys, cells, seed = problem
    found = partition.by_key(keys, cells, seed=seed, minimum=0)
    for one, other in itertools.combinations(found.parts, 2):
        assert not set(keys[one]) & set(keys[other])
    if len(keys):
        # A cell that has least takes the next key: no two differ by more than the largest key.
        assert max(found.sizes) - min(found.sizes) <= np.unique(keys, return_counts=True)[1].max()


def test_keys_follow_the_shares() -> None:
    keys = np.repeat(np.arange(100), 10)
    assert partition.by_key(keys, 3, shares=(2, 1, 1)).sizes == (500, 250, 250)
    assert partition.by_key(["big"] * 90 + ["small"] * 10, 2, shares=(1, 9)).sizes == (10, 90)


# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 5.0, 1000.0])
def test_dirichlet_proportions_have_their_moments(alpha: float) -> None:
    cells, classes, samples = 4, 500, 100
    labels = np.repeat(np.arange(classes), samples)
    table = partition.dirichlet(labels, cells, alpha=alpha, seed=3).table(labels)
    parts = table / samples
    # A marginal of Dir(alpha, ..., alpha) is Beta(alpha, (C - 1) alpha). Rounding to a sample adds at most 1/(4 n^2).
    mean = 1 / cells
    variance = mean * (1 - mean) / (cells * alpha + 1)
    assert np.allclose(parts.mean(axis=0), mean, atol=5 * math.sqrt((variance + 2.5e-5) / classes))
    assert parts.var(axis=0).mean() == pytest.approx(variance, rel=0.25, abs=3e-5)


def test_dirichlet_shares_are_the_mean() -> None:
    labels = np.repeat(np.arange(1000), 40)
    sizes = np.array(partition.dirichlet(labels, 3, alpha=1.0, shares=(5, 3, 2), seed=1).sizes)
    expected = np.array([0.5, 0.3, 0.2])
    sigma = np.sqrt(expected * (1 - expected) / (3 * 1.0 + 1) / 1000)
    assert (np.abs(sizes / sizes.sum() - expected) < 5 * sigma).all()


def test_a_large_alpha_approaches_iid() -> None:
    labels = labels_of(4000, 10)
    for method in (partition.dirichlet, partition.inner_dirichlet):
        table = method(labels, 4, alpha=1e8, seed=0).table(labels)
        # Expected 100 in each field; sampling a class for each place has a sigma of about 10.
        assert np.abs(table - 100).max() <= (1 if method is partition.dirichlet else 50)
    sizes = partition.quantity(4000, 4, alpha=1e8).sizes
    assert max(sizes) - min(sizes) <= 2


def test_a_small_alpha_concentrates() -> None:
    labels = labels_of(4000, 10)
    table = partition.dirichlet(labels, 4, alpha=1e-6, seed=0, minimum=0).table(labels)
    assert ((table > 0).sum(axis=0) == 1).all()
    table = partition.inner_dirichlet(labels, 4, alpha=1e-6, sizes=(200,) * 4, seed=0).table(labels)
    assert ((table > 0).sum(axis=1) <= 2).all() and (table > 0).sum() <= 6
    assert max(partition.quantity(4000, 4, alpha=1e-6, minimum=0).sizes) == 4000


def test_skew_falls_with_alpha() -> None:
    labels = labels_of(10_000, 10)
    for method in (partition.dirichlet, partition.inner_dirichlet):
        skews = []
        for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0):
            tables = [method(labels, 5, alpha=alpha, seed=seed).table(labels) for seed in range(5)]
            skews.append(np.mean([one.skew for table in tables for one in cell_shares(table)]))
        assert skews == sorted(skews, reverse=True)


def test_classes_of_one_sample_go_everywhere() -> None:
    # Rounding down and giving the rest to the first cell would leave the others without any.
    sizes = partition.dirichlet(np.arange(4000), 4, alpha=1e6, seed=0).sizes
    assert all(abs(size - 1000) < 5 * math.sqrt(4000 * 3 / 16) for size in sizes)


def test_inner_dirichlet_mixtures_have_their_moments() -> None:
    cells, classes, alpha, size = 400, 5, 0.5, 200
    labels = np.repeat(np.arange(classes), cells * size)  # far more than anybody can use up
    table = partition.inner_dirichlet(labels, cells, alpha=alpha, sizes=(size,) * cells, seed=1).table(labels)
    mean = 1 / classes
    variance = mean * (1 - mean) / (classes * alpha + 1)
    sampled = variance + (mean * (1 - mean) - variance) / size
    parts = table / size
    assert np.allclose(parts.mean(axis=0), mean, atol=5 * math.sqrt(sampled / cells))
    assert parts.var(axis=0).mean() == pytest.approx(sampled, rel=0.15)


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 3.0, 50.0])
def test_gamma_draws_have_their_moments(shape: float) -> None:
    drawn = np.exp(Draws(0, PROPORTIONS).log_gamma(np.full(200_000, shape)))
    assert drawn.mean() == pytest.approx(shape, abs=5 * math.sqrt(shape / 200_000))
    # The fourth central moment of Gamma(k) is 3 k^2 + 6 k.
    assert drawn.var() == pytest.approx(shape, abs=5 * math.sqrt((2 * shape**2 + 6 * shape) / 200_000))


def test_gamma_logarithms_do_not_underflow() -> None:
    drawn = Draws(0, PROPORTIONS).log_gamma(np.full(1000, 1e-6))
    assert np.isfinite(drawn).all() and drawn.min() < -1e5
    parts = portions(np.stack([drawn, drawn[::-1]], axis=1))
    assert np.isfinite(parts).all() and np.allclose(parts.sum(axis=1), 1)


@given(logs=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9))
def test_portions_are_a_softmax(logs: list[float]) -> None:
    expected = [math.exp(log - max(logs)) for log in logs]
    expected = [value / math.fsum(expected) for value in expected]
    assert np.allclose(portions(np.array(logs)), expected, rtol=1e-13, atol=1e-300)


def test_streams_of_one_seed_differ() -> None:
    streams = [(0, ORDER), (0, PROPORTIONS), (1, ORDER), (2**32, ORDER), (0, ORDER, 0), (0, ORDER, 1), (0, ORDER, 0, 1)]
    assert len({Draws(seed, *stream).keys(4).tobytes() for seed, *stream in streams}) == len(streams)


# The object -----------------------------------------------------------------------------------------------------------


def test_a_partition_is_a_file_that_ranks_share(tmp_path: Path) -> None:
    made = partition.inner_dirichlet(labels_of(100, 3), 3, alpha=1, sizes=(0, 30, 20), minimum=0)
    made.save(tmp_path / "parts.npz")
    found = Partition.load(tmp_path / "parts.npz")
    assert found == made and found.method == made.method and found.sizes == (0, 30, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["parts.npz"]


def test_what_is_no_partition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no partition file"):
        Partition.load(tmp_path / "none.npz")
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError, match="is not a partition file"):
        Partition.load(tmp_path / "half.npz")
    partition.iid(10, 2).save(tmp_path / "parts.npz")
    with np.load(tmp_path / "parts.npz") as file:
        arrays: dict[str, Any] = dict(file)
    arrays["indices"] = arrays["indices"][::-1]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(CheckpointError, match="differs from the one that was saved"):
        Partition.load(tmp_path / "other.npz")


def test_parts_are_sorted_and_cannot_be_changed() -> None:
    given_ = np.array([3, 1, 2])
    found = Partition((given_,), 5)
    given_[0] = 4
    assert found.parts[0].tolist() == [1, 2, 3] and found.unused.tolist() == [0, 4]
    with pytest.raises(ValueError, match="read-only"):
        found.parts[0][0] = 0


@pytest.mark.parametrize(
    "parts, message",
    [
        ((), "at least one cell"),
        (([0, 1], [1, 2]), r"sample 1 is dealt to cells \[0, 1\]"),
        (([0, 0],), r"sample 0 is dealt to cells \[0, 0\]"),
        (([0, 5],), "cell 0 has samples 0 to 5, but the dataset has 5"),
        (([-1],), "cell 0 has samples -1"),
        (([0.5],), "float64"),
        (([[0]],), r"shape \(1, 1\)"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Partition(parts, 5)


def test_the_table_counts() -> None:
    labels = np.array(["b", "a", "b", "c", "a"])
    found = Partition((np.array([0, 1]), np.array([2, 4, 3])), 5)
    assert found.table(labels).tolist() == [[1, 1, 0], [1, 1, 1]]
    with pytest.raises(ConfigError, match="4 labels, but the partition is of 5 samples"):
        found.table(labels[:4])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: partition.iid(10, 0), "cells must be a positive integer, got 0"),
        (lambda: partition.iid(10, True), "cells must be a positive integer, got True"),
        (lambda: partition.iid(-1, 2), "samples must be an integer of 0 or more, got -1"),
        (lambda: partition.iid(10, 2, seed=-1), "seed must be an integer of 0 or more, got -1"),
        (lambda: partition.iid(10, 2, seed=0.5), "seed must be an integer of 0 or more, got 0.5"),  # type: ignore[arg-type]
        (lambda: partition.iid(10, 2, minimum=6), "lower minimum to 5"),
        (lambda: partition.iid(10, 2, shares=(1, 2, 3)), "one entry for each of 2 cells, got 3"),
        (lambda: partition.iid(10, 2, shares=(1, 0)), r"must be positive numbers, got \(1.0, 0.0\)"),
        (lambda: partition.iid(10, 2, shares=(1, math.inf)), "must be positive"),
        (lambda: partition.iid(10, 2, shares=(1e308, 1e308)), "have no sum"),
        (lambda: partition.iid(10, 2, shares="ab"), "have no sum"),  # type: ignore[arg-type]
        (lambda: partition.dirichlet([[0], [0, 1]], 2, alpha=1), "labels must be an array"),
        (lambda: partition.dirichlet([0, 1], 2, alpha=0), "alpha must be a number >= 1e-09 and <= 1e\\+09, got 0"),
        (lambda: partition.dirichlet([0, 1], 2, alpha=math.nan), "alpha must be .* got nan"),
        (lambda: partition.dirichlet([0, 1], 2, alpha="1"), "alpha must be .* got '1'"),  # type: ignore[arg-type]
        (lambda: partition.dirichlet([[0, 1]], 2, alpha=1), r"labels must be a 1-D array .* shape \(1, 2\)"),
        (lambda: partition.dirichlet(np.array(["a", 1], dtype=object), 2, alpha=1), "cannot be sorted"),
        (lambda: partition.inner_dirichlet([0, 1], 2, alpha=1, sizes=(2, 1)), r"sizes \(2, 1\) sum to 3"),
        (lambda: partition.inner_dirichlet([0, 1], 2, alpha=1, sizes=(2, 0)), "at least the minimum 1"),
        (
            lambda: partition.inner_dirichlet([0, 1], 2, alpha=1, sizes=(1,)),
            "sizes must have one entry for each of 2 cells, got 1",
        ),
        (
            lambda: partition.shards([0] * 10, 2, shards_per_cell=0),
            "shards_per_cell: entry must be a positive integer, got 0",
        ),
        (lambda: partition.shards([0] * 10, 2, shards_per_cell=(1, 2, 3)), "one entry for each of 2 cells, got 3"),
        (lambda: partition.shards([0] * 3, 3, shards_per_cell=(1, 9, 9)), "below the minimum 1"),
        (lambda: partition.by_key(["a"] * 10, 2), "1 keys of 10 samples leave cell 1 of 2 with 0"),
    ],
)
def test_what_cannot_be_met_is_said(call: Callable[[], Partition], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_partitions_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from xffl.training.data import partition; partition.iid(9, 3)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
