"""The state as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

__all__ = ["state_table"]

SHOWN = 8
"""Members of a tuple that are written out before the rest is counted."""


def state_table(values: Mapping[str, Any]) -> str:
    """Write the values that are set as a table of two columns.

    :param values: Values by name; those that are ``None`` are left out.
    :return: One line for each value, or a line that says that nothing is set.
    """
    rows = [(name, _shown(value)) for name, value in values.items() if value is not None]
    if not rows:
        return "DistributedState: nothing is set"
    width = max(len(name) for name, _ in rows)
    return "\n".join(["DistributedState", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _shown(value: Any) -> str:
    if isinstance(value, dist.ProcessGroup):
        return _group(value)
    if isinstance(value, tuple) and value and isinstance(value[0], dist.ProcessGroup):
        return f"{_group(value[0])}, {len(value)} handle{'s' if len(value) > 1 else ''}"
    if isinstance(value, tuple):
        return _elided(value)
    return str(value)


def _group(group: dist.ProcessGroup) -> str:
    return f"ranks {_elided(dist.get_process_group_ranks(group))}" if dist.is_initialized() else "destroyed"


def _elided(values: Any) -> str:
    shown = ", ".join(str(value) for value in values[:SHOWN])
    return f"({shown}, ... {len(values)} in all)" if len(values) > SHOWN else f"({shown})"
