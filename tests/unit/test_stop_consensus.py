"""Signals and the agreement on where to stop, with ranks that are threads of one process and share a store."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from xffl.distributed.failures import world_store as stores
from xffl.errors import ConfigError, LaunchError
from xffl.training import preemption
from xffl.training.config.dataclasses import ExperimentConfig
from xffl.training.preemption import StopConsensus, StopPoint
from xffl.training.signals import SignalInbox, check_signals


class Told(SignalInbox):
    """An inbox that a test puts signals into."""

    def __init__(self) -> None:
        super().__init__([signal.SIGUSR2])
        self.given_up: list[Any] = []

    def __enter__(self) -> SignalInbox:
        signals, self.signals = self.signals, ()
        super().__enter__()
        self.signals = signals
        return self

    def ask(self) -> None:
        os.write(self._write, bytes([signal.SIGUSR2]))

    def give_up(self, heard: Any) -> None:
        self.given_up += heard


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "INTERVAL_S", 0.005)
    monkeypatch.setattr(preemption, "PATIENCE_S", 1.0)
    monkeypatch.setattr(preemption, "MARGIN_S", 0.2)


def march(ranks: int, cells: int, asked: int, seed: int) -> tuple[list[StopPoint | None], list[tuple[int, int]]]:
    """Let ranks make steps, each at its pace; the rank ``asked`` hears a signal. Return the goals and last steps."""
    store = HashStore()
    goals: list[StopPoint | None] = [None] * ranks
    steps = [(0, 0)] * ranks

    def run(rank: int) -> None:
        draw = random.Random(1000 * seed + rank)
        with Told() as inbox:
            mine = StopConsensus(inbox, store, rank, ranks, rank % cells)
            step = 0
            while (goal := mine.proceed(step + 1, step // 50)) is None:
                step += 1
                if rank == asked and step == 5:
                    inbox.ask()  # type: ignore[attr-defined]
                threading.Event().wait(draw.random() / 200)
            goals[rank], steps[rank] = goal, (rank % cells, step)
            mine.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads)
    return goals, steps


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("ranks", "cells"), [(1, 1), (7, 3), (24, 2)])
def test_all_ranks_get_one_goal_that_none_has_passed(ranks: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PATIENCE_S", 15.0)
    for seed in range(2):
        goals, steps = march(ranks, cells, random.Random(seed).randrange(ranks), seed)
        assert goals[0] is not None and all(goal == goals[0] for goal in goals)
        for cell in range(cells):
            assert goals[0].steps[cell] == max(step for other, step in steps if other == cell), "the furthest one"


@pytest.mark.usefixtures("short")
def test_without_an_answer_of_all_the_signal_does_what_it_did() -> None:
    store = HashStore()
    with Told() as inbox, Told() as other:
        first, second = StopConsensus(inbox, store, 0, 3, 0), StopConsensus(other, store, 1, 3, 0)
        other.ask()  # type: ignore[attr-defined]
        first._thread.join(0.5)
        assert first.proceed(1, 0) is None, "nobody waits for ever"
        assert second.proceed(1, 0) is None
        first.close()
        second.close()
        assert (inbox.given_up, other.given_up) == ([], [signal.SIGUSR2])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("short")
def test_a_rank_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PATIENCE_S", 60.0)
    store = HashStore()
    with Told() as inbox, Told() as other:
        first, second = StopConsensus(inbox, store, 0, 2, 0), StopConsensus(other, store, 1, 2, 0)
        second.close(has_failed=True)
        inbox.ask()  # type: ignore[attr-defined]
        for _ in range(1000):
            if inbox.given_up:  # type: ignore[attr-defined]
                break
            threading.Event().wait(0.01)
        assert inbox.given_up == [signal.SIGUSR2]  # type: ignore[attr-defined]
        first.close()


def test_names_of_signals() -> None:
    assert check_signals(["USR2", "SIGTERM", "SIGUSR2"]) == (signal.SIGUSR2, signal.SIGTERM)
    assert check_signals([]) == ()
    for wrong in ("USR2", ["INT"], ["KILL"], ["usr2"], [12], None):
        with pytest.raises(ConfigError, match="preempt_signals"):
            check_signals(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="preempt_signals"):
            ExperimentConfig(preempt_signals=wrong)  # type: ignore[arg-type]


def test_a_signal_is_heard_while_the_main_thread_is_busy_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with SignalInbox([signal.SIGUSR2]) as inbox:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert inbox.wait(5.0) == [signal.SIGUSR2]
            inbox.wake()
            assert inbox.wait(5.0) == []
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
        with SignalInbox([]):
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_what_is_forked_does_not_take_part() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an imported package may have a handler of its own
    with SignalInbox([signal.SIGUSR2, signal.SIGTERM]) as inbox:
        child = os.fork()
        if child == 0:
            wrong = 1 * (signal.getsignal(signal.SIGUSR2) != signal.SIG_IGN)
            wrong += 2 * (signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(wrong + 4 * (signal.set_wakeup_fd(-1) != -1))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert inbox.wait(0.0) == []
    signal.signal(signal.SIGTERM, before)


def test_a_handler_of_before_is_called_where_there_is_no_agreement() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with SignalInbox([signal.SIGUSR2]) as inbox:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert heard == []
            inbox.give_up(inbox.wait(5.0))
            assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_is_not_answered_by_itself() -> None:
    """What is sent again for a handler of before comes through the pipe once more."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    done = threading.Event()

    def read(inbox: SignalInbox) -> None:
        came = inbox.wait(5.0)
        for _ in range(50):
            inbox.give_up(came)
            came = inbox.wait(0.01)
        done.set()

    try:
        with SignalInbox([signal.SIGUSR2, signal.SIGHUP]) as inbox:
            for number in (signal.SIGUSR2, signal.SIGHUP):
                os.kill(os.getpid(), number)
            reader = threading.Thread(target=read, args=(inbox,))
            reader.start()
            assert done.wait(20.0)
            reader.join()
            assert heard == [signal.SIGUSR2]
            assert inbox.wait(0.0) == []
            os.kill(os.getpid(), signal.SIGUSR2)
            assert heard == [signal.SIGUSR2] * 2, "one that comes later"
    finally:
        signal.signal(signal.SIGUSR2, before)
        signal.signal(signal.SIGHUP, hup)


def test_given_up_by_the_main_thread_handlers_come_back_at_once() -> None:
    with SignalInbox([signal.SIGUSR2]) as inbox:
        inbox.give_up(())
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("is_last", [False, True])
def test_the_end_and_a_goal_are_one_decision(is_last: bool) -> None:
    """Rank 0 has seen that all have ended; a signal that rank 1 hears before its next look asks for nothing."""
    store = HashStore()
    with Told() as inbox, Told() as other:
        store.set("decision", preemption.ALL_ENDED)
        store.add("ended", 2 if is_last else 1)
        first, second = StopConsensus(inbox, store, 0, 2, 0), StopConsensus(other, store, 1, 2, 1)
        other.ask()  # type: ignore[attr-defined]
        assert second.await_all() is None
        assert first.await_all() is None
        first.close()
        second.close()
        assert (inbox.given_up, other.given_up) == ([], [])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("short")
def test_who_waits_in_vain_gives_up_for_all() -> None:
    store = HashStore()
    with Told() as inbox, Told() as other:
        second = StopConsensus(other, store, 1, 2, 0)
        other.ask()  # type: ignore[attr-defined]
        second._thread.join(0.1)
        for _ in range(500):
            if other.given_up:  # type: ignore[attr-defined]
                break
            threading.Event().wait(0.01)
        assert second.proceed(1, 0) is None
        first = StopConsensus(inbox, store, 0, 2, 0)  # it was only slow
        threading.Event().wait(0.2)
        assert first.proceed(1, 0) is None
        first.close()
        second.close()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_terminate_after_a_goal_that_nobody_can_reach(has_arrived: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PATIENCE_S", 0.2)
    with Told() as inbox:
        mine = StopConsensus(inbox, HashStore(), 0, 1, 0)
        inbox.ask()  # type: ignore[attr-defined]
        while mine.proceed(1, 0) is None:
            threading.Event().wait(0.001)
        if has_arrived:
            mine.arrive()
        inbox.signals = (signal.SIGUSR2, signal.SIGTERM)
        os.write(inbox._write, bytes([signal.SIGTERM]))
        ends = time.monotonic() + (0.5 if has_arrived else 20.0)
        while not inbox.given_up and time.monotonic() < ends:  # type: ignore[attr-defined]
            threading.Event().wait(0.01)
        mine.close()
        assert inbox.given_up == ([] if has_arrived else [signal.SIGTERM])  # type: ignore[attr-defined]


class InPython(Store):  # type: ignore[misc]
    """A store of a user's own making, which torch cannot clone."""


class OutOfReach:
    """A store whose host takes no second connection, as torch tells it: in words of a plain RuntimeError."""

    def clone(self) -> None:
        raise RuntimeError("connect() timed out")


@pytest.mark.parametrize("store", [InPython(), OutOfReach()], ids=lambda store: type(store).__name__)
def test_only_a_store_that_has_no_clone_is_shared(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(stores, "dist", SimpleNamespace(is_initialized=lambda: True, group=world))
    if isinstance(store, InPython):
        assert stores.clone_store("leave signals alone with preempt_signals: []") is store
    else:
        with pytest.raises(LaunchError, match=r"no second connection .*connect\(\) timed out.*preempt_signals"):
            stores.clone_store("leave signals alone with preempt_signals: []")
