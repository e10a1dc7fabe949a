"""Average over two cells that run two versions of PyTorch, and compare the models of all ranks after each round.

    python -m tests.chaos.torches --python /path/to/python [--elastic] [--ranks 2] [--rounds 10] [--kinds NAMES]

Cell 0 runs in this environment, cell 1 in that of the Python that is named, which needs torch, numpy, PyYAML,
jsonargparse and rich. Each has ``--ranks`` ranks, which hold FSDP shards, and trains for some steps between rounds.
With ``--elastic`` each cell is a world of its own, and both need torchft. In turn:

fedavg         the mean
diloco         Nesterov momentum
fedadam        Adam
fedyogi        Yogi
cosine         AdamW with a learning rate on a cosine, of pseudo-gradients cut to a greatest norm
fednova        normalized steps
norm_clipping  updates cut to a greatest norm

Printed as JSON, one line for each kind: the rounds, after how many of them ranks had models of different bits, and the
relative distance of the last model from that of cells that all run in this environment. The exit code is 1 where models
had different bits, or the distance is above 1e-3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xffl
from tests.ports import free_port
from xffl.elastic.lighthouse_client import coordination

KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "diloco": {"algorithm": "diloco"},
    "fedadam": {"algorithm": "fedadam"},
    "fedyogi": {"algorithm": "fedyogi"},
    "cosine": {"aggregator": {"server": {"name": "adamw", "lr": 0.01, "clip": 0.3, "schedule": "cosine:T_max=20"}}},
    "fednova": {"algorithm": "fednova"},
    "norm_clipping": {"algorithm": {"name": "norm_clipping", "clip": 0.05}},
}
EVERY = 4


def train(kind: str, rounds: int, ranks: int, out: str, cell: int, lighthouse: str | None) -> None:
    """Be a rank."""
    torch.manual_seed(0)
    found: list[str] = []
    place: dict[str, Any] = {"federated": (ranks, ranks)}
    if lighthouse is not None:
        place = {"cell": cell, "cells": 2, "elastic": lighthouse}
    with xffl.session(**place) as state:
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 10))
        model = xffl.shard(model, state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        asked = {**KINDS[kind]}

        def note(report: Any) -> None:
            whole = {name: one.full_tensor().detach() for name, one in model.named_parameters()}
            bits = hashlib.sha256(b"".join(one.numpy().tobytes() for one in whole.values()))
            found.append(bits.hexdigest())
            if report.round == rounds and cell == state.rank == 0:
                torch.save(whole, f"{out}.model")

        generator = torch.Generator().manual_seed(cell * ranks + state.rank % ranks)
        with xffl.FederatedScaling(model, optimizer, state, every=EVERY, on_round=note, **asked) as scaling:
            while scaling.aggregator.rounds < rounds:
                inputs = torch.randn(16, 64, generator=generator)
                loss = (model(inputs) - inputs[:, :10].sin()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    told = {"digests": found, "torch": torch.__version__}
    Path(f"{out}.{cell * ranks + state.rank % ranks}").write_text(json.dumps(told))


def run(kind: str, pythons: list[str], args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Start the ranks of both cells; return what they tell, and the last model."""
    out = tempfile.mkdtemp(dir=folder) + "/told"
    ranks, ports = args.ranks, [free_port(), free_port()]
    words = ["-m", "tests.chaos.torches", "--rank", kind, "--out", out, "--rounds", str(args.rounds)]
    words += ["--ranks", str(ranks)]
    if args.elastic:
        server = coordination().LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20000)
        words += ["--lighthouse", f"http://127.0.0.1:{server.address().rpartition(':')[2]}"]
    processes = []
    for rank in range(2 * ranks):
        cell, size = rank // ranks, 2 * ranks
        port, here = ports[0], rank
        if args.elastic:
            port, here, size = ports[cell], rank % ranks, ranks
        environ = os.environ | {"RANK": str(here), "LOCAL_RANK": str(here), "WORLD_SIZE": str(size)}
        environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ |= {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
            "XFFL_TOKEN": "the token of this test",
        }
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        processes.append(subprocess.Popen([pythons[cell], *words, "--cell", str(cell)], env=environ))
    codes = [process.wait(300) for process in processes]
    if args.elastic:
        server.shutdown()
    if any(codes):
        raise SystemExit(f"{kind}: ranks ended with exit codes {codes}")
    told = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2 * ranks)]
    return told, torch.load(f"{out}.model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rank", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(args.rank, args.rounds, args.ranks, args.out, args.cell, args.lighthouse)
        return 0
    is_missed = False
    folder = Path(tempfile.mkdtemp(prefix="torches-"))
    for kind in args.kinds:
        told, model = run(kind, [sys.executable, args.python], args, folder)
        _, alike = run(kind, [sys.executable, sys.executable], args, folder)
        unequal = sum(len({*digests}) > 1 for digests in zip(*(one["digests"] for one in told), strict=True))
        distance = max(float((one - alike[name]).norm() / alike[name].norm()) for name, one in model.items())
        is_missed |= unequal > 0 or distance > 1e-3
        versions = sorted({one["torch"] for one in told})
        line = {"kind": kind, "torch": versions, "rounds": args.rounds}
        print(json.dumps({**line, "unequal": unequal, "distance": distance}), flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
