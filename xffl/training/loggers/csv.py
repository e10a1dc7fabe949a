"""Values as CSV, one a line: what every run has."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from xffl.training.loggers.base import Logger
from xffl.training.loggers.jsonl import number_text
from xffl.training.loggers.lines import LineFile

__all__ = ["HEADER", "CSVLogger"]

HEADER = "time,step,epoch,samples,name,value"
"""The first line of a file."""


class CSVLogger(Logger):
    """``metrics/SCOPE.csv`` in the long form: ``time,step,epoch,samples,name,value``.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    """

    def __init__(self, folder: Path, scope: str) -> None:
        self.file = LineFile(folder / "metrics" / f"{scope}.csv", HEADER)

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write a line for each value."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows((time_s, step, epoch, samples, name, number_text(value)) for name, value in values.items())
        if values:
            self.file.append(text.getvalue())

    def cut_after(self, step: int | None) -> None:
        """Open the file anew: the run's folder cuts it, see :meth:`RunFolder.cut_after`."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()
