"""Noise that hides a cell's share, and sums that hide it from the other cells.

``differential`` clips each cell's update and adds noise to it, and counts what that is worth; ``secure_sum`` masks what
crosses, so that only the sum over all cells can be read. The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xffl.aggregation.privacy.differential import Accountant, Privacy

__all__ = ["Accountant", "Privacy"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'xffl.aggregation.privacy' has no attribute {name!r}")
    from xffl.aggregation.privacy import differential

    return getattr(differential, name)
