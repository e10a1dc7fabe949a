"""What a run has done with its federation: at the end of a session it tells whether cells have trained without rounds.

A cell that trains and makes no round has a model of its own, and nothing else would say so.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from xffl.callers import find_place

__all__ = ["RunActivity"]


class RoundUnderWay(Protocol):
    """A round that was started and is not merged."""

    def note_written(self, tensors: Collection[torch.Tensor]) -> None:
        """Note that another round has written tensors."""


class RunActivity:
    """What the ranks of a state have done so far, as far as the end of the run may have to tell of it; local.

    Optimizer steps count from :meth:`watch_steps` to :meth:`end`; a block that makes rounds counts its own. An export
    for a round over files counts as a round.
    """

    def __init__(self) -> None:
        self._has_round = False
        self._has_step = False
        self._hook: Any = None
        self._is_paused = False  # whether steps are watched again later
        self._expected: list[weakref.finalize[Any, Any]] = []
        self.rounds_under_way: weakref.WeakSet[RoundUnderWay] = weakref.WeakSet()
        """The rounds that were started and are still held by somebody, of all aggregators."""
        self._last_number = 0  # of the aggregators so far

    def watch_steps(self) -> None:
        """Note from now on whether an optimizer makes a step."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note_step)

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._has_step = True

    def pause_watch(self) -> None:
        """Let a loop that makes rounds by itself count its steps; :meth:`resume_watch` follows."""
        if self._hook is not None:
            self._is_paused = True
            self._stop_watching()

    def resume_watch(self, *, has_step: bool) -> None:
        """Watch steps again, unless nobody did or there was a round; ``has_step`` tells whether the loop made one."""
        self._has_step |= has_step and self._is_paused
        if self._is_paused and not self._has_round:
            self.watch_steps()
        self._is_paused = False

    def note_round(self) -> None:
        """Note a round, or what stands for one."""
        self._has_round = True

    def add_round_under_way(self, pending: RoundUnderWay) -> None:
        """Note a round that was started."""
        self.rounds_under_way.add(pending)

    @property
    def next_number(self) -> int:
        """What this rank says when the ranks agree on the number of their next aggregator."""
        return self._last_number + 1

    def number_aggregator(self, agree: Callable[[int], int]) -> int:
        """Return a number that no aggregator has had; ``agree`` makes one for all ranks of what each of them says."""
        self._last_number = agree(self.next_number)
        return self._last_number

    def expect_entry(self, block: object) -> weakref.finalize[Any, Any]:
        """Expect that a ``with`` block that was made is entered: its ``detach()`` is to be called then.

        Else one line says so: where the session ends, or before it where the object is collected.
        """
        frames = traceback.walk_stack(inspect.currentframe())
        lines = [(frame.f_code.co_filename, line) for frame, line in frames]
        expected = weakref.finalize(block, _tell_unentered, type(block).__name__, lines)
        self._expected.append(expected)
        return expected

    def end(self) -> bool:
        """Say once which blocks were never entered; return whether optimizers have stepped and there was no round."""
        self._is_paused = False
        self._stop_watching()
        for expected in self._expected:
            expected()  # does nothing where it was detached
        self._expected.clear()
        return self._has_step and not self._has_round

    def drop(self) -> None:
        """Say nothing any more: an error has ended the run."""
        self._is_paused = False
        self._stop_watching()
        for expected in self._expected:
            expected.detach()
        self._expected.clear()

    def _stop_watching(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _tell_unentered(name: str, lines: Sequence[tuple[str, int]]) -> None:
    """Say that a block was never entered which was made by the nearest of these lines that is the script's."""
    # At the interpreter's end last_type tells that an error has ended the script.
    if sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None:
        return
    place = find_place(lines)
    where = "" if place is None else f" of {place}"
    line = (
        f"xffl: the {name}{where} was never entered, so it has made no rounds; put the training loop into a block: "
        f"with {name}(...):"
    )
    print(line, file=sys.stderr, flush=True)
