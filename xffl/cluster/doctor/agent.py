"""The agent of one host: it answers requests with lines of JSON, over a socket or over the pipes of ssh."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from xffl.cluster.doctor.probe import (
    Finding,
    Request,
    check_gpus,
    check_interfaces,
    check_limits,
    check_mpi,
    check_packages,
    check_slurm,
    check_torch,
    find_versions,
    rank_facts,
)
from xffl.cluster.hosts import resolve
from xffl.cluster.launch.ssh_agent import free_port, refusal
from xffl.cluster.network import list_interfaces

__all__ = ["FOLDER_TURNS", "THREADS", "HostChecks", "Line", "Message", "Program", "import_limit_s", "take_part"]

Message = dict[str, Any]
"""The content of one line."""

_LARGEST = 2**24
_PATIENCE_S = 900.0
"""How long an agent waits for the next request. It only matters where the other host has gone without a word."""
_BACKLOG = 256
_CONNECT_S = 5.0
THREADS = 16
"""Pairs at a time, as in :mod:`xffl.cluster.doctor.torch_pair`."""
_SLACK_S = 5.0
FOLDER_TURNS = 40
"""How often a file is replaced while others read it."""
_PAGE = 4096
_TORCH_PAIR = Path(__file__).with_name("torch_pair.py")


# Lines ----------------------------------------------------------------------------------------------------------------


class Line:
    """Messages to another process and back, as lines of JSON."""

    def __init__(self, reader: socket.socket | IO[bytes], writer: socket.socket | IO[bytes] | None = None) -> None:
        self._reader, self._writer = reader, reader if writer is None else writer
        self._bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; an OSError says that the other side has gone."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._writer.fileno(), data) :]

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; an OSError says why there is none. Lines that are no message are skipped."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._bytes:
                text, _, self._bytes = self._bytes.partition(b"\n")
                with suppress(ValueError):  # a login script may print something, a stranger may connect
                    if isinstance(message := json.loads(text), dict):
                        return message
            arrival = select.poll()  # select() takes no file descriptors above 1023
            arrival.register(self._reader, select.POLLIN)
            if not arrival.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise TimeoutError("it did not answer in time")
            part = os.read(self._reader.fileno(), 65536)
            if not part:
                raise ConnectionResetError("it closed the connection")
            self._bytes += part
            if len(self._bytes) > _LARGEST:
                raise ConnectionAbortedError("it sent more than a message may hold")

    def close(self) -> None:
        """End the connection."""
        self._writer.close()
        self._reader.close()


class Program(Line):
    """The line to a program that this process has started, here or over ssh."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the program runs
        self._process = subprocess.Popen(
            list(command), env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(self._process.stdout, self._process.stdin)

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; the error at the end tells what the program said last."""
        try:
            return super().receive(timeout_s)
        except ConnectionResetError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._errors.seek(0)
            said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
            why = said[-1].strip()[:200] if said else f"exit code {self._process.returncode}"
            raise ConnectionResetError(why) from None

    def close(self) -> None:
        """End the program, whatever it does."""
        self._process.kill()
        self._process.wait()
        super().close()
        self._errors.close()


# The checks of a host -------------------------------------------------------------------------------------------------


class HostChecks:
    """The checks of one host: first of itself, then of what it finds of the others."""

    def __init__(
        self, request: Request, environ: Mapping[str, str], launcher: str = "none", mpi: Finding | None = None
    ) -> None:
        """Start importing torch, which takes long; ``mpi`` is what had to be checked before the ranks could meet."""
        self._request, self._environ, self._launcher, self._mpi = request, environ, launcher, mpi
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)  # rank 0 raises its own later
        self._listeners: list[socket.socket] = []
        self._torch: Program | None = None
        if request.with_torch:
            full = {**os.environ, **environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            if environ.get("XFFL_IFNAME"):
                full["GLOO_SOCKET_IFNAME"] = environ["XFFL_IFNAME"]
            self._torch = Program([sys.executable, str(_TORCH_PAIR), str(request.timeout_s)], full)

    def probe(self, machines: int, ranks: int) -> Message:
        """Check this host, for a job of so many machines and ranks; return findings and what others must know of it."""
        needs = self._request.needs
        versions, interfaces = find_versions(), list_interfaces()
        network, address = check_interfaces(self._environ, machines, interfaces)
        gpus, count = check_gpus("gpu" in needs, self._environ)
        findings = [
            *check_packages(versions),
            self._mpi or check_mpi(self._launcher, "mpi" in needs, self._environ),
            check_slurm(self._launcher, "slurm" in needs, self._environ),
            gpus,
            *network,
            *check_limits(ranks, self._files),
        ]
        store = None
        if self._torch is not None:
            told = self._hear(import_limit_s(self._request.timeout_s))
            findings.append(check_torch(told, count, self._environ))
            store = told.get("port")
        if ranks > 1:
            # Linux completes connections to a port with a listener, up to the backlog: nobody needs to accept them.
            self._listeners = [socket.create_server(("", port), backlog=_BACKLOG) for port in (free_port(), 0)]
        return {
            "findings": [asdict(finding) for finding in findings],
            "versions": versions,
            "address": address,
            "addresses": [interface.address for interface in interfaces if interface.address],
            "ports": [int(listener.getsockname()[1]) for listener in self._listeners],
            "store": store,
        }

    def meet(self, table: Message) -> Message:
        """Check what this host finds of the others.

        The table holds the other ``hosts`` (by key ``name``, ``address`` and ``ports``), arguments for the ``folder``,
        and for each pair of this host its ``pairs``: name, rank, and the address and port of the store.
        """
        if table["pairs"]:
            assert self._torch is not None
            self._torch.send({"pairs": table["pairs"]})  # beside the other checks
        found = {"folder": visit_folder(**table["folder"]), **_try_hosts(table["hosts"], self._request.timeout_s)}
        waves = 1 + len(table["pairs"]) // THREADS
        reduced = self._hear(self._request.timeout_s * waves + _SLACK_S) if table["pairs"] else {"results": []}
        lost = {"error": reduced.get("error"), "is_silent": True}
        return {**found, "pairs": reduced.get("results", [lost] * len(table["pairs"]))}

    def close(self) -> None:
        """End what was started."""
        for owned in (self._torch, *self._listeners):
            if owned is not None:
                owned.close()

    def _hear(self, timeout_s: float) -> Message:
        """Return the next message of the process with torch, or its ``error``."""
        assert self._torch is not None
        try:
            return self._torch.receive(timeout_s)
        except OSError as error:
            return {"error": str(error)}


def import_limit_s(timeout_s: float) -> float:
    """Return how long importing torch may take; a cold file system needs a minute."""
    return 45.0 + timeout_s


def take_part(line: Line, facts: Message, checks: HostChecks | None) -> bool:
    """Answer rank 0 as one rank, with the checks of the host if it is the first one there.

    Rank 0 hears, in this order: facts, the time when it says ``machines`` and ``ranks``, the probe, and what this host
    finds of the others when it says which they are. Return whether rank 0 has ended it in order.
    """
    try:
        line.send(facts)
        while "end" not in (message := line.receive(_PATIENCE_S)):
            assert checks is not None
            if "machines" in message:
                line.send({"time": time.time()})
                line.send(attempt(checks.probe, message["machines"], message["ranks"]))
            else:
                line.send(attempt(checks.meet, message))
    except OSError:
        return False
    return True


def attempt(check: Callable[..., Message], *arguments: Any) -> Message:
    """Return what a check returns, or what it raises as ``failed``: whatever is wrong with a host is reported."""
    try:
        return check(*arguments)
    except Exception as error:  # noqa: BLE001  # whatever it is
        return {"failed": f"{type(error).__name__}: {error}"}


def _try_hosts(hosts: Mapping[str, Message], timeout_s: float) -> Message:
    """Resolve the ``names`` of other hosts, connect to their ports, and return the ``failures``: key, port, reason."""
    attempts = [(key, host["address"], port) for key, host in hosts.items() for port in host["ports"]]

    def connect(attempt: tuple[str, str, int]) -> str | None:
        try:
            socket.create_connection(attempt[1:], min(_CONNECT_S, timeout_s)).close()
        except TimeoutError:
            return "no answer: packets are dropped"
        except OSError as error:
            return error.strerror or str(error)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        names = list(pool.map(lambda host: resolve(host["name"]), hosts.values()))
        reasons = list(pool.map(connect, attempts))
    return {
        "names": dict(zip(hosts, names, strict=True)),
        "failures": [[key, port, why] for (key, _, port), why in zip(attempts, reasons, strict=True) if why],
        "tried": len(attempts),
    }


# The shared folder ----------------------------------------------------------------------------------------------------


def visit_folder(path: str, token: str, host: int, hosts: int, patience_s: float) -> Message:
    """Test from one host whether a folder is shared, with files in a folder inside of it that is removed again.

    Host 0 of so many makes that folder and replaces a file many times while all read it; each other one leaves a file
    that host 0 must see. The answer: ``seen_s`` (how late the folder is seen, or ``None``), ``torn`` (how many reads
    saw half a file), ``error``, ``free`` bytes, ``kind`` of file system, and the hosts whose files are ``unseen``. No
    file locks are tested, since xffl uses none.
    """
    folder = Path(path)
    own, kind = folder / f".xffl-doctor-{token}", _file_system(folder)
    failed: Message = {"seen_s": None, "torn": 0, "free": 0, "kind": kind, "unseen": []}
    if host == 0:
        try:
            own.mkdir()
            _replace(own / "turning", "a" * _PAGE)
            _replace(own / "seen", token)
        except OSError as error:
            return {**failed, "error": f"cannot be written ({error.strerror or error})"}
    started = time.monotonic()
    while _read(own / "seen") != token:
        if time.monotonic() - started > patience_s:
            missing = "what rank 0's host writes is not seen" if folder.is_dir() else "is not there"
            return {**failed, "error": missing}
        time.sleep(0.02)
    answer: Message = {**failed, "seen_s": time.monotonic() - started, "error": None}
    for turn in range(FOLDER_TURNS):
        if host == 0:
            _replace(own / "turning", "ab"[turn % 2] * _PAGE)
        text = _read(own / "turning")
        answer["torn"] += text is not None and (len(text) != _PAGE or len(set(text)) != 1)
        time.sleep(0.002)
    answer["free"] = shutil.disk_usage(folder).free
    if host != 0:
        try:
            _replace(own / f"host-{host}", token)
        except OSError as error:
            answer["error"] = f"cannot write there: {error.strerror}"
        return answer
    deadline, absent = time.monotonic() + patience_s, list(range(1, hosts))
    while absent := [other for other in absent if _read(own / f"host-{other}") != token]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a file system may show a file late
    shutil.rmtree(own, ignore_errors=True)
    return {**answer, "unseen": absent}


def _file_system(path: Path) -> str:
    """Return the kind of file system of a path, as Linux calls it; ``unknown`` where it does not tell."""
    try:
        rows = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    full = os.path.realpath(path)
    kinds = [(len(mount), kind) for mount, kind in rows if full == mount or full.startswith(mount.rstrip("/") + "/")]
    return max(kinds)[1] if kinds else "unknown"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def main(job: Message) -> None:
    """Be the agent of a host that ssh has reached; its first message tells about the host, or why it is ``refused``."""
    os.environ.update(job["environ"])
    line = Line(sys.stdin.buffer, sys.stdout.buffer)
    if (why := refusal(job)) is not None:
        line.send({"refused": why})
        return
    checks = HostChecks(Request(**job["request"]), os.environ)
    try:
        take_part(line, rank_facts(os.environ), checks)
    finally:
        checks.close()
