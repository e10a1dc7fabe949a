"""What tests of checkpoints keep, apart from those, so that ranks need not import what draws test cases."""

from __future__ import annotations

from typing import Any

from torch import nn

from xffl.distributed.distributed_state import DistributedState

__all__ = ["ALONE", "Extra", "Own"]

ALONE = DistributedState(rank=0, world_size=1)


class Extra(nn.Linear):
    """A layer with an extra state; it refuses one of ``refused``."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra
        self.refused: Any = "refused"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, type(self.refused)) and state == self.refused:
            raise ValueError("a state of another version")
        self.extra = state


class Own:
    """A part of any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
