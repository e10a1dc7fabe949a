"""Measure how much step throughput rounds take away, over a slow link that needs half of the compute time between them.

    sudo python benchmarks/overlap.py [--megabytes 16] [--rate-mbit 200] [--delay-ms 10] [--blocks 7] [--out FILE]

Two cells of two ranks each, a replica of two shards, in network namespaces (tests/cluster/net). A synchronous round is
timed first, and a step is made a tenth of it, so that 20 steps compute for twice as long as a round takes. Then blocks
of 60 steps are interleaved: without rounds, with a synchronous one after every 20 steps, with one that is merged 15
steps later, and with a quarter of the model after every 5 steps, merged 4 steps later. All but the first move the same
bytes. The clock runs over as many whole rounds, from start to merge. A step waits, as where a GPU computes, or computes
on this machine's cores, which also carry the network and the link.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from wan import ROOT, Link, Sample, World, cells, measure, stop

sys.path.append(str(ROOT))  # for tests.cluster.net, which is no part of the package

# Every rank imports this script first: this adds its contenders to those of wan_rank.py.
from overlap_rank import SCHEDULES, Pace

NODES = ("a1", "a2", "b1", "b2")
EVERY, SHARE = 20, 0.5
"""Steps between two rounds, and the part of their compute time that the link needs for a round."""

STEPS = 3 * EVERY
"""Steps of a block."""

MODES = ("wait", "compute")
CALIBRATIONS = 5
BURST = 10
"""Steps that are computed in one go to find out how long they take: cores are shared, a single one says little."""


def calibrate_round(world: World, link: Link) -> list[float]:
    """Return the seconds of synchronous rounds on a link that is otherwise quiet."""
    samples = [measure(world, link, "round", repeat) for repeat in range(CALIBRATIONS + 1)]
    return [sample.seconds for sample in samples[1:]]  # the first makes connections and buffers


def calibrate_products(world: World, link: Link, seconds: float) -> int:
    """Return how many matrix products take a step's time while all ranks compute."""
    products = 100.0
    for _ in range(3):
        burst = round(BURST * products)
        taken = measure(world, link, "products", Pace(0, products=burst)).seconds
        products = burst * seconds / taken
    return max(1, round(products))


def rate_of(sample: Sample) -> float:
    """Return the steps per second of a block, on the rank that took longest."""
    return STEPS / max(told["compute_s"] + sum(told["step_s"]) for told in sample.told)


def run(options: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Calibrate, and measure all contenders in all modes, interleaved."""
    names = tuple(options.contenders)
    with cells(options) as prefix:
        link = Link(prefix, options.delay_ms)
        world = World(prefix, NODES, ("round", "products", *names), layers)
        try:
            world.answers()
            link.settled()
            rounds = calibrate_round(world, link)
            step_s = statistics.median(rounds) / SHARE / EVERY
            print(f"a round takes {statistics.median(rounds):.3f} s, so a step {step_s:.4f} s", flush=True)
            paces: list[dict[str, dict[str, Any]]] = []
            samples: dict[str, dict[str, list[Sample]]] = {mode: {n: [] for n in names} for mode in options.modes}
            for block in range(options.blocks):
                paces.append({"wait": {"seconds": step_s}})
                for mode in options.modes:
                    if mode == "compute":  # in each block anew: others use the machine, too
                        paces[-1][mode] = {"products": calibrate_products(world, link, step_s)}
                    for name in names:
                        pace = Pace(block, steps=STEPS, **paces[-1][mode])
                        samples[mode][name].append(measure(world, link, name, pace))
                print(f"block {block + 1} of {options.blocks}", flush=True)
            world.end()
        finally:
            world.kill()
    return {"rounds_s": rounds, "step_s": step_s, "paces": paces, "samples": samples}


def summarize(samples: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """Compare the rates of one mode with those without rounds, block by block; tell where a round's time goes.

    ``step_s_per_round`` is what the training thread spends in the optimizer's steps: it starts rounds there (phase
    ``pack``), waits for them (``wait``, or all of a synchronous one) and merges them (``commit``). The other phases of
    a round that overlaps are the background's.
    """
    rates = {name: [rate_of(sample) for sample in blocks] for name, blocks in samples.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, blocks in samples.items():
        kept = [mine / its for mine, its in zip(rates[name], rates["none"], strict=True)]
        rows[name] = {
            "steps_per_s": statistics.median(rates[name]),
            "lost": 1.0 - statistics.median(kept),
            "least_lost": 1.0 - max(kept),
            "most_lost": 1.0 - min(kept),
        }
        schedule = SCHEDULES[name]
        if schedule is None:
            continue
        told = [rank for sample in blocks for rank in sample.told]
        on_thread = [sum(rank["step_s"]) / rank["rounds"] for rank in told]
        rows[name] |= {
            "step_s_per_round": statistics.median(on_thread),
            "round_s": statistics.median(seconds for rank in told for seconds in rank["round_s"]),
            "phases_s_per_round": {
                phase: statistics.median(rank["phases"].get(phase, 0.0) / rank["rounds"] for rank in told)
                for phase in told[0]["phases"]
            },
        }
    return rows


def show(mode: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"{mode:12s} {'steps/s':>8s} {'lost':>7s} {'least':>7s} {'most':>7s}   per round, in seconds")
    for name, row in rows.items():
        phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in row.get("phases_s_per_round", {}).items())
        told = f"in steps {row['step_s_per_round']:.3f}: {phases}" if phases else ""
        losses = " ".join(f"{row[what]:7.1%}" for what in ("lost", "least_lost", "most_lost"))
        print(f"{name:12s} {row['steps_per_s']:8.3f} {losses}   {told}")


def record(options: argparse.Namespace, layers: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return all that was measured, and on what."""
    import torch
    from wan_rank import LAYER_BYTES, REPLICA_SIZE

    import xffl
    from xffl.cluster.hardware import describe_host

    samples = found.pop("samples")
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "benchmark": "overlap",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_host(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "xffl": xffl.__version__,
        },
        "link": {
            "rate_mbit": options.rate_mbit,
            "delay_ms": options.delay_ms,
            "queue_ms": options.queue_ms,
            "congestion_control": options.congestion or congestion,
        },
        "cells": [2, 2],
        "hsdp": REPLICA_SIZE,
        "model_bytes": layers * LAYER_BYTES,
        "schedules": {name: vars(schedule) for name, schedule in SCHEDULES.items() if schedule is not None},
        "steps": STEPS,
        "blocks": options.blocks,
        **found,
        "rows": {mode: summarize(blocks) for mode, blocks in samples.items()},
        "samples": {
            mode: {name: [vars(sample) for sample in runs] for name, runs in blocks.items()}
            for mode, blocks in samples.items()
        },
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from emulated import above_zero, add_link_options

    def names(known: Sequence[str], *always: str) -> Any:
        def chosen(text: str) -> tuple[str, ...]:
            asked = tuple(dict.fromkeys((*always, *text.split(","))))
            if wrong := [name for name in asked if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(wrong)} unknown; choose from {', '.join(known)}")
            return asked

        return chosen

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=above_zero, default=16.0, help="the model's size at least, in 10^6 bytes")
    add_link_options(parser)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--modes", type=names(MODES), default=MODES, help=f"of {', '.join(MODES)}")
    parser.add_argument(
        "--contenders",
        type=names(tuple(SCHEDULES), "none"),
        default=tuple(SCHEDULES),
        help=f"of {', '.join(SCHEDULES)}",
    )
    options = parser.parse_args(arguments)
    if options.blocks < 1:
        parser.error(f"--blocks {options.blocks} is below 1; give 1 or more")
    return options


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores with the link
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that hosts in namespaces have no names
    from wan_rank import LAYER_BYTES

    options = parse()
    signal.signal(signal.SIGTERM, stop)
    layers = -int(-1e6 * options.megabytes // LAYER_BYTES)
    found = record(options, layers, run(options, layers))
    for mode, rows in found["rows"].items():
        show(mode, rows)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
