"""What commands print: nothing that came from somebody else makes a terminal do anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from xffl.checks import visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["drawn_on", "new_table", "print_table", "visible_output"]


class _VisibleStream:
    """A text stream that writes control characters out (:func:`xffl.checks.visible`); all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, and return its length."""
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def drawn_on(self) -> TextIO:
        """Return the stream itself."""
        return self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drawn_on(stream: TextIO) -> TextIO:
    """Return what a progress bar is drawn on, which moves the cursor and shows numbers and fixed words only."""
    return stream.drawn_on() if isinstance(stream, _VisibleStream) else stream


@contextmanager
def visible_output() -> Iterator[None]:
    """Have all that the block prints to standard output and error pass through such streams.

    Names, notes and errors in files and from peers end in what commands print. Here none is forgotten.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _VisibleStream(sys.stdout)
    sys.stderr = _VisibleStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def new_table() -> Table:
    """Return a table without lines, to which columns and rows are to be added."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def print_table(table: RenderableType) -> None:
    """Print a table; where the output is no terminal so wide that each entry stays on its line."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 240
    Console(file=sys.stdout, width=width, markup=False, emoji=False, highlight=False).print(table)
