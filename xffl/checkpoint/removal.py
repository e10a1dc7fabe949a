"""Deleting what a newer checkpoint has replaced. It may fail, and what stands is whole all the same.

A file that another process has open cannot always be deleted: NFS renames it to ``.nfsXXXX`` and refuses to delete its
folder, a mount point is busy. So a folder is first renamed to a hidden name of its own, ``.NAME.N.removed``, which is
never taken for a checkpoint and leaves ``NAME`` free. Then it is deleted as far as that is possible. What is left is
deleted at the next save or the next start.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["discard", "sweep"]

LOG = logging.getLogger(__name__)

REMOVED = re.compile(r"\..+\.removed")


def discard(path: Path, why: str) -> bool:
    """Delete a folder, or a link to one, that is not needed any more; local.

    What cannot be deleted is told in a warning and left under a hidden name for :func:`sweep`.

    :param path: The folder, which need not exist.
    :param why: What the message begins with: which checkpoint is whole, or what has left the folder.
    :return: Whether its name is free now.
    """
    if not os.path.lexists(path):
        return True
    try:
        away = _move_away(path)
    except OSError as error:
        LOG.warning("%s; %s is not needed any more, but cannot be moved or deleted: %s", why, path, error)
        return False
    if (refused := _delete(away)) is not None:
        LOG.warning(
            "%s; %s is not needed any more, but some of it cannot be deleted (%s): that is in %s, and is tried again "
            "at the next save and when the run is started again",
            why,
            path,
            refused,
            away,
        )
    return True


def sweep(folder: Path, name: str | None = None, *, level: int = logging.INFO) -> None:
    """Try again to delete what could not be deleted before, or what a kill has left; local.

    :param folder: The folder beside whose checkpoints it lies.
    :param name: The name of the checkpoint; ``None`` for all that are in the folder.
    :param level: Level of the message about what still cannot be deleted.
    """
    try:
        left = [entry.path for entry in os.scandir(folder) if REMOVED.fullmatch(entry.name)]
    except OSError:  # no folder, so nothing is left
        return
    for path in map(Path, left):
        is_its = name is None or re.fullmatch(rf"\.{re.escape(name)}(\.[0-9]+)?\.removed", path.name)
        if is_its and (error := _delete(path)) is not None:
            LOG.log(level, "%s is not needed any more, and still cannot be deleted: %s", path, error)


def _move_away(path: Path) -> Path:
    """Rename a folder to a hidden name that is free."""
    name = path.name.removeprefix(".").removesuffix(".old").removesuffix(".partial")
    for number in itertools.count(1):
        away = path.with_name(f".{name}.removed" if number == 1 else f".{name}.{number}.removed")
        if os.path.lexists(away):
            continue
        try:
            path.rename(away)
        except OSError:
            if os.path.lexists(away):  # another process was faster
                continue
            raise
        return away
    raise AssertionError("the numbers have no end")


def _delete(path: Path) -> OSError | None:
    """Delete all of a folder that can be deleted; of a link the link alone. Return the first error, if any."""
    errors: list[OSError] = []

    def note(_: Any, __: Any, error: Any) -> None:
        wrong = error[1] if isinstance(error, tuple) else error
        if not isinstance(wrong, OSError):
            raise wrong
        if not isinstance(wrong, FileNotFoundError):  # another process deletes it, too
            errors.append(wrong)

    if path.is_symlink() or not path.is_dir():
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    else:
        hook: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": note}
        shutil.rmtree(path, **hook)
    return errors[0] if errors else None
