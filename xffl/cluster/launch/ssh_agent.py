"""The program that ``xffl exec --hosts`` runs on each host: it starts ranks, sends back what they print, and ends them.

Lines of JSON come on standard input and go on standard output; when the input ends, so do the ranks.
"""

from __future__ import annotations

import base64
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from xffl.cluster.launch.logs import LineBuffer
from xffl.cluster.network import SLURM_PORTS

__all__ = ["free_port", "main", "refusal"]

_TRIES = 100
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.1


def main(job: dict[str, Any]) -> None:
    """Be the launcher of this host."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the input says so, too, and leaves time for it
    if (refused := refusal(job)) is not None:
        _send({"refused": refused})
        return
    _send({"ready": free_port()})
    _Ranks(job).run()


def free_port() -> int:
    """Find a port of this host where nobody listens, below those that Linux hands out by itself to others."""
    first, last = SLURM_PORTS
    for port in random.sample(range(first, last + 1), _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports between {first} and {last} is free")


def refusal(job: Mapping[str, Any]) -> str | None:
    """Say why this host cannot take ranks, if it cannot; go to the job's folder, which has the script of a command."""
    from xffl import __version__

    python = sys.version.split()[0]
    if (__version__, python) != (job["version"], job["python"]):
        return (
            f"xffl {__version__} on Python {python}, but xffl {job['version']} on Python {job['python']} starts the "
            "job; install the same everywhere, or name another Python by XFFL_PYTHON"
        )
    try:
        os.chdir(job["cwd"])
    except OSError as error:
        return f"folder {job['cwd']!r}: {error.strerror}; start from a folder that all hosts share"
    if "command" not in job:
        return None
    from xffl.cluster.launch.script import check_script, is_module  # of the same version, as is known now
    from xffl.errors import LaunchError

    try:
        if not job.get("has_source") and not is_module(job["command"]):  # a module is found on the path of the ranks
            check_script(job["command"][0], "it must be there on every host")
        socket.getaddrinfo(job["meet"], None)
    except LaunchError as lack:
        return str(lack)
    except (OSError, UnicodeError):
        return f"it does not know the first host's name {job['meet']!r}; set MASTER_ADDR to an address of that host"
    return None


def _send(content: Mapping[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except OSError:  # the connection has ended: nobody reads, but the ranks are still to get their grace
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


class _Ranks:
    """The ranks of this host."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[int, LineBuffer] = {}  # what cuts each stream of a rank, by its file descriptor
        self._input = b""
        self._heard = time.monotonic()
        self._end_by: float | None = None  # when ranks that are left are to be killed; None while nobody wants that

    def run(self) -> None:
        """Do what the input says until all ranks have ended."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)
        is_waiting = True
        while is_waiting or self._processes:
            for key, _ in self._selector.select(_POLL_S):
                if key.data is None:
                    self._read_input()
                else:
                    self._forward(*key.data)
            is_waiting = is_waiting and self._end_by is None and not self._processes
            if self._is_silent():
                self._read_input()  # it may have come while this process waited for its own words to be taken
                if self._is_silent():
                    _send({"given_up": f"it has heard nothing for {self._job['silence_s']:g} s"})
                    self._stop(signal.SIGTERM)
            if self._end_by is not None and time.monotonic() > self._end_by:
                self._kill(signal.SIGKILL)
            self._reap()

    def _is_silent(self) -> bool:
        return self._end_by is None and bool(time.monotonic() > self._heard + self._job["silence_s"])

    def _read_input(self) -> None:
        try:
            chunk = os.read(0, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self._heard = time.monotonic()
        if not chunk:
            self._selector.unregister(0)
            self._stop(signal.SIGTERM)
            return
        *lines, self._input = (self._input + chunk).split(b"\n")
        for order in map(json.loads, lines):
            if "start" in order and self._end_by is None:
                self._start(order["start"])
            elif "signal" in order:
                for process in self._processes.values():
                    process.send_signal(order["signal"])
            elif "stop" in order:
                self._stop(order["stop"])

    def _start(self, rendezvous: Mapping[str, str]) -> None:
        from xffl.cluster.launch.child import child_command
        from xffl.cluster.recognition.launchers import torchrun_variables

        job = self._job
        for local in range(job["slots"]):
            rank = job["first"] + local
            place = {"rank": rank, "world_size": job["world_size"], "node_local_rank": local}
            place |= {"node_local_size": job["slots"], "node_rank": job["node_rank"], "node_world_size": job["nodes"]}
            environ = {**os.environ, **job["environ"], **rendezvous, **torchrun_variables(**place)}
            environ["XFFL_HOST"] = job["host"].rpartition("@")[2]
            process = subprocess.Popen(
                [*child_command("xffl.cluster.launch.runner"), *job["command"]],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes[rank] = process
            for stream, is_error in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, (rank, is_error, stream))

    def _forward(self, rank: int, is_error: bool, stream: IO[bytes], *, is_last: bool = False) -> None:
        """Bring whole lines home; a rest without an end goes when its stream ends or is the last."""
        try:
            chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            if not is_last:
                return
            chunk = b""
        buffer = self._buffers.setdefault(stream.fileno(), LineBuffer())
        ready = b"".join(buffer.feed(chunk)) if chunk else buffer.flush()
        if not chunk:
            del self._buffers[stream.fileno()]
            self._selector.unregister(stream)
            stream.close()
        if ready:
            _send({"rank": rank, "is_error": is_error, "lines": base64.b64encode(ready).decode()})

    def _reap(self) -> None:
        for rank, process in list(self._processes.items()):
            if (code := process.poll()) is None:
                continue
            del self._processes[rank]
            if code != 0:  # what it has started is of no more use
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for stream, is_error in ((process.stdout, False), (process.stderr, True)):
                # A child that the rank left behind may keep its streams open: what has arrived by now is all.
                while stream is not None and not stream.closed:
                    self._forward(rank, is_error, stream, is_last=True)
            _send({"rank": rank, "code": code, "is_stopped": self._end_by is not None})

    def _stop(self, number: int) -> None:
        if self._end_by is None:
            self._end_by = time.monotonic() + self._job["grace_s"]
            self._kill(number)

    def _kill(self, number: int) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
