"""A state as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from xffl.checks import shorten

__all__ = ["state_text"]


def state_text(values: Mapping[str, Any]) -> str:
    """Write the fields of a state that are public and set as a table of two columns."""
    public = {name: value for name, value in values.items() if not name.startswith("_")}
    texts = {name: _text_of(value) for name, value in public.items() if value is not None}
    if not texts:
        return "DistributedState: nothing is set"
    width = max(map(len, texts))
    return "\n".join(["DistributedState", *(f"  {name:<{width}}  {text}" for name, text in texts.items())])


def _text_of(value: Any) -> str:
    """Write the value of a field: the ranks of groups, the first members of long tuples."""
    if isinstance(value, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(value)) if dist.is_initialized() else None
        return "destroyed" if ranks is None else f"ranks {_text_of(ranks)}"
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], dist.ProcessGroup):
        return f"{_text_of(value[0])}, {len(value)} handle{'s' if len(value) > 1 else ''}"
    return f"({shorten(value, 8)})"
