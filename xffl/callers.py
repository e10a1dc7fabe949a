"""Which line of the user's script a call comes from, for messages that name it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Caller", "find_caller", "find_place", "is_of_package", "is_of_python", "is_of_script"]

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
# Not "data", which is the prefix of Python, or the folder of a virtual environment: scripts may lie in it.
_KINDS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_PYTHON = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib"))
_LIBRARIES = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in _KINDS)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True)
class Caller:
    """Where a call comes from."""

    place: str | None
    """The line of the script, ``FILE:LINE``; ``None`` where only libraries are on the stack (a thread of theirs)."""
    call: str | None
    """The public function of xffl that this line calls, if it is one: ``set_fsdp``, or ``FederatedScaling``."""
    is_own: bool
    """Whether a function of xffl stands between the line and the call."""


def find_caller(frame: FrameType | None) -> Caller:
    """Find the line of the script that has led to a frame: the nearest one outside xffl, torch and other libraries."""
    entry: FrameType | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            entry = frame
        elif is_of_script(path):
            return Caller(f"{path}:{frame.f_lineno}", _name_of(entry), entry is not None)
        frame = frame.f_back
    return Caller(None, _name_of(entry), entry is not None)


def find_place(lines: Iterable[tuple[str, int]]) -> str | None:
    """Return the first of the lines (files and numbers) that is the script's, as ``FILE:LINE``; else ``None``."""
    return next((f"{path}:{number}" for path, number in lines if is_of_script(path)), None)


def is_of_package(path: str) -> bool:
    """Tell whether a file is one of xffl's own."""
    return path.startswith(_PACKAGE)


def is_of_python(path: str) -> bool:
    """Tell whether a file is one of Python's own library."""
    is_installed = any(part in path for part in _INSTALLED)  # in the same folder
    return path.startswith(("<frozen", *_PYTHON)) and not is_installed


def is_of_script(path: str) -> bool:
    """Tell whether a file is the user's own: none of xffl, of Python or of an installed package."""
    is_installed = path.startswith(("<frozen", *_LIBRARIES)) or any(part in path for part in _INSTALLED)
    return not is_of_package(path) and not is_installed


def _name_of(frame: FrameType | None) -> str | None:
    """Return the name by which a script calls a function of xffl; ``None`` where it is no public one."""
    if frame is None:
        return None
    name = frame.f_code.co_name
    if name in ("__init__", "__enter__", "__exit__") and "self" in frame.f_locals:
        kind = type(frame.f_locals["self"]).__name__
        return {"__init__": kind, "__enter__": f"the entry into {kind}", "__exit__": f"the end of {kind}"}[name]
    return None if name.startswith(("_", "<")) else name
