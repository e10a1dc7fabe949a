"""Names of process groups that no other group of a world has, or had."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest import mock
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["fresh_group_name"]

_groups_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many groups this process has named in each world, by the group of all its ranks: lives as long as that does"""


def fresh_group_name(ranks: Sequence[int]) -> AbstractContextManager[object]:
    """Return a block in which a group is made with a name that no other one has, or had; local.

    torch 2.13 names a group that only its ranks make by these and by how many groups there are, so one that is made
    after another was destroyed may get the name of a third, and is refused or connects to addresses of the past:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py (``_hash_ranks_to_str``).
    All ``ranks`` of the group have named as many groups in this world.
    """
    world = dist.group.WORLD
    assert world is not None, "groups are made in a world"
    number = _groups_made.get(world, 0) + 1
    _groups_made[world] = number
    name = hashlib.sha1(f"xffl {number} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()
    return mock.patch.object(distributed_c10d, "_process_group_name", return_value=name)
