"""Start ranks on hosts by ssh: one connection to each, no shared shell string, and see them through.

What ssh runs is a fixed, quoted line of Python that reads what to do from standard input as JSON, and answers with
lines of JSON (:mod:`xffl.cluster.remote`). When the connection ends, so do the ranks there.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xffl
from xffl.cluster.affinity import is_wanted
from xffl.cluster.allocation import Host
from xffl.cluster.exit_codes import ExitCode
from xffl.cluster.failure import RankFailure
from xffl.cluster.job_layout import JobLayout
from xffl.cluster.job_watch import JobWatch, caught_signals
from xffl.cluster.marked_lines import MarkedLines
from xffl.cluster.rank_files import line_prefix
from xffl.cluster.runner import RankJob
from xffl.errors import LaunchError

__all__ = ["launch_ssh", "shared_environment", "ssh_command"]

_POLL_S = 0.1
_ANSWER_S = 60.0
_BEAT_S = 10.0
_SLACK_S = 5.0
"""How long a host may take to say that its ranks have been killed."""
_SSH = (
    "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 "
    "-o ServerAliveCountMax=4"
)
_BOOT = (
    'import sys, json; job = json.loads(sys.stdin.readline()); sys.path.append(job["path"]); '
    "from xffl.cluster.remote import main; main(job)"
)
"""The same for every job."""
_OF_THE_HOST = (
    "HOME",
    "HOST",
    "HOSTNAME",
    "LOGNAME",
    "USER",
    "SHELL",
    "TERM",
    "DISPLAY",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
)
_OF_THE_HOST_TOO = ("TMPDIR", "TMP", "TEMP", "MAIL", "XAUTHORITY", "MASTER_ADDR", "MASTER_PORT")
_OF_A_LAUNCHER = (
    "SSH_",
    "XDG_",
    "DBUS_",
    "SLURM_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "MPI_LOCAL",
    "MV2_",
    "PALS_",
    "TORCHELASTIC_",
)


def launch_ssh(
    layout: JobLayout,
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float | None = None,
    grace_s: float = 10.0,
    log_dir: str | None = None,
    is_labelled: bool = False,
) -> RankFailure | int:
    """Run a Python script on hosts that ssh reaches without a question, and wait for it.

    The folder, the script and the Python of this process must exist on every host at the same path. The ranks get
    torchrun's variables and meet at the first host, on a port that is free there. Signals are passed on as
    :func:`xffl.cluster.srun.launch_srun` does.

    :param layout: Hosts of the ranks.
    :param command: Script and its arguments, passed on unchanged.
    :param environ: Variables that the ranks get on top of this process's own; those of a host stay its own.
    :param timeout_s: End the job after this many seconds; ``None`` means no limit.
    :param grace_s: Seconds that ranks get to end by themselves.
    :param log_dir: Folder for a log file of each rank, made on every host.
    :param is_labelled: Whether the cell and the rank stand before each line that the ranks print.
    :return: The failure that ended the job, or an exit code.
    :raises LaunchError: if a host does not answer, or lacks something; no rank has been started then.
    """
    watch = JobWatch(timeout_s, grace_s)
    variables = {**shared_environment(os.environ), **environ}
    if not is_wanted(variables):  # ranks with cores of their own take a thread for each
        variables.setdefault("OMP_NUM_THREADS", "1")
    variables |= RankJob(log_dir=log_dir, is_marked=True).variables()
    told = {
        "cwd": os.getcwd(),
        "command": list(command),
        "environ": variables,
        "path": str(Path(xffl.__file__).parents[1]),
        "version": xffl.__version__,
        "python": sys.version.split()[0],
        "grace_s": grace_s,
        "silence_s": 12 * _BEAT_S,
        "world_size": layout.topology.world_size,
    }
    with caught_signals() as come:
        job = _Job(layout, watch, is_labelled, come)
        try:
            job.connect(told)
            return job.wait()
        finally:
            job.leave()


def ssh_command(host: Host, environ: Mapping[str, str]) -> list[str]:
    """Return the command line that reaches a host and starts what answers there.

    :param host: The host.
    :param environ: Environment to read: ``XFFL_SSH`` holds the command to use instead, with its options, and
        ``XFFL_PYTHON`` the path of Python on the hosts, where that is another one than here.
    :return: The words; the last one is for the shell of the host.
    """
    python = environ.get("XFFL_PYTHON") or sys.executable
    remote = f"exec {shlex.quote(python)} -u -c {shlex.quote(_BOOT)}"
    return [*shlex.split(environ.get("XFFL_SSH") or _SSH), "--", host.address or host.name, remote]


def shared_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same on every host.

    :param environ: Variables of this process.
    :return: Those that are neither about this host nor from another launcher.
    """
    own = (*_OF_THE_HOST, *_OF_THE_HOST_TOO)
    return {name: text for name, text in environ.items() if name not in own and not name.startswith(_OF_A_LAUNCHER)}


class _Line:
    """One connection."""

    def __init__(self, number: int, host: Host, events: queue.Queue[tuple[int, dict[str, Any]]]) -> None:
        self.host = host
        self.left = host.slots
        """Ranks that have not ended."""
        self.is_ready = self.is_over = False
        self.said: list[str] = []
        """What ssh itself said."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ssh_command(host, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(number, events), name=f"xffl ssh {number}", daemon=True).start()

    def send(self, content: Mapping[str, Any]) -> None:
        """Send one line; a connection that has ended shows so otherwise."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def leave(self, grace_s: float) -> None:
        """Hang up, which ends the ranks there, and wait for that."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.cut()
            self._process.wait()

    def cut(self) -> None:
        """End ssh, whatever happens on the host."""
        self._process.kill()

    def _read(self, number: int, events: queue.Queue[tuple[int, dict[str, Any]]]) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        complaints = threading.Thread(target=self._listen, daemon=True)
        complaints.start()
        for line in self._process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                told = None
            # A login script may print something of its own.
            events.put((number, told if isinstance(told, dict) else {"print": line.decode(errors="replace")}))
        complaints.join()
        events.put((number, {"over": self._process.wait()}))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self.said += [line.decode(errors="replace").strip() for line in self._process.stderr]


class _Job:
    """All connections of a job."""

    def __init__(
        self, layout: JobLayout, watch: JobWatch, is_labelled: bool, come: Callable[[], list[tuple[int, bool]]]
    ) -> None:
        self._layout, self._watch, self._is_labelled = layout, watch, is_labelled
        self._come = come
        """Gives signals."""
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._lines: list[_Line] = []
        self._marked = MarkedLines()
        self._is_stopping = False
        self._beat = time.monotonic()

    def connect(self, told: Mapping[str, Any]) -> None:
        """Reach every host, and start the ranks once all have answered."""
        self._lines = [_Line(number, host, self._events) for number, host in enumerate(self._layout.hosts)]
        first = 0
        for number, line in enumerate(self._lines):
            place = {"host": line.host.name, "first": first, "slots": line.host.slots}
            line.send({**told, **place, "node_rank": number, "nodes": len(self._lines)})
            first += line.host.slots
        port = self._wait_for_answers()
        if self._watch.stopped_by is None:
            host = self._layout.hosts[0]
            # An address of ssh may name a user, or be known to ssh's configuration alone.
            address = os.environ.get("MASTER_ADDR") or (host.address or host.name).rpartition("@")[2]
            address = "127.0.0.1" if len(self._lines) == 1 else address
            for line in self._lines:
                line.send({"start": {"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT", str(port))}})

    def wait(self) -> RankFailure | int:
        """Show what the ranks print until the last has ended, and tell how the job ended."""
        while any(not line.is_over for line in self._lines):
            self._look_around()
            try:
                number, event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._handle(self._lines[number], event)
        ended = self._watch.result()
        if ended is not None:
            return ended
        if lost := [line for line in self._lines if line.left]:
            raise LaunchError(
                f"the connection to {lost[0].host.name} broke: {' '.join(lost[0].said) or 'ssh says nothing'}; all "
                "ranks were stopped"
            )
        return ExitCode.OK

    def stop(self, number: int) -> None:
        """End the ranks by a signal; those that are left are killed later."""
        self._watch.stop(number)
        self._end(number or signal.SIGTERM)

    def send(self, number: int) -> None:
        """Pass a signal on to the ranks."""
        for line in self._lines:
            line.send({"signal": number})

    def leave(self) -> None:
        """Hang up everywhere."""
        for line in self._lines:
            line.leave(self._watch.grace_s + _SLACK_S if line.is_ready else 0.1)

    def _end(self, number: int) -> None:
        self._is_stopping = True
        for line in self._lines:
            line.send({"stop": number})

    def _look_around(self) -> None:
        """Do what signals and clocks say."""
        for number, ends in self._come():
            (self.stop if ends else self.send)(number)
        if self._watch.is_late:
            self.stop(0)
        if self._watch.is_overdue() and not self._is_stopping:
            self._end(signal.SIGTERM)
        if self._watch.is_overdue(_SLACK_S):  # the host itself does not answer any more
            for line in self._lines:
                line.cut()
        if time.monotonic() > self._beat + _BEAT_S:
            self._beat = time.monotonic()
            for line in self._lines:
                line.send({})

    def _wait_for_answers(self) -> int:
        """Wait until every host is ready, and return the port that is free on the first."""
        port, deadline = 0, time.monotonic() + _ANSWER_S
        while waiting := [line for line in self._lines if not line.is_ready]:
            self._look_around()
            if self._watch.stopped_by is not None:
                return port
            if time.monotonic() > deadline:
                names = ", ".join(line.host.name for line in waiting)
                raise LaunchError(f"no answer from {names} within {_ANSWER_S:g} s. HINT: try ssh {names.split(',')[0]}")
            try:
                number, event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            line = self._lines[number]
            if "over" in event:
                raise LaunchError(_why(line, event["over"]))
            if "refused" in event:
                raise LaunchError(f"host {line.host.name}: {event['refused']}")
            if "ready" in event:
                line.is_ready = True
                port = port or int(event["ready"])
            else:
                self._handle(line, event)
        return port

    def _handle(self, line: _Line, event: Mapping[str, Any]) -> None:
        if "over" in event:
            line.is_over = True
            if line.left:  # its ranks are gone with it
                self._watch.lose_patience()
                self._end(signal.SIGTERM)
        elif "code" in event:
            line.left -= 1
            if event["code"] != 0 and not event["is_stopped"]:
                self._watch.add_code(event["rank"], event["code"])
                self._end(signal.SIGTERM)
        elif "lines" in event:
            self._show(event["rank"], base64.b64decode(event["lines"]), is_error=event["is_error"])
        elif "print" in event:
            sys.stderr.write(f"[{line.host.name}] {event['print']}")

    def _show(self, rank: int, lines: bytes, *, is_error: bool) -> None:
        out = sys.stderr.buffer if is_error else sys.stdout.buffer
        prefix = line_prefix(rank, self._layout.cell_of(rank)) if self._is_labelled else b""
        for line in lines.splitlines(keepends=True):
            message = None
            if is_error:
                line, message = self._marked.take(line)
            if message is not None and "failure" in message.content:
                self._watch.add_record(message.rank, message.content["failure"])
            if line:
                out.write(prefix + line)
        out.flush()


def _why(line: _Line, code: int) -> str:
    """Say why a host could not be reached, and what to do."""
    said = " ".join(line.said).rstrip(".") or f"exit code {code}"
    name = line.host.address or line.host.name
    remedy = f"try ssh {name} true; a program other than ssh, or its options, may stand in XFFL_SSH"
    if "host key" in said.lower():
        remedy = f"its key is not known here: compare it with what the host's operators publish, then ssh {name} once"
    elif "permission denied" in said.lower():
        remedy = (
            f"ssh must not ask for a password: see ssh-copy-id and ssh-agent, and try ssh -o BatchMode=yes {name} true"
        )
    elif code == 127 or "not found" in said.lower() or "no such file" in said.lower() or "no module" in said.lower():
        remedy = f"{sys.executable} with xffl must exist there; XFFL_PYTHON names another one"
    return f"host {line.host.name} cannot be used: {said}. HINT: {remedy}"
