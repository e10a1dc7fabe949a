"""Trainer's checkpoints as those of one cell: with the state of its rounds, and whole or not used at all.

Trainer writes ``checkpoint-N`` file by file. A marker, written last, tells that the folder is whole and how many rounds
the cell has entered before. Between rounds cells are independent, so checkpoints of all cells go together if they have
the same number of rounds behind them, whatever their steps are.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xffl.checkpoint.torch_files import load_archive
from xffl.distributed.cell_notes import CellNotes
from xffl.distributed.consistency import gather_objects, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError
from xffl.files import open_regular, read_fields, remove_file, sync, write_whole, written_whole
from xffl.topology import cells_text

__all__ = ["CellCheckpoints", "WholeCheckpoint"]

MARKER = "xffl_cell.json"
"""The file that is written last"""
MARKER_LIMIT = 2**16
FOLDER = re.compile(r"checkpoint-([0-9]{1,15})")


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint of one cell that was written to its end."""

    folder: Path
    """Trainer's folder"""
    step: int
    """Trainer's ``global_step``"""
    meetings: int
    """How many rounds, and checks that skipped one, the cell had entered"""


class CellCheckpoints:
    """The checkpoints of one cell, and which of them go together with those of the other cells.

    :param folder: Trainer's ``output_dir``, of this cell alone.
    :param state: The state of the cell.
    :param notes: What the cells of this job tell each other of their checkpoints.
    :param kept: How many whole checkpoints the user wants to keep; ``None`` keeps all.
    """

    def __init__(self, folder: Path, state: DistributedState, notes: CellNotes, kept: int | None) -> None:
        self._folder = folder
        self._state = state
        self._notes = notes
        self._kept = kept

    def agree(self, arguments: str, *, starts_over: bool) -> WholeCheckpoint | None:
        """Return this cell's newest checkpoint that goes together with one of each other cell; collective over the job.

        What is newer will be written again, so it does not count as whole any more.

        :param arguments: What the cells must have in common.
        :param starts_over: Whether no checkpoint is to be used.
        :return: The checkpoint, ``None`` where training begins.
        :raises ConfigError: if the cells have unlike arguments, or checkpoints of which none go together.
        """
        with run_on_all_ranks("checkpoints of this cell") as share:
            share(starts_over)
            whole = [] if starts_over or self._state.cell_rank else self._find_whole()
        whole = gather_objects(whole)[0]
        self._notes.write("arguments", arguments)
        self._tell(whole)
        given = self._notes.gather("arguments")
        told = self._notes.gather("checkpoints")
        if len(set(given)) > 1:
            lines = ", ".join(f"cell {cell}: {text}" for cell, text in enumerate(given))
            raise ConfigError(f"the cells have unlike arguments of federate ({lines}); give all of them the same")
        common = _find_common(told)
        if common is None and all(told):
            lines = ", ".join(f"cell {cell} after rounds {text}" for cell, text in enumerate(told))
            raise ConfigError(
                f"all cells have checkpoints, but none that go together ({lines}); give the folder of a run that began "
                "with these cells, remove the checkpoints, or call train(resume_from_checkpoint=False)"
            )
        if common is None and any(told) and self._state.is_first_of_job:
            without = [cell for cell, text in enumerate(told) if not text]
            text = f"there is no checkpoint of {cells_text(without)}, so all {len(told)} cells begin anew"
            print(f"xffl: {text}", file=sys.stderr, flush=True)
        chosen = [checkpoint for checkpoint in whole if checkpoint.meetings == common]
        resumed = chosen[-1] if chosen else None
        if self._state.cell_rank == 0:
            self._unmark_newer(-1 if resumed is None else resumed.step)
        return resumed

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

    def save(self, step: int, meetings: int, rounds: Any) -> None:
        """Make the checkpoint of a step whole, and remove old ones; collective over the cell, after Trainer's save.

        :param step: Trainer's ``global_step``.
        :param meetings: How many rounds the cell has entered.
        :param rounds: The state of this rank's rounds.
        """
        folder = self._folder / f"checkpoint-{step}"
        with (
            run_on_all_ranks("state of rounds in a checkpoint", convert=_unwritten, kinds=(OSError,)),
            written_whole(folder / self._name_of_state()) as file,
        ):
            torch.save(rounds, file)
        with run_on_all_ranks("marker of a checkpoint", kinds=(OSError,), convert=_unwritten):
            if self._state.cell_rank == 0:
                self._mark(folder, step, meetings)
                whole = self._find_whole()
                self._tell(whole)
                self._remove_old(whole)

    def _name_of_state(self) -> str:
        return f"xffl_rounds_{self._state.cell_rank}.pt"

    def _find_whole(self) -> list[WholeCheckpoint]:
        """Return the cell's whole checkpoints, by step."""
        whole = []
        for step, folder in self._find_folders():
            if not (folder / MARKER).is_file():
                continue
            fields = read_fields(folder / MARKER, limit=MARKER_LIMIT, hint=f"remove {folder}")
            saved = fields.integer("cells"), fields.integer("cell"), fields.integer("ranks")
            place = self._state.cells, self._state.cell, self._state.cell_size
            if saved != place:
                raise ConfigError(
                    f"{folder} was saved by {saved[2]} ranks of cell {saved[1]} of {saved[0]}, and this is cell "
                    f"{place[1]} of {place[0]} with {place[2]} ranks; start with the same cells, or with another "
                    "output_dir"
                )
            whole.append(WholeCheckpoint(folder, step, fields.integer("meetings")))
        return whole

    def _mark(self, folder: Path, step: int, meetings: int) -> None:
        """Flush Trainer's files to the disk, then write the marker."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sync(path)
        place = {"cell": self._state.cell, "cells": self._state.cells, "ranks": self._state.cell_size}
        write_whole(folder / MARKER, json.dumps({"step": step, "meetings": meetings, **place}) + "\n")

    def _unmark_newer(self, step: int) -> None:
        for saved_step, folder in self._find_folders():
            if saved_step > step:
                remove_file(folder / MARKER)

    def _tell(self, whole: Iterable[WholeCheckpoint]) -> None:
        """Tell the other cells after how many rounds this one has whole checkpoints."""
        self._notes.write("checkpoints", " ".join(str(checkpoint.meetings) for checkpoint in whole))

    def _remove_old(self, whole: Collection[WholeCheckpoint]) -> None:
        """Remove what is older than the user wants to keep, and than what a slower cell may still need."""
        common = _find_common(self._notes.read("checkpoints"))
        if self._kept is None or common is None:
            return
        for checkpoint in list(whole)[: -self._kept]:
            if checkpoint.meetings < common:
                remove_file(checkpoint.folder / MARKER)
        newest = max(checkpoint.step for checkpoint in whole)
        for step, folder in self._find_folders():
            # What has no marker was not written to its end, or is no longer wanted, now or before a kill.
            if step < newest and not (folder / MARKER).is_file():
                shutil.rmtree(folder, ignore_errors=True)

    def _find_folders(self) -> list[tuple[int, Path]]:
        """Return the folders of Trainer's checkpoints with their steps, in the order of steps."""
        if not self._folder.is_dir():
            return []
        named = [(FOLDER.fullmatch(folder.name), folder) for folder in self._folder.iterdir()]
        return sorted((int(name[1]), folder) for name, folder in named if name is not None)


def _find_common(told: Collection[str | None]) -> int | None:
    """Return the largest number that all cells have told, if any."""
    numbers = [{int(word) for word in (text or "").split()} for text in told]
    common = set.intersection(*numbers)
    return max(common) if common else None


def _unwritten(error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint is not whole: {error}; the one before it is untouched")
