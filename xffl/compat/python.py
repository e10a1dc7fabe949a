"""Workarounds of Python 3.10 to 3.13."""

from __future__ import annotations

import ctypes

__all__ = ["end_thread"]


def end_thread(thread: int) -> None:
    """Let a thread, by its identifier, end by SystemExit as soon as it runs Python code again.

    Python has no other way to end a thread that does not look for a request to end:
    https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
