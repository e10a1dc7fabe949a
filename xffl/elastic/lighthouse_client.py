"""Client of an elastic federation's lighthouse in one cell: heartbeats, meetings, and leaving.

The server is torchft's lighthouse, used through ``torchft.coordination`` only. It tells a cell which other cells
request a round at the same time. It knows nothing of models, stores nothing on disk, and may be restarted at any time.
Two of its properties are compensated for here and in :mod:`xffl.elastic.roster`:

- It counts the sender of a request that has timed out as present for ever. So requests here never time out.
- After a restart it answers the first request as if no other cell existed. So cells repeat the request while a cell is
  missing that still answers them.

If a file names the lighthouse, another one may replace it at any time. The file is read once a second, and heartbeats
and the pending request move to the lighthouse that it names.

Anybody who reaches the lighthouse can send requests in any cell's name and read all records. A record therefore counts
only if it is signed with the run's token, was sent under the life that it describes, and is newer than that life's
last one (:class:`Register`). A cell that finds a foreign record under its own name requests again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from xffl.cluster.lighthouse.address import resolve_lighthouse
from xffl.cluster.lighthouse.page import read_lighthouse
from xffl.compat.sockets import limit_silence, open_sockets
from xffl.elastic.roster import CellRecord, name_cell
from xffl.errors import ConfigError, LaunchError
from xffl.extras import optional_import

if TYPE_CHECKING:
    from types import ModuleType

    from torchft.coordination import LighthouseClient, Quorum

__all__ = ["Lighthouse", "Meeting", "NotOwnRecord", "Register", "coordination"]

HEARTBEAT_S = 0.1
"""Seconds between two heartbeats; the lighthouse drops a cell after two seconds without one."""
BEAT_LIMIT_S = 1.0
"""Timeout of a heartbeat; after it the next one uses a new connection."""
CONNECT_S = 5.0
REQUEST_S = 7 * 24 * 3600.0
"""Timeout of a request, longer than any job: a request that times out stays in the lighthouse for ever."""
AGAIN_S = 0.2
"""Seconds between two requests while the lighthouse does not answer."""
FOLLOW_S = 1.0
"""Seconds between two reads of the file that names the lighthouse."""
LONGEST_RECORD = 1 << 20
"""The most bytes of a record as JSON; torchft accepts 4 MiB for all records of a meeting."""
PAGE_S = 0.5
"""Timeout of a look at the lighthouse's page."""
SILENT_S = 4
"""Seconds without a packet from the lighthouse's host after which a connection is closed and made again."""


@dataclass(frozen=True)
class Meeting:
    """The cells that requested a round at the same time."""

    records: tuple[CellRecord, ...]  # the valid records
    created: int  # in nanoseconds, by the lighthouse's clock
    unread: tuple[ConfigError, ...] = ()  # one for each record of another version of xffl
    unproven: tuple[str, ...] = ()  # lives whose records are not signed with the run's token
    refused: Mapping[str, str] = field(default_factory=dict)  # lives whose records are foreign or old, with the reason


class Register:
    """Signs the records of a run, verifies those of others, and rejects replayed ones.

    Each request of a life has a higher number (``serial``) than its earlier ones, so a cell that has met a life
    recognizes an older record of it.

    :param token: The run's token; empty if the run has none.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._serials: dict[str, int] = {}
        """By life, the number of its latest record"""

    def sign(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of a record with their signature added."""
        return {**plain, "proof": self._proof(plain)}

    def read(self, life: str, data: object) -> CellRecord | None:
        """Return the record that was sent under the name of a life; ``None`` if the run's token has not signed it.

        The data may come from anybody. Raises :class:`NotOwnRecord` if a signed record is another life's, or older than
        the life's last one, and ConfigError if another version of xffl wrote it.
        """
        plain = dict(data) if isinstance(data, Mapping) else {}
        proof = plain.pop("proof", None)
        if not isinstance(proof, str):
            return None
        try:
            is_signed = hmac.compare_digest(proof.encode(), self._proof(plain).encode())
        except (ValueError, TypeError, RecursionError):  # no cell writes it: not JSON, or nested too deep
            return None
        if not is_signed:
            return None
        if plain.get("life") != life:
            raise NotOwnRecord(f"tells the record of {name_cell(str(plain.get('life')))}, which is not its own")
        record = CellRecord.from_plain(plain)
        last = self._serials.get(life)
        if last is not None and record.serial <= last:
            raise NotOwnRecord(f"tells its record number {record.serial} again, but has told number {last} since")
        return record

    def note(self, records: Iterable[CellRecord]) -> None:
        """Note the serial numbers of a meeting's records."""
        self._serials |= {record.life: record.serial for record in records}

    def _proof(self, plain: Mapping[str, Any]) -> str:
        """Return the HMAC of a record under the run's token."""
        text = json.dumps(plain, sort_keys=True).encode()
        if len(text) > LONGEST_RECORD:
            raise ValueError(f"a record of {len(text)} bytes")
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()


class NotOwnRecord(Exception):
    """A signed record was sent by another process than the one that wrote it, or a second time."""


class Lighthouse:
    """Connection of a cell to the lighthouse; only the first rank of the cell has one.

    Heartbeats begin with the first request.

    :param place: Address of the lighthouse, ``http://HOST:PORT``, or ``file:PATH`` of a file that holds it.
    :param life: Name of this start of the cell's job.
    :param token: The run's token; empty if the run has none.
    :raises ConfigError: if torchft is not installed.
    """

    def __init__(self, place: str, life: str, token: bytes) -> None:
        self._torchft = coordination()
        self._place = place
        self._life = life
        self._register = Register(token)
        self._serial = 0
        """Number of this life's last record"""
        self._url = ""
        """Current address of the lighthouse: of the heartbeats and the client"""
        self._asked_at: str | None = None
        """Address to which the pending request was sent"""
        self._connecting = threading.Lock()
        self._has_left = threading.Event()
        self._is_paused = False
        """Whether no heartbeats are sent until the next request"""
        self._trouble: str | None = None
        self._client: LighthouseClient | None = None
        self._heart: threading.Thread | None = None
        self._answers: queue.SimpleQueue[Quorum | Exception] | None = None
        if place.startswith("file:"):
            threading.Thread(target=self._follow, name="xffl-lighthouse", daemon=True).start()

    def meet(self, record: CellRecord, within_s: float, is_left: Callable[[], bool] = lambda: False) -> Meeting | None:
        """Request a round and wait for the other cells; ``None`` if they have not come in time, or if ``is_left()``.

        The request stays pending, and the next call continues to wait for it. A call may pass another record only if
        the one before has returned a meeting. Raises LaunchError if the lighthouse does not answer.
        """
        deadline = time.monotonic() + within_s
        while True:
            answers = self._ask(record) if self._answers is None else self._answers
            try:
                # In slices, so that Python can run signal handlers in between.
                answer = answers.get(timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            except queue.Empty:
                is_answered = False
                if self._asked_at not in (None, self._url):
                    self._answers = None  # another lighthouse has replaced the one that has the request
            else:
                is_answered = True
                self._answers = None
                if isinstance(answer, Exception):
                    self._client = None  # the lighthouse may have been restarted
                    self._trouble = _text(answer)
                else:
                    meeting = self._read(answer)
                    if any(other.life == self._life and other.serial == self._serial for other in meeting.records):
                        self._trouble = None
                        self._register.note(meeting.records)
                        return meeting
                    # The others have not seen this cell's record, although the lighthouse counted this cell as present.
                    self._trouble = f"somebody else asks there in the name of {name_cell(self._life)}"
            if is_left():
                return None
            left_s = deadline - time.monotonic()
            if left_s <= 0.0 and self._trouble is None:
                return None
            if left_s <= 0.0:
                is_fixed = not self._place.startswith("file:")
                hint = "; see that it runs, and that this host reaches it" if is_fixed else ""
                raise LaunchError(f"the lighthouse {self._place} does not answer ({self._trouble}){hint}")
            if is_answered:
                time.sleep(min(AGAIN_S, left_s))

    def _read(self, answer: Quorum) -> Meeting:
        """Return the meeting of an answer, with its valid records and with the lives whose records are not."""
        records: list[CellRecord] = []
        unread: list[ConfigError] = []
        unproven: list[str] = []
        refused: dict[str, str] = {}
        for member in answer.participants:
            life = str(member.replica_id)
            try:
                record = self._register.read(life, member.data)
            except ConfigError as error:
                unread.append(error)
            except NotOwnRecord as error:
                refused[life] = str(error)
            else:
                if record is None:
                    unproven.append(life)
                else:
                    records.append(record)
        created = answer.created.seconds * 10**9 + answer.created.nanos
        return Meeting(
            records=tuple(records),
            created=created,
            unread=tuple(unread),
            unproven=tuple(unproven),
            refused=refused,
        )

    def find_quiet(self, quiet_s: float) -> dict[str, bool]:
        """Return the lives of which the lighthouse has had no heartbeat for some time, and whether it waits no longer.

        :param quiet_s: Seconds since the last heartbeat.
        :return: By life, whether it counts as lost; empty if the page of the lighthouse cannot be read.
        """
        try:
            status = read_lighthouse(self._url, PAGE_S)
        except LaunchError:  # a request to the lighthouse reports it
            return {}
        return {cell.life: cell.is_lost for cell in status.cells if cell.seen_s is not None and cell.seen_s > quiet_s}

    def leave(self) -> None:
        """Stop the heartbeats, so that the others do not wait for this cell, and close the connections."""
        self._has_left.set()
        heart = self._heart
        self._heart = None
        if heart is not None:
            heart.join()
        self._client = None  # which has threads and a connection

    def pause(self) -> None:
        """Stop the heartbeats until the next request: the lighthouse lets cells wait for others that live."""
        self._is_paused = True

    def withdraw(self) -> None:
        """Take the pending request back: the lighthouse forgets it with the heartbeats, until the next one."""
        self.pause()
        self._answers = None

    def _follow(self) -> None:
        """Move the heartbeats to the lighthouse that the file names, also while this cell trains."""
        while not self._has_left.wait(FOLLOW_S):
            with self._connecting, suppress(LaunchError, OSError):  # the next request will report it
                if self._heart is not None:
                    self._find()

    def _find(self) -> None:
        """Read the lighthouse's address, and start the heartbeats."""
        url = resolve_lighthouse(self._place)
        if url != self._url:
            self._url = url
            self._client = None
        if self._heart is None:
            # No daemon: if the interpreter ended while it was inside torchft, the process would abort. It ends
            # by itself with the main thread.
            self._heart = threading.Thread(target=self._beat, name="xffl-heartbeats", daemon=False)
            self._heart.start()

    def _beat(self) -> None:
        """Send heartbeats until this cell leaves.

        torchft's ManagerServer would do it without the GIL, but lets anybody who connects to it end this process. So a
        cell whose main thread holds the GIL for two seconds counts as lost in the meantime.
        """
        client: LighthouseClient | None = None
        url = ""
        limit = timedelta(seconds=BEAT_LIMIT_S)
        while not self._has_left.wait(HEARTBEAT_S) and threading.main_thread().is_alive():
            if self._is_paused:
                continue
            try:
                if client is None or url != self._url:
                    url = self._url
                    client = self._torchft.LighthouseClient(addr=url, connect_timeout=limit)
                client.heartbeat(self._life, timeout=limit)
            except (RuntimeError, OSError):  # unreachable or replaced; a pending request reports it
                client = None

    def _ask(self, record: CellRecord) -> queue.SimpleQueue[Quorum | Exception]:
        """Send a request in a new thread, since the call blocks until all cells have sent theirs.

        :return: The queue that will hold the answer.
        """
        answers: queue.SimpleQueue[Quorum | Exception] = queue.SimpleQueue()
        self._answers = answers
        self._asked_at = None
        self._is_paused = False

        def ask() -> None:
            try:
                with self._connecting:
                    self._find()
                    if self._client is None:
                        connect = timedelta(seconds=CONNECT_S)
                        self._client = self._torchft.LighthouseClient(addr=self._url, connect_timeout=connect)
                    client = self._client
                    self._serial += 1
                    signed = replace(record, serial=self._serial).to_plain()
                    self._asked_at = self._url
                    self._limit_silence()
                answers.put(
                    client.quorum(
                        replica_id=self._life,
                        timeout=timedelta(seconds=REQUEST_S),
                        address="",
                        store_address=record.address,
                        step=record.round,
                        world_size=record.ranks,
                        data=self._register.sign(signed),
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised or reported by the thread that waits
                answers.put(error)

        threading.Thread(target=ask, name="xffl-meeting", daemon=True).start()
        return answers

    def _limit_silence(self) -> None:
        """Let this process's connections to the lighthouse fail if its host is silent.

        Otherwise a pending request would continue only at the kernel's next retransmission, which after a network
        failure may come as late again as the failure has lasted.
        """
        place = urlsplit(self._url)
        with suppress(OSError):  # the request will report it
            peers = {
                answer[4][:2] for answer in socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)
            }
            for descriptor in open_sockets():
                for host, port in peers:
                    limit_silence(descriptor, SILENT_S, (str(host), int(port)))


def coordination() -> ModuleType:
    """Import ``torchft.coordination``; raise ConfigError, which names the extra, if torchft is not installed."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    with optional_import("elastic", "an elastic federation needs torchft, which has wheels for x86-64 Linux"):
        import torchft.coordination
    module: Any = torchft.coordination
    return module  # type: ignore[no-any-return]


def _text(error: Exception) -> str:
    if isinstance(error, LaunchError):  # the file that names the lighthouse cannot be used
        return str(error)
    # torchft's advice follows a semicolon.
    return str(error).splitlines()[0].partition(";")[0][:120] if str(error) else type(error).__name__
