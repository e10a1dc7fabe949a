"""Run elastic federations on another checkout and on this one, and say where their models differ by a bit.

    python tests/golden/elastic.py OLD_FOLDER [--only TEXT]

Two cells train for some rounds; in some cases a third one comes late, always in the same round. Compared are digests of
the models and of what belongs to them behind each round. A codec is not compared behind a change of cells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 8
CASE_S = 120.0
"""How long the cells of a case may take"""
COMES = 4
"""The round behind which the late cell may come"""

DILOCO: dict[str, Any] = {"aggregator": {"server": "diloco"}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "diloco": DILOCO,
    "fedadam": {"aggregator": {"server": "fedadam:lr=0.03"}},
    "int8": {"aggregator": {"codec": "int8"}},
    "topk": {"aggregator": {"codec": "topk:0.1", "form": "two_hop"}},
    "fragments": {"aggregator": {"server": "diloco", "fragments": 2}},
    "coded fragments": {"aggregator": {"codec": "int8", "fragments": 2}},
    "delay": {"delay": 1},
    "coded delay": {"delay": 1, "aggregator": {"codec": "int8"}},
    "privacy": {"aggregator": {"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 0.1, "seed": 3}}},
    "scaffold": {"client": "scaffold"},
    "late": {"late": True},
    "late diloco": {"late": True, **DILOCO},
    "late fedadam": {"late": True, "aggregator": {"server": "fedadam:lr=0.03"}},
    "late fragments": {"late": True, "aggregator": {"server": "diloco", "fragments": 2}},
    "late delay": {"late": True, "delay": 1},
}


def be_cell(cell: int, case: dict[str, Any], folder: Path, url: str) -> None:
    """Train as one cell, and write its digests."""
    import torch
    from torch import nn

    import xffl
    from xffl.distributed import ElasticParameters

    cells = 3 if case.pop("late", False) else 2
    torch.set_num_threads(1)
    digests: dict[int, str] = {}
    is_late = cell == 2

    def digest() -> str:
        whole = hashlib.sha256()
        for _, tensor in sorted(model.state_dict().items()):
            whole.update(tensor.numpy().tobytes())
        agreed = scaling.aggregator.state_dict().get("agreed")
        whole.update(repr(plain(agreed)).encode())
        return whole.hexdigest()[:16]

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return sorted((str(key), plain(part)) for key, part in value.items())
        return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value

    def on_round(report: Any) -> None:
        digests[report.round] = digest()
        if report.round == COMES and cells == 3 and not is_late:
            (folder / "late").touch()
            while not (folder / "ready").exists():
                time.sleep(0.01)
            time.sleep(2.0)

    while is_late and not (folder / "late").exists():
        time.sleep(0.05)
    with xffl.session(
        cell=cell, cells=cells, elastic=ElasticParameters(lighthouse=url, least_cells=2), timeout_s=60
    ) as state:
        torch.manual_seed(cell)
        layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)]
        model = (
            nn.Sequential(*layers)
            if "privacy" in case.get("aggregator", {})
            else nn.Sequential(*layers[:2], nn.BatchNorm1d(16), layers[2])
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if "client" in case else 0.5)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=3, on_round=on_round, **case)
        generator = torch.Generator().manual_seed(cell)
        if is_late:
            (folder / "ready").touch()
        with scaling:
            while scaling.aggregator.rounds < ROUNDS:
                model(torch.randn(4, 5, generator=generator)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (folder / f"{cell}.json").write_text(json.dumps(digests))


def run(tree: Path, name: str) -> dict[str, dict[str, str]]:
    """Return the digests of a case, by cell and round."""
    from xffl.elastic.lighthouse_client import coordination

    case = CASES[name]
    server = coordination().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=2000, quorum_tick_ms=50
    )
    url = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = dict(
            os.environ, PYTHONPATH=str(tree), XFFL_JOURNAL=str(folder / "journal"), XFFL_TOKEN="golden" * 4
        )
        environment |= {
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        environment |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        cells = range(3 if case.get("late") else 2)
        with ExitStack() as running:
            running.callback(server.shutdown)
            processes = []
            for cell in cells:
                words = [sys.executable, str(Path(__file__)), "--cell", str(cell), "--case", name, "--folder", place]
                process = subprocess.Popen([*words, url], env={**environment, "MASTER_PORT": str(free_port())})
                running.callback(process.wait)
                running.callback(process.kill)
                processes.append(process)
            wait_for(processes, f"cells of {name} in {tree}")
        return {str(cell): json.loads((folder / f"{cell}.json").read_text()) for cell in cells}


def wait_for(processes: list[subprocess.Popen[bytes]], what: str) -> None:
    """Wait until all processes have ended well; RuntimeError once one has not, or if they take too long."""
    deadline = time.monotonic() + CASE_S
    while True:
        codes = [process.poll() for process in processes]
        if not any(codes) and None not in codes:
            return
        if any(codes) or time.monotonic() > deadline:
            raise RuntimeError(f"{what} have ended with {codes} (None: not within {CASE_S:g} s)")
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody listens at."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Compare two trees."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("place", help="the folder of the other checkout")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    parser.add_argument("--cell", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        be_cell(options.cell, dict(CASES[options.case]), Path(options.folder), options.place)
        return 0
    other = Path(options.place)
    if not (other / "xffl").is_dir():
        parser.error(f"{other} is no checkout of xffl")
    different = 0
    for name in CASES:
        if options.only not in name:
            continue
        old, new = run(other, name), run(ROOT, name)
        is_equal = old == new
        different += not is_equal
        print(f"{name}: {'equal' if is_equal else f'DIFFERENT: {old} {new}'}", flush=True)
    print(f"{different} cases differ")
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
