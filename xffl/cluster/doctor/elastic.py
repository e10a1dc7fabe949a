"""Elastic run as a host of a job sees it: its lighthouse, its cells' heartbeats and stores, and the run's token."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from xffl.cluster.doctor.lines import Message
from xffl.cluster.environment import prove_token, run_token
from xffl.cluster.lighthouse_page import read_lighthouse
from xffl.cluster.network import connection_error
from xffl.errors import LaunchError

__all__ = ["visit_run"]

_CONNECT_S = 5.0
_THREADS = 16


def visit_run(
    url: str, timeout_s: float, environ: Mapping[str, str], read_proofs: Callable[[Message], Message] | None
) -> Message:
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
    seen: Message = {"cells": [asdict(cell) for cell in status.cells], "meeting": status.meeting, "stores": stores}
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
