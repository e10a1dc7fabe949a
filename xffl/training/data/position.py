"""Where a loop stands in its data: one object for samplers, streams, and the loaders around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xffl.checks import integer

__all__ = ["EpochPosition", "checked_batches"]


class EpochPosition:
    """The epoch that a loop is in, and how many of its batches the loop has taken; local.

    What has drawn or read ahead, such as a loader with workers, says nothing about it: who hands a batch to the loop
    calls :meth:`take`. All ranks of a cell stand at the same place.
    """

    NAMES = ("epoch", "position")
    """What :meth:`state_dict` calls them"""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch, from 0."""
        self.batches = 0
        """Batches of it that the loop has taken, from 0."""

    def choose(self, epoch: object) -> bool:
        """Go to the first batch of an epoch, and tell whether it is another one; in the current one nothing changes."""
        number = integer("epoch", epoch, 0)
        if number == self.epoch:
            return False
        self.epoch = number
        self.batches = 0
        return True

    def take(self) -> None:
        """Count a batch that the loop gets."""
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers, for :meth:`load_state_dict`."""
        return {"epoch": self.epoch, "position": self.batches}

    def load_state_dict(self, state: Mapping[str, Any], most: int | None = None) -> bool:
        """Go to where a loop stood, and tell whether that is another epoch.

        :param state: What :meth:`state_dict` returned.
        :param most: Batches of an epoch, where that is known.
        :return: Whether it is another epoch.
        :raises ConfigError: if the numbers are no place in an epoch; nothing has changed then.
        """
        batches = checked_batches(state["position"], most)
        is_other = self.choose(state["epoch"])
        self.batches = batches
        return is_other


def checked_batches(batches: object, most: int | None = None) -> int:
    """Return a number of batches of an epoch that a loop has taken; ConfigError unless it can be one."""
    return integer("batches consumed of an epoch", batches, 0, most)
