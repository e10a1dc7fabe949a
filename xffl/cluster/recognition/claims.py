"""What a rank knows of its place, and tells the others when they meet."""

from __future__ import annotations

import json
from typing import NamedTuple

from xffl.errors import LaunchError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = [
    "Claim",
]


_CLAIM_BYTES = 4096  # of a claim as text

_MOST = 2**31


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

    @classmethod
    def from_text(cls, text: bytes | str) -> Claim:
        """Read a claim that another rank has made."""
        try:
            values = Fields(parse_json(text, limit=_CLAIM_BYTES), "the place that a rank claims", error=LaunchError)
        except ValueError as error:
            raise LaunchError(f"the place that a rank claims cannot be read: {error}; see who uses its port") from error
        return cls(
            rank=values.integer("rank", 0, _MOST),
            local_rank=values.integer("local_rank", 0, _MOST),
            local_size=values.optional("local_size", Fields.integer, 1, _MOST),
            host=values.text("host", 1024),
            node_rank=values.optional("node_rank", Fields.integer, 0, _MOST),
            node_world_size=values.optional("node_world_size", Fields.integer, 1, _MOST),
            world_size=values.optional("world_size", Fields.integer, 1, _MOST),
        )
