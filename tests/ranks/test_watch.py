"""What a run says of itself: calls that some ranks have not made, the script's collectives, training without rounds."""

from __future__ import annotations

import gc
import io
import itertools
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DistributedSampler

import xffl
from tests.ports import free_port
from tests.ranks.test_state import new_state
from tests.worlds import be_launched, run_world
from xffl.callers import find_caller
from xffl.cluster.launch import failure
from xffl.distributed import DistributedState
from xffl.distributed.failures import waits
from xffl.distributed.failures.long_waits import LongWait
from xffl.distributed.failures.world_store import clone_store

ROOT = Path(__file__).parents[2]


class _Told(io.StringIO):
    """Standard error that lets the other ranks go on once something was written."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip():
            self._store.set("told", "")
        return count


def _late(rank: int, store: dist.Store, call: Callable[[], Any]) -> str:
    """Make a call on rank 0 first, on the others once rank 0 has said that it waits; return what this rank has said."""
    told = _Told(store)
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


def waiting_ranks(rank: int, world_size: int, file: str) -> list[str]:
    state = new_state(rank, world_size)
    store = dist.FileStore(file, world_size)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Any] = []  # where it is collected, it says that it was not entered
    said = [
        _late(rank, store, lambda: state.set_federated_scaling((1, 1))),
        _late(rank, store, lambda: xffl.shard(model, state)),
        _late(rank, store, lambda: kept.append(xffl.FederatedScaling(model, optimizer, state, every=1))),
        _late(rank, store, lambda: xffl.Aggregator(model, state).aggregate()),
    ]
    said.append(_late(rank, store, state.unset_federated_scaling))
    return said


def test_a_rank_that_waits_in_a_call_of_all_ranks_names_it(tmp_path: Path) -> None:
    first, second = run_world(2, waiting_ranks, str(tmp_path / "store"))
    calls = ["set_federated_scaling", "shard", "FederatedScaling", "Aggregator", "unset_federated_scaling"]
    for text, call in zip(first, calls, strict=True):
        assert f"rank 0 has waited 0.05 s in {call} at {__file__}:" in text, text
        assert "every rank must make this call" in text
    assert second == [""] * len(calls)


def many_waiting_ranks(rank: int, world_size: int) -> str:
    """Let rank 3 come to two calls when each other rank has told of its wait, or left that to another one."""
    state = new_state(rank, world_size)
    lines = ""
    clone = clone_store("no store")
    tell = LongWait.tell
    for number in range(2):  # of the second wait the ranks tell as of the first
        told = io.StringIO()

        def tell_and_note(wait: LongWait, seconds: float, number: int = number) -> None:
            tell(wait, seconds)
            clone.set(f"told {number} {rank}", "")

        dist.barrier()  # who comes later than others by as much is told of, too
        soon = mock.patch.object(waits, "TELL_AFTER_S", 1.5)
        with soon, mock.patch.object(LongWait, "tell", tell_and_note), redirect_stderr(told):
            if rank == 3:
                clone.wait([f"told {number} {other}" for other in range(3)], timedelta(seconds=30))
            state.set_federated_scaling((1, 1, 1, 1))
        state.unset_federated_scaling()
        lines += told.getvalue()
    return lines


def test_of_ranks_that_wait_in_the_same_call_one_tells() -> None:
    told = run_world(4, many_waiting_ranks)
    lines = [line for text in told for line in text.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert re.match(r"xffl: rank [012] \(and 2 more\) has waited 1.5 s in set_federated_scaling at ", line), line
        assert "for others of 4 ranks: rank 3 has not come: every rank must make this call" in line


@pytest.mark.parametrize(
    ("folder", "is_script"),
    [
        (sys.prefix, True),  # a virtual environment made in the folder of a project
        (f"{sys.base_prefix}/share/project", True),
        *((sysconfig.get_path(kind), False) for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    ],
)
def test_scripts_beside_the_libraries_of_python_are_scripts(folder: str, is_script: bool) -> None:
    frames: dict[str, Any] = {}
    exec(compile("import sys; frame = sys._getframe()", f"{folder}/train.py", "exec"), frames)
    place = find_caller(frames["frame"]).place
    assert place is not None and place.startswith(f"{folder}/train.py:") == is_script


ALIAS = dist.all_reduce  # as "from torch.distributed import all_reduce" at the top of a script


def _collectives_of_a_script(folder: str) -> list[tuple[str, Callable[[], Any]]]:
    """Calls over the default group, each with the words of its report."""
    size = dist.get_world_size()
    x = torch.ones(2)
    rows = [torch.zeros(2) for _ in range(size)]
    is_first = dist.get_rank() == 0
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (size,))
    numbers = itertools.count()
    return [
        ("calls all_reduce over", lambda: dist.all_reduce(x)),
        ("calls all_reduce over", lambda: ALIAS(x)),
        ("calls all_reduce over", lambda: dist.all_reduce(x, dist.ReduceOp.SUM, world)),
        ("calls all_reduce over", lambda: dist.all_reduce(x, group=world, async_op=True).wait()),
        ("calls broadcast over", lambda: dist.broadcast(x, src=0)),
        ("calls reduce over", lambda: dist.reduce(x, dst=0)),
        ("calls gather over", lambda: dist.gather(x, rows if is_first else None)),
        ("calls scatter over", lambda: dist.scatter(x, rows if is_first else None)),
        ("calls all_gather over", lambda: dist.all_gather(rows, x)),
        ("calls all_gather_into_tensor over", lambda: dist.all_gather_into_tensor(torch.zeros(2 * size), x)),
        ("calls all_to_all_single over", lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size))),
        ("calls barrier over", dist_barrier_of_script),
        ("calls monitored_barrier over", lambda: dist.monitored_barrier()),
        ("calls broadcast_object_list over", lambda: dist.broadcast_object_list([1], src=0)),
        ("calls all_gather_object over", lambda: dist.all_gather_object([None] * size, 1)),
        ("calls gather_object over", lambda: dist.gather_object(1, [None] * size if is_first else None)),
        ("calls scatter_object_list over", lambda: dist.scatter_object_list([None], [1] * size if is_first else None)),
        ("calls all_reduce over", lambda: DTensor.from_local(x, mesh, [Partial()]).full_tensor()),
        ("calls all_reduce over", lambda: dist.nn.functional.all_reduce(x)),
        ("makes a DistributedSampler for", lambda: DistributedSampler(range(8))),  # type: ignore[arg-type]
        (
            "in save of torch.distributed.checkpoint) over",
            lambda: dcp.save({"x": x}, checkpoint_id=f"{folder}/{next(numbers)}"),
        ),
        (
            "in load of torch.distributed.checkpoint) over",
            lambda: dcp.load({"x": x}, checkpoint_id=f"{folder}/0"),
        ),
    ]


def _advice(words: str) -> str:
    """Return what a report says to give, by its words."""
    if "torch.distributed.checkpoint" in words:
        return f"; give process_group=state.federation to {words.split()[1]}, and a folder to each cell ("
    if "DistributedSampler" in words:
        return "; give num_replicas=state.cell_size and rank=state.cell_rank, and data of the cell's own, or use "
    name = words.split()[1]
    root = ""
    if name.startswith(("broadcast", "scatter")):
        root = " and group_src=0"
    elif name in ("reduce", "gather", "gather_object"):
        root = " and group_dst=0"
    return f"; give group=state.federation{root} for the ranks of this cell ("


def dist_barrier_of_script() -> None:
    dist.barrier()


def _said(call: Callable[[], Any]) -> str:
    told = io.StringIO()
    with redirect_stderr(told):
        call()
    return told.getvalue()


def _follow_advice(state: xffl.DistributedState, folder: str) -> None:
    """Make calls with a root as the reports say; in the second cell rank 0 of the world is in no group of it."""
    x = torch.ones(2)
    group, size, is_root = state.federation, state.cell_size, state.cell_rank == 0
    dist.broadcast(x, group=group, group_src=0)
    dist.reduce(x, group=group, group_dst=0)
    dist.gather(x, [torch.zeros(2) for _ in range(size)] if is_root else None, group=group, group_dst=0)
    dist.scatter(x, [torch.zeros(2) for _ in range(size)] if is_root else None, group=group, group_src=0)
    dist.broadcast_object_list([1], group=group, group_src=0)
    dist.gather_object(1, [None] * size if is_root else None, group=group, group_dst=0)
    dist.scatter_object_list([None], [1] * size if is_root else None, group=group, group_src=0)
    own = f"{folder}/cell_{state.cell}"
    dcp.save({"x": x}, checkpoint_id=own, process_group=group)
    dcp.load({"x": x}, checkpoint_id=own, process_group=group)


def over_the_world(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    os.environ["XFFL_CHECK_WORLD"] = "1"
    originals = [dist.all_reduce, DistributedSampler.__init__, dist.broadcast_object_list]
    state = new_state(rank, world_size)
    state.set_federated_scaling((2, 1))
    model = nn.Linear(2, 2)
    pairs = []
    for words, call in _collectives_of_a_script(folder):
        pairs.append((words, _said(call)))
        again = _said(call)
        assert again == "", f"once a place: {words}: {again}"

    def own() -> None:
        dist.all_reduce(torch.ones(2), group=state.federation)
        dist.all_gather_object([None] * dist.get_world_size(state.federation), 1, group=state.federation)
        sampler = DistributedSampler(
            range(8),  # type: ignore[arg-type]
            num_replicas=state.cell_size,
            rank=state.cell_rank,
        )
        assert len(sampler) == 8 // state.cell_size
        _follow_advice(state, folder)
        spread = xffl.shard(model, state)
        spread(torch.full((1, 2), 1.0 + rank)).sum().backward()
        optimizer = torch.optim.SGD(spread.parameters(), lr=0.1)
        with xffl.FederatedScaling(spread, optimizer, state, every=1):
            optimizer.step()
        xffl.Aggregator(spread, state).aggregate()

    pairs.append(("", _said(own)))
    state.unset_federated_scaling()
    assert originals == [dist.all_reduce, DistributedSampler.__init__, dist.broadcast_object_list]
    assert ALIAS is dist.all_reduce
    pairs.append(("", _said(lambda: dist.all_reduce(torch.ones(1)))))
    os.environ["XFFL_CHECK_WORLD"] = "0"
    state.set_federated_scaling((2, 1))
    pairs.append(("", _said(lambda: dist.all_reduce(torch.ones(1)))))
    state.unset_federated_scaling()
    os.environ["XFFL_CHECK_WORLD"] = "1" if rank else "yes"
    try:
        state.set_federated_scaling((2, 1))
    except xffl.errors.ConfigError as error:
        pairs.append(("XFFL_CHECK_WORLD is 'yes'", str(error)))
    return pairs


def test_collectives_of_the_script_over_all_cells_are_reported(tmp_path: Path) -> None:
    first, *others = run_world(3, over_the_world, str(tmp_path / "saved"))
    for words, said in first:
        assert words in said and bool(words) == bool(said), (words, said)
        assert " the default group, " not in said or _advice(words) in said, (words, said)
        assert said.count("xffl: ") == said.count(f"xffl: {__file__}:") == int(" the default group, " in said)
    assert "XFFL_CHECK_WORLD is 'yes'" in first[-1][1]
    for said in others:
        assert not any("xffl: " in text for _, text in said[:-1])  # one rank reports
        assert said[-1] == first[-1]


def _train(state: DistributedState, ends: str) -> None:
    """Train a model in one of several ways, most of which must stay silent."""
    model = xffl.shard(nn.Linear(2, 2), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
        optimizer.step()

    if ends == "no round":
        step()
    elif ends == "never entered":
        xffl.FederatedScaling(model, optimizer, state, every=1)
        gc.collect()
        step()
    elif ends == "held and never entered":
        state.kept = xffl.FederatedScaling(model, optimizer, state, every=1)  # type: ignore[attr-defined]
        step()
    elif ends == "steps outside of the block":
        step()
        with xffl.FederatedScaling(model, optimizer, state, every=1):
            pass
    elif ends == "scaling":
        with xffl.FederatedScaling(model, optimizer, state, every=100):
            step()
    elif ends == "left by an error that is caught":
        with suppress(KeyError), xffl.FederatedScaling(model, optimizer, state, every=100):
            step()
            raise KeyError
    elif ends == "loop of no steps":
        with xffl.FederatedScaling(model, optimizer, state, every=1):
            pass
    elif ends == "by hand":
        step()
        xffl.Aggregator(model, state).aggregate()
    elif ends == "delayed by hand":
        step()
        xffl.Aggregator(model, state, overlap=True).aggregate_async().merge()
    elif ends == "no training":
        model(torch.ones(1, 2))
    elif ends == "error":
        xffl.FederatedScaling(model, optimizer, state, every=1)
        step()
        raise ZeroDivisionError


NO_ROUND = "the session of 2 cells ends without a round"
NEVER = "the FederatedScaling of "
ENDS = {
    "no round": (NO_ROUND,),
    "never entered": (NEVER, NO_ROUND),
    "held and never entered": (NEVER, NO_ROUND),
    "steps outside of the block": (NO_ROUND,),
    "left by an error that is caught": (NO_ROUND,),
    "scaling": (),
    "loop of no steps": (),
    "by hand": (),
    "delayed by hand": (),
    "no training": (),
    "error": (),
}


def sessions(rank: int, world_size: int, port: int) -> dict[str, str]:
    be_launched(rank, world_size, port)
    said = {}
    for ends in ENDS:
        told = io.StringIO()
        with redirect_stderr(told), suppress(ZeroDivisionError), xffl.session(federated=1, device="cpu") as state:
            _train(state, ends)
        gc.collect()
        said[ends] = told.getvalue()
    with redirect_stderr(io.StringIO()) as told, xffl.session(device="cpu") as state:  # one cell
        _train(state, "no round")
    said["one cell"] = told.getvalue()
    optimizers = vars(sys.modules["torch.optim.optimizer"])
    assert not optimizers["_global_optimizer_post_hooks"]
    return said


def test_a_session_that_trains_without_a_round_says_so() -> None:
    first, second = run_world(2, sessions, free_port(), init=False)
    assert not any(second.values()), second
    assert first.pop("one cell") == ""
    for ends, parts in ENDS.items():
        lines = first[ends].splitlines()
        assert len(lines) == len(parts), (ends, lines)
        assert all(part in line for part, line in zip(parts, lines, strict=True)), (ends, lines)
        assert all(f"{__file__}:" in line for line in lines if NEVER in line)
        # Nobody sees what a script does with the groups of its state.
        assert all("unless the script averages the cells itself" in line for line in lines if NO_ROUND in line)


def lone_cells(rank: int, world_size: int, folder: str) -> dict[str, str]:
    said = {}
    for name, environ in {"export": {"XFFL_EXPORT": f"{folder}/out"}, "none asked for": {}}.items():
        for ends in ("no round", "scaling"):
            with (
                mock.patch.dict(os.environ, {"XFFL_CELL": "0/2", **environ}),
                redirect_stderr(io.StringIO()) as told,
                xffl.session(device="cpu") as state,
            ):
                _train(state, ends)
            said[f"{name}, {ends}"] = told.getvalue()
    return said


def test_a_cell_over_files_that_exports_nothing_says_so(tmp_path: Path) -> None:
    (said,) = run_world(1, lone_cells, str(tmp_path), init=False)
    assert f"ends without an export to {tmp_path}/out" in said.pop("export, no round")
    assert not any(said.values()), said


SCRIPT = """
import torch, xffl
from xffl.distributed import DistributedState
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
state = DistributedState()
state.set_global("gloo", "cpu", None, None, 0, 1)
state.set_federated_scaling(1)
model = torch.nn.Linear(2, 2)
scaling = xffl.FederatedScaling(model, torch.optim.SGD(model.parameters(), lr=0.1), state, every=1)
{}
"""


@pytest.mark.parametrize(("line", "is_said"), [("", True), ("1 / 0", False)])
def test_without_a_session_the_end_of_the_process_tells_of_rounds_that_were_never_entered(
    line: str, is_said: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line))
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (f"the FederatedScaling of {script}:9 was never entered" in ended.stderr) == is_said, ended.stderr


def _waits_in_vain(rank: int, world_size: int) -> tuple[str, str]:
    """Let rank 2 stay away from the call in which rank 0 and rank 3 wait, and rank 1 wait in another one."""
    told = io.StringIO()
    group = dist.new_group(timeout=timedelta(seconds=3))
    with mock.patch.multiple(waits, TELL_AFTER_S=1.0, NOTE_AFTER_S=0.2), redirect_stderr(told):
        if rank == 2:
            return "", ""
        what = "other values" if rank == 1 else "values"
        with pytest.raises(RuntimeError, match="[Tt]imed? ?out") as late, waits.NamedWait(what, group):
            dist.barrier(group)
    return str(late.value), told.getvalue()


def test_who_does_not_come_is_named() -> None:
    found = run_world(4, _waits_in_vain, timeout_s=60.0)
    elsewhere = "rank 1 waits in a call that compares other values at "
    for rank, others in ((0, elsewhere), (3, elsewhere), (1, "rank 0 waits in a call that compares values at ")):
        error, told = found[rank]
        assert f"; rank 2 has not come, {others}{__file__}:" in error, error
        who = f"xffl: rank {rank}{' (and 1 more)' if rank != 1 else ''} has waited 1 s in "
        assert not told or (who in told and f"rank 2 has not come, {others}" in told), told
    told_by = [rank for rank in range(4) if found[rank][1]]
    assert told_by in ([0, 1], [1, 3]), "of the two in the same call one tells for both"
    assert found[2] == ("", "")


def _ends_alike(rank: int, world_size: int, port: int) -> list[str]:
    """Fail as all ranks do: in the set-up, in a call of all ranks, and by checks that each makes itself."""
    be_launched(rank, world_size, port)

    def refused_set_up() -> None:
        with xffl.session(federated=(2, 1)):
            pass

    def refused_call() -> None:
        with xffl.session(federated=(1, 1)) as state:
            xffl.Aggregator(nn.Linear(2, 2 + rank), state)

    def refused_argument() -> None:
        with xffl.session() as state:
            xffl.Aggregator(nn.Linear(2, 2), state, combine="no such combiner")

    def refused_on_one() -> None:
        with xffl.session():
            if rank == 1:
                raise xffl.ConfigError("rank 1 alone")
            raise KeyError("rank 0 alone")

    def wrapped_on_one() -> None:
        with xffl.session():
            if rank == 1:
                try:
                    raise KeyError("the script's own")
                except KeyError as cause:
                    raise xffl.ConfigError("wrapped by the script") from cause

    said = []
    with mock.patch.object(failure, "QUIET_S", 0.0):
        for fail in (refused_set_up, refused_call, refused_argument, refused_on_one, wrapped_on_one):
            told = io.StringIO()
            with pytest.raises((xffl.XfflError, KeyError)) as failed:
                fail()
            with redirect_stderr(told):
                sys.excepthook(failed.type, failed.value, failed.tb)  # as Python does at the end of the script
            said.append(told.getvalue())
    return said


def test_an_error_that_all_ranks_raise_is_told_once() -> None:
    first, second = run_world(2, _ends_alike, free_port(), init=False, timeout_s=90.0)
    for number, told in enumerate(("sum to 3", "differs", "no such combiner")):
        lines = (first[number] + second[number]).splitlines()
        assert len(lines) == 1 and told in lines[0], lines
        assert "xffl: " in lines[0] and f"(at {__file__}:" in lines[0].replace("(at tests/", f"(at {ROOT}/tests/")
    assert "Traceback" in first[3] and "KeyError" in first[3]
    # What one rank raises alone keeps its traceback, and what led to it; who only lost that rank says one line.
    for number, text, tracebacks in ((3, "rank 1 alone", 1), (4, "wrapped by the script", 2)):
        assert second[number].count("Traceback (most recent call last)") == tracebacks, second[number]
        assert second[number].splitlines()[-1].removeprefix("[rank1]: ").startswith(f"xffl: ConfigError: {text} (at ")
    assert 'KeyError: "the script\'s own"' in second[4]
    assert "xffl: LaunchError: rank 0 could not wait for the others" in first[4]
    assert len(first[4].splitlines()) == 1
