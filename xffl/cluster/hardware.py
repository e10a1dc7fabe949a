"""What this host is made of, as a measurement has to say."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

from xffl.errors import ConfigError

__all__ = ["describe_host", "resident_bytes"]

_CPUINFO = Path("/proc/cpuinfo")
_STATUS = Path("/proc/self/status")


def describe_host() -> dict[str, str | int | float]:
    """Describe this host; local, nothing is communicated.

    :return: ``host`` (its name), ``machine``, ``cpu`` (the model's name where Linux tells it, else the machine's),
        ``cores`` (as the system counts them), ``memory_gib`` and ``system``.
    """
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def resident_bytes(name: str) -> int:
    """Return how much memory this process has in use, as Linux counts it; local.

    :param name: ``VmRSS`` for now, ``VmHWM`` for the most so far.
    :return: Bytes.
    :raises ConfigError: if this system does not tell.
    """
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
