"""What tests of checkpoints keep, apart from those, so that ranks need not import what draws test cases."""

from __future__ import annotations

from typing import Any

from xffl.distributed.distributed_state import DistributedState

__all__ = ["ALONE", "Own"]

ALONE = DistributedState(rank=0, world_size=1)


class Own:
    """A part of any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
