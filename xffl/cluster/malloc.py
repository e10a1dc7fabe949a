"""Memory that glibc keeps after it was freed."""

from __future__ import annotations

import ctypes
import os

__all__ = ["return_large_blocks"]

_M_MMAP_THRESHOLD = -3
"""The parameter's number in glibc's ``malloc.h``."""

_LARGE_BYTES = 2**20


def return_large_blocks() -> bool:
    """Let this process give blocks of 1 MiB and more back to the system as soon as they are freed.

    glibc keeps freed blocks of up to 32 MiB in its heaps, one for each thread, once a block of that size was freed.
    FSDP on the CPU gathers and frees every layer twice in a step, from two threads, so that heaps with gaps would come
    to hold more than the whole model. What is paid is fresh memory at each gathering. A user who has set
    ``MALLOC_MMAP_THRESHOLD_`` has decided already; other C libraries than glibc are left alone.

    :return: Whether it was set.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
