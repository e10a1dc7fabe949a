"""Whether a model bears the mark that its ranks could not commit alike, and how often it got one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from xffl.aggregation.engine.decision.inconsistent_model import InconsistentModel

__all__ = ["COUNT", "MARK", "count_inconsistent", "find_inconsistent", "refuse_inconsistent", "without_wrappers"]

MARK = "_xffl_tear"
"""The attribute of a model without wrappers that holds the mark"""
COUNT = "_xffl_tears"
"""The attribute that says how often it got one"""


def find_inconsistent(bare: nn.Module) -> InconsistentModel | None:
    """Return the mark of an inconsistent model, given without wrappers; ``None`` where it is whole."""
    mark: InconsistentModel | None = getattr(bare, MARK, None)
    if mark is not None and mark.is_repaired:
        mark.remove()
        return None
    return mark


def refuse_inconsistent(bare: nn.Module) -> None:
    """Raise RoundError while a model, given without wrappers, is inconsistent."""
    mark = find_inconsistent(bare)
    if mark is not None:
        mark.check()


def count_inconsistent(bare: nn.Module) -> int:
    """Return how often a model, given without wrappers, became inconsistent, even if it is repaired.

    What was remembered of it before is void then.
    """
    return int(getattr(bare, COUNT, 0))


def without_wrappers(model: nn.Module) -> nn.Module:
    """Take DDP and torch.compile off a model: the module inside has the mark."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        inner = getattr(inner, "_orig_mod", inner)
        if inner is model or not isinstance(inner, nn.Module):
            return model
        model = inner
