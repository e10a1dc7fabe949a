"""One rank of a job, started by the launchers only, with the script and its arguments behind the module's name.

It runs the script as Python itself would (:mod:`xffl.cluster.launch.script`), but an uncaught exception is reported
to the launcher, which shows the first one, instead of being printed by every rank.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xffl.cluster.environment import requested_federation
from xffl.cluster.launch.affinity import bind_if_asked, limit_threads, take_turns_if_crowded
from xffl.cluster.launch.failure import (
    ExitCode,
    code_of_signal,
    describe_failure,
    is_only_lost_peer,
    leave_together,
    line_of,
    note_end,
    record_failure,
)
from xffl.cluster.launch.logs import RankFile, mark, redirect
from xffl.cluster.launch.script import OWN_FILES, run_command
from xffl.cluster.lighthouse.address import elastic_cell
from xffl.cluster.recognition.find import find_launcher
from xffl.compat.libc import die_with_parent
from xffl.errors import XfflError
from xffl.topology import Topology

__all__ = ["LINGER_S", "RankJob", "be_rank", "die_with_parent", "main", "run_script", "take_share"]

_VARIABLE = "XFFL_RUNNER"
_EXIT_DEADLINE_S = 10.0
DELIVERY_S = 0.5  # for a failed rank's story to arrive: srun drops what is under way when an exit ends the step
LINGER_S = 1.5
"""How long a rank that is not the first to fail, or has been preempted, stays before it leaves."""
_ISOLATING = str(Path(__file__).parents[2] / "jobs" / "programs" / "isolated_rank.py")
_OWN_FILES = (__file__, *OWN_FILES, _ISOLATING)


@dataclass(frozen=True)
class RankJob:
    """What a launcher wants of the ranks, in a variable that the script does not see."""

    command: tuple[str, ...] = ()  # where it is not on the command line: srun takes a ":" there for itself
    log_dir: str | None = None
    failures: str | None = None  # folder for failures, each in a file
    is_marked: bool = False  # whether failures are printed in marked lines on standard error
    is_tied: bool = True  # whether the rank is to be killed when the process that started it dies
    parent: int | None = None  # that process, if known; it may have died before the rank could tie itself to it
    source: str | None = None  # the script itself, where the launcher has read it: standard input, or a pipe

    def variables(self) -> dict[str, str]:
        """Return the environment variable that tells it to the ranks."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def pop(cls, environ: MutableMapping[str, str]) -> RankJob:
        """Read the variable, and take it out of the environment."""
        values = json.loads(environ.pop(_VARIABLE, "{}"))
        return cls(**{**values, "command": tuple(values.get("command", ()))})


def main() -> None:
    """Run the script that the launcher names, and leave with its exit code."""
    job = RankJob.pop(os.environ)
    if job.is_tied:
        die_with_parent(signal.SIGKILL)
    if job.parent is not None and os.getppid() != job.parent:
        os._exit(code_of_signal(signal.SIGKILL))
    rank, tell, has_log = 0, os.dup(2), False
    try:
        rank, _ = find_place(os.environ)
        take_turns_if_crowded()  # as many CPUs as before it is bound
        bind_if_asked()
        if job.log_dir is not None:
            os.close(keep_log(job.log_dir))
            has_log = True
        if job.is_marked and rank == 0:
            steps = (os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"))
            _tell(tell, rank, {"step": None if None in steps else ".".join(map(str, steps))})
        run_script(job.command or sys.argv[1:], job.source)
    except SystemExit as error:
        if error.code not in (None, 0):
            _report(error, job, rank, tell, has_log=has_log)
        raise  # Python prints the message of sys.exit("message") itself
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is reported
        code = _report(error, job, rank, tell, has_log=has_log)
    else:
        return
    sys.exit(code)


def run_script(command: Sequence[str], source: str | None = None) -> None:
    """Run a script in this process as Python itself would; what ends it is passed on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines come at once and whole, even if Python must not buffer: ranks would mix words.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    run_command(command, source)


def find_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank of this process and how many there are, from its launcher's variables; 0 and 1 without one."""
    row = find_launcher(environ)
    fields = {"rank": 0, "world_size": 1} if row is None else row.read(environ)
    return fields["rank"], fields["world_size"]


def keep_log(folder: str) -> int:
    """Send what this rank prints to its log file from now on."""
    rank, world_size = find_place(os.environ)
    sizes, replica_size = requested_federation()
    elastic = elastic_cell()
    cell = None if elastic is None else elastic[0]
    if sizes is not None and not isinstance(sizes, str):
        cell = Topology(world_size, sizes, replica_size).cell_of(rank)
    return redirect(RankFile.of_job(rank, cell, Path(folder), world_size))


def limit_exit(code: int) -> None:
    """Limit how long this rank's threads and exit handlers, which may wait for others, keep the launcher waiting."""
    deadline = threading.Timer(_EXIT_DEADLINE_S, os._exit, (code,))
    deadline.daemon = True
    deadline.start()


def _report(error: BaseException, job: RankJob, rank: int, tell: int, *, has_log: bool) -> int:
    """Tell the failure to the launcher and return the exit code, with a limit on what still runs at exit."""
    record = describe_failure(error, skip=_OWN_FILES)
    is_told = job.is_marked or job.failures is not None
    try:
        if job.is_marked:
            _tell(tell, rank, {"failure": asdict(record)})
        elif job.failures is not None:
            record_failure(record, job.failures, rank)
    except OSError:
        is_told = False
    if not is_told:
        sys.excepthook(type(error), error, error.__traceback__)
        return ExitCode.REFUSED if isinstance(error, XfflError) else ExitCode.FAILED
    if has_log:
        sys.stderr.write(record.traceback)
    sys.stdout.flush()
    limit_exit(record.exit_code)
    if record.exit_code == ExitCode.PREEMPTED or (job.is_marked and record.lost_peer):
        # A launcher ends all ranks as soon as one has left: let the others get as far, or the one that failed tell.
        time.sleep(LINGER_S)
    elif job.is_marked:
        time.sleep(DELIVERY_S)
    return record.exit_code


def _tell(where: int, rank: int, content: Mapping[str, Any]) -> None:
    for line in mark(rank, content):
        os.write(where, line)


# Ranks that mpirun or srun has started, which nobody watches ----------------------------------------------------------


_FINALIZE_S = 5
_POLL_S = 0.02


def take_share() -> None:
    """Take this rank's part of its node: its own cores if ``XFFL_BIND`` asks for them, else one thread, and its turn.

    Call it once, before torch is imported, which asks for the number of threads then; ``OMP_NUM_THREADS`` stays what it
    is where it is set. Where no launcher has started this process nothing is done.
    """
    if find_launcher(os.environ) is None:
        return
    take_turns_if_crowded()  # as many CPUs as before it is bound
    bind_if_asked()
    limit_threads()


def be_rank(work: Callable[[], object], *, timeout_s: float | None = None, log_dir: str | None = None) -> int:
    """Do a rank's work, and say how it failed: a rank that only lost another one says so in one line."""
    mpi_end = _MpiEnd()
    rank, world_size = find_place(os.environ)
    terminal = 2 if log_dir is None else keep_log(log_dir)

    def expire() -> None:
        if rank == 0:
            os.write(terminal, f"xffl: stopped after {timeout_s} s, as --timeout says\n".encode())
        os._exit(ExitCode.TIMEOUT)

    clock = threading.Timer(timeout_s or 0, expire)
    clock.daemon = True
    if timeout_s is not None:
        clock.start()
    try:
        work()
    except XfflError as error:
        note_end(error)
        record = describe_failure(error, skip=(*_OWN_FILES, sys.modules[work.__module__].__file__ or ""))
        before = record.traceback if record.has_cause else ""
        line = line_of(error, record)
        report = "" if line is None else f"{before}{line}\n"
        if terminal == 2:
            sys.stderr.write(report)
        else:  # this rank's log file has all of it
            sys.stderr.write(f"{before}xffl: {record.text}\n")
            os.write(terminal, report.encode(errors="replace"))
        sys.stderr.flush()
        leave_together(error)
        mpi_end.limit(ExitCode.REFUSED)
        return ExitCode.REFUSED
    except SystemExit as left:
        if left.code == ExitCode.PREEMPTED:
            time.sleep(LINGER_S)  # the launcher ends all ranks as soon as one has left: let the others get as far
        elif left.code not in (None, 0):
            if terminal != 2 and not isinstance(left.code, int):
                os.write(terminal, f"{left.code}\n".encode(errors="replace"))
            mpi_end.limit(describe_failure(left).exit_code)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends the work is reported
        note_end(error)
        record = describe_failure(error, skip=(*_OWN_FILES, sys.modules[work.__module__].__file__ or ""))
        who = "" if world_size == 1 else f"rank {rank} "
        text = f"{record.traceback}xffl: {who}failed with {record.headline}\n"
        if is_only_lost_peer(error):
            text = f"xffl: {who}lost another rank: {record.headline}\n"
        sys.stdout.flush()
        if terminal != 2:
            sys.stderr.write(record.traceback)
        os.write(terminal, text.encode(errors="replace"))
        limit_exit(record.exit_code)
        time.sleep(DELIVERY_S)
        mpi_end.limit(record.exit_code)
        return record.exit_code
    finally:
        clock.cancel()
    return ExitCode.OK


class _MpiEnd:
    """The end of MPI in a rank that has failed: it waits for the others, though not for long, and keeps the exit code.

    MPI's own end is collective, and mpi4py calls it when no Python runs any more: only a signal could end a process
    that waits there, whose number would be reported in place of the code. So the ranks that fail look for each other
    before, behind all other handlers of the exit; one that does not find all of them leaves without MPI's end.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._meet)  # before the script registers any: the first comes last

    def limit(self, code: int) -> None:
        """Note that the rank leaves with a code."""
        self._code = code

    def _meet(self) -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        if self._code is None or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return
        deadline = time.monotonic() + _FINALIZE_S
        try:
            all_here = mpi.COMM_WORLD.Ibarrier()
            while not all_here.Test():
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            else:
                return  # to MPI's end, in which nobody has to be waited for
        except Exception as error:  # noqa: BLE001 - what has failed before is what its user has to see
            sys.stderr.write(f"xffl: MPI cannot be ended: {error}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self._code)


if __name__ == "__main__":
    main()
