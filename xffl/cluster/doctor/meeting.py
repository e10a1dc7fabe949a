"""How the ranks meet: rank 0 asks, the others answer, over plain TCP connections and without torch.

A message is one line of JSON. Every wait has an end, so that what is broken is told and not waited for.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from xffl.errors import LaunchError

__all__ = ["Hub", "Message", "answer", "join"]

Message = dict[str, Any]
"""What one line holds."""

_WORD = "xffl-doctor-1"
_LARGEST = 2**24
_CLOCK_TRIES = 8


class _Line:
    """One connection, read by lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
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
        self._lines: dict[int, _Line] = {}
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
                        connection, _ = self._listener.accept()
                        waiting.register(connection, selectors.EVENT_READ, _Line(connection))
                        continue
                    message = self._read_hello(key.data)
                    if message is not None:
                        waiting.unregister(key.fileobj)
                        if self._is_ours(message, told):
                            self._lines[message["rank"]] = key.data
                            told[message["rank"]] = message["facts"]
                            self.addresses[message["rank"]] = str(key.data.socket.getpeername()[0])
                        else:
                            key.data.socket.close()
        return told

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
        self, ranks: Collection[int], question: Message, timeout_s: float, meanwhile: Callable[[], Message]
    ) -> dict[int, Message]:
        """Ask ranks and wait for their answers, while rank 0 answers the same question itself.

        :param ranks: Whom to ask beside rank 0.
        :param question: What to send.
        :param timeout_s: How long to wait for answers after rank 0's own.
        :param meanwhile: Gives rank 0's own answer.
        :return: The answers by rank; who did not answer is in :attr:`lost` from then on.
        """
        asked = self._send(ranks, question)
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
                self._lose(rank, f"no answer to {question['do']!r} in {timeout_s:g} s")
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
            if not self._send([rank], {"do": "clock"}):
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
        self._send(list(self._lines), {"do": "end"})
        for line in self._lines.values():
            line.socket.close()
        self._listener.close()

    def _send(self, ranks: Collection[int], message: Message) -> list[int]:
        sent = []
        for rank in ranks:
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


def answer(connection: socket.socket, handlers: Mapping[str, Callable[[Message], Message]], patience_s: float) -> bool:
    """Answer rank 0's questions until it has no more.

    :param connection: What :func:`join` gave; it is closed at the end.
    :param handlers: What to do for each question. ``clock`` is known already.
    :param patience_s: How long to wait for the next question.
    :return: Whether rank 0 ended it, and has heard all answers.
    """
    line = _Line(connection)
    with connection:
        while True:
            try:
                question = line.receive(patience_s)
                if question.get("do") == "end":
                    return True
                if question.get("do") == "clock":
                    line.send({"time": time.time()})
                else:
                    reply = handlers[question["do"]](question)
                    connection.settimeout(patience_s)
                    line.send(reply)
            except OSError:
                return False
