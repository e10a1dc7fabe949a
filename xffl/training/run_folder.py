"""The folder of a run: what it was asked for, where it ran, and what it has measured.

.. code-block:: text

   runs/NAME/
     config.yaml            the resolved configuration
     origins.json           where each of its values comes from
     environment.json       versions, hosts, command
     topology.json          the cells
     partition.json         optional: who has how many samples of each label
     metrics/cell_0.jsonl   records of a cell, and the same as CSV; federation.* for values over all cells
     rounds/cell_0.jsonl    what each round did
     logs/rank_0.log        what a rank logs
     traces/  checkpoints/  pictures/
     .lock                  who writes here now, see :mod:`xffl.training.run_lock`
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xffl.checkpoint.manager import check_checkpoints
from xffl.distributed.consistency import check_consistent
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, XfflError
from xffl.training.config.values import load_text, to_plain, write_yaml
from xffl.training.loggers.lines import cut_lines
from xffl.training.rank_log import RankLog
from xffl.training.run_environment import describe_environment, describe_hosts
from xffl.training.run_lock import RunLock

__all__ = ["RunFolder", "flattened", "plain_config"]

LOG = logging.getLogger(__name__)

FOLDERS = ("metrics", "rounds", "logs", "traces", "checkpoints", "pictures")
RECORDS = ("metrics", "rounds", "texts")
"""Folders whose files grow line by line, and are cut on resume."""
DEFAULT_ORIGIN = "default"


class RunFolder:
    """A run's folder as one rank sees it; made by :meth:`open`.

    :param path: The folder.
    :param state: The state of the world.
    """

    def __init__(self, path: Path, state: DistributedState) -> None:
        self.path = path
        self._topology = state.topology
        self._is_federated = state.is_federated_scaling_setup()
        self.rank = state.rank or 0
        self.cell = self._topology.cell_of(self.rank)
        self.is_cell_writer = self.rank == self._topology.offsets[self.cell]
        """Whether this is its cell's first rank, which writes the cell's records"""
        self.log = RankLog(path / "logs" / f"rank_{self.rank}.log")
        self._lock = RunLock(path)
        self._about: tuple[dict[str, Any], Mapping[str, str], list[dict[str, Any]]] = ({}, {}, [])

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        state: DistributedState,
        config: Any,
        origins: Mapping[str, str] | None = None,
        is_resumed: bool = False,
        *,
        may_restart: bool = False,
    ) -> RunFolder:
        """Make a run's folder, or go on with it.

        Collective over the world: rank 0 writes it, all see that it is there (a few small messages), and each begins to
        write its log, until :meth:`close`. Until then no other job can open it.

        What a run is asked for that goes on from a checkpoint is written by :meth:`confirm`.

        :param path: The folder, on a file system that all ranks share.
        :param state: The state of the world.
        :param config: The configuration: a dataclass, or a mapping of plain values.
        :param origins: Where values of it come from, by dotted names; the others are defaults.
        :param is_resumed: Whether the run goes on from a checkpoint in the folder.
        :param may_restart: Whether a run of the same configuration, which has left records but no checkpoint, begins
            anew: its records are removed.
        :return: The folder.
        :raises ConfigError: on all ranks: if the folder holds another run, is in use by another job, cannot be
            written, or a rank does not see it.
        :raises CheckpointError: on all ranks: if it may go on from a checkpoint, and the folder holds one that cannot
            be read.
        """
        folder = cls(Path(os.path.abspath(path)), state)
        token = ""

        def make() -> None:
            nonlocal token
            if folder.rank == 0:
                plain = plain_config(config)
                folder._lock_up()
                if is_resumed or may_restart:
                    check_checkpoints(folder.path)
                folder._check_free(write_yaml(plain), is_resumed, may_restart)
                token = folder._prepare()

        def write() -> None:
            if folder.rank == 0:
                if not is_resumed:
                    folder._write_about(None)
                folder._token.unlink()
            folder.log.open()

        try:
            _together("output_dir", make, f"{folder.path}, is_resumed={is_resumed}")
            token = _from_first(token)
            _together("sight of the run's folder", lambda: folder._look(token), "seen")
            folder._about = (plain_config(config), origins or {}, describe_hosts(state))
            _together("run folder", write, "written")
        except XfflError:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """End this rank's log, and let other jobs use the folder; local."""
        self.log.close()
        self._lock.give()

    def confirm(self) -> None:
        """Say what a run is asked for that has gone on from its checkpoint, and tell what has changed.

        Collective over the world (a small message); rank 0 writes. What was refused before has changed nothing.
        """

        def write() -> None:
            if self.rank != 0:
                return
            if changed := self._changes():
                LOG.warning(
                    "%s goes on with other values: %s; options that optimizers and schedules have in the "
                    "checkpoint stay",
                    self.path,
                    ", ".join(changed),
                )
            self._write_about(_read_json(self.path / "environment.json"))

        _together("what the run is asked for", write, "written")

    @property
    def scope(self) -> str:
        """Name of this cell's files."""
        return f"cell_{self.cell}"

    def write_partition(self, labels: Sequence[object], counts: Sequence[Sequence[int]]) -> None:
        """Say how the data are dealt out; local, every rank may call it and rank 0 writes.

        :param labels: The labels.
        :param counts: For each cell its samples of each label.
        :raises ConfigError: if the counts are not of all cells and labels.
        """
        table = [[int(count) for count in row] for row in counts]
        if len(table) != self._topology.cells or any(len(row) != len(labels) for row in table):
            raise ConfigError(
                f"counts of {len(table)} cells and {sorted({len(row) for row in table})} labels do not fit "
                f"{self._topology.cells} cells and {len(labels)} labels; give a row for each cell"
            )
        if self.rank == 0:
            _write_json(self.path / "partition.json", {"labels": [str(label) for label in labels], "counts": table})

    def cut_after(self, step: int | None, lines: Mapping[str, int] | None = None) -> None:
        """Leave records of later steps out of this cell's files, as a run that is resumed there asks for.

        Local: each cell's first rank cuts the cell's files, rank 0 also the federation's and those of cells that are no
        more. Nobody may have them open.

        :param step: The last step whose records stay; ``None`` where none do.
        :param lines: Lines of files, by their path in the folder, that were there when the checkpoint was written; what
            came after them goes, too, although it is of the same step.
        :raises ConfigError: if a file has a line that is no record.
        """
        if not self.is_cell_writer:
            return
        others = {f"cell_{cell}" for cell in range(self._topology.cells)} - {self.scope}
        for kind in RECORDS:
            for file in sorted((self.path / kind).glob("[!.]*.*")):
                if file.stem == self.scope or (self.rank == 0 and file.stem not in others):
                    name = f"{kind}/{file.name}"
                    cut_lines(file, _keeper(file, step, None if lines is None else lines.get(name)))

    # What rank 0 does -------------------------------------------------------------------------------------------------

    @property
    def _token(self) -> Path:
        return self.path / ".seen"

    def _lock_up(self) -> None:
        """Make the folder, and keep other jobs out of it."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"experiment.output_dir {self.path} is no folder; give another one")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take()

    def _check_free(self, text: str, is_resumed: bool, may_restart: bool) -> None:
        """Refuse a folder that holds another run."""
        records = [file for kind in RECORDS for file in (self.path / kind).glob("[!.]*.*") if file.stat().st_size]
        if is_resumed or not records:
            return
        config = self.path / "config.yaml"
        if may_restart and config.exists() and config.read_text(encoding="utf-8") == text:
            for file in records:
                file.unlink()
            return
        raise ConfigError(
            f"experiment.output_dir {self.path} holds the records of another run, and nothing to go on from "
            f"({records[0].relative_to(self.path)}); give another experiment.output_dir, remove that one, or set "
            "experiment.resume=true where it has a checkpoint"
        )

    def _prepare(self) -> str:
        """Make the folders, and a file that the others look for."""
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex
        self._token.write_text(token, encoding="utf-8")
        return token

    def _look(self, token: str) -> None:
        """Raise if this rank does not see what rank 0 has made."""
        try:
            seen = self._token.read_text(encoding="utf-8")
        except OSError:
            seen = ""
        if seen != token:
            raise ConfigError(
                f"experiment.output_dir {self.path}, which rank 0 has made, is not there; give a folder on a file "
                "system that all ranks share"
            )

    def _changes(self) -> list[str]:
        """Tell what the run is asked for now and was not asked for when it was started before."""
        try:
            told = load_text((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # of a run that was killed before it was written
            return []
        before, now = flattened(told or {}), flattened(self._about[0])
        changed = []
        for name in sorted(before.keys() | now.keys()):
            values = before.get(name), now.get(name)
            if values[0] != values[1]:
                is_short = not any(isinstance(value, (list, dict)) for value in values)
                changed.append(f"{name} {values[0]} -> {values[1]}" if is_short else name)
        return changed

    def _write_about(self, before: Mapping[str, Any] | None) -> None:
        """Write what the run is; ``before`` is its environment so far, where it goes on."""
        plain, origins, hosts = self._about
        _write(self.path / "config.yaml", write_yaml(plain))
        above = {
            ".".join(words[:deep]) for words in (name.split(".") for name in origins) for deep in range(len(words))
        }
        told = {name: DEFAULT_ORIGIN for name in flattened(plain) if name not in above}
        _write_json(self.path / "origins.json", told | dict(origins))
        _write_json(self.path / "environment.json", describe_environment(hosts, before))
        topology = self._topology
        shape = None if topology.cell_shape is None else dict(topology.cell_shape)
        _write_json(
            self.path / "topology.json",
            {
                "world_size": topology.world_size,
                "cells": list(topology.sizes),
                "replica_size": topology.replica_size,
                "cell_shape": shape,
                "federated": self._is_federated,
            },
        )


def plain_config(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values; local.

    :param config: A dataclass, or a mapping of plain values.
    :return: Mappings, lists, texts and numbers, by name.
    :raises ConfigError: if it is neither.
    """
    if not isinstance(config, Mapping) and (isinstance(config, type) or not is_dataclass(config)):
        raise ConfigError(f"the configuration is a {type(config).__name__}; give a dataclass, or a mapping")
    plain: dict[str, Any] = to_plain(config)
    return plain


def flattened(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names; local.

    :param plain: What :func:`plain_config` gave.
    :param prefix: What the names begin with.
    :return: Values; an empty mapping is one.
    """
    found: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _keeper(file: Path, step: int | None, most: int | None) -> Callable[[int, str], bool]:
    """Return which lines of a file of records stay."""
    is_csv = file.suffix == ".csv"

    def is_kept(place: int, line: str) -> bool:
        if is_csv and place == 0:
            return True
        at = int(line.split(",", 2)[1] if is_csv else json.loads(line)["step"])
        return step is not None and at <= step and (most is None or place < most)

    return is_kept


def _together(what: str, act: Callable[[], None], value: str) -> None:
    """Do something that may fail on some ranks, and fail on all of them then; collective over the world."""
    error: XfflError | None = None
    try:
        act()
    except XfflError as wrong:
        error = wrong
    except OSError as wrong:
        error = ConfigError(f"experiment.output_dir cannot be written: {wrong}; give another one")
    check_consistent(what, value, error=error)


def _from_first(value: str) -> str:
    """Return rank 0's value; collective over the world."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of a run that was killed before it was written
        return None
    return found if isinstance(found, dict) else None
