"""Rounds in a Trainer of Lightning: callbacks, and what gives each cell data and a folder of its own."""

from __future__ import annotations

from xffl.extras import optional_import
from xffl.integrations.lightning.places import cell_folder, cell_split

with optional_import("lightning", "xffl.integrations.lightning needs lightning"):
    from xffl.integrations.lightning.round_checkpoint import RoundCheckpoint
    from xffl.integrations.lightning.rounds import FederatedRounds

__all__ = ["FederatedRounds", "RoundCheckpoint", "cell_folder", "cell_split"]
