"""Text files that grow by whole lines, and are cut where a resumed run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from xffl.errors import ConfigError

__all__ = ["LineFile", "cut_lines"]


class LineFile:
    """A file that one process appends lines to; local.

    It is opened when the first line is written. Each call is one write to the operating system, so that a process that
    is killed loses at most the line that it was writing; what an earlier one left of its last line is removed.

    :param path: The file; its folder exists.
    :param header: The first line of a new file, if any.
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
        """Write lines.

        :param lines: Text that ends in a line break.
        """
        if self._handle is None:
            self._open()
        self._write(lines)

    def close(self) -> None:
        """Give the file back; a later line opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> None:
        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            cut_lines(self.path, lambda place, line: True)
        self._lines = self.lines
        self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if self._header and not self._lines:
            self._write(self._header + "\n")

    def _write(self, text: str) -> None:
        assert self._handle is not None, "opened above"
        left = memoryview(text.encode())
        while left:
            left = left[os.write(self._handle, left) :]
        self._lines += text.count("\n")


def cut_lines(path: Path, is_kept: Callable[[int, str], bool]) -> None:
    """Leave the lines of a file out that shall go, and a last one that is not whole; local.

    The new file is written aside and takes the name in the end, so that a kill leaves the old one or the new one.

    :param path: The file; nothing happens where there is none.
    :param is_kept: Called with a line's number, from 0, and the line without its end.
    :raises ConfigError: if a line in the middle cannot be read.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    lines = before.split(b"\n")[:-1]  # behind the last line break there is nothing, or half a line
    kept = []
    for place, line in enumerate(lines):
        try:
            if is_kept(place, line.decode()):
                kept.append(line + b"\n")
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {place + 1} is no record: {error}; remove that line, or give another "
                "experiment.output_dir"
            ) from error
    after = b"".join(kept)
    if after == before:
        return
    beside = path.with_name(f".{path.name}.partial")
    beside.write_bytes(after)
    beside.replace(path)
