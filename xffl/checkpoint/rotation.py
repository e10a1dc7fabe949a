"""Checkpoints of a run: saved by step, the oldest deleted, the latest found again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from xffl.checkpoint.folder import Record, aside, find_record, remove_checkpoint
from xffl.checkpoint.steps import together
from xffl.errors import ConfigError

__all__ = ["CheckpointManager", "auto_resume", "find_latest_checkpoint"]

FOLDER = "checkpoints"
FINAL = "final"


class Saver(Protocol):
    """What saves, such as a strategy."""

    @property
    def save_checkpoint(self) -> Callable[..., Any]:
        """Called with the path and what else was given; collective over the world."""


class CheckpointManager:
    """Save checkpoints by step and keep the newest ones.

    :param output_dir: The run's folder; checkpoints go to ``checkpoints/step_<step>`` in it.
    :param keep_last: How many to keep, at least 1; ``final`` is never deleted, nor is what is no checkpoint of xffl.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, output_dir: str | os.PathLike[str], keep_last: int = 3) -> None:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
            raise ConfigError(f"keep_last {keep_last!r} is no positive number; keep at least 1 checkpoint")
        if not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"output_dir {output_dir!r} is no path; give the run's folder")
        self.output_dir = Path(output_dir) / FOLDER
        self.keep_last = keep_last

    def save(self, strategy: Saver, step: int, **kwargs: Any) -> None:
        r"""Save the checkpoint of a step through a strategy, then delete the oldest.

        Collective over the world, where it is initialized.

        :param strategy: Its ``save_checkpoint(path, **kwargs)`` is called.
        :param step: Number of the step, the same on all ranks.
        :param \**kwargs: Given on to the strategy.
        :raises ConfigError: if the step is none, or the ranks were given different ones.
        :raises CheckpointError: if the checkpoint could not be saved, or an old one not deleted.
        """

        def given() -> Path:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ConfigError(f"step {step!r} is no step; give a whole number from 0")
            return self.output_dir / f"step_{step}"

        path = together("step", given, self.output_dir, "give all ranks the same step", str)
        strategy.save_checkpoint(path, **kwargs)
        self._rotate(path)

    def _rotate(self, saved: Path | None = None) -> None:
        """Delete all but the newest checkpoints by step; rank 0 does it, when all ranks have come here.

        Collective over the world, where it is initialized.

        :param saved: The one that was just saved, which stays even where others have a higher step.
        """
        advice = "see who may write there; the new checkpoint is whole"
        together("saving", lambda: None, self.output_dir, advice)

        def delete() -> None:
            if dist.is_initialized() and dist.get_rank() != 0:
                return
            for left in self.output_dir.glob(".step_*.removed"):  # of a run that was killed here
                shutil.rmtree(left)
            by_step = sorted(_steps(self.output_dir).items(), reverse=True)
            for _, (folder, _) in by_step[self.keep_last :]:
                if saved is None or folder.name != saved.name:
                    remove_checkpoint(folder)

        together("deleting old ones", delete, self.output_dir, advice)


def find_latest_checkpoint(experiment_dir: str | os.PathLike[str]) -> Path | None:
    """Find the newest checkpoint of a run. Reads files only; nothing moves.

    The newest is the one of the highest step. ``final`` is it where it was saved at that step or a later one (at a
    later time, where it does not say its ``step`` among its values). Unfinished and foreign folders do not count.

    :param experiment_dir: The run's folder, as given to :class:`CheckpointManager`.
    :return: The checkpoint's folder, or ``None`` where there is none.
    """
    folder = Path(experiment_dir) / FOLDER
    steps = _steps(folder)
    latest = max(steps) if steps else None
    final = _whole(folder / FINAL)
    if final is not None and (latest is None or _is_newer(final, latest, steps[latest][1])):
        return folder / FINAL
    return None if latest is None else steps[latest][0]


def auto_resume(config: Any, trainer: Any) -> bool:
    """Load the newest checkpoint of a run, if there is one.

    Collective over the world, where it is initialized: the ranks compare what they found.

    :param config: Its ``experiment.output_dir`` is the run's folder.
    :param trainer: Its ``load_checkpoint(path)`` is called.
    :return: Whether there was one.
    :raises CheckpointError: if the ranks find different ones, or it cannot be loaded.
    """
    output_dir = Path(config.experiment.output_dir)
    advice = "give the run's folder on a file system that all ranks share"
    latest = together("latest one", lambda: find_latest_checkpoint(output_dir), output_dir, advice, str)
    if latest is None:
        return False
    trainer.load_checkpoint(latest)
    return True


def _steps(folder: Path) -> dict[int, tuple[Path, Record]]:
    """Return the whole checkpoints of steps, also one that a kill left aside while it was replaced."""
    found: dict[int, tuple[Path, Record]] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"step_(\d+)|\.step_(\d+)\.old", entry.name)
        if match is None:
            continue
        path = folder / f"step_{match[1] or match[2]}"
        record = _whole(path)
        if record is not None:
            found[int(match[1] or match[2])] = (path, record)
    return found


def _whole(path: Path) -> Record | None:
    return find_record(path) or (None if path.exists() else find_record(aside(path, "old")))


def _is_newer(final: Record, step: int, record: Record) -> bool:
    own = final.values.get("step")
    if isinstance(own, int) and not isinstance(own, bool):
        return own >= step
    return final.saved_at > record.saved_at
