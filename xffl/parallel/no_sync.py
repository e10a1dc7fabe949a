"""Gradient accumulation in training loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from xffl.compat.fsdp import gradient_sync

__all__ = ["no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Add gradients up in this block without reducing them over the ranks; local.

    For all micro-batches of an optimizer step but the last: the forward pass belongs inside, too. The first backward
    pass behind the block reduces what has been added up.

    .. code-block:: python

       for index, batch in enumerate(micro_batches):
           is_last = index + 1 == len(micro_batches)
           with nullcontext() if is_last else xffl.no_sync(model):
               (loss_of(model(batch)) / len(micro_batches)).backward()

    The model may be wrapped by DistributedDataParallel, ``fully_shard`` (with replicas, too), :func:`xffl.shard` or
    FSDP1, may be compiled, and may hold several such modules; in one that is not wrapped nothing changes. On leaving,
    also by an exception, each module does what it did before. What reduces gradients in another way is left as it is:
    DeepSpeed accumulates by its configuration.

    Between micro-batches FSDP keeps gradients that are not cut: as much memory as the whole model's gradients. It still
    gathers parameters in each pass; ``model.set_reshard_after_backward(False)`` keeps them, if there is memory.

    :param model: The model, or a module that holds it.
    :yield: Nothing.
    """
    with ExitStack() as stack:
        for module in _find_wrapped(model):
            stack.enter_context(_without_reduction(module) if isinstance(module, FSDPModule) else module.no_sync())
        yield


def _find_wrapped(
    module: nn.Module,
) -> Iterator[FSDPModule | DistributedDataParallel | FullyShardedDataParallel]:
    """Find the modules that reduce gradients; of FSDP1 the outermost ones, which answer for those inside."""
    if isinstance(module, (FSDPModule, DistributedDataParallel, FullyShardedDataParallel)):
        yield module
    if not isinstance(module, FullyShardedDataParallel):
        for child in module.children():
            yield from _find_wrapped(child)


@contextmanager
def _without_reduction(module: FSDPModule) -> Iterator[None]:
    """Switch the reduction of one module's own gradients off, and back to what it was."""
    before = gradient_sync(module)
    module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(before.reduces, recurse=False)
        if before.all_reduces != before.reduces:
            module.set_requires_all_reduce(before.all_reduces, recurse=False)
