"""Ranks that a wrapper has started with RANK, WORLD_SIZE, LOCAL_RANK and an address alone, on real processes."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import xffl
from tests.ports import free_ports
from tests.worlds import run_world
from xffl.errors import XfflError

BOUND_S = 40
BARE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCHERS = {
    "flux": dict(zip(BARE, ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"), strict=True)),
    "pals": dict(zip(BARE, ("PALS_RANKID", "PALS_LOCAL_RANKID", "PMI_SIZE"), strict=True)),
    "jsrun": dict(zip(BARE, (f"JSM_NAMESPACE_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE")), strict=True)),
}
"""How launchers call these variables"""


def try_worlds(rank: int, world_size: int, cases: list[tuple[int, list[dict[str, str]]]]) -> list[Any]:
    """Join one world after the other, and return what is found there, or the error."""
    told: list[Any] = []
    for port, environs in cases:
        environ = dict(zip(BARE, map(str, (rank, rank, world_size)), strict=True)) | environs[rank]
        if (names := LAUNCHERS.get(environ.pop("LAUNCHER", ""))) is not None:
            environ = {names.get(name, name): text for name, text in environ.items()}
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "XFFL_FEDERATED": "1,2"} | environ
        host = environ.pop("HOST", "one")
        began = time.monotonic()
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch("xffl.distributed.startup.meeting.host_identity", lambda host=host: host),
        ):
            try:
                with xffl.session(device="cpu", timeout_s=60) as state:
                    x = torch.tensor([state.rank + 1])
                    dist.all_reduce(x)
                    place = (state.node_local_rank, state.node_local_size, state.node_rank, state.node_world_size)
                    told.append((place, int(x)))
            except XfflError as error:
                told.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - began < BOUND_S, told
    return told


TWO_HOSTS = [{"HOST": "a", "LOCAL_RANK": "0"}, {"HOST": "b", "LOCAL_RANK": "1"}, {"HOST": "b", "LOCAL_RANK": "0"}]
WRONG = {
    "ranks 1, 2 on host one all have local rank 1": [{}, {}, {"LOCAL_RANK": "1"}],
    "node 0 (host one) should have local ranks 0 to 1": [
        {"GROUP_RANK": "0"},
        {"GROUP_RANK": "1", "LOCAL_RANK": "0"},
        {"GROUP_RANK": "0"},
    ],
    "ranks 2 on host one do not tell how many ranks": [{"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}, {}],
    "host b should have local ranks 0 to 1": [{"HOST": "a"}, {"HOST": "b"}, {"HOST": "b"}],
    "[0, 1, 1] are not 0 to 2, each once": [{}, {}, {"RANK": "1"}],
    "in all, but another one of ": [{}, {}, {"WORLD_SIZE": "4"}],
    # What a rank sees by itself, before it meets the others.
    "LaunchError: RANK=3 is outside 0 to 2, as WORLD_SIZE=3 says; give every process its own place (first told by rank "
    "3)": [{}, {}, {"RANK": "3"}],
    "LaunchError: LOCAL_RANK=2 is outside 0 to 1, as LOCAL_WORLD_SIZE=2 says": [{}, {}, {"LOCAL_WORLD_SIZE": "2"}],
    "LOCAL_RANK=5 is outside 0 to 2": [{"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "3"}, {}, {}],
    "RANK is 'one'; it must be an integer (first told by a process whose rank": [{}, {"RANK": "one"}, {}],
    "WORLD_SIZE is 'x'; it must be an integer (first told by rank 0)": [{"WORLD_SIZE": "x"}, {}, {}],
    "ConfigError: XFFL_CELL is '2/2'; give the cell's number": [{}, {}, {"XFFL_CELL": "2/2"}],
    "two processes were started as rank 0 of the ranks that meet at 127.0.0.1:": [{}, {"RANK": "0"}, {}],
}


def test_nodes_are_found_out_and_contradictions_are_told_to_all() -> None:
    started = [[{"LAUNCHER": name, **one} for one in TWO_HOSTS] for name in LAUNCHERS]
    worlds = [[{}, {}, {}], TWO_HOSTS, *started, *WRONG.values()]
    cases = list(zip(free_ports(len(worlds)), worlds, strict=True))
    one, *found = zip(*run_world(3, try_worlds, cases, init=False), strict=True)
    wrong = found[1 + len(LAUNCHERS) :]
    assert one == (((0, 3, 0, 1), 6), ((1, 3, 0, 1), 6), ((2, 3, 0, 1), 6))
    for two in found[: 1 + len(LAUNCHERS)]:
        assert two == (((0, 1, 0, 2), 6), ((1, 2, 1, 2), 6), ((0, 2, 1, 2), 6))
    for errors, message in zip(wrong, WRONG, strict=True):
        assert len({*errors}) == 1 and message in errors[0], errors
