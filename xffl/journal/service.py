"""A journal behind a service, for cells that share no folder: the folder of one host, over HTTP.

Two requests are known, both with POST. ``/put`` sends the text of a record and gets the text of the record that stands
under its number, which is on the disk by then. ``/read`` sends ``{"from": NUMBER}`` and gets the texts of the records
from that number on. A refusal is a line of text.

Each request has a random nonce and a proof, the HMAC of its path, nonce and body under the run's token; each answer has
one of its status and body, and of the request's nonce. So neither can be forged, and no old answer can be sent again.
A request that is sent again does no harm: a record of the same id is put once. Nothing is encrypted; records hold
numbers of cells, of rounds and of steps.

The service may be restarted at any time: what it has answered is in its folder. A client that gets no answer asks
again, with the same record, until its patience ends; then what stands is not known, and the cell is in doubt. Neither
side waits without end for bytes that come one by one: a request has a deadline on both.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import queue
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from xffl.checks import decimal, visible
from xffl.cluster.listening import open_listener
from xffl.cluster.network import is_loopback
from xffl.errors import CheckpointError, ConfigError, LaunchError, XfflError
from xffl.journal.folder import JournalFolder, hold_folder
from xffl.journal.records import (
    LONGEST_RECORD,
    MOST_RECORDS,
    PATIENCE_S,
    STOPPING_S,
    JournalUnproven,
    JournalUnreachable,
    Record,
    read_record,
    record_text,
)
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = ["JournalService", "RemoteJournal"]

PUT, READ = "/put", "/read"
NONCE, PROOF = "X-Xffl-Nonce", "X-Xffl-Proof"
LONGEST_ANSWER = 4 * LONGEST_RECORD
"""The most bytes of an answer; records beyond it are read by another request"""
MOST_CONNECTIONS = 256
"""Connections that are served at a time; others are closed"""
SILENT_S = 10.0
"""How long either side waits for the next bytes of the other"""
REQUEST_S = 30.0
"""How long the service reads one request; its answer has SILENT_S of its own"""
LOOK_S = 0.2
"""How often a client that waits looks whether it is to stop"""
QUIET_S = 5.0
"""How long a client asks in vain before it says so"""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class JournalService:
    """Serves the journal in a folder of this host, in threads of this process, until it is closed.

    :param folder: The folder; nothing else may serve it.
    :param token: The run's token; empty if the run has none.
    :param host: Address to listen at.
    :param port: Port to listen at; 0 for any.
    :raises ConfigError: if the folder is served already.
    :raises LaunchError: if nobody can listen there.
    """

    def __init__(self, folder: JournalFolder, token: bytes, host: str, port: int) -> None:
        with ExitStack() as held:
            held.enter_context(hold_folder(folder.path))
            folder.remove_temporaries()
            try:
                opened = open_listener(host, port, is_local=is_loopback(host))
            except LaunchError as error:
                raise LaunchError(
                    f"the journal cannot listen at {host}:{port}; give another address or port"
                ) from error
            self._server = _Server(opened.socket, folder, token)
            held.callback(self._server.server_close)
            self._held = held.pop_all()
        address = opened.address or host  # empty: at all addresses
        self.url = f"http://[{address}]:{opened.port}" if ":" in address else f"http://{address}:{opened.port}"
        """Where the service is"""
        self._thread = threading.Thread(target=self._server.serve_forever, name="xffl-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and let another process serve the folder."""
        self._server.shutdown()
        self._thread.join()
        self._held.close()


class _TimedSocket(socket.socket):
    """A connection with a deadline for all of its bytes; the next ones may take SILENT_S at most."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__(connection.family, connection.type, connection.proto, fileno=connection.detach())
        self.deadline = deadline

    def connect(self, address: Any) -> None:
        """Connect before the deadline."""
        self._limit()
        super().connect(address)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive what comes next; files of a socket read by this, too."""
        self._limit()
        return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all of the data before the deadline."""
        self._limit()
        super().sendall(data, flags)

    def _limit(self) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self.settimeout(min(SILENT_S, left_s))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: Any, folder: JournalFolder, token: bytes) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.folder = folder
        self.token = token
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, whose request has a deadline from now on."""
        connection, address = super().get_request()
        return _TimedSocket(connection, time.monotonic() + REQUEST_S), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, which gives the place back."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread could be started; the base class closes the connection
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hangs up is none of the run's errors."""


class _Refusal(Exception):
    """A request that is not answered by records."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    connection: _TimedSocket
    server_version = "xffl"
    sys_version = ""

    def do_POST(self) -> None:
        """Answer a request."""
        nonce = self.headers.get(NONCE, "")[:64]
        try:
            body = self._read_body()
            proof = self.headers.get(PROOF, "")
            if not hmac.compare_digest(proof.encode(), _proof(self.server.token, self.path, nonce, body).encode()):
                raise _Refusal(HTTPStatus.UNAUTHORIZED, "who asks does not know the token of this journal's run")
            status, answer = HTTPStatus.OK, self._answer(body)
        except _Refusal as refusal:
            status, answer = refusal.status, f"{refusal}\n".encode()
        except JournalUnreachable as error:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode()
        except XfflError as error:
            status, answer = HTTPStatus.BAD_REQUEST, f"{error}\n".encode()
        self.connection.deadline = time.monotonic() + SILENT_S
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(answer)))
        self.send_header(PROOF, _proof(self.server.token, str(int(status)), nonce, answer))
        self.end_headers()
        self.wfile.write(answer)

    def _read_body(self) -> bytes:
        length = decimal(text) if (text := self.headers.get("Content-Length", "")).isascii() and text else None
        if length is None:
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "a request to the journal needs a Content-Length")
        if length > LONGEST_RECORD:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the journal reads {LONGEST_RECORD} bytes at most")
        return self.rfile.read(length)

    def _answer(self, body: bytes) -> bytes:
        if self.path == PUT:
            return record_text(self.server.folder.put(read_record(body, "what was put"))).encode()
        if self.path == READ:
            try:
                given = Fields(parse_json(body, limit=200), "the request")
            except ValueError as error:
                raise ConfigError(f"the request cannot be read: {error}") from error
            number = given.integer("from", 0, MOST_RECORDS)
            return b"".join(self.server.folder.read_texts(number, LONGEST_ANSWER))
        raise _Refusal(HTTPStatus.NOT_FOUND, f"the journal knows {PUT} and {READ}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Say nothing of single requests."""


class RemoteJournal:
    """The journal of a :class:`JournalService`, as a cell sees it.

    :param url: Where the service is, ``http://HOST:PORT``.
    :param token: The run's token; empty if the run has none.
    :param patience_s: How long to ask, all tries together; a first try has SILENT_S at least.
    """

    def __init__(self, url: str, token: bytes, patience_s: float = PATIENCE_S) -> None:
        self._url = url
        self._place = urlsplit(url)
        self._token = token
        self._patience_s = patience_s
        self._is_stopping: Callable[[], bool] | None = None

    def heed(self, is_stopping: Callable[[], bool] | None) -> None:
        """Wait no longer than :data:`STOPPING_S` for an answer once the caller is to stop.

        :param is_stopping: Tells whether it is.
        """
        self._is_stopping = is_stopping

    @property
    def where(self) -> str:
        """The address of the service."""
        return self._url

    def put(self, record: Record) -> Record:
        """Publish a record unless another one has its number, and return the record that stands under the number.

        :param record: The record; the one before it must stand.
        :return: The record that stands, on the disk of the service.
        :raises JournalUnreachable: if it is not known what stands.
        """
        standing = self._ask(PUT, record_text(record).encode())
        if [answer.number for answer in standing] != [record.number]:
            raise JournalUnreachable(f"the journal {self._url} has not answered what stands under {record.number}")
        return standing[0]

    def read_from(self, number: int) -> list[Record]:
        """Return the records from a number on, in order and without a gap, possibly not all of them.

        :param number: Number of the first record to return.
        :return: The records: none if there is no record of that number.
        :raises JournalUnreachable: if the service does not answer; JournalUnproven if it does, but with another token.
        """
        return self._ask(READ, json.dumps({"from": number}).encode())

    def _ask(self, path: str, body: bytes) -> list[Record]:
        """Ask until there is an answer or patience ends, with longer and longer pauses."""
        begun = time.monotonic()
        deadline = begun + max(self._patience_s, SILENT_S)
        pause_s = FIRST_PAUSE_S
        has_said = False
        while True:
            try:
                lines = self._try_until_stop(path, body, deadline, begun).splitlines()
                return [read_record(line, f"the answer of the journal {self._url}") for line in lines]
            except (OSError, http.client.HTTPException, JournalUnreachable, CheckpointError) as error:
                now = time.monotonic()
                if now + pause_s > begun + self._patience_s or self._is_over(begun):
                    kind = JournalUnproven if isinstance(error, JournalUnproven) else JournalUnreachable
                    raise kind(self._describe(error)) from error
                if now > begun + QUIET_S and not has_said:
                    has_said = True
                    rest_s = begun + self._patience_s - now
                    text = f"{self._describe(error)}; it is asked again for {rest_s:.0f} s"
                    print(f"xffl: {visible(text)}", file=sys.stderr, flush=True)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _describe(self, error: Exception) -> str:
        """Return in words why there is no answer, and what to do."""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        if isinstance(error, JournalUnproven):
            return (
                f"the journal {self._url} has another token, or it is no journal ({reason}); set XFFL_TOKEN_FILE or "
                "XFFL_TOKEN to this run's token, and see that xffl lighthouse --journal has printed this address"
            )
        return (
            f"the journal {self._url} does not answer ({reason}); see that xffl lighthouse --journal runs and that "
            "this host reaches it, or set XFFL_JOURNAL to where the journal is"
        )

    def _is_over(self, begun: float) -> bool:
        """Tell whether the caller is to stop, and has asked long enough since then."""
        is_stopping = self._is_stopping
        return is_stopping is not None and time.monotonic() > begun + STOPPING_S and is_stopping()

    def _try_until_stop(self, path: str, body: bytes, deadline: float, begun: float) -> bytes:
        """Ask once, in another thread if this one may be told to stop meanwhile: a host may be silent for long."""
        if self._is_stopping is None:
            return self._try(path, body, deadline)
        answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._try(path, body, deadline))
            except Exception as error:  # noqa: BLE001 - raised by the thread that waits
                answers.put(error)

        threading.Thread(target=ask, name="xffl-journal", daemon=True).start()
        while True:
            try:
                answer = answers.get(timeout=LOOK_S)
            except queue.Empty:
                if self._is_over(begun):
                    raise JournalUnreachable("it has not answered, and this cell is to stop") from None
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _try(self, path: str, body: bytes, deadline: float) -> bytes:
        """Ask once. An answer that the run's token does not prove raises as a lost one does."""
        nonce = secrets.token_hex(16)
        host, port = self._place.hostname or "", self._place.port or http.client.HTTP_PORT
        connection = http.client.HTTPConnection(host, port)
        connection.sock = _connect(host, port, deadline)
        try:
            proof = _proof(self._token, path, nonce, body)
            connection.request("POST", path, body, {NONCE: nonce, PROOF: proof, "Connection": "close"})
            response = connection.getresponse()
            answer = response.read(LONGEST_ANSWER + 1)
        finally:
            connection.close()
        told = answer[:300].decode(errors="replace").strip()
        wanted = _proof(self._token, str(response.status), nonce, answer)
        if not hmac.compare_digest((response.headers.get(PROOF) or "").encode(), wanted.encode()):
            raise JournalUnproven(f"its answer is not signed with this run's token: {told}")
        if response.status == HTTPStatus.BAD_REQUEST:
            raise ConfigError(f"the journal {self._url} refuses a request: {told}")
        if response.status != HTTPStatus.OK:
            raise JournalUnreachable(told)
        return answer


def _connect(host: str, port: int, deadline: float) -> _TimedSocket:
    """Connect to the first address of a host that answers. The look-up of its name takes what the resolver takes."""
    reasons: list[OSError] = []
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with ExitStack() as opened:
                connection = opened.enter_context(_TimedSocket(socket.socket(family, kind, protocol), deadline))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                opened.pop_all()  # it stays open
                return connection
        except OSError as error:
            reasons.append(error)
    raise reasons[0]


def _proof(token: bytes, what: str, nonce: str, content: bytes) -> str:
    """Return the HMAC under the run's token of a request's path, or an answer's status, with nonce and body."""
    return hmac.new(token, f"{what}\n{nonce}\n".encode() + content, hashlib.sha256).hexdigest()
