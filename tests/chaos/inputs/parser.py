"""What is tried with mutated inputs: a parser of the package, with valid inputs to begin with."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xffl.cli.main import main
from xffl.errors import XfflError

Form = Literal["json", "yaml", "lines", "text", "bytes"]
"""How an input is mutated, besides its bytes: as a tree of JSON or YAML, as lines of JSON, or word by word."""


class CommandRefusedError(XfflError):
    """Report that a command ended with exit code 2 and said why."""


@dataclass(frozen=True)
class Parser:
    """One reader of files or messages.

    ``examples`` is called once with an empty folder, where it may put what the reader needs around its input, and
    returns valid inputs. ``read`` is called for each mutated input with the same folder; what it returns does not
    matter, what it raises does. ``share`` is below 1 for what takes long: so much of the number of cases is tried.
    """

    name: str
    form: Form
    examples: Callable[[Path], Sequence[bytes]]
    read: Callable[[bytes, Path], object]
    share: float = 1.0


def command(*words: str) -> None:
    """Run a command of ``xffl`` in this process, and raise an error by name where it refuses what it was given.

    Standard output and error are those that the attempt collects. Any exit code but 0 and 2 is a fault, as is a
    traceback.
    """
    try:
        code = main(words)
    except SystemExit as left:  # argparse has said what is wrong with the words
        code = left.code if isinstance(left.code, int) else 1
    told = sys.stderr.getvalue() if hasattr(sys.stderr, "getvalue") else ""
    if "Traceback (most recent call last)" in told:
        raise AssertionError(f"a traceback was printed: {told[-300:]}")
    if code == 2:
        lines = re.findall(r"^xffl(?: [^\n:]*)?: .*$", told, re.MULTILINE)
        if not lines:
            raise AssertionError(f"exit code 2 without a reason: {told[-300:]}")
        raise CommandRefusedError(lines[-1])
    if code != 0:
        raise AssertionError(f"exit code {code}: {told[-300:]}")
