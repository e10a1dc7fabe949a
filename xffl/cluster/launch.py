"""Start processes on this machine and see them through, with torch's elastic agent underneath."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from xffl.cluster.affinity import limit_threads
from xffl.cluster.exit_codes import ExitCode, code_of_signal
from xffl.cluster.failure import FailureRecord, RankFailure, first_failure, stopped_result
from xffl.cluster.runner import check_script
from xffl.errors import LaunchError

__all__ = ["launch_distributed", "launch_local"]

_GRACE_S = 10
"""How long ranks may take to end after a signal before they are killed (torch 2.12 and later; before, 30 s)."""


class _TimeLimit(BaseException):
    """The job's time is up."""


def launch_local(
    processes: int, command: Sequence[str], *, environ: Mapping[str, str], timeout_s: float | None = None
) -> RankFailure | int:
    """Run a Python script in several processes on this machine, and wait for them.

    The ranks get torchrun's variables; the rendezvous is a free port of 127.0.0.1 that this process already holds, so
    jobs do not collide. Output streams through. When a rank fails, the others are ended at once. SIGINT, SIGTERM,
    SIGHUP and SIGQUIT are passed on to the ranks, which are killed if they have not ended some seconds later
    (``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``); SIGUSR1 and SIGUSR2 are passed on without that. If this process is killed,
    Linux ends the ranks. Call it from the main thread of a process of its own: environment, signal handlers and logging
    are changed for good.

    :param processes: How many, at least 1.
    :param command: Script and its arguments, passed on unchanged.
    :param environ: Variables that the ranks get on top of this process's own.
    :param timeout_s: End the job after this many seconds; ``None`` means no limit.
    :return: The failure that ended the job, or an exit code: 0, 128 + n where signal n stopped it, 124 where its time
        was up, 75 where ranks left so after a signal. A rank that fails while the job is stopped is returned with that
        code.
    :raises LaunchError: if the script does not exist, or the agent itself fails.
    """
    check_script(command[0])
    os.environ.update(environ)
    limit_threads()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_S))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "LOGLEVEL" not in os.environ:
        # The agent logs every rank that it ends; what matters of it is returned.
        logger = logging.getLogger("torch.distributed")
        logger.propagate = False
        logger.handlers[:] = [logging.NullHandler()]
    # The agent substitutes ${local_rank} in arguments; "$$" is a "$" that is left alone.
    arguments = ["-m", "xffl.cluster.runner", *(part.replace("$", "$$") for part in command)]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _pass_on)
    with tempfile.TemporaryDirectory(prefix="xffl-exec-") as logs, _time_limit(timeout_s):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=os.path.basename(logs),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            for failure in error.failures.values():  # what these have started is of no more use; the agent ends others'
                with suppress(ProcessLookupError):
                    os.killpg(failure.pid, signal.SIGKILL)
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return first_failure(codes, {rank: failure.error_file_data for rank, failure in error.failures.items()})
        except SignalException as stop:
            records = _read_records(logs)
            if any(record.exit_code == ExitCode.PREEMPTED for record in records.values()):
                return ExitCode.PREEMPTED
            return stopped_result(code_of_signal(stop.sigval), records)
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except _TimeLimit:
            return stopped_result(ExitCode.TIMEOUT, _read_records(logs))
    return ExitCode.OK


def launch_distributed(
    script: str,
    config: str,
    num_nodes: int = 1,
    gpus_per_node: int = 8,
    master_addr: str = "localhost",
    master_port: int | None = None,
) -> None:
    """Run a training script with torchrun, on each node of a job that is called there; wait for its processes.

    Call it on every node with the same arguments, and with ``NODE_RANK`` set where there are several. Where ``xffl
    exec``, SLURM or mpirun start the processes, it is not needed.

    :param script: Path of the Python script.
    :param config: Its one argument, such as the path of a configuration.
    :param num_nodes: Nodes of the job.
    :param gpus_per_node: Processes on each node.
    :param master_addr: Host of node 0.
    :param master_port: Port where node 0 listens; with one node a free one by default.
    :raises LaunchError: if the arguments do not fit each other, or a process fails.
    """
    check_script(script)
    if num_nodes < 1 or gpus_per_node < 1:
        raise LaunchError(f"{num_nodes} nodes of {gpus_per_node} processes are no job; give at least 1 of each")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus_per_node}"]
    if num_nodes == 1 and master_port is None:
        command.append("--standalone")
    elif master_port is None:
        raise LaunchError(f"{num_nodes} nodes need a port to meet at; give master_port, the same on all of them")
    else:
        node = os.environ.get("NODE_RANK", "0" if num_nodes == 1 else "")
        if not node.isdigit() or int(node) >= num_nodes:
            raise LaunchError(f"NODE_RANK is {node!r} on one of {num_nodes} nodes; set it to 0 to {num_nodes - 1}")
        command += [f"--nnodes={num_nodes}", f"--node-rank={node}"]
        command += [f"--master-addr={master_addr}", f"--master-port={master_port}"]
    code = subprocess.run([*command, script, config], check=False).returncode
    if code != 0:
        raise LaunchError(f"torchrun of {script!r} ended with exit code {code}; see the output of its processes")


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to the ranks, which are this process's children."""
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            os.kill(int(child), number)


def _read_records(logs: str) -> dict[int, FailureRecord]:
    """Read what each rank has told of its end; the agent does not read it of ranks that it ends."""
    contents = {int(file.parent.name): _json(file) for file in Path(logs).rglob("error.json")}
    return {rank: FailureRecord(**content["xffl"]) for rank, content in contents.items() if "xffl" in content}


def _json(file: Path) -> dict[str, Any]:
    """Read what a rank has told; nothing where it was ended while it wrote."""
    try:
        told: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        return {}
    return told


@contextmanager
def _time_limit(timeout_s: float | None) -> Iterator[None]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise _TimeLimit

    if timeout_s is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
