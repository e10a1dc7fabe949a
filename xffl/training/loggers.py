"""Loggers, which write the values of a run: JSON lines and CSV always, others as extras.

JSON lines and CSV are text files that grow by whole lines, and are cut where a resumed run goes on. One process of each
cell has the cell's loggers.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from xffl.checks import shorten
from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.files import (
    TEXT_FILE_LIMIT,
    create,
    make_folders,
    naming_errors,
    read_bytes,
    read_text,
    write_whole,
    written_whole,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "HEADER",
    "CSVLogger",
    "FileLogger",
    "JSONLinesLogger",
    "LineFile",
    "Logger",
    "MLflowLogger",
    "TensorBoardLogger",
    "WandBLogger",
    "cut_lines",
    "plain_values",
    "tiled",
]

LOG = logging.getLogger(__name__)

HEADER = "time,step,epoch,samples,name,value"
"""The first line of a CSV file."""
CSV_BEGIN = re.compile(rb"[^,]*,\d+,\d+,\d+,")
"""How a line of a CSV file begins that begins a record"""
LINES_LIMIT = 2**32
"""The most bytes of a file of lines to which a resumed run appends"""
ESCAPED = {ord("\n"): "\\n", ord("\r"): "\\r"}
"""How line breaks in a name are written into a CSV file"""
NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}
PARAMETERS_AT_ONCE, LONGEST_PARAMETER = 100, 6000
"""What MLflow takes."""


class Logger:
    """Something that keeps values, pictures and texts of one cell, or of the federation.

    One process has it: a cell's first rank, or rank 0 for the federation. All methods are local; override
    :meth:`log`, and what else it can. ``step`` counts optimizer steps so far, ``samples`` those of the cell, ``epoch``
    is counted from 0, and ``time_s`` is in seconds since 1970. Those here are made with the run's folder and the scope:
    whose values these are, such as ``cell_0`` or ``federation``.
    """

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Keep a record of numbers by name, which need not be finite."""
        raise NotImplementedError(f"{type(self).__name__} has no log; override it")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Keep a picture, or some, as :func:`xffl.training.loggers.tiled` takes them, where the logger can."""

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Keep a text, where the logger can."""

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration, plain values by their dotted names, where the logger can."""

    def cut_after(self, step: int | None) -> None:
        """Let go what belongs to later steps, as a run that is resumed there asks for; ``None``: of all steps."""

    def close(self) -> None:
        """Write what is left, and give everything back."""


def tiled(images: Any) -> npt.NDArray[np.uint8]:
    """Return a picture, or several side by side, as bytes of shape (height, width, 3).

    They are a tensor or array (height, width), (channels, height, width) or (pictures, channels, height, width) of
    bytes, of booleans, or of fractions from 0 to 1; with 1 or 3 channels.
    """
    pixels: npt.NDArray[Any]
    if isinstance(images, torch.Tensor):
        values = images.detach().cpu()
        pixels = (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    else:
        pixels = np.asarray(images)
    pixels = pixels[(None,) * (4 - pixels.ndim)] if 2 <= pixels.ndim < 4 else pixels
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not pixels.size:
        raise ConfigError(
            "a picture must have shape (height, width), (channels, height, width) or (pictures, channels, height, "
            f"width) with 1 or 3 channels, got {pixels.shape}"
        )
    if np.issubdtype(pixels.dtype, np.floating):
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):
            raise ConfigError(f"a picture has values from {low:g} to {high:g}; give fractions from 0 to 1, or bytes")
        pixels = np.round(pixels * 255).astype(np.uint8)
    elif pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype != np.uint8:
        raise ConfigError(f"a picture is of {pixels.dtype}; give uint8 from 0 to 255, or fractions from 0 to 1")
    row = np.concatenate(list(pixels), axis=2)  # (channels, height, pictures * width)
    return np.ascontiguousarray(np.broadcast_to(row, (3, *row.shape[1:])).transpose(1, 2, 0))


# JSON lines and CSV ---------------------------------------------------------------------------------------------------


class LineFile:
    """A file that one process appends lines to; local.

    It is opened when the first line is written, a new file begins with the header, if any. Each call is one write to
    the operating system, so that a process that is killed loses at most the line that it was writing; what an earlier
    one left of its last line is removed.
    """

    def __init__(self, path: Path, header: str = "") -> None:
        self.path = path
        self._header = header
        self._handle: int | None = None
        self._lines = 0

    @property
    def lines(self) -> int:
        """Whole lines of the file, the header among them."""
        if self._handle is None:
            return read_bytes(self.path, LINES_LIMIT).count(b"\n") if self.path.exists() else 0
        return self._lines

    def append(self, lines: str) -> None:
        """Write lines: text that ends in a line break."""
        if self._handle is None:
            if self.path.exists() and not read_bytes(self.path, LINES_LIMIT).endswith(b"\n"):
                cut_lines(self.path, lambda index, line: True)
            self._lines = self.lines
            with create(self.path, "append") as file:
                self._handle = os.dup(file.fileno())
            if self._header and not self._lines:
                lines = f"{self._header}\n{lines}"
        before = os.fstat(self._handle).st_size
        left = memoryview(lines.encode())
        try:
            with naming_errors(self.path):
                while left:
                    left = left[os.write(self._handle, left) :]
        except OSError:
            with suppress(OSError):  # the next line must not be put behind half of this one
                os.ftruncate(self._handle, before)
            raise
        self._lines += lines.count("\n")

    def close(self) -> None:
        """Give the file back; a later line opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def cut_lines(path: Path, is_kept: Callable[[int, str], bool], *, drops_torn: bool = False) -> None:
    """Leave the lines of a file out that shall go, and a last one that is not whole; local.

    ``is_kept`` is called with a record's line number, from 0, and the record without its last line break: a line, or of
    a CSV file several lines where a field in quotes has line breaks. The new file is written aside and takes the name
    in the end, so that a kill leaves the old one or the new one. A line that is no record, such as a power cut leaves
    in the middle of a file, is an error; with ``drops_torn`` it goes, and a warning says so.
    """
    if not path.exists():
        return
    before = read_bytes(path, LINES_LIMIT)
    lines = before.split(b"\n")[:-1]  # behind the last line break there is nothing, or half a line
    records = _csv_records(lines) if path.suffix == ".csv" else list(enumerate(lines))
    records_kept = []
    torn = []
    for index, record in records:
        try:
            if is_kept(index, record.decode()):
                records_kept.append(record + b"\n")
        except (ValueError, LookupError, TypeError) as error:
            torn.append(index + 1)
            if not drops_torn:
                raise ConfigError(
                    f"{path}, line {index + 1} is not a record: {error}; remove that line, or give another "
                    "experiment.output_dir"
                ) from error
    if torn:
        LOG.warning("%s: %s no record and left out", path, _lines_text(torn))
    after = b"".join(records_kept)
    if after != before:
        with written_whole(path) as file:
            file.write(after)


def _csv_records(lines: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Put lines together that are one record, since a field in quotes has line breaks."""
    records: list[tuple[int, bytes]] = []
    for index, line in enumerate(lines):
        is_open = bool(records) and records[-1][1].count(b'"') % 2 == 1
        # A record that was torn inside of quotes ends where the next one begins.
        if is_open and not CSV_BEGIN.match(line):
            first, before = records[-1]
            records[-1] = first, before + b"\n" + line
        else:
            records.append((index, line))
    return records


def _lines_text(numbers: Sequence[int]) -> str:
    return f"line {numbers[0]} is" if len(numbers) == 1 else f"lines {shorten(numbers, 5)} are"


def plain_values(value: Any) -> Any:
    """Return a value with texts for numbers that JSON does not have, and lists for sequences."""
    if isinstance(value, float):
        return value if math.isfinite(value) else NAMES.get(value, "NaN")
    if isinstance(value, dict):
        return {str(name): plain_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value


class FileLogger(Logger):
    """A logger of lines in files of the run's folder, whose :meth:`RunDirectory.cut_after` cuts them."""

    files: tuple[LineFile, ...]

    def cut_after(self, step: int | None) -> None:
        """Open the files anew."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()


class JSONLinesLogger(FileLogger):
    """``metrics/SCOPE.jsonl``: one object a line, and beside it ``images/SCOPE/`` and ``texts/SCOPE.jsonl``."""

    def __init__(self, folder: Path, scope: str) -> None:
        self._images = folder / "images" / scope
        self._file, self._texts = (LineFile(folder / kind / f"{scope}.jsonl") for kind in ("metrics", "texts"))
        self.files = (self._file, self._texts)

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write one line."""
        record = {"time": time_s, "step": step, "epoch": epoch, "samples": samples, "values": dict(values)}
        self._file.append(json.dumps(plain_values(record), allow_nan=False) + "\n")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Write a PNG file named by the step; all else than letters, digits, dots and dashes becomes an underscore."""
        with optional_import("report", "log_image needs Pillow, a part of matplotlib's installation"):
            from PIL import Image
        make_folders(self._images)
        file = self._images / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}_{step}.png"
        with naming_errors(file):
            Image.fromarray(tiled(images)).save(file)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Write one line."""
        make_folders(self._texts.path.parent)
        self._texts.append(json.dumps({"time": time.time(), "step": step, "name": name, "text": text}) + "\n")


class CSVLogger(FileLogger):
    """``metrics/SCOPE.csv`` in the long form: ``time,step,epoch,samples,name,value``."""

    def __init__(self, folder: Path, scope: str) -> None:
        self.files = (LineFile(folder / "metrics" / f"{scope}.csv", HEADER),)

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write a line for each value, so that it reads back to the bit."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for name, value in values.items():
            shown = name.translate(ESCAPED)  # a line is a record for whoever reads the file line by line
            writer.writerow((time_s, step, epoch, samples, shown, str(plain_values(value))))
        if values:
            self.files[0].append(text.getvalue())


# Others ---------------------------------------------------------------------------------------------------------------


def _read_id(file: Path) -> str:
    """Return the id of a run that a file holds; empty without one, and where a kill has left an empty file."""
    return read_text(file, TEXT_FILE_LIMIT).strip() if file.exists() else ""


class MLflowLogger(Logger):
    """A run of MLflow for each cell, and one for the federation, in an experiment of the run's name.

    A run that is resumed goes on as the same one, whose id ``mlflow/SCOPE.id`` holds. What was logged of later steps
    before stays there beside the new values. By default the tracking store is the SQLite file ``mlflow/SCOPE.db``, one
    for each cell, since many file systems that ranks share cannot lock it.
    """

    def __init__(
        self, folder: Path, scope: str, *, name: str, uri: str | None = None, experiment: str | None = None
    ) -> None:
        with optional_import("mlflow", "MLflowLogger needs mlflow-skinny"):
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric = Metric
        self._parameter = Param
        home = (folder / "mlflow").absolute()
        make_folders(home)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / scope}.db")
        file = home / f"{scope}.id"
        if known_id := _read_id(file):
            self._id = known_id
            return
        title = experiment or name
        try:
            number = self._client.create_experiment(title)
        except MlflowException:  # there is one already, maybe of another cell
            known = self._client.get_experiment_by_name(title)
            if known is None:
                raise
            number = known.experiment_id
        self._id = self._client.create_run(number, run_name=f"{name}-{scope}").info.run_id
        write_whole(file, self._id)

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Log a metric for each value; names keep to the characters that MLflow has."""
        moment = int(time_s * 1000)
        metrics = {**values, "epoch": epoch, "samples": samples}
        self._client.log_batch(
            self._id, metrics=[self._metric(name, float(value), moment, step) for name, value in metrics.items()]
        )

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, name, text[:LONGEST_PARAMETER])

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Log the parameters; those of a run that is resumed stay as they are, as MLflow asks for."""
        known = self._client.get_run(self._id).data.params
        new = [
            self._parameter(name, str(value)[:LONGEST_PARAMETER]) for name, value in values.items() if name not in known
        ]
        for start in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=new[start : start + PARAMETERS_AT_ONCE])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/SCOPE``; look at them with ``tensorboard --logdir RUN/tensorboard``."""

    def __init__(self, folder: Path, scope: str) -> None:
        with optional_import("tensorboard", "TensorBoardLogger needs tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._kind = SummaryWriter
        self._folder = folder / "tensorboard" / scope
        self._purge_step: int | None = None
        self._made: SummaryWriter | None = None

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self._writer().add_scalar(name, value, step, walltime=time_s)

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Write a picture."""
        self._writer().add_image(name, tiled(images), step, dataformats="HWC")

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Write a text."""
        self._writer().add_text(name, text, step)

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Write a table."""
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        text = "\n".join(["| name | value |", "| --- | --- |", *rows])
        self._writer().add_text("configuration", text, 0)

    def cut_after(self, step: int | None) -> None:
        """Begin a file that tells TensorBoard to leave out what others have of later steps."""
        self.close()
        self._purge_step = 0 if step is None else step + 1

    def close(self) -> None:
        """Write what is left."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _writer(self) -> SummaryWriter:
        """Return the writer, which makes its file at once and therefore waits for the first value."""
        if self._made is None:
            self._made = self._kind(str(self._folder), purge_step=self._purge_step)
            self._purge_step = None
        return self._made


class WandBLogger(Logger):
    """A run of Weights & Biases for each cell, and one for the federation, in a group of the run's name.

    A run that is resumed goes on under the same id, which ``wandb/SCOPE.id`` holds. What was logged of later steps
    before stays there; it shows as a second value of the same step. Project, entity, mode and tags are those of
    :class:`WandBConfig <xffl.training.mixins.logging.WandBConfig>`.
    """

    def __init__(
        self,
        folder: Path,
        scope: str,
        *,
        name: str,
        project: str,
        entity: str | None = None,
        mode: str = "offline",
        tags: Sequence[str] = (),
    ) -> None:
        with optional_import("wandb", "WandBLogger needs wandb"):
            import wandb
        self._image = wandb.Image
        home = folder / "wandb"
        make_folders(home)
        file = home / f"{scope}.id"
        if not _read_id(file):
            write_whole(file, uuid.uuid4().hex[:16])
        self._run = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=_read_id(file),
            name=f"{name}-{scope}",
            group=name,
            tags=list(tags),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="create_new",  # rank 0 has two runs at a time
            settings={"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True},
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Log the values with their step, which need not be larger than the last one."""
        self._run.log({**values, "step": step, "epoch": epoch, "samples": samples, "time": time_s})

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Log a picture."""
        self._run.log({name: self._image(tiled(images)), "step": step})

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Log a text."""
        self._run.log({name: text, "step": step})

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the run."""
        self._run.finish()
