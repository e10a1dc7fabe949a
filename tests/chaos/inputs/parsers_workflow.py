"""What the commands of a workflow read: facilities, numbers of rounds, the metrics that a facility sends back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.chaos.inputs.parser import Parser, command
from tests.chaos.inputs.parsers_planning import words_of
from xffl.workflow.documents import parse_facilities

FACILITIES = (
    b"a=local,processes=2\nb=ssh:me@host.org:22,slurm,partition=gpu,processes=4,workdir=/scratch,gpus=4\n",
    b"a=ssh:[::1],home=runs,key=id\nb=local\n",
)


def read_facilities(content: bytes, folder: Path) -> None:
    parse_facilities(content.decode("utf-8", errors="replace").splitlines())


def metrics_examples(folder: Path) -> list[bytes]:
    (folder / "results").mkdir()
    told = {"round": 3, "start": "0" * 64, "metrics": {"val/loss": 0.5, "val/accuracy": 0.75}}
    return [json.dumps(told).encode(), json.dumps({**told, "metrics": {"val/loss": "NaN"}}).encode()]


def record(content: bytes, folder: Path) -> None:
    (folder / "metrics.json").write_bytes(content)
    command("workflow", "record", str(folder / "results"), str(folder / "metrics.json"))


def begin_examples(folder: Path) -> list[bytes]:
    (folder / "results").mkdir()
    return [b"results --first 1 --rounds 3", b"results --rounds 3 --first 0"]


def begin(content: bytes, folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        command("workflow", "begin", *words_of(content))
    finally:
        os.chdir(before)


def init_examples(folder: Path) -> list[bytes]:
    command("init", str(folder / "demo"))
    return [
        b"config.yaml --facility a=local --facility b=local --rounds 3",
        b"config.yaml --facility a=ssh:a.org,slurm,workdir=/x,time=1:00 --facility b=local --measure none --rounds 9",
    ]


def init(content: bytes, folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder / "demo")
    try:
        command("workflow", "init", *words_of(content), "--out", str(folder / "federation"))
    finally:
        os.chdir(before)
        shutil.rmtree(folder / "federation", ignore_errors=True)


PARSERS = (
    Parser("workflow: facilities", "text", lambda folder: list(FACILITIES), read_facilities),
    Parser("workflow: metrics", "json", metrics_examples, record),
    Parser("workflow: begin", "text", begin_examples, begin),
    Parser("workflow: init", "text", init_examples, init, 0.25),
)
