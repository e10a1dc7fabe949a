"""What a rank knows of its place, and tells the others when they meet."""

from __future__ import annotations

import json
from typing import NamedTuple

__all__ = ["Claim"]


class Claim(NamedTuple):
    """What one rank knows of itself; ``None`` for what its launcher does not tell."""

    rank: int
    local_rank: int
    local_size: int | None = None
    host: str = ""  # identity of the machine, the same for all ranks on it; the rank's own finding where empty
    node_rank: int | None = None
    node_world_size: int | None = None
    world_size: int | None = None

    def to_text(self) -> str:
        """Return the claim as the text by which it travels."""
        return json.dumps(self._asdict())
