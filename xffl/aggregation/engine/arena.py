"""Memory that aggregators which follow each other use again: those of a cell whose others come and go."""

from __future__ import annotations

import torch

from xffl.aggregation.engine.buffers import Copies, aligned, host_or_gpu

__all__ = ["Arena"]


class Arena:
    """Memory for the new values of rounds, which the aggregators of a rank use one behind the other."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def restart(self, nbytes: int) -> None:
        """Let the next user have all of it, at least so many bytes."""
        self.copies.finish()
        self._taken = 0
        if nbytes > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # not both at a time
            self._memory = host_or_gpu(nbytes, torch.uint8, torch.device("cpu"))

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for so many values, aligned."""
        start, nbytes = self._taken, numel * dtype.itemsize
        self._taken += aligned(nbytes)
        return self._memory[start : start + nbytes].view(dtype)
