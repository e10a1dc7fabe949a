"""Lines of JSON between the processes of the doctor: over a socket, or over the standard streams of a program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from xffl.json_text import parse_json

__all__ = ["Line", "Message", "Program"]

Message = dict[str, Any]
"""The content of one line."""

_LARGEST = 2**24
_CHUNK_BYTES = 2**16
_SEND_S = 30.0  # for one message to be taken by the other side


class Line:
    """Messages to another process and back."""

    def __init__(self, connection: socket.socket | None = None, received: bytes = b"") -> None:
        """Use a connection, else the standard streams of this process, which have no time limit.

        What was ``received`` of a connection before is read first.
        """
        self._connection = connection
        self._received = bytearray(received)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; an OSError means that the other side has closed, or does not read."""
        data = json.dumps(message).encode() + b"\n"
        if self._connection is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            self._connection.settimeout(_SEND_S)
            self._connection.sendall(data)

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; an OSError says why there is none. Lines that are no message are skipped.

        The time is that for the whole message, however often a piece of it comes.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._connection is None:
                line = sys.stdin.buffer.readline(_LARGEST)
            else:
                line = self._next_line(self._connection, deadline)
            if not line:
                raise ConnectionResetError("it closed the connection")
            with suppress(ValueError):  # a login script may print something, another program may connect
                if isinstance(message := parse_json(line, limit=_LARGEST, is_finite=True), dict):
                    return message
            if time.monotonic() > deadline:
                raise TimeoutError("it did not answer in time")

    def _next_line(self, connection: socket.socket, deadline: float) -> bytes:
        """Return the next line of the connection, and nothing at its end."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _LARGEST:
                raise ConnectionAbortedError(f"it sent a line of more than {_LARGEST} bytes")
            # What has arrived is taken, however late it is asked for.
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                piece = connection.recv(_CHUNK_BYTES)
            except TimeoutError:
                raise TimeoutError("it did not answer in time") from None
            if not piece:
                return b""
            self._received += piece
            if time.monotonic() > deadline and b"\n" not in piece:
                raise TimeoutError("it did not answer in time")
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
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
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - _LARGEST))
            said = [line for line in self._errors.read(_LARGEST).decode(errors="replace").splitlines() if line.strip()]
            why = said[-1].strip()[:200] if said else f"exit code {self.process.returncode}"
            raise ConnectionResetError(why) from None

    def close(self) -> None:
        """End the program, whatever it does."""
        self.process.kill()
        self.process.wait()
        super().close()
        self._errors.close()
