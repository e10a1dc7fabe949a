"""Cells that may be lost are asked whether they are there, at the same time, and not for longer than is needed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.ports import free_port
from xffl.cluster.run_token import PROOF_KEY
from xffl.elastic import answers
from xffl.elastic.answers import Answers, ask_store


@pytest.fixture(autouse=True)
def ended_questions() -> Iterator[None]:
    """Wait for questions without an answer: the interpreter must not end while one is inside torch."""
    yield
    for thread in threading.enumerate():
        if thread.name == "xffl-answers":
            thread.join(20)
            assert not thread.is_alive()


def test_all_are_asked_at_once_and_each_has_its_own_time() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.set(PROOF_KEY, "")
    living, ended = f"127.0.0.1:{store.port}", f"127.0.0.1:{free_port()}"
    with ExitStack() as servers:
        ports = [servers.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(60)]
        stopped = [f"127.0.0.1:{port}" for port in ports]  # connections, but no answer
        begun = time.monotonic()
        silent = Answers().find_silent({living: 60.0, ended: 60.0, **dict.fromkeys(stopped, 0.8)})
        seconds = time.monotonic() - begun
    assert silent == {ended, *stopped}
    assert 0.8 <= seconds < 30  # neither one after the other nor for as long as the others might take
    assert ask_store(living, PROOF_KEY) is True and ask_store(living, "else") is False
    assert ask_store(ended, PROOF_KEY) is None


def test_who_was_asked_before_has_had_its_time_and_old_answers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Answers()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(answers, "FRESH_S", 1000.0)
        questions.ask([place])
        begun = time.monotonic()
        monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
        assert questions.find_silent({place: 60.0}) == {place}
        assert time.monotonic() - begun < 30
        monkeypatch.setattr(answers, "time", time)
    monkeypatch.setattr(answers, "FRESH_S", 0.2)
    ended = f"127.0.0.1:{free_port()}"
    questions.ask([ended])
    time.sleep(0.3)
    host, _, port = ended.rpartition(":")
    back = TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    back.set(PROOF_KEY, "")
    assert not questions.find_silent({ended: 20.0})
