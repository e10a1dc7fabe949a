"""What this host has: processor, memory, GPUs, and which of the GPUs is a rank's."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError, LaunchError

__all__ = ["describe_host", "pick_gpu", "resident_bytes"]

_CPUINFO = Path("/proc/cpuinfo")
_STATUS = Path("/proc/self/status")


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


def pick_gpu(local_rank: int, local_size: int | None, visible: int, environ: Mapping[str, str] = ENVIRON) -> int:
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
