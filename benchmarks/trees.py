"""Time the rounds of an older commit and of this checkout against each other, in interleaved pairs.

    python benchmarks/trees.py OLD_REF [--pairs 21] [--case "(2, 2)"]

Two worlds of the same layout stay alive, one for each tree; their rounds take turns, and each pair begins with the
other one, so that the noise of a shared machine meets both alike. A round counts for the rank that took longest. The
figure of merit is the median of the pairs' ratios, new over old, with its 95 % confidence interval by order statistics:
below 1.03 or around 1.00, nothing has become slower.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    # name: sizes of the cells, tensors, elements of each, options of the aggregator
    "(1, 1)": ((1, 1), 160, 2**18, {}),
    "(1, 1) in place": ((1, 1), 160, 2**18, {"atomic": False}),
    "(2, 2)": ((2, 2), 160, 2**17, {}),
    "(2, 2) int8": ((2, 2), 160, 2**16, {"codec": "int8"}),
    "(1, 1, 1)": ((1, 1, 1), 160, 2**17, {}),
    "(1, 1, 1, 1)": ((1, 1, 1, 1), 160, 2**17, {}),
    "2,000 small tensors": ((1, 1), 2000, 512, {}),
}
"""What is timed."""


def run_rank(case: str) -> None:
    """Be a rank of one world: make a round for each line that rank 0 reads, and have it print the seconds."""
    import torch
    import torch.distributed as dist

    import xffl

    sizes, tensors, elements, options = CASES[case]
    with xffl.session(federated=sizes, backend="gloo", device="cpu") as state:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(elements)) for _ in range(tensors))
        model = xffl.shard(model, state) if max(sizes) > 1 else model
        aggregator = xffl.Aggregator(model, state, **options)
        for _ in range(3):
            aggregator.aggregate()
        while True:
            goes_on = torch.tensor(int(bool(sys.stdin.readline())) if state.rank == 0 else 0)
            dist.broadcast(goes_on, 0)
            if not goes_on:
                break
            dist.barrier()
            start = time.perf_counter()
            aggregator.aggregate()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.reduce(seconds, 0, op=dist.ReduceOp.MAX)
            if state.rank == 0:
                print(seconds.item(), flush=True)


class World:
    """The ranks of one tree, which make a round when they are asked to."""

    def __init__(self, tree: Path, case: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = sum(CASES[case][0])
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        env |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--rank", case]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tree}
        self.processes: list[subprocess.Popen[str]] = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)  # type: ignore[call-overload]
            for rank in range(ranks)
        ]

    def round(self) -> float:
        """Return the seconds of one more round."""
        first = self.processes[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        return float(first.stdout.readline())

    def close(self) -> None:
        """Let all ranks end."""
        for process in self.processes:
            process.communicate(timeout=60)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by order statistics (normal approximation from 15 on)."""
    ordered, n = sorted(ratios), len(ratios)
    reach = 1.96 * n**0.5 / 2
    return ordered[max(0, int(n / 2 - reach))], ordered[min(n - 1, int(n / 2 + reach))]


def main() -> None:
    """Compare the trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="one of them; may be given again")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank)
        return
    if options.old is None or options.pairs < 15:
        parser.error("give a commit, and at least 15 pairs")
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", old, options.old], cwd=ROOT, check=True)
        try:
            for case in options.case or CASES:
                worlds = [World(tree, case) for tree in (old, ROOT)]
                times: list[list[float]] = [[], []]
                for pair in range(options.pairs):
                    for side in (0, 1) if pair % 2 else (1, 0):
                        times[side].append(worlds[side].round())
                for world in worlds:
                    world.close()
                ratios = [new / before for before, new in zip(*times, strict=True)]
                low, high = interval(ratios)
                medians = ", ".join(f"{1e3 * statistics.median(side):.1f} ms" for side in times)
                print(f"{case}: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] (old, new: {medians})")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
