"""Saving beside the training, and kills at any moment: there is always a whole checkpoint."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.kept import ALONE, Own
from tests.ranks.test_checkpoint import Kit, assert_same, make_state, told
from tests.worlds import run_world
from xffl.checkpoint import AsyncSaver, CheckpointManager, find_latest_checkpoint, load_checkpoint, save_checkpoint
from xffl.checkpoint.format import CellWriter
from xffl.distributed.distributed_state import DistributedState

KILLS = 6


def beside(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    """Step, with collectives of its own, while a thread writes what was before."""
    found: list[tuple[str, str]] = []
    for name, layout, sizes, hsdp in (("cells", "cells", (2, 2), 1), ("fsdp", "fsdp", (), None)):
        state = make_state(rank, layout, sizes, hsdp)
        kit, own = Kit(state), Own([rank, torch.ones(2)])
        kit.train(range(1), rank, world_size)
        save_checkpoint(f"{folder}/{name}_sync", kit.parts(), state, values={"step": 1}, own={"own": own})
        before = copy.deepcopy(kit.truth())
        go, write = threading.Event(), CellWriter.write_data

        def held(self: CellWriter, *args: Any, go: threading.Event = go, write: Any = write) -> Any:
            assert go.wait(60)
            return write(self, *args)

        with AsyncSaver(state) as saver:
            CellWriter.write_data = held  # type: ignore[method-assign]
            saver.save(f"{folder}/{name}", kit.parts(), values={"step": 1}, own={"own": own})
            kit.train(range(1, 2), rank, world_size)
            own.value[1].zero_()
            after = copy.deepcopy(kit.truth())
            assert not Path(f"{folder}/{name}").exists()
            go.set()
            saver.wait()
            CellWriter.write_data = write  # type: ignore[method-assign]
            assert load_checkpoint(f"{folder}/{name}", kit.parts(), state, own={"own": own}) == {"step": 1}
            assert_same(kit.truth(), before)
            assert own.value[0] == rank and own.value[1].tolist() == [1, 1]
            kit.train(range(1, 2), rank, world_size)
            assert_same(kit.truth(), after)
            found = found or wrong_ones(rank, folder, kit, state, saver)
        with pytest.raises(xffl.StateError, match="closed"):
            saver.wait()
        assert told(lambda rank=rank, state=state: AsyncSaver(state, timeout_s=rank + 9.0))[0] == "ConfigError"
        with AsyncSaver(state) as again:  # groups of the same ranks can be made again
            again.save(f"{folder}/{name}_again", kit.parts())
    return found


def wrong_ones(rank: int, folder: str, kit: Kit, state: DistributedState, saver: AsyncSaver) -> list[tuple[str, str]]:
    """What goes wrong on one rank, in the call or beside, is told to all; then the saver works."""
    path, write = f"{folder}/wrong", CellWriter.write_data

    def full(self: CellWriter, *args: Any) -> Any:
        raise OSError(28, "No space left on device", "a file")

    if rank == 1:
        CellWriter.write_data = full  # type: ignore[method-assign]
    saver.save(path, kit.parts())
    found = [told(saver.wait)]
    saver.save(path, kit.parts())
    found.append(told(lambda: saver.save(path, kit.parts())))
    CellWriter.write_data = write  # type: ignore[method-assign]
    found.append(told(lambda: saver.save(path, kit.parts(), values={"x": rank})))
    found.append(told(lambda: saver.save(path, {**kit.parts(), "own": Own(rank)}) and saver.wait()))
    dist.barrier()  # rank 0 has cleared up
    assert not os.path.exists(path) and not list(Path(folder).glob(".*"))
    manager = CheckpointManager(f"{folder}/run", keep_last=1)
    for step in (1, 2):
        manager.save(saver, step, parts=kit.parts(), values={"step": step})
    saver.wait()
    assert sorted(os.listdir(manager.output_dir)) == ["latest", "step_2"]
    dist.barrier()
    return found


def test_steps_beside_a_save_leave_it_as_it_was(tmp_path: Path) -> None:
    ranks = run_world(4, beside, str(tmp_path))
    assert all(found == ranks[0] for found in ranks[1:])
    for (kind, text), piece in zip(
        ranks[0], ("No space left", "No space left", '"x": 1', "'own' holds on"), strict=True
    ):
        assert kind in ("CheckpointError", "ConfigError") and piece in text, text
    for name in ("cells", "fsdp"):
        for file in (tmp_path / f"{name}_sync").rglob("*.distcp"):
            assert file.read_bytes() == (tmp_path / name / file.relative_to(tmp_path / f"{name}_sync")).read_bytes()


# Kills ----------------------------------------------------------------------------------------------------------------


def until_killed(rank: int, world_size: int, folder: str, is_async: bool, moment: float, who: tuple[int, ...]) -> None:
    """Go on from the newest checkpoint and save after each step, until this process is killed at a random moment."""
    state = make_state(rank, "fsdp")
    model = xffl.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), state)
    parts: dict[str, Any] = {"model": model}
    own = Own(0)
    latest = find_latest_checkpoint(folder)
    dist.barrier()  # all have looked
    step = 0 if latest is None else load_checkpoint(latest, parts, state, own={"own": own})["step"]
    assert own.value == step * (rank + 1)
    manager = CheckpointManager(folder, keep_last=2)
    saver = AsyncSaver(state) if is_async else SyncSaver(state)
    end: threading.Timer | None = None
    start = time.monotonic()
    try:
        for turn in range(1000):
            if turn == 1 and rank in who:  # after a whole save: so long does one take here
                end = threading.Timer(moment * (time.monotonic() - start), os.kill, (os.getpid(), signal.SIGKILL))
                end.start()
            step += 1
            own.value = step * (rank + 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            manager.save(saver, step, parts=parts, values={"step": step}, own={"own": own})
            if turn == 0 and isinstance(saver, AsyncSaver):
                saver.wait()
    finally:
        if end is not None:  # the other one may have been killed a little earlier, so that a save failed here
            end.join()


class SyncSaver:
    def __init__(self, state: DistributedState) -> None:
        self.state = state

    def save_checkpoint(self, path: Path, parts: Any, **kwargs: Any) -> None:
        save_checkpoint(path, parts, self.state, **kwargs)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_is_killed_again_and_again_goes_on(tmp_path: Path, is_async: bool) -> None:
    draw = random.Random(3)
    steps = [0]
    for number in range(KILLS):
        # All at once, as a scheduler kills a job, or one of them.
        who = [(0, 1), (0,), (1,)][number % 3]
        given = (str(tmp_path), is_async, draw.uniform(0, 3), who)
        ranks = run_world(2, until_killed, *given, mortal=(0, 1), timeout_s=60)
        assert all("exit code -9" in ranks[rank] for rank in who), ranks
        assert all("CheckpointError" in str(text) or rank in who for rank, text in enumerate(ranks)), ranks
        latest = find_latest_checkpoint(tmp_path)
        assert latest is not None
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        step = load_checkpoint(latest, {"model": model}, ALONE, reset=["own"])["step"]
        assert latest.name == f"step_{step}" and step > steps[-1]
        assert all(bool((value == step).all()) for value in model.state_dict().values())
        assert len(list(latest.parent.glob("step_*"))) <= 3  # one may have been about to go
        steps.append(step)
    assert steps[-1] > KILLS, steps  # some got further than the first one
