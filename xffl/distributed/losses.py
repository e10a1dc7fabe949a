"""Cross-entropy of logits that are cut by the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor import parallel

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Let cross-entropy work on logits that are cut by the vocabulary; the backward pass belongs inside, too.

    No rank gathers the logits: a few numbers for each token are all-reduced over the mesh. torch's context of the same
    name stays switched on where the block raises; this one does not.
    """
    context = parallel.loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)
