"""How the ranks meet: rank 0 asks, the others answer, over plain TCP connections and without torch.

A message is one line of JSON. Every wait has an end, so that what is broken is told and not waited for.
"""

from __future__ import annotations

import errno
import json
import resource
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from xffl.errors import LaunchError

__all__ = ["Hub", "Message", "answer", "attempt", "join"]

Message = dict[str, Any]
"""What one line holds."""

_WORD = "xffl-doctor-1"
_LARGEST = 2**24
_CLOCK_TRIES = 8
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class _Line:
    """One connection, read by lines."""

    def __init__(self, connection: socket.socket, address: str = "") -> None:
        self.socket, self.address = connection, address
        self._bytes = bytearray()

    def send(self, message: Message) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Message:
        """Return the next message, and wait for it.

        :param timeout_s: How long to wait.
        :return: The message.
        :raises OSError: if none comes in time, or the other side has gone or speaks another language.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.next()
            if message is not None:
                return message
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self.fill()

    def fill(self) -> None:
        """Read what has come.

        :raises OSError: if the other side has gone, or sends more than a message may hold.
        """
        part = self.socket.recv(65536)
        if not part:
            raise ConnectionResetError("it closed the connection")
        self._bytes += part
        if len(self._bytes) > _LARGEST:
            raise ConnectionAbortedError("it sent more than a message may hold")

    def next(self) -> Message | None:
        """Return the next whole message that has come."""
        end = self._bytes.find(b"\n")
        if end < 0:
            return None
        text = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("it sent what is no message")
        return message


class Hub:
    """The side of rank 0: it waits for the ranks, asks them, and notes whom it lost."""

    def __init__(self, port: int, world_size: int) -> None:
        """Listen; no rank is waited for yet.

        :param port: Port to listen at.
        :param world_size: Ranks of the job.
        :raises LaunchError: if the port is taken.
        """
        self.world_size = world_size
        self.lost: dict[int, str] = {}
        """Ranks that came and went again, and why."""
        self.addresses: dict[int, str] = {}
        """Where each rank came from."""
        self.refused: str | None = None
        """Why not all ranks could be let in."""
        self._lines: dict[int, _Line] = {}
        _raise_files()
        try:
            self._listener = socket.create_server(("", port), backlog=min(world_size, 4096))
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen at port {port} ({error.strerror}); another job may use it: set MASTER_PORT"
            ) from error

    def wait_for_ranks(self, timeout_s: float) -> dict[int, Message]:
        """Wait until all ranks have come and told about themselves, or the time is up.

        :param timeout_s: How long to wait.
        :return: What each rank that came told, without rank 0.
        """
        told: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as waiting:
            self._listener.setblocking(False)
            waiting.register(self._listener, selectors.EVENT_READ)
            while len(told) < self.world_size - 1 and time.monotonic() < deadline:
                for key, _ in waiting.select(max(deadline - time.monotonic(), 0)):
                    if key.data is None:
                        line = self._accept()
                        if line is not None:
                            waiting.register(line.socket, selectors.EVENT_READ, line)
                        elif self.refused is not None:
                            waiting.unregister(self._listener)
                        continue
                    message = self._read_hello(key.data)
                    if message is not None:
                        waiting.unregister(key.fileobj)
                        if self._is_ours(message, told):
                            self._lines[message["rank"]] = key.data
                            told[message["rank"]] = message["facts"]
                            self.addresses[message["rank"]] = key.data.address
                        else:
                            key.data.socket.close()
        return told

    def _accept(self) -> _Line | None:
        """Let one in, ``None`` where that one has gone again or no file is left for it."""
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in _TOO_MANY_FILES:
                self.refused = error.strerror
            return None
        return _Line(connection, str(address[0]))

    @staticmethod
    def _read_hello(line: _Line) -> Message | None:
        try:
            line.fill()
            return line.next()
        except OSError:
            return {}

    def _is_ours(self, message: Message, told: Collection[int]) -> bool:
        rank = message.get("rank")
        same = message.get("word") == _WORD and message.get("world_size") == self.world_size
        return same and isinstance(rank, int) and 0 < rank < self.world_size and rank not in told

    def ask(
        self, questions: Mapping[int, Message], timeout_s: float, meanwhile: Callable[[], Message]
    ) -> dict[int, Message]:
        """Ask ranks and wait for their answers, while rank 0 does its own part.

        :param questions: What to send, by rank.
        :param timeout_s: How long to wait for answers after rank 0's own.
        :param meanwhile: Gives rank 0's own answer.
        :return: The answers by rank; who did not answer is in :attr:`lost` from then on.
        """
        asked = self._send(questions)
        answers = {0: meanwhile()}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as waiting:
            for rank in asked:
                waiting.register(self._lines[rank].socket, selectors.EVENT_READ, rank)
            while len(answers) <= len(asked) and time.monotonic() < deadline and waiting.get_map():
                for key, _ in waiting.select(max(deadline - time.monotonic(), 0)):
                    line = self._lines[key.data]
                    try:
                        line.fill()
                        found = line.next()
                    except OSError as error:
                        waiting.unregister(key.fileobj)
                        self._lose(key.data, str(error))
                        continue
                    if found is not None:
                        answers[key.data] = found
                        waiting.unregister(key.fileobj)
        for rank in asked:
            if rank not in answers and rank not in self.lost:
                self._lose(rank, f"no answer to {questions[rank]['do']!r} in {timeout_s:g} s")
        return answers

    def measure_clock(self, rank: int, timeout_s: float) -> tuple[float, float] | None:
        """Measure how far the clock of another rank's host is ahead of this one's.

        As NTP does: the other clock is read in the middle of a round trip, and the shortest of several is taken.

        :param rank: Whom to ask.
        :param timeout_s: How long one answer may take.
        :return: Seconds that it is ahead, and how many it may be wrong (half the round trip); ``None`` without answer.
        """
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_TRIES):
            if not self._send({rank: {"do": "clock"}}):
                return best
            sent, started = time.time(), time.monotonic()
            try:
                answer = self._lines[rank].receive(timeout_s)
            except OSError as error:
                self._lose(rank, str(error))
                return best
            trip = time.monotonic() - started
            if best is None or trip / 2 < best[1]:
                best = (float(answer["time"]) - (sent + trip / 2), trip / 2)
        return best

    def close(self) -> None:
        """Let all ranks go."""
        self._send({rank: {"do": "end"} for rank in self._lines})
        for line in self._lines.values():
            line.socket.close()
        self._listener.close()

    def _send(self, messages: Mapping[int, Message]) -> list[int]:
        sent = []
        for rank, message in messages.items():
            if rank == 0 or rank not in self._lines or rank in self.lost:
                continue
            try:
                self._lines[rank].socket.settimeout(10.0)
                self._lines[rank].send(message)
                sent.append(rank)
            except OSError as error:
                self._lose(rank, str(error))
        return sent

    def _lose(self, rank: int, reason: str) -> None:
        self.lost[rank] = reason


def _raise_files() -> None:
    """Let this process open as many files as it may: it needs one for each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def join(address: str, port: int, rank: int, world_size: int, facts: Message, timeout_s: float) -> socket.socket:
    """Connect to rank 0 and tell about this rank.

    :param address: Where rank 0 listens.
    :param port: Where rank 0 listens.
    :param rank: Rank of this process.
    :param world_size: Ranks of the job.
    :param facts: What to tell.
    :param timeout_s: How long to try, since rank 0 may start later.
    :return: The connection.
    :raises LaunchError: if rank 0 cannot be reached in that time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((address, port), max(deadline - time.monotonic(), 0.1))
            hello = {"word": _WORD, "rank": rank, "world_size": world_size, "facts": facts}
            _Line(connection).send(hello)
            return connection
        except OSError as error:
            if time.monotonic() + 0.1 > deadline:
                raise LaunchError(
                    f"rank {rank} cannot reach rank 0 at {address}:{port} ({error.strerror or error}); see that this "
                    "address is right (XFFL_CONTROL_IFNAME, MASTER_ADDR) and that no firewall closes the port"
                ) from error
            time.sleep(0.1)


def attempt(handler: Callable[[Message], Message], question: Message) -> Message:
    """Answer a question; whatever goes wrong is the answer then, as ``failed``.

    :param handler: What to do.
    :param question: The question.
    :return: The answer.
    """
    try:
        return handler(question)
    except Exception as error:  # noqa: BLE001  # whatever is wrong with a host is to be told
        return {"failed": f"{type(error).__name__}: {error}"}


def answer(connection: socket.socket, handlers: Mapping[str, Callable[[Message], Message]], patience_s: float) -> bool:
    """Answer rank 0's questions until it has no more.

    :param connection: What :func:`join` gave; it is closed at the end.
    :param handlers: What to do for each question; an error there is told to rank 0. ``clock`` is known already.
    :param patience_s: How long to wait for the next question.
    :return: Whether rank 0 ended it, and has heard all answers.
    """
    line = _Line(connection)
    with connection:
        while True:
            try:
                question = line.receive(patience_s)
            except OSError:
                return False
            if question.get("do") == "end":
                return True
            if question.get("do") == "clock":
                reply: Message = {"time": time.time()}
            else:
                reply = attempt(lambda told: handlers[told["do"]](told), question)
            try:
                connection.settimeout(patience_s)
                line.send(reply)
            except OSError:
                return False
