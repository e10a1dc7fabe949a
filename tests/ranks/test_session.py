"""Sessions: from the environment and from arguments, alone and together, and every way of leaving one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.worlds import run_world
from xffl.cluster.launch.failure import describe_failure
from xffl.distributed import (
    DistributedState,
    cleanup_distributed_process_group,
    setup_distributed_process_group,
)
from xffl.distributed.startup import meeting
from xffl.distributed.startup.meeting import check_consistent_on_store
from xffl.errors import TopologyError, XfflError

ROOT = Path(__file__).parents[2]


def be_rank(rank: int, world_size: int, port: int, **more: str) -> None:
    """Set what torchrun sets without an agent's store."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **more,
    )


def total() -> int:
    x = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(x)
    return int(x)


def from_environment(rank: int, world_size: int, port: int) -> tuple[Any, ...]:
    be_rank(rank, world_size, port, XFFL_FEDERATED="3,1", XFFL_HSDP="1")
    with xffl.session() as state:
        found = (state.federated_local_size, state.replica_local_size, state.node_local_rank, state.node_world_size)
        assert (state.backend, state.current_device, state.streams) == ("gloo", torch.device("cpu"), None)
        assert (state.init_device, state.meta_initialization) == (None, False)
        assert state._timeouts.session_s == 600 and total() == 10
    assert not dist.is_initialized() and not state.is_federated_scaling_setup() and state.federation is None
    return found


def test_the_environment_fills_what_is_not_given() -> None:
    told = run_world(4, from_environment, free_port(), init=False)
    assert told == [((3, 1), 1, rank, 1) for rank in range(4)]


def from_arguments(rank: int, world_size: int, port: int) -> None:
    be_rank(rank, world_size, port, XFFL_FEDERATED="3,1", XFFL_HSDP="1")
    for _ in range(2):  # the same address serves a second session
        with xffl.session(federated=2, hsdp=2, backend="gloo", device="cpu", timeout_s=50) as state:
            assert (state.federated_local_size, state.replica_local_size) == ((2, 2), 2)
            assert state._timeouts.session_s == 50 and total() == 10
    # Without a federation the world's FSDP or HSDP remains.
    os.environ.update(XFFL_FEDERATED="", XFFL_HSDP="")
    with xffl.session() as state:
        assert state.is_fsdp_setup() and not state.is_federated_scaling_setup() and not state.is_hsdp_setup()
        with pytest.raises(
            xffl.StateError,
            match=r"initialized already; leave init_process_group out of the script.* setters \(docs/port_fsdp2\.rst",
        ):
            setup_distributed_process_group()
        assert total() == 10
    with xffl.session(hsdp=2) as state:
        assert state.replica_world_size == (2,) and not state.is_federated_scaling_setup()


def test_arguments_beat_the_environment() -> None:
    run_world(4, from_arguments, free_port(), init=False)


def given_everything(rank: int, world_size: int, port: int) -> None:
    """Two pretended nodes of 3 and 1 ranks."""
    local = (rank, 3, 0) if rank < 3 else (0, 1, 1)
    state = setup_distributed_process_group(
        rank, world_size, *local, 2, "gloo", "127.0.0.1", port, "cpu", 1, (2, 2), timeout_s=60
    )
    assert (state.node_local_rank, state.node_local_size, state.node_rank, state.node_world_size) == (*local, 2)
    assert (state.master_addr, state.master_port, state.rank, state.world_size) == ("127.0.0.1", port, rank, 4)
    model = [nn.Linear(2, 2)]
    cleanup_distributed_process_group(state, model)
    assert model == [] and not dist.is_initialized() and not state.is_hsdp_setup()
    cleanup_distributed_process_group(state)  # nothing is left to clean up


def test_set_up_and_clean_up() -> None:
    run_world(4, given_everything, free_port(), init=False)


def left_behind(rank: int, world_size: int, port: int) -> None:
    be_rank(rank, world_size, port)
    state = setup_distributed_process_group(device="cpu", timeout_s=8)
    total()
    if rank == 1:
        cleanup_distributed_process_group(state, synchronize=False)
        return
    with pytest.raises(xffl.LaunchError, match=r"rank 0 could not wait for the others before it leaves \(.+\); one of"):
        cleanup_distributed_process_group(state)
    assert not dist.is_initialized()


def test_who_cannot_leave_together_with_the_others_says_so() -> None:
    run_world(2, left_behind, free_port(), init=False)


def single_process(rank: int, world_size: int) -> None:
    for federated, hsdp in ((None, None), (1, None), ((1,), 1), (None, 1)):
        with xffl.session(federated=federated, hsdp=hsdp) as state:
            assert (state.rank, state.world_size, state.master_addr, state.master_port) == (0, 1, None, None)
            assert state.is_node_setup() and total() == 1
            assert state.is_federated_scaling_setup() == (federated is not None)
            mesh = state.hsdp_mesh or state.fsdp_mesh
            assert mesh is not None and mesh.size() == 1
        assert not dist.is_initialized()


def test_a_single_process_needs_no_launcher() -> None:
    run_world(1, single_process, init=False)


def one_cell(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    lines = {"hosts:.": "federated hosts:. puts the only rank into one cell", 1: "federated 1 puts", None: ""}
    for federated, told in lines.items():
        for name, value in (("XFFL_LAUNCHED_CELLS", ""), ("XFFL_LAUNCHED_CELLS", "1"), ("XFFL_REQUIRE_CELLS", "2")):
            os.environ[name] = value
            err = io.StringIO()
            refuses = name == "XFFL_REQUIRE_CELLS"
            refusal = pytest.raises(TopologyError, match="at least 2 cells") if refuses else contextlib.nullcontext()
            with (
                contextlib.redirect_stderr(err),
                refusal,
                xffl.session(federated=federated) as state,
                xffl.FederatedScaling(model, optimizer, state, every=1),
            ):
                pass
            del os.environ[name]
            if refuses:
                assert err.getvalue() == ""
            elif federated is None:
                assert "FederatedScaling has no effect: the job has a single cell" in err.getvalue()
            else:
                assert (told in err.getvalue()) == (value == "") and err.getvalue().count("\n") == (value == "")


def test_a_federation_of_one_cell_is_told_or_refused() -> None:
    run_world(1, one_cell, init=False)


def requiring(cells: str) -> dict[str, Any]:
    os.environ["XFFL_REQUIRE_CELLS"] = cells
    return {"federated": 2}


WRONG: list[tuple[str, Callable[[int], dict[str, Any]], str, tuple[str, ...]]] = [
    ("sum", lambda r: {"federated": (2, 3)}, "TopologyError", ("(2, 3) sum to 5",)),
    ("sum on a rank", lambda r: {"federated": (2, 2 + r // 3)}, "ConfigError", ("different set-ups", "(2, 3)")),
    ("hsdp on a rank", lambda r: {"hsdp": 1 + r % 2}, "ConfigError", ("different set-ups", "hsdp=1", "hsdp=2")),
    ("hsdp", lambda r: {"federated": 2, "hsdp": 4}, "TopologyError", ("(hsdp) 4",)),
    ("device", lambda r: {"device": "cuda:99"}, "ConfigError", ("cuda:99", "does not exist")),
    ("device on a rank", lambda r: {"device": "gpu" if r == 2 else None}, "ConfigError", ("'gpu'", "told by rank 2")),
    ("backend", lambda r: {"backend": "nccl", "device": "cpu"}, "ConfigError", ("'nccl'",)),
    ("backend's name", lambda r: {"backend": "glu"}, "ConfigError", ("'glu' is unknown",)),
    (
        "link",
        lambda r: {"federated": 2, "link_backend": "nccl", "device": "cpu"},
        "ConfigError",
        ("link_backend 'nccl' needs GPUs, but the device is the CPU; leave it out, or give 'gloo' (first told by",),
    ),
    ("link's name", lambda r: {"link_backend": "glu"}, "ConfigError", ("link_backend 'glu' is unknown",)),
    (
        "link on a rank",
        lambda r: {"federated": 2, "backend": "cpu:gloo", "link_backend": "gloo" if r else None},
        "ConfigError",
        ("different set-ups", "link_backend='gloo'", "link_backend=None"),
    ),
    ("streams", lambda r: {"streams": 2, "device": "cpu"}, "ConfigError", ("streams 2",)),
    ("timeout on a rank", lambda r: {"timeout_s": 30 + r // 3}, "ConfigError", ("timeout_s=30", "timeout_s=31")),
    (
        "interface on a rank",
        lambda r: {"ifname": "no0" if r == 1 else None},
        "LaunchError",
        ("'no0' does not", "rank 1"),
    ),
    ("bad timeout on a rank", lambda r: {"timeout_s": -1 if r == 0 else 30}, "ConfigError", ("-1", "told by rank 0")),
    ("cells", lambda r: requiring("3"), "TopologyError", ("at least 3 cells", "federated 2 makes 2")),
    ("cells on a rank", lambda r: requiring("2" if r else "1"), "ConfigError", ("numbers of cells to require", "2")),
    ("cells by a word", lambda r: requiring("two" if r == 1 else ""), "LaunchError", ("XFFL_REQUIRE_CELLS is 'two'",)),
    ("text", lambda r: {"federated": "2;2"}, "ConfigError", ("federated is '2;2'; give sizes like 4,4",)),
    ("replica", lambda r: {"hsdp": "two"}, "ConfigError", ("hsdp is 'two'; give the ranks that hold one copy",)),
]


def try_wrong(rank: int, world_size: int, port: int) -> list[tuple[str, str, float]]:
    be_rank(rank, world_size, port)
    told = []
    for _, arguments, _, _ in WRONG:
        start = time.monotonic()
        try:
            with xffl.session(**{"timeout_s": 100, **arguments(rank)}):
                what = ("nothing", "no error")
        except XfflError as error:
            what = (type(error).__name__, str(error))
        os.environ.pop("XFFL_REQUIRE_CELLS", None)
        told.append((*what, time.monotonic() - start))
        assert not dist.is_initialized()
    # An integer of numpy is the same request as the int of another rank.
    sizes, streams = ((np.int64(2), 2), np.int64(1)) if rank == 1 else ([2, 2], 1)
    with xffl.session(federated=sizes, hsdp=streams, timeout_s=30):  # type: ignore[arg-type]
        assert total() == 10
    return told


def test_wrong_sessions() -> None:
    told = run_world(4, try_wrong, free_port(), init=False)
    for number, (name, _, kind, parts) in enumerate(WRONG):
        answers = {ranks[number][:2] for ranks in told}
        assert len(answers) == 1, (name, answers)
        found, text = answers.pop()
        assert found == kind and all(part in text for part in parts), (name, found, text)
        assert all(ranks[number][2] < 60 for ranks in told), name


class FirstOfAll:
    """A store as a rank sees it that is alone for its first step, and then waits until the other has said all."""

    def __init__(self, store: dist.Store, has_spoken: threading.Event) -> None:
        self._store, self._has_spoken = store, has_spoken

    def compare_set(self, *words: str) -> bytes:
        found: bytes = self._store.compare_set(*words)
        self._has_spoken.set()
        while self._store.add("arrived", 0) == 0 and words[0] != "error":
            time.sleep(0.01)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_rank_with_an_error_is_not_taken_for_one_with_another_set_up() -> None:
    store, has_spoken = dist.HashStore(), threading.Event()
    told: dict[int, str] = {}

    def ask(rank: int, value: str, error: XfflError | None) -> None:
        seen: Any = FirstOfAll(store, has_spoken) if rank == 1 else store
        if rank == 0:
            has_spoken.wait(10)
        with pytest.raises(xffl.ConfigError) as raised:
            check_consistent_on_store(seen, rank, 2, value, error, 10.0)
        told[rank] = str(raised.value)

    threads = [
        threading.Thread(target=ask, args=(0, "device='cpu'", None)),
        threading.Thread(target=ask, args=(1, "None", xffl.ConfigError("device 'gpu' is none"))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert told == dict.fromkeys((0, 1), "device 'gpu' is none (first told by rank 1)")


def test_rank_0_says_who_has_not_come_to_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "TELL_AFTER_S", 0.1)
    with pytest.raises(xffl.errors.LaunchError, match="ranks 1-2 did not come"):
        check_consistent_on_store(dist.HashStore(), 0, 3, "value", None, 0.3)
    assert "rank 0 has waited 0.1 s for all of 3 ranks to meet: ranks 1-2 did not come. " in capsys.readouterr().err


def part_of_a_place(rank: int, world_size: int) -> None:
    for given in ({"rank": 0}, {"world_size": 2}, {"rank": 0, "world_size": 2}, {"group_rank": 0, "rank": 1}):
        with pytest.raises(XfflError):
            setup_distributed_process_group(**given)  # type: ignore[arg-type]
        assert not dist.is_initialized()
    for timeout_s in (0, -1, float("nan"), float("inf"), True, "60", None):
        with pytest.raises(xffl.ConfigError, match="timeout_s"):
            setup_distributed_process_group(timeout_s=timeout_s)  # type: ignore[arg-type]


def test_a_part_of_a_place_is_an_error() -> None:
    run_world(1, part_of_a_place, init=False)


def late(rank: int, world_size: int, port: int) -> str:
    """One rank never comes."""
    be_rank(rank, world_size, port)
    if rank == 1:
        return "elsewhere"
    try:
        with xffl.session(timeout_s=3):
            pass
    except xffl.LaunchError as error:
        return str(error)
    return "no error"


def test_a_rank_that_never_comes() -> None:
    told = run_world(3, late, free_port(), init=False, timeout_s=60.0)
    assert told[1] == "elsewhere"
    assert all("of 3" in told[rank] for rank in (0, 2)), told


class Stop(Exception):
    """What a user's script raises."""


def leaves_by(rank: int, world_size: int, port: int, kind: type[BaseException]) -> tuple[str, bool, float]:
    """Rank 1 fails inside the session while the others wait in a collective for it."""
    be_rank(rank, world_size, port)
    start = time.monotonic()
    try:
        with xffl.session(federated=2, hsdp=1, timeout_s=60):
            if rank == 1:
                raise kind("planted")
            dist.barrier()
            dist.barrier()
        what = "nothing"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the test asks for
        what = type(error).__name__
    return what, dist.is_initialized(), time.monotonic() - start


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_leaving_by_an_exception_keeps_nobody(kind: type[BaseException]) -> None:
    told = run_world(4, leaves_by, free_port(), kind, init=False)
    assert told[1][0] == kind.__name__
    for what, is_initialized, seconds in told:
        assert what != "nothing" and not is_initialized and seconds < 50, told


def one_dies(rank: int, world_size: int, port: int) -> tuple[str, float]:
    be_rank(rank, world_size, port)
    with xffl.session(federated=2, hsdp=1, timeout_s=60) as state:
        start = time.monotonic()
        if rank == 3:
            os._exit(17)
        try:
            assert state.federation is not None
            for _ in range(3):
                dist.all_reduce(torch.ones(4), group=state.federation)
                dist.all_reduce(torch.ones(4))
            what = "nothing"
        except RuntimeError:
            what = "told"
        dist.destroy_process_group()  # the world is broken: a barrier at the end of the session could not work
    return what, time.monotonic() - start


def cell_is_named(rank: int, world_size: int, port: int) -> str:
    be_rank(rank, world_size, port)
    try:
        with xffl.session(federated=(1, 1), timeout_s=20):
            if rank == 1:
                os._exit(17)
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return describe_failure(error).headline
    return "nothing was lost"


def test_a_job_of_all_cells_names_the_cell_of_a_rank_that_was_lost() -> None:
    headline, _ = run_world(2, cell_is_named, free_port(), init=False, mortal=[1])
    assert "nothing was heard since of rank 1 (cell 1), which was killed" in headline


def test_a_dead_rank_is_noticed_within_the_timeout() -> None:
    *told, dead = run_world(4, one_dies, free_port(), init=False, mortal=[3])
    assert "exit code 17" in dead
    assert all(what == "told" and seconds < 50 for what, seconds in told), told


SCRIPT = """
    import sys, torch, torch.distributed as dist, xffl
    torch.set_num_threads(1)
    with xffl.session(federated=1, timeout_s=60) if sys.argv[1] == "cells" else xffl.session(timeout_s=60) as state:
        model = xffl.shard(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)), state)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("left", flush=True)
    if sys.argv[1] == "raise":
        with xffl.session(timeout_s=60):
            raise SystemExit(3)
"""


def run_two(words: list[str], folder: Path = ROOT) -> tuple[list[int], list[str], list[str]]:
    """Run a command as both ranks of a world; return exit codes, standard output and errors."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "GROUP_WORLD_SIZE": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, *words]
        ranks.append(subprocess.Popen(command, env=environ, cwd=folder, text=True, **pipes))  # type: ignore[call-overload]
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [process.returncode for process in ranks], [out for out, _ in outputs], [err for _, err in outputs]


@pytest.mark.parametrize("way, code", [("cells", 0), ("raise", 3)])
def test_processes_exit_with_their_own_code(way: str, code: int) -> None:
    """FSDP2 over gloo is known to abort at exit (code -6) where a rank leaves while another still talks to it."""
    codes, outs, errs = run_two(["-c", textwrap.dedent(SCRIPT), way])
    assert codes == [code, code], errs
    assert all("left" in out for out in outs)


LAST_WORDS = """
import torch, torch.distributed as dist, xffl
from xffl.errors import ConfigError
with xffl.session(timeout_s=60) as state:
    if "lost" in WAY:
        dist.barrier()
        if state.rank == 1:
            raise ValueError("mine")
        dist.all_reduce(torch.ones(1))
raise ConfigError("of all ranks")
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "xffl", "exec", "train.py"]])
def test_an_error_of_all_ranks_after_their_session_is_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"WAY = 'after'{LAST_WORDS}")
    codes, _, errs = run_two(words, tmp_path)
    assert 0 not in codes
    assert sorted(errs)[0] == "" and sorted(errs)[1].startswith("xffl: ConfigError: of all ranks (at"), errs
    assert "".join(errs).count("\n") == 1


def test_who_has_lost_a_rank_names_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"WAY = 'lost'{LAST_WORDS}")
    codes, _, errs = run_two(["-m", "xffl", "exec", "train.py"], tmp_path)
    assert codes == [1, 1] and "xffl: rank 1 failed with ValueError: mine" in errs[1], errs
    assert errs[0].startswith("xffl: rank 0 lost another rank: ") and errs[0].count("\n") == 1, errs
    assert errs[0].endswith("; rank 1 ended first, with ValueError: mine\n"), errs


def test_the_state_is_of_the_documented_class() -> None:
    assert DistributedState is xffl.DistributedState


ENDINGS = """
import os, sys
from contextlib import ExitStack, closing
import torch, xffl

def cells():
    with xffl.session(federated=1, backend="gloo", device="cpu") as state:
        yield state

for way in sys.argv[1:]:  # each in a process of its own, but torch is imported once
    child = os.fork()
    if child == 0:
        os.dup2(os.open(way, os.O_WRONLY | os.O_CREAT), 2)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
if way == "never left":
    stack = ExitStack()
    state = stack.enter_context(xffl.session(federated=1, backend="gloo", device="cpu"))
elif way == "a generator":
    for state in cells():
        raise ValueError("mine")
elif way == "closing":
    with closing(cells()) as made:
        next(made)
        raise ValueError("mine")
else:
    with ExitStack() as stack:
        state = stack.enter_context(xffl.session(federated=1, backend="gloo", device="cpu"))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stack.enter_context(xffl.FederatedScaling(model, optimizer, state, every=2))
        assert "jsonargparse" not in sys.modules, "a tenth of what a rank imports, for nothing"
        raise ValueError("mine")
raise ValueError("mine")
"""


def test_an_error_around_a_session_is_the_only_one(tmp_path: Path) -> None:
    ways = ["never left", "a generator", "closing", "a stack"]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("XFFL_")}
    environ["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(
        [sys.executable, "-c", ENDINGS, *ways],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert ran.stdout.split() == ["1"] * len(ways), ran.stderr
    for way in ways:
        told = (tmp_path / way).read_text()
        assert told.count("Traceback") == 1 and told.endswith("ValueError: mine\n"), way
        assert "Exception ignored" not in told, way
