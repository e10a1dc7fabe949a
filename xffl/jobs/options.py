"""The options of ``xffl exec`` as they are typed: read from a command line, or written as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from xffl.cluster.over_files import OverFiles, read_over_files

__all__ = ["JobOptions"]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of ``xffl exec``; ``None`` or ``False`` where one is left out."""

    federated: str | None = None
    hsdp: int | None = None
    require_cells: int | None = None
    log_dir: str | None = None
    merge: bool = False
    isolate: bool = False
    elastic: str | None = None  # empty without an address
    cell: str | None = None
    processes: int | None = None
    hosts: str | None = None
    launcher: str = "auto"
    timeout: float | None = None
    grace: float | None = None
    restarts: int | None = None
    meeting_timeout: float | None = None
    start_from: str | None = None  # --from, which is a word of Python
    export: str | None = None
    measure: str | None = None
    traceback: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JobOptions:
        """Take over what a parser has read; other names are left out."""
        named = {**values, "start_from": values.get("from")}
        return cls(**{option.name: named[option.name] for option in fields(cls) if option.name in named})

    def over_files(self) -> OverFiles:
        """Return what rounds over files are asked for, by options or variables."""
        given = {"cell": self.cell, "from": self.start_from, "export": self.export, "measure": self.measure}
        return read_over_files(given)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options as they are typed."""
        return tuple(_typed(option.name) for option in fields(cls))

    def words(self) -> list[str]:
        """Return the words of a command line that has these options."""
        given = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) != option.default
        }
        return [_typed(name) if value is True else f"{_typed(name)}={value}" for name, value in given.items()]


def _typed(name: str) -> str:
    return "--from" if name == "start_from" else f"--{name.replace('_', '-')}"
