"""Jobs that a lighthouse joins: where it listens, and the number of this job among them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from xffl.checks import decimal, integer, number, real
from xffl.cluster.hosts import route_address
from xffl.cluster.network import control_address
from xffl.cluster.sizes_text import parse_cell
from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError
from xffl.files import read_text

__all__ = [
    "ADDRESS_BYTES",
    "MEETING_TIMEOUT_VARIABLE",
    "bind_address",
    "elastic_cell",
    "lighthouse_of",
    "meeting_timeout_of",
    "parse_lighthouse",
    "read_address",
    "replica_group_of",
    "resolve_lighthouse",
    "restarts_of",
]


_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):([0-9]{1,5})/?")

ADDRESS_BYTES = 4096
"""The most bytes of a file that names a lighthouse"""

MEETING_TIMEOUT_VARIABLE = "XFFL_MEETING_TIMEOUT"
"""How many seconds a cell of an elastic run waits for others to make a round with"""

_GROUP = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def lighthouse_of(environ: Mapping[str, str] = ENVIRON) -> str:
    """Return the lighthouse's address, ``http://HOST:PORT``, as ``XFFL_LIGHTHOUSE`` or torchft's own variable says."""
    for name in ("XFFL_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        if text := environ.get(name, "").strip():
            return _url(name, text)
    hint = "start xffl lighthouse once for all replica groups, and give each job the address that it prints"
    raise LaunchError(f"fault tolerance is asked for, but XFFL_LIGHTHOUSE is not set; {hint}")


def resolve_lighthouse(text: str, what: str = "the lighthouse") -> str:
    """Return a lighthouse's address, ``http://HOST:PORT``, from a text that holds it, or ``file:PATH`` of its file."""
    if text.startswith("file:"):
        try:
            written = read_text(Path(text.removeprefix("file:")), ADDRESS_BYTES).strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            hint = "the lighthouse writes it when it starts; see that its job has started, or give HOST:PORT"
            raise LaunchError(f"{what} is {text!r}, a file that cannot be read ({why}); {hint}") from error
        what, text = f"{what} in {text.removeprefix('file:')}", written
    return _url(what, text)


def _url(what: str, text: str) -> str:
    return "http://{}:{}".format(*read_address(what, text))


def read_address(what: str, text: str) -> tuple[str, int]:
    """Return the host and port of an address."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match[2]) > 65535:
        raise LaunchError(f"{what} is {text!r}; give HOST:PORT, such as 127.0.0.1:29510")
    return match[1], int(match[2])


def parse_lighthouse(what: str, text: str) -> str:
    """Return where a run's lighthouse is: ``http://HOST:PORT``, or ``file:/PATH`` with a file that names it."""
    kind, colon, path = text.strip().partition(":")
    if kind != "file" or not colon:
        return _url(what, text)
    if not path:
        raise LaunchError(f"{what} is {text!r}; give the file that holds the lighthouse's address: file:PATH")
    return f"file:{os.path.abspath(path)}"


def elastic_cell(environ: Mapping[str, str] = ENVIRON) -> tuple[int, int] | None:
    """Return which cell of an elastic run this job is, and how many there are; ``None`` where it is not part of one."""
    text = environ.get("XFFL_CELL", "").strip()  # without a lighthouse it is for rounds over files
    if not text or not environ.get("XFFL_LIGHTHOUSE", "").strip():
        return None
    cell, cells = parse_cell(text, "XFFL_CELL")
    return cell, cells if isinstance(cells, int) else len(cells)


def restarts_of(environ: Mapping[str, str] = ENVIRON) -> int:
    """Return how often this job was started before.

    ``XFFL_RESTARTS`` says it, which ``xffl exec`` sets for the cells that it starts. Otherwise it is the number of jobs
    that ``xffl submit`` had submitted for the cell before this one (``XFFL_EARLIER_JOBS``), plus how often SLURM has
    requeued this one (``SLURM_RESTART_COUNT``).
    """
    total = _count("XFFL_RESTARTS", environ)
    if total is not None:
        return total
    return sum(_count(name, environ) or 0 for name in ("XFFL_EARLIER_JOBS", "SLURM_RESTART_COUNT"))


def meeting_timeout_of(environ: Mapping[str, str] = ENVIRON) -> float | None:
    """Return the seconds that a cell waits for others, as :data:`MEETING_TIMEOUT_VARIABLE` says; ``None`` if unset."""
    text = environ.get(MEETING_TIMEOUT_VARIABLE, "").strip()
    if not text:
        return None
    seconds = real(text)
    return number(
        MEETING_TIMEOUT_VARIABLE,
        text if seconds is None else seconds,
        above=0,
        below=1e9,
        hint="give seconds",
        error=LaunchError,
    )


def _count(name: str, environ: Mapping[str, str]) -> int | None:
    """Return the count that a variable holds; ``None`` where it is unset."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    return integer(name, text if decimal(text) is None else decimal(text), 0, error=LaunchError)


def replica_group_of(environ: Mapping[str, str] = ENVIRON) -> tuple[int, int] | None:
    """Return this job's replica group and the most groups, as ``XFFL_ISLAND=1/4`` says; ``None`` where unset."""
    if not (text := environ.get("XFFL_ISLAND", "").strip()):
        return None
    match = _GROUP.fullmatch(text)
    if match is None or not int(match[1]) < int(match[2]):
        raise LaunchError(
            f"XFFL_ISLAND is {text!r}; give this replica group's number, from 0, and the most groups, such as 0/2"
        )
    return int(match[1]), int(match[2])


def bind_address(lighthouse: str, environ: Mapping[str, str] = ENVIRON) -> str:
    """Return the address of this host at which other replica groups may reach it, and nobody on other interfaces."""
    if (named := control_address(environ)) is not None:
        return named
    try:
        return route_address(*read_address("the lighthouse", resolve_lighthouse(lighthouse)))
    except OSError as error:
        raise LaunchError(
            f"there is no way from {socket.gethostname()} to the lighthouse {lighthouse} ({error}); set "
            "XFFL_LIGHTHOUSE to an address that this host reaches"
        ) from error
