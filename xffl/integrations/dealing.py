"""A dataset, dealt out to the cells: a framework itself deals it to the ranks of one cell only."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from xffl.errors import ConfigError
from xffl.training.data.partition import iid

__all__ = ["deal_out"]


def deal_out(dataset: Any, *, cell: int, cells: int, seed: int) -> Any:
    """Return the samples of one cell, drawn alike on all ranks of all cells; local.

    The parts are equally long, so that cells of equally many ranks make the same number of steps in an epoch: up to
    ``cells - 1`` samples are left out.

    :param dataset: A dataset that has a length, of ``datasets`` or of torch.
    :param cell: The number of the cell.
    :param cells: How many there are.
    :param seed: Seed of the draw.
    :return: The cell's part.
    :raises ConfigError: if the dataset has no length.
    """
    if cells == 1:
        return dataset
    try:
        samples = len(dataset)
    except TypeError:
        raise ConfigError(
            f"data='split' deals out a dataset that has a length, and {type(dataset).__name__} has none; give "
            "data='own', and each cell a stream of its own (xffl.adopt().cell is its number)"
        ) from None
    if samples < cells:
        raise ConfigError(f"data='split' deals {samples} samples to {cells} cells; give each cell at least one")
    part = iid(samples, cells, seed=seed).parts[cell][: samples // cells].tolist()
    return dataset.select(part) if hasattr(dataset, "select") else Subset(dataset, part)
