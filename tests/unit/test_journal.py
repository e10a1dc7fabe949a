"""The records of the journal and their text; where they stand."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import http.client
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.journal_records import ID, RECORDS, ROUND, RUN, newest_of
from tests.ports import free_port
from xffl.errors import CheckpointError, ConfigError, LaunchError
from xffl.journal.folder import JournalFolder, hold_folder
from xffl.journal.records import (
    LONGEST_RECORD,
    MOST_CELLS,
    MOST_RECORDS,
    Journal,
    JournalUnproven,
    JournalUnreachable,
    ModelId,
    Record,
    Start,
    StartRecord,
    VoidRecord,
    make_id,
    read_record,
    record_text,
)
from xffl.journal.service import JournalService, RemoteJournal

# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert read_record(record_text(record), "it") == record
    assert read_record(record_text(record).encode(), "it") == record


@given(weights=st.lists(st.floats(0, 1e300), min_size=1, max_size=5))
def test_numbers_keep_all_their_bits(weights: list[float]) -> None:
    cells = tuple(range(len(weights)))
    record = replace(ROUND, cells=cells, weights=tuple(weights), federation=5)
    assert read_record(record_text(record), "it") == record


def test_a_record_names_its_model() -> None:
    assert ROUND.model == ModelId(RUN, 7, ID)


def test_a_record_of_the_format_with_places_is_read() -> None:
    plain = json.loads(record_text(ROUND))
    del plain["federation"]
    text = json.dumps(plain | {"format": 1, "places": [0, 0, 0]})
    assert read_record(text, "it") == ROUND


WRONG = {
    "not JSON": ("{", "is no record of a run's journal"),
    "a list": ("[]", "must be a mapping"),
    "another format": ({"format": 3}, "format of it must be an integer from 1 to 2"),
    "an unknown kind": ({"kind": "rounds"}, "kind of it must be one of"),
    "an unknown name": ({"cell": 1}, "cell of it is unknown"),
    "no number": ({"number": None}, "number of it must be an integer"),
    "a number that is too large": ({"number": MOST_RECORDS}, "number of it must be an integer from 0"),
    "no id": ({"id": "xyz"}, "id of it is no id of 16 to 64 hexadecimal digits"),
    "no rounds": ({"round": 0}, "round of it must be an integer from 1"),
    "no base": ({"base": ...}, "base of it is missing"),
    "a base above it": ({"base": {"run": RUN, "number": 7, "id": ID}}, "base of it has the number 7, not one below 7"),
    "a base with more": ({"base": {"run": RUN, "number": 6, "id": ID, "x": 1}}, "base.x of it is unknown"),
    "a cell twice": ({"cells": [0, 0]}, "cells of it must name each cell once"),
    "cells in disorder": ({"cells": [2, 0]}, "cells of it must name each cell once"),
    "a cell that does not exist": ({"cells": [0, 3]}, r"cells\[1\] of it must be an integer from 0 to 2"),
    "no cells": ({"cells": [], "weights": []}, "weights of it has 0 items for 0 cells"),
    "too few weights": ({"weights": [1.0]}, "weights of it has 1 items for 2 cells"),
    "a negative weight": ({"weights": [1.0, -1.0]}, r"weights\[1\] of it must be"),
    "an infinite weight": ({"weights": [1.0, float("inf")]}, "holds Infinity"),
    "too many cells": ({"federation": MOST_CELLS + 1}, "federation of it must be an integer from 1 to 4096"),
    "a long text": (" " * (LONGEST_RECORD + 1), "at most 1048576 are read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_record_is_refused(what: str) -> None:
    change, message = WRONG[what]
    if isinstance(change, dict):
        plain = json.loads(record_text(ROUND)) | change
        text = json.dumps({name: value for name, value in plain.items() if value is not ...})
    else:
        text = change
    with pytest.raises(CheckpointError, match=message):
        read_record(text, "it")


def test_a_start_names_each_cell_once() -> None:
    twice = StartRecord(RUN, 8, ID, (Start(0, "d" * 32, None), Start(0, "e" * 32, None)))
    with pytest.raises(CheckpointError, match="starts of it must name each cell once"):
        read_record(record_text(twice), "it")


def test_a_record_that_nobody_would_read_is_not_written() -> None:
    large = replace(ROUND, cells=tuple(range(MOST_CELLS)), weights=(1e-300 / 3,) * MOST_CELLS, left=(1,) * 10**6)
    with pytest.raises(ValueError, match="record 7 has"):
        record_text(large)


def test_ids_are_random() -> None:
    assert len({make_id() for _ in range(100)}) == 100


# In a folder ----------------------------------------------------------------------------------------------------------


def void(number: int, name: str = "") -> VoidRecord:
    return VoidRecord(RUN, number, name or (RUN if number == 0 else make_id()))


@pytest.fixture
def folder(tmp_path: Path) -> JournalFolder:
    journal = JournalFolder(tmp_path / "runs" / "journal")
    assert list(journal.path.iterdir()) == []
    return journal


def test_a_number_has_one_content(folder: JournalFolder) -> None:
    first, second = void(0), void(0)
    other = void(1)
    assert folder.put(first) == first
    assert folder.put(second) == first
    assert folder.put(first) == first  # the same attempt again
    assert folder.put(other) == other
    assert folder.read_from(0) == JournalFolder(folder.path).read_from(0) == [first, other]
    assert (folder.read_from(1), folder.read_from(2)) == ([other], [])
    assert sorted(path.name for path in folder.path.iterdir()) == ["000000000.json", "000000001.json"]


def test_an_empty_journal(folder: JournalFolder) -> None:
    assert folder.read_from(0) == []


def test_a_hole_is_not_made(folder: JournalFolder) -> None:
    with pytest.raises(JournalUnreachable, match="record 1 of .* has no record before it"):
        folder.put(void(1))
    assert list(folder.path.iterdir()) == []


def test_what_stands_decides_and_not_the_error(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may answer that a name exists to the very call that has made it, if its first answer was lost."""
    link = os.link

    def link_and_fail(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_fail)
    record = void(0)
    assert folder.put(record) == record


def test_a_name_that_exists_is_looked_up_again(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached lookup may say that a file is missing after the server has said that it exists."""
    stands = void(0)
    folder.put(stands)
    lookups = []

    def read_late(path: Path, limit: int) -> bytes:
        lookups.append(path)
        if len(lookups) < 4:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return path.read_bytes()

    monkeypatch.setattr("xffl.journal.folder.read_bytes", read_late)
    assert folder.put(void(0)) == stands
    assert len(lookups) == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_an_error_leaves_a_doubt_unless_the_record_stands(
    folder: JournalFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("xffl.journal.folder._LOOKUPS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", fail)
        with pytest.raises(JournalUnreachable, match=f"record 0 was not written to .*{os.strerror(number)}"):
            folder.put(void(0))
    assert list(folder.path.iterdir()) == []
    stands = void(0)
    folder.put(stands)
    monkeypatch.setattr(os, "link", fail)
    assert folder.put(void(0)) == stands


def test_a_record_is_on_the_disk_before_it_is_told(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "link", "unlink"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *words, name=name, real=real: (calls.append(name), real(*words))[1])
    folder.put(void(0))
    assert [name for name in calls if name != "unlink"] == ["fsync", "link", "fsync"]


def test_what_another_process_has_published_is_on_the_disk_before_it_is_read(
    folder: JournalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may have been killed before it has flushed the folder."""
    flushed: list[list[str]] = []
    monkeypatch.setattr(
        "xffl.journal.folder.sync",
        lambda path: flushed.append(sorted(file.name for file in path.glob("0*"))),
    )
    names = [f"{number:09d}.json" for number in range(4)]
    reader = JournalFolder(folder.path)
    assert (reader.read_from(0), reader.read_texts(0, LONGEST_RECORD), flushed) == ([], [], [])
    assert (reader.read_from(9), reader.read_texts(9, LONGEST_RECORD), flushed) == ([], [], [])
    for number in range(3):
        (folder.path / names[number]).write_text(record_text(void(number)))
    assert len(reader.read_texts(0, 2 * len(record_text(void(0))))) == 2
    assert flushed == [names[:3]]
    assert (len(reader.read_from(2)), len(reader.read_from(0))) == (1, 3)
    assert flushed == [names[:3]] * 2  # record 2 had not been returned before
    reader.put(void(3))
    assert (len(reader.read_from(0)), flushed) == (4, [names[:3]] * 2 + [names])


def test_a_folder_that_cannot_be_flushed_is_not_read(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.put(void(0))
    reader = JournalFolder(folder.path)

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("xffl.journal.folder.sync", fail)
        for _ in range(2):
            with pytest.raises(JournalUnreachable, match="cannot be read .*Input/output error"):
                reader.read_from(0)
    assert len(reader.read_from(0)) == 1


@pytest.mark.parametrize("content", ["", "{}", record_text(VoidRecord(RUN, 5, RUN))])
def test_a_damaged_record_is_refused_by_name(folder: JournalFolder, content: str) -> None:
    folder.put(void(0))
    (folder.path / "000000001.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"000000001.json"):
        folder.read_from(0)
    with pytest.raises(CheckpointError, match=r"000000001.json"):
        folder.put(void(1))


def test_a_folder_without_links_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigError, match=r"folder .*journal cannot be used .*use the journal of the lighthouse"):
        JournalFolder(tmp_path / "journal")
    monkeypatch.setattr(os, "link", lambda source, target: Path(target).write_bytes(Path(source).read_bytes()))
    with pytest.raises(ConfigError, match="a second link replaces the first one"):
        JournalFolder(tmp_path / "journal")
    assert list((tmp_path / "journal").iterdir()) == []


def test_one_process_serves_a_folder(folder: JournalFolder) -> None:
    code = "import sys; from pathlib import Path; from xffl.journal.folder import hold_folder\n"
    code += "with hold_folder(Path(sys.argv[1])): print('held')"
    words = [sys.executable, "-c", code, str(folder.path)]
    with hold_folder(folder.path):
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert f"is served by process {os.getpid()} on " in ran.stderr and ran.returncode == 1
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "held\n"


def test_a_process_serves_a_folder_once(folder: JournalFolder) -> None:
    code = "import sys; from pathlib import Path; from xffl.journal.folder import hold_folder\n"
    code += "with hold_folder(Path(sys.argv[1])): print('held')"
    with hold_folder(folder.path):
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"is served by process {os.getpid()} on "), hold_folder(folder.path):
                pass
        words = [sys.executable, "-c", code, str(folder.path)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert "is served by process" in ran.stderr and ran.returncode == 1
    with hold_folder(folder.path):
        pass


def test_a_folder_is_let_go_although_a_forked_process_lives(folder: JournalFolder) -> None:
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with hold_folder(folder.path):
        forked.start()
    try:
        with hold_folder(folder.path):
            assert forked.is_alive()  # and has inherited the lock of before
    finally:
        forked.kill()
        forked.join()


def test_a_file_system_without_locks_is_refused_by_name(folder: JournalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="cannot be locked .*give a folder on a disk"), hold_folder(folder.path):
        pass


# In processes ---------------------------------------------------------------------------------------------------------

TEN = 10

PUTTER = """
import sys, time
from pathlib import Path
from xffl.journal.folder import JournalFolder
from xffl.journal.records import VoidRecord, make_id
journal, run, rounds = JournalFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for number in range(1, rounds):
    record = VoidRecord(run, number, make_id())
    print(record.id, journal.put(record).id, flush=True)
"""


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_of_ten_processes_one_publishes_each_number(tmp_path: Path, place: str) -> None:
    memory = Path("/dev/shm")
    if place == "memory" and not os.access(memory, os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    with tempfile.TemporaryDirectory(dir=memory if place == "memory" else tmp_path) as name:
        folder = JournalFolder(Path(name))
        folder.put(void(0))
        answers = put_from_processes([sys.executable, "-c", PUTTER, name, RUN, "30"])
        check_answers(answers, folder, 30)
        assert len(list(folder.path.iterdir())) == 30


def put_from_processes(words: list[str]) -> list[list[list[str]]]:
    """Start ten processes that put the same numbers at once; return for each what it has put, and what stands."""
    putters = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(TEN)]
    for putter in putters:
        assert putter.stdout is not None and putter.stdout.readline() == "ready\n"
    for putter in putters:
        assert putter.stdin is not None
        putter.stdin.write("go\n")
        putter.stdin.flush()
    outputs = [putter.communicate(timeout=120)[0] for putter in putters]
    return [[line.split() for line in output.splitlines()] for output in outputs]


def check_answers(answers: list[list[list[str]]], folder: JournalFolder, numbers: int) -> None:
    """Check that all processes were told the same records, each of which one of them has put."""
    stands = [record.id for record in folder.read_from(0)][1:]
    assert [[told for _, told in lines] for lines in answers] == [stands] * TEN
    tried = {mine for lines in answers for mine, _ in lines}
    assert len(stands) == numbers - 1 and {*stands} <= tried


KILLED = """
import os, pathlib, signal, sys
from pathlib import Path
from xffl.journal.folder import JournalFolder
from xffl.journal.records import VoidRecord
journal = JournalFolder(Path(sys.argv[1]))
name, count, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
real = getattr(os, name)
def call(*words, **more):
    global count
    count -= 1
    if count == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = real(*words, **more)
    if count == 0 and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
setattr(os, name, call)
if name == "unlink" and hasattr(pathlib, "_normal_accessor"):  # Python 3.10 has looked it up already
    pathlib._normal_accessor.unlink = call
journal.put(VoidRecord("a" * 32, 1, "1" * 32))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("call", "count"), [("open", 1), ("fsync", 1), ("link", 1), ("unlink", 1), ("fsync", 2)])
def test_a_process_that_is_killed_leaves_a_number_that_can_be_decided(
    folder: JournalFolder, call: str, count: int, when: str
) -> None:
    folder.put(void(0))
    ran = subprocess.run([sys.executable, "-c", KILLED, str(folder.path), call, str(count), when], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    is_published = (call, count) in [("unlink", 1), ("fsync", 2)] or (call, when) == ("link", "after")
    mine = void(1)
    assert folder.put(mine).id == ("1" * 32 if is_published else mine.id)
    assert len(folder.read_from(0)) == 2
    folder.remove_temporaries()
    assert sorted(path.name for path in folder.path.iterdir()) == ["000000000.json", "000000001.json"]


# Behind a service -----------------------------------------------------------------------------------------------------

TOKEN = b"a token of the run"


@pytest.fixture
def service(folder: JournalFolder) -> Iterator[JournalService]:
    service = JournalService(folder, TOKEN, "127.0.0.1", 0)
    yield service
    service.close()


def test_a_service_answers_what_stands(folder: JournalFolder, service: JournalService) -> None:
    journal: Journal = RemoteJournal(service.url, TOKEN)
    first, second = void(0), void(0)
    assert journal.read_from(0) == []
    assert (journal.put(first), journal.put(second)) == (first, first)
    assert journal.put(ROUND_ONE) == ROUND_ONE
    assert journal.read_from(0) == folder.read_from(0) == [first, ROUND_ONE]
    assert (journal.read_from(1), journal.read_from(2)) == ([ROUND_ONE], [])


ROUND_ONE = replace(ROUND, number=1, round=1, base=None)


def test_who_does_not_know_the_token_reads_and_writes_nothing(service: JournalService, folder: JournalFolder) -> None:
    folder.put(void(0))
    stranger = RemoteJournal(service.url, b"another token", patience_s=0.0)
    for ask in (lambda: stranger.put(void(1)), lambda: stranger.read_from(0)):
        with pytest.raises(JournalUnproven, match="has another token.*: who asks does not know .*set XFFL_TOKEN_FILE"):
            ask()
    assert newest_of(folder) == 0


def ask(service: JournalService, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    place = urlsplit(service.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    with closing(connection):
        connection.request("POST", path, body, {"X-Xffl-Nonce": "n"} | {"X-Xffl-Proof": proof(path, body)} | headers)
        response = connection.getresponse()
        return response.status, response.read()


def proof(path: str, body: bytes) -> str:
    return hmac.new(TOKEN, f"{path}\nn\n".encode() + body, hashlib.sha256).hexdigest()


def test_a_service_refuses_what_is_no_request_of_the_run(service: JournalService) -> None:
    assert ask(service, "/put", b"{}", **{"X-Xffl-Proof": proof("/put", b"[]")})[0] == 401
    assert ask(service, "/put", b"{}", **{"X-Xffl-Nonce": "m"})[0] == 401
    assert ask(service, "/read", record_text(void(0)).encode(), **{"X-Xffl-Proof": proof("/put", b"{}")})[0] == 401
    for path, body, told in (
        ("/put", b"{}", b"format of what was put is missing"),
        ("/put", b"", b"what was put is no record"),
        ("/read", b"{}", b"from of the request is missing"),
        ("/read", b"{", b"the request cannot be read"),
    ):
        status, answer = ask(service, path, body)
        assert (status, told in answer) == (400, True), answer
    assert ask(service, "/", b"")[0] == 404
    assert ask(service, "/put", b"", **{"Content-Length": str(LONGEST_RECORD + 1)})[0] == 413
    assert ask(service, "/put", b"", **{"Content-Length": "-1"})[0] == 411
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"501" in connection.recv(100)
    assert RemoteJournal(service.url, TOKEN).read_from(0) == []


def test_an_answer_of_another_request_is_not_believed(service: JournalService, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RemoteJournal(service.url, TOKEN, patience_s=0.0)
    journal.put(void(0))
    monkeypatch.setattr("xffl.journal.service._proof", lambda *_: "0" * 64)
    assert journal.read_from(0)  # both sides agree
    monkeypatch.setattr("xffl.journal.service._proof", lambda *_: secrets.token_hex(32))
    with pytest.raises(JournalUnreachable, match="not signed"):
        journal.read_from(0)


def test_a_port_that_is_taken_is_named(folder: JournalFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"the journal cannot listen at 127.0.0.1:{port}"):
            JournalService(folder, TOKEN, "127.0.0.1", port)
    JournalService(folder, TOKEN, "127.0.0.1", port).close()  # it has let the folder go


def test_a_client_waits_for_a_service_that_comes_back(folder: JournalFolder) -> None:
    service = JournalService(folder, TOKEN, "127.0.0.1", 0)
    port = urlsplit(service.url).port or 0
    journal = RemoteJournal(service.url, TOKEN, patience_s=20.0)
    first, second = void(0), void(1)
    journal.put(first)
    service.close()
    impatient = RemoteJournal(service.url, TOKEN, patience_s=0.0)
    with pytest.raises(JournalUnreachable, match=r"does not answer \(Connection refused\); see .* or set XFFL_JOURNAL"):
        impatient.put(second)
    answers: list[Record] = []
    asking = threading.Thread(target=lambda: answers.append(journal.put(second)))
    asking.start()
    time.sleep(0.3)
    again = JournalService(folder, TOKEN, "127.0.0.1", port)
    asking.join(20)
    assert answers == [second] and journal.read_from(0) == [first, second]
    again.close()


def test_a_client_does_not_wait_for_ever_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.journal.service.SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        journal = RemoteJournal(f"http://127.0.0.1:{silent.getsockname()[1]}", TOKEN, patience_s=0.0)
        with pytest.raises(JournalUnreachable, match="timed out"):
            journal.read_from(0)


def drip(connection: socket.socket, start: bytes) -> float:
    """Send a byte every so often until the other side hangs up, for a minute at most; return how long it took."""
    begun = time.monotonic()
    connection.settimeout(0.05)
    with suppress(ConnectionError):
        connection.sendall(start)
        while time.monotonic() < begun + 60:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                if not connection.recv(1000):
                    break
    return time.monotonic() - begun


@pytest.mark.parametrize("patience_s", [0.0, 1.0])
@pytest.mark.parametrize("start", [b"HTTP/1.0 200 OK\r\nX-Long: ", b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_a_client_does_not_wait_longer_than_its_patience_for_bytes_that_drip(
    start: bytes, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.service.SILENT_S", 0.5)

    def serve() -> None:
        while True:
            try:
                connection = dripping.accept()[0]
            except OSError:
                return  # the test is over
            with connection:
                drip(connection, start)

    with socket.create_server(("127.0.0.1", 0)) as dripping:
        serving = threading.Thread(target=serve)
        serving.start()
        journal = RemoteJournal(f"http://127.0.0.1:{dripping.getsockname()[1]}", TOKEN, patience_s=patience_s)
        begun = time.monotonic()
        with pytest.raises(JournalUnreachable, match="timed out"):
            journal.read_from(0)
        assert max(patience_s, 0.5) <= time.monotonic() - begun < 30
        dripping.shutdown(socket.SHUT_RDWR)
        serving.join()


@pytest.mark.parametrize(
    "start", [b"POST /read HTTP/1.0\r\nX-Long: ", b"POST /read HTTP/1.0\r\nContent-Length: 1000\r\n\r\n"]
)
def test_a_service_does_not_wait_long_for_a_request_that_drips(
    start: bytes, service: JournalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.service.REQUEST_S", 0.5)
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 10) as connection:
        assert drip(connection, start) < 30


def test_a_slow_disk_does_not_cost_the_answer(
    folder: JournalFolder, service: JournalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = folder.put

    def put_late(record: Record) -> Record:
        time.sleep(1.0)
        return put(record)

    monkeypatch.setattr("xffl.journal.service.REQUEST_S", 0.5)
    monkeypatch.setattr(folder, "put", put_late)
    first = void(0)
    assert RemoteJournal(service.url, TOKEN, patience_s=10.0).put(first) == first


def test_a_client_tries_all_addresses_of_a_host(service: JournalService, monkeypatch: pytest.MonkeyPatch) -> None:
    port = urlsplit(service.url).port or 0
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    places = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", number)) for number in (free, port)]
    places.insert(0, (-2, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)))  # a family that this host does not know
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    assert RemoteJournal(service.url, TOKEN, patience_s=0.0).read_from(0) == []
    del places[2]
    del places[0]
    with pytest.raises(JournalUnreachable, match="Connection refused"):
        RemoteJournal(service.url, TOKEN, patience_s=0.0).read_from(0)


def test_a_connection_for_which_no_thread_starts_keeps_no_place(
    folder: JournalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("xffl.journal.service.MOST_CONNECTIONS", 1)
    service = JournalService(folder, TOKEN, "127.0.0.1", 0)
    with closing(service):
        journal = RemoteJournal(service.url, TOKEN, patience_s=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(JournalUnreachable):
                journal.read_from(0)
        assert RemoteJournal(service.url, TOKEN, patience_s=5.0).read_from(0) == []


def test_long_journals_are_read_in_parts(
    folder: JournalFolder, service: JournalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [folder.put(void(number)) for number in range(12)]
    longest = len(record_text(records[11]))
    monkeypatch.setattr("xffl.journal.service.LONGEST_ANSWER", 5 * longest)
    journal = RemoteJournal(service.url, TOKEN)
    parsed: list[str] = []

    def count(text: bytes, what: str) -> Record:
        parsed.append(what)
        return read_record(text, what)

    monkeypatch.setattr("xffl.journal.folder.read_record", count)
    assert journal.read_from(0) == records[:5]
    assert len(parsed) <= 6  # those of the answer, and the one that is too much
    assert journal.read_from(5) == records[5:10]
    assert journal.read_from(10) == records[10:]


REMOTE_PUTTER = PUTTER.replace("JournalFolder(Path(sys.argv[1]))", "RemoteJournal(sys.argv[1], b'a token of the run')")
REMOTE_PUTTER = REMOTE_PUTTER.replace("folder import JournalFolder", "service import RemoteJournal")


def test_of_ten_processes_one_publishes_each_number_through_the_service(
    folder: JournalFolder, service: JournalService
) -> None:
    folder.put(void(0))
    answers = put_from_processes([sys.executable, "-c", REMOTE_PUTTER, service.url, RUN, "20"])
    check_answers(answers, folder, 20)


SERVER = """
import os, signal, sys, time
from pathlib import Path
from xffl.journal.folder import JournalFolder
from xffl.journal.service import JournalService
folder = JournalFolder(Path(sys.argv[1]))
name, count, port = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
service = JournalService(folder, b"a token of the run", "127.0.0.1", port)
real = getattr(os, name)
def call(*words, **more):
    global count
    count -= 1
    answer = real(*words, **more)
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
setattr(os, name, call)
print(service.url, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("call", "count"), [("fsync", 1), ("link", 1), ("fsync", 2)])
def test_a_service_that_is_killed_has_told_nothing_that_does_not_stand(
    folder: JournalFolder, call: str, count: int
) -> None:
    folder.put(void(0))
    words = [sys.executable, "-c", SERVER, str(folder.path), call, str(count), "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        record = void(1)
        answers: list[Record] = []
        asking = threading.Thread(target=lambda: answers.append(RemoteJournal(url, TOKEN).put(record)))
        asking.start()
        assert server.wait(60) == -signal.SIGKILL
        assert answers == []
        again = JournalService(folder, TOKEN, "127.0.0.1", urlsplit(url).port or 0)
        asking.join(60)
    assert answers == [record] == folder.read_from(1)
    assert not [path.name for path in folder.path.iterdir() if path.name.startswith(".0")]
    again.close()


def test_a_client_that_asks_in_vain_says_so_before_it_gives_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.journal.service.QUIET_S", 0.2)
    journal = RemoteJournal(f"http://127.0.0.1:{free_port()}", TOKEN, patience_s=1.0)
    with pytest.raises(JournalUnreachable, match="Connection refused"):
        journal.read_from(0)
    told = capsys.readouterr().err
    assert "does not answer (Connection refused)" in told and "it is asked again for" in told and told.count("\n") == 1
