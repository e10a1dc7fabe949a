"""Collectives over a group of this world, or over a group whose ranks belong to several worlds.

torch.distributed's own functions know the groups of one world. Where cells are jobs of their own, the ranks that meet
for rounds are those of several: :class:`~xffl.distributed.several_worlds.cross_world.CrossWorldGroup` joins them, and
the functions here take both kinds of groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import RoundError
from xffl.json_text import JSON_LIMIT, parse_json

__all__ = [
    "Group",
    "all_gather_json",
    "all_reduce",
    "broadcast",
    "group_size",
    "own_rank",
]

Group: TypeAlias = "dist.ProcessGroup | CrossWorldGroup"
"""A group of this world, or one whose ranks belong to several."""


def group_size(group: Group | None) -> int:
    """Return the number of a group's ranks."""
    return group.size() if isinstance(group, CrossWorldGroup) else dist.get_world_size(group)


def own_rank(group: Group | None) -> int:
    """Return which rank of a group this process is."""
    return group.rank() if isinstance(group, CrossWorldGroup) else dist.get_rank(group)


def all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Group | None = None) -> None:
    """Reduce values in place; collective over the group."""
    if isinstance(group, CrossWorldGroup):
        group.all_reduce(values, op)
    else:
        dist.all_reduce(values, op=op, group=group)


def broadcast(values: torch.Tensor, source: int, group: Group | None = None) -> None:
    """Replace values by those of a rank of this world; collective over the group."""
    if isinstance(group, CrossWorldGroup):
        group.broadcast(values, source - group.first)
    else:
        dist.broadcast(values, src=source, group=group)


def all_gather_json(value: Any, device: torch.device, group: Group | None = None) -> list[Any]:
    """Return a value of each rank, by rank: numbers, texts, lists and mappings of them; collective over the group.

    Nothing that is read runs code. ``device`` is where the group's small messages lie.
    """
    text = json.dumps(value).encode()
    sizes = [int(one) for one in _all_gather(torch.tensor([len(text)], dtype=torch.int64, device=device), group)]
    if wrong := [size for size in sizes if not 0 <= size <= JSON_LIMIT]:
        raise RoundError(f"a rank announces a text of {wrong[0]} bytes; at most {JSON_LIMIT} are read")
    row = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = _all_gather(row, group)
    try:
        return [parse_json(one[:size].cpu().numpy().tobytes()) for one, size in zip(rows, sizes, strict=True)]
    except ValueError as error:
        raise RoundError(f"a rank has sent what cannot be read: {error}") from error


def _all_gather(values: torch.Tensor, group: Group | None) -> Sequence[torch.Tensor]:
    rows = [torch.empty_like(values) for _ in range(group_size(group))]
    if isinstance(group, CrossWorldGroup):
        group.all_gather(rows, values)
    else:
        dist.all_gather(rows, values, group=group)
    return rows
