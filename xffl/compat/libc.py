"""Calls of the C library that Python does not offer."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "reset_handler", "return_large_blocks"]

_PR_SET_PDEATHSIG = 1  # of prctl(2), from <linux/prctl.h>
_M_MMAP_THRESHOLD = -3  # of mallopt(3), from <malloc.h>
_LARGE_BYTES = 1 << 20


def return_large_blocks() -> bool:
    """Let this process give blocks of 1 MiB and more back to the system as soon as they are freed; tell if it is set.

    glibc keeps freed blocks of up to 32 MiB in its heaps, one for each thread, once a block of that size was freed.
    FSDP on the CPU gathers and frees every layer twice in a step, from two threads, so that heaps with gaps would come
    to hold more than the whole model. What is paid is fresh memory at each gathering. A user who has set
    ``MALLOC_MMAP_THRESHOLD_`` has decided already; other C libraries than glibc are left alone.

    Python 3.13 has no call for it: https://man7.org/linux/man-pages/man3/mallopt.3.html.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when its parent dies, even by SIGKILL; elsewhere this is left out.

    Python 3.13 has no call for it: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def reset_handler(number: signal.Signals) -> None:
    """Let a signal do what it does by default; any thread may call it.

    Python 3.13 lets the main thread alone change handlers: https://docs.python.org/3/library/signal.html#signal.signal.
    """
    ctypes.CDLL(None).signal(int(number), None)
