"""``xffl cells`` and ``xffl doctor --elastic`` beside real lighthouses, and faults that are planted at them."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.chaos.storm import REPO, Job, Xffl, wait_for_all
from tests.ports import free_port
from xffl.cli.main import main
from xffl.cluster.lighthouse.page import read_lighthouse
from xffl.cluster.run_token import PROOF_KEY, prove_token
from xffl.elastic.lighthouse_client import Lighthouse, coordination
from xffl.elastic.roster import CellRecord

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

TOKEN = "the run's own token"


class Federation:
    """Two cells of one rank each, which run until the end of this file's tests."""

    def __init__(self, folder: Path) -> None:
        with mock.patch.dict(os.environ, XFFL_TOKEN=TOKEN):
            self.system = Xffl(Job(cells=2, ranks=1, every=4, step_s=0.05), folder)
        wait_for_all([self.system], 60)
        variables = Path(f"/proc/{self.leader(0)}/environ").read_bytes().split(b"\0")
        self.url = dict(one.decode().split("=", 1) for one in variables if one)["XFFL_LIGHTHOUSE"]

    def leader(self, cell: int) -> int:
        return self.system.living()[cell, 0][0]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    found = Federation(tmp_path_factory.mktemp("federation"))
    yield found
    found.system.stop()


def doctor(url: str, *words: str, token: str = "") -> tuple[int, dict[str, list[tuple[str, str, str]]]]:
    """Return the exit code, and status, text and advice of each check's findings."""
    ran = subprocess.run(
        [sys.executable, "-m", "xffl", "doctor", "--json", "--elastic", url, *words],
        env=os.environ | {"PYTHONPATH": str(REPO), "XFFL_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout, ran.stderr
    found: dict[str, list[tuple[str, str, str]]] = {}
    for one in json.loads(ran.stdout)["findings"]:
        found.setdefault(one["check"], []).append((one["status"], one["text"], one["advice"]))
    return ran.returncode, found


def cells(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["cells", url, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_cells_tells_who_is_there_and_where_without_any_effect(
    federation: Federation, capsys: pytest.CaptureFixture[str]
) -> None:
    told, begun = cells(federation.url, capsys), time.time()
    later = [one["round"] + 3 for one in told["cells"]]
    while any(one["round"] < least for one, least in zip(told["cells"], later, strict=True)):
        assert time.time() < begun + 90, told
        told = cells(federation.url, capsys)
    assert [(one["cell"], one["state"], one["ranks"], one["met"]) for one in told["cells"]] == [
        (0, "alive", 1, True),
        (1, "alive", 1, True),
    ]
    for one in told["cells"]:
        host, _, port = one["store"].rpartition(":")
        socket.create_connection((host, int(port)), 5).close()
        assert one["life"].startswith(f"{one['cell']}.") and one["seen_s"] < 2 and one["lag"] == 0
    assert all(one.tries == 1 for rounds in federation.system.told().values() for one in rounds)


def test_watch_shows_it_again_until_ctrl_c(federation: Federation) -> None:
    command = [sys.executable, "-m", "xffl", "cells", federation.url, "--watch", "0.2"]
    environ = os.environ | {"PYTHONPATH": str(REPO), "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen([*command, "--json"], env=environ, stdout=subprocess.PIPE, text=True) as lines:
        assert lines.stdout is not None
        read = [json.loads(lines.stdout.readline()) for _ in range(3)]
        lines.send_signal(signal.SIGINT)
        assert lines.wait(10) == 130
    assert [len(one["cells"]) for one in read] == [2, 2, 2]
    here, there = pty.openpty()
    with subprocess.Popen(command, env=environ, stdout=there) as drawn:
        os.close(there)
        text = ""
        while text.count("meeting ") < 3:
            text += os.read(here, 4096).decode(errors="replace")
        drawn.send_signal(signal.SIGINT)
        assert drawn.wait(10) == 130
    os.close(here)
    assert "last seen" in text and "\x1b[" in text


def test_a_run_that_is_well(federation: Federation) -> None:
    code, found = doctor(federation.url, "--timeout", "10", token=TOKEN)
    assert [(check, *found[check][0][:2]) for check in ("heartbeats", "stores", "token")] == [
        ("heartbeats", "ok", "those of cells 0, 1 arrive"),
        ("stores", "ok", "those of cells 0, 1 answer"),
        ("token", "ok", "cells 0, 1: this host's token"),
    ]
    [(status, text, _)] = found["lighthouse"]
    assert status == "ok" and f"{federation.url} answers and knows cells 0, 1" in text
    assert code == int(any(one[0] == "error" for own in found.values() for one in own))


def test_a_cell_that_is_stopped_is_lost(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    pid = federation.leader(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.time()
        while (told := cells(federation.url, capsys)["cells"])[1]["state"] == "alive":
            assert time.time() < begun + 30
            time.sleep(0.1)
        _, found = doctor(federation.url, "--skip-torch", token=TOKEN)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert told[0]["state"] == "alive" and told[1]["seen_s"] > 2
    [(status, text, advice)] = found["heartbeats"]
    assert status == "warning" and text.startswith("none of cell 1 ") and "output of its job" in advice
    assert [one[:2] for one in found["stores"]] == [("ok", "those of cell 0 answer")]


def test_faults_that_are_planted(capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell has another one; they have met at a lighthouse of their own."""
    server = coordination().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=7, join_timeout_ms=20000, quorum_tick_ms=100, heartbeat_timeout_ms=2000
    )
    url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    right, wrong = b"the right one of all", b"the wrong one of all"
    tokens = {0: right, 1: wrong, 4: None, 5: b"", 6: right}
    stores = {cell: TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False) for cell in tokens}
    for cell, token in tokens.items():
        if token is not None:
            stores[cell].set(PROOF_KEY, prove_token(token, f"{cell}.0a"))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ports = {cell: store.port for cell, store in stores.items()} | {2: mute.getsockname()[1], 3: free_port()}
        lines = {cell: Lighthouse(url, f"{cell}.0a", b"") for cell in ports}

        def meet(cell: int) -> None:
            record = CellRecord(cell, 7, f"{cell}.0a", address=f"127.0.0.1:{ports[cell]}", ranks=cell + 1, round=cell)
            assert lines[cell].meet(record, 30.0) is not None

        waiting = [threading.Thread(target=meet, args=(cell,)) for cell in lines]
        for one in waiting:
            one.start()
        for one in waiting:
            one.join()
        lines[6].leave()
        while not read_lighthouse(url).cells[6].is_lost:
            time.sleep(0.1)
        assert [(one["ranks"], one["lag"]) for one in cells(url, capsys)["cells"]] == [(n + 1, 6 - n) for n in range(7)]
        code, found = doctor(url, "--timeout", "4", token=right.decode())
    for cell in range(6):
        lines[cell].leave()
    server.shutdown()
    assert code == 1
    assert [(status, text) for status, text, _ in found["stores"]] == [
        ("error", f"that of cell 2 at 127.0.0.1:{ports[2]} cannot be used: it takes connections, but does not answer"),
        ("error", f"that of cell 3 at 127.0.0.1:{ports[3]} cannot be used: Connection refused"),
    ]
    assert {(status, text) for status, text, _ in found["token"]} == {
        ("ok", "cell 0: this host's token"),
        ("error", "cell 1: another token than this host's"),
        ("warning", "cell 4: no proof of a token: another version of xffl"),
        ("error", "cell 5: no token, but this host has one"),
    }
    assert all("XFFL_TOKEN_FILE" in advice for status, _, advice in found["token"] if status != "ok")
    assert all("XFFL_IFNAME" in advice for _, _, advice in found["stores"])
    [(status, text, _)] = found["heartbeats"]
    assert status == "warning" and text.startswith("none of cell 6 ")
    # The lighthouse has gone.
    code, found = doctor(url, "--skip-torch")
    [(status, text, advice)] = found["lighthouse"]
    assert (code, status) == (1, "error") and f"{url} does not answer" in text and "xffl lighthouse" in advice
    assert not {"heartbeats", "stores", "token"} & {*found}
