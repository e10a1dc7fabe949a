"""Memory of the server of ranks in huge pages, which is the last that it imports (tests/worlds.py).

To fork a process is to copy an entry for each of its pages, and the server has a hundred thousand small ones: half of
what a short rank takes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

HUGE = 2**21
MADV_COLLAPSE = 25  # since Linux 6.1, which else refuses it: then all stays as it is


def collapse() -> int:
    """Have the kernel put what this process has written into huge pages, and return how many it has made."""
    madvise, made = ctypes.CDLL(None).madvise, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, flags, *_, inode, name = [*line.split(maxsplit=5), ""][:6]
        if flags != "rw-p" or inode != "0" or name.startswith("[stack"):
            continue
        first, last = (int(end, 16) for end in area.split("-"))
        for start in range(-(-first // HUGE) * HUGE, last - HUGE + 1, HUGE):
            made += madvise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0
    return made


collapse()
