"""Lighthouse of an elastic federation, as one cell uses it: heartbeats, meetings, and the way out.

What stands behind it is torchft's lighthouse, by its ``torchft.coordination`` alone. It tells a cell which others ask
for a round at the same time; it knows no models, keeps nothing, and may be started again at any time. What it leaves
out is made up for here and in :mod:`xffl.elastic.roster`: a request never runs out of time by itself, since the
lighthouse would count its sender as present for ever; a restarted lighthouse tells whoever asks first that nobody else
is there, so cells look again for those that they miss. They need not where they know that it was not restarted: a
connection on which nothing is ever sent ends with the process behind it.

Where a file names the lighthouse, another one may take its place at any time: the file is read again once a second, so
that heartbeats and a request that waits go to the one that it names.

Anybody who reaches the lighthouse may ask it in any name, and reads what the cells tell. So a record counts only if it
is signed with the run's token, if the lighthouse has it from who it is about, and if it is none that was told before:
:class:`Register`. A cell that finds another record than its own under its name asks again.
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

from xffl.cluster.lighthouse_address import resolve_lighthouse
from xffl.compat.sockets import limit_silence, open_sockets
from xffl.elastic.roster import Attendance, CellRecord, name_cell
from xffl.errors import ConfigError, LaunchError
from xffl.extras import optional_import

if TYPE_CHECKING:
    from types import ModuleType

    from torchft.coordination import LighthouseClient, Quorum

__all__ = ["Lighthouse", "Meeting", "NotOwnRecord", "Register", "coordination"]

HEARTBEAT_S = 0.1
"""Seconds between two heartbeats; the lighthouse gives a cell up after two seconds without one."""
BEAT_LIMIT_S = 1.0
"""A heartbeat that takes longer is lost, and the next one goes over a new connection."""
CONNECT_S = 5.0
REQUEST_S = 7 * 24 * 3600.0
"""A request that runs out of time leaves a ghost in the lighthouse, so none does while a job lasts."""
AGAIN_S = 0.2
"""Seconds between two requests where the lighthouse does not answer."""
FOLLOW_S = 1.0
"""Seconds between two looks into the file that names the lighthouse."""
LONGEST_RECORD = 1 << 20
"""Bytes of a record as JSON, at most; torchft takes 4 MiB for all of a meeting."""
SILENT_S = 4
"""A connection to the lighthouse ends where its host has been silent for so many seconds, and is made anew."""


@dataclass(frozen=True)
class Meeting:
    """Who has asked for a round at the same time."""

    records: tuple[CellRecord, ...]
    created: int  # in nanoseconds, by the lighthouse's clock
    number: int  # the same as that of the last meeting where that was of the same lives, else the next one
    unread: tuple[ConfigError, ...] = ()  # of cells that run another version of xffl
    unproven: tuple[str, ...] = ()  # the lives whose records were not made with the run's token
    refused: Mapping[str, str] = field(default_factory=dict)  # other lives whose records do not count, and why


class Register:
    """The signatures of a run's records, and which of them have been told already.

    Each request of a life has a number, its ``serial``, above those of its earlier ones. Who has met a life therefore
    knows an older record of it that somebody tells again.

    :param token: The run's; empty where it does without.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._serials: dict[str, int] = {}
        """The numbers of the records that lives have told last"""

    def sign(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of a record with their signature."""
        return {**plain, "proof": self._proof(plain)}

    def read(self, life: str, data: object) -> CellRecord | None:
        """Return the record that the lighthouse has from a life; ``None`` where the run's token has not signed it.

        Strangers may have written anything. Raises :class:`NotOwnRecord` where it is signed, and that of another life
        or an older one; ConfigError where another version of xffl has made it.
        """
        plain = dict(data) if isinstance(data, Mapping) else {}
        proof = plain.pop("proof", None)
        if not isinstance(proof, str):
            return None
        try:
            is_signed = hmac.compare_digest(proof.encode(), self._proof(plain).encode())
        except (ValueError, TypeError, RecursionError):  # what no cell writes, and JSON cannot have or not so deep
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
        """Note the records of a meeting."""
        self._serials |= {record.life: record.serial for record in records}

    def _proof(self, plain: Mapping[str, Any]) -> str:
        """Return what only those can tell of a record that know the run's token."""
        text = json.dumps(plain, sort_keys=True).encode()
        if len(text) > LONGEST_RECORD:
            raise ValueError(f"a record of {len(text)} bytes")
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()


class NotOwnRecord(Exception):
    """A signed record that is told by who has not written it, or once more."""


class Lighthouse:
    """One cell's line to the lighthouse; its leader alone has one. Heartbeats begin with the first meeting.

    :param place: Where it listens, ``http://HOST:PORT``, or ``file:PATH`` with a file that names it.
    :param life: What this start of the cell's job is called.
    :param store: HOST:PORT of the cell's own store.
    :param token: The run's; empty where it does without.
    :raises ConfigError: if torchft is not installed.
    """

    def __init__(self, place: str, life: str, store: str, token: bytes) -> None:
        self._torchft = coordination()
        self._place, self._life, self._store = place, life, store
        self._register = Register(token)
        self._serial = 0
        """The number of this life's last record"""
        self._url = ""
        """The address to which heartbeats go, and at which client and witness are."""
        self._asked_at: str | None = None
        """The address to which the request has gone that is waited for."""
        self._connecting = threading.Lock()
        self._has_left = threading.Event()
        self._trouble: str | None = None
        self._client: LighthouseClient | None = None
        self._heart: threading.Thread | None = None
        self._answers: queue.SimpleQueue[Quorum | Exception] | None = None
        self._witness: socket.socket | None = None
        self._attendance = Attendance()
        self._witnessed: set[int] = set()
        """When the meetings were that the lighthouse has formed since the witness is connected to it."""
        if place.startswith("file:"):
            threading.Thread(target=self._follow, name="xffl-lighthouse", daemon=True).start()

    def meet(self, record: CellRecord, within_s: float, is_left: Callable[[], bool] = lambda: False) -> Meeting | None:
        """Ask who else wants a round, and wait for the answer; ``None`` where there is none yet, or ``is_left``.

        The next call goes on waiting for it; it may have another record only where this one has returned a meeting.
        Raises LaunchError where the lighthouse does not answer.
        """
        deadline = time.monotonic() + within_s
        while True:
            if self._answers is None:
                self._ask(record)
            assert self._answers is not None
            try:
                # In slices, so that signals are heard meanwhile.
                answer = self._answers.get(timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            except queue.Empty:
                if self._asked_at not in (None, self._url):
                    self._answers = None  # another lighthouse has taken the place of the one that was asked
                if is_left():
                    return None
                if time.monotonic() < deadline:
                    continue
                if self._trouble is None:
                    return None
                is_fixed = not self._place.startswith("file:")
                hint = "; see that it runs, and that this host reaches it" if is_fixed else ""
                raise LaunchError(f"the lighthouse {self._place} does not answer ({self._trouble}){hint}") from None
            self._answers = None
            if not isinstance(answer, Exception):
                meeting = self._read(answer)
                if any(one.life == self._life and one.serial == self._serial for one in meeting.records):
                    self._trouble = None
                    self._register.note(meeting.records)
                    if _is_open(self._witness):
                        self._witnessed.add(meeting.created)
                    self._attendance.note(meeting.number, meeting.created)
                    return meeting
                # To the others this cell was not there, though the meeting has the number of one with it.
                self._attendance.note_absence()
                self._trouble = f"somebody else asks there in the name of {name_cell(self._life)}"
            else:
                self._client, self._trouble = None, _text(answer)  # it may have been started again
            time.sleep(AGAIN_S)

    def _read(self, answer: Quorum) -> Meeting:
        """Return which records of a meeting count, and who has told others."""
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
            number=answer.quorum_id,
            unread=tuple(unread),
            unproven=tuple(unproven),
            refused=refused,
        )

    def leave(self) -> None:
        """End the heartbeats, so that nobody waits for this cell."""
        self._has_left.set()
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.join()
        self._drop_witness()

    def _follow(self) -> None:
        """Send the heartbeats to the lighthouse that the file names, also while this cell trains."""
        while not self._has_left.wait(FOLLOW_S):
            with self._connecting, suppress(LaunchError, OSError):  # the next request will tell
                if self._heart is not None:
                    self._find()

    def _find(self) -> None:
        """Find the lighthouse, and begin the heartbeats."""
        url = resolve_lighthouse(self._place)
        if url != self._url:
            self._url = url
            self._client = None
            self._drop_witness()
        if self._heart is None:
            # It ends with the main thread. One that is cut off inside of torchft while Python ends aborts the process.
            self._heart = threading.Thread(target=self._beat, name="xffl-heartbeats", daemon=False)
            self._heart.start()

    def _beat(self) -> None:
        """Send heartbeats until this cell leaves.

        Not by torchft's ManagerServer, which needs no turn of Python's, but offers whoever connects to it to end this
        process. A process that holds Python's lock for two seconds counts as lost for as long.
        """
        client: LighthouseClient | None = None
        url = ""
        limit = timedelta(seconds=BEAT_LIMIT_S)
        while not self._has_left.wait(HEARTBEAT_S) and threading.main_thread().is_alive():
            try:
                if client is None or url != self._url:
                    url = self._url
                    client = self._torchft.LighthouseClient(addr=url, connect_timeout=limit)
                client.heartbeat(self._life, timeout=limit)
            except (RuntimeError, OSError):  # it is away, or another one is there; requests tell who waits for it
                client = None

    def _drop_witness(self) -> None:
        if self._witness is not None:
            self._witness.close()
        self._witness, self._witnessed = None, set()

    def _ask(self, record: CellRecord) -> None:
        """Send a request, in a thread of its own: it lasts until all cells have asked."""
        answers = self._answers = queue.SimpleQueue()
        self._asked_at = None

        def ask() -> None:
            try:
                with self._connecting:
                    self._find()
                    if self._client is None:
                        connect = timedelta(seconds=CONNECT_S)
                        self._client = self._torchft.LighthouseClient(addr=self._url, connect_timeout=connect)
                    client = self._client
                    self._attendance.forget_before(record.version.created)
                    self._serial += 1
                    told = replace(
                        record,
                        serial=self._serial,
                        same_lighthouse=self._is_same(record),
                        met=self._attendance.last_number,
                        has_met_all=self._attendance.covers(record.version, record.doubt),
                    ).to_plain()
                    self._asked_at = self._url
                    self._limit_silence()
                answers.put(
                    client.quorum(
                        replica_id=self._life,
                        timeout=timedelta(seconds=REQUEST_S),
                        address="",
                        store_address=self._store,
                        step=record.version.round,
                        world_size=record.ranks,
                        data=self._register.sign(told),
                    )
                )
            except Exception as error:  # noqa: BLE001 - told to who waits
                answers.put(error)

        threading.Thread(target=ask, name="xffl-meeting", daemon=True).start()

    def _is_same(self, record: CellRecord) -> bool:
        """Tell whether the lighthouse is that of the meetings from which the cell has its version, and its doubt."""
        if _is_open(self._witness):
            self._witnessed = {created for created in self._witnessed if created >= record.version.created}
            return {one.created for one in (record.version, record.doubt) if one is not None} <= self._witnessed
        self._drop_witness()
        place = urlsplit(self._url)
        with suppress(OSError):  # the request will tell
            self._witness = socket.create_connection((place.hostname, place.port), CONNECT_S)
            self._witness.setblocking(False)
        return False

    def _limit_silence(self) -> None:
        """Let this process's connections to the lighthouse end where its host is silent.

        Else a request waits for the kernel's next try when the network is whole again, for as long as it was broken.
        """
        if self._witness is not None:
            for descriptor in open_sockets():
                limit_silence(descriptor, SILENT_S, self._witness.getpeername()[:2])


def _is_open(connection: socket.socket | None) -> bool:
    """Tell whether the process at the other end of a connection is still there; what it has sent is dropped."""
    if connection is None:
        return False
    try:
        while connection.recv(4096):
            continue
        return False  # closed at the other end
    except BlockingIOError:
        return True  # nothing to read
    except OSError:
        return False  # reset, or its host does not answer


def coordination() -> ModuleType:
    """Return torchft's module for it; raise ConfigError, which names the extra, where that is not installed."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    with optional_import("elastic", "an elastic federation needs torchft, which has wheels for x86-64 Linux"):
        import torchft.coordination
    module: Any = torchft.coordination
    return module  # type: ignore[no-any-return]


def _text(error: Exception) -> str:
    if isinstance(error, LaunchError):  # there is no file that names it
        return str(error)
    # What comes after a semicolon is torchft's advice.
    return str(error).splitlines()[0].partition(";")[0][:120] if str(error) else type(error).__name__
