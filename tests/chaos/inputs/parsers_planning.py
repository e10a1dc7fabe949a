"""What ``xffl plan`` reads: its words, hosts, the network of a cluster; and results of ``xffl bench``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tests.chaos.inputs.parser import Parser, command
from xffl.files import read_fields
from xffl.planning import bench_figure, bench_table

PLANS = (
    "--federated 4,4 --hsdp 2 --params 8e9 --link-gbps 10",
    "--federated 4,4 --params 8e9 --link-gbps 10 --link-ms 5 --step-s 1.5 --every 50 --simulate --codec int8",
    "--federated 16,16 --params 7e9 --link-gbps 10 --link-ms 5 --step-s 1 --every 9 --simulate --fragments 4 --delay 2",
    "--world 32 --params 8e9 --mesh pp=2,dp_shard=auto,tp=2 --layers 32 --width 4096 --sequence 4096 --batch 4 --json",
    "--hosts a[1-4]:4,b[1-4]:4 --federated hosts:. --hsdp 4 --params 1e9",
    "--federated 2 --world 8 --params 1e6 --link-backend gloo --pcie-gbps 100 --link-gbps 1",
)
HOSTS = b"a[1-2] slots=4 gpus=4 switches=core.s1\nb1:4 # the other rack\nb2 slots=4 address=10.0.0.1 switches=core.s2\n"
SWITCHES = b"""SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=b[1-2]
SwitchName=core Level=1 LinkSpeed=1 Nodes=a[1-2],b[1-2] Switches=s[1-2]
"""
CELLS = b"west a[1-2]\neast b1 b2\n"
CELLS_YAML = b"west: a[1-2]\neast: [b1, b2]\n"


def words_of(content: bytes) -> list[str]:
    return content.decode("utf-8", errors="replace").replace("\0", " ").split()


def plan(content: bytes, folder: Path) -> None:
    command("plan", *words_of(content))


def plan_with(option: str, name: str, *more: str) -> Any:
    def read(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        command("plan", option.format(folder / name), *more)

    return read


def bench_examples(folder: Path) -> list[bytes]:
    row = {
        "kind": "round",
        "name": "fp32",
        "ranks": "4",
        "payload_bytes": 4000000,
        "seconds": 0.01,
        "samples": [0.009, 0.01, 0.02],
        "gbytes_per_s": 0.4,
        "ratio": 1.5,
        "bytes_across": {"busiest": 100, "sum": 200},
        "bytes_home": None,
        "phases": {"vote": 0.001, "across": 0.005},
        "hidden": 0.001,
        "codec_error": None,
    }
    record = {
        "versions": {"torch": "2.13", "xffl": "1"},
        "hosts": [{"host": "a", "ranks": "0-3", "cpu": "x", "cores": 2, "device": "cpu"}],
        "date": "2026-11-01",
        "load_before": 0.5,
        "layout": {"world_size": 4, "federated_sizes": [2, 2], "replica_size": None, "backend": "gloo"},
        "model": {"bytes": 4000000, "tensors": 4},
        "effort": {"repeats": 5},
        "rows": [row, {**row, "kind": "all-reduce", "name": "world"}],
    }
    return [json.dumps(record).encode()]


def read_bench(content: bytes, folder: Path) -> None:
    (folder / "bench.json").write_bytes(content)
    record = read_fields(folder / "bench.json").all_of(100, lambda fields, name: fields.any(name))
    bench_table(record, io.StringIO())


def draw_bench(content: bytes, folder: Path) -> None:
    (folder / "bench.json").write_bytes(content)
    record = read_fields(folder / "bench.json").all_of(100, lambda fields, name: fields.any(name))
    bench_figure(record, folder / "bench.svg")


PARSERS = (
    Parser("plan: words", "text", lambda folder: [one.encode() for one in PLANS], plan),
    Parser(
        name="plan: hosts",
        form="text",
        examples=lambda folder: [HOSTS],
        read=plan_with("--hosts=@{}", "hosts", "--federated", "hosts:.", "--hsdp", "4"),
    ),
    Parser(
        name="plan: network",
        form="text",
        examples=lambda folder: [SWITCHES],
        read=plan_with("--topology={}", "topology.conf", "--hosts", "a[1-2]:4,b[1-2]:4", "--federated", "auto"),
    ),
    Parser(
        name="plan: cells",
        form="text",
        examples=lambda folder: [CELLS],
        read=plan_with("--federated=file:{}", "cells", "--hosts", "a[1-2]:4,b[1-2]:4"),
    ),
    Parser(
        name="plan: cells in YAML",
        form="yaml",
        examples=lambda folder: [CELLS_YAML],
        read=plan_with("--federated=file:{}", "cells.yaml", "--hosts", "a[1-2]:4,b[1-2]:4"),
    ),
    Parser("results of bench", "json", bench_examples, read_bench),
    Parser("figure of bench", "json", bench_examples, draw_bench, 0.05),
)
