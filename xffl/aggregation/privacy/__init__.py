"""Noise that hides a cell's share, and sums that hide it from the other cells.

``differential`` clips each cell's update and adds noise to it, and counts what that is worth; ``secure_sum`` masks what
crosses, so that only the sum over all cells can be read. The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.aggregation.privacy.differential import Accountant, Privacy

__all__ = ["Accountant", "Privacy"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "xffl.aggregation.privacy.differential"))
