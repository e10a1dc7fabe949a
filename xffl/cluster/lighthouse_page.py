"""Page of a lighthouse, ``GET /status``: which cells it knows, read from outside, without any effect on the run.

It is the page that torchft 0.2 makes for its dashboard, since its interface for programs has no such question. All that
depends on what stands in it is in :func:`parse_page`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from xffl.checks import decimal, group
from xffl.cluster.environment import prove_token, run_token
from xffl.cluster.network import connection_error
from xffl.errors import LaunchError

__all__ = ["CellStatus", "LighthouseStatus", "parse_page", "read_lighthouse", "visit_run"]

_CONNECT_S = 5.0
_LARGEST = 2**24
_THREADS = 16
_LIFE = re.compile(r"(\d{1,18})\.[0-9a-f]+")
Stores = dict[str, Any]
"""What is known of the stores of cells, by life."""


@dataclass(frozen=True)
class CellStatus:
    """What a lighthouse knows of one life of a cell; of one that was not in the last meeting, its heartbeats alone."""

    life: str
    cell: int | None = None  # its number; None for a replica group of another kind of job
    seen_s: float | None = None  # how long ago its last heartbeat was
    is_lost: bool = True  # whether that is longer ago than the lighthouse waits
    has_met: bool = False  # whether it took part in the last meeting; what follows was told there
    round: int | None = None  # how many rounds led to its model
    ranks: int | None = None
    store: str = ""  # HOST:PORT


@dataclass(frozen=True)
class LighthouseStatus:
    """What a lighthouse knows: of each cell the lives that are heard of, else the one that was last."""

    cells: tuple[CellStatus, ...] = ()
    meeting: int | None = None  # number of the last one; None where there was none since the lighthouse was started
    age_s: float | None = None  # how long ago that was

    def lag_of(self, cell: CellStatus) -> int | None:
        """Return how many rounds a cell is behind the furthest one; ``None`` where its round is not known."""
        if cell.round is None:
            return None
        return max(other.round for other in self.cells if other.round is not None) - cell.round


def read_lighthouse(url: str, timeout_s: float = 5.0) -> LighthouseStatus:
    """Read the page of the lighthouse at ``http://HOST:PORT``; LaunchError where there is none."""
    place = urlsplit(url)  # no proxy is asked, since cells ask none
    connection = HTTPConnection(str(place.hostname), place.port, timeout=timeout_s)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        text = answer.read(_LARGEST).decode(errors="replace") if answer.status == 200 else ""
    except HTTPException:
        text = ""
    except OSError as error:
        hint = "see that it runs, and that this host reaches it"
        raise LaunchError(f"the lighthouse {url} does not answer ({error.strerror or error}); {hint}") from error
    finally:
        connection.close()
    status = parse_page(text)
    if status is None:
        raise LaunchError(
            f"what answers at {url} is not a lighthouse of torchft 0.2; give the address of xffl lighthouse"
        )
    return status


def parse_page(text: str) -> LighthouseStatus | None:
    """Return what the page of a lighthouse tells; ``None`` where it is another page."""
    page = _Page()
    # Lives are anybody's texts.
    page.feed("".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text))
    page.close()
    if "Current quorum_id:" not in page.head or "Heartbeats" not in page.head:
        return None
    meeting, age = (re.search(word, page.head) for word in (r"Previous quorum id: (\d+)", r"Quorum age:\s*(-?[\d.]+)s"))
    found: dict[str, CellStatus] = {}
    for member in page.members:
        life, *fields = [line.strip() for line in member.strip().splitlines()]
        told = dict(field.split(": ", 1) for field in fields if ": " in field)
        found[life] = CellStatus(
            life,
            has_met=True,
            round=_integer(told.get("Step")),
            ranks=_integer(told.get("World size")),
            store=told.get("TCPStore", ""),
        )
    for is_old, heartbeat in page.heartbeats:
        if beat := re.fullmatch(r"\s*(.+): seen ([\d.]+)s ago\s*", heartbeat):
            known = found.get(beat[1], CellStatus(beat[1]))
            found[beat[1]] = replace(known, seen_s=float(beat[2]), is_lost=is_old)
    return LighthouseStatus(
        _current(found.values()),
        None if meeting is None else decimal(meeting[1]),
        None if meeting is None or age is None else float(age[1]),
    )


class _Page(HTMLParser):
    """The texts of the page: of its members, of its heartbeats, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = ""
        self.members: list[str] = []
        self.heartbeats: list[tuple[bool, str]] = []  # whether it is too old, and its text
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "div" and "member" in classes:
            self.members.append("")
            self._inside = tag
        elif tag == "li" and "heartbeat" in classes:
            self.heartbeats.append(("old" in classes, ""))
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "div":
            self.members[-1] += data
        elif self._inside == "li":
            is_old, text = self.heartbeats[-1]
            self.heartbeats[-1] = is_old, text + data
        else:
            self.head += data


def _current(lives: Iterable[CellStatus]) -> tuple[CellStatus, ...]:
    """Leave out lives of a cell that are lost where another one is heard of, or was later; sort by cell."""
    numbered = [(_LIFE.fullmatch(one.life), one) for one in lives]
    known = [replace(one, cell=None if found is None else int(found[1])) for found, one in numbered]
    current = []
    for own in group((one.life if one.cell is None else one.cell, one) for one in known).values():
        heard = [status for status in own if not status.is_lost]
        last = min(own, key=lambda status: float("inf") if status.seen_s is None else status.seen_s)
        current += heard or [last]
    return tuple(sorted(current, key=lambda one: (one.cell is None, one.cell or 0, one.life)))


def _integer(text: str | None) -> int | None:
    return None if text is None else decimal(text)


def visit_run(
    url: str, timeout_s: float, environ: Mapping[str, str], read_proofs: Callable[[Stores], Stores] | None
) -> Stores:
    """Return what this host sees of the run at a lighthouse: the ``cells`` that it knows, or the ``error``.

    For each cell that is heard of and has told the address of its store, ``stores`` has why that cannot be reached, or
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
        "cells": [asdict(cell) for cell in status.cells],
        "meeting": status.meeting,
        "stores": stores,
    }
    if read_proofs is None:
        return seen
    try:
        token = run_token(environ)
    except LaunchError as error:
        return {**seen, "token_error": str(error)}
    told = read_proofs({life: place for life, place in places.items() if stores[life] is None})
    stores |= {life: answer["error"] for life, answer in told.items() if "error" in answer}
    proofs = {life: str(answer["proof"]) for life, answer in told.items() if "proof" in answer}
    return {**seen, "tokens": {life: _verdict(proof, life, token) for life, proof in proofs.items()}}


def _verdict(proof: str, life: str, token: bytes) -> str:
    """Compare the token of which a cell has put a proof into its store with this host's."""
    nonce, _, told = proof.partition(" ")

    def is_of(one: bytes) -> bool:
        return hmac.compare_digest(prove_token(one, life, nonce).partition(" ")[2].encode(), told.encode())

    if not told:
        return "no proof"
    if is_of(token):
        return "same" if token else "none"
    if not token:
        return "none here"
    return "none there" if is_of(b"") else "differs"
