"""The short form of the command that mutates the inputs of all readers of files and peers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.chaos.inputs import attempts
from tests.chaos.inputs.mutations import mutate
from tests.chaos.inputs.parser import Parser, command
from xffl.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]


def test_every_input_is_read_or_refused_by_name() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.chaos.inputs"], cwd=REPO, capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) > 30


def test_outcomes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LIMIT_S", 0.05)

    def read(content: bytes, folder: Path) -> None:
        if content == b"slow":
            time.sleep(5)
        if content == b"caught":
            try:
                time.sleep(5)
            except Exception:  # noqa: BLE001 - of a handler that takes everything
                return
        if content == b"raw":
            raise KeyError("x")
        if content == b"named":
            raise ConfigError("it is wrong")
        if content == b"command":
            command("plan", "--federated", "x")

    parser = Parser("it", "bytes", lambda folder: [b"ok"], read)
    told = {
        content: attempts.attempt(parser, content, tmp_path)[0]
        for content in (b"ok", b"slow", b"caught", b"raw", b"named")
    }
    assert list(told.values()) == ["ok", "slow", "slow", "raw", "named"]
    monkeypatch.setattr(attempts, "LIMIT_S", 60.0)
    assert attempts.attempt(parser, b"command", tmp_path)[:2] == ("named", mock.ANY)


def test_a_seed_gives_the_same_inputs() -> None:
    example = json.dumps({"round": 3, "sizes": [1, 2], "name": "x"}).encode()

    def inputs(seed: int) -> list[bytes]:
        return [mutate(example, "json", random.Random(f"{seed} {case}")) for case in range(50)]

    assert inputs(1) == inputs(1) != inputs(2)
    assert sum(one != example for one in inputs(1)) > 45
