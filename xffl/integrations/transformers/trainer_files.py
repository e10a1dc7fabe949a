"""Where Trainer keeps its checkpoints: ``checkpoint-N``, with what rounds add in the same folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from xffl.checkpoint.removal import discard, sweep
from xffl.integrations.checkpoints import MARKER, WholeCheckpoint

__all__ = ["TrainerFiles", "find_name_aside"]

FOLDER = re.compile(r"checkpoint-([0-9]{1,15})(-earlier-[0-9]{1,15})?")
"""Trainer's name, and that of a checkpoint beside a later one of the same step"""


class TrainerFiles:
    """The checkpoints in one ``output_dir``.

    :param folder: Trainer's ``output_dir``, of one cell alone.
    :param kept: How many whole checkpoints the user wants to keep; ``None`` keeps all.
    """

    start_over = "call train(resume_from_checkpoint=False)"
    """What a user writes to use no checkpoint."""

    def __init__(self, folder: Path, kept: int | None) -> None:
        self._folder = folder
        self._kept = kept

    def folders(self) -> list[Path]:
        """Return the folders of checkpoints."""
        if not self._folder.is_dir():
            return []
        return [folder for folder in self._folder.iterdir() if FOLDER.fullmatch(folder.name)]

    def files(self, folder: Path) -> list[Path]:
        """Return Trainer's files of a checkpoint, and those of its rounds."""
        return [path for path in sorted(folder.rglob("*")) if path.is_file()]

    def find_surplus(self, whole: Sequence[WholeCheckpoint]) -> Iterable[WholeCheckpoint]:
        """Return the checkpoints before those that the user wants to keep."""
        return () if self._kept is None else whole[: -self._kept]

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint, and with it earlier ones that a kill has left without a marker."""
        last = _step_of(folder)
        for earlier in self.folders():
            if earlier == folder or (_step_of(earlier) <= last and not (earlier / MARKER).is_file()):
                discard(earlier, f"newer checkpoints in {self._folder} are whole")

    def finish_removals(self) -> None:
        """Remove what a process has left that was killed while it removed a checkpoint; at the next start."""
        sweep(self._folder)


def find_name_aside(folder: Path) -> Path:
    """Return a path that a checkpoint may have where another one of the same step is to have its folder."""
    names = (folder.with_name(f"{folder.name}-earlier-{number}") for number in count(1))
    return next(path for path in names if not path.exists())


def _step_of(folder: Path) -> int:
    """Return the step in a name that :data:`FOLDER` matches."""
    return int(folder.name.split("-")[1])
