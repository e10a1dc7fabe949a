"""How long the cells of an elastic federation, and its lighthouse, wait for one of them."""

from __future__ import annotations

__all__ = ["CELL_HEARTBEAT_TIMEOUT_S", "CELL_JOIN_TIMEOUT_S"]

CELL_HEARTBEAT_TIMEOUT_S = 2
"""Seconds without a heartbeat after which a cell of an elastic federation counts as lost; cells look again for one that
they miss after as long."""
CELL_JOIN_TIMEOUT_S = 20
"""Seconds that a cell which is late for a round, but alive, is waited for."""
