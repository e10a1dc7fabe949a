"""Train two small tasks with each codec, and compare their last losses with those of exact rounds.

    xffl exec --processes 2 --federated 1,1 benchmarks/codecs.py [--tasks digits,text] [--seeds 0,1] [--out FILE]
    xffl exec --processes 4 --federated 2,2 benchmarks/codecs.py --tasks digits

Every run of a task and seed has the same initial weights and the same data in the same order; what differs is how
parameters cross between the cells. ``moved`` tells how much a last loss depends on chance: its rounds are exact, and
its initial weights are moved by a millionth. Runs "without feedback" forget what their codec leaves out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from codec_tasks import TASKS, Ended, train, without_feedback

import xffl
from xffl.cluster.hardware import describe_host


class Contender(NamedTuple):
    """A way to train.

    :param codec: How parameters cross.
    :param moved: By which part of themselves initial weights are moved, at random.
    :param has_feedback: Whether what a codec leaves out is sent later.
    """

    codec: str
    moved: float = 0.0
    has_feedback: bool = True


CONTENDERS = {
    "exact": Contender("none"),
    "moved": Contender("none", moved=1e-6),
    "bf16": Contender("bf16"),
    "int8": Contender("int8"),
    "int4": Contender("int4"),
    "topk:0.1": Contender("topk:0.1"),
    "int4, without feedback": Contender("int4", has_feedback=False),
    "topk:0.1, without feedback": Contender("topk:0.1", has_feedback=False),
}


def run(state: xffl.DistributedState, options: argparse.Namespace) -> dict[str, dict[str, list[Ended]]]:
    """Train everything that was asked for; the same on all ranks."""
    found: dict[str, dict[str, list[Ended]]] = {task: {name: [] for name in CONTENDERS} for task in options.tasks}
    for task in options.tasks:
        for seed in options.seeds:
            for name, contender in CONTENDERS.items():
                start = time.perf_counter()
                with nullcontext() if contender.has_feedback else without_feedback():
                    ended = train(
                        TASKS[task], state, contender.codec, seed=seed, steps=options.steps, moved=contender.moved
                    )
                found[task][name].append(ended)
                if state.rank == 0:
                    seconds = time.perf_counter() - start
                    print(f"{task}, seed {seed}, {name}: {ended.validation:.5f} in {seconds:.1f} s", flush=True)
    return found


def summarize(runs: dict[str, list[Ended]]) -> dict[str, dict[str, Any]]:
    """Compare each contender with exact rounds, seed by seed; of several seeds the largest difference counts."""
    exact = runs["exact"]
    rows = {}
    for name, ends in runs.items():
        rows[name] = {
            "bytes_per_round": statistics.mean(end.bytes_across for end in ends),
            "ratio": statistics.mean(end.bytes_across / its.bytes_across for end, its in zip(ends, exact, strict=True)),
            "codec_error": statistics.mean(end.codec_error for end in ends),
            "training": statistics.mean(end.training for end in ends),
            "validation": statistics.mean(end.validation for end in ends),
            "training_difference": largest(
                [end.training / its.training - 1.0 for end, its in zip(ends, exact, strict=True)]
            ),
            "validation_difference": largest(
                [end.validation / its.validation - 1.0 for end, its in zip(ends, exact, strict=True)]
            ),
        }
    return rows


def largest(differences: list[float]) -> float:
    return max(differences, key=abs)


def show(task: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"{task:27s} {'bytes/round':>11s} {'ratio':>6s} {'left out':>8s} {'training':>16s} {'validation':>16s}")
    for name, row in rows.items():
        sent = f"{row['bytes_per_round']:11.0f} {row['ratio']:6.4f} {row['codec_error']:8.1%}"
        losses = " ".join(f"{row[loss]:7.4f} {row[f'{loss}_difference']:+8.2%}" for loss in ("training", "validation"))
        print(f"{name:27s} {sent} {losses}")


def record(state: xffl.DistributedState, options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Return all that was measured, and on what."""
    return {
        "benchmark": "codecs",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_host(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "xffl": xffl.__version__},
        "cells": state.topology.sizes,
        "seeds": options.seeds,
        "steps": {task: options.steps or TASKS[task].steps for task in options.tasks},
        "every": {task: TASKS[task].every for task in options.tasks},
        "rows": {task: summarize(runs) for task, runs in found.items()},
        "runs": {
            task: {name: [vars(end) for end in ends] for name, ends in runs.items()} for task, runs in found.items()
        },
    }


def parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        if wrong := [name for name in text.split(",") if name not in TASKS]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)} unknown; choose from {', '.join(TASKS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=names, default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1])
    parser.add_argument("--steps", type=int, help="steps of each cell, instead of each task's own")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # the ranks share the cores
    with xffl.session() as state:
        found = run(state, options)
        if state.rank:
            return
        told = record(state, options, found)
    for task, rows in told["rows"].items():
        show(task, rows)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
