"""A framework's checkpoints as those of one cell: with the state of its rounds, and whole or not used at all.

Frameworks write checkpoints file by file. A marker, written last, tells that one is whole and how many rounds the cell
has entered before. Between rounds cells are independent, so checkpoints of all cells go together if they have the same
number of rounds behind them, whatever their steps are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from xffl.checkpoint.torch_files import load_archive
from xffl.distributed.agreement.consistency import gather_objects, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.distributed.values.sharding import WRAPPERS
from xffl.errors import CheckpointError, ConfigError
from xffl.files import make_folders, open_regular, read_fields, remove_file, sync, write_whole, written_whole
from xffl.reading import Fields
from xffl.topology import cells_text

__all__ = ["MARKER", "CellCheckpoints", "CheckpointFiles", "WholeCheckpoint", "trained_names"]

MARKER = "xffl_cell.json"
"""The file that is written last"""
MARKER_LIMIT = 2**16


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint of one cell that was written to its end."""

    folder: Path
    """The folder with the marker and the state of rounds"""
    step: int
    """The optimizer steps that the framework has counted"""
    meetings: int
    """How many rounds, and checks that skipped one, the cell had entered"""


@dataclass(frozen=True)
class _Trained:
    """The parameters that a training is about."""

    count: int
    digest: str
    """Of their names"""

    @classmethod
    def of(cls, names: Collection[str]) -> _Trained:
        return cls(len(names), sha256("\n".join(sorted(names)).encode()).hexdigest())


class CheckpointFiles(Protocol):
    """Where a framework keeps the checkpoints of one cell."""

    @property
    def start_over(self) -> str:
        """What a user writes to use no checkpoint, for messages."""

    def folders(self) -> Iterable[Path]:
        """Return the folders in which there may be a marker."""

    def files(self, folder: Path) -> Iterable[Path]:
        """Return the files of the checkpoint with this folder, the framework's too."""

    def find_surplus(self, whole: Sequence[WholeCheckpoint]) -> Iterable[WholeCheckpoint]:
        """Return the checkpoints, of whole ones by step, that the user does not want to keep."""

    def remove(self, folder: Path) -> None:
        """Remove the checkpoint with this folder, so that a kill on the way leaves none that counts as whole."""

    def finish_removals(self) -> None:
        """Remove what a process has left that was killed while it removed a checkpoint."""


def trained_names(model: nn.Module) -> list[str]:
    """Return the names, without wrappers, of the parameters that a model trains; local."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names]


class CellCheckpoints:
    """The checkpoints of one cell, and which of them go together with those of the other cells.

    :param files: Where the framework keeps them.
    :param state: The state of the cell.
    :param notes: What the cells of this job tell each other of their checkpoints.
    :param trained: The parameters that are trained, by name: a checkpoint of other ones is refused. ``None`` compares
        nothing.
    """

    def __init__(
        self, files: CheckpointFiles, state: DistributedState, notes: CellNotes, trained: Collection[str] | None = None
    ) -> None:
        self._files = files
        self._state = state
        self._notes = notes
        self._trained = None if trained is None else _Trained.of(trained)

    def agree(self, arguments: str, *, starts_over: bool) -> WholeCheckpoint | None:
        """Return this cell's newest checkpoint that goes together with one of each other cell; collective over the job.

        What is newer will be written again, so it does not count as whole any more.

        :param arguments: What the cells must have in common.
        :param starts_over: Whether no checkpoint is to be used.
        :return: The checkpoint, ``None`` where training begins.
        :raises ConfigError: if the cells have unlike arguments, checkpoints of which none go together, or checkpoints
            of other cells or of another model.
        """
        with run_on_all_ranks("checkpoints of this cell") as share:
            share(starts_over)
            if self._state.cell_rank == 0:
                self._files.finish_removals()
            whole = [] if starts_over or self._state.cell_rank else self._find_whole()
        whole = gather_objects(whole)[0]
        self._notes.write("arguments", arguments)
        self._notes.write("checkpoints at the start", _meetings_text(whole))
        given = self._notes.gather("arguments")
        told = self._notes.gather("checkpoints at the start")
        if len(set(given)) > 1:
            lines = ", ".join(f"cell {cell}: {text}" for cell, text in enumerate(given))
            raise ConfigError(f"the cells have unlike arguments of their rounds ({lines}); give all of them the same")
        common = _find_common(told)
        if common is None and all(told):
            lines = ", ".join(f"cell {cell} after rounds {text}" for cell, text in enumerate(told))
            raise ConfigError(
                f"all cells have checkpoints, but none that go together ({lines}); give the folder of a run that began "
                f"with these cells, remove the checkpoints, or {self._files.start_over}"
            )
        if common is None and any(told) and self._state.is_first_of_job:
            without = [cell for cell, text in enumerate(told) if not text]
            _say(f"there is no checkpoint of {cells_text(without)}, so all {len(told)} cells begin anew")
        chosen = [checkpoint for checkpoint in whole if checkpoint.meetings == common]
        resumed = chosen[-1] if chosen else None
        if resumed is not None and self._state.is_first_of_job:
            others = "" if len(told) == 1 else f", and all {len(told)} cells after as many rounds ({common})"
            _say(f"cell {self._state.cell} continues from {resumed.folder}{others}")
        if self._state.cell_rank == 0:
            earlier = [] if resumed is None else whole[: whole.index(resumed) + 1]
            self._unmark({checkpoint.folder for checkpoint in earlier})
            # What the others remove from now on depends on what is left here.
            self._tell(earlier)
        return resumed

    def is_whole(self, folder: Path) -> bool:
        """Tell whether the checkpoint with this folder was written to its end; local."""
        return (folder / MARKER).is_file()

    def load(self, checkpoint: WholeCheckpoint) -> Any:
        """Return the state of rounds that this rank saved; local."""
        path = checkpoint.folder / self._name_of_state()
        try:
            with open_regular(path) as file:
                return load_archive(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"file {path} cannot be read: {error}; remove {checkpoint.folder}, and the one before it is used"
            ) from error

    def unmark(self, folder: Path) -> None:
        """Let a checkpoint not count as whole any more, if there is one; local."""
        if self._state.cell_rank == 0:
            remove_file(folder / MARKER)

    def prepare(self, folder: Path) -> None:
        """Make the folder of a checkpoint, which is not whole from here on; collective over the cell.

        :param folder: The folder of the marker.
        """
        with run_on_all_ranks("folder of a checkpoint", kinds=(OSError,), convert=_unwritten):
            if self._state.cell_rank == 0:
                make_folders(folder)
                remove_file(folder / MARKER)

    def put_aside(self, folder: Path, find_name: Callable[[Path], Path]) -> None:
        """Give a whole checkpoint another name, where one of the same step is to be written; collective over the cell.

        :param folder: The folder of the marker, which need not be there.
        :param find_name: Returns a free path that it may have.
        """
        with run_on_all_ranks("folder of a checkpoint", kinds=(OSError,), convert=_unwritten):
            if self._state.cell_rank == 0 and self.is_whole(folder):
                folder.rename(find_name(folder))

    def save(self, folder: Path, step: int, meetings: int, rounds: Any) -> None:
        """Make a checkpoint whole, and remove old ones; collective over the cell, after the framework's save.

        :param folder: The folder of the marker, which is there.
        :param step: The optimizer steps that the framework has counted.
        :param meetings: How many rounds the cell has entered.
        :param rounds: The state of this rank's rounds.
        """
        with (
            run_on_all_ranks("state of rounds in a checkpoint", convert=_unwritten, kinds=(OSError,)),
            written_whole(folder / self._name_of_state()) as file,
        ):
            torch.save(rounds, file)
        with run_on_all_ranks("marker of a checkpoint", kinds=(OSError,), convert=_unwritten):
            if self._state.cell_rank == 0:
                self._mark(folder, step, meetings)
                self._tell(self._find_whole())
                self.remove_surplus()

    def remove_surplus(self) -> None:
        """Remove what the user does not want to keep, and no slower cell may still need; on the cell's first rank."""
        common = _find_common(self._notes.read("checkpoints"))
        if common is None:
            return
        for checkpoint in self._files.find_surplus(self._find_whole()):
            if checkpoint.meetings < common:
                self._files.remove(checkpoint.folder)

    def _name_of_state(self) -> str:
        return f"xffl_rounds_{self._state.cell_rank}.pt"

    def _find_whole(self) -> list[WholeCheckpoint]:
        """Return the cell's whole checkpoints, by step, those of one step by rounds."""
        whole = []
        for folder in self._files.folders():
            if not self.is_whole(folder):
                continue
            fields = read_fields(folder / MARKER, limit=MARKER_LIMIT, hint=f"remove {folder}")
            saved = fields.integer("cells"), fields.integer("cell"), fields.integer("ranks")
            place = self._state.cells, self._state.cell, self._state.cell_size
            if saved != place:
                raise ConfigError(
                    f"{folder} was saved by {saved[2]} ranks of cell {saved[1]} of {saved[0]}, and this is cell "
                    f"{place[1]} of {place[0]} with {place[2]} ranks; start with the same cells, or with another folder"
                )
            self._check_trained(folder, fields)
            whole.append(WholeCheckpoint(folder, fields.integer("step"), fields.integer("meetings")))
        return sorted(whole, key=lambda checkpoint: (checkpoint.step, checkpoint.meetings))

    def _check_trained(self, folder: Path, fields: Fields) -> None:
        """Refuse a checkpoint of another model: frameworks load what fits, and fail, or train on, with the rest."""
        count, digest = fields.optional("trained", Fields.integer), fields.optional("trained_names", Fields.text)
        if self._trained is None or count is None or digest == self._trained.digest:
            return
        raise ConfigError(
            f"{folder} was saved while {count} parameters with other names were trained, and this model trains "
            f"{self._trained.count}; give another folder for another model, or {self._files.start_over}"
        )

    def _mark(self, folder: Path, step: int, meetings: int) -> None:
        """Flush all files to the disk, then write the marker."""
        for path in self._files.files(folder):
            sync(path)
        place = {"cell": self._state.cell, "cells": self._state.cells, "ranks": self._state.cell_size}
        trained = self._trained
        names = {} if trained is None else {"trained": trained.count, "trained_names": trained.digest}
        write_whole(folder / MARKER, json.dumps({"step": step, "meetings": meetings, **place, **names}) + "\n")

    def _unmark(self, kept: Collection[Path]) -> None:
        """Let no checkpoint count as whole but those in these folders."""
        for folder in self._files.folders():
            if folder not in kept:
                remove_file(folder / MARKER)

    def _tell(self, whole: Iterable[WholeCheckpoint]) -> None:
        """Tell the other cells after how many rounds this one has whole checkpoints."""
        self._notes.write("checkpoints", _meetings_text(whole))


def _say(text: str) -> None:
    print(f"xffl: {text}", file=sys.stderr, flush=True)


def _meetings_text(whole: Iterable[WholeCheckpoint]) -> str:
    """Return after how many rounds there are checkpoints, as a note has it."""
    return " ".join(str(checkpoint.meetings) for checkpoint in whole)


def _find_common(told: Collection[str | None]) -> int | None:
    """Return the largest number that all cells have told, if any."""
    numbers = [{int(word) for word in (text or "").split()} for text in told]
    common = set.intersection(*numbers)
    return max(common) if common else None


def _unwritten(error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint is not whole: {error}; the one before it is untouched")
