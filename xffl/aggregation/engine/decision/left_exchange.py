"""What a rank of an elastic cell does that has left an exchange by an error, and whose vote the others do not come to.

They still wait for what it was to send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from xffl.aggregation.engine.groups import RoundGroups

__all__ = ["ALONE_S", "LeftExchange"]

ALONE_S = 2.0
"""How long a rank that has left an exchange waits for the others' votes until it closes its connections to them.

Others may still be on their way to the vote, and hear there why the round is not taken: the groups in which a cell
exchanges values, and nobody votes, are closed first.
"""


class LeftExchange:
    """The block of a vote that follows an exchange which this rank has left; local.

    :param groups: The groups of the round: of no more use where the others have not come to the vote in time.
    :param note: Called, on another thread, before they are closed.
    """

    def __init__(self, groups: RoundGroups, note: Callable[[], None]) -> None:
        self._groups = groups
        self._note = note
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xffl-left", daemon=True)

    def _run(self) -> None:
        if self._is_over.wait(ALONE_S):
            return
        self._note()
        self._groups.close_connections(is_with_vote=False)
        if not self._is_over.wait(ALONE_S):
            self._groups.close_connections(is_with_vote=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
