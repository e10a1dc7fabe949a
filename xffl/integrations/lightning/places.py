"""The data and the folder of a cell, as the environment tells it: Lightning asks for both before the ranks have met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xffl.distributed.several_worlds.isolated_cell import read_isolated_cell
from xffl.distributed.startup.lone_cell import read_lone_cell
from xffl.integrations.dealing import deal_out

__all__ = ["cell_folder", "cell_split", "folder_in"]


def cell_split(dataset: Any, *, seed: int = 0) -> Any:
    """Return the samples of this process's cell, drawn alike on all ranks of all cells; local.

    Lightning's ``DistributedSampler`` then deals them out to the ranks of the cell. The parts are equally long, so up
    to ``cells - 1`` samples are left out. Where there are no cells, the dataset is returned.

    .. code-block:: python

       def train_dataloader(self):
           return DataLoader(cell_split(self.dataset), batch_size=8, shuffle=True)

    :param dataset: A dataset that has a length, of torch or of Hugging Face.
    :param seed: Of the draw; the same in all cells.
    :return: The cell's part.
    :raises ConfigError: if the dataset has no length.
    """
    cell, cells = _find_cell()
    return deal_out(dataset, cell=cell, cells=cells, seed=seed)


def cell_folder(folder: str | Path) -> Path:
    """Return a folder of this process's cell below another one, for ``Trainer(default_root_dir=...)``; local.

    :param folder: A folder that the cells may share.
    :return: ``folder/cell_N``.
    """
    return folder_in(Path(folder), _find_cell()[0])


def folder_in(folder: Path, cell: int) -> Path:
    """Return the folder of a cell, which is the given one where it lies below one of that cell already."""
    name = f"cell_{cell}"
    return folder if name in folder.parts else folder / name


def _find_cell() -> tuple[int, int]:
    """Return the number of this process's cell, and how many there are, as the environment says."""
    isolated = read_isolated_cell()
    if isolated is not None:
        return isolated.cell, len(isolated.sizes)
    lone = read_lone_cell()
    if lone is None:
        return 0, 1
    return lone.cell, lone.cells if isinstance(lone.cells, int) else len(lone.cells)
