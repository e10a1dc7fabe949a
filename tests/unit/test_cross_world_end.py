"""The end of a group of several worlds that still waits for a message."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from xffl.distributed.several_worlds import cross_world
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup


def test_no_thread_waits_for_a_message_that_was_given_up() -> None:
    """It would abort the process if that ended first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def join(rank: int) -> CrossWorldGroup:
        address = f"127.0.0.1:{store.port}"
        return CrossWorldGroup(address, "end", rank=rank, size=2, first=0, connect_s=60, timeout_s=60)

    with ThreadPoolExecutor(2) as threads:
        with mock.patch.object(cross_world, "in_turn", nullcontext):  # both ranks are in one process
            group, other = threads.map(join, range(2))
        waiting = threads.submit(group.recv([torch.zeros(1)], 1, 5).wait)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        group.end_waits()
        group.end_waits()  # as where the process ends afterwards: it has nothing to end any more
        with pytest.raises(RuntimeError):
            waiting.result(timeout=20)
        group.close()
        other.close()
    left = [thread for thread in threading.enumerate() if thread.name == "xffl-messages"]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)
