"""Page of a lighthouse, ``GET /status``: which cells it knows, read from outside, without any effect on the run.

It is the page that torchft 0.2 makes for its dashboard, since its interface for programs has no such question. All that
depends on what stands in it is in :func:`parse_page`.
"""

from __future__ import annotations

import hmac
import html
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from xffl.checks import decimal, group
from xffl.cluster.reaching import connection_error
from xffl.cluster.run_token import prove_token, run_token
from xffl.errors import LaunchError

__all__ = ["CellStatus", "LighthouseStatus", "parse_page", "read_lighthouse", "visit_run"]

_CONNECT_S = 5.0
_LARGEST = 2**22
"""The most bytes of a page; torchft makes some 430 for each cell, so that this is enough for 9000 of them."""
_CHUNK_BYTES = 2**16
_THREADS = 16
_LIFE = re.compile(r"([0-9]{1,18})\.[0-9a-f]+")
_TAG = re.compile(r"<([^<>]*)>")
"""A tag; a sign ``<`` without an end is text. Each sign is looked at once or twice, whatever the text is."""
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{0,30});")
_SECONDS = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{0,30})?")
Stores = dict[str, Any]
"""What is known of the stores of cells, by their starts (lives)."""


@dataclass(frozen=True)
class CellStatus:
    """What a lighthouse knows of a start of a cell (a life); of one not in the last meeting, its heartbeats alone."""

    life: str
    cell: int | None = None  # its number; None for a replica group of another kind of job
    seen_s: float | None = None  # how long ago its last heartbeat was
    is_lost: bool = True  # whether that is longer ago than the lighthouse waits
    has_met: bool = False  # whether it took part in the last meeting, where it gave what follows
    round: int | None = None  # how many rounds led to its model
    ranks: int | None = None
    store: str = ""  # HOST:PORT


@dataclass(frozen=True)
class LighthouseStatus:
    """What a lighthouse knows: of each cell the starts that send heartbeats, else the last one."""

    cells: tuple[CellStatus, ...] = ()
    meeting: int | None = None  # number of the last one; None where there was none since the lighthouse was started
    age_s: float | None = None  # how long ago that was

    def lag_of(self, cell: CellStatus) -> int | None:
        """Return how many rounds a cell is behind the furthest one; ``None`` where its round is not known."""
        if cell.round is None:
            return None
        return self._furthest - cell.round

    @cached_property
    def _furthest(self) -> int:
        return max(other.round for other in self.cells if other.round is not None)


def read_lighthouse(url: str, timeout_s: float = 5.0) -> LighthouseStatus:
    """Read the page of the lighthouse at ``http://HOST:PORT``; LaunchError where there is none."""
    place = urlsplit(url)  # no proxy is asked, since cells ask none
    try:
        received = _fetch(str(place.hostname), place.port or 80, time.monotonic() + timeout_s)
    except OSError as error:
        hint = "see that it runs, and that this host reaches it"
        raise LaunchError(f"the lighthouse {url} does not answer ({error.strerror or error}); {hint}") from error
    if len(received) > _LARGEST:
        raise LaunchError(
            f"what answers at {url} sends more than {_LARGEST} bytes, which no page of a lighthouse has; give the "
            "address of xffl lighthouse"
        )
    text = ""
    with suppress(HTTPException, ValueError):  # it speaks another language
        answer = HTTPResponse(_Received(received))  # type: ignore[arg-type]  # all that it does with a socket
        answer.begin()
        text = answer.read().decode(errors="replace") if answer.status == 200 else ""
    status = parse_page(text)
    if status is None:
        raise LaunchError(
            f"what answers at {url} is not a lighthouse of torchft 0.2; give the address of xffl lighthouse"
        )
    return status


def _fetch(host: str, port: int, deadline: float) -> bytes:
    """Return what a server answers to the question for the page, within the time that is left for the whole.

    Of an answer that is too long, a byte more than the limit is returned.
    """
    with socket.create_connection((host, port), max(0.1, deadline - time.monotonic())) as connection:
        connection.sendall(f"GET /status HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        received = bytearray()
        while len(received) <= _LARGEST:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("its answer takes too long")
            connection.settimeout(left_s)
            try:
                piece = connection.recv(_CHUNK_BYTES)
            except ConnectionResetError:  # it has not read the question to its end
                if not received:
                    raise
                break
            if not piece:
                break
            received += piece
    return bytes(received[: _LARGEST + 1])


class _Received(BytesIO):
    """What was received, as the standard library reads it from a socket."""

    def makefile(self, *_: object) -> BytesIO:
        return self


def parse_page(text: str) -> LighthouseStatus | None:
    """Return what the page of a lighthouse tells; ``None`` where it is another page.

    The time that it takes grows with the length of the text and no faster, whatever stands in it.
    """
    # A life is a text that any program can send.
    page = _read_page("".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text))
    head = page.head_text()
    if "Current quorum_id:" not in head or "Heartbeats" not in head:
        return None
    meeting, age = (re.search(word, head) for word in (r"Previous quorum id: ([0-9]+)", r"Quorum age:\s*(-?[0-9.]+)s"))
    cells: dict[str, CellStatus] = {}
    for member in page.members:
        life, *fields = [line.strip() for line in "".join(member).strip().split("\n")]
        values = dict(line.split(": ", 1) for line in fields if ": " in line)
        if life:
            cells[life] = CellStatus(
                life,
                has_met=True,
                round=_integer(values.get("Step")),
                ranks=_integer(values.get("World size")),
                store=values.get("TCPStore", ""),
            )
    for is_old, pieces in page.heartbeats:
        life, _, beat = "".join(pieces).strip().rpartition(": seen ")
        seen_s = _seconds(beat.removesuffix("s ago")) if beat.endswith("s ago") else None
        if life and seen_s is not None:
            cells[life] = replace(cells.get(life, CellStatus(life)), seen_s=seen_s, is_lost=is_old)
    return LighthouseStatus(
        _current(cells.values()),
        None if meeting is None else decimal(meeting[1]),
        None if meeting is None or age is None else _seconds(age[1]),
    )


@dataclass
class _Page:
    """The texts of the page, in pieces: of its members, of its heartbeats, and all others."""

    head: list[str] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    heartbeats: list[tuple[bool, list[str]]] = field(default_factory=list)  # whether it is too old, and its text

    def head_text(self) -> str:
        return "".join(self.head)


def _read_page(text: str) -> _Page:
    """Take the page apart.

    The standard library's parser of HTML is not used: it takes hours for some texts of a few hundred kilobytes, such as
    one of many beginnings of comments.
    """
    page = _Page()
    pieces, inside = page.head, ""
    for at, part in enumerate(_TAG.split(text)):
        if at % 2 == 0:  # what is between two tags
            pieces.append(_REFERENCE.sub(lambda reference: html.unescape(reference[0]), part))
            continue
        tag, _, attributes = part.replace("\n", " ").partition(" ")
        if tag == f"/{inside}":
            pieces, inside = page.head, ""
            continue
        _, _, value = attributes.partition('class="')
        classes = value.partition('"')[0].split()
        if tag == "div" and "member" in classes:
            pieces, inside = [], tag
            page.members.append(pieces)
        elif tag == "li" and "heartbeat" in classes:
            pieces, inside = [], tag
            page.heartbeats.append(("old" in classes, pieces))
    return page


def _current(lives: Iterable[CellStatus]) -> tuple[CellStatus, ...]:
    """Leave out lost starts of a cell if another one sends heartbeats, or was later; sort by cell."""
    numbered = [(_LIFE.fullmatch(status.life), status) for status in lives]
    known = [replace(status, cell=None if match is None else int(match[1])) for match, status in numbered]
    current = []
    for of_cell in group((status.life if status.cell is None else status.cell, status) for status in known).values():
        heard = [status for status in of_cell if not status.is_lost]
        last = min(of_cell, key=lambda status: float("inf") if status.seen_s is None else status.seen_s)
        current += heard or [last]
    return tuple(sorted(current, key=lambda status: (status.cell is None, status.cell or 0, status.life)))


def _integer(text: str | None) -> int | None:
    return None if text is None else decimal(text)


def _seconds(text: str) -> float | None:
    return float(text) if _SECONDS.fullmatch(text) else None


def visit_run(
    url: str, timeout_s: float, environ: Mapping[str, str], read_proofs: Callable[[Stores], Stores] | None
) -> Stores:
    """Return what this host sees of the run at a lighthouse: the ``cells`` that it knows, or the ``error``.

    For each cell with heartbeats that has given the address of its store, ``stores`` has why that cannot be reached, or
    ``None``. Where there is torch, by which ``read_proofs`` reads the stores, ``tokens`` has how the cell's token
    compares with that of this host; neither is sent.
    """
    try:
        status = read_lighthouse(url, timeout_s)
    except LaunchError as error:
        return {"error": str(error)}
    places = {cell.life: cell.store for cell in status.cells if cell.store and not cell.is_lost}

    def try_store(place: str) -> str | None:
        host, _, port = place.rpartition(":")
        return connection_error(host, port, min(_CONNECT_S, timeout_s))

    with ThreadPoolExecutor(_THREADS) as pool:
        stores = dict(zip(places, pool.map(try_store, places.values()), strict=True))
    seen: dict[str, Any] = {
        "cells": list(status.cells),
        "meeting": status.meeting,
        "stores": stores,
    }
    if read_proofs is None:
        return seen
    try:
        token = run_token(environ)
    except LaunchError as error:
        return {**seen, "token_error": str(error)}
    answers = read_proofs({life: place for life, place in places.items() if stores[life] is None})
    stores |= {life: answer["error"] for life, answer in answers.items() if "error" in answer}
    proofs = {life: str(answer["proof"]) for life, answer in answers.items() if "proof" in answer}
    return {**seen, "tokens": {life: _verdict(proof, life, token) for life, proof in proofs.items()}}


def _verdict(proof: str, life: str, token: bytes) -> str:
    """Compare the token of which a cell has put a proof into its store with this host's."""
    nonce, _, digest = proof.partition(" ")

    def is_of(one: bytes) -> bool:
        return hmac.compare_digest(prove_token(one, life, nonce).partition(" ")[2].encode(), digest.encode())

    if not digest:
        return "no proof"
    if is_of(token):
        return "same" if token else "none"
    if not token:
        return "none here"
    return "none there" if is_of(b"") else "differs"
