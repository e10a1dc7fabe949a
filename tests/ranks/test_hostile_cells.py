"""Strangers and false cells at a lighthouse: what they tell is refused by name, and the honest cells go on."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import xffl
from tests.ports import free_port
from tests.processes import give_way
from tests.ranks.test_elastic import ROUNDS, Plan, Told, check_alike, journal, member, start_lighthouse  # noqa: F401
from tests.worlds import run_world
from xffl.elastic.lighthouse_client import LONGEST_RECORD, Lighthouse, NotOwnRecord, Register, coordination
from xffl.elastic.roster import CellRecord

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

TOKEN = b"the run's own token"
START = "ab" * 16


@pytest.fixture
def url() -> Iterator[str]:
    server = start_lighthouse(0, join_s=4.0)  # longer than a cell here is late
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def record(cell: int, serial: int = 1, **more: Any) -> CellRecord:
    return CellRecord(cell, 2, f"{cell}.a", start=START, serial=serial, **more)


def test_a_record_counts_once_and_from_who_it_is_about() -> None:
    mine, theirs = Register(TOKEN), Register(TOKEN)
    signed = theirs.sign(record(1).to_plain())
    assert mine.read("1.a", signed) == record(1)
    with pytest.raises(NotOwnRecord, match="^tells the record of cell 1, which is not its own$"):
        mine.read("0.b", signed)
    mine.note([record(1, 3)])
    for serial in (1, 3):
        with pytest.raises(
            NotOwnRecord, match=f"^tells its record number {serial} again, but has told number 3 since$"
        ):
            mine.read("1.a", theirs.sign(record(1, serial).to_plain()))
    assert mine.read("1.a", theirs.sign(record(1, 4).to_plain())) == record(1, 4)
    another = Register(b"that of another run").sign(record(1, 5).to_plain())
    large = theirs.sign(record(1, 5).to_plain()) | {"group": "x" * LONGEST_RECORD}
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for data in (None, [], {}, {"proof": 3}, {"proof": "é"}, {"proof": "", "x": deep}, another, large):
        assert mine.read("1.a", data) is None
    for wrong in ({"cell": 0}, {"cells": 10**12}, {"version": None}, {"told": "["}, {"living": ["x"]}, {"ranks": True}):
        with pytest.raises(xffl.ConfigError, match="record of cell|cell 1 has told what cannot be read"):
            mine.read("1.a", theirs.sign(record(1, 5).to_plain() | wrong))


class Stranger:
    """Somebody who reaches the lighthouse, reads what cells tell there, and does not know the token."""

    def __init__(self, url: str) -> None:
        self._client = coordination().LighthouseClient(url, timedelta(seconds=5))
        self.heard: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, data: Any = None, within_s: float = 30.0) -> None:
        """Ask for a meeting in any name, and keep what the cells have told there."""
        answer = self._client.quorum(
            replica_id=name,
            timeout=timedelta(seconds=within_s),
            address="",
            store_address="",
            step=0,
            world_size=1,
            data=data or {},
        )
        for one in answer.participants:
            self.heard.setdefault(one.replica_id, one.data)

    def beat(self, name: str) -> None:
        self._client.heartbeat(name)


def test_what_strangers_tell_is_refused_by_name_and_cells_meet(url: str) -> None:
    stranger = Stranger(url)
    cells = [Lighthouse(url, f"{cell}.a", TOKEN) for cell in range(2)]

    def meet(cell: int) -> Any:
        meeting = cells[cell].meet(record(cell), 30.0)
        assert meeting is not None
        return meeting

    with ThreadPoolExecutor() as pool:

        def together(*asked: Any) -> list[Any]:
            """Let a stranger ask, and then the cells; return what these have heard."""
            told = [pool.submit(stranger.ask, *asked)] if asked else []
            give_way(0.5 if asked else 0.0)
            met = [one.result(timeout=60) for one in [pool.submit(meet, cell) for cell in range(2)]]
            for one in told:
                one.result(timeout=60)
            return met

        for cell in range(2):
            stranger.beat(f"{cell}.a")  # so that who comes first waits for the other
        assert all([told.cell for told in one.records] == [0, 1] for one in together())
        assert {one.unproven for one in together("9.f")} == {("9.f",)}
        old = stranger.heard["0.a"]
        for life, data, why in (
            ("7.b", old, "tells the record of cell 0, which is not its own"),
            ("7.c", old | {"life": "7.c"}, None),
            ("7.d", {"x": "y" * (2 * LONGEST_RECORD)}, None),
        ):
            for heard in together(life, data):
                assert [told.cell for told in heard.records] == [0, 1]
                assert heard.refused.get(life) == why and heard.unproven == (() if why else (life,))
        # Again, in the cell's own name, while that cell trains.
        telling = pool.submit(stranger.ask, "0.a", old)
        give_way(0.5)
        alone = cells[1].meet(record(1), 30.0)
        telling.result(timeout=60)
        assert alone is not None and [told.cell for told in alone.records] == [1]
        assert re.fullmatch(r"tells its record number \d again, but has told number \d since", alone.refused["0.a"])
        assert all([told.cell for told in one.records] == [0, 1] for one in together())
        # One that says nothing, and only beats, keeps the others waiting until the join timeout, and not for ever.
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(0.1):
                stranger.beat("8.e")

        beating = pool.submit(beat)
        assert all([told.cell for told in one.records] == [0, 1] for one in together())
        stopped.set()
        beating.result()
    for one in cells:
        one.leave()


def test_a_cell_in_whose_name_somebody_else_asks_hears_of_it_and_asks_again(url: str) -> None:
    line = Lighthouse(url, "0.a", TOKEN)
    forger, other = Stranger(url), Stranger(url)
    other.beat("1.b")  # so that the cell waits for it
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(line.meet, record(0), 30.0)
        give_way(0.5)
        other.ask("1.b")
        first = meeting.result(timeout=60)
        assert first is not None and first.records[0].serial == 1
        meeting = pool.submit(line.meet, replace(record(0), round=1), 30.0)
        give_way(0.5)
        asked = pool.submit(forger.ask, "0.a", {"cell": 0})
        give_way(0.5)
        other.ask("1.b")
        asked.result(timeout=60)
        again = meeting.result(timeout=60)
    assert again is not None and [one.serial for one in again.records] == [3]
    line.leave()


def member_into_a_file(rank: int, world: int, plan: Plan, folder: str) -> Told | str:
    """Be a cell whose standard error goes to a file of its own."""
    file = os.open(f"{folder}/stderr_{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    return member(rank, world, plan)


def test_cells_make_all_their_rounds_while_a_stranger_tells_their_old_records(
    journal: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    server = start_lighthouse(0)
    url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    ended = threading.Event()

    def replay() -> None:
        stranger = Stranger(url)
        while not ended.wait(0.1) and len(stranger.heard) < 3:
            with contextlib.suppress(RuntimeError, TimeoutError):
                stranger.ask("9.f", within_s=2)
        told = {life: data for life, data in stranger.heard.items() if life != "9.f"}
        for life, data in [*told.items(), *((f"7.{n}", data) for n, data in enumerate(told.values()))]:
            if not ended.wait(0.3):
                with contextlib.suppress(RuntimeError, TimeoutError):
                    stranger.ask(life, data, within_s=5)

    thread = threading.Thread(target=replay)
    thread.start()
    try:
        plan = Plan(url, (1, 1), (free_port(), free_port()), str(tmp_path), rounds=4 * ROUNDS, step_s=0.05)
        told = run_world(2, member_into_a_file, plan, str(tmp_path), init=False, timeout_s=100)
    finally:
        ended.set()
        thread.join()
        server.shutdown()
    check_alike(told)
    assert len(told) == 2
    for one in told:
        assert sorted(one.digests) == list(range(min(one.digests), 4 * ROUNDS + 1))
        assert {one.cells[number] for number in one.cells} == {(0, 1)}
        # No step was lost.
        assert sum(weights[one.cell] for weights in one.weights.values()) == one.steps
    written = "".join((tmp_path / f"stderr_{rank}").read_text() for rank in range(2))
    assert "xffl: cell 7 tells the record of cell 0, which is not its own; it is left out" in written, written
    assert "xffl: cell 9 does not know this run's token (XFFL_TOKEN), and is left out" in written, written
    assert re.search("xffl: cell [01] tells its record number .* again", written), written


@pytest.mark.parametrize("token", ["", "short", "none"])
def test_a_session_without_a_token_is_refused(
    token: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    journal: None,  # noqa: F811
) -> None:
    monkeypatch.delenv("XFFL_TOKEN_FILE", raising=False)
    monkeypatch.setenv("XFFL_TOKEN", token)
    told = "there is none; set XFFL_TOKEN" if not token else "XFFL_TOKEN has a token of 5 characters, and fewer than 16"
    refused = contextlib.nullcontext() if token == "none" else pytest.raises(xffl.LaunchError, match=told)
    with refused, xffl.session(cell=0, cells=2, elastic="http://127.0.0.1:1") as state:
        assert state.elastic is not None
    assert ("XFFL_TOKEN=none: whoever reaches the lighthouse" in capfd.readouterr().err) == (token == "none")
