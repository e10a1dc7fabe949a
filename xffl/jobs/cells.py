"""Elastic runs: each cell is a job of its own, in a process of its own, that is started again when it fails.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xffl.cluster import run_token
from xffl.cluster.launch.affinity import Share, share_machine
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import ExitCode, caught_signals, code_of_signal, read_failure
from xffl.cluster.launch.job_layout import JobLayout
from xffl.cluster.launch.logs import make_log_dir
from xffl.cluster.lighthouse.address import restarts_of
from xffl.cluster.network import host_identity
from xffl.compat.libc import die_with_parent
from xffl.errors import XfflError
from xffl.files import create, open_regular, read_bytes
from xffl.jobs.lighthouse import LighthouseProcess, SharedLighthouse, own_lighthouse
from xffl.jobs.ranks import follow_logs
from xffl.jobs.request import JobRequest, write_request
from xffl.journal.place import JOURNAL_FOLDER_VARIABLE, JOURNAL_VARIABLE, cells_command, derive_journal

__all__ = ["CellJob", "keep_cell", "launch_cells", "may_have_saved", "start_all_cells"]

_POLL_S = 0.05
_PAUSE_S = 1.0  # before a cell is started again
_FORGET_TRIES = 5  # each loses only if another record comes at the same moment, or the journal is away
_FOLDER = "xffl-cells-"
_HOLDER = "launcher"  # the file in such a folder on which the launcher holds a lock
_ABANDONED = "abandoned"  # the file by which the first launcher that finds such a folder without its own says so
_ABANDONED_S = 600.0  # after that the folder is removed
_IN_VAIN = ("ConfigError:", "TopologyError:")
"""What a rank fails with that would fail the same way again; other errors of xffl's own may be another cell's doing."""
_OF_ALL_CELLS = ("XFFL_FEDERATED", "XFFL_LAUNCHED_CELLS", "XFFL_REQUIRE_CELLS")  # wrong for the job of one cell


def start_all_cells(request: JobRequest) -> int:
    """Start a lighthouse, and each cell as a job of its own: on this machine, or as a step of the SLURM job.

    The run's journal is in its folder; a script has none, and a journal for as long as the cells run.
    """
    layout, is_local = request.started.layout, request.started.kind == "local"
    environ = _environ_of_cells(request)
    token: dict[str, str] = {}
    if not run_token.has_token(environ):
        token = {"XFFL_TOKEN": os.urandom(32).hex()}
        environ |= token
    run_token.token_of(environ)
    with ExitStack() as stack:
        # Each cell by itself would tear others' lines.
        log_dir = follow_logs(request.output, stack, layout, is_local=is_local)
        temporary = stack.enter_context(run_folder())
        folder = None
        if not environ.get(JOURNAL_VARIABLE, "").strip():
            folder = Path(_journal_beside(request.home) if request.home else f"{temporary}/journal")
        lighthouse = stack.enter_context(own_lighthouse() if is_local else own_lighthouse(layout, folder, token))
        environ["XFFL_LIGHTHOUSE"] = url = f"http://{lighthouse.address}"
        if folder is not None:
            environ[JOURNAL_VARIABLE] = lighthouse.journal or str(folder)
            environ[JOURNAL_FOLDER_VARIABLE] = str(folder)
        shows = cells_command(url, environ[JOURNAL_VARIABLE], environ)
        print(f"xffl: {shows} shows the cells of this run", file=sys.stderr)
        sizes = layout.topology.sizes
        shares = share_machine(sizes) if is_local else [None] * len(sizes)
        jobs = []
        for number, (cell, share) in enumerate(zip(request.cells, shares, strict=True)):
            variables = {} if is_local else step_variables(cell.started.layout)
            variables |= {**(share.environ if share else {}), "XFFL_CELL": f"{number}/{len(sizes)}"}
            output = replace(cell.output, is_merged=request.output.is_merged and log_dir is None)
            jobs.append(
                CellJob(
                    number,
                    request=replace(cell, output=output),
                    environ={**environ, **variables},
                    share=share,
                    log_dir=log_dir,
                )
            )
        return launch_cells(
            jobs,
            restarts=request.restarts,
            timeout_s=request.limits.timeout_s,
            lighthouse=lighthouse,
            folder=temporary,
        )


def keep_cell(request: JobRequest) -> int:
    """Start this cell of a run, and start it again when it fails."""
    environ = _environ_of_cells(request)
    run_token.token_of(environ)
    (cell,) = request.cells
    log_dir = None if request.output.log_dir is None else make_log_dir(request.output.log_dir)
    job = CellJob(cell.started.layout.cell or 0, request=cell, environ=environ, log_dir=log_dir)
    kind, _, file = environ["XFFL_LIGHTHOUSE"].partition(":")
    with ExitStack() as stack:
        lighthouse = None
        if kind == "file":
            lighthouse = SharedLighthouse(file)
            stack.callback(lighthouse.stop)
        return launch_cells([job], restarts=request.restarts, timeout_s=request.limits.timeout_s, lighthouse=lighthouse)


def step_variables(layout: JobLayout) -> dict[str, str]:
    """Return the variables that tell of a SLURM job with the hosts of one cell alone."""
    hosts = layout.hosts
    step = dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(hosts)))
    step["SLURM_NTASKS"] = str(layout.topology.world_size)
    step["SLURM_JOB_NODELIST"] = ",".join(host.name for host in hosts)
    step["SLURM_TASKS_PER_NODE"] = ",".join(str(host.slots) for host in hosts)
    return step


def _environ_of_cells(request: JobRequest) -> dict[str, str]:
    return {**{name: text for name, text in os.environ.items() if name not in _OF_ALL_CELLS}, **request.variables}


def _journal_beside(home: str) -> str:
    """Return where the jobs of ``xffl submit`` look for the journal of a run with this folder."""
    return derive_journal(f"file:{os.path.abspath(home)}/lighthouse")


def may_have_saved(folder: str) -> bool:
    """Tell whether a cell with this folder has a checkpoint, or may have one that cannot be read at the moment."""
    from xffl.checkpoint.manager import find_latest_checkpoint

    with suppress(XfflError, OSError):
        return find_latest_checkpoint(folder) is not None
    return True


# Processes of cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellJob:
    """The job of one cell."""

    number: int
    request: JobRequest  # to start its ranks
    environ: Mapping[str, str]
    share: Share | None = None  # what it has of this machine, where other cells are on it
    log_dir: str | None = None


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
    has lost what it held: the run's journal gets a record of that, and the others do not wait for it. Signals to this
    process go to the launchers of all cells, which pass them on to their ranks. If this process is killed, they get
    SIGTERM.
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
        return ExitCode.REFUSED  # the lighthouse has said why
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
                # Ranks that are ending may still write there.
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
        """Whether it has not ended for good, or the journal is just getting a record that it has."""
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
        message = f"xffl: cell {self._job.number} ended with exit code {code}"
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
            print(f"{message} and is not started again: it would fail in the same way", file=sys.stderr)
            self._end(code)
        elif self._restarted == self._restarts:
            print(f"{message} and is not started again: --restarts is {self._restarts}", file=sys.stderr)
            self._end(code)
            home = self._job.request.home
            if home is not None and not may_have_saved(home):
                self._forget()
        else:
            self._restarted += 1
            self._due = time.monotonic() + _PAUSE_S
            print(f"{message}; it is started again (restart {self._restarted} of {self._restarts})", file=sys.stderr)

    def kill(self) -> None:
        """Kill its launcher, and so its ranks."""
        self._stop_forgetting()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        job, life = self._job, self._first + self._restarted
        log_dir = None
        if job.log_dir is not None:
            log_dir = os.path.join(job.log_dir, f"cell_{job.number}", f"life_{life}")
        self._failures = tempfile.mkdtemp(dir=self._folder)
        output = replace(job.request.output, log_dir=log_dir, failures=self._failures)
        request = Path(self._failures, "request.json")
        request.write_text(write_request(replace(job.request, output=output)), encoding="utf-8")
        self._process = subprocess.Popen(
            [*child_command("xffl.jobs.dispatch"), str(request)],
            env={**job.environ, "XFFL_RESTARTS": str(life)},
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
