"""Signals that ask a run to stop early, heard also while the main thread waits for other ranks."""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from xffl.compat.libc import reset_handler
from xffl.errors import ConfigError

__all__ = ["DEFAULT_SIGNALS", "SignalInbox", "check_signals"]

DEFAULT_SIGNALS = ("USR2", "TERM")
"""What schedulers are asked to send before the time is up, and what they send when a job has to go."""
KNOWN = ("USR1", "USR2", "TERM", "HUP", "XCPU")
"""Signals that mean that a process shall end, or nothing. Ctrl-C and what tells of faults stay what they are."""


def check_signals(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """Return the signals of names such as ``USR2`` or ``SIGUSR2``, each once."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"preempt_signals must be a list such as [USR2, TERM], or [] for none, got {names!r}")
    signals: dict[signal.Signals, None] = {}
    for name in names:
        bare = name.removeprefix("SIG") if isinstance(name, str) else name
        if bare not in KNOWN:
            raise ConfigError(f"preempt_signals must be some of {', '.join(KNOWN)}, got {name!r}")
        signals[signal.Signals[f"SIG{bare}"]] = None
    return tuple(signals)


class SignalInbox:
    """Keep signals for a thread that waits for them, for as long as the ``with`` block lasts.

    Python runs its handlers between two of the main thread's instructions, so not while that thread waits inside a
    collective. What a signal is noted in here is a pipe, which is written at once. Handlers and the wakeup descriptor
    are those of before when the block ends. A signal that the thread has blocked until then is heard in it. Outside the
    main thread Python lets nobody change handlers: the inbox stays empty there.

    Processes that are forked meanwhile (workers of a loader) do not take part: they ignore the signals but SIGTERM, of
    which they have the handler of before, since schedulers signal all processes of a job. Those that are started in
    another way do not know of the signals.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._descriptor_before = -1
        self._has_given_up = False
        self._passed_over: set[int] = set()
        self._lock = threading.RLock()  # a handler may interrupt another one
        self._is_open = False
        self._pid = os.getpid()

    def __enter__(self) -> SignalInbox:
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._is_open = True
        if self.signals and threading.current_thread() is threading.main_thread():
            # The descriptor first: a handler without it would lose a signal.
            self._descriptor_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in self.signals:
                self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
                signal.siginterrupt(number, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
            method = weakref.WeakMethod(self._forget)  # such hooks stay for good, and must not keep the inbox alive

            def forget() -> None:
                if (bound := method()) is not None:
                    bound()

            os.register_at_fork(after_in_child=forget)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._descriptor_before)
        self._before = {}
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        """Wait until a signal comes, somebody calls :meth:`wake`, or the time is over; one thread calls it.

        Return the signals that came since the last call, each once, in their order.
        """
        if not self._is_open:
            return []
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return []
        with suppress(BlockingIOError):
            return list(dict.fromkeys(signal.Signals(one) for one in os.read(self._read, 4096) if one in self.signals))
        return []

    def wake(self) -> None:
        """Let :meth:`wait` return."""
        with suppress(OSError):  # full of what it has not read yet
            os.write(self._write, b"\0")

    def give_up(self, heard: Sequence[signal.Signals]) -> None:
        """Let signals do what they did before, those that were heard and those that come; any thread may call it.

        Each call of the handler of before is for a signal that came: what this sends is not answered again.
        """
        with self._lock:
            self._has_given_up = True
            again = [number for number in heard if number in self._passed_over]
            self._passed_over.difference_update(again)
        if threading.current_thread() is threading.main_thread():
            # It may be about to wait for a rank that has ended, and runs no handler of Python there.
            for number, handler in self._before.items():
                signal.signal(number, handler)
        for number in heard:
            if self._before.get(number) == signal.SIG_DFL:
                # Python lets the main thread alone change handlers, and it may be waiting for a rank that has ended.
                reset_handler(number)
                os.kill(os.getpid(), number)
            elif number in again and self._before.get(number) != signal.SIG_IGN:
                os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the pipe has it. When nobody reads that any more, do what was done before."""
        with self._lock:
            if not self._has_given_up:
                self._passed_over.add(number)
                return
        before = self._before.get(number, signal.SIG_IGN)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _forget(self) -> None:
        """Leave a forked process without this inbox."""
        if not self._before or os.getpid() == self._pid:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler if number == signal.SIGTERM else signal.SIG_IGN)
        self._before = {}
