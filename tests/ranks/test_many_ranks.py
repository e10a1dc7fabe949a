"""What large worlds do otherwise, with eight real ranks that count as many: connections, and open files."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_session import be_rank
from tests.rounds import aggregator_of
from tests.scale.real import CountingStore
from tests.worlds import run_world
from xffl.aggregation import Level, Levels
from xffl.cluster.environment import ProcessEnvironment
from xffl.compat import gloo_connections
from xffl.compat.gloo_connections import BATCH_VARIABLE, LAZY_VARIABLE, SHORT_VARIABLE, Form
from xffl.compat.sockets import open_sockets
from xffl.distributed import groups, session
from xffl.distributed.agreement.consistency import barrier, check_consistent, gather_objects
from xffl.distributed.failures import waits, world_store
from xffl.distributed.failures.waits import NamedWait
from xffl.distributed.groups import Gathering, in_turn, new_group, watched
from xffl.distributed.startup.file_limit import is_ample
from xffl.distributed.startup.open_files import FileLimit, SessionFiles, files_of_groups, files_of_store
from xffl.errors import ConfigError


def counts_sockets(rank: int, world_size: int, port: int) -> tuple[int, int, int, float]:
    """Return the sockets of a mesh, those of a large group, those that use has opened since, and a round's mean."""
    be_rank(rank, world_size, port)
    with mock.patch.object(gloo_connections, "MESH_LIMIT", 4), xffl.session(federated=(4, 4), timeout_s=60) as state:
        assert LAZY_VARIABLE not in os.environ
        joined = open_sockets()
        mesh = new_group(range(world_size), 60.0, "xffl_mesh", has_messages=True)
        with_mesh = open_sockets()
        lazy = new_group(range(world_size), 60.0, "xffl_lazy")
        with_both = open_sockets()
        model = nn.Linear(64, 1, bias=False)
        nn.init.constant_(model.weight, float(rank // 4))
        aggregator_of(model, state).aggregate()
        for group in (mesh, lazy, None):
            check_consistent("a test", "the same", group=group)
            gather_objects(rank, group)
            for source in range(world_size):
                dist.broadcast(torch.ones(1), source, group=group)
            barrier(group)
        opened = len(open_sockets().keys() - with_both)
        of_mesh = len(with_mesh.keys() - joined)
        of_lazy = len(with_both.keys() - with_mesh)
        return of_mesh, of_lazy, opened, float(model.weight.mean())


def test_large_groups_open_the_connections_of_collectives_and_no_others() -> None:
    # One socket listens. A barrier of 8 ranks has 5 neighbours of each: 1, 2 and 4 away, on both sides.
    assert run_world(8, counts_sockets, free_port(), init=False) == [(1 + 7, 1 + 5, 0, 0.5)] * 8


def makes_levels(rank: int, world_size: int, port: int) -> float:
    """Make levels of which only one part needs connections of votes, and then groups of all ranks."""
    be_rank(rank, world_size, port)
    with mock.patch.object(gloo_connections, "MESH_LIMIT", 1), xffl.session(federated=(1, 1, 1), timeout_s=20) as state:
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, float(rank))
        levels = [Level(), Level(every=2, groups=(2, 1))]
        Levels(model, state, levels, gradients_reduced_by_caller=True).aggregate()
        aggregator_of(model, state, overlap=True).aggregate()
        return float(model.weight.mean())


def test_parts_of_levels_may_be_large_and_small() -> None:
    assert run_world(3, makes_levels, free_port(), init=False) == [1.0] * 3


def call_again(call: str, group: dist.ProcessGroup) -> None:
    """Make a call until it fails: a broadcast ends on ranks that hand nothing on."""
    while True:
        if call == "vote":
            check_consistent("a test", "the same", group=group)
        else:
            dist.broadcast(torch.ones(1), 5, group=group)


def loses_a_rank(rank: int, world_size: int, port: int, call: str) -> None:
    """End with code 3 where the first call waits long for a rank that is gone."""
    be_rank(rank, world_size, port)
    with mock.patch.object(gloo_connections, "MESH_LIMIT", 4), xffl.session(timeout_s=90):
        group = new_group(range(world_size), 90.0, "xffl_test")
        if rank == 5:
            os._exit(17)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Socket closed"):
            call_again(call, group)
        os._exit(3 if time.monotonic() - begun > 40 else 0)


@pytest.mark.parametrize("call", ["vote", "broadcast"])
def test_a_rank_that_is_lost_before_its_first_message_is_noticed_at_once(call: str) -> None:
    ended = run_world(8, loses_a_rank, free_port(), call, init=False, mortal=range(8))
    assert ["exit code 17" in str(one) for one in ended] == [rank == 5 for rank in range(8)], ended
    assert not [one for one in ended if "exit code 3" in str(one)], ended


LOST = "refused|by peer|Socket closed|another rank of the job|imed out waiting 5|ranks is gone"
"""What ranks say of one that was lost"""


class WatchedStore(CountingStore):
    """The world's store of a rank that may be killed when it has left its address there, and before it connects."""

    is_deadly = False

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if self.is_deadly and len(value) > 100:
            os.kill(os.getpid(), signal.SIGKILL)


def makes_a_group(rank: int, world_size: int, port: int, limit: int, has_messages: bool, fate: str) -> None:
    """Make a group whose rank 3 is killed meanwhile, or comes late; fail where others wait for long."""
    be_rank(rank, world_size, port)
    stores: list[WatchedStore] = []
    world_store = session.world_store

    def watched(*asked: Any) -> Any:
        if fate != "killed" or rank != 3:
            return world_store(*asked)  # others have the store that users have
        stores.append(WatchedStore(world_store(*asked)))
        return stores[-1]

    with (
        mock.patch.object(gloo_connections, "MESH_LIMIT", limit),
        mock.patch.object(session, "world_store", watched),
        xffl.session(timeout_s=60),
    ):
        barrier()
        begun = time.monotonic()
        if rank == 3 and fate == "killed":
            stores[0].is_deadly = True
        elif rank == 3:
            time.sleep(4)
        if fate == "late":
            dist.barrier(new_group(range(world_size), 5.0, "xffl_test", has_messages=has_messages))
            return
        # A rank that others connect to may have made its group, and hears of it in the barrier.
        with pytest.raises(RuntimeError, match=LOST):
            dist.barrier(new_group(range(world_size), 5.0, "xffl_test", has_messages=has_messages))
        assert time.monotonic() - begun < 10  # it is about 6 at most, on an idle machine
        if rank == 0:
            time.sleep(3)  # who looks at its store when that has just gone connects to it for one timeout more
        os._exit(0)


@pytest.mark.parametrize("limit, has_messages", [(256, True), (4, True), (4, False)])
def test_a_rank_that_is_killed_while_ranks_connect_is_noticed_after_one_timeout(limit: int, has_messages: bool) -> None:
    """Gloo itself waits for a connection five times as long as a group's timeout."""
    ended = run_world(8, makes_a_group, free_port(), limit, has_messages, "killed", init=False, mortal=range(8))
    assert [str(each).strip().rpartition(" ")[2] for each in ended] == [
        "-9" if rank == 3 else "0" for rank in range(8)
    ], ended


@pytest.mark.parametrize("limit, has_messages", [(256, True), (4, False)])
def test_a_rank_that_comes_late_is_waited_for_as_long_as_the_timeout_says(limit: int, has_messages: bool) -> None:
    assert run_world(8, makes_a_group, free_port(), limit, has_messages, "late", init=False) == [None] * 8


def test_the_limit_counts_where_torch_can_and_the_user_has_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAZY_VARIABLE, raising=False)
    cases = [({}, True), ({LAZY_VARIABLE: "0"}, False), ({"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, False)]
    assert [gloo_connections.is_lazy(257, environ) for environ, _ in cases] == [is_lazy for _, is_lazy in cases]
    assert gloo_connections.is_lazy(2, {LAZY_VARIABLE: "1"}) and not gloo_connections.is_lazy(256, {})
    with gloo_connections.connect_as(Form.LAZY):
        assert os.environ[LAZY_VARIABLE] == "1"
        assert gloo_connections.form_of_group(257) is Form.LAZY
    assert LAZY_VARIABLE not in os.environ
    monkeypatch.setenv(LAZY_VARIABLE, "0")
    with gloo_connections.connect_as(Form.LAZY):
        assert os.environ[LAZY_VARIABLE] == "0"


def test_large_groups_in_which_ranks_message_each_other_are_meshes_of_short_addresses() -> None:
    forms = [
        gloo_connections.form_of_group(size, environ, world_size=512, has_messages=True)
        for size, environ in [(64, {}), (32, {}), (64, {LAZY_VARIABLE: "1"}), (64, {LAZY_VARIABLE: "0"})]
    ]
    assert forms == [Form.SHORT_MESH, Form.MESH, Form.LAZY, Form.MESH]


def makes_groups_by_variables(rank: int, world_size: int, port: int, values: dict[str, str]) -> list[int]:
    """Return the requests for the addresses of a mesh, and of a large group of messages, under the user's variables."""
    be_rank(rank, world_size, port)
    os.environ.update(values)
    stores: list[CountingStore] = []
    world_store = session.world_store

    def counted(*asked: Any) -> CountingStore:
        stores.append(CountingStore(world_store(*asked)))
        return stores[-1]

    asked = []
    with mock.patch.object(session, "world_store", counted), xffl.session(timeout_s=60):
        for limit in (256, 4):
            with mock.patch.object(gloo_connections, "MESH_LIMIT", limit):
                before = stores[0].requests.total()
                group = new_group(range(world_size), 60.0, "xffl_test", has_messages=True)
                asked.append(stores[0].requests.total() - before)
            dist.barrier(group)
            check_consistent("a test", "the same", group=group)
    assert all(os.environ.get(name) == values.get(name) for name in (LAZY_VARIABLE, BATCH_VARIABLE, SHORT_VARIABLE))
    return asked


@pytest.mark.parametrize(
    "values, requests",
    [
        ({}, [3, 3]),
        ({BATCH_VARIABLE: "0"}, [2 + 2 * 6, 2 + 2 * 6]),
        ({SHORT_VARIABLE: "0"}, [3, 3]),
        ({SHORT_VARIABLE: "1"}, [3, 3]),
        ({LAZY_VARIABLE: "1"}, [2 + 2 * 5, 2 + 2 * 5]),
        ({LAZY_VARIABLE: "0"}, [3, 3]),
    ],
    ids=str,
)
def test_a_rank_reads_all_addresses_at_once_unless_the_user_decides_otherwise(
    values: dict[str, str], requests: list[int]
) -> None:
    assert run_world(6, makes_groups_by_variables, free_port(), values, init=False) == [requests] * 6


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def opens_few_files(rank: int, world_size: int, port: int, next_port: int) -> tuple[str, list[int]]:
    """Return why the session of a rank with a low hard limit is refused, and the limits of one with a higher one."""
    be_rank(rank, world_size, port)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_files() + 5, 200))
    with xffl.session(federated=(4, 4), timeout_s=60) as state:
        assert state.topology.cells == 2
    raised = [*resource.getrlimit(resource.RLIMIT_NOFILE)]
    most = _open_files() + 30  # rank 0 needs 60 certainly, the others 24
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    be_rank(rank, world_size, next_port)
    with pytest.raises(ConfigError) as refused, xffl.session(federated=(4, 4), timeout_s=60):
        pass
    return str(refused.value), raised


def test_a_session_raises_the_limit_of_open_files_and_tells_what_it_needs() -> None:
    told = run_world(8, opens_few_files, free_port(), free_port(), init=False)
    assert [limits for _, limits in told] == [[200, 200]] * 8
    text, *others = {text.partition(" (first told")[0] for text, _ in told}
    assert not others
    assert re.search(r"rank 0 of 8 needs \d+ open files for its connections, but may have \d+, the hard limit", text)


class PeakOfFiles:
    """Counts the open files of this process while a block runs."""

    def __enter__(self) -> PeakOfFiles:
        self.most = self.before = _open_files()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        return self

    def _count(self) -> None:
        while not self._is_over.wait(0.001):
            self.most = max(self.most, _open_files())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def counts_files_while_ranks_wait(rank: int, world_size: int, port: int) -> int:
    """Compare what is open in a session where ranks look for each other at once with what is counted before.

    Return how many more are open at most while ranks wait for the last one, and take their turns.
    """
    be_rank(rank, world_size, port)
    place = ProcessEnvironment(rank=rank, world_size=world_size)
    files = SessionFiles.of(place, 0, is_own_address=True)
    with pytest.raises(ConfigError) as refused:
        files.check_groups((2, 2), (None, None), backend="gloo", link_backend=None, streams=None)
    counted = int(re.findall(r"needs (\d+) open files", str(refused.value))[0]) + files.waiting_files
    with ExitStack() as blocks:
        blocks.enter_context(mock.patch.object(groups, "SLOW_S", 0.0))
        blocks.enter_context(mock.patch.object(waits, "NOTE_AFTER_S", 0.05))
        peak = blocks.enter_context(PeakOfFiles())
        blocks.enter_context(xffl.session(federated=(2, 2), timeout_s=60))
        barrier()
        store = dist.group.WORLD.get_group_store()
        with PeakOfFiles() as of_waiting, mock.patch.object(world_store, "_IN_A_SECOND", 2):
            if rank == world_size - 1:
                time.sleep(3)
            with in_turn(), NamedWait("a test"):
                watched(dist.barrier, Gathering(store, "test", world_size, 30.0))
        barrier()
    assert peak.most <= counted, (rank, peak.most, counted)
    return of_waiting.most - of_waiting.before


def test_ranks_that_wait_for_each_other_open_no_more_files_than_are_counted_and_take_turns() -> None:
    """Each of four ranks has two connections to make, and closes one before most others make theirs."""
    seen = run_world(4, counts_files_while_ranks_wait, free_port(), init=False)
    assert 1 <= seen[0] < 2 * 4, seen


def says_that_files_are_few(rank: int, world_size: int, port: int) -> str:
    """Return what a rank 0 writes whose files are enough as long as nobody is late, and make rounds there."""
    be_rank(rank, world_size, port)
    said = StringIO()
    if rank == 0:
        needed = _open_files() - 1 + files_of_store(0, world_size) * 2 + files_of_groups([world_size]) + world_size
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed + 4, needed + 4))
    with redirect_stderr(said), xffl.session(federated=(4, 4), timeout_s=60) as state:
        aggregator_of(nn.Linear(2, 1), state).aggregate()
    return said.getvalue()


def test_a_session_whose_files_are_enough_unless_a_rank_is_late_runs_and_says_so() -> None:
    first, *others = run_world(8, says_that_files_are_few, free_port(), init=False)
    assert re.search(r"rank 0 of 8 may have \d+ open files, the hard limit, and needs up to \d+ for a moment", first)
    assert not any("open files" in each for each in others), others


@mock.patch.dict(os.environ)
def test_a_rank_that_cannot_open_its_store_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(0, 2, free_port())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(session, "raise_file_limit", lambda: 5)
    monkeypatch.setattr(FileLimit, "now", lambda most: FileLimit(used=0, most=most))
    before = dict(os.environ)
    with pytest.raises(ConfigError, match="rank 0 of 2 needs 12 open files"), xffl.session(timeout_s=60):
        pass
    assert dict(os.environ) == before


def test_what_a_session_needs_grows_with_its_groups() -> None:
    assert files_of_groups([8]) == 4 + 7 and files_of_groups([4, 2]) == 2 * 4 + 3 + 1
    assert not is_ample(1024, 2) and is_ample(2**16, 512) and is_ample(math.inf, 10**6)
    assert files_of_groups([1024]) == 4 + 19 and files_of_groups([1024], has_messages=True) == 4 + 1023
    FileLimit(10, math.inf).check(0, 2, 10**6)
    with pytest.raises(ConfigError, match="rank 3 of 8 needs 31 open files .* may have 30"):
        FileLimit(10, 30).check(3, 8, 21)


class Interrupting(deque[object]):
    """Turns of threads; an interrupt comes just behind the moment at which the first one has been noted."""

    is_interrupted = False

    def append(self, turn: object) -> None:
        super().append(turn)
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt


def test_an_interrupt_of_a_thread_that_waits_for_its_turn_leaves_no_turn_behind() -> None:
    with mock.patch.object(groups, "_turns", Interrupting()) as turns:
        with pytest.raises(KeyboardInterrupt), in_turn():
            pytest.fail("it was interrupted")
        assert not turns
        with in_turn():
            assert len(turns) == 1
        assert not turns
