"""Ranks on hosts that ssh, or a program of the batch system, reaches: one connection to each, no shared shell string.

What it runs there is a fixed, quoted line of Python that reads what to do from standard input as JSON, and answers with
lines of JSON (:mod:`xffl.cluster.launch.ssh_agent`). When the connection ends, so do the ranks there.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import resource
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
from xffl.checks import shown
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.failure import (
    ExitCode,
    JobWatch,
    RankFailure,
    caught_signals,
    code_of_signal,
    parse_failure,
)
from xffl.cluster.launch.host_shells import SSH, HostShell
from xffl.cluster.launch.job_layout import JobLayout, LaunchOptions
from xffl.cluster.launch.logs import MarkedLines, line_prefix, rank_lines
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.recognition.launchers import launcher_variables
from xffl.cluster.slurm.allocation import Host
from xffl.errors import LaunchError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = ["job_of_hosts", "launch_ssh", "read_event", "shared_environment", "ssh_command"]

BEAT_S = 10.0  # how often each host hears from here
_SILENCE_S = 12 * BEAT_S  # a host that hears nothing for so long ends its ranks
_LAST_WORDS_S = 1.0
_FILES_PER_HOST, _FILES_BESIDES = 3, 64
_AGENT = "xffl.cluster.launch.ssh_agent"
_BOOT = (  # the same for every job; with -c the path begins with the folder in which ssh begins, whatever lies there
    "import sys; sys.path[0] or sys.path.pop(0); import json; job = json.loads(sys.stdin.readline()); "
    'sys.path.append(job["path"]); '
    "from {} import main; main(job)"
)


def ssh_command(host: Host, environ: Mapping[str, str], module: str = _AGENT) -> list[str]:
    """Return the words by which ssh starts a module's ``main`` on a host; the last is for the shell of the host."""
    return SSH.command(host, _line_of(module, environ), environ)


def _line_of(module: str, environ: Mapping[str, str]) -> str:
    """Return the line of the shell that starts a module's ``main``."""
    python, boot = environ.get("XFFL_PYTHON") or sys.executable, _BOOT.format(module)
    return f"exec {shlex.quote(python)} -u -c {shlex.quote(boot)}"


class HostConnection:
    """One connection, with threads of its own: neither a host that does not read nor a paused terminal stops it."""

    def __init__(
        self,
        number: int,
        host: Host,
        request: Mapping[str, Any],
        events: queue.Queue[tuple[int, dict[str, Any]]],
        shell: HostShell,
    ) -> None:
        self.host = host
        self.shell = shell
        self.left = host.slots  # ranks that have not ended
        self.is_ready = self.is_over = False
        self.trouble: str | None = None  # what ended the ranks of this host, if it is no rank's doing
        self.stderr: list[str] = []  # what ssh, or what stands in its place, said itself
        try:
            self._process = subprocess.Popen(
                shell.command(host, _line_of(_AGENT, os.environ), os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{shell.name} to host {host.name} cannot be started: {error}. HINT: {shell.variable} names another "
                f"program, with its options; {shell.name} needs {_FILES_PER_HOST} open files for each host (ulimit -n)"
            ) from error
        self._orders: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.send(request)
        threading.Thread(target=self._write, name=f"xffl ssh {number} in", daemon=True).start()
        threading.Thread(target=self._read, args=(number, events), name=f"xffl ssh {number}", daemon=True).start()

    def send(self, content: Mapping[str, Any]) -> None:
        """Have one line sent; a connection that has ended shows so otherwise."""
        self._orders.put(content)

    def disconnect(self) -> None:
        """End the connection, which ends the ranks there."""
        self._orders.put(None)

    def wait(self, grace_s: float) -> None:
        """Wait for the end of the connection."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def kill(self) -> None:
        """End ssh, whatever happens on the host."""
        self._process.kill()

    def explain(self, code: int) -> str:
        """Say why a host could not be reached, and what to do."""
        said = " ".join(self.stderr).rstrip(".") or f"exit code {code}"
        sign, name, shell = said.lower(), self.host.address or self.host.name, self.shell
        python = os.environ.get("XFFL_PYTHON") or sys.executable
        remedy = f"try {shell.trial.format(name)}; a program other than {shell.name}, or its options, may stand in "
        remedy += shell.variable
        if shell.logs_in and "host key" in sign:
            remedy = "its key is not known here: compare it with what the host's operators publish, then "
            remedy += f"ssh {name} once"
        elif shell.logs_in and "permission denied" in sign:
            remedy = "ssh must not ask for a password: see ssh-copy-id and ssh-agent, and try ssh -o BatchMode=yes "
            remedy += f"{name} true"
        elif code == 127 or "not found" in sign or "no such file" in sign or "no module" in sign:
            remedy = f"{python} with xffl must exist there; XFFL_PYTHON names another one"
        return f"host {self.host.name} cannot be used: {said}. HINT: {remedy}"

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            while True:
                order: Mapping[str, Any] | None = {}
                with suppress(queue.Empty):
                    order = self._orders.get(timeout=BEAT_S)
                if order is None:
                    break
                if not order and not self.is_ready:  # what starts there reads its first line with what follows
                    continue
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self, number: int, events: queue.Queue[tuple[int, dict[str, Any]]]) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        complaints = threading.Thread(target=self._listen, daemon=True)
        complaints.start()
        stdout = self._process.stdout
        for line in iter(lambda: stdout.readline(_LONGEST_LINE), b""):
            events.put((number, read_event(line)))
        complaints.join(_LAST_WORDS_S)  # what ssh left in the background may keep its standard error open
        events.put((number, {"over": self._process.wait()}))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.stderr.append(line.decode(errors="replace").strip())


def read_event(line: bytes) -> dict[str, Any]:
    """Read what the agent of a host has said; what is no message of it, as of a login script, is to be printed."""
    try:
        fields = Fields(parse_json(line, limit=_LONGEST_LINE), "a line of a host")
        if "ready" in fields:
            return {"ready": fields.integer("ready", 1, 65535)}
        for name in ("refused", "given_up"):
            if name in fields:
                return {name: fields.text(name, _LONGEST_LINE)}
        rank = fields.integer("rank")
        if "code" in fields:
            return {
                "rank": rank,
                "code": fields.integer("code", -128, 255),
                "is_stopped": fields.boolean("is_stopped"),
            }
        lines = fields.text("lines", _LONGEST_LINE)
        base64.b64decode(lines, validate=True)
        return {"rank": rank, "is_error": fields.boolean("is_error"), "lines": lines}
    except ValueError:
        return {"print": line.decode(errors="replace")}


_LONGEST_LINE = 2**24
_POLL_S = 0.1
_ANSWER_S = 60.0
_SLACK_S = 5.0  # how long a host may take to say that its ranks have been killed
_OF_THE_HOST = (
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "USER", "SHELL", "TERM", "DISPLAY", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TMPDIR", "TMP", "TEMP", "MAIL", "XAUTHORITY", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_A_LAUNCHER = (
    *("SSH_", "XDG_", "DBUS_"),
    *("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_", "PALS_", "TORCHELASTIC_"),
    *("ALPS_", "FLUX_", "HOROVOD_", "JSM_"),
)


def launch_ssh(
    layout: JobLayout, command: Sequence[str], options: LaunchOptions, shell: HostShell = SSH
) -> RankFailure | int:
    """Run a Python script on hosts that ssh, or another program, reaches without a question, and wait for it.

    The folder, the script and the Python of this process must exist on every host at the same path. The ranks get
    torchrun's variables and meet at the first host, on a port that is free there. Signals are passed on as
    :func:`xffl.cluster.launch.srun.launch_srun` does.
    """
    check_gpu_names(layout.hosts, os.environ)
    watch = JobWatch(options.timeout_s, options.grace_s)
    variables = {**shared_environment(os.environ), **options.environ}
    limit_threads(variables)
    variables |= RankJob(log_dir=options.log_dir, is_marked=True, source=options.source).variables()
    request = {**job_of_hosts(variables), "command": list(command), "grace_s": options.grace_s, "silence_s": _SILENCE_S}
    request["world_size"] = layout.topology.world_size
    request["has_source"] = options.source is not None
    with caught_signals() as take_signals:
        job = _Job(layout, watch, options.is_labelled, take_signals, shell=shell)
        try:
            job.connect(request)
            return job.wait()
        finally:
            job.leave()


def check_gpu_names(hosts: Sequence[Host], environ: Mapping[str, str]) -> None:
    """Raise where GPUs are named as no other host has them: batch systems do that on the first host of a job."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if len(hosts) > 1 and re.search(r"GPU-|MIG-", text := environ.get(name, "")):
            raise LaunchError(
                f"{name}={shown(text)} names GPUs of this host, which the other {len(hosts) - 1} do not have; set it "
                f"to the numbers of the job's GPUs on each host, such as {name}=0,1,2,3"
            )


def job_of_hosts(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what every host must know of a job, whatever it is to do."""
    return {
        "cwd": os.getcwd(),
        "environ": variables,
        "path": str(Path(xffl.__file__).parents[1]),
        "version": xffl.__version__,
        "python": sys.version.split()[0],
    }


def shared_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same on every host."""
    of_this_process = {*_OF_THE_HOST, *launcher_variables()}
    return {
        name: text
        for name, text in environ.items()
        if name not in of_this_process and not name.startswith(_OF_A_LAUNCHER)
    }


class _Job:
    """All connections of a job."""

    def __init__(
        self,
        layout: JobLayout,
        watch: JobWatch,
        is_labelled: bool,
        take_signals: Callable[[], list[tuple[int, bool]]],
        shell: HostShell,
    ) -> None:
        self._layout = layout
        self._shell = shell
        self._watch = watch
        self._is_labelled = is_labelled
        self._take_signals = take_signals
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._connections: list[HostConnection] = []
        self._marked = MarkedLines()
        world_size = layout.topology.world_size
        self._shown = {False: sys.stdout.buffer, True: sys.stderr.buffer}  # by whether it is standard error
        self._lines = {is_error: rank_lines(out, world_size) for is_error, out in self._shown.items()}
        self._is_stopping = False
        self._failed: list[tuple[int, int]] = []  # ranks that ended with a code other than 0, and the code

    def connect(self, request: Mapping[str, Any]) -> None:
        """Reach every host, and start the ranks once all have answered."""
        hosts, first = self._layout.hosts, 0
        # An address of ssh may name a user, or be known to ssh's configuration alone.
        meet = os.environ.get("MASTER_ADDR") or (hosts[0].address or hosts[0].name).rpartition("@")[2]
        meet = "127.0.0.1" if len(hosts) == 1 else meet
        wanted = _FILES_PER_HOST * len(hosts) + _FILES_BESIDES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        for number, host in enumerate(hosts):
            place = {"host": host.name, "first": first, "slots": host.slots, "node_rank": number, "nodes": len(hosts)}
            words = {**request, **place, "meet": meet}
            self._connections.append(HostConnection(number, host, words, self._events, shell=self._shell))
            first += host.slots
        port = self._wait_for_answers()
        if self._watch.stopped_by is None:
            self._send({"start": {"MASTER_ADDR": meet, "MASTER_PORT": os.environ.get("MASTER_PORT", str(port))}})

    def wait(self) -> RankFailure | int:
        """Show what the ranks print until the last has ended, and tell how the job ended."""
        while any(not connection.is_over for connection in self._connections):
            self._check_limits()
            for lines in self._lines.values():
                lines.tell()
            try:
                number, event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._handle(self._connections[number], event)
        for is_error, lines in self._lines.items():
            lines.end()
            self._shown[is_error].flush()
        ended = self._watch.result()
        is_echo = isinstance(ended, RankFailure) and ended.record is not None and ended.record.lost_peer
        trouble = next(filter(None, (connection.trouble for connection in self._connections)), None)
        if trouble is None and ended is None and self._failed:  # whoever ended it
            rank, code = self._failed[0]
            trouble = f"rank {rank} {RankFailure(rank, code if code > 0 else code_of_signal(-code), None).describe()}"
        if trouble is not None and (ended is None or is_echo):
            sys.stderr.write(f"xffl: {trouble}; all ranks were stopped\n")
            return ExitCode.FAILED
        return ended or ExitCode.OK

    def terminate(self, number: int) -> None:
        """End the ranks by a signal; those that are left are killed later."""
        self._watch.stop(number)
        self._stop_ranks(number or signal.SIGTERM)

    def leave(self) -> None:
        """Hang up everywhere."""
        for connection in self._connections:
            connection.disconnect()
        deadline = time.monotonic() + self._watch.grace_s + _SLACK_S
        for connection in self._connections:
            connection.wait(max(0.1, deadline - time.monotonic()) if connection.is_ready else 0.1)

    def _stop_ranks(self, number: int) -> None:
        self._is_stopping = True
        self._send({"stop": number})

    def _send(self, order: Mapping[str, Any]) -> None:
        for connection in self._connections:
            connection.send(order)

    def _check_limits(self) -> None:
        """Do what signals and clocks say."""
        for number, ends in self._take_signals():
            if ends:
                self.terminate(number)
            else:
                self._send({"signal": number})
        if self._watch.is_late:
            self.terminate(0)
        if self._watch.is_overdue() and not self._is_stopping:
            self._stop_ranks(signal.SIGTERM)
        if self._watch.is_overdue(_SLACK_S):  # the host itself does not answer any more
            for connection in self._connections:
                connection.kill()

    def _wait_for_answers(self) -> int:
        """Wait until every host is ready, and return the port that is free on the first."""
        port, deadline = 0, time.monotonic() + _ANSWER_S
        while waiting := [connection for connection in self._connections if not connection.is_ready]:
            self._check_limits()
            if self._watch.stopped_by is not None:
                return port
            if time.monotonic() > deadline:
                names = ", ".join(connection.host.name for connection in waiting)
                trial = self._shell.trial.format(waiting[0].host.name)
                raise LaunchError(f"no answer from {names} within {_ANSWER_S:g} s. HINT: try {trial}")
            try:
                number, event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            connection = self._connections[number]
            if "over" in event:
                raise LaunchError(connection.explain(event["over"]))
            if "refused" in event:
                raise LaunchError(f"host {connection.host.name}: {event['refused']}")
            if "ready" in event:
                connection.is_ready = True
                port = port or int(event["ready"])
            else:
                self._handle(connection, event)
        return port

    def _handle(self, connection: HostConnection, event: Mapping[str, Any]) -> None:
        if "over" in event:
            connection.is_over = True
            if connection.left:  # its ranks have ended with it
                said = " ".join(connection.stderr) or f"{self._shell.name} says nothing"
                self._lose_host(connection, f"the connection to {connection.host.name} broke: {said}")
        elif "given_up" in event:
            self._lose_host(connection, f"{connection.host.name} ended its ranks: {event['given_up']}")
        elif "code" in event:
            connection.left -= 1
            rank, code = event["rank"], event["code"]
            if code != 0:
                self._failed.append((rank, code))
            if code != 0 and not event["is_stopped"]:
                self._watch.add_code(rank, code, is_own=True)
                self._stop_ranks(signal.SIGTERM)
            elif not event["is_stopped"]:
                self._watch.add_left(rank)
        elif "lines" in event:
            self._show(event["rank"], base64.b64decode(event["lines"]), is_error=event["is_error"])
        elif "print" in event:
            sys.stderr.write(f"[{connection.host.name}] {event['print']}")

    def _lose_host(self, connection: HostConnection, trouble: str) -> None:
        """Note that a host is lost, and end the ranks of the others."""
        connection.trouble = connection.trouble or trouble
        self._watch.start_grace()
        self._stop_ranks(signal.SIGTERM)

    def _show(self, rank: int, lines: bytes, *, is_error: bool) -> None:
        prefix = line_prefix(rank, self._layout.cell_of(rank)) if self._is_labelled else b""
        for line in lines.splitlines(keepends=True):
            said, message = self._marked.take(line) if is_error else (line, None)
            if message is not None and "failure" in message.content:
                record = parse_failure(message.content["failure"])
                if record is None:  # a script that prints such a thing itself
                    said = line
                else:
                    self._watch.add_record(message.rank, record)
            if said:
                self._lines[is_error].write(rank, prefix, said)
        self._shown[is_error].flush()
