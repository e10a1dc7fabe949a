"""Whether a model bears the mark that its ranks could not commit alike, and how often it got one.

Rounds ask a model for these attributes. One that was never inconsistent has neither, and nothing else is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from xffl.aggregation.engine.decision.inconsistent_model import InconsistentModel

__all__ = ["INCONSISTENT_COUNT", "INCONSISTENT_MARK", "find_inconsistent", "refuse_inconsistent"]

INCONSISTENT_MARK = "_xffl_tear"
"""The attribute of a model without wrappers that holds the mark"""
INCONSISTENT_COUNT = "_xffl_tears"
"""The attribute that says how often it got one, repaired or not: what was remembered of the model before is void"""


def find_inconsistent(bare: nn.Module) -> InconsistentModel | None:
    """Return the mark of an inconsistent model, given without wrappers; ``None`` where it is whole."""
    mark: InconsistentModel | None = getattr(bare, INCONSISTENT_MARK, None)
    if mark is not None and mark.is_repaired:
        mark.remove()
        return None
    return mark


def refuse_inconsistent(bare: nn.Module) -> None:
    """Raise RoundError while a model, given without wrappers, is inconsistent."""
    mark = find_inconsistent(bare)
    if mark is not None:
        mark.check()
