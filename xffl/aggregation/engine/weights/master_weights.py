"""The master weights of ZeRO, which rounds move in place of the model's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from xffl.parallel.zero.view import Masters

__all__ = ["MasterWeights"]


class MasterWeights:
    """A :class:`~.weight_keepers.WeightKeeper` that reads ZeRO's master weights and writes them.

    It reads them when it is made, too, which is collective over the cell.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        with torch.inference_mode(False):
            masters.read()
        masters.check()  # after what is collective

    def before_read(self) -> None:
        """Read the masters; collective over the cell."""
        self._masters.read()
        self._masters.check()  # after what is collective

    def before_write(self) -> None:
        """Read again what local steps have changed since the round has read."""
        self._masters.read_again()
        self._masters.check()

    def after_write(self) -> None:
        """Write the masters, and the model's weights from them."""
        self._masters.write()
