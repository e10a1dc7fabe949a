"""Be one rank in this process, where a launcher such as mpirun or srun has started it, and nobody watches the ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from xffl.cluster.exit_codes import ExitCode
from xffl.cluster.launch.affinity import bind_if_asked, limit_threads, take_turns_if_crowded
from xffl.cluster.launch.launchers import LAUNCHERS
from xffl.cluster.launch.runner import DELIVERY_S, LINGER_S, find_place, keep_log, limit_exit, without_own_frames
from xffl.errors import XfflError

__all__ = ["be_rank", "take_share"]

_FINALIZE_S = 5


def take_share() -> None:
    """Take this rank's part of its node: its own cores if ``XFFL_BIND`` asks for them, else one thread, and its turn.

    Call it once, before torch is imported, which asks for the number of threads then; ``OMP_NUM_THREADS`` stays what it
    is where it is set. Where no launcher has started this process nothing is done.

    :raises XfflError: if ``XFFL_BIND``, ``XFFL_SCHED`` or a launcher's variable cannot be meant.
    """
    if not any(row.matches(os.environ) for row in LAUNCHERS):
        return
    take_turns_if_crowded()  # as many CPUs as before it is bound
    bind_if_asked()
    limit_threads()


def be_rank(work: Callable[[], object], *, timeout_s: float | None = None, log_dir: str | None = None) -> int:
    """Do a rank's work, and say how it failed: a rank that only lost another one says so in one line.

    :param work: What the rank does.
    :param timeout_s: End this process after so many seconds; ``None`` means no limit.
    :param log_dir: Folder for a log file of each rank.
    :return: Exit code of this process.
    :raises XfflError: if the work does.
    :raises SystemExit: if the work leaves so.
    """
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
        if terminal != 2:  # where it is told now is the log file
            os.write(terminal, f"xffl: {type(error).__name__}: {error}\n".encode(errors="replace"))
        _leave_mpi()
        raise
    except SystemExit as left:
        if left.code == ExitCode.PREEMPTED:
            time.sleep(LINGER_S)  # the launcher ends all ranks as soon as one has left: let the others get as far
        elif left.code not in (None, 0):
            if terminal != 2 and not isinstance(left.code, int):
                os.write(terminal, f"{left.code}\n".encode(errors="replace"))
            _leave_mpi()
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends the work is to be told
        record = without_own_frames(error, [__file__, sys.modules[work.__module__].__file__ or ""])
        who = "" if world_size == 1 else f"rank {rank} "
        text = f"{record.traceback}xffl: {who}failed with {record.headline}\n"
        if record.lost_peer:
            text = f"xffl: {who}lost another rank: {record.headline}\n"
        sys.stdout.flush()
        if terminal != 2:
            sys.stderr.write(record.traceback)
        os.write(terminal, text.encode(errors="replace"))
        limit_exit(record.exit_code)
        time.sleep(DELIVERY_S)
        _leave_mpi()
        return record.exit_code
    finally:
        clock.cancel()
    return ExitCode.OK


def _leave_mpi() -> None:
    """Do not wait for the others at this process's exit, where MPI's end is collective and no Python runs any more."""
    if "mpi4py.MPI" in sys.modules:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_FINALIZE_S)
