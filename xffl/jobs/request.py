"""What a job is asked for, once options, variables and the configuration have been read; nothing reads them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from xffl.cluster.launch.job_layout import JobLayout, lay_out
from xffl.cluster.slurm.allocation import Host
from xffl.files import read_text

__all__ = ["JobRequest", "Limits", "Output", "Place", "Role", "read_request", "write_request"]

_MOST_BYTES = 2**24


class Role(Enum):
    """What a process of ``xffl exec`` is to be."""

    SHOWN = "shown"  # what is asked for is printed: a configuration, or that all of it stands already
    RANK = "rank"  # a launcher has started this process as a rank
    RANKS = "ranks"  # it starts ranks, and waits for them
    ONE_CELL = "one cell"  # it keeps one cell of an elastic run alive
    ALL_CELLS = "all cells"  # it keeps all cells alive, and their lighthouse


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks start."""

    kind: str  # of the allocation: local, slurm, hosts, pbs, ...
    launcher: str  # the option --launcher
    layout: JobLayout


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long ranks may take, in all and to end."""

    timeout_s: float | None = None
    timeout_by: str = "--timeout"  # who says so
    grace_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Output:
    """What becomes of what ranks print, and of how they fail."""

    log_dir: str | None = None
    is_merged: bool = False  # whether cell and rank stand before each line
    with_traceback: bool = False  # of xffl's own errors, too
    failures: str | None = None  # the folder in which the process that started this one looks for the first failure


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What one process is to do; that of a cell is handed to its process as a file (:func:`write_request`)."""

    role: Role
    command: tuple[str, ...] = ()  # what ranks run: the words behind python
    source: str | None = None  # the script itself, where it was read here
    variables: Mapping[str, str] = field(default_factory=dict)  # for ranks, besides those of this process
    place: Place | None = None
    limits: Limits = field(default_factory=Limits)
    output: Output = field(default_factory=Output)
    home: str | None = None  # the folder of the run, where a configuration says it
    resumes: bool = False  # whether the same command would continue there
    stale: str | None = None  # the folder of an earlier measurement, which is in the way
    cells: tuple[JobRequest, ...] = ()  # those of the cells that this process starts, each with the role RANKS
    restarts: int = 0  # how often each of them is started again
    work: Callable[[], object] | None = None  # of a rank, or what shows something

    @property
    def started(self) -> Place:
        """The place of a request that starts something."""
        if self.place is None:
            raise ValueError(f"a request to be {self.role.value} has no place")
        return self.place


def write_request(request: JobRequest) -> str:
    """Return the request to start ranks as text for :func:`read_request`."""
    layout = request.started.layout
    values = {
        "command": request.command,
        "source": request.source,
        "variables": dict(request.variables),
        "kind": request.started.kind,
        "launcher": request.started.launcher,
        "hosts": [asdict(host) for host in layout.hosts],
        "sizes": layout.sizes,
        "replica_size": layout.replica_size,
        "cell": layout.cell,
        "limits": asdict(request.limits),
        "output": asdict(request.output),
    }
    return json.dumps(values)


def read_request(file: Path) -> JobRequest:
    """Read the request that the process which started this one has written."""
    values: dict[str, Any] = json.loads(read_text(file, _MOST_BYTES))  # words may have bytes that are no UTF-8
    hosts = [Host(**{**host, "switches": tuple(host["switches"])}) for host in values["hosts"]]
    sizes = values["sizes"]
    layout = lay_out(hosts, tuple(sizes) if isinstance(sizes, list) else sizes, values["replica_size"])
    return JobRequest(
        role=Role.RANKS,
        command=tuple(values["command"]),
        source=values["source"],
        variables=values["variables"],
        place=Place(kind=values["kind"], launcher=values["launcher"], layout=replace(layout, cell=values["cell"])),
        limits=Limits(**values["limits"]),
        output=Output(**values["output"]),
    )
