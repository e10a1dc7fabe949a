"""A facility that trains one cell: how its machines are reached, and what a job of it asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xffl.errors import ConfigError

__all__ = ["Facility", "parse_facilities"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PLACE = re.compile(r"(?:(?P<user>[^@:/\s]+)@)?(?P<host>\[[0-9a-fA-F:]+\]|[^@:/\s]+)(?::(?P<port>\d+))?")
_TAKEN = ("aggregate", "begin", "measure", "record")
_SLURM = {
    "partition": "partition",
    "nodes": "nodes",
    "gpus": "gpusPerNode",
    "time": "time",
    "account": "account",
    "qos": "qos",
}
"""What a job may ask SLURM for, and what StreamFlow calls it."""
_OWN = ("processes", "home", "setup", "key", "workdir")
_FORM = "write NAME=local, NAME=ssh:HOST or NAME=ssh:HOST,slurm, and behind it options such as partition=gpu"


@dataclass(frozen=True)
class Facility:
    """One facility."""

    name: str
    host: str | None = None
    """Where ssh leads, with a port behind a colon if it is an own one; ``None`` for this machine"""
    user: str | None = None
    is_slurm: bool = False
    """Whether its steps are batch jobs, rather than processes on that machine"""
    processes: int | None = None
    """Ranks of its cell"""
    home: str | None = None
    """Folder of its cell there; below the home directory unless it is absolute"""
    setup: Path | None = None
    """A shell script, here, that makes the environment there"""
    key: str | None = None
    """The file of the ssh key"""
    workdir: str | None = None
    """Where StreamFlow works there, on a file system that its nodes share"""
    slurm: dict[str, str] = field(default_factory=dict)
    """What a job asks for, by StreamFlow's names"""


def parse_facilities(texts: Sequence[str]) -> tuple[Facility, ...]:
    """Read facilities such as ``a=ssh:me@login.a.org,slurm,partition=gpu,processes=8``.

    :param texts: One for each cell, in the cells' order.
    :return: The facilities.
    :raises ConfigError: if one is invalid, or two have one name.
    """
    found = tuple(map(_parse, texts))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two facilities have the name {name!r}; give each its own")
    if len({one.processes is None for one in found}) > 1:
        missing = next(one.name for one in found if one.processes is None)
        raise ConfigError(f"facility {missing!r} does not say its processes, and others do; give processes=N to all")
    return found


def _parse(text: str) -> Facility:
    name, equal, rest = text.partition("=")
    if not equal or not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(f"facility {text!r} has no name of letters and digits that is free; {_FORM}")
    way, *options = rest.split(",")
    kind, _, place = way.partition(":")
    if kind not in ("local", "ssh") or (kind == "local") != (not place):
        raise ConfigError(f"facility {text!r} is reached by {way!r}; {_FORM}")
    where = _PLACE.fullmatch(place) if place else None
    if place and where is None:
        raise ConfigError(f"facility {text!r} is on host {place!r}; write HOST, USER@HOST or HOST:PORT")
    is_slurm = "slurm" in options
    given: dict[str, str] = {}
    for option in options:
        key, equal, value = option.partition("=")
        if option == "slurm":
            continue
        if not equal or not value or key not in (*_OWN, *_SLURM) or key in given:
            raise ConfigError(
                f"facility {text!r} has {option!r}; give slurm, or once each {', '.join((*_OWN, *_SLURM))}"
            )
        if key in _SLURM and not is_slurm:
            raise ConfigError(f"facility {text!r} has {option!r}, which is for batch jobs; add slurm")
        given[key] = value
    processes = given.get("processes")
    if processes is not None and not (processes.isdecimal() and int(processes) > 0):
        raise ConfigError(f"facility {text!r} has processes={processes}; give how many ranks its cell has")
    if is_slurm and "workdir" not in given:
        raise ConfigError(
            f"facility {text!r} runs batch jobs, whose nodes have to see StreamFlow's files; give workdir=FOLDER on a "
            "file system that they share"
        )
    return Facility(
        name=name,
        host=None if where is None else where["host"] + (f":{where['port']}" if where["port"] else ""),
        user=None if where is None else where["user"],
        is_slurm=is_slurm,
        processes=None if processes is None else int(processes),
        home=given.get("home"),
        setup=Path(given["setup"]) if "setup" in given else None,
        key=given.get("key"),
        workdir=given.get("workdir"),
        slurm={_SLURM[key]: value for key, value in given.items() if key in _SLURM},
    )
