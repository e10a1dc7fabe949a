"""What processes read from a socket, or from another host's program: the doctor's lines, and those of ssh's agent."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.chaos.inputs.parser import Parser
from tests.unit.test_doctor_exchange import ANSWER, ASKED, PROBE, hello
from xffl.cluster.doctor.lines import Line
from xffl.cluster.doctor.messages import read_answer, read_facts, read_hello, read_probe, read_request, read_time
from xffl.cluster.launch.ssh import read_event

RUN = {
    "cells": [
        {
            "life": "0.ab", "cell": 0, "seen_s": 0.5, "is_lost": False, "has_met": True, "round": 3, "ranks": 2,
            "store": "10.0.0.1:4711",
        }
    ],
    "meeting": 3,
    "stores": {"0.ab": None},
    "tokens": {"0.ab": "same"},
}  # fmt: skip
EVENTS = (
    b'{"ready": 20000}\n',
    b'{"refused": "another version"}\n',
    b'{"given_up": "it has heard nothing for 120 s"}\n',
    b'{"rank": 1, "is_error": false, "lines": "aGVsbG8K"}\n',
    b'{"rank": 1, "code": -9, "is_stopped": true}\n',
)


def encoded(*messages: object) -> list[bytes]:
    return [json.dumps(message).encode() for message in messages]


def received(content: bytes) -> object:
    """Return the message of a line, as it comes through a socket; what is none is no fault of the reader."""
    own, other = socket.socketpair()
    line = Line(own)
    try:
        other.setblocking(False)
        other.send(content.replace(b"\n", b" ") + b"\n")  # what does not fit is left out: half a line
        other.close()
        return line.receive(5.0)
    except OSError:
        return {}
    finally:
        line.close()


def read_line_of_rank(content: bytes, folder: Path) -> object:
    message = received(content)
    read_facts(message)
    return read_hello(message, 3)


def read_answers(content: bytes, folder: Path) -> object:
    message = received(content)
    if isinstance(message, dict) and "time" in message:
        return read_time(message)
    return read_answer(message, ASKED) if isinstance(message, dict) and "names" in message else read_probe(message)


PARSERS = (
    Parser("doctor: lines of ranks", "json", lambda folder: [hello(1).strip(), hello(2).strip()], read_line_of_rank),
    Parser(
        "doctor: answers of hosts",
        "json",
        lambda folder: encoded(PROBE, {**PROBE, "run": RUN}, ANSWER, {"time": 1.5}, {"failed": "no file is left"}),
        read_answers,
    ),
    Parser(
        "doctor: requests of rank 0",
        "json",
        lambda folder: encoded(ASKED, {"machines": 2, "ranks": 4}),
        lambda content, folder: read_request(received(content)),
    ),
    Parser("ssh: lines of hosts", "lines", lambda folder: list(EVENTS), lambda content, folder: read_event(content)),
)
