"""Checkpoints of a run: saved by step, the oldest deleted, the latest found again."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xffl.checkpoint import format as folders
from xffl.checkpoint.damage import check_damage, warn_of_damage, warn_of_lost
from xffl.checkpoint.format import Record
from xffl.checkpoint.opened import TRIES
from xffl.checkpoint.removal import sweep
from xffl.checkpoint.save import PendingSave
from xffl.checks import integer
from xffl.cluster.environment import is_isolated
from xffl.distributed.collectives import Group, own_rank
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError

__all__ = ["CheckpointManager", "auto_resume", "check_checkpoints", "find_latest_checkpoint"]

LOG = logging.getLogger(__name__)

FOLDER = "checkpoints"
FINAL = "final"
STEP = re.compile(r"step_([0-9]+)|\.step_([0-9]+)\.old")


class CheckpointManager:
    """Save checkpoints by step and keep those that were saved last.

    The file ``latest`` beside them holds the name of the last one. Which was saved last is counted in the checkpoints'
    records: clocks may be set back, and a run may go on from an earlier step.

    :param output_dir: The run's folder; checkpoints go to ``checkpoints/step_<step>`` in it.
    :param keep_last: How many to keep, at least 1; ``final`` is never deleted, nor is what is no checkpoint of xffl.
    :param keep_every: Steps that this divides are kept for good.
    :param state: The state that says which ranks the job has; needed where its cells are isolated (:doc:`/isolate`).
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        keep_last: int = 3,
        *,
        keep_every: int | None = None,
        state: DistributedState | None = None,
    ) -> None:
        keep_last = integer("keep_last", keep_last, hint="keep at least 1 checkpoint")
        keep_every = None if keep_every is None else integer("keep_every", keep_every, hint="give steps, or None")
        if not isinstance(output_dir, (str, os.PathLike)):
            raise ConfigError(f"output_dir must be a path, the run's folder, got {output_dir!r}")
        self._state = state
        self.output_dir = Path(output_dir) / FOLDER
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(self, strategy: Any, step: int, **kwargs: Any) -> None:
        r"""Save the checkpoint of a step through a strategy, then delete the oldest; collective over the job.

        Where the strategy saves in the background, the thread that writes also deletes, when the new one is whole. If
        an old one cannot be deleted (a file of it is open on NFS, or a mount point), that is logged as a warning and
        tried again at the next save and by :func:`auto_resume`.

        :param strategy: Its ``save_checkpoint(path, **kwargs)`` is called; an :class:`AsyncSaver`, or what returns its
            :class:`PendingSave`, saves in the background.
        :param step: Number of the step, the same on all ranks.
        :param \**kwargs: Passed on to the strategy.
        :raises ConfigError: if the step is invalid, or the ranks were given different ones, or the manager needs a
            state.
        :raises CheckpointError: if the checkpoint could not be saved.
        """
        advice = "give all ranks the same step"
        path = folders.run_collectively(
            "step", act=lambda: self.path_of(step), path=self.output_dir, advice=advice, show=str, world=self._world()
        )
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

        Collective over the job, where torch.distributed is initialized.
        """
        if isinstance(saved, PendingSave):
            saved.then(lambda world: self._rotate(path, world))
        else:
            self._rotate(path, self._world())

    def _world(self) -> Group | None:
        return _job_of(self._state, "CheckpointManager(output_dir, state=state)")

    def _rotate(self, saved: Path, world: Group | None) -> None:
        """Point to the new checkpoint and delete all but the newest; collective over the job, rank 0 does it."""
        advice = "see who may write there; the new checkpoint is whole"
        # Until all ranks are here some may still be saving, and the older checkpoints are all there is.
        folders.run_collectively("saving", lambda: None, self.output_dir, advice, world=world)

        def rotate() -> None:
            if not _is_first_of(world):
                return
            if folders.find_record(saved) is None:
                raise CheckpointError(
                    f"{saved} is not there after it was saved, so nothing older was deleted; save_checkpoint must "
                    "write it, or return what AsyncSaver.save returned"
                )
            folders.write_pointer(saved)  # before anything is deleted, which the pointer may still name
            sweep(self.output_dir)
            why = f"{saved} is saved and whole"
            newest_first = sorted(_steps(self.output_dir), key=lambda one: one.age, reverse=True)
            for one in newest_first[self.keep_last :]:
                is_kept = self.keep_every is not None and one.step % self.keep_every == 0
                if not is_kept and one.path.name != saved.name:
                    folders.remove_checkpoint(one.path, why)

        folders.run_collectively(
            "naming it in latest and deleting old ones", rotate, self.output_dir, advice, world=world
        )


def _job_of(state: DistributedState | None, call: str) -> Group | None:
    """Return the group of all ranks of the job, ``None`` for torch's default one; local."""
    if state is not None:
        return state.job_group
    if is_isolated():
        raise ConfigError(
            "the cells of this job are isolated, so the default process group has the ranks of one cell only, and each "
            f"would delete checkpoints of all; give the state: {call}"
        )
    return None


def _is_first_of(world: Group | None) -> bool:
    """Tell whether this rank writes for all of the job."""
    return not dist.is_initialized() or own_rank(world) == 0


@dataclass(frozen=True)
class _Saved:
    """The whole checkpoint of a step."""

    path: Path
    record: Record
    step: int

    @property
    def age(self) -> tuple[int, int]:
        """What grows from save to save; of an xffl that did not count them, the step."""
        return self.record.save_number, self.step


def find_latest_checkpoint(experiment_dir: str | os.PathLike[str]) -> Path | None:
    """Find the checkpoint of a run that was saved last. Reads files only; nothing moves.

    That is the one with the highest ``save_number`` in its record. Checkpoints of an xffl that did not count saves come
    before all others. Where there are none but these, it is the one that the file ``latest`` names; if that is gone or
    unfinished, or another one was saved at a later time, it is the one of the highest step. Unfinished and foreign
    folders do not count, nor do damaged ones (see :func:`check_checkpoints`), nor does ``best``.

    :param experiment_dir: The run's folder, as given to :class:`CheckpointManager`.
    :return: The checkpoint's folder, or ``None`` where there is none.
    """
    folder = Path(experiment_dir) / FOLDER
    warn_of_damage(folder)
    steps = _steps(folder)
    records = {one.path: one.record for one in steps}
    if (final := folders.find_record(folder / FINAL)) is not None:
        records[folder / FINAL] = final
    newest = max(records, key=lambda path: records[path].save_number, default=None)
    if newest is None or records[newest].save_number > 0:
        return newest
    return _find_latest_uncounted(folder, steps, records)


def _find_latest_uncounted(folder: Path, steps: list[_Saved], records: Mapping[Path, Record]) -> Path:
    """Return the newest of checkpoints that were saved before saves were counted; there is one."""
    pointed = folder / (folders.read_pointer(folder) or "")
    if pointed in records and all(record.saved_at <= records[pointed].saved_at for record in records.values()):
        return pointed
    final = records.get(folder / FINAL)
    latest = max(steps, key=lambda one: one.step, default=None)
    if final is None or latest is None:
        return folder / FINAL if latest is None else latest.path
    # ``final`` is it where it was saved at that step or a later one, at a later time where it does not say its step.
    own = final.values.get("step")
    is_final = own >= latest.step if type(own) is int else final.saved_at > latest.record.saved_at
    return folder / FINAL if is_final else latest.path


def check_checkpoints(experiment_dir: str | os.PathLike[str]) -> None:
    """Raise where a run has lost a checkpoint, or cannot read one, and would silently go back; reads files only."""
    folder = Path(experiment_dir) / FOLDER
    check_damage(folder, lambda: find_latest_checkpoint(experiment_dir))
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.fullmatch(rf"step_[0-9]+|{FINAL}|best", path.name) and (path / folders.RECORD).exists():
            try:
                folders.read_record(path)
            except CheckpointError as error:
                latest = find_latest_checkpoint(experiment_dir)
                where = "begins anew" if latest is None else f"goes on from {latest.name}"
                raise CheckpointError(f"{error}; move {path} away, and the run {where}") from error


def auto_resume(config: Any, trainer: Any, state: DistributedState | None = None) -> bool:
    """Load the checkpoint of a run that was saved last, if there is one.

    Collective over the job, where torch.distributed is initialized: the ranks compare what they found. What could not
    be deleted before is tried again.

    :param config: Its ``experiment.output_dir`` is the run's folder.
    :param trainer: Its ``load_checkpoint(path)`` is called.
    :param state: As for :class:`CheckpointManager`.
    :return: Whether there was one.
    :raises ConfigError: if ``state`` is missing.
    :raises CheckpointError: if the ranks find different ones, or one cannot be read or loaded.
    """
    output_dir = Path(config.experiment.output_dir)
    advice = "give the run's folder on a file system that all ranks share"
    world = _job_of(state, "auto_resume(config, trainer, state)")

    def find() -> Path | None:
        if _is_first_of(world):
            sweep(output_dir / FOLDER, level=logging.WARNING)
        check_checkpoints(output_dir)
        return find_latest_checkpoint(output_dir)

    latest = folders.run_collectively("latest one", act=find, path=output_dir, advice=advice, show=str, world=world)
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


def _steps(folder: Path) -> list[_Saved]:
    """Return the whole checkpoints of steps, also one that a kill left aside while it was replaced."""
    saved: list[_Saved] = []
    for _ in range(TRIES):
        found = [STEP.fullmatch(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
        steps = sorted({match[1] or match[2] for match in found if match is not None})
        records = {step: folders.find_record(folder / f"step_{step}") for step in steps}
        saved = [
            _Saved(folder / f"step_{step}", record, int(step)) for step, record in records.items() if record is not None
        ]
        # Where rotation has deleted one since the names were listed, a newer one may be among them now.
        missing = [folders.locate_checkpoint(folder / f"step_{step}") for step in steps if records[step] is None]
        if all(path.exists() for path in missing):
            break
    return saved
