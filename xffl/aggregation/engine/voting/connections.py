"""The connections of votes in large groups over gloo, which open those of collectives alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.engine.transport import Move
from xffl.aggregation.engine.voting.votes import swap
from xffl.compat.gloo_waits import ConnectionWait
from xffl.distributed.failures.waits import NamedWait

__all__ = ["connect_tree"]


def connect_tree(peers: Sequence[Sequence[int]], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Open the connections of votes; collective over ``group``, all ranks that vote, and nothing to do over NCCL.

    :param peers: The ranks below this one in the tree of its cell, that above it, and the first ranks of other cells.
    :param group: All ranks that vote.
    :param device: The control device of the group.
    """
    if device.type == "cuda":
        return

    def empty(peers: Sequence[int]) -> list[Move]:
        return [(torch.zeros(1, dtype=torch.uint8), peer) for peer in peers]

    below, above, others = peers
    voting = dist.group.WORLD if group is None else group
    assert voting is not None, "ranks vote in a world"
    # In the order of a vote, so that no rank waits for one that waits for it.
    with (
        ConnectionWait.of(voting, [*below, *above, *others]),
        NamedWait("the connections of votes", group),
    ):
        swap(empty(below), [], group)
        swap([], empty(above), group)
        swap(empty(others), empty(others), group)
        swap(empty(above), [], group)
        swap([], empty(below), group)
