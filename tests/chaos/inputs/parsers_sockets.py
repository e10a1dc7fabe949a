"""What processes read from a socket, or from another host's program: messages of the doctor and of ssh's agent."""

from __future__ import annotations

import json

from tests.chaos.inputs.parser import Parser
from tests.unit.test_doctor_exchange import ANSWER, MEMBER, PLAN
from xffl.cluster.doctor.messages import Answer, Member, Plan, read
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


PARSERS = (
    Parser("doctor: members", "json", lambda folder: encoded(MEMBER), lambda content, folder: read(Member, content)),
    Parser("doctor: plans", "json", lambda folder: encoded(PLAN), lambda content, folder: read(Plan, content)),
    Parser(
        "doctor: answers",
        "json",
        lambda folder: encoded(ANSWER, {**ANSWER, "run": RUN}),
        lambda content, folder: read(Answer, content),
    ),
    Parser("ssh: lines of hosts", "lines", lambda folder: list(EVENTS), lambda content, folder: read_event(content)),
)
