"""Worlds for tests: spawned gloo ranks, and a fake group for thousands of ranks in one process.

This is the only importer of torch's private test code; tests/nccl uses other private parts. A rank is forked from a
server that has torch and xffl imported, so a world of four starts in a fraction of a second.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.ports import free_port

__all__ = ["WorldError", "be_launched", "fake_world", "run_script", "run_world"]

PRELOAD = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel"),
    "torch.distributed.pipelining",
    *(
        "pytest",
        "xffl.aggregation.federations.hierarchical",
        "xffl.aggregation.federated_scaling",
        "xffl.parallel.spread",
    ),
    *("sklearn.datasets", "torchmetrics", "xffl.distributed.session", "xffl.training.trainer"),
    # What registered names, secure sums and profiles import when they are first asked for.
    *("docstring_parser", "cryptography.hazmat.primitives.kdf.hkdf", "torch.utils.serialization.config"),
    # Where DeepSpeed is installed: its first engine imports torch's compiler through it, seconds on every rank.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tests.huge_pages",  # the last: it moves what the others have made
]
GRACE_S = 0.5
"""How long the other ranks may still tell what happened to them after the first one failed."""


class WorldError(AssertionError):
    """Report the rank that failed first, with its traceback."""


@dataclass(frozen=True)
class _Report:
    """What a rank tells at its end; ``moment`` orders the failures of a world (one clock for all processes)."""

    moment: float
    result: Any = None
    failure: str | None = None


def run_world(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    init: bool = True,
    mortal: Collection[int] = (),
) -> list[Any]:
    """Run a function on every rank of a gloo world over a file store, and return the results by rank.

    :param world_size: Number of processes.
    :param fn: A function of a module, called as ``fn(rank, world_size, *args)``.
    :param args: Further arguments, pickled.
    :param timeout_s: Deadline of the whole world; half of it is the timeout of the process group.
    :param init: Whether to make the default process group, and to destroy it after a barrier at the end.
    :param mortal: Ranks that may die or fail: their result is ``None``, or the text of their traceback, and no barrier
        is held at the end.
    :return: What ``fn`` returned, by rank.
    :raises WorldError: if another rank fails, dies or is late; every rank is killed then.
    """
    context = _started_server()
    # Ranks have the environment of the server, which was started before this test has set its own.
    environ = {name: os.environ[name] for name in ("XFFL_JOURNAL",) if name in os.environ}
    deadline = time.monotonic() + timeout_s
    processes: list[ForkServerProcess] = []
    ends: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="xffl-world-") as folder:
        store = os.path.join(folder, "store") if init else None
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                call = (sender, rank, world_size, fn, args, store, timeout_s / 2, not mortal, environ)
                process = context.Process(target=_rank_main, args=call, name=f"rank {rank}", daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                ends.append(receiver)
            return _collect(processes, ends, deadline, timeout_s, frozenset(mortal))
        finally:
            for process in processes:
                process.kill()
            for process, end in zip(processes, ends, strict=False):
                process.join()
                process.close()
                end.close()


def run_script(
    world_size: int, words: list[str], folder: Path, timeout_s: float = 240.0, **environ: str
) -> list[tuple[int, str]]:
    """Run a script as ranks that a launcher has started, which need not import torch, each by itself, for seconds.

    :param world_size: Number of processes, all on one node.
    :param words: What follows ``python`` on a command line: a script or ``-m`` and a module, and arguments.
    :param folder: Where the ranks are.
    :param timeout_s: Deadline of all ranks.
    :param environ: Further variables, such as ``XFFL_FEDERATED``.
    :return: Exit code and standard output, by rank.
    """
    port = free_port()
    return run_world(world_size, _be_script, port, words, str(folder), environ, init=False, timeout_s=timeout_s)


def be_launched(rank: int, world_size: int, port: int) -> None:
    """Give this process what a launcher tells a rank: all are on one node, and meet at a port of it.

    It has a token, too, without which no cell of an elastic run begins.
    """
    os.environ.setdefault("XFFL_TOKEN", "the run's own token")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}})


def _be_script(
    rank: int, world_size: int, port: int, words: list[str], folder: str, environ: dict[str, str]
) -> tuple[int | str, str]:
    """Be a rank that runs a script."""
    be_launched(rank, world_size, port)
    os.environ.update(environ)
    os.chdir(folder)
    out = io.StringIO()
    code: int | str | None = None
    with redirect_stdout(out):
        try:
            if words[0] == "-m":
                sys.path.insert(0, folder)
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(words[0]).absolute().parent))
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    return code or 0, out.getvalue()


@cache
def _started_server() -> ForkServerContext:
    """Return the context whose server has imported what it preloads, which is no part of any world's time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    first = context.Process(target=os.getpid)  # a process is forked once the imports are done
    first.start()
    first.join()
    first.close()
    return context


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process one rank of a world whose collectives move nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _rank_main(
    sender: Connection,
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    store: str | None,
    timeout_s: float,
    together: bool,
    environ: dict[str, str],
) -> None:
    """Be one rank: run the function, tell the outcome, and leave without the interpreter's finalization."""
    gc.freeze()  # what the server has imported need not be looked through again by each rank
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(environ)
    code = 0
    try:
        if store is not None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        result = fn(rank, world_size, *args)
        if store is not None and together and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        report = _Report(time.monotonic(), result)
    except BaseException:  # noqa: BLE001 - the parent raises it: whatever ends a rank is the test's failure
        report = _Report(time.monotonic(), failure=traceback.format_exc())
        code = 1
    try:
        told = pickle.dumps(report)  # not send(): torch would share a tensor's memory, which dies with this process
    except Exception:  # noqa: BLE001 - pickle has no common base for what it raises
        told = pickle.dumps(_Report(time.monotonic(), failure=traceback.format_exc()))
        code = 1
    sender.send_bytes(told)
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _collect(
    processes: list[ForkServerProcess],
    ends: list[Connection],
    deadline: float,
    timeout_s: float,
    mortal: frozenset[int],
) -> list[Any]:
    """Wait for every rank's report, or for the first failure."""
    reports: dict[int, _Report] = {}
    waiting = dict(enumerate(ends))
    failed: set[int] = set()
    while waiting:
        limit = deadline - time.monotonic()
        if failed:
            limit = min(limit, GRACE_S)
        ready = wait(list(waiting.values()), timeout=max(limit, 0.0))
        if not ready:
            break
        for rank in [rank for rank, end in waiting.items() if end in ready]:
            reports[rank] = _receive(waiting.pop(rank), processes[rank])
            if reports[rank].failure is not None and rank not in mortal:
                failed.add(rank)
    if failed:
        raise WorldError(_story(reports, failed, len(ends)))
    if waiting:
        raise WorldError(f"ranks {sorted(waiting)} of {len(ends)} did not end within {timeout_s:g} s")
    return [reports[rank].failure or reports[rank].result for rank in range(len(ends))]


def _receive(end: Connection, process: ForkServerProcess) -> _Report:
    """Take a rank's report. A rank without one died by itself, so it comes before all that others tell."""
    try:
        report: _Report = pickle.loads(end.recv_bytes())
    except EOFError:
        process.join()
        return _Report(0.0, failure=f"the process died with exit code {process.exitcode}\n")
    return report


def _story(reports: dict[int, _Report], failed: set[int], world_size: int) -> str:
    """Tell the first failure in full and the others in a line each."""
    first, *others = sorted(failed, key=lambda rank: reports[rank].moment)
    lines = [f"rank {first} of {world_size} failed first:", "", str(reports[first].failure)]
    for rank in others:
        lines.append(f"rank {rank}: {str(reports[rank].failure).strip().splitlines()[-1]}")
    return "\n".join(lines)
