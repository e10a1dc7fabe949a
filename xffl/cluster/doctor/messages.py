"""Messages between the processes of the doctor, checked field by field: any program may connect to rank 0's port.

Each function returns a message of the values that it knows, and raises ConfigError where one is of another kind.
"""

from __future__ import annotations

import re
from typing import Any

from xffl.checks import visible
from xffl.cluster.doctor.lines import Message
from xffl.errors import ConfigError
from xffl.reading import Fields

__all__ = [
    "explain",
    "read_answer",
    "read_facts",
    "read_hello",
    "read_probe",
    "read_request",
    "read_time",
    "read_welcome",
]

_MOST = 100_000  # items of a list: ranks of the largest job
_MOST_CPUS = 65_536
_LONG_TEXT = 2**17
_VERDICTS = ("same", "none", "differs", "none there", "none here", "no proof")
_TOKEN = re.compile(r"[0-9a-f]{8}")
_NEEDED = ("python", "xffl", "torch")  # versions that are compared by name
_REPORTS = ("torch", "cuda", "processor")


def _fields(message: Any, who: str) -> Fields:
    return Fields(message, who)


def _text(fields: Fields, name: str, limit: int = 4096) -> str:
    """Read a text that is shown on a terminal: what would move its cursor, such as escapes, is written out."""
    return visible(fields.text(name, limit))


def read_hello(message: Any, world_size: int) -> Message:
    """Read the first line of a rank that has connected to rank 0."""
    fields = _fields(message, "the first line of a rank")
    if fields.integer("world_size") != world_size:
        fields.fail(f"{fields.place('world_size')} is {fields.any('world_size')}; this job has {world_size} ranks")
    return {
        **read_facts(message),
        "rank": fields.integer("rank", 1, world_size - 1),
        "world_size": world_size,
        "node": fields.integer("node", 0, world_size - 1),
        "is_head": fields.boolean("is_head"),
    }


def read_facts(message: Any) -> Message:
    """Read what a rank reports about itself."""
    fields = _fields(message, "what a rank reports about itself")
    host = fields.mapping("host")
    return {
        "cpus": fields.list_of("cpus", _MOST_CPUS, Fields.integer),
        "threads": fields.optional("threads", Fields.integer),
        "host": {
            "name": _text(host, "name"),
            "slots": host.optional("slots", Fields.integer) or 1,
            "address": host.optional("address", _text),
            "switches": host.list_of("switches", 100, _text),
            "gpus": host.optional("gpus", Fields.integer),
        },
        "machine": _text(fields, "machine"),
        "environ": fields.mapping_of("environ", 10_000, _text, _LONG_TEXT),
        **({"rank": fields.integer("rank")} if "rank" in fields else {}),
    }


def read_welcome(message: Any) -> None:
    """Read rank 0's answer to the first line of a rank."""
    _fields(message, "the first line of rank 0").integer("welcome", 1)


def read_request(message: Any) -> Message:
    """Read what rank 0 asks a host for: that it checks itself, or what it finds of the other hosts."""
    fields = _fields(message, "a request of rank 0")
    if "folder" not in fields:
        return {"machines": fields.integer("machines", 1), "ranks": fields.integer("ranks", 1)}
    folder = fields.mapping("folder")
    if not _TOKEN.fullmatch(token := folder.text("token")):
        folder.fail(f"{folder.place('token')} must be 8 hexadecimal digits, got {token[:40]!r}")
    hosts = fields.mapping("hosts")
    return {
        "folder": {
            "path": folder.text("path", _LONG_TEXT, may_be_empty=False),
            "token": token,
            "host": folder.integer("host", 0, _MOST),
            "hosts": folder.integer("hosts", 1, _MOST),
            "patience_s": folder.number("patience_s", 0, 1e6),
        },
        "hosts": {name: _read_place(hosts.mapping(name)) for name in hosts},
        "pairs": [_read_pair(pair) for pair in fields.list_of("pairs", _MOST, Fields.any)],
    }


def _read_place(host: Fields) -> Message:
    return {
        "name": _text(host, "name"),
        "address": _text(host, "address"),
        "ports": host.list_of("ports", 16, Fields.integer, 1, 65535),
    }


def _read_pair(pair: Any) -> list[Any]:
    items = pair if isinstance(pair, list) and len(pair) == 4 else [None] * 4
    fields = Fields(dict(zip(("pair", "rank", "address", "port"), items, strict=True)), "a pair that rank 0 asks for")
    return [
        _text(fields, "pair"),
        fields.integer("rank", 0, 1),
        _text(fields, "address"),
        fields.integer("port", 1, 65535),
    ]


def read_time(message: Any) -> float:
    """Read the clock of a host."""
    return _fields(message, "its answer").number("time", -1e12, 1e12)


def read_probe(message: Any) -> Message:
    """Read what a host finds of itself, or why its checks ``failed``."""
    fields = _fields(message, "its answer")
    if "failed" in fields:
        return {"failed": _text(fields, "failed", _LONG_TEXT)}
    versions = fields.mapping_of("versions", 1000, _text)
    if missing := [name for name in _NEEDED if name not in versions]:
        fields.fail(f"{fields.place('versions')} lacks {', '.join(missing)}")
    return {
        "findings": [_read_finding(finding) for finding in fields.list_of("findings", 1000, Fields.mapping)],
        "versions": versions,
        "torch": _read_torch(fields.mapping("torch")),
        "address": fields.optional("address", _text),
        "addresses": fields.list_of("addresses", 10_000, _text),
        "ports": fields.list_of("ports", 16, Fields.integer, 1, 65535),
        "store": fields.optional("store", Fields.integer, 1, 65535),
        "nccl": fields.optional("nccl", _text),
        "run": None if fields.optional("run", Fields.any) is None else _read_run(fields.mapping("run")),
    }


def _read_finding(fields: Fields) -> Message:
    return {
        "check": _text(fields, "check"),
        "status": fields.choice("status", ("ok", "warning", "error")),
        "text": _text(fields, "text", _LONG_TEXT),
        "advice": _text(fields, "advice", _LONG_TEXT),
        "host": _text(fields, "host"),
    }


def _read_torch(fields: Fields) -> Message:
    """Read what a process said about its torch as far as hosts are compared by it."""
    report: Message = {name: _text(fields, name) for name in _REPORTS if name in fields}
    if "nccl" in fields:
        report["nccl"] = fields.optional("nccl", Fields.list_of, 10, Fields.integer)
    return report


def _read_run(fields: Fields) -> Message:
    """Read what a host sees of an elastic run, see :func:`xffl.cluster.lighthouse.page.visit_run`."""
    if "error" in fields:
        return {"error": _text(fields, "error", _LONG_TEXT)}
    stores = fields.mapping("stores")
    run: Message = {
        "cells": [_read_cell(cell) for cell in fields.list_of("cells", _MOST, Fields.mapping)],
        "meeting": fields.optional("meeting", Fields.integer),
        "stores": {life: stores.optional(life, _text, _LONG_TEXT) for life in stores},
    }
    lives = {cell["life"] for cell in run["cells"]}
    if unknown := [life for life in stores if life not in lives]:
        fields.fail(f"{fields.place('stores')} tells of {unknown[0][:100]!r}, which is none of its cells")
    if "token_error" in fields:
        run["token_error"] = _text(fields, "token_error", _LONG_TEXT)
    if "tokens" in fields:
        run["tokens"] = fields.mapping_of("tokens", _MOST, Fields.choice, _VERDICTS)
    return run


def _read_cell(fields: Fields) -> Message:
    return {
        "life": _text(fields, "life"),
        "cell": fields.optional("cell", Fields.integer),
        "seen_s": fields.optional("seen_s", Fields.number, 0),
        "is_lost": fields.boolean("is_lost"),
        "has_met": fields.boolean("has_met"),
        "round": fields.optional("round", Fields.integer),
        "ranks": fields.optional("ranks", Fields.integer),
        "store": _text(fields, "store"),
    }


def read_answer(message: Any, asked: Message) -> Message:
    """Read what a host finds of the others, as it was asked for it, or why its checks ``failed``."""
    fields = _fields(message, "its answer")
    if "failed" in fields:
        return {"failed": _text(fields, "failed", _LONG_TEXT)}
    folder = fields.mapping("folder")
    names = fields.mapping("names")
    pairs = fields.list_of("pairs", _MOST, Fields.mapping)
    if set(names) != set(asked["hosts"]) or len(pairs) != len(asked["pairs"]):
        fields.fail(f"its answer tells of {len(names)} hosts and {len(pairs)} pairs, not of those it was asked for")
    return {
        "folder": {
            "seen_s": folder.optional("seen_s", Fields.number, 0),
            "torn": folder.integer("torn"),
            "error": folder.optional("error", _text, _LONG_TEXT),
            "free": folder.integer("free", 0, 2**63),
            "kind": _text(folder, "kind"),
            "unseen": folder.list_of("unseen", _MOST, Fields.integer, 1, asked["folder"]["hosts"] - 1),
        },
        "names": {name: names.list_of(name, 1000, _text) for name in names},
        "failures": [_read_failure(failure, asked) for failure in fields.list_of("failures", _MOST, Fields.any)],
        "tried": fields.integer("tried"),
        "pairs": [_read_half(pair) for pair in pairs],
    }


def _read_failure(failure: Any, asked: Message) -> list[Any]:
    items = failure if isinstance(failure, list) and len(failure) == 3 else [None] * 3
    fields = Fields(dict(zip(("host", "port", "why"), items, strict=True)), "a failure that it tells of")
    return [fields.choice("host", asked["hosts"]), fields.integer("port", 1, 65535), _text(fields, "why", _LONG_TEXT)]


def _read_half(fields: Fields) -> Message:
    if "error" in fields:
        silent = {"is_silent": True} if "is_silent" in fields else {}
        return {"error": _text(fields, "error", _LONG_TEXT), **silent}
    return {"seconds": fields.number("seconds", above=0), "mib": fields.number("mib", 0)}


def explain(error: ConfigError) -> str:
    """Return the finding about a host whose message cannot be read."""
    return f"it sent what no doctor of this version sends: {error}"
