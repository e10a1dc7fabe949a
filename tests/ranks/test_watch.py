"""What a run says of itself: calls that some ranks have not made, collectives of the script, training without rounds."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager, redirect_stderr
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_state import new_state
from tests.worlds import run_world
from xffl.distributed import DistributedState, waits


class _Told(io.StringIO):
    """Standard error that lets the other ranks go on once something was written."""

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip():
            dist.distributed_c10d._get_default_store().set("told", "")  # type: ignore[no-untyped-call]
        return count


def _late(rank: int, call: Callable[[], Any]) -> str:
    """Make a call on rank 0 first, on the others once rank 0 has said that it waits; return what this rank has said."""
    store = dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]
    told = _Told()
    dist.barrier()
    if rank > 0:
        store.wait(["told"])
    after_s = 0.05 if rank == 0 else 60.0
    with mock.patch.object(waits, "TELL_AFTER_S", after_s), redirect_stderr(told):
        call()
    dist.barrier()
    if rank == 0:
        store.delete_key("told")
    dist.barrier()
    return told.getvalue()


def waiting_ranks(rank: int, world_size: int) -> list[str]:
    state = new_state(rank, world_size)
    model = nn.Linear(2, 2)
    said = [
        _late(rank, lambda: state.set_federated_scaling((1, 1))),
        _late(rank, lambda: xffl.shard(model, state)),
        _late(rank, lambda: xffl.FederatedScaling(model, torch.optim.SGD(model.parameters(), lr=0.1), state, every=1)),
        _late(rank, lambda: xffl.Aggregator(model, state).aggregate()),
    ]
    said.append(_late(rank, state.unset_federated_scaling))
    return said


def test_a_rank_that_waits_in_a_call_of_all_ranks_names_it():
    first, second = run_world(2, waiting_ranks)
    calls = ["set_federated_scaling", "shard", "FederatedScaling", "Aggregator", "unset_federated_scaling"]
    for text, call in zip(first, calls, strict=True):
        assert f"rank 0 has waited 0.05 s in {call} at {__file__}:" in text, text
        assert "every rank must make this call" in text
    assert second == [""] * len(calls)
