"""What a launcher is to this package: how it is recognized by its variables, and what they tell of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xffl.checks import decimal, shown
from xffl.errors import LaunchError

__all__ = [
    "Fields",
    "Launcher",
    "honour_master",
    "read_number",
]


class Fields(dict[str, Any]):
    """Fields of :class:`~xffl.cluster.environment.ProcessEnvironment` found so far; :meth:`take` alone fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}  # field to where its value came from: "argument rank", "MASTER_PORT"

    def take(self, source: str, **values: Any) -> None:
        """Take values from a source, each unless the field is found already."""
        for name, value in values.items():
            if name not in self:
                self[name], self.sources[name] = value, source


Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One row of the table: a launcher, how it is recognized, and what it tells."""

    name: str
    title: str
    """Who has started the processes, in messages"""
    variables: Mapping[str, str]
    """Field of ProcessEnvironment to the variable that holds it; all of them must exist"""
    more: Mapping[str, str] = field(default_factory=dict)
    """The same for variables that this launcher may leave out"""
    also: tuple[str, ...] = ()
    """Further variables that must exist"""
    signs: tuple[tuple[str, ...], ...] = ()
    """Variables that prove that it was at work; one of these sets suffices"""
    idle: Mapping[str, str] = field(default_factory=dict)
    """What signs hold in the script of a batch job, which is no process of the launcher"""
    complete: Callable[[Fields, Environ], None] = lambda fields, environ: None
    """Fills in what the variables leave open"""
    accepts: Callable[[Environ], bool] = lambda environ: True
    """A last look, for variables that may be stale"""
    ignores: Callable[[Environ], bool] = lambda environ: False
    """Whether its signs are another launcher's"""
    again: str = "mpirun -n {}"
    """How to start so many processes"""
    remedy: str = ""
    """What to do where it tells too little, in place of what is to be done for all launchers"""

    @property
    def is_told(self) -> bool:
        """Whether its variables give rank, world size and local rank; other rows only recognize it."""
        return {"rank", "world_size", "node_local_rank"} <= self.variables.keys()

    def missing(self, environ: Environ) -> tuple[str, ...]:
        """Return the variables that keep this row from matching."""
        return tuple(name for name in (*self.variables.values(), *self.also) if name not in environ)

    def matches(self, environ: Environ) -> bool:
        """Tell whether this launcher started the process, and tells its place."""
        return self.is_told and not self.missing(environ) and self.accepts(environ)

    def read(self, environ: Environ) -> dict[str, Any]:
        """Read the fields that the variables hold."""
        named = {**self.variables, **{key: name for key, name in self.more.items() if name in environ}}
        return {
            key: environ[name] if key == "master_addr" else read_number(name, environ[name])
            for key, name in named.items()
        }

    def find_sign(self, environ: Environ) -> tuple[str, ...] | None:
        """Return the variables that show one of several processes of this launcher; ``None`` without any."""
        rank, size = (environ.get(self.variables.get(key, "")) for key in ("rank", "world_size"))
        if self.ignores(environ) or (size == "1" and rank in ("0", None)):
            return None
        for names in self.signs:
            # A variable that is empty is as good as none: templates leave such behind.
            if all(environ.get(name) and environ[name] != self.idle.get(name) for name in names):
                return names
        return None


def honour_master(fields: Fields, environ: Environ) -> None:
    """Take ``MASTER_ADDR`` and ``MASTER_PORT``, each if it is set and not known already."""
    if environ.get("MASTER_ADDR"):
        fields.take("MASTER_ADDR", master_addr=environ["MASTER_ADDR"])
    if environ.get("MASTER_PORT") and "master_port" not in fields:
        fields.take("MASTER_PORT", master_port=read_number("MASTER_PORT", environ["MASTER_PORT"]))


def read_number(name: str, text: str) -> int:
    """Read the integer that a variable holds."""
    number = decimal(text.strip().removeprefix("-"))
    if number is None:
        raise LaunchError(f"{name} is {shown(text)}; it must be an integer")
    return -number if text.strip().startswith("-") else number
