"""What large worlds do otherwise, with eight real ranks that count as many: connections, and open files."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import sys
import time
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
from xffl.compat import gloo_connections
from xffl.compat.gloo_connections import LAZY_VARIABLE
from xffl.compat.sockets import open_sockets
from xffl.distributed import session
from xffl.distributed.agreement.consistency import barrier, check_consistent, gather_objects
from xffl.distributed.groups import new_group
from xffl.distributed.startup.file_limit import is_ample
from xffl.distributed.startup.open_files import FileLimit, files_of_groups
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


class DeadlyStore(CountingStore):
    """The world's store of a rank that may be killed when it has left its address there, and before it connects."""

    is_deadly = False

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if self.is_deadly and len(value) > 100:
            os.kill(os.getpid(), signal.SIGKILL)


def loses_a_rank_that_connects(rank: int, world_size: int, port: int, limit: int, has_messages: bool) -> None:
    """Make a group whose rank 3 is lost meanwhile, and fail where that lasts longer than it says."""
    be_rank(rank, world_size, port)
    stores: list[DeadlyStore] = []
    world_store = session.world_store

    def deadly(*asked: Any) -> DeadlyStore:
        stores.append(DeadlyStore(world_store(*asked)))
        return stores[-1]

    with (
        mock.patch.object(gloo_connections, "MESH_LIMIT", limit),
        mock.patch.object(session, "world_store", deadly),
        xffl.session(timeout_s=60),
    ):
        stores[0].is_deadly = rank == 3
        begun = time.monotonic()
        with pytest.raises(RuntimeError) as lost:
            dist.barrier(new_group(range(world_size), 5.0, "xffl_test", has_messages=has_messages))
        seconds = time.monotonic() - begun
        assert seconds < 12, (seconds, lost.value)
        os._exit(0)


@pytest.mark.parametrize("limit, has_messages", [(256, True), (4, True), (4, False)])
def test_a_rank_that_is_lost_while_pairs_connect_is_noticed_within_a_timeout(limit: int, has_messages: bool) -> None:
    """Gloo itself waits for a connection five times as long as a group's timeout."""
    ended = run_world(8, loses_a_rank_that_connects, free_port(), limit, has_messages, init=False, mortal=range(8))
    told = [str(each).strip().rpartition(" ")[2] for each in ended]
    assert told == ["-9" if rank == 3 else "0" for rank in range(8)], ended


def test_the_limit_counts_where_torch_can_and_the_user_has_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAZY_VARIABLE, raising=False)
    cases = [({}, True), ({LAZY_VARIABLE: "0"}, False), ({"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, False)]
    assert [gloo_connections.is_lazy(257, environ) for environ, _ in cases] == [is_lazy for _, is_lazy in cases]
    assert gloo_connections.is_lazy(2, {LAZY_VARIABLE: "1"}) and not gloo_connections.is_lazy(256, {})
    with gloo_connections.connect_lazily(True):
        assert os.environ[LAZY_VARIABLE] == "1"
    assert LAZY_VARIABLE not in os.environ
    monkeypatch.setenv(LAZY_VARIABLE, "0")
    with gloo_connections.connect_lazily(True):
        assert os.environ[LAZY_VARIABLE] == "0"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def opens_few_files(rank: int, world_size: int, port: int, next_port: int) -> tuple[str, list[int]]:
    """Return why the session of a rank with a low hard limit is refused, and the limits of one with a higher one."""
    be_rank(rank, world_size, port)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_files() + 5, 200))
    with xffl.session(federated=(4, 4), timeout_s=60) as state:
        assert state.topology.cells == 2
    raised = [*resource.getrlimit(resource.RLIMIT_NOFILE)]
    most = _open_files() + 30  # rank 0 needs 47, the others 24
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
