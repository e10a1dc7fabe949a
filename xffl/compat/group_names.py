"""Names by which torch tells the process groups of a world, and the meshes of one world from those of a later one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["fresh_group_name", "fresh_name", "fresh_names"]

_groups_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many groups this process has named in each world, and how many votes in smaller groups: lives as long as these"""

_meshes_made: Counter[tuple[object, ...]] = Counter()
"""How many meshes this process has made of each kind of device and ranks: lives as long as PyTorch's own caches do"""


@contextmanager
def fresh_group_name(ranks: Sequence[int]) -> Iterator[str]:
    """Make a group in the block, with the name that it gets: no other one has it, or had; local.

    torch 2.13 names a group that only its ranks make by these and by how many groups there are, so one that is made
    after another was destroyed may get the name of a third, and is refused or connects to addresses of the past:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py (``_hash_ranks_to_str``).
    All ``ranks`` of the group have named as many groups in this world. One thread at a time may be in such a block;
    what others make with torch alone keeps its name, unless it is a group of the same ranks.
    """
    name = fresh_name(ranks)
    members = sorted(ranks)
    usual = distributed_c10d._process_group_name

    def name_of(ranks: Sequence[int], use_hashed_name: bool) -> str:
        return name if use_hashed_name and sorted(ranks) == members else str(usual(ranks, use_hashed_name))

    with mock.patch.object(distributed_c10d, "_process_group_name", name_of):
        yield name


def fresh_name(ranks: Sequence[int], among: dist.ProcessGroup | None = None) -> str:
    """Return a name that nothing else of the ranks has, or had, in a group; local, in the same order on all.

    torch 2.13 has none for what is no group, and for groups none that is fresh (:func:`fresh_group_name`):
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/distributed_c10d.py. All ranks of ``among``, by
    default the world, have named as many things in it.
    """
    counted = dist.group.WORLD if among is None else among
    assert counted is not None, "groups are made in a world"
    number = _groups_made.get(counted, 0) + 1
    _groups_made[counted] = number
    return hashlib.sha1(f"xffl {number} {list(ranks)}".encode(), usedforsecurity=False).hexdigest()


def fresh_names(*key: object) -> Callable[[str], str]:
    """Return what makes the names of a mesh's dimensions, unequal to those that this process has used before; local.

    torch 2.13 compares meshes by ranks, shape, and names of dimensions, and the caches of DTensor's operators, which
    live as long as the process, hand out the first of two equal meshes. A session that follows another in one process
    would get a mesh whose groups are destroyed. No public call empties these caches:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/device_mesh.py (``DeviceMesh.__eq__``).
    The key is what meshes that would be equal have in common, such as the device's type and the ranks.
    """
    _meshes_made[key] += 1
    generation = _meshes_made[key]
    if generation == 1:
        return str
    from xffl.compat.dtensor import AxisName

    return partial(AxisName, generation=generation)
