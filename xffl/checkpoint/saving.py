"""Saving: each cell writes its own folder, once for all its replicas, and the whole appears at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from xffl import __version__
from xffl.checkpoint.contents import Contents, Part, check_parts, collect
from xffl.checkpoint.folder import INDEX, Record, aside, checksum, find_record, publish, settle
from xffl.checkpoint.plain import Plain, to_plain
from xffl.checkpoint.steps import Cell, check_path, gather, this_cell, together
from xffl.checkpoint.storage import CellWriter
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError

__all__ = ["save_checkpoint"]

KEPT = "what was saved before stays; see that there is space and that the folder can be written, then save again"


def save_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part],
    state: DistributedState,
    *,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint, whole or not at all.

    Collective over the world; the folder must be on a file system that all ranks share. Each cell writes its own
    tensors once, however many replicas it has: each rank the shards that no lower rank of its cell holds, and what is
    not sharded its first rank. Tensors do not move between ranks. A small all-reduce over the world ends each step, so
    that all ranks fail alike. The files are written aside, flushed to the disk, and take their name in the end; a
    checkpoint of the same name is replaced only then. A save that was killed leaves a folder ``.NAME.partial``, which
    the next one of this name removes.

    Tensors are kept in torch's own files, everything else in JSON; reading them runs no code.

    :param path: The folder to make; one that is no checkpoint is not overwritten.
    :param parts: Models, optimizers of these models, and objects with ``state_dict`` and ``load_state_dict``, by name;
        the same on all ranks. What such an object holds must be the same on all ranks of a cell.
    :param state: The state that says where this rank stands.
    :param values: Plain values (step, epoch) that loading returns; the same on all ranks.
    :raises ConfigError: if an argument cannot be meant or kept, or the ranks were given different ones.
    :raises StateError: if the state does not fit torch.distributed.
    :raises CheckpointError: if it could not be written; the same on all ranks.
    """

    def given() -> tuple[Path, dict[str, Plain], Cell]:
        check_parts(parts)
        return check_path(path), _plain_values(values), this_cell(state)

    target, plain, cell = together(
        "arguments", given, Path(str(path)), KEPT, lambda found: _text(found[0], parts, found[1])
    )
    contents = together("contents", lambda: collect(parts), target, KEPT)
    together("preparing", lambda: _prepare(target, cell), target, KEPT)
    partial = aside(target, "partial")
    try:
        together("writing", lambda: _write(partial / cell.name, contents, cell), target, KEPT)
        record = Record(
            xffl=__version__,
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(),
            world_size=sum(cell.sizes),
            cells=cell.sizes,
            replica_size=state.topology.replica_size,
            parts=tuple(sorted(parts)),
            values=plain,
            indexes={},
        )
        together("publishing", lambda: _publish(target, record, cell), target, KEPT)
    except CheckpointError:
        if cell.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may fill the disk; what is left the next save removes
        raise


def _plain_values(values: Mapping[str, Any] | None) -> dict[str, Plain]:
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"values is {type(values).__name__}; give a mapping such as {{'step': 100}}")
    if wrong := [name for name in values or () if not isinstance(name, str)]:
        raise ConfigError(f"values has the name {wrong[0]!r}; names are strings")
    return {name: to_plain(value, f"values[{name!r}]") for name, value in (values or {}).items()}


def _text(path: Path, parts: Mapping[str, Part], values: dict[str, Plain]) -> str:
    """Return what must be the same on all ranks."""
    return f"path={path} parts={sorted(parts)} values={json.dumps(values, sort_keys=True)}"


def _prepare(path: Path, cell: Cell) -> None:
    """Clear the way and make the folders to write into; rank 0 does it."""
    if cell.rank != 0:
        return
    if (before := settle(path)) != path:
        before.rename(path)
    if path.exists() and find_record(path) is None and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint that could be replaced; remove it, or save under another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in (aside(path, "partial"), aside(path, "removed")):
        if left.exists():
            shutil.rmtree(left)
    for number in range(len(cell.sizes)):
        (aside(path, "partial") / f"cell_{number}").mkdir(parents=True)


def _write(folder: Path, contents: Contents, cell: Cell) -> None:
    """Write this rank's tensors; collective over the cell."""
    values = _merged(contents.values, cell)
    conflict = values if isinstance(values, str) else None
    if not folder.is_dir():
        conflict = (
            f"rank {cell.rank} does not see {folder}, which rank 0 has made; save where all ranks share the files"
        )
    # Before torch's collectives, which a rank that raises alone would leave the others in.
    conflicts = [told for told in gather(conflict, cell) if told is not None]
    if conflicts:
        raise CheckpointError(conflicts[0])
    assert isinstance(values, dict)
    planner = DefaultSavePlanner(
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
        dedup_save_to_lowest_rank=True,  # buffers that go together are of one rank, and one replica writes
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            dict(contents.tensors),
            storage_writer=CellWriter(folder, values),
            planner=planner,
            process_group=cell.group,
        )


def _merged(values: dict[str, Plain], cell: Cell) -> dict[str, Plain] | str:
    """Put the values of the cell's ranks together on its first one; a text tells that two ranks contradict each other.

    Collective over the cell. Stages of a pipeline name different parameters; all others have the same, which cross
    once.
    """
    digests = gather(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(), cell)
    if len(set(digests)) == 1:
        return values
    place = dist.get_rank(cell.group)
    mine = values if digests.index(digests[place]) == place else None
    by_rank: list[dict[str, Plain] | None] = [None] * len(digests)
    head = cell.rank - place
    dist.gather_object(mine, by_rank if cell.is_first else None, dst=head, group=cell.group)
    merged: dict[str, Plain] = {}
    for rank, told in enumerate(by_rank):
        for name, value in (told or {}).items():
            if merged.setdefault(name, value) != value:
                return (
                    f"what {name!r} holds on rank {head + rank} is not what it holds on a lower rank of cell "
                    f"{cell.number}; a checkpoint keeps one value for each cell, so make them the same"
                )
    return merged


def _publish(path: Path, record: Record, cell: Cell) -> None:
    """Give the checkpoint its name; rank 0 does it."""
    if cell.rank != 0:
        return
    partial = aside(path, "partial")
    for number in range(len(record.cells)):
        index = partial / f"cell_{number}" / INDEX
        if not index.is_file():
            raise CheckpointError(
                f"rank 0 does not see {index}, which cell {number} has written; save where all ranks share the files"
            )
        record.indexes[f"cell_{number}"] = checksum(index)
    publish(path, record)
