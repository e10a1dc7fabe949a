"""How the ranks of a world meet: at which store, and what they compare there before they have a process group.

A store that nobody has used before is found first (:func:`meet`). There each rank leaves its claim of a place
(:class:`PlaceBook`) and what it was asked for (:func:`check_consistent_on_store`); the rank that arrives last gives the
verdict, which all of them raise or go on with. The world then gets a store of its own (:func:`world_store`).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.environment import ProcessEnvironment
from xffl.cluster.launch.failure import note_alike
from xffl.cluster.listening import PortHeldError
from xffl.cluster.network import LOOPBACK, Timeouts, control_address, host_identity
from xffl.cluster.reaching import await_listener
from xffl.cluster.recognition.claims import Claim
from xffl.costs import format_refusal, own_format
from xffl.distributed.agreement.differences import rebuild_error
from xffl.distributed.startup.joining import agents_store, join_store
from xffl.distributed.startup.stores import arrive, has_agents_store, serve_store
from xffl.errors import ConfigError, LaunchError, XfflError, public_name

__all__ = [
    "PlaceBook",
    "agree_on_store",
    "check_consistent_on_store",
    "meet",
    "world_store",
]

Asked = TypeVar("Asked")
"""What a rank asks for before there is a process group"""

TELL_AFTER_S = 30.0
"""How long rank 0 waits for the others to meet before it says who has not come"""
_HEAR_S = 2.0
"""How long rank 0 stays for others to hear of an error, where it is not known how many they are"""


def meet(place: ProcessEnvironment, timeout_s: float, *, is_own_address: bool, is_patient: bool) -> Store:
    """Return a store that nobody has used before this world; a process that is alone needs no port."""
    if place.master_addr is None or place.master_port is None:
        return HashStore()
    # torchrun's agent may listen at its address itself, which torch's own rendezvous knows.
    is_agents = has_agents_store(place) and not is_own_address
    try:
        if not is_agents:
            return _make_store(place.master_addr, place.master_port, place, timeout_s, is_patient=is_patient)
        await_listener(place.master_addr, place.master_port, timeout_s, is_patient=is_patient)
        return agents_store(place.rank, place.world_size, timeout_s)
    except XfflError:
        raise
    except RuntimeError as broken:
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} ({place.launcher}) could not meet the others at "
            f"{place.master_addr}:{place.master_port}: {broken}; check the address, that the port is free on rank 0's "
            "host, and that all ranks were started"
        ) from broken


def _make_store(address: str, port: int, place: ProcessEnvironment, timeout_s: float, *, is_patient: bool) -> Store:
    """Return a store at rank 0; other ranks wait until that of a set-up that failed before, if any, is gone."""
    if place.rank == 0:
        gc.collect()  # a set-up that failed may have left its store, and so this port, in a cycle with its error
    is_local = place.is_on_one_host
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 1.0)
        timeout = timedelta(seconds=left_s)
        if place.rank == 0:
            try:
                store = serve_store(address, port, place.world_size, timeout, is_local=is_local)
            except PortHeldError as held:
                from xffl.distributed.startup.mistakes import refuse_second_rank_0

                refuse_second_rank_0(held, place, address, port)
        else:
            store = join_store(
                address,
                port,
                place.world_size,
                left_s,
                is_local=is_local,
                is_patient=is_patient,
                waiting=f"rank {place.rank}" if place.rank == 1 or place.node_local_rank == 0 else "",
            )
        try:
            _check_world_size(store, place, timeout_s)
            if arrive(store, place.world_size) == 0:
                return store
            store.wait(["xffl_end"], timeout)  # nobody sets it: what comes is the end of the store
        except dist.DistNetworkError:
            if place.rank == 0 or time.monotonic() > deadline:
                raise


def world_store(meeting: Store, place: ProcessEnvironment, timeouts: Timeouts) -> Store:
    """Return the store that the world keeps: not the one at the given port, which is free again once all have met.

    torch's caches hold on to process groups, and so to their store, longer than the world lasts.
    """
    if place.master_addr is None or not isinstance(meeting, TCPStore):
        return meeting
    timeout = timedelta(seconds=timeouts.session_s)
    if place.rank == 0:  # it tells where: every rank has looked for the control interface before (use_interface)
        named = control_address()
        is_local = named is None and place.is_on_one_host
        store = serve_store(named or place.master_addr, 0, place.world_size, timeout, is_local=is_local)
        address = LOOPBACK if is_local else named or place.master_addr
        meeting.set("store", f"{address} {store.port}")
        return store
    address, port = meeting.get("store").decode().split()
    store = TCPStore(
        address,
        int(port),
        world_size=place.world_size,
        is_master=False,
        timeout=timedelta(seconds=timeouts.connect_s),
        wait_for_workers=False,
    )
    store.set_timeout(timeout)
    return store


def _check_world_size(store: Store, place: ProcessEnvironment, timeout_s: float) -> None:
    """Compare the number of ranks that this one was told with what the first one at a new store was; local.

    Ranks count each other's arrivals, so one with another number would wait for ever, and so would the others.
    """
    first = store.compare_set("xffl_world_size", "", str(place.world_size)).decode()
    if first != str(place.world_size):
        from xffl.distributed.startup.mistakes import end_on_store

        error = LaunchError(
            f"rank {place.rank} was told of {place.world_size} ranks in all, but another one of {first}; set "
            "WORLD_SIZE to the same number on all ranks"
        )
        end_on_store(
            store,
            rank=place.rank,
            world_size=int(first),
            error=error,
            timeout_s=min(timeout_s, _HEAR_S),
            is_speaker=place.rank == 0,
        )


class PlaceBook:
    """The claims of all ranks at the store of a world.

    Launchers tell a rank its number on its host, but often not how many ranks are there, or which of the nodes it is;
    and what wrappers of sites set by hand may contradict itself. So each rank leaves its claim before it arrives, and
    the rank that arrives last looks at all of them (:func:`xffl.cluster.recognition.placement.place_ranks`).
    """

    def __init__(self, store: Store, place: ProcessEnvironment) -> None:
        self._store = store
        self._place = place

    def claim(self) -> None:
        """Leave this rank's claim; local: two small requests to the store, before this rank arrives."""
        place = self._place
        claim = Claim(
            rank=place.rank,
            local_rank=place.node_local_rank,
            local_size=place.node_local_size,
            host=host_identity(),
            node_rank=place.node_rank,
            node_world_size=place.node_world_size,
            world_size=place.world_size,
        )
        # By the order of arrival, so that a rank that occurs twice is seen.
        number = self._store.add("claims", 1)
        self._store.set(f"claim/{number}", claim.to_text())

    def judge(self) -> XfflError | None:
        """Return what is wrong with the claims of all ranks, or tell each its place; for the rank that arrives last."""
        from xffl.distributed.startup.judged_claims import judge_claims

        return judge_claims(self._store, self._place.world_size)

    def complete(self) -> ProcessEnvironment:
        """Return this rank's place with what the ranks have found out of it; local, after the verdict."""
        place = self._place
        if None not in (place.node_local_size, place.node_rank, place.node_world_size):
            return place
        local_size, node_rank, nodes = map(int, self._store.get(f"place/{place.rank}").decode().split())
        return replace(place, node_local_size=local_size, node_rank=node_rank, node_world_size=nodes)


def agree_on_store(
    meeting: Store,
    place: ProcessEnvironment,
    ask: Callable[[ProcessEnvironment], Asked],
    timeout_s: float,
    error: XfflError | None = None,
) -> tuple[ProcessEnvironment, Asked]:
    """Leave this rank's claim of a place, and compare what all ranks ask for; collective over those that meet.

    :param meeting: The store at which they meet.
    :param place: What this rank was told of its place.
    :param ask: Returns what this rank asks for, whose text is compared; XfflError where it asks for nothing valid.
    :param timeout_s: Seconds that ranks wait for each other.
    :param error: What was wrong on this rank before; ``ask`` is then not called.
    :return: This rank's place with what the ranks have found out of it, and what it asks for.
    :raises XfflError: if there was an error on any rank, or ranks ask for unlike things; the same on all ranks.
    """
    book = PlaceBook(meeting, place)
    book.claim()
    asked: Asked | None = None
    if error is None:
        try:
            asked = ask(place)
        except XfflError as wrong:
            error = wrong
    check_consistent_on_store(
        meeting,
        rank=place.rank,
        world_size=place.world_size,
        value=str(asked),
        error=error,
        timeout_s=timeout_s,
        judge=book.judge,
    )
    assert asked is not None, "the ranks agree on errors only by raising one"
    return book.complete(), asked


def check_consistent_on_store(
    store: Store,
    rank: int,
    world_size: int,
    value: str,
    error: XfflError | None,
    timeout_s: float,
    *,
    judge: Callable[[], XfflError | None] = lambda: None,
) -> None:
    """Compare a value before there is a process group, over the store that ranks meet at.

    It does what :func:`~xffl.distributed.agreement.consistency.check_consistent` does over a group.

    Collective over the world: a handful of small requests to the store from each rank. The rank that arrives last calls
    ``judge`` for what else is wrong with what all have left at the store; all ranks raise it.
    """
    # compare_set() gives the value that stands in the store: the first rank's.
    ours = own_format()
    theirs = store.compare_set("format", "", ours).decode()
    # Where the format's number is another one, whatever else is compared may be told in another way there.
    if theirs.partition(" ")[0] != ours.partition(" ")[0]:
        error = ConfigError(format_refusal(f"rank {rank}", ours, "other ranks", theirs))
    if error is not None:  # this rank has no value to compare
        store.compare_set("error", "", json.dumps([public_name(error), f"{error} (first told by rank {rank})"]))
    elif (common := store.compare_set("value", "", value).decode()) != value:
        text = f"ranks were given different set-ups: rank {rank}: {value}; others: {common}; give all ranks the same"
        store.compare_set("error", "", json.dumps([ConfigError.__name__, text]))
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == world_size:
        if (wrong := judge()) is not None:
            store.compare_set("error", "", json.dumps([public_name(wrong), str(wrong)]))
        store.set("verdict", store.compare_set("error", "", "null").decode())
    try:
        _await_verdict(store, rank, world_size, timeout_s)
    except RuntimeError as late:
        from xffl.distributed.startup.unmet import name_absent

        raise LaunchError(
            f"rank {rank} waited for all of {world_size} ranks for {timeout_s:g} s at most, but "
            f"{name_absent(store, world_size)}: {late}; see the other ranks' output, or raise timeout_s"
        ) from late
    verdict: list[str] | None = json.loads(store.get("verdict").decode())
    if verdict is not None:
        from xffl.distributed.startup.unmet import wait_for_readers

        wait_for_readers(store, rank, world_size, timeout_s)
        refused = rebuild_error(*verdict)
        note_alike(refused, is_speaker=rank == 0)
        raise refused


def _await_verdict(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait for the verdict; after a while rank 0 says in a line which ranks have not come to the store."""
    first_s = min(TELL_AFTER_S, timeout_s)
    try:
        store.wait(["verdict"], timedelta(seconds=first_s))
        return
    except RuntimeError:
        if first_s == timeout_s:
            raise
    if rank == 0:
        from xffl.distributed.startup.unmet import tell_absent

        tell_absent(store, world_size, first_s)
    store.wait(["verdict"], timedelta(seconds=timeout_s - first_s))
