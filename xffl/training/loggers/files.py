"""JSON lines and CSV of every run: text files that grow by whole lines, and are cut where a resumed run goes on."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.training.loggers.base import Logger, tiled

__all__ = ["HEADER", "CSVLogger", "JSONLinesLogger", "LineFile", "cut_lines", "plain_values"]

HEADER = "time,step,epoch,samples,name,value"
"""The first line of a CSV file."""
NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


class LineFile:
    """A file that one process appends lines to; local.

    It is opened when the first line is written, a new file begins with the header, if any. Each call is one write to
    the operating system, so that a process that is killed loses at most the line that it was writing; what an earlier
    one left of its last line is removed.
    """

    def __init__(self, path: Path, header: str = "") -> None:
        self.path, self._header = path, header
        self._handle: int | None = None
        self._lines = 0

    @property
    def lines(self) -> int:
        """Whole lines of the file, the header among them."""
        if self._handle is None:
            return self.path.read_bytes().count(b"\n") if self.path.exists() else 0
        return self._lines

    def append(self, lines: str) -> None:
        """Write lines: text that ends in a line break."""
        if self._handle is None:
            if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
                cut_lines(self.path, lambda index, line: True)
            self._lines = self.lines
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if self._header and not self._lines:
                lines = f"{self._header}\n{lines}"
        left = memoryview(lines.encode())
        while left:
            left = left[os.write(self._handle, left) :]
        self._lines += lines.count("\n")

    def close(self) -> None:
        """Give the file back; a later line opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def cut_lines(path: Path, is_kept: Callable[[int, str], bool]) -> None:
    """Leave the lines of a file out that shall go, and a last one that is not whole; local.

    ``is_kept`` is called with a line's number, from 0, and the line without its end. The new file is written aside and
    takes the name in the end, so that a kill leaves the old one or the new one.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    lines = before.split(b"\n")[:-1]  # behind the last line break there is nothing, or half a line
    lines_kept = []
    for index, line in enumerate(lines):
        try:
            if is_kept(index, line.decode()):
                lines_kept.append(line + b"\n")
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {index + 1} is not a record: {error}; remove that line, or give another "
                "experiment.output_dir"
            ) from error
    after = b"".join(lines_kept)
    if after == before:
        return
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(after)
    beside.replace(path)


def plain_values(value: Any) -> Any:
    """Return a value with texts for numbers that JSON does not have, and lists for sequences."""
    if isinstance(value, float):
        return _plain_number(value)
    if isinstance(value, dict):
        return {str(name): plain_values(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(one) for one in value]
    return value


def _plain_number(value: float) -> float | str:
    return value if math.isfinite(value) else NAMES.get(value, "NaN")


class JSONLinesLogger(Logger):
    """``metrics/SCOPE.jsonl``: one object a line, and beside it ``images/SCOPE/`` and ``texts/SCOPE.jsonl``.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    """

    def __init__(self, folder: Path, scope: str) -> None:
        self._images = folder / "images" / scope
        self.file = LineFile(folder / "metrics" / f"{scope}.jsonl")
        self.texts = LineFile(folder / "texts" / f"{scope}.jsonl")

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write one line."""
        plain = {name: _plain_number(value) for name, value in values.items()}
        record = {"time": time_s, "step": step, "epoch": epoch, "samples": samples, "values": plain}
        self.file.append(json.dumps(record, allow_nan=False) + "\n")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Write a PNG file named by the step; all else than letters, digits, dots and dashes becomes an underscore."""
        with optional_import("report", "log_image needs Pillow, a part of matplotlib's installation"):
            from PIL import Image
        self._images.mkdir(parents=True, exist_ok=True)
        file = self._images / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}_{step}.png"
        Image.fromarray(tiled(images)).save(file)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Write one line."""
        self.texts.path.parent.mkdir(exist_ok=True)
        self.texts.append(json.dumps({"time": time.time(), "step": step, "name": name, "text": text}) + "\n")

    def cut_after(self, step: int | None) -> None:
        """Open the files anew: the run's folder cuts them, see :meth:`RunDirectory.cut_after`."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self.texts.close()


class CSVLogger(Logger):
    """``metrics/SCOPE.csv`` in the long form: ``time,step,epoch,samples,name,value``.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    """

    def __init__(self, folder: Path, scope: str) -> None:
        self.file = LineFile(folder / "metrics" / f"{scope}.csv", HEADER)

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write a line for each value, so that it reads back to the bit."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for name, value in values.items():
            writer.writerow((time_s, step, epoch, samples, name, str(_plain_number(value))))
        if values:
            self.file.append(text.getvalue())

    def cut_after(self, step: int | None) -> None:
        """Open the file anew: the run's folder cuts it, see :meth:`RunDirectory.cut_after`."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
