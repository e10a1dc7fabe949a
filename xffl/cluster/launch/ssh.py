"""Start ranks on hosts by ssh: one connection to each, no shared shell string, and see them through.

What ssh runs is a fixed, quoted line of Python that reads what to do from standard input as JSON, and answers with
lines of JSON (:mod:`xffl.cluster.launch.remote`). When the connection ends, so do the ranks there.
"""

from __future__ import annotations

import base64
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xffl
from xffl.cluster.exit_codes import ExitCode, code_of_signal
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.failure import FailureRecord, RankFailure
from xffl.cluster.launch.job_layout import JobLayout
from xffl.cluster.launch.rank_files import line_prefix
from xffl.cluster.launch.runner import RankJob
from xffl.cluster.launch.ssh_line import BEAT_S, Line, allow_files, ssh_command
from xffl.cluster.launch.stderr_frames import MarkedLines
from xffl.cluster.launch.supervisor import JobWatch, caught_signals
from xffl.errors import LaunchError

__all__ = ["launch_ssh", "shared_environment", "ssh_command"]

_POLL_S = 0.1
_ANSWER_S = 60.0
_SLACK_S = 5.0
"""How long a host may take to say that its ranks have been killed."""
_OF_THE_HOST = (
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "USER", "SHELL", "TERM", "DISPLAY", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TMPDIR", "TMP", "TEMP", "MAIL", "XAUTHORITY", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_A_LAUNCHER = (
    *("SSH_", "XDG_", "DBUS_"),
    *("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_", "PALS_", "TORCHELASTIC_"),
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
    :func:`xffl.cluster.launch.srun.launch_srun` does.

    :param layout: Hosts of the ranks.
    :param command: Script and its arguments, passed on unchanged.
    :param environ: Variables that the ranks get on top of this process's own; those of a host stay its own.
    :param timeout_s: End the job after this many seconds; ``None`` means no limit.
    :param grace_s: Seconds that ranks get to end by themselves.
    :param log_dir: Folder for a log file of each rank, made on every host.
    :param is_labelled: Whether the cell and the rank stand before each line that the ranks print.
    :return: The failure that ended the job, or an exit code; where a host was lost a line that names it is printed.
    :raises LaunchError: if a host does not answer, or lacks something; no rank has been started then.
    """
    watch = JobWatch(timeout_s, grace_s)
    variables = {**shared_environment(os.environ), **environ}
    limit_threads(variables)
    variables |= RankJob(log_dir=log_dir, is_marked=True).variables()
    told = {
        "cwd": os.getcwd(),
        "command": list(command),
        "environ": variables,
        "path": str(Path(xffl.__file__).parents[1]),
        "version": xffl.__version__,
        "python": sys.version.split()[0],
        "grace_s": grace_s,
        "silence_s": 12 * BEAT_S,
        "world_size": layout.topology.world_size,
    }
    with caught_signals() as come:
        job = _Job(layout, watch, is_labelled, come)
        try:
            job.connect(told)
            return job.wait()
        finally:
            job.leave()


def shared_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same on every host.

    :param environ: Variables of this process.
    :return: Those that are neither about this host nor from another launcher.
    """
    return {
        name: text for name, text in environ.items() if name not in _OF_THE_HOST and not name.startswith(_OF_A_LAUNCHER)
    }


class _Job:
    """All connections of a job."""

    def __init__(
        self, layout: JobLayout, watch: JobWatch, is_labelled: bool, come: Callable[[], list[tuple[int, bool]]]
    ) -> None:
        self._layout, self._watch, self._is_labelled = layout, watch, is_labelled
        self._come = come
        """Gives signals."""
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._lines: list[Line] = []
        self._marked = MarkedLines()
        self._is_stopping = False
        self._failed: list[tuple[int, int]] = []
        """Ranks that ended with a code other than 0, and the code, for whatever reason."""

    def connect(self, told: Mapping[str, Any]) -> None:
        """Reach every host, and start the ranks once all have answered."""
        hosts, first = self._layout.hosts, 0
        allow_files(len(hosts))
        for number, host in enumerate(hosts):
            place = {"host": host.name, "first": first, "slots": host.slots, "node_rank": number, "nodes": len(hosts)}
            self._lines.append(Line(number, host, {**told, **place}, self._events))
            first += host.slots
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
        is_echo = isinstance(ended, RankFailure) and ended.record is not None and ended.record.lost_peer
        trouble = next((line.trouble for line in self._lines if line.trouble is not None), None)
        if trouble is None and ended is None and self._failed:  # whoever ended it
            rank, code = self._failed[0]
            trouble = f"rank {rank} {RankFailure(rank, code if code > 0 else code_of_signal(-code), None).describe()}"
        if trouble is not None and (ended is None or is_echo):
            sys.stderr.write(f"xffl: {trouble}; all ranks were stopped\n")
            return ExitCode.FAILED
        return ExitCode.OK if ended is None else ended

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
            line.hang_up()
        deadline = time.monotonic() + self._watch.grace_s + _SLACK_S
        for line in self._lines:
            line.wait(max(0.1, deadline - time.monotonic()) if line.is_ready else 0.1)

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
                raise LaunchError(line.why(event["over"]))
            if "refused" in event:
                raise LaunchError(f"host {line.host.name}: {event['refused']}")
            if "ready" in event:
                line.is_ready = True
                port = port or int(event["ready"])
            else:
                self._handle(line, event)
        return port

    def _handle(self, line: Line, event: Mapping[str, Any]) -> None:
        if "over" in event:
            line.is_over = True
            if line.left:  # its ranks are gone with it
                self._blame(
                    line, f"the connection to {line.host.name} broke: {' '.join(line.said) or 'ssh says nothing'}"
                )
        elif "given_up" in event:
            self._blame(line, f"{line.host.name} ended its ranks: {event['given_up']}")
        elif "code" in event:
            line.left -= 1
            if event["code"] != 0:
                self._failed.append((event["rank"], event["code"]))
            if event["code"] != 0 and not event["is_stopped"]:
                self._watch.add_code(event["rank"], event["code"], is_own=True)
                self._end(signal.SIGTERM)
            elif event["code"] == 0 and not event["is_stopped"]:
                self._watch.add_left(event["rank"])
        elif "lines" in event:
            self._show(event["rank"], base64.b64decode(event["lines"]), is_error=event["is_error"])
        elif "print" in event:
            sys.stderr.write(f"[{line.host.name}] {event['print']}")

    def _blame(self, line: Line, trouble: str) -> None:
        """Note that a host is lost, and end the ranks of the others."""
        line.trouble = line.trouble or trouble
        self._watch.lose_patience()
        self._end(signal.SIGTERM)

    def _show(self, rank: int, lines: bytes, *, is_error: bool) -> None:
        out = sys.stderr.buffer if is_error else sys.stdout.buffer
        prefix = line_prefix(rank, self._layout.cell_of(rank)) if self._is_labelled else b""
        for line in lines.splitlines(keepends=True):
            said, message = self._marked.take(line) if is_error else (line, None)
            if message is not None and "failure" in message.content:
                try:
                    self._watch.add_record(message.rank, FailureRecord(**message.content["failure"]))
                except TypeError:  # a script that prints such a thing itself
                    said = line
            if said:
                out.write(prefix + said)
        out.flush()
