"""What the page of a lighthouse tells, and what ``xffl cells`` says of one that is not there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.ports import free_port
from xffl.cli.main import main
from xffl.cluster.doctor.compare import compare_runs
from xffl.cluster.doctor.messages import RunView
from xffl.cluster.lighthouse.address import resolve_lighthouse
from xffl.cluster.lighthouse.page import CellStatus, parse_page, read_lighthouse
from xffl.cluster.run_token import prove_token, run_token
from xffl.errors import LaunchError

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from xffl.cli.main import main; sys.exit(main(sys.argv[1:]))"

MEMBER = """
<div class="member
 {also}
">
  <b>{life}</b> <br/>
  Step: {step} <br/>
  Manager:  <br/>
  TCPStore: 10.0.0.{ranks}:4000 <br/>
  World size: {ranks} <br/>

  <button hx-post="/replica/{life}/kill"
          hx-trigger="click">
    Kill
  </button>
</div>
"""
HEARTBEAT = """
  <li class="heartbeat
    {old}
  ">
    {life}: seen {age}s ago
  </li>
"""


def page_of(members: str = "", heartbeats: str = "", meeting: str = "") -> str:
    """Return a page as torchft 0.2 makes it."""
    return f"""
Current quorum_id: 12 <br>
Next quorum status: New quorum not ready, only have 0 participants, need min_replicas 1 [0/0 participants healthy] <br>

<h3>Previous Quorum</h3>

{meeting}
<div>
{members}
</div>

<h2>Heartbeats</h2>

<ul>
{heartbeats}
</ul>
"""


MEETING = "Previous quorum id: 12 <br>\nNum participants: 3 <br>\nQuorum age:\n3.50242013s\n"
FULL = page_of(
    MEMBER.format(life="0.0a", step=7, ranks=4, also="")
    + MEMBER.format(life="1.0b", step=5, ranks=2, also="recovering")
    + MEMBER.format(life="2.0c", step=7, ranks=1, also=""),
    HEARTBEAT.format(life="0.0a", age="0.048105473", old="")
    + HEARTBEAT.format(life="1.0b", age="3.5026206269999998", old="old")
    + HEARTBEAT.format(life="1.ff", age="0.2", old="")  # cell 1 has come back, and has not met others yet
    + HEARTBEAT.format(life="2.0c", age="40", old="old")
    + HEARTBEAT.format(life="2.00", age="400.5", old="old")
    + HEARTBEAT.format(life="island:&lt;b&gt;\x1b[2J", age="1.5", old=""),
    MEETING,
)


@contextmanager
def served(text: str) -> Iterator[str]:
    """Serve a page at /status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/status" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_page_tells_of_each_cell_the_life_that_is_heard_of_or_was_last() -> None:
    status = parse_page(FULL)
    assert status is not None and (status.meeting, status.age_s) == (12, 3.50242013)
    assert status.cells == (
        CellStatus("0.0a", 0, 0.048105473, is_lost=False, has_met=True, round=7, ranks=4, store="10.0.0.4:4000"),
        CellStatus("1.ff", 1, 0.2, is_lost=False),
        CellStatus("2.0c", 2, 40.0, is_lost=True, has_met=True, round=7, ranks=1, store="10.0.0.1:4000"),
        CellStatus("island:<b> [2J", None, 1.5, is_lost=False),
    )
    assert [status.lag_of(cell) for cell in status.cells] == [0, None, 0, None]


def test_two_lives_of_a_cell_that_are_heard_of_are_both_told() -> None:
    beats = HEARTBEAT.format(life="1.0b", age="0.1", old="") + HEARTBEAT.format(life="1.ff", age="0.2", old="")
    status = parse_page(page_of(MEMBER.format(life="1.0b", step=3, ranks=2, also=""), beats, MEETING))
    assert status is not None and [cell.life for cell in status.cells] == ["1.0b", "1.ff"]


def test_lag_is_counted_from_the_furthest() -> None:
    members = "".join(MEMBER.format(life=f"{cell}.0a", step=9 - 2 * cell, ranks=1, also="") for cell in range(3))
    status = parse_page(page_of(members, meeting=MEETING))
    assert status is not None and [status.lag_of(cell) for cell in status.cells] == [0, 2, 4]


def test_a_lighthouse_that_knows_nobody() -> None:
    status = parse_page(page_of())
    assert status is not None and (status.cells, status.meeting, status.age_s) == ((), None, None)
    assert parse_page("<html><h1>Grafana</h1></html>") is None and parse_page("") is None


def test_a_page_takes_time_in_proportion_to_its_length() -> None:
    start, members = page_of(meeting=MEETING), '<div class="member">\n'
    hostile = (
        "<!--<" * 40_000,
        members + "<b>x" * 60_000,
        members + "a" + " " * 200_000,
        "<div>" * 60_000,
        "<div class=" * 20_000,
        "<a" + "a " * 100_000,
        '<li class="heartbeat">' + " " * 200_000 + "\nx",
        "&#" + "1" * 100_000 + ";",
        "Quorum age: " + "1." * 50_000 + "s",
        "".join(f'<div class="member">{life}.a\nStep: 1</div>' for life in range(10_000)),
    )
    begun = time.thread_time()
    for text in hostile:
        for page in (text, start + text, text + start):
            status = parse_page(page)
            for cell in status.cells if status is not None else ():
                status.lag_of(cell)
    assert time.thread_time() - begun < 10


def test_a_page_of_thousands_of_cells_fits_and_an_endless_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    lives = [f"{cell}.{cell:032x}" for cell in range(8000)]
    members = "".join(MEMBER.format(life=life, step=123456, ranks=64, also="recovering") for life in lives)
    beats = "".join(HEARTBEAT.format(life=life, age="3.5026206269999998", old="old") for life in lives)
    with served(page_of(members, beats, MEETING)) as url:
        assert len(read_lighthouse(url, 60).cells) == 8000
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as connection, suppress(OSError):
            while not over.is_set():
                connection.sendall(b"<div>" * 10_000)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=[listener])
    thread.start()
    assert main(["cells", f"127.0.0.1:{listener.getsockname()[1]}"]) == 2
    over.set()
    thread.join()
    told = capsys.readouterr().err
    assert "sends more than 4194304 bytes" in told and told.count("\n") == 1


def test_damaged_members_and_heartbeats_are_left_out() -> None:
    damaged = '<div class="member"></div><li class="heartbeat">0.a: seen 1.2.3s ago</li><li class="heartbeat">x</li>'
    status = parse_page(page_of(damaged, meeting=MEETING.replace("3.50242013", "1.2.3")))
    assert status is not None and (status.cells, status.meeting, status.age_s) == ((), 12, None)


def test_cells_as_a_table_and_as_json_without_torch(tmp_path: Path) -> None:
    def cells(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, "cells", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)

    with served(FULL) as url:
        (tmp_path / "lighthouse").write_text(url + "\n")
        table = cells(f"file:{tmp_path / 'lighthouse'}").stdout.splitlines()
        told = json.loads(cells(url.removeprefix("http://"), "--json").stdout)
    assert table.pop().startswith(f"the run's journal is not known here: there is no journal {tmp_path}/lighthouse.jo")
    assert told["journal"]["newest"] == -1 and "Connection refused" in told["journal"]["trouble"]
    assert [line.split() for line in table] == [
        ["cell", "life", "state", "round", "lag", "ranks", "store", "last", "seen", "met"],
        ["0", "0.0a", "alive", "7", "0", "4", "10.0.0.4:4000", "0.0", "s", "ago", "yes"],
        ["1", "1.ff", "alive", "-", "-", "-", "-", "0.2", "s", "ago", "no"],
        ["2", "2.0c", "lost", "7", "0", "1", "10.0.0.1:4000", "40.0", "s", "ago", "yes"],
        ["-", "island:<b>", "[2J", "alive", "-", "-", "-", "-", "1.5", "s", "ago", "no"],
        ["meeting", "12", "was", "3.5", "s", "ago,", "with", "2", "of", "these", "4", "cells"],
    ]
    assert (told["lighthouse"], told["meeting"]) == (url, {"number": 12, "age_s": 3.50242013})
    assert told["cells"][2] == {
        "cell": 2,
        "life": "2.0c",
        "state": "lost",
        "round": 7,
        "lag": 0,
        "ranks": 1,
        "store": "10.0.0.1:4000",
        "seen_s": 40.0,
        "met": True,
    }


def test_what_is_no_lighthouse_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served("<html>a wiki</html>") as url:
        assert main(["cells", url]) == 2
    assert capsys.readouterr().err.startswith(f"xffl: LaunchError: what answers at {url} is not a lighthouse")
    with socket.create_server(("127.0.0.1", 0)) as other:  # speaks another protocol
        threading.Thread(target=lambda: other.accept()[0].sendall(b"SSH-2.0-x\r\n"), daemon=True).start()
        assert main(["cells", f"127.0.0.1:{other.getsockname()[1]}"]) == 2
    assert "is not a lighthouse" in capsys.readouterr().err
    assert main(["cells", f"127.0.0.1:{free_port()}"]) == 2
    told = capsys.readouterr().err
    assert "does not answer (Connection refused)" in told and told.count("\n") == 1


def test_addresses_of_a_lighthouse(tmp_path: Path) -> None:
    file = tmp_path / "lighthouse"
    with pytest.raises(LaunchError, match="a file that cannot be read"):
        resolve_lighthouse(f"file:{file}")
    file.write_text("10.0.0.1:29510\n")
    for text in ("http://10.0.0.1:29510", "10.0.0.1:29510/", f"file:{file}", f"file://{file}"):
        assert resolve_lighthouse(text) == "http://10.0.0.1:29510"
    file.write_text("")
    with pytest.raises(LaunchError, match=f"the lighthouse in {file} is ''; give HOST:PORT"):
        resolve_lighthouse(f"file:{file}")
    os.mkfifo(tmp_path / "fifo")
    os.truncate(file, 2**40)
    for name, why in ((file, "at most 4096 are read"), (tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device")):
        with pytest.raises(LaunchError, match=f"a file that cannot be read .*{why}"):
            resolve_lighthouse(f"file:{name}")


def test_a_proof_of_a_token_holds_for_one_life_and_one_token() -> None:
    proof = prove_token(b"secret", "0.0a")
    nonce = proof.partition(" ")[0]
    assert proof == prove_token(b"secret", "0.0a", nonce) and "secret" not in proof
    assert proof not in (prove_token(b"secret", "0.0b", nonce), prove_token(b"other", "0.0a", nonce))
    assert nonce != prove_token(b"secret", "0.0a").partition(" ")[0]
    assert (run_token({}), run_token({"XFFL_TOKEN": "s" * 16})) == (b"", b"s" * 16)


def test_the_doctor_warns_of_two_jobs_with_one_cell_number() -> None:
    cells = [CellStatus(f"{cell}.{life}", cell, 0.1, is_lost=False) for cell, life in ((0, "a"), (1, "a"), (1, "b"))]
    view: RunView = {"cells": cells, "meeting": 1, "stores": {}}
    [warning] = [one for one in compare_runs("http://a:1", {"a": view}) if one.status == "warning"]
    assert (warning.check, warning.text) == ("heartbeats", "two jobs run as cell 1")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(head: bytes) -> None:
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as connection, suppress(OSError):
            connection.sendall(head)
            while not over.wait(0.05):
                connection.sendall(b"x")

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=[listener])
    thread.start()
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="does not answer .(timed out|its answer takes too long)"):
        read_lighthouse(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.4)
    assert time.monotonic() - begun < 30
    over.set()
    thread.join()
