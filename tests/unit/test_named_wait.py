"""A wait for other ranks, where there are none to wait for."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from xffl.distributed.failures import world_store
from xffl.distributed.failures.waits import NamedWait


class Held:
    """Something that a caller of a wait holds."""

    def size(self) -> int:
        return 2


def wait() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
    """Wait in a call that holds something."""
    held, group = Held(), SimpleNamespace(size=lambda: 2)
    named = NamedWait("a test", group)  # type: ignore[arg-type]
    with named:
        """The others are here."""
    return weakref.ref(held), weakref.ref(named)


def test_a_wait_that_is_over_holds_no_group_until_its_timer_ends() -> None:
    group = Held()
    held = weakref.ref(group)
    named = NamedWait("a test", group)  # type: ignore[arg-type]
    with named:
        """The others are here."""
    del group
    assert held() is None, "torch aborts a process that ends while another thread destroys a group"


def test_a_wait_that_is_over_holds_nothing_of_its_callers() -> None:
    gc.collect()
    gc.disable()  # it would find reference cycles, too
    try:
        refs = wait()
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(5.0)
        del thread
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_wait_that_was_given_up_keeps_no_later_one_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(world_store, "clone_store", lambda _: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    note = world_store.WaitingNote("a call", " at a line")
    for _ in range(2):
        notes = world_store.WaitingNotes(None)
        notes.write(note)
        assert notes.become_speaker() and notes.count_alike() == 0
        notes.leave_call()
        assert store.check(["xffl_waits/all/0"])  # that it had come stays
