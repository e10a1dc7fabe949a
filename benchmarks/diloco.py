"""Train a small language model synchronously, by FedAvg and by DiLoCo: losses, bytes over a slow link, and time on it.

    xffl exec --processes 2 --federated 1,1 benchmarks/diloco.py choose [--out FILE]
    xffl exec --processes 2 --federated 1,1 benchmarks/diloco.py losses [--out FILE]
    sudo python benchmarks/diloco.py link [--rate-mbit 200] [--delay-ms 10] [--out FILE]

All methods see the same tokens, in the same order, from the same random weights. ``choose`` tries learning rates for
each algorithm and tells its loss on a part of the text that is neither trained on nor held out. ``losses`` trains with
each method on this machine, seed by seed. ``link`` trains in two cells of two ranks in network namespaces
(tests/cluster/net) with a slow link between them; blocks of steps are interleaved over methods, and the link's
interfaces are read before and after each. ``none`` has no rounds: what another method takes longer is what the link
costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from wan import ROOT, Link, Sample, World, cells, measure, stop

sys.path.append(str(ROOT))  # for tests.cluster.net, which is no part of the package

# Every rank imports this script first: this adds its contenders to those of wan_rank.py.
from diloco_rank import GRIDS, NAMES, STEPS, Block, Ended, Rates, Training, make_method, parameters

NODES = ("a1", "a2", "b1", "b2")
CHOOSING_SEED = 100
"""Seed of the trainings that choose learning rates: none of those reported."""


def train(options: argparse.Namespace, told: dict[str, Any]) -> None:
    """Train what was asked for, and add what came of it to ``told``, run by run; collective over the world."""
    import torch

    import xffl

    torch.set_num_threads(1)  # the ranks share the cores
    runs = told["runs"] = []
    asked = choices(options) if options.what == "choose" else chosen(options)
    with xffl.session() as state:
        told["cells"] = state.topology.sizes
        for name, seed, given in asked:
            clock = time.monotonic()
            method, rates = make_method(name, given)
            training = Training(state, method, seed, steps=options.steps, inner_rate=rates.inner)
            training.advance(options.steps)
            training.end()
            ended = training.ended()
            seconds = time.monotonic() - clock
            runs.append({"method": name, "seed": seed, **vars(rates), "seconds": seconds, **vars(ended)})
            if state.rank == 0:
                print(f"{name}, seed {seed}, {rates}: {show(ended)} in {seconds:.0f} s", flush=True)
                write(options, told)


Run = tuple[str, int, Rates | None]


def choices(options: argparse.Namespace) -> list[Run]:
    """Return what there is to choose from, for each method."""
    return [(name, CHOOSING_SEED, rates) for name in options.methods for rates in GRIDS[name.split("_")[0]]]


def chosen(options: argparse.Namespace) -> list[Run]:
    """Return the methods with the rates that they are reported with."""
    return [(name, seed, None) for seed in options.seeds for name in options.methods]


def show(ended: Ended) -> str:
    return (
        f"{ended.choosing:.4f} on the choosing part, {ended.held_out:.4f} held out, {ended.rounds} rounds, "
        f"{ended.bytes_across / 1e6:.2f} MB"
    )


def over_link(options: argparse.Namespace, told: dict[str, Any]) -> None:
    """Train in two cells that a slow link joins, and add what was measured to ``told``."""
    samples: dict[str, list[Sample]] = {name: [] for name in options.methods}
    with cells(options) as prefix:
        link = Link(prefix, options.delay_ms)
        world = World(prefix, NODES, tuple(samples), 1)  # a model of one layer, which nothing here uses
        try:
            world.answers()
            link.settled()
            for block in range(0, options.steps, options.block):
                size = min(options.block, options.steps - block)
                asked = Block(options.seeds[0], size, options.steps)
                for name, found in samples.items():
                    found.append(measure(world, link, name, asked))  # type: ignore[arg-type]
                    if options.steps == block + size:
                        print(f"{name}: {show(Ended(**found[-1].told[0]['ended']))}", flush=True)
                print(f"{block + size} of {options.steps} steps", flush=True)
            world.end()
        finally:
            world.kill()
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    rows = summarize(samples)
    for sample in [sample for found in samples.values() for sample in found]:
        for rank in sample.told:
            for steps in ("compute_s", "step_s", "phases"):  # the rows have their medians
                del rank[steps]
    told |= {
        "cells": [2, 2],
        "hsdp": 2,
        "link": {
            "rate_mbit": options.rate_mbit,
            "delay_ms": options.delay_ms,
            "queue_ms": options.queue_ms,
            "congestion_control": options.congestion or congestion,
        },
        "rows": rows,
        "samples": {name: [vars(sample) for sample in found] for name, found in samples.items()},
    }
    write(options, told)


def summarize(samples: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """Add blocks up; ``over_none_s`` is the median block's seconds beyond the same block without rounds, times blocks.

    ``bytes`` are those on the link's interfaces, from a to b and back, with headers and votes. ``round_s`` is the
    median of a round, on all ranks; of a delayed one it holds the steps made meanwhile.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, found in samples.items():
        told = [rank for sample in found for rank in sample.told]
        rounds = [seconds for rank in told for seconds in rank["round_s"]]
        rows[name] = {
            "seconds": sum(sample.seconds for sample in found),
            "bytes": [sum(sample.sent[way] for sample in found) for way in range(2)],
            "rounds": len(rounds) // len(found[0].told),
            "round_s": statistics.median(rounds) if rounds else None,
            "both_passes_s": statistics.median(seconds for rank in told for seconds in rank["compute_s"]),
            "phases_s": {
                phase: statistics.median(noted[phase] for rank in told for noted in rank["phases"] if phase in noted)
                for phase in dict.fromkeys(phase for rank in told for noted in rank["phases"] for phase in noted)
            },
            "ended": found[-1].told[0]["ended"],
        }
    for name, row in rows.items():
        if "none" in rows:
            row["over_none_s"] = row["seconds"] - rows["none"]["seconds"]
            differences = [mine.seconds - its.seconds for mine, its in zip(samples[name], samples["none"], strict=True)]
            row["over_none_by_block_s"] = differences
        if "sync" in rows:
            row["bytes_part"] = max(row["bytes"]) / max(rows["sync"]["bytes"])
    return rows


def show_rows(rows: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'':14s} {'held out':>8s} {'rounds':>6s} {'MB a>b':>8s} {'MB b>a':>8s} {'seconds':>8s} {'over none':>9s} "
        "round"
    )
    for name, row in rows.items():
        there, back = (sent / 1e6 for sent in row["bytes"])
        extra = f"{row['over_none_s']:9.1f}" if "over_none_s" in row else 9 * " "
        seconds = "" if row["round_s"] is None else f"{row['round_s']:.3f}"
        print(
            f"{name:14s} {row['ended']['held_out']:8.4f} {row['rounds']:6d} {there:8.2f} {back:8.2f} "
            f"{row['seconds']:8.1f} {extra}  {seconds}"
        )


def write(options: argparse.Namespace, told: dict[str, Any]) -> None:
    if options.out:
        options.out.write_text(json.dumps(told, indent=2) + "\n")


def head(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a record begins with."""
    import torch

    import xffl
    from xffl.cluster.hardware import describe_host

    return {
        "benchmark": f"diloco {options.what}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_host(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "xffl": xffl.__version__},
        "parameters": parameters(),
        "steps": options.steps,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from emulated import add_link_options

    def names(text: str) -> tuple[str, ...]:
        if wrong := [name for name in text.split(",") if name not in NAMES]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)} unknown; choose from {', '.join(NAMES)}")
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "losses", "link"))
    parser.add_argument("--methods", type=names, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--block", type=int, default=100, help="steps that are timed in one go over the link")
    add_link_options(parser)
    options = parser.parse_args(arguments)
    if options.methods is None:
        options.methods = {
            "choose": ("sync", "fedavg_50", "diloco_50"),
            "losses": tuple(name for name in NAMES if name != "none"),
            "link": NAMES,
        }[options.what]
    return options


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores with the link
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that hosts in namespaces have no names
    options = parse()
    told = head(options)
    if options.what != "link":
        train(options, told)
        return
    signal.signal(signal.SIGTERM, stop)
    over_link(options, told)
    show_rows(told["rows"])


if __name__ == "__main__":
    main()
