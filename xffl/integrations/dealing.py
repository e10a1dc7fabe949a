"""A dataset, dealt out to the cells: a framework itself deals it to the ranks of one cell only."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from xffl.errors import ConfigError
from xffl.training.data.partition import iid

__all__ = ["deal_out", "is_dealt_out"]

MARK = "is_part_of_cell"
"""The attribute of a dataset of torch that was dealt out"""


class PartDescription(str):
    """The description of a dataset of Hugging Face's that was dealt out, by which it is known.

    Datasets that ``map``, ``filter``, ``select``, ``shuffle`` or ``train_test_split`` make of it get a copy of its
    description, but none of its attributes. Where datasets are joined, the description stays if all have the same.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartDescription) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def deal_out(dataset: Any, *, cell: int, cells: int, seed: int) -> Any:
    """Return the samples of one cell, drawn alike on all ranks of all cells; local.

    The parts are equally long, so that cells of equally many ranks make the same number of steps in an epoch: up to
    ``cells - 1`` samples are left out.

    A part that was dealt out before is returned as it is.

    :param dataset: A dataset that has a length, of ``datasets`` or of torch.
    :param cell: The number of the cell.
    :param cells: How many there are.
    :param seed: Seed of the draw.
    :return: The cell's part.
    :raises ConfigError: if the dataset has no length.
    """
    if cells == 1 or is_dealt_out(dataset):
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
    dealt = dataset.select(part) if hasattr(dataset, "select") else Subset(dataset, part)
    info = getattr(dealt, "info", None)
    if info is not None and hasattr(info, "description"):
        info.description = PartDescription(info.description or "")  # of the part alone: it has a copy of the info
    else:
        setattr(dealt, MARK, True)
    return dealt


def is_dealt_out(dataset: Any) -> bool:
    """Tell whether a dataset is a part that was dealt out, or made of such parts only, such as a ``Subset``; local.

    :param dataset: Any dataset.
    :return: Whether it is one.
    """
    description = getattr(getattr(dataset, "info", None), "description", None)
    if getattr(dataset, MARK, False) or isinstance(description, PartDescription):
        return True
    parts = getattr(dataset, "datasets", None)  # of a ConcatDataset
    if not isinstance(parts, list | tuple):
        parts = [dataset.dataset] if hasattr(dataset, "dataset") else []
    return bool(parts) and all(is_dealt_out(part) for part in parts)
