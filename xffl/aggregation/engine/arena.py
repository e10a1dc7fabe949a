"""Memory that aggregators which follow each other use again: those of a cell whose others come and go.

The system gives new memory page by page when it is first written to, which takes several times as long as to write it
again. A cell that is to take a model over does that before it meets the others, which wait for it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xffl.aggregation.engine.buffers import Copies, aligned, host_or_gpu

__all__ = ["Arena"]


class Arena:
    """Memory for the new values of rounds, which the aggregators of a rank use one behind the other.

    And, where it was prepared, for tables that last as long as the model.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken = 0
        self._prepared: list[torch.Tensor] = []
        """What is left of blocks for tables"""

    @torch.inference_mode(False)  # later rounds write there, too
    def prepare(self, nbytes: int, tables: Sequence[int]) -> None:
        """Write to memory that will soon be asked for: so many bytes of new values, and blocks for tables."""
        self.restart(nbytes)
        self._memory.zero_()
        self._prepared = [torch.empty(size, dtype=torch.uint8, device="cpu").zero_() for size in tables]

    def give(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory that the caller keeps: prepared, or new where none is left."""
        nbytes = numel * dtype.itemsize
        for index, block in enumerate(self._prepared) if device.type == "cpu" else ():
            if block.numel() >= nbytes:
                self._prepared[index] = block[aligned(nbytes) :]
                return block[:nbytes].view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def drop_prepared(self) -> None:
        """Give up what was prepared for tables, and not taken."""
        self._prepared = []

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
