"""Exit codes of the ``xffl`` command and of the processes that it starts; docs/exit_codes.rst tells them to users."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode", "code_of_signal"]


class ExitCode(IntEnum):
    """How a job or a rank ended, where it did not choose a code of its own."""

    OK = 0
    FAILED = 1
    """A rank raised, or left with a message."""
    REFUSED = 2
    """An :class:`~xffl.errors.XfflError`: what was asked for cannot be done. Starting again changes nothing."""
    PREEMPTED = 75
    """Asked to leave early: a checkpoint is written; starting the same command again goes on from it."""
    TIMEOUT = 124
    """``--timeout`` was over."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of standard output has gone."""


def code_of_signal(number: int) -> int:
    """Return the exit code that stands for an end by a signal, as a shell does."""
    return 128 + number
