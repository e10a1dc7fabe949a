"""A round under way: exchanged on a thread of its own while its caller goes on, and merged when the caller says so."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Collection
from typing import Any, Generic, NoReturn, TypeVar

import torch

from xffl.aggregation.report import RoundReport
from xffl.compat.python import end_thread
from xffl.distributed.groups import leave_after
from xffl.errors import StateError

__all__ = ["Background", "PendingRound"]

T = TypeVar("T")


class Background(Generic[T]):
    """A call on a thread of its own, which raises where its result is asked for.

    On a GPU the thread works on ``stream``, which starts from what the caller's stream has been given so far.
    """

    def __init__(self, call: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        self._call = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._stream = stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # Not the thread itself is waited for: Python takes a thread for ended whose join was interrupted (3.11).
        self._done = threading.Event()
        # A daemon: a peer that does not answer must not keep a process that has failed elsewhere from ending.
        self._thread = threading.Thread(target=self._run, name="xffl-round", daemon=True)
        leave_after(self)
        self._thread.start()

    def is_done(self) -> bool:
        """Tell whether the result is there."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the thread has ended, whatever came of it."""
        self._done.wait()
        self._thread.join()

    def stop(self, within_s: float) -> None:
        """End the thread, by itself within some seconds or else by an exception; one that waits for a message stays."""
        if not self._done.wait(within_s) and self._thread.ident is not None:
            end_thread(self._thread.ident)
            self._done.wait(within_s)
        if self._done.is_set():
            self._thread.join()

    def has_raised(self, error: BaseException) -> bool:
        """Tell whether the call has raised just this, and not a signal that has met who waits for it."""
        return self._error is error

    def result(self) -> T:
        """Wait for what the call returns or raises; if that is interrupted, it can be asked for again."""
        self._done.wait()
        if self._error is not None:  # then the stream may never end, and the caller's must not wait for it
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return self._result[0]

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._result.append(self._call())
                return
            # A thread begins on the first GPU, and leaving the stream would take up memory there.
            torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised in result()
            _forget_locals(error)
            self._error = error
        finally:
            done = self._done
            del self  # the error refers to this call, too, and must not refer to what has the error
            done.set()


def _forget_locals(error: BaseException) -> None:
    """Clear the variables of all calls that an error has ended; its lines stay.

    They refer to the round, which refers to the error: process groups would live on until the garbage collector runs.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        at = errors.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            traceback.clear_frames(at.__traceback__)
            errors += [at.__cause__, at.__context__]


class PendingRound:
    """A round under way, as :meth:`Aggregator.aggregate_async` returns it.

    ``background`` votes and exchanges; ``conclude`` waits for it and writes the result, told whether steps made
    meanwhile stay; ``tensors`` are those of the model that it moves.
    """

    def __init__(
        self,
        background: Background[Any],
        conclude: Callable[[PendingRound, bool], RoundReport],
        tensors: Collection[torch.Tensor],
    ) -> None:
        self._background = background
        self._conclude = conclude
        self._moving = frozenset(map(id, tensors))
        self.is_overtaken = False
        """Whether another round has written some of its tensors since it started."""

    def refuse(self) -> NoReturn:
        """Raise StateError, since what it has copied is no longer what the model comes from."""
        what = "another aggregator's round" if self.is_overtaken else "a checkpoint after an inconsistent round"
        raise StateError(
            f"{what} has written tensors of this one since it started, so the steps before it would count twice; it was"
            " not merged: merge one round before the next of these tensors starts"
        )

    def wait(self) -> None:
        """Wait until this rank's part of the round is over, whatever came of it; nothing is written."""
        self._background.wait()

    def is_done(self) -> bool:
        """Tell whether this rank's part of the round is over, so that :meth:`merge` would not wait; local.

        Ranks may differ in this: decide by counting steps when to merge, not by asking.
        """
        return self._background.is_done()

    def merge(self, *, keeps_steps: bool = True) -> RoundReport:
        """Wait for the round and merge its result into the model.

        Call it on every rank, after the same number of local steps within a cell; nothing moves that does not move in
        the background. Interrupted while it waits, it can be called again.

        :param keeps_steps: Whether the steps made since the start stay, as ``alpha`` said; else the mean takes their
            place. The same on all ranks of a cell.
        :return: What the round did. ``phases["wait"]`` is how long this call had to wait: what was not hidden.
        :raises RoundError: as :meth:`Aggregator.aggregate`; without a result the model stays as it is.
        :raises StateError: if it has ended already, merged, refused or discarded; or where another aggregator's round
            has written some of the same tensors meanwhile, or an inconsistent model was repaired. The model stays as
            it is then, and this round does not count.
        """
        return self._conclude(self, keeps_steps)

    def note_written(self, tensors: Collection[torch.Tensor]) -> None:
        """Note that another round has written tensors: what this one has copied of them is outdated; local."""
        self.is_overtaken = self.is_overtaken or not self._moving.isdisjoint(map(id, tensors))
