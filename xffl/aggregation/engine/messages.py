"""Messages between the ranks of a round, and the wait for a GPU that has been given some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from xffl.costs import MOST_IN_FLIGHT
from xffl.distributed.collectives import Group
from xffl.distributed.cross_world import CrossWorldGroup, Work

__all__ = ["Move", "Progress", "start_moves"]


Move: TypeAlias = tuple[torch.Tensor, int]
"""What is sent or received, and the rank of the world at the other end."""


def start_moves(receive: Sequence[Move], send: Sequence[Move], group: Group | None, tag: int) -> list[Work]:
    """Start receiving from some ranks and sending to some; local, its peers do the same."""
    if not receive and not send:
        return []
    if (receive or send)[0][0].device.type != "cpu":
        # NCCL matches by order alone, so both directions start at once; and it does not know all types.
        assert not isinstance(group, CrossWorldGroup), "between worlds weights move over gloo"
        moves = [
            dist.P2POp(operation, values.view(torch.uint8), peer, group, tag)
            for operation, given in ((dist.irecv, receive), (dist.isend, send))
            for values, peer in given
        ]
        return list(dist.batch_isend_irecv(moves))
    transport = dist.group.WORLD if group is None else group
    assert transport is not None, "messages go over a world"
    # By the group itself: irecv and isend look at much more first, some hundred times in a round.
    works: list[Work] = []
    for values, peer in receive:
        works.append(transport.recv([values], _rank_in(transport, peer), tag))
    for values, peer in send:
        works.append(transport.send([values], _rank_in(transport, peer), tag))
    return works


def _rank_in(group: Group, rank: int) -> int:
    """Return which rank of a group a rank of this world is."""
    return rank - group.first if isinstance(group, CrossWorldGroup) else dist.get_group_rank(group, rank)


HASTE = 0.8
"""How much of a timeout the host waits for a GPU.

At the end of it NCCL ends the process, and counts from when a message is given, before it is noted here.
"""

POLL_S = 1e-4
"""How often a GPU is asked."""


class Progress:
    """Waits for a GPU some messages behind what it has been given; without a GPU gloo's own waits do that.

    NCCL's clock for a message starts when it is given, and ``work.wait()`` holds up the stream, not the host. If all of
    an exchange were given at once, its timeout would be one for the whole of it, and the host would learn of a peer
    that is gone from NCCL's watchdog, which ends the process. So the host waits, with a deadline, for what it gave
    :data:`~xffl.costs.MOST_IN_FLIGHT` messages before.
    """

    def __init__(self, device: torch.device, within_s: float) -> None:
        self._device = device
        self._within_s = HASTE * within_s
        self._marks: deque[tuple[torch.cuda.Event, float]] = deque()

    def note(self) -> None:
        """Note that the current stream waits for a message, and wait for one of those before."""
        if self._device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append((mark, time.monotonic()))
            self._await(MOST_IN_FLIGHT)

    def drain(self) -> None:
        """Wait until the GPU has done all that the current stream was given."""
        if self._device.type == "cuda":
            self.note()
            self._await(0)

    def forget(self) -> None:
        """Begin anew, whatever became of the messages before."""
        self._marks.clear()

    def _await(self, behind: int) -> None:
        """Wait for all that was noted but the last few."""
        while len(self._marks) > behind:
            mark, noted = self._marks.popleft()
            while not mark.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > noted + self._within_s:
                    raise RuntimeError(f"a rank did not answer within {self._within_s:g} s")
                time.sleep(POLL_S)
