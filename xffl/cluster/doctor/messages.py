"""What the programs of the doctor tell each other, as JSON: the types, and how what has come is held against them.

Whoever reaches rank 0's store may write there, and another host may have another version of xffl.
"""

from __future__ import annotations

import types
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from xffl.checks import shown, visible
from xffl.cluster.lighthouse.page import CellStatus
from xffl.cluster.runtimes import Runtime
from xffl.cluster.slurm.allocation import Host
from xffl.errors import ConfigError
from xffl.json_text import parse_json
from xffl.reading import COUNT_LIMIT

__all__ = [
    "ERROR",
    "LARGEST",
    "OK",
    "WARNING",
    "Answer",
    "Finding",
    "FolderAnswer",
    "HostReport",
    "Member",
    "PairResult",
    "Place",
    "Plan",
    "Report",
    "RunView",
    "check_value",
    "read",
]

OK = "ok"
"""Nothing to do."""
WARNING = "warning"
"""The job may run, but not as well as it could."""
ERROR = "error"
"""The job will fail, or compute wrongly."""
LARGEST = 2**24
"""The most bytes of a message."""

_LONG_TEXT = 2**17
_MOST = 100_000  # items of a list: ranks of the largest job
_NUMBER_LIMIT = 1e12


@dataclass(frozen=True)
class Finding:
    """The verdict of one check on one host, or on all."""

    check: str  # name of the check, such as clock
    status: str  # ok, warning or error
    text: str
    advice: str = ""  # what to do about it; of what is ok it is dropped
    host: str = ""  # where it was found; empty for what concerns all hosts

    def __post_init__(self) -> None:
        object.__setattr__(self, "advice", "" if self.status == OK else self.advice)


@dataclass(frozen=True)
class Report:
    """All findings about the hosts of a job."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...] = ()  # the hosts that were checked
    ranks: int = 1

    @property
    def exit_code(self) -> int:
        """1 if there is an error, else 0."""
        return int(self.count(ERROR) > 0)

    def count(self, status: str) -> int:
        """Count the findings of a status."""
        return sum(finding.status == status for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``xffl doctor --json`` prints it."""
        return {
            "hosts": list(self.hosts),
            "ranks": self.ranks,
            "findings": [asdict(finding) for finding in self.findings],
            "counts": {status: self.count(status) for status in (OK, WARNING, ERROR)},
            "exit_code": self.exit_code,
        }


class HostReport(TypedDict):
    """What a host has found of itself, and what others must know of it."""

    findings: list[Finding]
    alone: list[Finding]  # of its interfaces, in place of those above, if no other machine is in the job
    machine: str  # differs between machines, and between containers of one machine with networks of their own
    versions: dict[str, str]
    runtime: Runtime
    nccl: str | None  # what its GPUs communicate by, such as "nccl 2.27.3"
    address: str | None
    ports: list[int]  # where it listens for the others


class Member(TypedDict):
    """What a program tells rank 0: of the rank that it is, or over ssh of all ranks of its host."""

    ranks: list[int]
    node: int
    local_size: int | None  # ranks of its host, where that is known
    host: Host
    cpus: list[int]
    threads: int | None  # OMP_NUM_THREADS
    environ: dict[str, str]  # variables that ranks should have in common; of what may be secret, a hash
    report: HostReport | None  # of the first rank of each host


class Place(TypedDict):
    """Where a host can be reached."""

    number: int  # of its program
    name: str
    address: str
    ports: list[int]


class Plan(TypedDict):
    """What the hosts are to try of each other."""

    token: str  # names the folder for the test of the shared folder
    hosts: list[Place]
    pairs: list[tuple[int, int, int, int]]  # for all-reduces: two cells or hosts, and the places of their hosts above


class PairResult(TypedDict, total=False):
    """How an all-reduce went, seen from one side: an error, or how long it took."""

    error: str
    is_silent: bool  # whether that side has told nothing
    seconds: float
    mib: float


class FolderAnswer(TypedDict):
    """What a host saw in the shared folder."""

    seen_s: float | None  # how late it saw what rank 0's host wrote
    torn: int  # reads that saw half a file
    error: str | None
    free: int  # bytes
    kind: str  # of file system
    unseen: list[int]  # of rank 0's host: the hosts whose files it did not see


class RunView(TypedDict, total=False):
    """What a host sees of an elastic run, or the error; see :func:`xffl.cluster.lighthouse.page.visit_run`."""

    error: str
    cells: list[CellStatus]
    meeting: int | None
    stores: dict[str, str | None]
    token_error: str
    tokens: dict[str, str]


class Answer(TypedDict):
    """What a host found of the others."""

    folder: FolderAnswer
    failures: list[tuple[str, int, str]]  # host, port, reason
    tried: int
    pairs: dict[str, PairResult]  # by the pair and the side, such as "0-1.0"
    run: RunView | None


def read(kind: Any, text: str | bytes) -> Any:
    """Return what a JSON text says, a value of one of the types of this module; what would move a cursor is escaped.

    Raises ConfigError where it is none.
    """
    try:
        value = parse_json(text, limit=LARGEST, is_finite=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return check_value(kind, value)


def check_value(kind: Any, value: Any, place: str = "it") -> Any:
    """Return a value of parsed JSON as :func:`read` does; ``place`` says where it stands."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else check_value(parts[0], value, place)
    if is_dataclass(kind) or is_typeddict(kind):
        return _read_fields(kind, value, place)
    if isinstance(value, list) and origin is list and len(value) <= _MOST:
        return [check_value(parts[0], item, f"{place}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, list) and origin is tuple and parts[-1] is ...:
        return tuple(check_value(list[parts[0]], value, place))  # type: ignore[valid-type]
    if isinstance(value, list) and origin is tuple and len(value) == len(parts):
        return tuple(check_value(part, item, place) for part, item in zip(parts, value, strict=True))
    if isinstance(value, dict) and origin is dict and len(value) <= _MOST:
        return {visible(name): check_value(parts[1], item, f"{place}[{shown(name)}]") for name, item in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) < _NUMBER_LIMIT:
        return float(value)
    is_plain = type(value) is kind
    if is_plain and kind is str and len(value) <= _LONG_TEXT:
        return visible(value)
    if is_plain and (kind is bool or (kind is int and 0 <= value <= COUNT_LIMIT)):
        return value
    raise ConfigError(f"{place} is {shown(value)}")


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {shown(value)}")
    hints = get_type_hints(kind)
    needed = getattr(kind, "__required_keys__", hints)
    if missing := [name for name in needed if name not in value]:
        raise ConfigError(f"{place} lacks {missing[0]}")
    fields = {name: check_value(hints[name], value[name], f"{place}.{name}") for name in hints if name in value}
    return kind(**fields)
