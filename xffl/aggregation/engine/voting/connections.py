"""The connections of votes in large groups over gloo, which open those of collectives alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.engine.transport import Move
from xffl.aggregation.engine.voting.votes import swap
from xffl.compat.group_names import fresh_name
from xffl.distributed.failures.waits import NamedWait
from xffl.distributed.groups import Gathering, in_turn, watched

__all__ = ["connect_tree"]


def connect_tree(
    peers: Sequence[Sequence[int]], group: dist.ProcessGroup | None, device: torch.device, within_s: float
) -> None:
    """Open the connections of votes; collective over ``group``, all ranks that vote, and nothing to do over NCCL.

    RuntimeError where a rank does not come in time, or is lost meanwhile.

    :param peers: The ranks below this one in the tree of its cell, that above it, and the first ranks of other cells.
    :param group: All ranks that vote.
    :param device: The control device of the group.
    :param within_s: How long other ranks are waited for, in seconds.
    """
    if device.type == "cuda":
        return

    def empty(peers: Sequence[int]) -> list[Move]:
        return [(torch.zeros(1, dtype=torch.uint8), peer) for peer in peers]

    below, above, others = peers

    def connect() -> None:
        # In the order of a vote, so that no rank waits for one that waits for it.
        swap(empty(below), [], group)
        swap([], empty(above), group)
        swap(empty(others), empty(others), group)
        swap(empty(above), [], group)
        swap([], empty(below), group)

    voting = group or dist.group.WORLD
    assert voting is not None, "ranks vote in a world"
    ranks = dist.get_process_group_ranks(voting)
    with in_turn(), NamedWait("the connections of votes", group):
        # Not by the names of the world: other ranks may have votes that need no connections (a part of levels).
        name = f"xffl_votes/{fresh_name(ranks, voting)}"
        watched(connect, Gathering(voting.get_group_store(), name, len(ranks), within_s))
