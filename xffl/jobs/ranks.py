"""Ranks of a job: started here, by srun or on other hosts, and watched until they end; or this process as one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from xffl.cluster.launch.failure import ExitCode, FailureRecord, RankFailure, record_failure
from xffl.cluster.launch.job_layout import JobLayout, LaunchOptions
from xffl.cluster.launch.local import launch_local
from xffl.cluster.launch.logs import following, make_log_dir
from xffl.cluster.launch.runner import be_rank
from xffl.jobs.request import JobRequest, Output

__all__ = ["be_one_rank", "follow_logs", "start_ranks", "tell_failure"]


def be_one_rank(request: JobRequest) -> int:
    """Do what this process is to do as a rank, which a launcher has started."""
    assert request.work is not None
    os.environ.update(request.variables)
    log_dir = None if request.output.log_dir is None else make_log_dir(request.output.log_dir)
    return be_rank(request.work, timeout_s=request.limits.timeout_s, log_dir=log_dir)


def start_ranks(request: JobRequest) -> int:
    """Start the ranks, wait for them, and tell how the job has ended."""
    if request.stale is not None:
        shutil.rmtree(request.stale, ignore_errors=True)
    layout, output = request.started.layout, request.output
    with ExitStack() as stack:
        log_dir = follow_logs(output, stack, layout, is_local=request.started.kind == "local")
        ended = _launch(
            request,
            LaunchOptions(
                environ=request.variables,
                timeout_s=request.limits.timeout_s,
                grace_s=request.limits.grace_s,
                log_dir=log_dir,
                is_labelled=output.is_merged and log_dir is None,
                source=request.source,
            ),
        )
    code = _tell_end(ended, request)
    has_failed = code not in (ExitCode.OK, ExitCode.REFUSED, ExitCode.PREEMPTED)
    if has_failed and request.resumes and request.home is not None:
        from xffl.checkpoint.manager import find_latest_checkpoint

        if (latest := find_latest_checkpoint(request.home)) is not None:
            print(f"xffl: the same command continues from {latest}", file=sys.stderr)
    return code


def follow_logs(output: Output, stack: ExitStack, layout: JobLayout, *, is_local: bool) -> str | None:
    """Return the folder of the ranks' logs, if any, and show them while the stack is open, if that is asked for."""
    log_dir = None if output.log_dir is None else make_log_dir(output.log_dir)
    if output.is_merged and log_dir is None and is_local:
        log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="xffl-logs-"))
    if output.is_merged and log_dir is not None:
        stack.enter_context(following(Path(log_dir), sys.stdout.buffer, layout.topology.world_size))
    return log_dir


def _launch(request: JobRequest, options: LaunchOptions) -> RankFailure | int:
    place = request.started
    if place.kind == "local":
        return launch_local(place.layout.topology.world_size, request.command, options)
    if place.kind == "slurm":
        from xffl.cluster.launch.srun import launch_srun

        return launch_srun(place.layout, request.command, options)
    from xffl.cluster.launch.host_shells import shell_of
    from xffl.cluster.launch.ssh import launch_ssh

    shell = shell_of(place.kind, place.launcher, os.environ)
    return launch_ssh(place.layout, request.command, options, shell)


def _tell_end(ended: RankFailure | int, request: JobRequest) -> int:
    """Say how the ranks have ended, and return the exit code."""
    layout, limits, output = request.started.layout, request.limits, request.output
    if isinstance(ended, RankFailure):
        if output.failures is not None:
            record = ended.record or FailureRecord(
                time.time(), exit_code=ended.exit_code, headline="", traceback="", is_xffl=False, lost_peer=False
            )
            record_failure(record, output.failures, 0)
        tell_failure(ended, layout, with_traceback=output.with_traceback)
        return ended.exit_code
    ranks = "all ranks" if layout.cell is None else f"all ranks of cell {layout.cell}"
    if ended == ExitCode.TIMEOUT:
        print(f"xffl: stopped {ranks} after {limits.timeout_s} s, as {limits.timeout_by} says", file=sys.stderr)
    elif ended == ExitCode.PREEMPTED:
        print(_preempted(layout), file=sys.stderr)
    elif ended > 128:
        print(f"xffl: stopped {ranks} after {signal.Signals(ended - 128).name}", file=sys.stderr)
    return ended


def _preempted(layout: JobLayout) -> str:
    who = "the job" if layout.cell is None else f"cell {layout.cell}"
    return f"xffl: {who} was asked to leave and has saved its state (exit code {ExitCode.PREEMPTED}); start it again"


def tell_failure(failure: RankFailure, layout: JobLayout, *, with_traceback: bool) -> None:
    """Say which rank has failed first, and how."""
    record = failure.record
    if failure.exit_code == ExitCode.PREEMPTED:
        print(_preempted(layout), file=sys.stderr)
        return
    if record is not None and (with_traceback or record.has_cause or not record.is_xffl):
        sys.stderr.write(record.traceback)
    others = "all other ranks" if layout.cell is None else "all other ranks of the cell"
    rest = "" if layout.topology.world_size == 1 else f"; {others} were stopped"
    # Without sizes from outside the script makes the cells, if any.
    cell = layout.cell_of(failure.rank)
    where = "" if cell is None else f" (cell {cell})"
    print(f"xffl: rank {failure.rank}{where} {failure.describe()}{rest}", file=sys.stderr)
