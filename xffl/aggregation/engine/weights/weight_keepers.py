"""What keeps weights beside the tensors of a model, such as FSDP2 its gathered copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from xffl.parallel.zero.mark import find_masters

__all__ = ["GatheredCopies", "WeightKeeper", "may_be_cut", "read_weights"]

ENGINES = frozenset({"deepspeed", "xffl.parallel.zero.deepspeed"})
"""Modules that are loaded wherever a model's weights may be those of an engine, which keeps masters beside them."""


class WeightKeeper(Protocol):
    """What an engine has to do before a round reads a model's tensors, and around its writing."""

    def before_read(self) -> None:
        """Bring the tensors that a round reads up to date. May be collective over the cell."""

    def before_write(self) -> None:
        """Bring what is not written up to date, and drop what would outlive the new values."""

    def after_write(self) -> None:
        """Bring the new values to wherever the model uses them."""


class GatheredCopies(WeightKeeper):
    """Drops what FSDP2 has gathered, so that no stale copy outlives a round."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = modules

    def before_read(self) -> None:
        """Drop the copies that the last step has left."""
        for module in self._modules:
            module.reshard()

    def before_write(self) -> None:
        """Drop the copies of local steps that were made since the round has read."""
        for module in self._modules:
            module.reshard()

    def after_write(self) -> None:
        """Do nothing: the next step gathers the new values."""


def may_be_cut() -> bool:
    """Tell whether an engine may have cut a model of this process; local."""
    return not ENGINES.isdisjoint(sys.modules)


def read_weights(model: nn.Module) -> tuple[nn.Module, tuple[WeightKeeper, ...]]:
    """Return the module whose tensors rounds move, and what keeps weights beside it; reads masters, if there are any.

    That is the model, or a view of its master weights. Collective over the cell where there are masters.
    """
    keepers: list[WeightKeeper] = []
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        keepers.append(GatheredCopies(sharded))
    masters = find_masters(model) if may_be_cut() else None
    if masters is None:
        return model, tuple(keepers)
    from xffl.aggregation.engine.weights.master_weights import MasterWeights

    keepers.append(MasterWeights(masters))
    return masters.view, tuple(keepers)
