"""Hosts: names and addresses, hardware and GPUs, and the runtimes of their ranks. No process talks to another.

A federation may be mixed: processors, torch, CUDA, NCCL, xffl and Python may differ. Only the number of the exchange
format (:data:`xffl.costs.EXCHANGE_FORMAT`) must be the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import TypeVar

from xffl import __version__
from xffl.checks import group, is_decimal, shown
from xffl.costs import EXCHANGE_FORMAT
from xffl.errors import ConfigError, LaunchError

__all__ = [
    "Runtime",
    "describe_host",
    "differing_columns",
    "expand_counts",
    "expand_hosts",
    "format_refusal",
    "group_by_runtime",
    "host_identity",
    "interface_address",
    "node_address",
    "own_format",
    "pick_gpu",
    "reachable_address",
    "resident_bytes",
    "resolve",
    "return_large_blocks",
    "route_address",
    "runtime_table",
]

T = TypeVar("T")

HEADS = {"cuda": "CUDA", "nccl": "NCCL", "python": "Python"}  # heads of columns that are not written as the field
_CPUINFO = Path("/proc/cpuinfo")
_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3  # the parameter's number in glibc's malloc.h
_LARGE_BYTES = 2**20
_SIOCGIFADDR = 0x8915  # Linux: ask a socket for the IPv4 address of an interface
_SCONTROL_S = 60


MAX_HOSTS = 100_000
"""The most hosts of a list; the largest machines have some ten thousand"""
_MAX_DIGITS = 18


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a host list such as ``a[1-3,07],b09,login``, in its order; several brackets in one name multiply."""
    pieces = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not pieces or ",".join(pieces) != text:
        raise LaunchError(f"host list {shown(text)} cannot be read; write it like a[1-3,07],b09,login")
    names: list[str] = []
    for piece in pieces:
        # Splitting at a captured group alternates: plain text, inside of a bracket, plain text, ...
        parts = re.split(r"\[([^\[\]]*)\]", piece)
        choices = [_numbers(part, text) if index % 2 else (part,) for index, part in enumerate(parts)]
        _check_hosts(len(names) + prod(map(len, choices)), text)
        names += map("".join, product(*choices))
    return tuple(names)


def _numbers(ranges: str, text: str) -> tuple[str, ...]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        is_number = is_decimal(first) and is_decimal(last) and max(len(first), len(last)) <= _MAX_DIGITS
        if not (is_number and int(first) <= int(last)):
            raise LaunchError(f"host list {shown(text)} has the range {shown(item)}; write ranges like 1-3 or 08-10")
        _check_hosts(len(numbers) + int(last) - int(first) + 1, text)
        # The width of the first number is kept: n[08-10] is n08, n09, n10.
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return tuple(numbers)


def _check_hosts(count: int, text: str) -> None:
    """Raise before a list is written out that has more hosts than any machine."""
    if count > MAX_HOSTS:
        raise LaunchError(f"host list {shown(text)} has {count} hosts; give at most {MAX_HOSTS}")


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand counts by node such as ``4(x2),3`` into ``(4, 4, 3)``."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item)
        if match is None:
            raise LaunchError(f"tasks per node {shown(text)} cannot be read at {shown(item)}; write them like 4(x2),3")
        nodes = len(counts) + int(match[2] or 1)
        if nodes > MAX_HOSTS:
            raise LaunchError(f"tasks per node {shown(text)} are of {nodes} nodes; give at most {MAX_HOSTS}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def host_identity() -> str:
    """Name this machine; the kernel's boot id, where there is one, tells hosts of the same name apart."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"


def interface_address(name: str, source: str = "XFFL_IFNAME") -> str:
    """Find the IPv4 address of a network interface of this host."""
    import fcntl  # POSIX only: a module-level import would break the parsing of host lists elsewhere

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
            raise LaunchError(
                f"{source}: interface {name!r} has no IPv4 address on {socket.gethostname()} ({error.strerror}); give "
                f"one of: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def node_address(name: str) -> str:
    """Return an address for a node of a SLURM cluster: its name, or what ``scontrol`` tells if that does not resolve.

    A start of many tasks is not to flood the controller.
    """
    if resolve(name) or shutil.which("scontrol") is None:
        return name
    command = ["scontrol", "-o", "show", "node", name]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "set MASTER_ADDR to an address of the first node"
        raise LaunchError(f"node {name!r} does not resolve, and scontrol did not answer: {error}; {hint}") from error
    match = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return match[1] if match else name


def reachable_address(peers: Iterable[str]) -> str:
    """Return an address of this host, not loopback: of its name, else that on the route to a peer; nothing is sent."""
    own = socket.gethostname()
    for address in resolve(own):
        if not address.startswith("127."):
            return address
    for peer in peers:
        for address in resolve(peer):
            with suppress(OSError):  # no route to this one
                if not (source := route_address(address, 9)).startswith("127."):
                    return source
    hint = "set XFFL_IFNAME to a network interface, or MASTER_ADDR and MASTER_PORT"
    raise LaunchError(f"host {own!r} resolves to no address that other hosts can reach; {hint}")


def route_address(host: str, port: int) -> str:
    """Return this host's address on the way to another one; nothing is sent, and an OSError says that there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host's name, none where it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def describe_host() -> dict[str, str | int | float]:
    """Describe this host by ``host``, ``machine``, ``cpu``, ``cores``, ``memory_gib`` and ``system``; local."""
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def resident_bytes(name: str) -> int:
    """Return how much memory this process has in use, as Linux counts it; local."""
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ConfigError(f"{_STATUS} does not tell {name} of this process; give VmRSS or VmHWM, on Linux")


def _cpu_model() -> str:
    """Return the processor's name; ARM and systems without /proc do not tell it."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def pick_gpu(local_rank: int, local_size: int | None, visible: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the index of the GPU for a rank: its own where all are visible, the only one where a launcher bound it.

    Where the number of ranks on the node is not known yet (``None``), this rank's own GPU must be visible: so it is to
    the rank with the highest number, too.
    """
    if visible >= (local_rank + 1 if local_size is None else local_size):
        return local_rank
    is_bound = any(
        environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    if visible == 1 and is_bound:
        return 0
    hint = "start one process for each GPU, or give device='cpu'"
    known = f"{local_rank + 1} or more" if local_size is None else local_size
    raise LaunchError(f"{known} processes run on this node, but this one sees {visible} GPUs; {hint}")


def return_large_blocks() -> bool:
    """Let this process give blocks of 1 MiB and more back to the system as soon as they are freed; tell if it is set.

    glibc keeps freed blocks of up to 32 MiB in its heaps, one for each thread, once a block of that size was freed.
    FSDP on the CPU gathers and frees every layer twice in a step, from two threads, so that heaps with gaps would come
    to hold more than the whole model. What is paid is fresh memory at each gathering. A user who has set
    ``MALLOC_MMAP_THRESHOLD_`` has decided already; other C libraries than glibc are left alone.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))


@dataclass(frozen=True)
class Runtime:
    """What a rank runs; an empty text where that is not known."""

    processor: str = ""  # name of the GPU, or machine and vector units of the CPU
    torch: str = ""
    cuda: str = ""  # CUDA or ROCm that torch was built with, or "none"
    nccl: str = ""  # NCCL or RCCL, or "none"
    xffl: str = ""
    python: str = ""


def own_format() -> str:
    """Return this xffl's exchange format as messages show it."""
    return f"{EXCHANGE_FORMAT} (xffl {__version__})"


def format_refusal(who: str, theirs: str, others: str = "this process", ours: str | None = None) -> str:
    """Return the line that tells why who has another exchange format is refused."""
    return (
        f"the exchange format of {who} is {theirs}, that of {others} is {own_format() if ours is None else ours}; run "
        "versions of xffl that have one exchange format in all cells"
    )


def group_by_runtime(named: Iterable[tuple[T, Runtime]]) -> dict[Runtime, list[T]]:
    """Return who has which runtime, in the order given."""
    return group((runtime, name) for name, runtime in named)


def differing_columns(runtimes: Iterable[Runtime]) -> list[str]:
    """Return the names of the fields in which runtimes differ; what is not known of one does not count."""
    columns = zip(*map(astuple, runtimes), strict=True)
    named = zip((field.name for field in fields(Runtime)), columns, strict=False)
    return [name for name, values in named if len({*values} - {""}) > 1]


def runtime_table(rows: Sequence[tuple[str, Runtime]], head: str = "cells") -> list[str]:
    """Return the lines of a table: for each row its name, and the columns that differ; none where all are alike."""
    names = differing_columns(runtime for _, runtime in rows)
    if not names:
        return []
    table = [[head, *(HEADS.get(name, name) for name in names)]]
    table += [[label, *(getattr(runtime, name) or "unknown" for name in names)] for label, runtime in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
