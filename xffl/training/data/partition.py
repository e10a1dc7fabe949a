"""Partitions of a dataset: who has which samples.

Each function takes something with one entry for each sample (labels, keys, or just their number) and the number of
cells, and returns a :class:`Partition`. All are local and pure: the same arguments give the same partition on every
rank and every machine, so nothing has to be sent; ``digest`` tells whether ranks agree. Nothing here needs torch.

A cell with too few samples cannot train, so ``minimum`` holds for every cell. Where a draw leaves a cell short, the
largest cells give up samples of theirs, chosen at random; where that cannot help, a ConfigError says why.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import numbers
import os
import struct
import tokenize
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xffl.checks import integer, number, shorten
from xffl.errors import CheckpointError, ConfigError
from xffl.files import open_regular, written_whole
from xffl.training.data.place import Cells, count_cells
from xffl.training.data.rng import ORDER, PROPORTIONS, REPAIR, Draws, Floats, Indices, portions

__all__ = ["Partition", "by_key", "dirichlet", "iid", "index_array", "inner_dirichlet", "quantity", "shards"]

_READ_ERRORS = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError),
    *(ValueError, KeyError, AttributeError, TypeError, IndexError, SyntaxError, tokenize.TokenError, MemoryError),
)
"""What NumPy and zipfile raise where a file is no archive of arrays, or is a damaged one"""
LEAST_ALPHA, MOST_ALPHA = 1e-9, 1e9
"""Beyond these, a Dirichlet draw is one cell or the mean, to the last digit."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Index arrays over a dataset, one for each cell; no sample is in two of them.

    Two partitions are equal if they deal equally many samples alike, however they were made.

    :param parts: The samples of each cell, counted from 0. They are kept as sorted, read-only int64 arrays.
    :param samples: Length of the dataset.
    :param method: How the partition was made, for titles and records.
    :raises ConfigError: if there is no cell, an index is outside the dataset, or two are the same.
    """

    parts: tuple[Indices, ...]
    samples: int
    method: str = ""
    digest: str = field(init=False)
    """SHA-256 of the parts, as hexadecimal digits: the same on every machine, to compare ranks and runs."""

    def __post_init__(self) -> None:
        parts = tuple(np.sort(index_array(f"the part of cell {cell}", part)) for cell, part in enumerate(self.parts))
        if not parts:
            raise ConfigError("a partition must have at least one cell; give an index array for each cell")
        owners = np.zeros(self.samples, dtype=np.int64)
        for cell, part in enumerate(parts):
            part.flags.writeable = False
            if len(part) and (part[0] < 0 or part[-1] >= self.samples):
                raise ConfigError(
                    f"cell {cell} has samples {part[0]} to {part[-1]}, but the dataset has {self.samples}; count from "
                    f"0 to {self.samples - 1}"
                )
            np.add.at(owners, part, 1)
        if len(owners) and owners.max() > 1:
            twice = int(owners.argmax())
            cells = [cell for cell, part in enumerate(parts) for index in part if index == twice]
            raise ConfigError(f"sample {twice} is dealt to cells {cells}; a sample belongs to one cell, once")
        hashed = hashlib.sha256(np.array([self.samples, len(parts)], dtype="<i8").tobytes())
        for part in parts:
            hashed.update(np.array([len(part)], dtype="<i8").tobytes() + part.astype("<i8").tobytes())
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "digest", hashed.hexdigest())

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Partition) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each cell."""
        return tuple(len(part) for part in self.parts)

    @property
    def unused(self) -> Indices:
        """The samples that no cell has, sorted."""
        is_used = np.zeros(self.samples, dtype=bool)
        for part in self.parts:
            is_used[part] = True
        return np.flatnonzero(~is_used).astype(np.int64, copy=False)

    def table(self, labels: npt.ArrayLike) -> Indices:
        """Count each cell's samples of each class.

        :param labels: The label of every sample of the dataset, 1-D, of any kind that can be sorted.
        :return: Counts, of shape (cells, classes); classes are the labels that occur, as ``numpy.unique`` sorts them.
        :raises ConfigError: if the labels are not one for each sample.
        """
        codes, classes = _label_codes(labels, "labels")
        if len(codes) != self.samples:
            raise ConfigError(
                f"there are {len(codes)} labels, but the partition is of {self.samples} samples; give the labels of "
                "the dataset that it was made for"
            )
        return np.stack([np.bincount(codes[part], minlength=classes) for part in self.parts]).astype(np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partition into a file; a reader finds the whole of it or nothing.

        Local: let one rank do it, and the others load the file behind a barrier.

        :param path: Where to write, such as ``parts.npz``; its folder exists.
        """
        with written_whole(Path(path)) as file:
            np.savez_compressed(
                file,
                samples=np.array(self.samples, dtype="<i8"),
                sizes=np.array(self.sizes, dtype="<i8"),
                indices=np.concatenate(self.parts).astype("<i8"),
                method=np.array(self.method),
                digest=np.array(self.digest),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition from a file; local.

        :param path: What :meth:`save` wrote.
        :return: The same partition.
        :raises ConfigError: if there is no such file.
        :raises CheckpointError: if the file holds no partition, or another one than was written.
        """
        if not Path(path).is_file():
            raise ConfigError(f"there is no partition file {str(path)!r}; give what Partition.save wrote")
        try:
            with open_regular(Path(path)) as held, np.load(held, allow_pickle=False) as file:
                ends = np.cumsum(file["sizes"])[:-1]
                parts = tuple(np.split(file["indices"], ends))
                loaded = cls(parts, int(file["samples"]), str(file["method"]))
                digest = str(file["digest"])
        except _READ_ERRORS as error:
            raise CheckpointError(f"{str(path)!r} is not a partition file ({error}); make and save it again") from error
        if loaded.digest != digest:
            raise CheckpointError(
                f"the partition in {str(path)!r} differs from the one that was saved (its digest); make it again"
            )
        return loaded


def iid(
    samples: int | Sized, cells: Cells, *, seed: int = 0, shares: Sequence[float] | None = None, minimum: int = 1
) -> Partition:
    """Deal the samples out at random.

    :param samples: How many there are, or anything of that length.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param seed: Of the random order.
    :param shares: Relative size of each cell's part, such as ``(2, 1)``; ``None`` means equal parts.
    :param minimum: Least samples of a cell.
    :return: A partition that covers the dataset; its sizes are the shares, rounded.
    :raises ConfigError: if an argument is invalid, or there are too few samples for the minimum.
    """
    count = _count_of(samples)
    cells = _checked_cells(cells, count, minimum)
    wanted = _checked_shares(shares, cells)
    sizes = _lift(_apportion(count, wanted), minimum)
    return _of_owners(_deal(sizes, seed), cells, _call("iid", cells, seed, minimum, shares=shares))


def quantity(
    samples: int | Sized,
    cells: Cells,
    *,
    alpha: float,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    minimum: int = 1,
) -> Partition:
    """Deal the samples out at random, in parts whose sizes are a Dirichlet draw (quantity skew).

    :param samples: How many there are, or anything of that length.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param alpha: Concentration: large for equal parts, small for one part that has nearly all.
    :param seed: Of the sizes and of the random order.
    :param shares: Expected relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Least samples of a cell.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument is invalid, or there are too few samples for the minimum.

    Li et al., 2021, arXiv 2102.02079 (section "quantity skew").
    """
    count = _count_of(samples)
    cells = _checked_cells(cells, count, minimum)
    wanted = _checked_shares(shares, cells)
    drawn = portions(Draws(seed, PROPORTIONS).log_gamma(_checked_alpha(alpha) * cells * wanted))
    sizes = _lift(_apportion(count, drawn), minimum)
    return _of_owners(_deal(sizes, seed), cells, _call("quantity", cells, seed, minimum, alpha=alpha, shares=shares))


def dirichlet(
    labels: npt.ArrayLike,
    cells: Cells,
    *,
    alpha: float,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    minimum: int = 1,
) -> Partition:
    """Split each class over the cells in proportions that are a Dirichlet draw (label skew).

    Sizes differ, too: whoever draws much of several classes has more. With ``shares``, cell ``c`` gets the part
    ``shares[c]`` of each class in expectation. Where ``minimum`` has to be mended, labels of the largest cells enter
    the small ones.

    :param labels: The label of each sample, 1-D.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param alpha: Concentration: large for IID parts, small for classes that are each in one cell.
    :param seed: Of the proportions and of which sample goes where.
    :param shares: Expected relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Least samples of a cell.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument is invalid, or there are too few samples for the minimum.

    Hsu et al., 2019, arXiv 1909.06335, for the idea and alpha's name; in this form, where classes are split, Yurochkin
    et al., 2019, arXiv 1905.12022. Hsu's own scheme draws a mixture of classes for each of equal cells:
    :func:`inner_dirichlet`; for as many samples of each class, its alpha is the one here times the number of classes.
    """
    codes, classes = _label_codes(labels, "labels")
    cells = _checked_cells(cells, len(codes), minimum)
    wanted = _checked_shares(shares, cells)
    draws = Draws(seed, PROPORTIONS)
    shapes = np.tile(_checked_alpha(alpha) * cells * wanted, (classes, 1))
    edges = np.cumsum(portions(draws.log_gamma(shapes)), axis=1)
    offsets = draws.uniform(classes)
    owners = np.empty(len(codes), dtype=np.int64)
    members = np.split(_by_class(codes, seed), np.cumsum(np.bincount(codes, minlength=classes))[:-1])
    for drawn, offset, of_class in zip(edges, offsets, members, strict=False):
        # A random offset rounds each cell up as often as its fraction says: small classes do not all go to cell 0.
        ends = np.minimum(np.floor(drawn * len(of_class) + offset), len(of_class)).astype(np.int64)
        ends[-1] = len(of_class)
        owners[of_class] = np.repeat(np.arange(cells), np.diff(ends, prepend=0))
    _repair(owners, cells, minimum, seed)
    return _of_owners(owners, cells, _call("dirichlet", cells, seed, minimum, alpha=alpha, shares=shares))


def inner_dirichlet(
    labels: npt.ArrayLike,
    cells: Cells,
    *,
    alpha: float,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    minimum: int = 1,
) -> Partition:
    """Give each cell its own mixture of classes, a Dirichlet draw, at given sizes.

    The cells' places are filled in random order: each draws a class from its cell's mixture among the classes that have
    samples left, and takes one. So the last places take what is left, and no sample is used twice.

    :param labels: The label of each sample, 1-D.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param alpha: Concentration of each cell's mixture over the classes: large for even ones, small for cells of one
        class.
    :param sizes: Samples of each cell, together at most all; ``None`` shares all samples out equally.
    :param seed: Of the mixtures and of which sample goes where.
    :param minimum: Least samples of a cell; only checked, since sizes are given.
    :return: A partition with exactly these sizes. It covers the dataset if they sum to its length.
    :raises ConfigError: if an argument is invalid, or the sizes need more samples than there are.

    Acar et al., 2021, arXiv 2111.04263.
    """
    codes, classes = _label_codes(labels, "labels")
    cells = _checked_cells(cells, len(codes), minimum)
    wanted = (
        _apportion(len(codes), np.full(cells, 1 / cells)) if sizes is None else _checked_sizes(sizes, cells, "sizes", 0)
    )
    if wanted.sum() > len(codes):
        raise ConfigError(
            f"sizes {_listed(wanted)} sum to {wanted.sum()}, but there are {len(codes)} samples; give fewer"
        )
    if wanted.min() < minimum:
        raise ConfigError(f"sizes must be at least the minimum {minimum}, got {_listed(wanted)}")
    draws = Draws(seed, PROPORTIONS)
    logs = draws.log_gamma(np.full((cells, classes), _checked_alpha(alpha)))
    places = np.repeat(np.arange(cells), wanted)[draws.permutation(int(wanted.sum()))]
    counts = np.bincount(codes, minlength=classes)
    picked = _pick_classes(places, logs, counts, draws)
    starts = np.cumsum(counts) - counts
    owners = np.full(len(codes), -1, dtype=np.int64)
    owners[_by_class(codes, seed)[starts[picked] + _places_in_group(picked, classes)]] = places
    return _of_owners(owners, cells, _call("inner_dirichlet", cells, seed, minimum, alpha=alpha, sizes=sizes))


def shards(
    labels: npt.ArrayLike, cells: Cells, *, shards_per_cell: int | Sequence[int] = 2, seed: int = 0, minimum: int = 1
) -> Partition:
    """Sort the samples by label, cut them into equal shards, and deal these out at random (pathological non-IID).

    A cell with ``n`` shards has at most about ``n + 1`` classes where shards are smaller than classes. These shards
    have nothing to do with those of the model.

    :param labels: The label of each sample, 1-D.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param shards_per_cell: For all cells, or one number for each: so cells become unequal.
    :param seed: Of the deal, and of the order inside a class.
    :param minimum: Least samples of a cell; only checked.
    :return: A partition that covers the dataset; shards differ by one sample at most.
    :raises ConfigError: if an argument is invalid, or shards are too small for the minimum.

    McMahan et al., 2017, arXiv 1602.05629.
    """
    codes, _ = _label_codes(labels, "labels")
    cells = _checked_cells(cells, len(codes), minimum)
    is_list = isinstance(shards_per_cell, (Sequence, np.ndarray))
    given: Any = shards_per_cell if is_list else (shards_per_cell,) * cells
    wanted = _checked_sizes(given, cells, "shards_per_cell", 1)
    total = int(wanted.sum())
    holders = np.empty(total, dtype=np.int64)
    holders[Draws(seed, PROPORTIONS).permutation(total)] = np.repeat(np.arange(cells), wanted)
    lengths = np.full(total, len(codes) // total)
    lengths[: len(codes) % total] += 1
    owners = np.empty(len(codes), dtype=np.int64)
    owners[_by_class(codes, seed)] = np.repeat(holders, lengths)
    _check_minimum(
        owners,
        cells=cells,
        minimum=minimum,
        what=f"{total} shards of {len(codes)} samples",
        advice="fewer shards_per_cell",
    )
    return _of_owners(owners, cells, _call("shards", cells, seed, minimum, shards_per_cell=shards_per_cell))


def by_key(
    keys: npt.ArrayLike, cells: Cells, *, seed: int = 0, shares: Sequence[float] | None = None, minimum: int = 1
) -> Partition:
    """Keep samples of the same key together, and deal the keys out so that sizes are balanced.

    The natural partition: keys are authors, hospitals, devices. The largest key comes first, and each goes to the cell
    that has least for its share.

    :param keys: The key of each sample, 1-D, of any kind that can be sorted.
    :param cells: The state, whose cells these are, or their number, ``state.cells``.
    :param seed: Decides between keys of the same size.
    :param shares: Relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Least samples of a cell; only checked, as keys are not split.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument is invalid, or keys are too few or too unequal for the minimum.
    """
    codes, count = _label_codes(keys, "keys")
    cells = _checked_cells(cells, len(codes), minimum)
    wanted = _checked_shares(shares, cells)
    counts = np.bincount(codes, minlength=count)
    order = Draws(seed, ORDER).permutation(count)
    order = order[np.argsort(-counts[order], kind="stable")]
    holders = np.empty(count, dtype=np.int64)
    loads = [0] * cells
    # Of cells that have as much for their share (at first, nothing), the one that shall have most is served first.
    queue = [(0.0, -float(share), cell) for cell, share in enumerate(wanted)]
    heapq.heapify(queue)
    for key in order:
        _, share, cell = queue[0]
        holders[key] = cell
        loads[cell] += int(counts[key])
        heapq.heapreplace(queue, (loads[cell] / -share, share, cell))
    owners = holders[codes]
    _check_minimum(
        owners,
        cells=cells,
        minimum=minimum,
        what=f"{count} keys of {len(codes)} samples",
        advice="more or smaller keys, fewer cells",
    )
    return _of_owners(owners, cells, _call("by_key", cells, seed, minimum, shares=shares))


# Arguments ------------------------------------------------------------------------------------------------------------


def index_array(what: str, values: npt.ArrayLike) -> Indices:
    """Return a copy of indices as an int64 array."""
    try:
        given: npt.NDArray[Any] = np.asarray(values)
    except ValueError as error:  # lists of unequal lengths
        raise ConfigError(f"{what} must be a 1-D array of integers ({error})") from error
    if given.ndim != 1 or (len(given) and not np.issubdtype(given.dtype, np.integer)):
        raise ConfigError(f"{what} must be a 1-D array of integers, got {given.dtype} of shape {given.shape}")
    return given.astype(np.int64)


def _label_codes(labels: npt.ArrayLike, what: str) -> tuple[Indices, int]:
    """Return the number of each entry's value in sorted order, and how many values there are."""
    try:
        values: npt.NDArray[Any] = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of bf16 or with gradients; lists of lists
        raise ConfigError(f"{what} must be an array ({error}); give one number or string for each sample") from error
    if values.ndim != 1:
        raise ConfigError(f"{what} must be a 1-D array with one entry for each sample, got shape {values.shape}")
    try:
        classes, codes = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise ConfigError(f"{what} cannot be sorted ({error}); give numbers or strings, not a mixture") from error
    return codes.astype(np.int64, copy=False), len(classes)


def _count_of(samples: int | Sized) -> int:
    return len(samples) if isinstance(samples, Sized) else integer("samples", samples, 0)


def _checked_alpha(alpha: float) -> float:
    return number("alpha", alpha, LEAST_ALPHA, MOST_ALPHA, hint="give one such as 0.5")


def _checked_cells(cells: Cells, samples: int, minimum: int) -> int:
    """Return the number of cells, for which there are enough samples."""
    count = count_cells(cells)
    if count * integer("minimum", minimum, 0) > samples:
        raise ConfigError(
            f"{samples} samples are too few for {count} cells of at least {minimum}; lower minimum to "
            f"{samples // count} or less, or take fewer cells"
        )
    return count


def _checked_shares(shares: Sequence[float] | None, cells: int) -> Floats:
    """Return each cell's share of all samples; together 1."""
    try:
        given = [1.0] * cells if shares is None else [float(share) for share in shares]
        whole = math.fsum(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"shares {shares!r} have no sum ({error}); give relative sizes, such as (2, 1)") from error
    if len(given) != cells:
        raise ConfigError(f"shares must have one entry for each of {cells} cells, got {len(given)}")
    if not all(math.isfinite(share) and share > 0 for share in given):
        raise ConfigError(f"shares must be positive numbers, got {_listed(given)}; give relative sizes, such as (2, 1)")
    return np.array(given) / whole


def _checked_sizes(sizes: Sequence[int], cells: int, what: str, minimum: int) -> Indices:
    """Return an integer for each cell."""
    given = [integer(f"{what}: entry", size, minimum) for size in sizes]
    if len(given) != cells:
        raise ConfigError(f"{what} must have one entry for each of {cells} cells, got {len(given)}")
    return np.array(given, dtype=np.int64)


def _check_minimum(owners: Indices, cells: int, minimum: int, what: str, advice: str) -> None:
    """Raise where a cell was dealt fewer samples than the minimum."""
    sizes = np.bincount(owners, minlength=cells)
    if sizes.min() < minimum:
        cell = int(sizes.argmin())
        raise ConfigError(
            f"{what} leave cell {cell} of {cells} with {sizes[cell]}, below the minimum {minimum}; take {advice}, or a "
            "lower minimum"
        )


def _listed(values: Sequence[object] | Indices) -> str:
    return f"({shorten(values, 16)})"


def _call(name: str, cells: int, seed: int, minimum: int, **options: object) -> str:
    """Write a call with the arguments that tell partitions of one dataset apart; those that are None are left out."""
    given: dict[str, object] = {
        "cells": integer("cells", cells),
        **{key: value for key, value in options.items() if value is not None},
    }
    given |= {"minimum": integer("minimum", minimum, 0), "seed": integer("seed", seed, 0)}
    texts = (
        f"{key}={value if isinstance(value, numbers.Real) else _listed(list(value))}"  # type: ignore[call-overload]
        for key, value in given.items()
    )
    return f"{name}({', '.join(texts)})"


# Dealing --------------------------------------------------------------------------------------------------------------


def _of_owners(owners: Indices, cells: int, method: str) -> Partition:
    """Make the partition of an array that names each sample's cell, or -1."""
    order = np.argsort(owners, kind="stable")
    ends = np.searchsorted(owners[order], np.arange(cells + 1))
    parts = tuple(order[start:end] for start, end in pairwise(ends))
    return Partition(parts, len(owners), method)


def _deal(sizes: Indices, seed: int) -> Indices:
    """Name a cell for each sample, at random, so that cells have these sizes."""
    owners = np.empty(int(sizes.sum()), dtype=np.int64)
    owners[Draws(seed, ORDER).permutation(len(owners))] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _by_class(codes: Indices, seed: int) -> Indices:
    """Return all samples, class after class, in random order inside each."""
    order = Draws(seed, ORDER).permutation(len(codes))
    return order[np.argsort(codes[order], kind="stable")]


def _apportion(total: int, proportions: Floats) -> Indices:
    """Round ``total * proportions`` so that the sum is right: what is left goes to the largest remainders."""
    exact = total * proportions
    sizes = np.floor(exact).astype(np.int64)
    left = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes


def _lift(sizes: Indices, minimum: int) -> Indices:
    """Raise sizes to the minimum at the cost of the largest, which are cut down to a common level."""
    lifted = np.maximum(sizes, minimum)
    owed = int(lifted.sum() - sizes.sum())
    if not owed:
        return sizes
    levels = range(minimum, int(lifted.max()) + 1)
    level = levels[bisect_left(levels, -owed, key=lambda top: -int(np.maximum(lifted - top, 0).sum()))]
    owed -= int(np.maximum(lifted - level, 0).sum())
    lifted = np.minimum(lifted, level)
    lifted[np.flatnonzero(lifted == level)[:owed]] -= 1
    return lifted


def _repair(owners: Indices, cells: int, minimum: int, seed: int) -> None:
    """Let the largest cells give random samples to cells below the minimum, in place."""
    sizes = np.bincount(owners, minlength=cells)
    wanted = _lift(sizes, minimum)
    surplus = sizes - wanted
    if not surplus.any():
        return
    order = Draws(seed, REPAIR).permutation(len(owners))
    is_given = _places_in_group(owners[order], cells) < surplus[owners[order]]
    owners[order[is_given]] = np.repeat(np.arange(cells), np.maximum(-surplus, 0))


def _pick_classes(places: Indices, logs: Floats, counts: Indices, draws: Draws) -> Indices:
    """Draw a class for each place from its cell's mixture; no class is drawn more often than it has samples.

    Everybody draws at once; in each class the first ones are served. Those who find it empty draw again, without it.
    """
    picked = np.empty(len(places), dtype=np.int64)
    left = counts.copy()
    waiting = np.arange(len(places))
    while len(waiting):
        uniform = draws.uniform(len(waiting))
        cells, group = np.unique(places[waiting], return_inverse=True)
        edges = np.cumsum(portions(np.where(left > 0, logs[cells], -np.inf)), axis=1)
        last = int(np.flatnonzero(left)[-1])
        choice = np.empty(len(waiting), dtype=np.int64)
        for row, members in enumerate(np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])):
            choice[members] = np.searchsorted(edges[row], uniform[members] * edges[row, -1], side="right")
        choice = np.minimum(choice, last)
        is_served = _places_in_group(choice, len(left)) < left[choice]
        picked[waiting[is_served]] = choice[is_served]
        left -= np.bincount(choice[is_served], minlength=len(left))
        waiting = waiting[~is_served]
    return picked


def _places_in_group(groups: Indices, count: int) -> Indices:
    """Say of each entry how many before it are of the same group."""
    sizes = np.bincount(groups, minlength=count)
    places = np.empty(len(groups), dtype=np.int64)
    places[np.argsort(groups, kind="stable")] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places
