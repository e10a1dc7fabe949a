"""What an elastic federation costs where nobody fails: seconds of its rounds beside those of one job, and of a change.

    python tests/chaos/price.py [--parameters 100e6] [--rounds 20] [--repeats 3] [--out FILE]

Two cells of one rank make rounds without local steps, as one job and as two, in turn; the ratio is that of the medians
of each repeat. Before each round a cell changes one value, each by another amount, so that their models differ. Then a
third cell comes late to two: ``change`` is what the first round with it takes longer than the median of those that
follow. Last, ``change with a server`` is the same where FedAdam's state has to go over, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xffl

REPO = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    """Parameters of which a pass uses one."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        count, size = divmod(parameters, 10_000_000)
        sizes = [10_000_000] * count + [size] * bool(size)
        self.parts = nn.ParameterList(torch.randn(one) for one in sizes)

    def forward(self) -> torch.Tensor:
        return self.parts[0][0]


def be_a_rank(args: argparse.Namespace) -> None:
    """Make rounds, and write a line for each into the folder."""
    is_late = os.environ.get("XFFL_CELL", "").startswith("2")
    time.sleep(args.late if is_late else 0.0)
    with xffl.session(timeout_s=120) as state:
        assert state.rank is not None
        cell = state.rank if state.lone_cell is None else state.lone_cell[0]
        torch.manual_seed(0)
        model = Model(int(args.parameters))
        told: list[tuple[float, list[int]]] = []

        def on_round(report: Any) -> None:
            told.append((report.seconds, list(getattr(report, "cells", ()))))

        options = {"server": args.server} if args.server else {}
        end = time.monotonic() + args.seconds
        with xffl.FederatedScaling(model, None, state, every=1, on_round=on_round, aggregator=options) as scaling:
            while len(told) < args.rounds if not args.late else sum(len(one) == 3 for _, one in told) < args.rounds:
                assert time.monotonic() < end, "the rounds did not come about in time"
                model()
                with torch.no_grad():
                    model.parts[0][0] += 1.0 + cell
                scaling.step()
        (args.folder / f"{cell}.json").write_text(json.dumps(told))


def launch(args: argparse.Namespace, *, elastic: bool, late: float = 0.0, server: str = "") -> list[Any]:
    """Run all cells; return what cell 0 has told of each round."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = "1,1,1" if late else "1,1"
        command = [sys.executable, "-m", "xffl", "exec", *(["--elastic"] if elastic else ["--processes", "2"])]
        command += ["--federated", sizes, __file__, "--folder", folder, "--parameters", str(args.parameters)]
        command += ["--rounds", str(args.rounds), "--late", str(late), "--server", server]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        subprocess.run(command, check=True, env=environ, stdout=sys.stderr)
        return list(json.loads((Path(folder) / "0.json").read_text()))


def change(args: argparse.Namespace, server: str = "") -> dict[str, float]:
    """Have a cell come late; return what its coming costs those that are there."""
    told = launch(args, elastic=True, late=args.late or 20.0, server=server)
    of_two = [seconds for seconds, cells in told if len(cells) == 2][1:]
    first, *of_three = [seconds for seconds, cells in told if len(cells) == 3]
    usual = statistics.median(of_three)
    return {"of two": statistics.median(of_two), "first of three": first, "of three": usual, "change": first - usual}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--late", type=float, default=0.0, help="seconds after which the third cell comes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=500.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        be_a_rank(args)
        return
    results: dict[str, Any] = {"parameters": args.parameters, "rounds": []}
    for _ in range(args.repeats):
        fixed, elastic = (launch(args, elastic=kind) for kind in (False, True))
        medians = [statistics.median(seconds for seconds, _ in told[3:]) for told in (fixed, elastic)]
        results["rounds"].append({"one job": medians[0], "elastic": medians[1], "ratio": medians[1] / medians[0]})
        print(json.dumps(results["rounds"][-1]), flush=True)
    for name, server in (("change", ""), ("change with a server", "fedadam:lr=0.01")):
        results[name] = change(args, server)
        print(json.dumps({name: results[name]}), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
