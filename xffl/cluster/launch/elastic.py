"""Elastic runs: each cell is a job of its own, ``xffl exec`` once more, that is started again when it fails.

Cells find each other through a lighthouse. A cell that fails, or whose launcher is killed, comes back while the others
go on; nothing here waits for a cell to be there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from xffl.cluster.hosts import node_address, reachable_address
from xffl.cluster.launch.affinity import Share
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import ExitCode, caught_signals, code_of_signal, read_failure
from xffl.cluster.launch.job_layout import JobLayout
from xffl.cluster.launch.launch import held_port
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.lighthouse.address import ADDRESS_BYTES, bind_address, read_address, restarts_of
from xffl.cluster.lighthouse.timeouts import CELL_HEARTBEAT_TIMEOUT_S, CELL_JOIN_TIMEOUT_S
from xffl.cluster.network import control_address, host_identity
from xffl.cluster.reaching import connection_error
from xffl.cluster.slurm.allocation import Host, own_host
from xffl.compat.libc import die_with_parent
from xffl.errors import ConfigError, LaunchError
from xffl.extras import optional_import
from xffl.files import create, open_regular, read_bytes, write_whole

__all__ = ["CellJob", "SharedLighthouse", "launch_cells", "own_lighthouse", "run_folder", "step_variables"]

_POLL_S = 0.05
_PAUSE_S = 1.0  # before a cell, or the lighthouse, is started again
_LOOK_S = 1.0  # between two looks into the file that names the lighthouse of cells in several jobs
_SILENCE_S = 10.0  # after so long without an answer from a lighthouse in another job, this job runs one
_ANSWER_S = 1.0
_FORGET_TRIES = 5  # each loses only if another record comes at the same moment, or the journal is away
# An address of no host (RFC 5737): where its name does not tell this host's own, the way there does.
_FAR = "198.51.100.1"
_FOLDER = "xffl-cells-"
_HOLDER = "launcher"  # the file in such a folder on which the launcher holds a lock
_ABANDONED = "abandoned"  # the file by which the first launcher that finds such a folder without its own says so
_ABANDONED_S = 600.0  # after that the folder is removed
_IN_VAIN = ("ConfigError:", "TopologyError:")
"""What a rank fails with that would fail the same way again; other errors of xffl's own may be another cell's doing."""


@dataclass(frozen=True)
class CellJob:
    """The job of one cell: words and variables of its ``xffl exec``."""

    number: int
    options: Sequence[str]
    command: Sequence[str]  # the script and its arguments
    environ: Mapping[str, str]
    share: Share | None = None  # what it has of this machine, where other cells are on it
    log_dir: str | None = None
    source: str | None = None  # the script itself, where it was read here
    has_saved: Callable[[], bool] | None = None  # whether it has a checkpoint; None where nobody knows


def launch_cells(
    jobs: Sequence[CellJob],
    *,
    restarts: int,
    timeout_s: float | None = None,
    lighthouse: LighthouseProcess | SharedLighthouse | None = None,
    folder: str | None = None,
) -> int:
    """Start cells, all of a run or one, and wait until each has ended for good; return the exit code of them all.

    A cell that ends with another code than 0 is started again after a pause, as often as ``restarts`` says, unless the
    run was asked to end, or the cell would fail in the same way. One that is not started again, and has no checkpoint,
    has lost what it held: the run's journal is told so, and the others do not wait for it. Signals to this process go
    to the launchers of all cells, which pass them on to their ranks. If this process is killed, they get SIGTERM.
    ``folder`` is what :func:`run_folder` has made, if the caller needs one, too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes are lost
    limit = None if timeout_s is None else time.monotonic() + timeout_s
    # Signals that have come, and whether they end the run; SIGTERM where it is ended from here.
    asked: dict[int, bool] = {}
    is_late = is_refused = False
    with nullcontext(folder) if folder else run_folder() as folder, caught_signals() as take_signals:
        cells = [_Cell(job, restarts, folder) for job in jobs]
        try:
            while any(cell.is_busy for cell in cells):
                signals = take_signals()
                if not any(asked.values()):
                    is_late = limit is not None and time.monotonic() > limit
                    # A batch system that ends the job may have ended the lighthouse, too.
                    is_refused = lighthouse is not None and not lighthouse.keep()
                    signals += [(signal.SIGTERM, True)] * (is_late or is_refused)
                for number, ends in signals:
                    asked.setdefault(number, ends)
                    for cell in cells:
                        cell.forward_signal(number, ends)
                for cell in cells:
                    cell.poll(asked)
                time.sleep(_POLL_S)
        finally:
            for cell in cells:
                cell.kill()
    codes = [cell.code for cell in sorted(cells, key=lambda cell: cell.ended_at) if cell.code]
    if is_refused:
        return ExitCode.REFUSED  # the lighthouse has told why
    if asked and ExitCode.PREEMPTED in codes:
        return ExitCode.PREEMPTED
    if is_late:
        print(f"xffl: stopped all cells after {timeout_s} s, as --timeout says", file=sys.stderr)
        return ExitCode.TIMEOUT
    if (stopped_by := next((number for number, ends in asked.items() if ends), None)) is not None:
        return code_of_signal(stopped_by)
    return codes[0] if codes else ExitCode.OK


@contextmanager
def run_folder() -> Iterator[str]:
    """Make a folder for what the launchers of the cells tell this one, and remove those that killed ones have left.

    A process has one at a time: to look at a second one would end its lock on the first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    temporary = tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True)
    try:
        # The file is closed last: while the folder is being removed, its launcher must not seem to be lost.
        with create(Path(temporary.name, _HOLDER)) as holder, temporary as folder:
            with suppress(OSError):  # where files cannot be locked the folder says nothing of its launcher, and stays
                # A record lock: the processes that this one starts do not have it, and it ends with this one however
                # it ends. What names this process is written behind it.
                fcntl.lockf(holder, fcntl.LOCK_EX)
                holder.write(f"{host_identity()}\n{os.getpid()}".encode())
                holder.flush()
            yield folder
    finally:
        # NFS keeps a file that is open under another name in its folder, which cannot be removed before.
        shutil.rmtree(temporary.name, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders of runs whose launcher was killed on this host, some time after the first look."""
    for folder in parent.glob(f"{_FOLDER}*"):
        with suppress(OSError):  # somebody else's, or another launcher removes it, too
            status = folder.lstat()
            if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and _has_lost_launcher(folder):
                # Ranks that are told to end may still write there.
                seen = folder / _ABANDONED
                if not seen.exists():
                    create(seen).close()
                elif time.time() - seen.lstat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(folder)


def _has_lost_launcher(folder: Path) -> bool:
    """Tell whether a folder names another process of this host as its launcher, which does not hold it any more."""
    holder = folder / _HOLDER
    host, _, process = read_bytes(holder, 1024).decode(errors="replace").partition("\n")
    # A process does not see its own lock, and takes it away when it closes the file.
    if host != host_identity() or process == str(os.getpid()):
        return False
    with open_regular(holder) as held:
        try:
            fcntl.lockf(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class _Cell:
    """One cell: the process that launches its ranks, and between two of them the time of the next."""

    def __init__(self, job: CellJob, restarts: int, folder: str) -> None:
        self.code: int | None = None  # how it has ended for good
        self.ended_at = 0.0
        self._job = job
        self._restarts = restarts
        self._folder = folder
        self._first = restarts_of()
        self._restarted = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._failures = ""  # where its launcher tells how the ranks have failed
        self._forgetting: subprocess.Popen[bytes] | None = None
        self._forget_tries = 0

    @property
    def is_busy(self) -> bool:
        """Whether it has not ended for good, or the journal is being told that it has."""
        return self.code is None or self._forgetting is not None

    def forward_signal(self, number: int, ends: bool) -> None:
        """Pass a signal on; a cell that is to be started again is not started any more."""
        self._stop_forgetting()
        if self._process is not None:
            self._process.send_signal(number)
        elif self.code is None:
            self._end(code_of_signal(number) if ends else ExitCode.PREEMPTED)

    def poll(self, asked: Mapping[int, bool]) -> None:
        """Start it where it is time to, and see whether it has ended; ``asked`` is what signals have asked for."""
        if self._forgetting is not None:
            self._poll_forgetting()
        if self._process is None:
            if self.code is None and time.monotonic() >= self._due:
                self._start()
            return
        if (code := self._process.poll()) is None:
            return
        self._process = None
        code = code_of_signal(-code) if code < 0 else code
        told = f"xffl: cell {self._job.number} ended with exit code {code}"
        # At a signal that does not end the run ranks leave with 75, or are killed by it if they do not listen. SLURM
        # signals the ranks of a job, and not this process, when the job has to leave.
        is_asked = bool(asked) or "SLURM_JOB_ID" in self._job.environ
        is_leaving = (code == ExitCode.PREEMPTED and is_asked) or code in map(code_of_signal, asked)
        # Its launcher has refused to start ranks, or the rank that failed first would do so again.
        record = read_failure(self._failures, 0)
        is_in_vain = record is None or (record.is_xffl and record.headline.startswith(_IN_VAIN))
        if code in (ExitCode.OK, ExitCode.TIMEOUT) or is_leaving or any(asked.values()):
            self._end(code)
        elif code == ExitCode.REFUSED and is_in_vain:
            print(f"{told} and is not started again: it would fail in the same way", file=sys.stderr)
            self._end(code)
        elif self._restarted == self._restarts:
            print(f"{told} and is not started again: --restarts is {self._restarts}", file=sys.stderr)
            self._end(code)
            if self._job.has_saved is not None and not self._job.has_saved():
                self._forget()
        else:
            self._restarted += 1
            self._due = time.monotonic() + _PAUSE_S
            print(f"{told}; it is started again (restart {self._restarted} of {self._restarts})", file=sys.stderr)

    def kill(self) -> None:
        """Kill its launcher, and so its ranks."""
        self._stop_forgetting()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        job, life = self._job, self._first + self._restarted
        options = list(job.options)
        if job.log_dir is not None:
            options.append(f"--log-dir={os.path.join(job.log_dir, f'cell_{job.number}', f'life_{life}')}")
        self._failures = tempfile.mkdtemp(dir=self._folder)
        told = {"XFFL_RESTARTS": str(life), **RankJob(failures=self._failures, source=job.source).variables()}
        self._process = subprocess.Popen(
            [*child_command("xffl.cli.main"), "exec", *options, "--", *job.command],
            env={**job.environ, **told},
            start_new_session=True,
            preexec_fn=partial(_begin_cell, job.share),
        )

    def _forget(self) -> None:
        """Have the run's journal forget what this cell held."""
        self._forget_tries += 1
        where = self._job.environ["XFFL_LIGHTHOUSE"]
        self._forgetting = subprocess.Popen(
            [*child_command("xffl.cli.main"), "cells", where, "--forget", str(self._job.number)],
            env=self._job.environ,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )

    def _poll_forgetting(self) -> None:
        """See whether the journal has forgotten this cell; try again if another record was faster, or it is away."""
        if self._forgetting is not None and (code := self._forgetting.poll()) is not None:
            self._forgetting = None
            if code not in (ExitCode.OK, ExitCode.REFUSED) and self._forget_tries < _FORGET_TRIES:
                self._forget()

    def _stop_forgetting(self) -> None:
        if self._forgetting is not None:
            self._forgetting.kill()
            self._forgetting.wait()
            self._forgetting = None

    def _end(self, code: int) -> None:
        self.code = code
        self.ended_at = time.monotonic()


def _begin_cell(share: Share | None) -> None:
    die_with_parent(signal.SIGTERM)
    if share is not None:
        os.sched_setaffinity(0, share.cpus)


# The lighthouse -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServedJournal:
    """The journal that a lighthouse serves."""

    folder: Path
    port: int
    token: Mapping[str, str]  # variables that say what the run's token is, besides those of this process


class LighthouseProcess:
    """The lighthouse of a run as a process of its own.

    It keeps nothing but a journal, and that in a folder, so one that has died is started again.

    :param address: HOST:PORT where it listens.
    :param journal: The journal that it serves, if any.
    """

    def __init__(self, address: str, journal: ServedJournal | None = None) -> None:
        self.address = address
        self._journal = journal
        self._start()

    @property
    def journal(self) -> str | None:
        """Where the journal is that it serves; ``None`` if it serves none."""
        if self._journal is None:
            return None
        return f"http://{self.address.rpartition(':')[0]}:{self._journal.port}"

    def keep(self) -> bool:
        """Start it again where it has died; tell whether it can be had at all."""
        code = self._process.poll()
        if code is None:
            return True
        if code == ExitCode.REFUSED:
            return False
        if time.monotonic() > self._started_at + _PAUSE_S:
            print("xffl: the lighthouse has died, and is started again at the same port", file=sys.stderr)
            self._start()
        return True

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        words: tuple[str, ...] = ()
        environ = dict(os.environ)
        if self._journal is not None:
            words = ("--journal", str(self._journal.folder), "--journal-port", str(self._journal.port))
            environ |= self._journal.token
        times = ("--heartbeat-timeout", str(CELL_HEARTBEAT_TIMEOUT_S), "--join-timeout", str(CELL_JOIN_TIMEOUT_S))
        self._process = subprocess.Popen(
            [*child_command("xffl.cli.main"), "lighthouse", "--bind", self.address, *times, *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )


@contextmanager
def own_lighthouse(
    layout: JobLayout | None = None, journal: Path | None = None, token: Mapping[str, str] | None = None
) -> Iterator[LighthouseProcess]:
    """Run a lighthouse while the block runs, at a free port of this host that is held for it also while it is down.

    It listens where the hosts of a layout reach this one, without a layout on loopback alone. With the folder of a
    journal it serves that as well, to those who know the token.
    """
    _require_torchft()
    host = "127.0.0.1"
    if layout is not None:
        others = [host for host in layout.hosts if host.name != own_host().name]
        host = bind_address(f"{node_address((others or layout.hosts)[0].name)}:9")  # nothing is sent there
    with ExitStack() as held:
        port = held.enter_context(held_port())
        served = None
        if journal is not None:
            served = ServedJournal(journal, held.enter_context(held_port()), token or {})
        lighthouse = LighthouseProcess(f"{host}:{port}", served)
        try:
            yield lighthouse
        finally:
            lighthouse.stop()


def _require_torchft() -> None:
    with optional_import("elastic", "an elastic run needs torchft, which has wheels for x86-64 Linux"):
        if find_spec("torchft") is None:  # it is imported by the lighthouse and the ranks, since it brings torch
            raise ModuleNotFoundError("No module named 'torchft'")


class SharedLighthouse:
    """The lighthouse of cells that are jobs of their own: one of the jobs runs it, and a file that all see names it.

    A job that finds no file, or has had no answer from the lighthouse that it names for some seconds, starts one, and
    writes its address once that answers. Where several jobs do so at once, the last to write is the one that the file
    names, and the others end theirs. So no file needs a lock; a moment with two lighthouses divides no run, since a
    round counts only if its record stands in the run's one journal (:mod:`xffl.elastic.roster`).
    """

    def __init__(self, file: str) -> None:
        _require_torchft()
        self._file = Path(file)
        self._address = control_address() or reachable_address([_FAR])
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"the lighthouse's file {file} cannot be written ({error}); give another") from error
        self._own: LighthouseProcess | None = None
        self._is_named = False  # whether the file has named the own one
        self._port = ExitStack()
        self._due = 0.0
        self._heard_at = time.monotonic()
        self._trouble = ""

    def keep(self) -> bool:
        """See to it, once a second, that there is one; tell whether this host can run one, if it has to."""
        if time.monotonic() < self._due:
            return True
        self._due = time.monotonic() + _LOOK_S
        if self._own is not None and not self._own.keep():
            return False
        try:
            self._look(self._read())
        except OSError as error:  # of the shared file system, which may be well again at the next look
            if str(error) != self._trouble:
                self._trouble = str(error)
                print(f"xffl: the lighthouse's file {self._file} cannot be used ({error})", file=sys.stderr)
        return True

    def stop(self) -> None:
        """End the own one, if there is one; other jobs see at their next look that it has gone."""
        if self._own is not None:
            with suppress(OSError):
                if self._read() == self._own.address:
                    self._file.unlink()
            self._end(self._own)

    def _look(self, named: str) -> None:
        """Start or end the own one, as the file says, which names HOST:PORT or is not there."""
        own = self._own
        if own is None:
            if named and _answers(named):
                self._heard_at = time.monotonic()
            elif not named or time.monotonic() > self._heard_at + _SILENCE_S:
                self._own = LighthouseProcess(f"{self._address}:{self._port.enter_context(held_port())}")
                self._is_named = False
        elif named == own.address:
            return
        elif named and (self._is_named or _answers(named)):
            self._end(own)
            self._heard_at = time.monotonic()
        elif _answers(own.address):
            write_whole(self._file, f"http://{own.address}\n")
            self._is_named = True
            print(f"xffl: this job runs the lighthouse, at http://{own.address}", file=sys.stderr)

    def _read(self) -> str:
        try:
            told = read_bytes(self._file, ADDRESS_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        return told.strip().removeprefix("http://")

    def _end(self, own: LighthouseProcess) -> None:
        own.stop()
        self._own = None
        self._port.close()


def _answers(address: str) -> bool:
    """Tell whether somebody listens at an address."""
    with suppress(LaunchError):  # it is no address
        return connection_error(*read_address("the lighthouse", address), _ANSWER_S) is None
    return False


# Cells as steps of a SLURM job ----------------------------------------------------------------------------------------


def step_variables(layout: JobLayout) -> list[dict[str, str]]:
    """Return for each cell the variables that tell of a SLURM job with the hosts of that cell alone."""
    hosts, steps = list(layout.hosts), []
    for cell, size in enumerate(layout.topology.sizes):
        own: list[Host] = []
        while sum(host.slots for host in own) < size:
            own.append(hosts.pop(0))
        if sum(host.slots for host in own) != size:
            raise ConfigError(
                f"cells {cell} and {cell + 1} share host {own[-1].name}, but an elastic cell is a step with hosts of "
                "its own; give sizes that end with a host, or start a job for each cell: xffl exec --elastic URL "
                "--cell 0/2"
            )
        step = dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(own))) | {"SLURM_NTASKS": str(size)}
        step["SLURM_JOB_NODELIST"] = ",".join(host.name for host in own)
        step["SLURM_TASKS_PER_NODE"] = ",".join(str(host.slots) for host in own)
        steps.append(step)
    return steps
