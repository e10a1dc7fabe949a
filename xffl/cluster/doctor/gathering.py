"""Ranks that connect to rank 0 of the doctor; other programs may, too, so each connection has its own time limit."""

from __future__ import annotations

import resource
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from xffl.cluster.doctor.lines import Line, Message
from xffl.cluster.doctor.messages import read_hello
from xffl.cluster.listening import open_listener
from xffl.json_text import parse_json

__all__ = ["HELLO_S", "Arrival", "gather"]

HELLO_S = 3.0
"""How long a caller may take to say all of its first line."""
_LONGEST = 2**20
_CHUNK_BYTES = 2**16
_STRANGERS = 64
"""How many callers beyond the ranks may be silent at a time; of more, the one that came first is sent away."""


@dataclass(frozen=True)
class Arrival:
    """A rank that has said hello."""

    facts: Message
    line: Line
    address: str  # where its connection came from


@dataclass(eq=False)
class _Caller:
    """A connection that has not said hello yet."""

    connection: socket.socket
    address: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)


def gather(host: str, port: int, world_size: int, timeout_s: float, *, is_local: bool) -> dict[int, Arrival]:
    """Wait for all other ranks, and welcome them; return those that came in time, by rank.

    Raises LaunchError if the port is taken, or the name does not resolve.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # rank 0 needs one file for each rank
    opened = open_listener(host, port, is_local=is_local)
    with opened.socket as listener, _Door(listener, world_size) as door:
        deadline = time.monotonic() + timeout_s
        while len(door.met) < world_size - 1 and (left_s := deadline - time.monotonic()) > 0:
            door.wait(left_s)
        return dict(sorted(door.met.items()))


class _Door:
    """The listener of rank 0 with its callers, none of which is waited for alone."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        self.met: dict[int, Arrival] = {}
        self._listener = listener
        self._world_size = world_size
        self._callers: dict[_Caller, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in list(self._callers):
            self._send_away(caller)
        self._selector.close()

    def wait(self, timeout_s: float) -> None:
        """Let in who comes, and hear who speaks; send away who has been silent for too long."""
        now = time.monotonic()
        soonest = min((caller.deadline for caller in self._callers), default=now + timeout_s)
        for key, _ in self._selector.select(max(0.0, min(timeout_s, soonest - now))):
            if key.data is None:
                self._let_in()
            elif key.data in self._callers:
                self._hear(key.data)
        now = time.monotonic()
        for caller in [caller for caller in self._callers if caller.deadline <= now]:
            self._send_away(caller)

    def _let_in(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no file is left, which the limit's finding tells
            self._make_room(0)
            time.sleep(0.01)
            return
        self._make_room(self._world_size + _STRANGERS)
        connection.setblocking(False)
        caller = _Caller(connection, str(address[0]), time.monotonic() + HELLO_S)
        self._callers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)

    def _make_room(self, most: int) -> None:
        if len(self._callers) > most:
            self._send_away(next(iter(self._callers)))

    def _hear(self, caller: _Caller) -> None:
        try:
            piece = caller.connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.received += piece
        end = caller.received.find(b"\n")
        if end < 0:
            if not piece or len(caller.received) > _LONGEST:
                self._send_away(caller)
            return
        try:
            facts = read_hello(parse_json(bytes(caller.received[:end]), limit=_LONGEST), self._world_size)
        except ValueError:
            facts = None
        if facts is None or facts["rank"] in self.met:
            self._send_away(caller)
            return
        self._forget(caller)
        line = Line(caller.connection, bytes(caller.received[end + 1 :]))
        with suppress(OSError):  # a rank that has disconnected is noticed when it is asked
            line.send({"welcome": self._world_size})
        self.met[facts["rank"]] = Arrival(facts, line, caller.address)

    def _forget(self, caller: _Caller) -> None:
        del self._callers[caller]
        self._selector.unregister(caller.connection)

    def _send_away(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()
