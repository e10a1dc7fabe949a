"""Checkpoints that were published and are none any more: a purge of old files took their record, or the whole folder.

A run that did not look for them would go back to an older checkpoint, or begin anew, without a word.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from xffl.checkpoint import format as folders
from xffl.errors import CheckpointError
from xffl.files import TEXT_FILE_LIMIT, read_text

__all__ = ["check_damage", "find_damage", "find_lost", "warn_of_damage", "warn_of_lost"]

LOG = logging.getLogger(__name__)

NAME = re.compile(r"step_[0-9]+|best|final")
"""Names under which runs publish checkpoints; hidden folders are unfinished, or being deleted"""
CELL = re.compile(r"cell_[0-9]+")
"""Folders of cells in a checkpoint: by them one that has lost its record is told from a folder of others"""


def find_damage(checkpoints: Path) -> list[Path]:
    """Return the folders with the name and the cells of a checkpoint and without its record, by name; reads files only.

    A purge may leave the cells' folders empty. A link to a folder that is gone is among them, too.

    :param checkpoints: The folder in which a run publishes its checkpoints.
    :return: The damaged ones; folders of others that happen to have such a name are not among them.
    """
    if not checkpoints.is_dir():
        return []
    return [path for path in sorted(checkpoints.iterdir()) if NAME.fullmatch(path.name) and _has_lost_record(path)]


def find_lost(checkpoints: Path) -> str | None:
    """Return the name in the file ``latest`` if nothing is there under that name; reads files only.

    :param checkpoints: The folder in which a run publishes its checkpoints.
    :return: The name; ``None`` without the file, and where what it names is there.
    """
    name = folders.read_pointer(checkpoints)
    if not name or not NAME.fullmatch(name):
        return None
    path = checkpoints / name
    return None if os.path.lexists(path) or folders.locate_checkpoint(path) != path else name


def check_damage(checkpoints: Path, find_latest: Callable[[], Path | None]) -> None:
    """Raise where a run has lost a checkpoint and would go back, or begin anew, without it; reads files only.

    :param checkpoints: The folder in which the run publishes its checkpoints.
    :param find_latest: Finds the newest of those that are whole.
    :raises CheckpointError: if a published checkpoint has data and no record; if ``latest`` names one that is not
        there, or cannot be read, and there is no other; or if the folder is a link to nothing, or no folder.
    """
    _check_folder(checkpoints)
    lost = find_lost(checkpoints)
    damaged = find_damage(checkpoints)
    unread = _unread_pointer(checkpoints)
    if not damaged and lost is None and unread is None:
        return
    latest = find_latest()
    if latest is None:
        accept = f"to accept the loss, delete {checkpoints}: the run then begins anew, and its records are removed"
    else:
        accept = f"to accept the loss, delete {'these folders' if len(damaged) > 1 else 'the folder'}: the run then "
        accept += f"goes on from {latest.name}, and later records are removed"
    if damaged:
        raise CheckpointError(
            f"published checkpoints have lost their record, {folders.RECORD}, to a purge of old files or to a delete "
            f"that was interrupted: {', '.join(map(str, damaged))}. Put {folders.RECORD} back; or, {accept}. "
            "experiment.reset does not skip this"
        )
    if latest is None and lost is None:
        raise CheckpointError(
            f"{checkpoints / folders.LATEST} names no checkpoint ({unread}), and none is there, though the file is "
            f"written with the first. Put the checkpoints back; or, {accept}. experiment.reset does not skip this"
        )
    if latest is None:
        raise CheckpointError(
            f"{checkpoints / folders.LATEST} names {lost}, and neither this nor any other checkpoint is there. Put "
            f"{lost} back; or, {accept}. experiment.reset does not skip this"
        )


def warn_of_damage(checkpoints: Path) -> None:
    """Say which checkpoints have lost their record, where one that may be older is taken; on rank 0."""
    for path in find_damage(checkpoints) if _is_first() else ():
        LOG.warning("%s does not count as a checkpoint, since it has lost its record, %s", path, folders.RECORD)


def warn_of_lost(checkpoints: Path, latest: Path) -> None:
    """Say that a run goes back, where what ``latest`` names is not there any more; on rank 0."""
    lost = find_lost(checkpoints) if _is_first() else None
    if lost is not None:
        LOG.warning(
            "%s names %s, which is not there any more: going back to %s",
            checkpoints / folders.LATEST,
            lost,
            latest.name,
        )


def _check_folder(checkpoints: Path) -> None:
    """Refuse what is there in the folder's place and hides what a run has saved, such as a link to an unmounted one."""
    if checkpoints.is_dir() or not os.path.lexists(checkpoints):
        return
    what = "no folder"
    if checkpoints.is_symlink():
        what = f"a link to {os.readlink(checkpoints)}, which is not there, or no folder"
    raise CheckpointError(
        f"{checkpoints} is {what}, so what the run has saved is not seen. Put the folder back (mount its file "
        f"system); or, to accept the loss, delete {checkpoints}: the run then begins anew, and its records are "
        "removed. experiment.reset does not skip this"
    )


def _unread_pointer(checkpoints: Path) -> str | None:
    """Tell why the file ``latest``, which is there, names nothing; ``None`` without the file, or with a name in it."""
    file = checkpoints / folders.LATEST
    if not os.path.lexists(file):
        return None
    try:
        return None if read_text(file, TEXT_FILE_LIMIT).strip() else "it is empty"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _has_lost_record(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        return True
    if not path.is_dir() or os.path.lexists(path / folders.RECORD):
        return False
    return any(CELL.fullmatch(entry.name) and entry.is_dir() for entry in path.iterdir())
