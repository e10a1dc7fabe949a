"""The lighthouse by which the cells of an elastic run find each other, as a process of a job of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from xffl.cluster.hosts import node_address, reachable_address
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import ExitCode
from xffl.cluster.launch.job_layout import JobLayout
from xffl.cluster.launch.local import held_port
from xffl.cluster.lighthouse.address import ADDRESS_BYTES, bind_address, read_address
from xffl.cluster.lighthouse.timeouts import CELL_HEARTBEAT_TIMEOUT_S, CELL_JOIN_TIMEOUT_S
from xffl.cluster.network import control_address
from xffl.cluster.reaching import connection_error
from xffl.cluster.slurm.allocation import own_host
from xffl.compat.libc import die_with_parent
from xffl.errors import LaunchError
from xffl.extras import optional_import
from xffl.files import read_bytes, write_whole

__all__ = ["LighthouseProcess", "SharedLighthouse", "own_lighthouse"]

_PAUSE_S = 1.0  # before it is started again
_LOOK_S = 1.0  # between two looks into the file that names the lighthouse of cells in several jobs
_SILENCE_S = 10.0  # after so long without an answer from a lighthouse in another job, this job runs one
_ANSWER_S = 1.0
# An address of no host (RFC 5737): where its name does not tell this host's own, the way there does.
_FAR = "198.51.100.1"


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
        """End this job's lighthouse, if it runs one; other jobs see that at their next look."""
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
            text = read_bytes(self._file, ADDRESS_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return ""
        return text.strip().removeprefix("http://")

    def _end(self, own: LighthouseProcess) -> None:
        own.stop()
        self._own = None
        self._port.close()


def _answers(address: str) -> bool:
    """Tell whether somebody listens at an address."""
    with suppress(LaunchError):  # it is no address
        return connection_error(*read_address("the lighthouse", address), _ANSWER_S) is None
    return False
