"""Values as JSON lines: what every run has."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xffl.training.loggers.base import Logger
from xffl.training.loggers.images import write_png
from xffl.training.loggers.lines import LineFile

__all__ = ["JSONLinesLogger", "number_text", "plain_number", "plain_values"]

NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


def plain_number(value: float) -> float | str:
    """Return a number as JSON has it; those that are not finite become texts.

    :param value: The number.
    :return: The number, or ``NaN``, ``Infinity`` or ``-Infinity``.
    """
    return value if math.isfinite(value) else NAMES.get(value, "NaN")


def plain_values(value: Any) -> Any:
    """Return a value with texts for numbers that JSON does not have.

    :param value: A number, a text, or mappings and sequences of them.
    :return: The value, with lists for sequences.
    """
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, dict):
        return {str(name): plain_values(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(one) for one in value]
    return value


def number_text(value: float) -> str:
    """Write a number so that it reads back to the bit.

    :param value: The number.
    :return: The text.
    """
    return str(plain_number(value))


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
        plain = {name: plain_number(value) for name, value in values.items()}
        record = {"time": time_s, "step": step, "epoch": epoch, "samples": samples, "values": plain}
        self.file.append(json.dumps(record, allow_nan=False) + "\n")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Write a PNG file named by the step; all else than letters, digits, dots and dashes becomes an underscore."""
        self._images.mkdir(parents=True, exist_ok=True)
        write_png(self._images / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}_{step}.png", images)

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Write one line."""
        self.texts.path.parent.mkdir(exist_ok=True)
        self.texts.append(json.dumps({"time": time.time(), "step": step, "name": name, "text": text}) + "\n")

    def cut_after(self, step: int | None) -> None:
        """Open the files anew: the run's folder cuts them, see :meth:`RunFolder.cut_after`."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        self.texts.close()
