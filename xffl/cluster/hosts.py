"""Hosts: names and addresses, hardware and GPUs. No process talks to another.

A federation may be mixed: processors, torch, CUDA, NCCL, xffl and Python may differ. Only the number of the exchange
format (:data:`xffl.costs.EXCHANGE_FORMAT`) must be the same.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from xffl.errors import ConfigError, LaunchError

__all__ = [
    "describe_host",
    "host_identity",
    "interface_address",
    "node_address",
    "pick_gpu",
    "reachable_address",
    "resident_bytes",
    "resolve",
    "route_address",
]


_CPUINFO = Path("/proc/cpuinfo")
_STATUS = Path("/proc/self/status")
_SIOCGIFADDR = 0x8915  # Linux: ask a socket for the IPv4 address of an interface
_SCONTROL_S = 60


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
