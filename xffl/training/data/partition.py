"""Deal a dataset out to the cells: who has which samples.

Each function takes something with one entry for each sample (labels, keys, or just their number) and the number of
cells, and returns a :class:`Partition <xffl.training.data.parts.Partition>`. All are local and pure: the same arguments
give the same partition on every rank and every machine, so nothing has to be sent; ``digest`` tells whether ranks
agree. Nothing here needs torch.

A cell with too few samples cannot train, so ``minimum`` holds for every cell. Where a draw leaves a cell short, the
largest cells give up samples of theirs, chosen at random; where that cannot help, a ConfigError says why.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence, Sized
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from xffl.errors import ConfigError
from xffl.training.arguments import (
    check_reached,
    checked_alpha,
    checked_cells,
    checked_shares,
    checked_sizes,
    count_of,
    shown,
    told,
)
from xffl.training.data.parts import Partition, label_codes
from xffl.training.data.rng import ORDER, PROPORTIONS, REPAIR, Draws, Floats, Indices, portions

__all__ = ["Partition", "by_key", "dirichlet", "iid", "inner_dirichlet", "quantity", "shards"]


def iid(
    samples: int | Sized, cells: int, *, seed: int = 0, shares: Sequence[float] | None = None, minimum: int = 1
) -> Partition:
    """Deal the samples out at random.

    :param samples: How many there are, or anything of that length.
    :param cells: Number of cells, at least 1.
    :param seed: Of the random order.
    :param shares: Relative size of each cell's part, such as ``(2, 1)``; ``None`` means equal parts.
    :param minimum: Samples that every cell gets at least.
    :return: A partition that covers the dataset; its sizes are the shares, rounded.
    :raises ConfigError: if an argument cannot be meant, or there are too few samples for the minimum.
    """
    count = count_of(samples)
    cells = checked_cells(cells, count, minimum)
    wanted = checked_shares(shares, cells)
    sizes = _lift(_apportion(count, wanted), minimum)
    return _of_owners(_deal(sizes, seed), cells, f"iid({told(cells, seed, minimum, shares=shares)})")


def quantity(
    samples: int | Sized,
    cells: int,
    *,
    alpha: float,
    seed: int = 0,
    shares: Sequence[float] | None = None,
    minimum: int = 1,
) -> Partition:
    """Deal the samples out at random, in parts whose sizes are a Dirichlet draw (quantity skew).

    :param samples: How many there are, or anything of that length.
    :param cells: Number of cells, at least 1.
    :param alpha: Concentration: large for equal parts, small for one part that has nearly all.
    :param seed: Of the sizes and of the random order.
    :param shares: Expected relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Samples that every cell gets at least.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument cannot be meant, or there are too few samples for the minimum.

    Li et al., 2021, arXiv 2102.02079 (section "quantity skew").
    """
    count = count_of(samples)
    cells = checked_cells(cells, count, minimum)
    wanted = checked_shares(shares, cells)
    drawn = portions(Draws(seed, PROPORTIONS).log_gamma(checked_alpha(alpha) * cells * wanted))
    sizes = _lift(_apportion(count, drawn), minimum)
    return _of_owners(_deal(sizes, seed), cells, f"quantity({told(cells, seed, minimum, alpha=alpha, shares=shares)})")


def dirichlet(
    labels: npt.ArrayLike,
    cells: int,
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
    :param cells: Number of cells, at least 1.
    :param alpha: Concentration: large for IID parts, small for classes that are each in one cell.
    :param seed: Of the proportions and of which sample goes where.
    :param shares: Expected relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Samples that every cell gets at least.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument cannot be meant, or there are too few samples for the minimum.

    Hsu et al., 2019, arXiv 1909.06335, for the idea and alpha's name; in this form, where classes are split, Yurochkin
    et al., 2019, arXiv 1905.12022. Hsu's own scheme draws a mixture of classes for each of equal cells:
    :func:`inner_dirichlet`; for as many samples of each class, its alpha is the one here times the number of classes.
    """
    codes, classes = label_codes(labels, "labels")
    cells = checked_cells(cells, len(codes), minimum)
    wanted = checked_shares(shares, cells)
    draws = Draws(seed, PROPORTIONS)
    shapes = np.tile(checked_alpha(alpha) * cells * wanted, (classes, 1))
    edges = np.cumsum(portions(draws.log_gamma(shapes)), axis=1)
    offsets = draws.uniform(classes)
    owners = np.empty(len(codes), dtype=np.int64)
    members = np.split(_by_class(codes, seed), np.cumsum(np.bincount(codes, minlength=classes))[:-1])
    for drawn, offset, found in zip(edges, offsets, members, strict=False):
        # A random offset rounds each cell up as often as its fraction says: small classes do not all go to cell 0.
        ends = np.minimum(np.floor(drawn * len(found) + offset), len(found)).astype(np.int64)
        ends[-1] = len(found)
        owners[found] = np.repeat(np.arange(cells), np.diff(ends, prepend=0))
    _repair(owners, cells, minimum, seed)
    return _of_owners(owners, cells, f"dirichlet({told(cells, seed, minimum, alpha=alpha, shares=shares)})")


def inner_dirichlet(
    labels: npt.ArrayLike,
    cells: int,
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
    :param cells: Number of cells, at least 1.
    :param alpha: Concentration of each cell's mixture over the classes: large for even ones, small for cells of one
        class.
    :param sizes: Samples of each cell, together at most all; ``None`` shares all samples out equally.
    :param seed: Of the mixtures and of which sample goes where.
    :param minimum: Samples that every cell gets at least; only checked, since sizes are given.
    :return: A partition with exactly these sizes. It covers the dataset if they sum to its length.
    :raises ConfigError: if an argument cannot be meant, or the sizes need more samples than there are.

    Acar et al., 2021, arXiv 2111.04263.
    """
    codes, classes = label_codes(labels, "labels")
    cells = checked_cells(cells, len(codes), minimum)
    wanted = _apportion(len(codes), np.full(cells, 1 / cells)) if sizes is None else checked_sizes(sizes, cells)
    if wanted.sum() > len(codes):
        raise ConfigError(
            f"sizes {shown(wanted)} sum to {wanted.sum()}, but there are {len(codes)} samples; give fewer"
        )
    if wanted.min() < minimum:
        raise ConfigError(f"sizes {shown(wanted)} hold one below the minimum {minimum}; change one of them")
    draws = Draws(seed, PROPORTIONS)
    logs = draws.log_gamma(np.full((cells, classes), checked_alpha(alpha)))
    places = np.repeat(np.arange(cells), wanted)[draws.permutation(int(wanted.sum()))]
    counts = np.bincount(codes, minlength=classes)
    picked = _pick_classes(places, logs, counts, draws)
    starts = np.cumsum(counts) - counts
    owners = np.full(len(codes), -1, dtype=np.int64)
    owners[_by_class(codes, seed)[starts[picked] + _places_in_group(picked, classes)]] = places
    return _of_owners(owners, cells, f"inner_dirichlet({told(cells, seed, minimum, alpha=alpha, sizes=sizes)})")


def shards(
    labels: npt.ArrayLike, cells: int, *, shards_per_cell: int | Sequence[int] = 2, seed: int = 0, minimum: int = 1
) -> Partition:
    """Sort the samples by label, cut them into equal shards, and deal these out at random (pathological non-IID).

    A cell with ``n`` shards has at most about ``n + 1`` classes where shards are smaller than classes. These shards
    have nothing to do with those of the model.

    :param labels: The label of each sample, 1-D.
    :param cells: Number of cells, at least 1.
    :param shards_per_cell: For all cells, or one number for each: so cells become unequal.
    :param seed: Of the deal, and of the order inside a class.
    :param minimum: Samples that every cell gets at least; only checked.
    :return: A partition that covers the dataset; shards differ by one sample at most.
    :raises ConfigError: if an argument cannot be meant, or shards are too small for the minimum.

    McMahan et al., 2017, arXiv 1602.05629.
    """
    codes, _ = label_codes(labels, "labels")
    cells = checked_cells(cells, len(codes), minimum)
    is_list = isinstance(shards_per_cell, (Sequence, np.ndarray))
    wanted = checked_sizes(
        shards_per_cell if is_list else (shards_per_cell,) * cells,  # type: ignore[arg-type]
        cells,
        what="shards_per_cell",
        least=1,
    )
    total = int(wanted.sum())
    holders = np.empty(total, dtype=np.int64)
    holders[Draws(seed, PROPORTIONS).permutation(total)] = np.repeat(np.arange(cells), wanted)
    lengths = np.full(total, len(codes) // total)
    lengths[: len(codes) % total] += 1
    owners = np.empty(len(codes), dtype=np.int64)
    owners[_by_class(codes, seed)] = np.repeat(holders, lengths)
    check_reached(owners, cells, minimum, f"{total} shards of {len(codes)} samples", "fewer shards_per_cell")
    return _of_owners(owners, cells, f"shards({told(cells, seed, minimum, shards_per_cell=shards_per_cell)})")


def by_key(
    keys: npt.ArrayLike, cells: int, *, seed: int = 0, shares: Sequence[float] | None = None, minimum: int = 1
) -> Partition:
    """Keep samples of the same key together, and deal the keys out so that sizes are balanced.

    The natural partition: keys are authors, hospitals, devices. The largest key comes first, and each goes to the cell
    that has least for its share.

    :param keys: The key of each sample, 1-D, of any kind that can be sorted.
    :param cells: Number of cells, at least 1.
    :param seed: Decides between keys of the same size.
    :param shares: Relative size of each cell's part; ``None`` means equal ones.
    :param minimum: Samples that every cell gets at least; only checked, as keys are not split.
    :return: A partition that covers the dataset.
    :raises ConfigError: if an argument cannot be meant, or keys are too few or too unequal for the minimum.
    """
    codes, count = label_codes(keys, "keys")
    cells = checked_cells(cells, len(codes), minimum)
    wanted = checked_shares(shares, cells)
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
    check_reached(owners, cells, minimum, f"{count} keys of {len(codes)} samples", "more or smaller keys, fewer cells")
    return _of_owners(owners, cells, f"by_key({told(cells, seed, minimum, shares=shares)})")


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
