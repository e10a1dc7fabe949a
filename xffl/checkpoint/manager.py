"""Checkpoints of a run: saved by step, the oldest deleted, the latest found again."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xffl.checkpoint import format as folders
from xffl.checkpoint.damage import check_damage, warn_of_damage, warn_of_lost
from xffl.checkpoint.format import Record
from xffl.checkpoint.save import PendingSave
from xffl.checks import integer
from xffl.errors import CheckpointError, ConfigError

__all__ = ["CheckpointManager", "auto_resume", "check_checkpoints", "find_latest_checkpoint"]

LOG = logging.getLogger(__name__)

FOLDER = "checkpoints"
FINAL = "final"


class CheckpointManager:
    """Save checkpoints by step and keep the newest ones.

    The file ``latest`` beside them holds the name of the newest one.

    :param output_dir: The run's folder; checkpoints go to ``checkpoints/step_<step>`` in it.
    :param keep_last: How many to keep, at least 1; ``final`` is never deleted, nor is what is no checkpoint of xffl.
    :param keep_every: Steps that this divides are kept for good.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], keep_last: int = 3, *, keep_every: int | None = None
    ) -> None:
        keep_last = integer("keep_last", keep_last, hint="keep at least 1 checkpoint")
        keep_every = None if keep_every is None else integer("keep_every", keep_every, hint="give steps, or None")
        if not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"output_dir must be a path, the run's folder, got {output_dir!r}")
        self.output_dir = Path(output_dir) / FOLDER
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(self, strategy: Any, step: int, **kwargs: Any) -> None:
        r"""Save the checkpoint of a step through a strategy, then delete the oldest; collective over the world.

        Where the strategy saves in the background, the thread that writes also deletes, when the new one is whole.

        :param strategy: Its ``save_checkpoint(path, **kwargs)`` is called; an :class:`AsyncSaver`, or what returns its
            :class:`PendingSave`, saves in the background.
        :param step: Number of the step, the same on all ranks.
        :param \**kwargs: Passed on to the strategy.
        :raises ConfigError: if the step is invalid, or the ranks were given different ones.
        :raises CheckpointError: if the checkpoint could not be saved, or an old one not deleted.
        """
        advice = "give all ranks the same step"
        path = folders.run_collectively("step", lambda: self.path_of(step), self.output_dir, advice, str)
        self.rotate(path, strategy.save_checkpoint(path, **kwargs))

    def save_final(self, strategy: Any, **kwargs: Any) -> None:
        """Save ``final``, which is never deleted, as :meth:`save`; give it the ``step`` among its values."""
        path = self.path_of(FINAL)
        self.rotate(path, strategy.save_checkpoint(path, **kwargs))

    def path_of(self, step: int | str) -> Path:
        """Return where the checkpoint of a step lies, or that called ``final``; local."""
        return self.output_dir / (FINAL if step == FINAL else f"step_{integer('step', step, 0)}")

    def rotate(self, path: Path, saved: object = None) -> None:
        """Point to a checkpoint that was saved and delete the oldest, at once or when a :class:`PendingSave` is whole.

        Collective over the world, where it is initialized.
        """
        if isinstance(saved, PendingSave):
            saved.then(lambda world: self._rotate(path, world))
        else:
            self._rotate(path)

    def _rotate(self, saved: Path | None = None, world: dist.ProcessGroup | None = None) -> None:
        """Point to the new checkpoint and delete all but the newest; collective over the world, rank 0 does it."""
        advice = "see who may write there; the new checkpoint is whole"
        # Until all ranks are here some may still be saving, and the older checkpoints are all there is.
        folders.run_collectively("saving", lambda: None, self.output_dir, advice, world=world)

        def rotate() -> None:
            if dist.is_initialized() and dist.get_rank() != 0:
                return
            if saved is not None:
                if folders.find_record(saved) is None:
                    raise CheckpointError(
                        f"{saved} is not there after it was saved, so nothing older was deleted; save_checkpoint must "
                        "write it, or return what AsyncSaver.save returned"
                    )
                folders.write_pointer(saved)  # before anything is deleted, which the pointer may still name
            for left in self.output_dir.glob(".step_*.removed"):  # of a run that was killed here
                folders.delete(left)
            by_step = sorted(_steps(self.output_dir).items(), reverse=True)
            for step, (folder, _) in by_step[self.keep_last :]:
                is_kept = self.keep_every is not None and step % self.keep_every == 0
                if not is_kept and (saved is None or folder.name != saved.name):
                    folders.remove_checkpoint(folder)

        folders.run_collectively("deleting old ones", rotate, self.output_dir, advice, world=world)


def find_latest_checkpoint(experiment_dir: str | os.PathLike[str]) -> Path | None:
    """Find the newest checkpoint of a run. Reads files only; nothing moves.

    The newest is the one that the file ``latest`` names. Where that is gone or unfinished, or another one was saved at
    a later time (a kill came before the file was written), it is the one of the highest step. ``final`` is it where it
    was saved at that step or a later one (at a later time, where it does not say its ``step`` among its values).
    Unfinished and foreign folders do not count, nor do damaged ones (see :func:`check_checkpoints`).

    :param experiment_dir: The run's folder, as given to :class:`CheckpointManager`.
    :return: The checkpoint's folder, or ``None`` where there is none.
    """
    folder = Path(experiment_dir) / FOLDER
    warn_of_damage(folder)
    steps = _steps(folder)
    final = _whole(folder / FINAL)
    whole = {path.name: (path, record) for path, record in steps.values()}
    if final is not None:
        whole[FINAL] = (folder / FINAL, final)
    pointed = whole.get(folders.read_pointer(folder) or "")
    if pointed is not None and all(record.saved_at <= pointed[1].saved_at for _, record in whole.values()):
        return pointed[0]
    latest = max(steps, default=None)
    if final is None:
        return None if latest is None else steps[latest][0]
    own = final.values.get("step")
    if latest is None or (own >= latest if type(own) is int else final.saved_at > steps[latest][1].saved_at):
        return folder / FINAL
    return steps[latest][0]


def check_checkpoints(experiment_dir: str | os.PathLike[str]) -> None:
    """Raise where a run has lost a checkpoint, or cannot read one, and would silently go back; reads files only."""
    folder = Path(experiment_dir) / FOLDER
    check_damage(folder, lambda: find_latest_checkpoint(experiment_dir))
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.fullmatch(rf"step_\d+|{FINAL}|best", path.name) and (path / folders.RECORD).exists():
            try:
                folders.read_record(path)
            except CheckpointError as error:
                latest = find_latest_checkpoint(experiment_dir)
                where = "begins anew" if latest is None else f"goes on from {latest.name}"
                raise CheckpointError(f"{error}; move {path} away, and the run {where}") from error


def auto_resume(config: Any, trainer: Any) -> bool:
    """Load the newest checkpoint of a run, if there is one.

    Collective over the world, where it is initialized: the ranks compare what they found.

    :param config: Its ``experiment.output_dir`` is the run's folder.
    :param trainer: Its ``load_checkpoint(path)`` is called.
    :return: Whether there was one.
    :raises CheckpointError: if the ranks find different ones, or one cannot be read or loaded.
    """
    output_dir = Path(config.experiment.output_dir)
    advice = "give the run's folder on a file system that all ranks share"

    def find() -> Path | None:
        check_checkpoints(output_dir)
        return find_latest_checkpoint(output_dir)

    latest = folders.run_collectively("latest one", find, output_dir, advice, str)
    if latest is None:
        return False
    warn_of_lost(output_dir / FOLDER, latest)
    LOG.info("resuming from %s", latest)
    try:
        trainer.load_checkpoint(latest)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(
            f"{error}; to begin anew, give the run another folder (experiment.output_dir, experiment.name)"
        ) from error
    return True


def _steps(folder: Path) -> dict[int, tuple[Path, Record]]:
    """Return the whole checkpoints of steps, also one that a kill left aside while it was replaced."""
    by_step: dict[int, tuple[Path, Record]] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(r"step_(\d+)|\.step_(\d+)\.old", entry.name):
            step = match[1] or match[2]
            path = folder / f"step_{step}"
            if (record := _whole(path)) is not None:
                by_step[int(step)] = (path, record)
    return by_step


def _whole(path: Path) -> Record | None:
    """Read the record of a checkpoint that may be aside or missing."""
    return folders.find_record(path) or (
        None if path.exists() else folders.find_record(folders.temporary_path(path, "old"))
    )
