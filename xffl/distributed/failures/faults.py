"""Faults as a tool: ``XFFL_FAULT=CELL:RANK:PHASE:ROUND`` ends one process once, at one point of one round.

That is the given round, or the first one behind it that comes to this point. For tests of what the other ranks and
cells do then, and for readers who want to see it. The process gets ``SIGKILL``, as if its host had gone; with ``:stop``
behind the round ``SIGSTOP``, as if its network had. Phases, in their order:

========= ==============================================================================================
meet      before the cell asks for others to make a round with
enter     in an elastic federation, the cells have met, and their ranks are about to connect to each other
share     before what goes with the model is sent to a cell that is behind
open      before the first vote
opened    the first vote is known here
exchange  before a message with weights is sent to another cell
close     all values have arrived here, before the second vote
half      in the second vote, a cell's first rank has told one other cell, and nobody else
told      in the second vote, a cell's first rank has told the other cells, and not its own
agreed    all have voted for the round, and nothing is written
publish   in an elastic federation, before the round's record is published; on the rank that publishes it
published the record stands, and nobody else knows
========= ==============================================================================================

Only the first life of a cell (``XFFL_RESTARTS``) has the fault.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from xffl.checks import is_decimal, one_of
from xffl.errors import ConfigError

__all__ = ["PHASES", "Fault", "arm", "inject", "is_armed", "is_planned", "start_round"]

PHASES = (
    "meet",
    "enter",
    "share",
    "open",
    "opened",
    "exchange",
    "close",
    "half",
    "told",
    "agreed",
    "publish",
    "published",
)
"""Points of a round, in their order."""


@dataclass
class Fault:
    """Where this process ends."""

    phase: str
    round: int
    signal: int
    now: int = 0  # the round that this process is in

    @classmethod
    def from_text(cls, text: str, cell: int, rank: int) -> Fault | None:
        """Return the fault of a rank of a cell; ``None`` where the text is another one's."""
        parts = text.split(":")
        if not 4 <= len(parts) <= 5 or not all(map(is_decimal, (*parts[:2], parts[3]))):
            raise ConfigError(f"XFFL_FAULT is {text!r}; give CELL:RANK:PHASE:ROUND, such as 1:0:exchange:3")
        how = parts[4] if len(parts) == 5 else "kill"
        one_of("phase in XFFL_FAULT", parts[2], PHASES)
        one_of("end in XFFL_FAULT", how, ("kill", "stop"))
        if (int(parts[0]), int(parts[1])) != (cell, rank):
            return None
        return cls(parts[2], int(parts[3]), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


_fault: Fault | None = None


def arm(cell: int, rank: int, restarts: int) -> None:
    """Read the environment for this rank of a cell."""
    global _fault
    text = os.environ.get("XFFL_FAULT", "").strip()
    _fault = Fault.from_text(text, cell, rank) if text and not restarts else None


def is_planned() -> bool:
    """Tell whether this process is to end at some point of a round."""
    return _fault is not None


def start_round(number: int) -> None:
    """Note which round this process is in."""
    if _fault is not None:
        _fault.now = number


def is_armed(phase: str) -> bool:
    """Tell whether this process is to end in this phase of the round that it is in."""
    return _fault is not None and _fault.phase == phase and _fault.round <= _fault.now


def inject(phase: str) -> None:
    """End this process if it is to end here."""
    global _fault
    if _fault is not None and is_armed(phase):
        number, _fault = _fault.signal, None  # a process that was stopped may go on
        os.kill(os.getpid(), number)
