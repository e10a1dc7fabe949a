"""Whether the cells of a checkpoint hold the same weights, as they do right after a round."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from xffl.checkpoint.folder import Record
from xffl.checkpoint.steps import Cell, gather
from xffl.checkpoint.storage import read_index, read_tensor
from xffl.distributed.collectives import bytes_of
from xffl.errors import CheckpointError

__all__ = ["compare_cells"]


def compare_cells(folder: Path, record: Record, names: Collection[str], local: Collection[str], cell: Cell) -> None:
    """Refuse a checkpoint whose cells hold different weights.

    Collective over the cell. All ranks of the world share the tensors out; each reads whole ones, two at a time.

    :param folder: The checkpoint's folder.
    :param record: What it says of itself.
    :param names: What is trained in the models of this rank.
    :param local: Names that may differ.
    :param cell: The cell of this rank.
    :raises CheckpointError: if a tensor is not the same in all cells, bit for bit.
    """
    # Stages of a pipeline know other names, and each name must have one rank that reads it.
    mine = sorted(set().union(*gather(set(names), cell)) - set(local))[cell.rank :: sum(cell.sizes)]
    first = folder / "cell_0"
    head = read_index(first, record.indexes.get(first.name))
    for number in range(1, len(record.cells)):
        home = folder / f"cell_{number}"
        index = read_index(home, record.indexes.get(home.name))
        for name in mine:
            if name not in head.tensors:
                continue  # told where the parts are compared
            if name not in index.tensors or not _is_same(
                read_tensor(first, head, name), read_tensor(home, index, name)
            ):
                places = sorted({chunk.relative_path for chunk in head.tensors[name].chunks})
                raise CheckpointError(
                    f"checkpoint {folder} was saved as right after a round, but {name!r} is not the same in {home} as "
                    f"in {first} (files {', '.join(places)}); start {len(record.cells)} cells, or give "
                    f"local=[{name!r}] where its policy is local"
                )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits: equal NaNs are the same."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))
