"""The doctor's exchange with whoever is at the other end: slow, silent, confused, or up to something."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.listening import descendants, find_listeners
from tests.ports import free_port
from xffl.cluster.doctor import examine, gathering
from xffl.cluster.doctor.compare import Examination, Peer, Report
from xffl.cluster.doctor.gathering import gather
from xffl.cluster.doctor.lines import Line
from xffl.cluster.doctor.messages import read_answer, read_hello, read_probe, read_request
from xffl.cluster.doctor.probe import ERROR, HostChecks, Request, rank_facts, take_part
from xffl.cluster.environment import ProcessEnvironment
from xffl.errors import ConfigError

FACTS = {**rank_facts({}), "host": {"name": "a", "switches": []}}


def hello(rank: int, world_size: int = 3, **other: Any) -> bytes:
    told = {**FACTS, "rank": rank, "world_size": world_size, "node": rank, "is_head": True, **other}
    return json.dumps(told).encode() + b"\n"


def drip(connection: socket.socket, over: threading.Event, text: bytes = b"x") -> None:
    """Send a byte every now and then, as a peer that holds others up would."""
    try:
        while not over.wait(0.05):
            connection.sendall(text)
    except OSError:
        return


@contextmanager
def dripping(connection: socket.socket, text: bytes = b"x") -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=drip, args=(connection, over, text))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("text", [b"x", b"no message\n", b"[]\n"])
def test_a_line_has_one_deadline(text: bytes) -> None:
    own, other = socket.socketpair()
    with other, dripping(other, text):
        line, begun = Line(own), time.monotonic()
        with pytest.raises(TimeoutError):
            line.receive(0.4)
        assert 0.3 < time.monotonic() - begun < 30
        line.close()


def test_a_line_is_not_read_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.cluster.doctor.lines._LARGEST", 1000)
    own, other = socket.socketpair()
    with other:
        other.sendall(b"x" * 2000)
        with pytest.raises(OSError, match="a line of more than 1000 bytes"):
            Line(own).receive(5)


def test_several_messages_at_once_are_read_one_by_one() -> None:
    own, other = socket.socketpair()
    with other:
        line = Line(own, received=b'{"a": 1}\n{"b"')
        other.sendall(b': 2}\nMotd\n{"c": 3}\n{"half')
        assert [line.receive(5) for _ in range(3)] == [{"a": 1}, {"b": 2}, {"c": 3}]
        other.close()
        with pytest.raises(ConnectionResetError):
            line.receive(5)


# Strangers at rank 0 --------------------------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


STRANGERS = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02",
    b"[1]\n",
    b'{"rank": 1, "world_size": 3}\n',
    hello(1, environ=[]),
    hello(1, cpus="all"),
    hello(1, host=None),
    hello(1, node=10**9),
    hello(0),
    hello(3),
    hello(True),
    hello(1, world_size=4),
    b"9" * 5000 + b"\n",
    b"[" * 10_000 + b"\n",
)


def test_strangers_neither_delay_nor_confuse_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty silent ones of a minute each, one that sends a byte now and then, and one of each other kind."""
    monkeypatch.setattr("xffl.cluster.doctor.gathering.HELLO_S", 60.0)
    port = free_port()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        meeting = pool.submit(gather, "127.0.0.1", port, 3, 120.0, is_local=True)
        for stranger in (*STRANGERS, *[b""] * 40):
            stack.enter_context(connection := connect(port)).sendall(stranger)
        stack.enter_context(dripping(connection))
        assert {one.address for one in find_listeners({os.getpid()}) if one.port == port} == {"127.0.0.1"}
        begun = time.monotonic()
        ranks = [stack.enter_context(connect(port)) for _ in range(2)]
        for rank, connection in enumerate(ranks, 1):
            connection.sendall(hello(rank)[:50])
        time.sleep(0.1)  # half a line is no message
        for rank, connection in enumerate(ranks, 1):
            connection.sendall(hello(rank)[50:])
        met = meeting.result(60)
        assert time.monotonic() - begun < 30 and list(met) == [1, 2]
        assert [met[rank].facts["rank"] for rank in met] == [1, 2] and met[1].address == "127.0.0.1"
        for rank, connection in enumerate(ranks, 1):
            assert Line(connection).receive(5) == {"welcome": 3}
            met[rank].line.send({"end": True})
            met[rank].line.close()


def test_who_is_silent_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_STRANGERS", 4)
    port = free_port()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        meeting = pool.submit(gather, "127.0.0.1", port, 2, 30.0, is_local=True)
        silent = [stack.enter_context(connect(port)) for _ in range(20)]
        rank = stack.enter_context(connect(port))
        rank.sendall(hello(1, 2))
        met = meeting.result(20)
        assert list(met) == [1] and silent[0].recv(1) == b""
        met[1].line.close()


@pytest.mark.parametrize("answer", [b"", b'{"end": true}\n', b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_rank_does_not_take_a_stranger_for_rank_0(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "HELLO_S", 0.3)
    request = Request(shared=str(tmp_path), with_torch=False, timeout_s=0.5)
    told: list[Report] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger, ThreadPoolExecutor() as pool:
        port = stranger.getsockname()[1]
        place = ProcessEnvironment(1, 2, 0, 1, 1, 2, "127.0.0.1", port, "torchrun")
        checks = HostChecks(request, {})
        following = pool.submit(examine._follow, request, place, port, {**FACTS, "rank": 1}, checks, told.append)
        connection, _ = stranger.accept()
        connection.sendall(answer)
        if answer:
            connection.close()
        assert following.result(20) == 1
        connection.close()
    (found,) = [finding for finding in told[0].findings if finding.check == "meeting"]
    assert found.status == ERROR and "something answers there, but not as rank 0" in found.text


# Peers that were let in -----------------------------------------------------------------------------------------------

PROBE: dict[str, Any] = {
    "findings": [{"check": "x", "status": "ok", "text": "well", "advice": "", "host": ""}],
    "versions": {"python": "3", "xffl": "1", "torch": "2"},
    "torch": {"torch": "2", "nccl": None},
    "address": "127.0.0.1",
    "addresses": ["127.0.0.1"],
    "ports": [1, 2],
    "store": None,
    "nccl": None,
    "run": None,
}
ASKED: dict[str, Any] = {
    "folder": {"path": "/x", "token": "0123abcd", "host": 0, "hosts": 2, "patience_s": 1.0},
    "hosts": {"b": {"name": "b", "address": "127.0.0.1", "ports": [1]}},
    "pairs": [["(0, 1)", 0, "127.0.0.1", 1]],
}
ANSWER: dict[str, Any] = {
    "folder": {"seen_s": 0.1, "torn": 0, "error": None, "free": 1, "kind": "ext4", "unseen": [1]},
    "names": {"b": ["127.0.0.1"]},
    "failures": [["b", 1, "refused"]],
    "tried": 1,
    "pairs": [{"seconds": 0.1, "mib": 4.0}],
}


def test_what_is_right_is_read_as_it_was_sent() -> None:
    assert read_probe(PROBE) == PROBE and read_answer(ANSWER, ASKED) == ANSWER and read_request(ASKED) == ASKED
    assert read_request({"machines": 1, "ranks": 2, "more": 3}) == {"machines": 1, "ranks": 2}
    assert read_probe({"failed": "why"}) == {"failed": "why"}
    assert read_hello(json.loads(hello(2)), 3)["environ"] == FACTS["environ"]


def test_signs_that_move_a_cursor_are_not_shown() -> None:
    findings = [{**PROBE["findings"][0], "text": "\x1b[2Jwell\nand good"}]
    assert read_probe({**PROBE, "findings": findings})["findings"][0]["text"] == "\\x1b[2Jwell\nand good"


@pytest.mark.parametrize(
    ("read", "good", "changes"),
    [
        (read_probe, PROBE, {"findings": [{"check": "x"}], "versions": {}, "ports": [0], "address": 3, "run": []}),
        (read_probe, PROBE, {"findings": [{**PROBE["findings"][0], "status": "fine"}], "torch": None, "store": "1"}),
        (read_request, ASKED, {"folder": {**ASKED["folder"], "token": "../../../x"}, "pairs": [[1]], "hosts": []}),
        (read_request, ASKED, {"folder": {}, "hosts": {"b": {"name": "b", "address": "::1", "ports": [10**6]}}}),
        (lambda one: read_answer(one, ASKED), ANSWER, {"names": {}, "pairs": [], "failures": [["c", 1, "x"]]}),
        (lambda one: read_answer(one, ASKED), ANSWER, {"pairs": [{"seconds": 0, "mib": 4}], "tried": None}),
        (lambda one: read_answer(one, ASKED), ANSWER, {"folder": {**ANSWER["folder"], "unseen": [2]}}),
    ],
)
def test_what_is_wrong_is_named(read: Callable[[Any], object], good: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        with pytest.raises(ConfigError):
            read({**good, name: value})
    others: tuple[object, ...] = ([], None, "x", {})
    for wrong in others:
        with pytest.raises(ConfigError):
            read(wrong)


def test_a_request_of_a_stranger_deletes_nothing(tmp_path: Path) -> None:
    """Rank 0 may be somebody else; the folder beside the one that it names is no matter of the doctor's."""
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    (tmp_path / ".xffl-doctor-x").mkdir()
    (tmp_path / ".xffl-doctor-0123abcd").mkdir()  # there before
    checks = HostChecks(Request(with_torch=False), {})
    for token in ("x/../kept", "0123abcd"):
        folder = {"path": str(tmp_path), "token": token, "host": 0, "hosts": 1, "patience_s": 0.1}
        answer = checks.answer({"folder": folder, "hosts": {}, "pairs": []})
        assert "hexadecimal" in answer.get("failed", "") or "cannot be written" in answer["folder"]["error"]
    assert (kept / "inside").is_dir() and (tmp_path / ".xffl-doctor-0123abcd").is_dir()


class Liar:
    """The line to a host that answers in its own way to one kind of request."""

    def __init__(self, line: Line, kind: str, answer: dict[str, Any]) -> None:
        self._line, self._kind, self._answer = line, kind, answer

    def send(self, message: dict[str, Any]) -> None:
        self._line.send(message)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        told = self._line.receive(timeout_s)
        return self._answer if self._kind in told else told


@pytest.mark.parametrize("kind", ["time", "versions", "names"])
@pytest.mark.parametrize("answer", [{}, {"time": "now", "findings": [{}], "folder": {}, "names": {}, "pairs": [7]}])
def test_a_host_that_answers_nonsense_is_named_and_the_others_go_on(
    kind: str, answer: dict[str, Any], tmp_path: Path
) -> None:
    request = Request(shared=str(tmp_path), with_torch=False, timeout_s=2.0)
    checks = [HostChecks(request, {}) for _ in range(2)]
    peers = []
    for number, name in enumerate("ab"):
        own, other = map(Line, socket.socketpair())
        facts = {**FACTS, "host": {"name": name, "switches": []}, "rank": number}
        threading.Thread(target=take_part, args=(other, facts, checks[number]), daemon=True).start()
        peers.append(Peer(own, [own.receive(5.0)], "127.0.0.1"))
    peers[1].line = Liar(peers[1].line, kind, answer)  # type: ignore[assignment]
    try:
        report = Examination(request, peers, 2).run()
    finally:
        for each in checks:
            each.close()
    (found,) = [finding for finding in report.findings if finding.check == "host"]
    assert found.host == "b" and found.status == ERROR and "what no doctor of this version sends" in found.text


# Where it listens -----------------------------------------------------------------------------------------------------


def test_the_doctor_of_one_host_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Its ports that others try, and the store and the gloo of its process with torch."""
    checks = HostChecks(Request(shared=str(tmp_path)), {})
    try:
        told = checks.answer({"machines": 1, "ranks": 2})
        assert "failed" not in told, told
        assert checks._torch is not None
        own = descendants(checks._torch.process.pid)
        found = find_listeners(own)
        assert told["store"] in {one.port for one in found} and all(one.is_loopback for one in found)
        mine = [one for one in find_listeners({os.getpid()}) if one.port in told["ports"]]
        assert {one.port for one in mine} == set(told["ports"]) and all(one.is_loopback for one in mine)
    finally:
        checks.close()
