"""Folder of a run: what it was asked for, where it ran, and what it has measured.

.. code-block:: text

   runs/NAME/
     config.yaml            the resolved configuration
     origins.json           where each of its values comes from
     environment.json       versions, hosts, command, what each cell runs
     topology.json          the cells; in an elastic run also which of all this one is
     partition.json         optional: who has how many samples of each label
     metrics/cell_0.jsonl   records of a cell, and the same as CSV; federation.* for values over all cells
     rounds/cell_0.jsonl    what each round did
     logs/rank_0.log        what a rank logs
     traces/  checkpoints/  pictures/
     .lock                  who writes here now
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from xffl import __version__
from xffl.checkpoint.damage import check_damage
from xffl.checkpoint.manager import FOLDER, check_checkpoints, find_latest_checkpoint
from xffl.checks import decimal, shown
from xffl.cluster.hardware import describe_host
from xffl.costs import EXCHANGE_FORMAT
from xffl.distributed.agreement.consistency import gather_objects, gather_runtimes, run_on_all_ranks
from xffl.distributed.agreement.differences import holders_text
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, XfflError
from xffl.files import TEXT_FILE_LIMIT, make_folders, read_text, write_whole
from xffl.json_text import parse_json
from xffl.reading import Fields
from xffl.training.config.settings import to_plain
from xffl.training.loggers import HEADER, cut_lines
from xffl.training.run_lock import run_lock
from xffl.yaml_text import flattened, parse_yaml, write_yaml

__all__ = ["RunDirectory", "flattened", "on_all_ranks", "plain_config", "rank_log", "run_lock"]

LOG = logging.getLogger(__name__)

FOLDERS = ("metrics", "rounds", "logs", "traces", "checkpoints", "pictures")
RECORDS = ("metrics", "rounds", "texts")
"""Folders whose files grow line by line, and are cut on resume."""
OWN_RECORDS = re.compile(r"(cell_[0-9]+|federation)\.(jsonl|csv)")
"""Files of records that xffl writes; others a logger of one's own may have written"""
DEFAULT_ORIGIN = "default"

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PACKAGES = (
    *("numpy", "torchmetrics", "transformers", "datasets", "peft", "safetensors", "deepspeed", "tensorboard", "wandb"),
    *("mlflow-skinny", "matplotlib", "rich", "jsonargparse"),
)


class RunDirectory:
    """A run's folder as one rank sees it; :meth:`open` makes it."""

    def __init__(self, path: Path, state: DistributedState) -> None:
        self.path = path
        self._topology = state.topology
        self._is_federated = state.is_federated_scaling_setup()
        self._elastic_cell = None if state.elastic is None else state.lone_cell
        self.rank = state.rank or 0
        self.cell = self._topology.cell_of(self.rank)
        self.is_cell_writer = self.rank == self._topology.offsets[self.cell]
        """Whether this is its cell's first rank, which writes the cell's records"""
        self.log = path / "logs" / f"rank_{self.rank}.log"
        self._held = ExitStack()
        """The lock, and the log"""
        self._about: tuple[dict[str, Any], Mapping[str, str], dict[str, Any]] = ({}, {}, {})
        """Configuration, origins, hosts and runtimes"""

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
    ) -> RunDirectory:
        """Make a run's folder, or go on with it.

        Collective over the world: rank 0 writes it, all see that it exists (a few small messages), and each begins to
        write its log, until :meth:`close`. Until then no other job can open it. What a run is asked for that goes on
        from a checkpoint is written by :meth:`confirm`. Raises on all ranks where the folder holds another run, is in
        use by another job, cannot be written, a rank does not see it, or it has a checkpoint that cannot be read.

        ``origins`` say by dotted names where values of the configuration come from; the others are defaults. With
        ``may_restart`` a run of the same configuration, which has left records but no checkpoint, begins anew: its
        records are removed.
        """
        folder = cls(Path(os.path.abspath(path)), state)
        token = [""]
        try:
            with on_all_ranks("output_dir") as share:
                plain = plain_config(config)
                if folder.rank == 0:
                    if folder.path.exists() and not folder.path.is_dir():
                        raise ConfigError(f"experiment.output_dir {folder.path} is not a folder; give another one")
                    make_folders(folder.path)
                    folder._held.enter_context(run_lock(folder.path))
                    check_damage(folder.path / FOLDER, lambda: find_latest_checkpoint(folder.path))
                    if is_resumed or may_restart:
                        check_checkpoints(folder.path)
                    superseded = folder._check_free(write_yaml(plain), is_resumed, may_restart)
                    token = [folder._prepare()]
                    for file in superseded:  # last: where any of this fails, the run keeps its records
                        file.unlink()
                share(f"{folder.path}, is_resumed={is_resumed}")
            if dist.is_initialized():
                dist.broadcast_object_list(token, src=0)
            with on_all_ranks("sight of the run's folder"):
                folder._check_visible(token[0])
            folder._about = (plain, origins or {}, _describe_place(state))
            with on_all_ranks("run folder"):
                if folder.rank == 0:
                    if not is_resumed:
                        folder._write_about(None)
                    folder._token.unlink()
                folder._held.enter_context(rank_log(folder.log))
        except XfflError:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """End this rank's log, and let other jobs use the folder; local."""
        self._held.close()

    def confirm(self) -> None:
        """Record what a resumed run is asked for, and log what has changed.

        Collective over the world (a small message); rank 0 writes. What was refused before has changed nothing.
        """
        with on_all_ranks("what the run is asked for"):
            if self.rank != 0:
                return
            if changed := self._changes():
                LOG.warning(
                    "%s is resumed with other values: %s; options of optimizers and schedules are those of the "
                    "checkpoint",
                    self.path,
                    ", ".join(changed),
                )
            self._write_about(_read_json(self.path / "environment.json"))

    @property
    def scope(self) -> str:
        """Name of this cell's files."""
        return f"cell_{self.cell}"

    def write_partition(self, labels: Sequence[object], counts: Sequence[Sequence[int]]) -> None:
        """Write each cell's samples of each label; local, every rank may call it and rank 0 writes."""
        if self.rank == 0:
            table = {"labels": [str(label) for label in labels], "counts": [list(map(int, row)) for row in counts]}
            _write_json(self.path / "partition.json", table)

    def cut_after(self, step: int | None, lines: Mapping[str, int] | None = None) -> None:
        """Leave records of later steps out of this cell's files, as a run that is resumed there asks for.

        Local: each cell's first rank cuts the cell's files, rank 0 also the federation's and those of cells that are no
        more. Nobody may have them open. ``step`` is the last one whose records stay, ``None`` where none do. ``lines``
        counts those of files, by their path in the folder, that were there when the checkpoint was written: what came
        after them goes, too, although it is of the same step.
        """
        if not self.is_cell_writer:
            return
        others = {f"cell_{cell}" for cell in range(self._topology.cells)} - {self.scope}
        for kind in RECORDS:
            for file in sorted((self.path / kind).glob("[!.]*.*")):
                if file.stem == self.scope or (self.rank == 0 and file.stem not in others):
                    name = f"{kind}/{file.name}"
                    keeper = _keeper(file, step, None if lines is None else lines.get(name))
                    cut_lines(file, keeper, drops_torn=OWN_RECORDS.fullmatch(file.name) is not None)

    # What rank 0 does -------------------------------------------------------------------------------------------------

    @property
    def _token(self) -> Path:
        return self.path / ".seen"

    def _check_free(self, text: str, is_resumed: bool, may_restart: bool) -> list[Path]:
        """Refuse a folder that holds another run, and return the records of a run that begins anew."""
        records = [file for kind in RECORDS for file in (self.path / kind).glob("[!.]*.*") if file.stat().st_size]
        if is_resumed or not records:
            return []
        config = self.path / "config.yaml"
        if may_restart and config.exists() and _reads_as(config, text):
            return records
        raise ConfigError(
            f"experiment.output_dir {self.path} holds the records of another run, and nothing to go on from "
            f"({records[0].relative_to(self.path)}); give another experiment.output_dir, remove that one, or set "
            "experiment.resume=true where it has a checkpoint"
        )

    def _prepare(self) -> str:
        """Make the folders, and a file that the others look for."""
        for name in FOLDERS:
            make_folders(self.path / name)
        token = uuid.uuid4().hex
        write_whole(self._token, token)
        return token

    def _check_visible(self, token: str) -> None:
        """Raise if this rank does not see what rank 0 has made."""
        try:
            seen = read_text(self._token, TEXT_FILE_LIMIT)
        except (OSError, ValueError):
            seen = ""
        if seen != token:
            raise ConfigError(
                f"experiment.output_dir {self.path}, which rank 0 has made, is not there; give a folder on a file "
                "system that all ranks share"
            )

    def _changes(self) -> list[str]:
        """Tell what the run is asked for now and was not asked for when it was started before."""
        try:
            saved = parse_yaml(read_text(self.path / "config.yaml", TEXT_FILE_LIMIT), limit=TEXT_FILE_LIMIT)
        except (OSError, ValueError):  # of a run that was killed before it was written
            return []
        before, now = flattened(saved or {}), flattened(self._about[0])
        changed = []
        for name in sorted(before.keys() | now.keys()):
            values = before.get(name), now.get(name)
            is_new = name not in before and self._is_default(name, values[1])  # of a later version of xffl
            if values[0] != values[1] and not is_new:
                is_short = not any(isinstance(value, (list, dict)) for value in values)
                changed.append(f"{name} {values[0]} -> {values[1]}" if is_short else name)
        return changed

    def _is_default(self, name: str, value: Any) -> bool:
        """Tell whether nobody has given a value; where no origins are known, whether it is nothing."""
        origins = self._about[1]
        if not origins:
            return value in (None, [], {})
        return not any(name == given or name.startswith(f"{given}.") for given in origins)

    def _write_about(self, before: Mapping[str, Any] | None) -> None:
        """Write what the run is; ``before`` is its environment so far, where it goes on."""
        plain, origins, place = self._about
        write_whole(self.path / "config.yaml", write_yaml(plain))
        above = {
            ".".join(words[:deep]) for words in (name.split(".") for name in origins) for deep in range(len(words))
        }
        defaults = {name: DEFAULT_ORIGIN for name in flattened(plain) if name not in above}
        _write_json(self.path / "origins.json", defaults | dict(origins))
        _write_json(self.path / "environment.json", _describe_environment(place, before))
        topology = self._topology
        values = {
            "world_size": topology.world_size,
            "cells": list(topology.sizes),
            "replica_size": topology.replica_size,
            "cell_shape": None if topology.cell_shape is None else dict(topology.cell_shape),
            "federated": self._is_federated,
        }
        if self._elastic_cell is not None:
            values["elastic"] = {"cell": self._elastic_cell[0], "cells": list(self._elastic_cell[1])}
        _write_json(self.path / "topology.json", values)


def plain_config(config: Any) -> dict[str, Any]:
    """Return a configuration (a dataclass, or a mapping) as mappings, lists, texts and numbers; local."""
    if not isinstance(config, Mapping) and (isinstance(config, type) or not is_dataclass(config)):
        raise ConfigError(f"the configuration is a {type(config).__name__}; give a dataclass, or a mapping")
    plain: dict[str, Any] = to_plain(config)
    return plain


def _keeper(file: Path, step: int | None, most: int | None) -> Callable[[int, str], bool]:
    """Return which lines of a file of records stay."""
    is_csv = file.suffix == ".csv"
    fields = HEADER.count(",") + 1 if OWN_RECORDS.fullmatch(file.name) else None

    def is_kept(place: int, line: str) -> bool:
        if is_csv and place == 0:
            return True
        at = _step_of_row(line, fields) if is_csv else _step_of_line(line)
        return step is not None and at <= step and (most is None or place < most)

    return is_kept


def _step_of_line(line: str) -> int:
    """Return the step of a record of a file of JSON lines."""
    return Fields(parse_json(line), "the record").integer("step")


def _step_of_row(line: str, fields: int | None) -> int:
    """Return the step of a record of a CSV file, which must have so many fields."""
    try:
        row = next(csv.reader(io.StringIO(line, newline="")), [])
    except csv.Error as error:  # Python 3.10 reads no zero bytes
        raise ValueError(str(error)) from error
    if fields is not None and len(row) != fields:
        raise ValueError(f"it has {len(row)} fields in place of {fields}")
    step = decimal(row[1])
    if step is None:
        raise ValueError(f"its step is {shown(row[1])}")
    return step


def on_all_ranks(what: str) -> AbstractContextManager[Callable[[object], None]]:
    """Run a block that writes into the folder, and fail on all ranks where it fails on one; collective."""
    wrong = "experiment.output_dir cannot be written: {}; give another one"
    return run_on_all_ranks(what, convert=lambda error: ConfigError(wrong.format(error)), kinds=(OSError,))


def _reads_as(path: Path, text: str) -> bool:
    """Tell whether a file holds a text."""
    try:
        return read_text(path, len(text.encode())) == text
    except (OSError, ValueError):
        return False


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = parse_json(read_text(path, TEXT_FILE_LIMIT))
    except (OSError, ValueError):  # of a run that was killed before it was written
        return None
    return value if isinstance(value, dict) else None


# Where a run takes place ----------------------------------------------------------------------------------------------


def _describe_environment(place: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe this process's environment; ``before`` is what was written when the run began, where it goes on."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    now = datetime.now(timezone.utc).isoformat()
    environment = {
        "xffl": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "packages": packages,
        "exchange_format": EXCHANGE_FORMAT,
        **place,
        "command": [sys.executable, *sys.argv],
        "started_at": now,
    }
    if before is not None:
        environment["started_at"] = before.get("started_at", now)
        environment["resumed_at"] = [*before.get("resumed_at", []), now]
    return environment


def _describe_place(state: DistributedState) -> dict[str, Any]:
    """Describe each node once, and what the cells run, once for all that run the same; collective over the world."""
    of_ranks = gather_objects(None if state.node_local_rank else (state.node_rank, describe_host()))
    hosts = {(node, host["host"]): host for node, host in filter(None, of_ranks)}
    first = 0 if state.lone_cell is None else state.lone_cell[0]  # this job's cell, where it is one of several
    runtimes = [
        {"cells": holders_text(ranks, state.topology.sizes, first), **asdict(runtime)}
        for runtime, ranks in gather_runtimes(state).items()
    ]
    return {"hosts": list(hosts.values()), "runtimes": runtimes}


# Who writes -----------------------------------------------------------------------------------------------------------


@contextmanager
def rank_log(path: Path) -> Iterator[None]:
    """Write into a file what the logger ``xffl`` gets from level INFO on, and all warnings; local.

    Warnings and errors still appear where they appeared before. What the file holds already stays.
    """
    logger, kept = logging.getLogger("xffl"), logging.FileHandler(path, encoding="utf-8")
    kept.setFormatter(logging.Formatter(LOG_FORMAT))
    handlers: list[logging.Handler] = [kept]
    if not logger.hasHandlers() and logging.lastResort is not None:
        handlers.append(logging.lastResort)  # which a handler of its own would silence
    level, show = logger.level, warnings.showwarning

    def show_and_keep(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show(message, category, filename, lineno, file, line)
        if handlers and file is None:
            text = f"{filename}:{lineno}: {category.__name__}: {message}"
            record = logging.LogRecord(
                "warnings",
                level=logging.WARNING,
                pathname=filename,
                lineno=lineno,
                msg=text,
                args=None,
                exc_info=None,
            )
            kept.handle(record)

    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    warnings.showwarning = show_and_keep
    try:
        yield
    finally:
        while handlers:
            logger.removeHandler(handlers.pop())
        logger.setLevel(level)
        kept.close()
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show
