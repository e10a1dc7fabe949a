"""Ranks as a step of a SLURM job: srun starts them, in an order of this program's choice."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from xffl.cluster.host_lists import expand_hosts
from xffl.cluster.hosts import node_address
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import ExitCode, JobWatch, RankFailure, caught_signals, parse_failure
from xffl.cluster.launch.job_layout import JobLayout, LaunchOptions
from xffl.cluster.launch.logs import LineBuffer, MarkedLines, Message, RankLines, line_prefix, rank_lines
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.launch.script import check_command
from xffl.compat.libc import die_with_parent
from xffl.errors import LaunchError

if TYPE_CHECKING:
    from xffl.cluster.launch.merged_lines import MergedLines

__all__ = ["launch_srun", "read_task_ends", "srun_command"]

_POLL_S = 0.1
_TELL_S = 0.5  # how long nothing comes before what is due of lines that were not written is said
_CHUNK_BYTES = 1 << 16
_SCANCEL_S = 10
_SLACK_S = 5.0  # how long srun may take to end after it was asked to, and its output to come once it has been killed
_LABEL = re.compile(rb" *(\d+): ")
_LABEL_TEXT = re.compile(r"^ *[0-9]+: ")
_TASK_END = re.compile(r"srun: error: \S+: tasks? ([0-9,\-]+): (.+)")
_TASK_END_INSIDE = re.compile(rb"(?<=.)srun: error: \S+: tasks? [\d,\-]+: ")
"""Behind what a rank has begun and not ended, such as a progress bar."""
_NOISE = re.compile(
    r"slurmstepd[^:]*: error: \*\*\* STEP|srun: (launch/slurm: \S+: )?(Terminating|Force Terminated) |"
    r"srun: (error: )?(Job step aborted|First task exited|Timed out waiting|Sending SIG|forcing job termination|"
    r"StepId=\S+ tasks? )"
)
"""What srun says besides when a task has failed and the others are ended."""
_CHOSEN_HERE = (
    *(f"SLURM_{name}" for name in ("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NNODES", "TASKS_PER_NODE", "DISTRIBUTION")),
    *(f"SLURM_{name}" for name in ("HOSTFILE", "KILL_BAD_EXIT", "WAIT", "LABELIO", "UNBUFFEREDIO", "EXPORT_ENV")),
    *(f"SLURM_{name}" for name in ("STDINMODE", "STDOUTMODE", "STDERRMODE", "WORKING_DIR", "REMOTE_CWD", "EXIT_ERROR")),
    "SLURM_TASK_EPILOG_ERROR",
)
"""Variables that srun reads as options, or that the job has and the step does not."""


def launch_srun(layout: JobLayout, command: Sequence[str], options: LaunchOptions) -> RankFailure | int:
    """Run a Python script as a step of the job in which this process stands, and wait for it.

    The ranks get SLURM's variables; they meet at the first host. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on, and
    what is left after ``grace_s`` is killed; SIGUSR1 and SIGUSR2, too. If this process is killed, srun ends the step.
    """
    if options.source is None:
        check_command(command)
    job = RankJob(tuple(command), options.log_dir, is_marked=True, is_tied=False, source=options.source)
    watch = JobWatch(options.timeout_s, options.grace_s)
    with tempfile.TemporaryDirectory(prefix="xffl-exec-") as folder:
        hostfile = Path(folder, "hosts")
        hostfile.write_text("".join(f"{host.name}\n" * host.slots for host in layout.hosts))
        variables = {name: text for name, text in os.environ.items() if name not in _CHOSEN_HERE}
        limit_threads(variables)
        if "MASTER_ADDR" not in variables and len(layout.hosts) > 1:
            # SLURM sorts the step's nodes: the first of them need not be that of rank 0.
            variables["MASTER_ADDR"] = layout.hosts[0].address or node_address(layout.hosts[0].name)
        variables |= {**options.environ, **job.variables(), "SLURM_HOSTFILE": str(hostfile)}
        step = _Step(layout, watch, options.is_labelled)
        words = srun_command(layout, variables, is_labelled=options.is_labelled)
        with caught_signals() as take_signals:
            step.start(words, variables)
            return step.wait(take_signals)


def srun_command(layout: JobLayout, environ: Mapping[str, str], *, is_labelled: bool = False) -> list[str]:
    """Return the command line that starts the ranks; they find what to run in their environment."""
    words = shlex.split(environ.get("XFFL_SRUN") or "srun")
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        raise LaunchError(
            f"this is inside job {environ.get('SLURM_JOB_ID')}, but there is no {words[0]} in PATH. HINT: load SLURM's "
            "module or bind it into the container, set XFFL_SRUN to the command, or give --launcher local for "
            "processes on this node alone"
        )
    words += [f"--ntasks={layout.topology.world_size}", f"--nodes={len(layout.hosts)}", "--distribution=arbitrary"]
    words += ["--kill-on-bad-exit=1", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):  # the job's option is not the step's
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    if is_labelled:
        words.append("--label")
    return [*words, *child_command("xffl.cluster.launch.runner")]


def read_task_ends(line: str) -> dict[int, int] | None:
    """Read what srun says of tasks that ended badly: exit codes by task, -n after signal n; else ``None``."""
    if (match := _TASK_END.match(line)) is None:
        return None
    known = {(signal.strsignal(one) or "").lower(): -one for one in signal.Signals}
    known["out of memory"] = -signal.SIGKILL  # what the kernel ends a cgroup's processes by
    number = known.get(match[2].partition(" (")[0].strip().lower(), ExitCode.FAILED)
    if (code := re.match(r"Exited with exit code ([0-9]+)", match[2])) is not None:
        number = int(code[1])
    return {int(task): number for task in expand_hosts(f"[{match[1]}]")}


class _Step:
    """One srun, with the threads that read from it."""

    def __init__(self, layout: JobLayout, watch: JobWatch, is_labelled: bool) -> None:
        self._layout = layout
        self._watch = watch
        self._is_labelled = is_labelled
        self._marked = MarkedLines()
        self._id: str | None = None
        self._has_ranks = False  # whether a rank has reported or shown that it was started
        self._said: list[str] = []  # what srun itself calls an error: printed at the end, which it may explain
        self._ends: list[str] = []  # what srun says of tasks that ended badly: printed if nothing else explains the end
        self._trouble: Exception | None = None  # why what the ranks print can no longer be shown

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it, in a session of its own: a terminal's Ctrl-C is for this process alone."""
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._is_labelled else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        self._readers = [self._read(self._process.stderr, sys.stderr.buffer, self._filter_stderr)]
        if self._is_labelled:
            self._readers.append(self._read(self._process.stdout, sys.stdout.buffer, self._relabel))

    def terminate(self, number: int) -> None:
        """End the ranks by a signal; those that are left are killed later."""
        self._watch.stop(number)
        if self._id is None or not self._cancel(number):
            self._process.send_signal(signal.SIGTERM)  # srun kills them at once

    def wait(self, take_signals: Callable[[], list[tuple[int, bool]]]) -> RankFailure | int:
        """Wait for the end, and tell how it came."""
        is_asked = is_killed = False
        while self._process.poll() is None:
            time.sleep(_POLL_S)
            for number, ends in take_signals():
                (self.terminate if ends else self._process.send_signal)(number)
            if self._watch.is_late:
                self.terminate(0)
            if self._trouble is not None and self._watch.stopped_by is None:
                self.terminate(signal.SIGTERM)
            if self._watch.is_overdue() and not is_asked:
                is_asked = True
                self._process.send_signal(signal.SIGTERM)
            if self._watch.is_overdue(_SLACK_S) and not is_killed:
                is_killed = True
                if self._id is not None:
                    self._cancel(signal.SIGKILL)  # the ranks, which srun does not end any more
                self._process.kill()
        for reader in self._readers:
            reader.join(_SLACK_S if is_killed else None)
        if self._trouble is not None:
            raise self._trouble
        return self._ending()

    def _ending(self) -> RankFailure | int:
        code = self._process.returncode
        ended = ExitCode.OK if code == 0 and self._watch.stopped_by is None else self._watch.result()
        if ended is not None:
            sys.stderr.writelines(self._said)
            return ended
        lines = [*self._ends, *self._said]
        said = " ".join(line.removeprefix("srun: error: ").strip() for line in lines) or "it says nothing"
        message = f"srun ended with exit code {code}: {said}; see sacct or SLURM's logs for the step's end"
        if not self._has_ranks:
            raise LaunchError(message)
        print(f"xffl: {message}", file=sys.stderr)
        return ExitCode.FAILED

    def _cancel(self, number: int) -> bool:
        """Have SLURM signal the ranks; tell whether it could."""
        name = signal.Signals(number or signal.SIGTERM).name.removeprefix("SIG")
        command = ["scancel", f"--signal={name}", str(self._id)]
        try:
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCANCEL_S)
        except (OSError, subprocess.TimeoutExpired):  # there is none, or it does not answer
            return False
        return ran.returncode == 0

    def _read(self, stream: IO[bytes] | None, out: BinaryIO, show: Callable[[bytes, bool], bytes]) -> threading.Thread:
        def copy() -> None:
            assert stream is not None
            buffer, is_begun = LineBuffer(), False
            whose: int | None = None  # whose line is begun
            lines = rank_lines(out, self._layout.topology.world_size)
            poll = select.poll()  # unlike select, for descriptors above 1,023, too
            poll.register(stream, select.POLLIN)
            while True:
                if not poll.poll(1000 * _TELL_S):
                    self._try(lines.tell, out)
                    continue
                piece = os.read(stream.fileno(), _CHUNK_BYTES)
                for line in buffer.feed(piece) if piece else filter(None, [buffer.flush()]):
                    if not is_begun:
                        label = _LABEL.match(line) if self._is_labelled else None
                        whose = None if label is None else int(label[1])
                    self._try(partial(self._show, lines, show, line=line, rank=whose, is_begun=is_begun), out)
                    is_begun = not line.endswith(b"\n")
                if not piece:
                    self._try(lines.end, out)
                    return

        thread = threading.Thread(target=copy, name="xffl srun", daemon=True)
        thread.start()
        return thread

    def _try(self, write: Callable[[], None], out: BinaryIO) -> None:
        """Write something; why it fails is raised in the main thread."""
        try:
            write()
            out.flush()
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            # Go on reading: ranks whose output is not read would wait for ever.
            self._trouble = self._trouble or error

    def _show(
        self,
        lines: RankLines | MergedLines,
        show: Callable[[bytes, bool], bytes],
        line: bytes,
        rank: int | None,
        is_begun: bool,
    ) -> None:
        shown = show(line, is_begun)
        if not shown or self._trouble is not None:
            return
        prefix = b"" if rank is None else line_prefix(rank, self._layout.cell_of(rank))
        if not shown.startswith(prefix):  # it goes on with a line, or was put together of several
            prefix = b""
        lines.write(rank, prefix, shown.removeprefix(prefix))

    def _filter_stderr(self, line: bytes, is_begun: bool) -> bytes:
        """Take out of standard error what is for this process."""
        inside = _TASK_END_INSIDE.search(line)
        if inside is not None and not _LABEL.fullmatch(line, 0, inside.start()):
            before, after = line[: inside.start()] + b"\n", line[inside.start() :]
            return self._filter_stderr(before, is_begun) + self._filter_stderr(after, False)
        rest, message = self._marked.take(line)
        if message is None or self._handle_message(message):
            line = rest
        text = line.decode(errors="replace")
        if ends := read_task_ends(text):
            self._has_ranks = True
            self._ends.append(text)
            self._watch.add_code(*min(ends.items()))
            return b""
        if _NOISE.match(_LABEL_TEXT.sub("", text, count=1) if self._is_labelled else text):
            return b""
        if text.startswith("srun: error: "):
            self._said.append(text)
            return b""
        return self._relabel(line, is_begun)

    def _handle_message(self, message: Message) -> bool:
        """Take over what a rank has reported; return whether it was a rank, and not a script that prints the like."""
        content = message.content
        if not 0 <= message.rank < self._layout.topology.world_size or content.keys() not in ({"step"}, {"failure"}):
            return False
        if "failure" in content:
            record = parse_failure(content["failure"])
            if record is None:
                return False
            self._watch.add_record(message.rank, record)
        else:
            self._id = content["step"]
        self._has_ranks = True
        return True

    def _relabel(self, line: bytes, is_begun: bool) -> bytes:
        if is_begun or not self._is_labelled or (match := _LABEL.match(line)) is None:
            return line
        rank = int(match[1])
        return line_prefix(rank, self._layout.cell_of(rank)) + line[match.end() :]
