"""Which cells answer: the stores of cells that may be lost are asked, all at the same time."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.cluster.lighthouse.timeouts import CELL_HEARTBEAT_TIMEOUT_S
from xffl.cluster.run_token import PROOF_KEY

__all__ = ["Answers", "ask_store", "knock"]

FRESH_S = 2 * CELL_HEARTBEAT_TIMEOUT_S
"""After so many seconds an answer says nothing about the present."""


class Answers:
    """Questions to the stores of other cells, each in a thread of its own; local, on the first rank of a cell."""

    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}
        """By HOST:PORT, those whose answer was not looked at"""

    def ask(self, places: Iterable[str]) -> None:
        """Ask the stores at these places (HOST:PORT), except those that were asked a moment ago; does not wait."""
        for place in places:
            question = self._questions.get(place)
            if question is None or time.monotonic() > question.asked_at + FRESH_S:
                self._questions[place] = _Question(place)

    def find_silent(self, patience_s: Mapping[str, float]) -> set[str]:
        """Ask the stores at these places, and wait until each has answered, or was asked so many seconds ago.

        :param patience_s: By HOST:PORT, how many seconds.
        :return: Those that have not answered: the process has ended, is stopped, or cannot be reached.
        """
        self.ask(patience_s)
        questions = {place: self._questions.pop(place) for place in patience_s}
        return {place for place, question in questions.items() if question.wait(patience_s[place]) is None}


class _Question:
    """A question to the store at HOST:PORT whether it has a key."""

    def __init__(self, place: str, key: str = PROOF_KEY) -> None:
        self._place = place
        self._key = key
        self.asked_at = time.monotonic()
        self._answers: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        # No timeout of a store's client holds where the other process is stopped.
        threading.Thread(target=self._ask, name="xffl-answers", daemon=True).start()

    def _ask(self) -> None:
        answer = None
        if knock(self._place) is None:
            host, _, port = self._place.rpartition(":")
            within = timedelta(seconds=CELL_HEARTBEAT_TIMEOUT_S)
            with suppress(RuntimeError):  # it does not answer
                store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=within)
                answer = bool(store.check([self._key]))
        self._answers.put(answer)

    def wait(self, patience_s: float) -> bool | None:
        """Return the answer; ``None`` if there is none so many seconds after the question, or will be none."""
        left_s = self.asked_at + patience_s - time.monotonic()
        with suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, left_s))
        return None


def ask_store(place: str, key: str) -> bool | None:
    """Tell whether the store at HOST:PORT has a key; ``None`` if it does not answer."""
    return _Question(place, key).wait(CELL_HEARTBEAT_TIMEOUT_S)


def knock(place: str) -> OSError | None:
    """Try to connect to HOST:PORT; return the error, ``None`` if it succeeds."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CELL_HEARTBEAT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None
