"""Buffers that are lent and come back."""

from __future__ import annotations

from collections import deque

import torch

__all__ = ["Pool", "aligned"]

LINE = 64
"""Bytes of a cache line, at whose multiples rows start, so that values of any data type are aligned."""


class Pool:
    """Buffers of one size; as many as were ever lent at a time, since fresh memory is slow.

    :param nbytes: Size of a buffer; it grows with what is asked for.
    :param device: Where buffers live.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._rows: dict[tuple[int, torch.dtype, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def reserve(self, count: int, nbytes: int = 0) -> None:
        """Make as many buffers of at least ``nbytes`` as will be lent at a time, where all are here."""
        lent = [self.take(nbytes) for _ in range(count)]
        for buffer in lent:
            self.give(buffer)

    def take(self, nbytes: int = 0) -> torch.Tensor:
        """Lend a buffer of at least ``nbytes``."""
        if nbytes > self._nbytes:
            self._nbytes = nbytes
            self._free.clear()
            self._rows.clear()
        if self._free:
            return self._free.popleft()  # in turn, so that a round uses each for what the round before did
        # A buffer outlives the round, so it must not be an inference tensor if that is where the round takes place.
        with torch.inference_mode(False):
            # What lies on a GPU and crosses in the host's memory (gloo) is copied there without a detour.
            is_pinned = self._device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device, pin_memory=is_pinned)

    def give(self, buffer: torch.Tensor | None) -> None:
        """Take a buffer back, if there is one."""
        if buffer is not None and buffer.numel() == self._nbytes:
            self._free.append(buffer)

    def rows(self, buffer: torch.Tensor, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Cut a buffer that is lent into aligned rows, as long as there is room; kept, since to cut takes its time.

        :param buffer: The buffer, of at least ``aligned`` bytes for what each row is to hold.
        :param dtype: Data type of the rows.
        :param count: Number of rows.
        :return: The rows.
        """
        kept = self._rows.get((id(buffer), dtype, count))
        if kept is None:
            step = buffer.numel() // max(1, count) // LINE * LINE
            with torch.inference_mode(False):  # a view made there would stay an inference tensor
                rows = [buffer[row * step : (row + 1) * step].view(dtype) for row in range(count)]
            kept = self._rows[id(buffer), dtype, count] = (buffer, rows)  # what is kept keeps its id
        return kept[1]


def aligned(nbytes: int) -> int:
    """Return the bytes that a row takes up."""
    return -(-nbytes // LINE) * LINE
