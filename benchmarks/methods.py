"""Train one language model by each method in two and four cells, on the same tokens: held-out loss and bytes a round.

    python benchmarks/methods.py --out runs/methods    # the table
    python benchmarks/methods.py --out runs/methods --steps 100 --every 10 --pieces 4 --seeds 1    # a short form of it
    python benchmarks/methods.py --out runs/methods --rows muloco sparseloco --cells 4

Each row is a job of its own (``xffl exec``, a rank a cell), and leaves a file in ``--out`` when it ends: started again,
the command makes only the rows that are missing, and prints the table of those that there are. One seed of each row
comes first. ``--print`` starts none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SEEDS = {
    "synchronous": 3,
    "fedavg": 1,
    "diloco": 3,
    "muloco": 3,
    "desloc": 1,
    "sparseloco": 1,
    "int8": 1,
    "int4": 1,
    "int2": 1,
}
"""Seeds of each method, in the order of the table."""


class Row(NamedTuple):
    """A training."""

    method: str
    cells: int
    seed: int

    def file(self, options: argparse.Namespace) -> Path:
        """Return where its result is, which names all that the result depends on."""
        name = f"{self.method}-{self.cells}-{self.seed}-{options.steps}-{options.every}-{options.pieces}.json"
        path: Path = options.out / name
        return path


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return the trainings that were asked for, one seed of each first."""
    return [
        Row(method, cells, seed)
        for seed in range(options.seeds)
        for cells in options.cells
        for method in options.rows
        if seed < SEEDS[method]
    ]


def train(row: Row, options: argparse.Namespace) -> None:
    """Start the ranks of a training, and wait until it has left its file."""
    synchronous = row.method == "synchronous"
    command = [sys.executable, "-m", "xffl", "exec", "--processes", str(row.cells)]
    command += [] if synchronous else ["--federated", ",".join("1" * row.cells)]
    command += [str(Path(__file__).with_name("methods_rank.py")), row.method, "--seed", str(row.seed)]
    command += ["--steps", str(options.steps), "--every", str(options.every), "--pieces", str(options.pieces)]
    command += ["--out", str(row.file(options))]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def read(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what a training left, if it has ended."""
    path = row.file(options)
    return json.loads(path.read_text()) if path.exists() else None


def show(options: argparse.Namespace) -> None:
    """Print the table: means over seeds, and how far these are apart."""
    print(
        f"{'':12s} {'cells':>5s} {'seeds':>5s} {'held out':>8s} {'range':>15s} {'bytes a round':>13s} {'of exact':>8s}"
    )
    for cells in options.cells:
        for method in options.rows:
            found = [read(Row(method, cells, seed), options) for seed in range(SEEDS[method])]
            ended = [one for one in found if one is not None]
            if not ended:
                continue
            losses = [one["held_out"] for one in ended]
            span = f"{min(losses):.4f}-{max(losses):.4f}" if len(losses) > 1 else ""
            across = ended[0]["bytes_a_round"]
            whole = 8 * ended[0]["parameters"] * (cells - 1) / cells  # what an all-reduce of fp32 sends
            print(
                f"{method:12s} {cells:5d} {len(ended):5d} {statistics.mean(losses):8.4f} {span:>15s} {across:13,.0f} "
                f"{across / whole:8.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows' files")
    parser.add_argument("--rows", nargs="+", choices=tuple(SEEDS), default=tuple(SEEDS), help="methods")
    parser.add_argument("--cells", nargs="+", type=int, default=(2, 4), help="numbers of cells")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps between two rounds")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of 128 bytes in a step, over all cells")
    parser.add_argument("--seeds", type=int, default=max(SEEDS.values()), help="seeds of a method, at most")
    parser.add_argument("--print", action="store_true", help="train nothing, print the rows that have ended")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for row in () if options.print else rows_of(options):
        if read(row, options) is None:
            train(row, options)
            print(f"{row}: {read(row, options)}", flush=True)
    show(options)


if __name__ == "__main__":
    main()
