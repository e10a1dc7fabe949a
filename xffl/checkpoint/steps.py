"""Steps that all ranks take or fail together, and the ranks of a cell that write and read one folder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError

__all__ = ["Cell", "check_path", "gather", "this_cell", "together"]

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """The cell of this rank. ``group`` is ``None`` for the world, and where there is no process group at all."""

    number: int
    sizes: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    is_first: bool
    """Whether this is the cell's first rank, which writes the index"""
    world: dist.ProcessGroup | None = None
    """Group of all ranks; ``None`` for torch's default one"""

    @property
    def place(self) -> int:
        """Rank in the cell."""
        return self.rank - sum(self.sizes[: self.number])

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        return f"cell_{self.number}"


def this_cell(
    state: DistributedState, groups: tuple[dist.ProcessGroup, dist.ProcessGroup | None] | None = None
) -> Cell:
    """Return the cell of this rank. Nothing moves.

    :param state: The state that says where this rank stands.
    :param groups: Groups of the world and of the cell to use in place of the state's; ``None`` for the cell where it is
        the world.
    :return: The cell; all ranks where there is no federation.
    :raises StateError: if the state and torch.distributed do not fit each other.
    """
    rank, world_size = state.rank, state.world_size
    if rank is None or world_size is None:
        raise StateError("the state does not know its rank and world yet; call set_global first")
    joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if joined != (rank, world_size):
        raise StateError(
            f"the state says rank {rank} of {world_size}, but torch.distributed rank {joined[0]} of {joined[1]}; give "
            "the state of this process, inside its session"
        )
    topology = state.topology
    number = topology.cell_of(rank)
    is_first = rank == topology.offsets[number]
    if groups is None:
        return Cell(number, topology.sizes, rank, state.federation, is_first)
    world, group = groups
    return Cell(number, topology.sizes, rank, group or world, is_first, world)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint.

    :param path: Where the checkpoint lies, or shall lie.
    :return: The path.
    :raises ConfigError: if it can be none.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"path {path!r} is no path; give the checkpoint's folder")
    found = Path(os.path.abspath(path))
    if not found.name or found.name.startswith("."):
        raise ConfigError(f"path {found} is hidden or has no name, which stands for unfinished ones; give another name")
    return found


def together(
    what: str,
    act: Callable[[], T],
    path: Path,
    advice: str,
    show: Callable[[T], str] = lambda _: "done",
    *,
    world: dist.ProcessGroup | None = None,
) -> T:
    """Do this rank's share of something; it counts only where it worked on all ranks.

    Collective over the world, where it is initialized: one small all-reduce.

    :param what: What is done, for messages.
    :param act: Does it, and may itself communicate inside the cell.
    :param path: The checkpoint, for messages.
    :param advice: What to do where it fails.
    :param show: Writes what the ranks must have in common.
    :param world: Group of all ranks; by default torch's own.
    :return: What ``act`` returned.
    :raises XfflError: the same on all ranks: what ``act`` raised somewhere, other errors as a CheckpointError.
    """
    done: list[T] = []
    error: XfflError | None = None
    text = ""
    try:
        done.append(act())
        text = show(done[0])
    except XfflError as wrong:
        error = wrong
    except (Exception, CheckpointException) as wrong:  # noqa: BLE001 - whatever it is, the others must hear of it
        error = CheckpointError(f"checkpoint {path}: {what} failed: {_reason(wrong)}; {advice}")
        error.__cause__ = wrong
    try:
        agree(f"{what} of a checkpoint", text, error=error, group=world)
    except XfflError:
        raise
    except RuntimeError as lost:  # a rank died: there is nobody to agree with
        told = f"{error} Also, " if error is not None else f"checkpoint {path}: "
        raise CheckpointError(f"{told}{what} was not confirmed by all ranks: {lost}; {advice}") from (error or lost)
    return done[0]


def gather(value: Any, cell: Cell) -> list[Any]:
    """Return a small value of each rank of the cell; collective over the cell.

    :param value: This rank's value.
    :param cell: The cell.
    :return: The values in the order of the ranks.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * cell.sizes[cell.number]
    dist.all_gather_object(values, value, group=cell.group)
    return values


def _reason(error: BaseException) -> str:
    """Write an error as one line; torch's has those of several ranks in it."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank} of the cell: {_reason(first)}"
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to run what the file holds
        return "a file holds something else than a tensor"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
