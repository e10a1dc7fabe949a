"""A round that goes on while its caller trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["Background"]

T = TypeVar("T")


class Background(Generic[T]):
    """A call on a thread of its own, which raises where its result is asked for.

    On a GPU the thread works on a stream of its own, which starts from what the caller's stream has been given so far.

    :param call: What to do.
    :param device: The device that it works on.
    """

    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        self._call = call
        self._device = device
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        # A daemon: a peer that does not answer must not keep a process that has failed elsewhere from ending.
        self._thread = threading.Thread(target=self._run, name="xffl-round", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Tell whether the result is there."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the result.

        :return: What the call returned.
        :raises BaseException: what the call raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._result[0]

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._result.append(self._call())
                return
            with torch.cuda.stream(self._stream):
                self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised in result()
            self._error = error
