"""Where Lightning keeps the checkpoints of a cell: ``NAME.ckpt``, and beside it ``NAME.ckpt.xffl`` for its rounds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xffl.files import remove_file, write_whole
from xffl.integrations.checkpoints import MARKER, WholeCheckpoint

__all__ = ["LightningFiles"]

ENDING = ".xffl"
"""What is added to the name of Lightning's file, or folder"""
UNWANTED = "unwanted"
"""The file that says that Lightning has asked to remove the checkpoint"""


class LightningFiles:
    """The checkpoints in the folders of a Trainer's ``ModelCheckpoint`` callbacks.

    :param folders: The folders, of one cell alone.
    :param remove: Removes a file, or folder, of Lightning's.
    """

    start_over = "give FederatedRounds(resume=False)"
    """What a user writes to use no checkpoint."""

    def __init__(self, folders: Iterable[Path], remove: Callable[[Path], None]) -> None:
        self._folders = tuple(dict.fromkeys(folders))
        self._remove = remove

    def has(self, path: Path) -> bool:
        """Tell whether a path of Lightning's lies in one of the folders."""
        return any(folder in path.parents for folder in self._folders)

    def folder_of(self, path: Path) -> Path:
        """Return the folder beside a path of Lightning's."""
        return path.with_name(path.name + ENDING)

    def path_of(self, folder: Path) -> Path:
        """Return the path of Lightning's that a folder stands beside."""
        return folder.with_name(folder.name.removesuffix(ENDING))

    def folders(self) -> list[Path]:
        """Return the folders that stand beside checkpoints, but for those that somebody has removed by hand."""
        return [folder for folder in self._all_folders() if self.path_of(folder).exists()]

    def finish_removals(self) -> None:
        """Remove what a process has left that was killed while it removed or began a checkpoint; at the next start."""
        for folder in self._all_folders():
            is_removed = (folder / UNWANTED).exists() or not self.path_of(folder).exists()
            if is_removed and not (folder / MARKER).exists():
                self.remove(folder)

    def files(self, folder: Path) -> list[Path]:
        """Return Lightning's files of a checkpoint, and those of its rounds."""
        path = self.path_of(folder)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        return [file for file in (*files, *sorted(folder.iterdir())) if file.is_file()]

    def find_surplus(self, whole: Sequence[WholeCheckpoint]) -> list[WholeCheckpoint]:
        """Return the checkpoints that Lightning has asked to remove."""
        return [checkpoint for checkpoint in whole if (checkpoint.folder / UNWANTED).exists()]

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint, the marker first, and the folder with what tells of the removal last."""
        remove_file(folder / MARKER)
        self._remove(self.path_of(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def note_wanted(self, folder: Path) -> None:
        """Forget that Lightning has asked to remove the checkpoint: it is written anew."""
        remove_file(folder / UNWANTED)

    def note_unwanted(self, folder: Path) -> None:
        """Note that Lightning has asked to remove the checkpoint, also for a process that comes after this one."""
        write_whole(folder / UNWANTED, "")

    def _all_folders(self) -> list[Path]:
        return [path for folder in self._folders if folder.is_dir() for path in sorted(folder.rglob(f"*{ENDING}"))]
