"""The stream of a GPU that rounds work on."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from xffl.aggregation.engine.groups import RoundScope

__all__ = ["StreamWork", "stream_of"]


def stream_of(scope: RoundScope) -> torch.cuda.Stream | None:
    """Return the stream that rounds work on, on a GPU."""
    if scope.gpu is None:
        return None
    streams = scope.state.streams
    return streams[0] if streams else torch.cuda.Stream(scope.gpu)  # type: ignore[no-untyped-call]


class StreamWork:
    """Lets a block work on a stream of its own, which the caller's waits for once the block has succeeded.

    :param stream: The stream. It starts from what the caller's stream has been given so far.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._entered.enter_context(torch.cuda.stream(self._stream))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()
        if error is None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
