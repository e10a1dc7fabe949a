"""One connection of ssh to a host where ranks run."""

from __future__ import annotations

import json
import os
import queue
import resource
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from xffl.cluster.slurm.allocation import Host
from xffl.errors import LaunchError

__all__ = ["BEAT_S", "Line", "allow_files", "ssh_command"]

BEAT_S = 10.0
"""How often each host hears from here."""
_LAST_WORDS_S = 1.0
_FILES_PER_HOST, _FILES_BESIDES = 3, 64
_SSH = (
    "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 "
    "-o ServerAliveCountMax=4 -o ControlMaster=no -o ControlPath=none"
)
"""A shared connection would stay in the background, and end all of a host's jobs together."""
_BOOT = (
    'import sys, json; job = json.loads(sys.stdin.readline()); sys.path.append(job["path"]); '
    "from xffl.cluster.launch.remote import main; main(job)"
)
"""The same for every job."""


def _python(environ: Mapping[str, str]) -> str:
    return environ.get("XFFL_PYTHON") or sys.executable


def ssh_command(host: Host, environ: Mapping[str, str], program: str = _BOOT) -> list[str]:
    """Return the command line that reaches a host and starts what answers there.

    :param host: The host.
    :param environ: Environment to read: ``XFFL_SSH`` holds the command to use instead, with its options, and
        ``XFFL_PYTHON`` the path of Python on the hosts, where that is another one than here.
    :param program: The Python program to run there; it reads its job as a line of JSON.
    :return: The words; the last one is for the shell of the host.
    """
    remote = f"exec {shlex.quote(_python(environ))} -u -c {shlex.quote(program)}"
    return [*shlex.split(environ.get("XFFL_SSH") or _SSH), "--", host.address or host.name, remote]


def allow_files(hosts: int) -> None:
    """Raise the limit of open files of this process as far as so many connections need, and as it may be.

    :param hosts: Hosts to reach.
    """
    wanted = _FILES_PER_HOST * hosts + _FILES_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Line:
    """One connection, with threads of its own: neither a host that does not read nor a paused terminal stops it."""

    def __init__(
        self, number: int, host: Host, told: Mapping[str, Any], events: queue.Queue[tuple[int, dict[str, Any]]]
    ) -> None:
        self.host = host
        self.left = host.slots
        """Ranks that have not ended."""
        self.is_ready = self.is_over = False
        self.trouble: str | None = None
        """What ended the ranks of this host, if it is no rank's doing."""
        self.said: list[str] = []
        """What ssh itself said."""
        try:
            self._process = subprocess.Popen(
                ssh_command(host, os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"ssh to host {host.name} cannot be started: {error}. HINT: XFFL_SSH names another program, with its "
                f"options; ssh needs {_FILES_PER_HOST} open files for each host (ulimit -n)"
            ) from error
        self._orders: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.send(told)
        threading.Thread(target=self._write, name=f"xffl ssh {number} in", daemon=True).start()
        threading.Thread(target=self._read, args=(number, events), name=f"xffl ssh {number}", daemon=True).start()

    def send(self, content: Mapping[str, Any]) -> None:
        """Have one line sent; a connection that has ended shows so otherwise."""
        self._orders.put(content)

    def hang_up(self) -> None:
        """End the connection, which ends the ranks there."""
        self._orders.put(None)

    def wait(self, grace_s: float) -> None:
        """Wait for the end of the connection."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.cut()
            self._process.wait()

    def cut(self) -> None:
        """End ssh, whatever happens on the host."""
        self._process.kill()

    def why(self, code: int) -> str:
        """Say why a host could not be reached, and what to do."""
        said = " ".join(self.said).rstrip(".") or f"exit code {code}"
        sign, name = said.lower(), self.host.address or self.host.name
        remedy = f"try ssh {name} true; a program other than ssh, or its options, may stand in XFFL_SSH"
        if "host key" in sign:
            remedy = (
                f"its key is not known here: compare it with what the host's operators publish, then ssh {name} once"
            )
        elif "permission denied" in sign:
            remedy = "ssh must not ask for a password: see ssh-copy-id and ssh-agent, and try ssh -o BatchMode=yes "
            remedy += f"{name} true"
        elif code == 127 or "not found" in sign or "no such file" in sign or "no module" in sign:
            remedy = f"{_python(os.environ)} with xffl must exist there; XFFL_PYTHON names another one"
        return f"host {self.host.name} cannot be used: {said}. HINT: {remedy}"

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            while True:
                order: Mapping[str, Any] | None
                try:
                    order = self._orders.get(timeout=BEAT_S)
                except queue.Empty:
                    order = {}
                    if not self.is_ready:  # what starts there reads its first line with what follows
                        continue
                if order is None:
                    break
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()

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
        complaints.join(_LAST_WORDS_S)  # what ssh left in the background may keep its standard error open
        events.put((number, {"over": self._process.wait()}))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.decode(errors="replace").strip())
