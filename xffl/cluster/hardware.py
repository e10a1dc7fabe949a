"""Hardware of this host as measurements report it, the GPU of each process, and memory that glibc keeps."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from xffl.errors import ConfigError, LaunchError

__all__ = ["describe_host", "pick_gpu", "resident_bytes", "return_large_blocks"]

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


def pick_gpu(local_rank: int, local_size: int, visible: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the index of the GPU for a rank: its own where all are visible, the only one where a launcher bound it."""
    if visible >= local_size:
        return local_rank
    is_bound = any(
        environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    if visible == 1 and is_bound:
        return 0
    hint = "start one process for each GPU, or give device='cpu'"
    raise LaunchError(f"{local_size} processes run on this node, but this one sees {visible} GPUs; {hint}")


_M_MMAP_THRESHOLD = -3  # the parameter's number in glibc's malloc.h

_LARGE_BYTES = 2**20


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
