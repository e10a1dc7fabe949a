"""What each rank logs, in a file of its own."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TextIO

__all__ = ["RankLog"]

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RankLog:
    """The file that takes what the logger ``xffl`` is told from level INFO on, and all warnings; local.

    Warnings and errors still appear where they appeared before.

    :param path: The file; what it holds stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: logging.FileHandler | None = None
        self._also: logging.Handler | None = None
        self._level = logging.NOTSET
        self._show = warnings.showwarning

    def open(self) -> None:
        """Begin to write."""
        logger = logging.getLogger("xffl")
        if not logger.hasHandlers():
            self._also = logging.lastResort  # which a handler of its own would silence
        self._file = logging.FileHandler(self.path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter(FORMAT))
        self._level = logger.level
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        for handler in (self._file, self._also):
            if handler is not None:
                logger.addHandler(handler)
        self._show = warnings.showwarning
        warnings.showwarning = self._show_and_keep

    def close(self) -> None:
        """End writing, and leave logging as it was."""
        if self._file is None:
            return
        logger = logging.getLogger("xffl")
        for handler in (self._file, self._also):
            if handler is not None:
                logger.removeHandler(handler)
        logger.setLevel(self._level)
        self._file.close()
        self._file = self._also = None
        if warnings.showwarning == self._show_and_keep:
            warnings.showwarning = self._show

    def _show_and_keep(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._show(message, category, filename, lineno, file, line)
        if self._file is not None and file is None:
            text = f"{filename}:{lineno}: {category.__name__}: {message}"
            self._file.handle(logging.LogRecord("warnings", logging.WARNING, filename, lineno, text, None, None))
