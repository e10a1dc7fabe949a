"""What the doctor's programs write for each other, and who may be at the other end: silent, confused or hostile."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.listening import find_listeners
from xffl.cluster.doctor import member
from xffl.cluster.doctor.compare import Survey
from xffl.cluster.doctor.exchange import HostStore
from xffl.cluster.doctor.member import Part, follow, lead
from xffl.cluster.doctor.messages import ERROR, Answer, Finding, HostReport, Member, Plan, Report, read
from xffl.cluster.doctor.probe import Request, rank_facts, try_others
from xffl.cluster.listening import open_listener
from xffl.cluster.runtimes import Runtime
from xffl.cluster.slurm.allocation import Host
from xffl.errors import ConfigError

REPORT = HostReport(
    findings=[Finding("x", "ok", "well")],
    alone=[],
    machine="m/1/net",
    versions={"python": "3", "xffl": "1", "torch": "2"},
    runtime=Runtime("x86_64", "2", "none", "none", "1", "3"),
    nccl=None,
    address="127.0.0.1",
    ports=[],
)
PLAN: dict[str, Any] = {
    "token": "0123abcd",
    "hosts": [{"number": 0, "name": "b", "address": "127.0.0.1", "ports": [1]}],
    "pairs": [[0, 1, 0, 1]],
}
ANSWER: dict[str, Any] = {
    "folder": {"seen_s": 0.1, "torn": 0, "error": None, "free": 1, "kind": "ext4", "unseen": [1]},
    "failures": [["b", 1, "refused"]],
    "tried": 1,
    "pairs": {"0-1.0": {"seconds": 0.1, "mib": 4.0}, "0-2.0": {"error": "refused"}},
    "run": None,
}


def rank(number: int) -> Member:
    """Return what a rank tells that is the first one of its host."""
    return {**rank_facts({}, [number], number, 1), "host": Host("abcdefgh"[number]), "report": REPORT}


def encoded(message: Any) -> str:
    return json.dumps(message, default=asdict)


MEMBER: dict[str, Any] = json.loads(encoded(rank(1)))


def test_what_is_right_is_read_as_it_was_sent() -> None:
    assert read(Member, encoded(rank(1))) == rank(1)
    assert encoded(read(Answer, encoded(ANSWER))) == encoded(ANSWER)
    assert encoded(read(Plan, encoded({**PLAN, "more": 1}))) == encoded(PLAN)
    report = Report((Finding("x", "error", "why", "do", "b"),), ("a", "b"), 2)
    assert read(Report, encoded(report)) == report


def test_hosts_of_several_names_that_are_one_machine_need_loopback_only() -> None:
    lonely, before, behind = (Finding(name, "ok", "well") for name in ("interface", "packages", "limits"))
    report = {**REPORT, "findings": [before, Finding("interface", "error", "loopback", "set it"), behind]}

    def checks(machines: str, world_size: int = 2) -> list[tuple[str, str]]:
        members = {
            at: {**rank(at), "report": {**report, "alone": [lonely], "machine": machine}}
            for at, machine in enumerate(machines)
        }
        survey = Survey(Request(), cast(dict[int, Member], members), world_size, with_pairs=False)
        found = survey.report(survey.plan()).findings
        names = ("packages", "interface", "limits")
        return [(finding.check, finding.status) for finding in found if finding.check in names]

    assert checks("mm") == [("packages", "ok"), ("interface", "ok"), ("limits", "ok")]
    assert checks("mn") == checks("mm", 3) == [("packages", "ok"), ("interface", "error"), ("limits", "ok")]


def test_signs_that_move_a_cursor_are_not_shown() -> None:
    report = replace(REPORT["findings"][0], text="\x1b[2Jwell\nand good")
    assert read(Finding, encoded(report)).text == "\\x1b[2Jwell\nand good"


@pytest.mark.parametrize(
    ("kind", "good", "changes"),
    [
        (Member, MEMBER, {"ranks": [-1], "node": "1", "cpus": "all", "host": None, "environ": [], "threads": 1.5}),
        (Member, MEMBER, {"report": {}, "local_size": True, "host": {**MEMBER["host"], "switches": [1]}}),
        (Plan, PLAN, {"token": 7, "hosts": [{}], "pairs": [[1, 2, 3]]}),
        (Answer, ANSWER, {"folder": {}, "failures": [["c", 1]], "tried": None, "pairs": [], "run": {"cells": [7]}}),
        (Answer, ANSWER, {"pairs": {"0-1.0": {"seconds": "x"}}, "folder": {**ANSWER["folder"], "free": 2**70}}),
    ],
)
def test_what_is_wrong_is_named(kind: Any, good: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=name):
            read(kind, json.dumps({**good, name: value}))
    for text in ("[]", "null", '"x"', "{}", "{", "[" * 10_000, "1" * 5000):
        with pytest.raises(ConfigError):
            read(kind, text)


def test_a_plan_of_a_stranger_deletes_nothing(tmp_path: Path) -> None:
    """Rank 0 may be somebody else; the folder beside the one that it names is no matter of the doctor's."""
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    (tmp_path / ".xffl-doctor-x").mkdir()
    (tmp_path / ".xffl-doctor-0123abcd").mkdir()  # there before
    request = Request(shared=str(tmp_path), timeout_s=0.1)
    plan = Plan(token="x/../kept", hosts=[], pairs=[])
    with pytest.raises(ConfigError, match="token"):
        try_others(request, plan, 0)
    assert "cannot be written" in str(try_others(request, {**plan, "token": "0123abcd"}, 0)["folder"]["error"])
    assert (kept / "inside").is_dir() and (tmp_path / ".xffl-doctor-0123abcd").is_dir()


def test_hosts_that_are_silent_or_answer_nonsense_are_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight hosts, c gives no time, d nonsense for it, e no answer, f nonsense for it, and g comes as no member."""
    monkeypatch.setattr(member, "_SLACK_S", 0.5)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    request = Request(shared=str(tmp_path), timeout_s=1.0)
    opened = open_listener("127.0.0.1", 0, is_local=True)
    assert {each.address for each in find_listeners({os.getpid()}) if each.port == opened.port} == {"127.0.0.1"}
    strangers = [socket.create_connection(("127.0.0.1", opened.port)) for _ in range(40)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    store = HostStore("127.0.0.1", opened.port, 20.0, opened.socket)
    part = Part(count=8, world_size=8, port=opened.port)

    def come(number: int, act: Callable[[HostStore], object]) -> None:
        there = HostStore("127.0.0.1", opened.port, 20.0)
        there.write(f"member/{number}", rank(number))
        act(there)

    def be_well(number: int) -> None:
        follow(HostStore("127.0.0.1", opened.port, 20.0), request, number, rank(number))

    def pong(number: int, clock: Callable[[], object], *answers: object) -> Callable[[HostStore], object]:
        def act(there: HostStore) -> None:
            there.wait([f"ping/{number}"], 20.0)
            there.write(f"pong/{number}", clock())
            for answer in answers:
                there.write(f"answer/{number}", answer)

        return act

    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(be_well, 1),
            pool.submit(come, 2, lambda there: None),
            pool.submit(come, 3, pong(3, lambda: "now")),
            pool.submit(come, 4, pong(4, lambda: time.time() + 100)),
            pool.submit(come, 5, pong(5, time.time, {"folder": 7})),
            pool.submit(lambda: store.write("member/6", {"rank": 6})),
        ]
        report = lead(store, request, part, rank(0), [], 3.0)
        for each in running:
            each.result(20)
    for stranger in strangers:
        stranger.close()
    texts = {finding.host: finding.text for finding in report.findings if finding.check == "host"}
    assert texts.keys() == {"c, e", "d", "f", "rank 6"} and report.hosts == tuple("abcdef"), report.findings
    assert texts["c, e"] == "lost: it did not answer in time"
    assert all("what no doctor of this version sends" in texts[host] for host in ("d", "f", "rank 6"))
    found = {finding.check: finding for finding in report.findings}
    assert found["meeting"].status == ERROR and found["meeting"].text.startswith("rank 6, 7 did not connect")
    assert found["clock"].host == "e" and found["clock"].status == ERROR
    assert float(found["clock"].text.split()[0]) == pytest.approx(100, abs=1)
    pairs = [finding.text for finding in report.findings if finding.check == "all-reduce"]
    assert [text.partition(":")[0] for text in pairs[:2]] == ["e and a, b, f", "f and a, b"], pairs
    assert pairs[2].startswith("1 pair of 4 over gloo, "), pairs


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stranger_is_not_taken_for_rank_0(is_closed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=lambda: stranger.accept()[0].close() if is_closed else None, daemon=True).start()
        begun = time.monotonic()
        with pytest.raises((TimeoutError, ConnectionError)):
            HostStore("127.0.0.1", stranger.getsockname()[1], 1.0)
        assert time.monotonic() - begun < 30
