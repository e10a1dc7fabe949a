"""Lines of JSON between the processes of the doctor: over a socket, or over the standard streams of a program."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Line", "Message", "Program"]

Message = dict[str, Any]
"""The content of one line."""

_LARGEST = 2**24


class Line:
    """Messages to another process and back."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        """Use a connection, else the standard streams of this process, which have no time limit."""
        self._connection = connection
        self._reader = sys.stdin.buffer if connection is None else connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; an OSError says that the other side has gone."""
        data = json.dumps(message).encode() + b"\n"
        if self._connection is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            self._connection.settimeout(None)
            self._connection.sendall(data)

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; an OSError says why there is none. Lines that are no message are skipped."""
        deadline = time.monotonic() + timeout_s
        with suppress(TimeoutError):
            while True:
                if self._connection is not None:  # what has arrived is taken, however late it is asked for
                    self._connection.settimeout(max(deadline - time.monotonic(), 0.01))
                if not (line := self._reader.readline(_LARGEST)):
                    raise ConnectionResetError("it closed the connection")
                with suppress(ValueError):  # a login script may print something, a stranger may connect
                    if isinstance(message := json.loads(line), dict):
                        return message
                if time.monotonic() > deadline:
                    break
        raise TimeoutError("it did not answer in time")

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._reader.close()
            self._connection.close()


class Program(Line):
    """The line to a program that this process has started, here or over ssh."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the program runs
        own, other = socket.socketpair()
        super().__init__(own)
        with other:
            end = other.fileno()
            self.process = subprocess.Popen(command, env=environ, stdin=end, stdout=end, stderr=self._errors)

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; the error at the end tells what the program said last."""
        try:
            return super().receive(timeout_s)
        except ConnectionResetError:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            self._errors.seek(0)
            said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
            why = said[-1].strip()[:200] if said else f"exit code {self.process.returncode}"
            raise ConnectionResetError(why) from None

    def close(self) -> None:
        """End the program, whatever it does."""
        self.process.kill()
        self.process.wait()
        super().close()
        self._errors.close()
