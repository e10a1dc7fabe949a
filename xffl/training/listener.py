"""How ranks agree on where to stop: a thread on each, the store of the world, and nothing while nobody asks.

.. code-block:: text

   asked        a signal and its rank: somebody wants all to stop
   place/RANK   how far a rank goes in any case; it begins nothing more until there is a goal
   ended        how many ranks have no more steps to make
   goal         what the first one writes who decides, and all take: where every cell stops, by rank 0 from all places;
                or that all have ended, by the last of them; or that there is no agreement, by whoever waits in vain
   gone         a rank that failed: there will be no goal
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from xffl.errors import LaunchError
from xffl.training.signals import SignalInbox

__all__ = ["Goal", "Listener", "own_store"]

LOG = logging.getLogger(__name__)

INTERVAL_S = 0.5
REQUESTS_PER_S = 2000.0
"""What all ranks together ask of rank 0's store at most"""
PATIENCE_S = 60.0
TERM_PATIENCE_S = 7.0
"""A launcher that ends what is left after a failure sends SIGTERM, too, and kills ten seconds later"""
MARGIN_S = 2.0

ENDED = json.dumps("ended")
NO_AGREEMENT = json.dumps(None)


@dataclass(frozen=True)
class Goal:
    """Where all stop."""

    reason: str
    steps: Mapping[int, int]
    """By cell: stop after this step, or a later one"""
    meetings: int
    """Stop when as many rounds have been entered"""


def own_store(world_size: int) -> Store:
    """Return a part of the world's store for a listener on each rank: no other thread's calls wait for those over it.

    All ranks call it before one of them does so again.

    :param world_size: Number of ranks.
    :return: The store.
    :raises LaunchError: if the store of the world cannot be reached; on this rank alone.
    """
    store = _client()
    number = int(store.add("xffl_preemption", 1) - 1) // world_size
    return PrefixStore(f"xffl_preemption_{number}", store)


def _client() -> Store:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return HashStore()
    store = world.get_group_store()
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined]
        return clone
    except RuntimeError as lost:
        # A store written in Python (the fake one, or a user's) has no clone, and no connection that a call would keep
        # busy. Torch says so by this text alone.
        if "pure virtual function" in str(lost):
            LOG.debug("the store of the world cannot be cloned: signals share it with everything else")
            return store
        # Over the one connection, the thread's calls would have the main thread's wait for them.
        raise LaunchError(
            f"no second connection to the store of the world could be had ({lost}); see that rank 0 can be reached, or "
            "leave signals alone with preempt_signals: []"
        ) from lost


class Listener:
    """Hear of signals on all ranks, and find a place to stop.

    :param inbox: The signals of this rank.
    :param store: A store that nobody else calls from this process, with keys that no other listener has used.
    :param rank: Rank of this process.
    :param world_size: Number of ranks, all of which have a listener.
    :param cell: The cell of this rank.
    """

    def __init__(self, inbox: SignalInbox, store: Store, rank: int, world_size: int, cell: int) -> None:
        self._inbox, self._store = inbox, store
        self._rank, self._world_size, self._cell = rank, world_size, cell
        self._interval_s = max(INTERVAL_S, world_size / REQUESTS_PER_S)
        self._changed = threading.Condition()
        self._step, self._meetings = -1, 0
        self._is_asked = self._has_ended = self._have_all_ended = False
        self._is_stopping = self._has_failed = self._has_arrived = False
        self._goal: Goal | None = None
        self._thread = threading.Thread(target=self._run, name="xffl-preemption", daemon=True)
        self._thread.start()

    # The training's side ----------------------------------------------------------------------------------------------

    def proceed(self, step: int, meetings: int) -> Goal | None:
        """Say how far this rank goes now, unless there is a goal; where the ranks are looking for one, wait for it.

        :param step: The step that begins.
        :param meetings: How many rounds will have been entered when it is over.
        :return: The goal, where there is one: nothing was begun then.
        """
        with self._changed:
            while self._is_asked and self._goal is None:
                self._changed.wait()
            if self._goal is None:
                self._step, self._meetings = max(step, self._step), max(meetings, self._meetings)
            return self._goal

    def await_all(self) -> Goal | None:
        """Wait until all ranks have called this, or there is a goal.

        :return: The goal, where there is one.
        """
        with self._changed:
            self._has_ended = True
        self._inbox.wake()
        with self._changed:
            while self._goal is None and not self._have_all_ended:
                self._changed.wait()
            return self._goal

    def arrive(self) -> None:
        """Say that this rank has come to the goal: it saves now, and no signal cuts that short."""
        self._has_arrived = True

    def stop(self, *, has_failed: bool = False) -> None:
        """End the thread.

        :param has_failed: Whether this rank fails: no goal can be found any more.
        """
        self._has_failed = has_failed  # first: the thread reads it when it sees the other
        self._is_stopping = True
        self._inbox.wake()
        self._thread.join(MARGIN_S if has_failed else PATIENCE_S)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        heard: list[signal.Signals] = []
        try:
            if self._listen(heard):
                return
        except RuntimeError as lost:  # the store went with rank 0, whose failure ends the others, too
            LOG.debug("preemption is off: %s", lost)
        with self._changed:
            self._is_asked, self._have_all_ended = False, True
            self._changed.notify_all()
        while not self._is_stopping:
            self._inbox.give_up(heard)
            heard = self._inbox.wait(self._interval_s)

    def _listen(self, heard: list[signal.Signals]) -> bool:
        """Wait for signals and for what others ask; tell whether nothing is left to do."""
        store, has_told, deadline = self._store, False, math.inf
        while not self._is_stopping:
            heard += self._inbox.wait(self._interval_s)
            if self._is_decided:  # what comes now asks for nothing new, unless nobody can get there any more
                if heard and store.check(["gone"]):
                    return False
                if signal.SIGTERM in heard:
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
                if time.monotonic() > deadline and not self._has_arrived:
                    heard[:] = [signal.SIGTERM]
                    return False
                heard.clear()
                continue
            if heard:
                store.compare_set("asked", "", f"{heard[0].name} on rank {self._rank}")
            if self._has_ended and not has_told:
                has_told = True
                if store.add("ended", 1) == self._world_size:
                    store.compare_set("goal", "", ENDED)
            is_found = True
            if store.check(["asked"]):
                is_found = self._find_goal()
            elif has_told and store.check(["goal"]):
                is_found = self._take_goal()
            if not is_found:
                return False
            if self._is_decided:
                heard.clear()
        if self._has_failed:
            store.set("gone", str(self._rank))
        return True

    @property
    def _is_decided(self) -> bool:
        return self._goal is not None or self._have_all_ended

    def _find_goal(self) -> bool:
        """Tell how far this rank goes, and take over what is decided; tell whether there is something."""
        store = self._store
        with self._changed:
            self._is_asked = True
            place = [self._cell, self._step, self._meetings]
        store.set(f"place/{self._rank}", json.dumps(place))
        reason = store.get("asked").decode()
        is_hasty = reason.startswith("SIGTERM")
        patience_s = TERM_PATIENCE_S if is_hasty else PATIENCE_S
        slack_s = min(self._interval_s, INTERVAL_S) if is_hasty else self._interval_s
        if self._rank == 0:
            goal = self._decide(reason, patience_s + slack_s)
            told = NO_AGREEMENT if goal is None else json.dumps([reason, list(goal.steps.items()), goal.meetings])
            store.compare_set("goal", "", told)
        try:
            # Rank 0 may have heard of it an interval later than this one.
            store.wait(["goal"], timedelta(seconds=patience_s + MARGIN_S + 2 * slack_s))
        except RuntimeError:  # a store says it so, too, when it has gone: then the next line does, again
            store.compare_set("goal", "", NO_AGREEMENT)
        return self._take_goal()

    def _take_goal(self) -> bool:
        """Take over what stands; tell whether it is something."""
        decided = json.loads(self._store.get("goal").decode())
        if decided is None:
            return False
        with self._changed:
            if decided == json.loads(ENDED):
                self._is_asked, self._have_all_ended = False, True
            else:
                reason, steps, meetings = decided
                self._goal = Goal(reason, dict(steps), meetings)
            self._changed.notify_all()
        return True

    def _decide(self, reason: str, patience_s: float) -> Goal | None:
        """Find the first place that every rank can stop at; ``None`` where not all ranks answer."""
        deadline = time.monotonic() + patience_s
        keys = [f"place/{rank}" for rank in range(self._world_size)]
        while not self._store.check(keys):
            if self._store.check(["goal"]):
                return None  # others have ended, or given up: what is returned here comes too late
            if self._store.check(["gone"]) or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        places = [json.loads(told) for told in _values(self._store, keys)]
        steps: dict[int, int] = {}
        for cell, step, _ in places:
            steps[cell] = max(step, steps.get(cell, step))
        return Goal(reason, steps, max(meetings for _, _, meetings in places))


def _values(store: Store, keys: Sequence[str]) -> list[bytes]:
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
