"""Forecast how much of the time is left for training, over the bandwidth between cells; no GPU is needed.

    python benchmarks/scale.py [--out runs/scale] [--every 100] [--latency-ms 10] [--points 41]
    python benchmarks/scale.py --validate wan.json

The first draws models of 1, 10 and 100 billion parameters, with rounds and with plain data parallelism. The second
compares the forecast with what ``wan.py`` has measured on an emulated link; only the link's rate is taken from there,
as the raw TCP transfer of the same run has had it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import xffl
from xffl.planning import (
    Link,
    codec_ratio,
    forecast_data_parallel,
    forecast_round,
)
from xffl.planning.figures import INK, colour_of, new_figure, plain_axes, save
from xffl.planning.forecast import ASSUMPTIONS, BUCKET_BYTES
from xffl.topology import Topology

MODELS = (
    # parameters, GPUs, GPUs of a replica, tokens of a step
    (1e9, 256, 8, 2e6),
    (10e9, 1024, 16, 4e6),
    (100e9, 4096, 64, 16e6),
)
CELLS = 4
HOME = Link(400.0, 5e-6)
TFLOPS, MFU = 1000.0, 0.4
MEMORY_GBPS = 8000.0
BUCKET = 64 * 2**20
FRAGMENTS, DELAY = 4, 5
LOW, HIGH = 0.1, 400.0
"""Gbit/s."""

# What is known about the hosts of wan.py, beside its link: their own network, and a core's passes over memory.
WAN_HOME, WAN_MEMORY_GBPS = Link(8.0, 50e-6), 24.0
WAN_ROUNDS: dict[str, dict[str, Any]] = {
    "round": {},
    "one_replica": {},
    "in_place": {"atomic": False},
    "two_hop": {"form": "two_hop"},
    "rails": {"rails": True},
    "bf16": {"codec_ratio": codec_ratio("bf16")},
    "int8": {"codec_ratio": codec_ratio("int8")},
    "int4": {"codec_ratio": codec_ratio("int4")},
}


def step_seconds(parameters: float, gpus: int, tokens: float) -> float:
    """Return the time of a step: 6 operations for each parameter and token (Kaplan et al., 2020, arXiv:2001.08361)."""
    return 6 * parameters * tokens / (gpus * TFLOPS * 1e12 * MFU)


def forecasts(every: int, latency_s: float, points: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each model, contender and rate."""
    for parameters, gpus, replica, tokens in MODELS:
        topology = Topology(gpus, gpus // CELLS, replica)
        step_s = step_seconds(parameters, gpus, tokens)
        panel = f"{parameters / 1e9:g}B parameters, {gpus} GPUs"
        for point in range(points):
            rate = LOW * (HIGH / LOW) ** (point / max(1, points - 1))
            common = {"parameters": parameters, "link": Link(rate, latency_s), "home": HOME, "step_s": step_s}
            rounds = dict(common, backend="nccl", bucket_bytes=BUCKET, memory_gbps=MEMORY_GBPS)
            found: dict[str, Any] = {
                f"round every {every} steps, int4": forecast_round(
                    topology, **rounds, every=every, codec_ratio=codec_ratio("int4")
                ),
                f"round every {every} steps, int8": forecast_round(
                    topology, **rounds, every=every, codec_ratio=codec_ratio("int8")
                ),
                f"round every {every} steps, exact (fp32)": forecast_round(topology, **rounds, every=every),
                f"{FRAGMENTS} fragments in turn, int4, merged {DELAY} steps later": forecast_round(
                    topology,
                    **rounds,
                    every=every // FRAGMENTS,
                    codec_ratio=codec_ratio("int4"),
                    fragments=FRAGMENTS,
                    delay=DELAY,
                ),
                "data parallelism, every step (bf16)": forecast_data_parallel(
                    topology, **common, bytes_per_parameter=2.0
                ),
            }
            for run, forecast in found.items():
                yield {
                    "panel": panel,
                    "run": run,
                    "gbps": rate,
                    "step_s": step_s,
                    "seconds": forecast.seconds,
                    "exposed": forecast.exposed,
                    "utilization": forecast.utilization,
                }


def stated(every: int, latency_s: float) -> list[str]:
    """List what the figure takes for granted."""
    lines = [
        f"{CELLS} equal cells; each has one link to the others, {1e3 * latency_s:g} ms one way; at home each GPU has "
        f"{HOME.rate_gbps:g} Gbit/s and {1e6 * HOME.latency_s:g} us",
        f"a step takes 6 x parameters x tokens / (GPUs x {TFLOPS:g} TFLOP/s x MFU {MFU:g}): "
        + ", ".join(
            f"{parameters / 1e9:g}B: {tokens / 1e6:g}M tokens on {gpus} GPUs (replicas of {replica}), "
            f"{step_seconds(parameters, gpus, tokens):.3g} s"
            for parameters, gpus, replica, tokens in MODELS
        ),
        f"rounds: two-hop, nccl, fp32 parameters, one round every {every} steps, buckets of "
        f"{BUCKET // 2**20} MiB, memory passed over at {MEMORY_GBPS:g} Gbit/s",
        f"fragments: one of {FRAGMENTS} every {every // FRAGMENTS} steps, merged {DELAY} steps later",
    ]
    return [*lines, *ASSUMPTIONS]


def needed(records: list[dict[str, Any]], share: float = 0.95) -> Iterator[tuple[str, str, float | None]]:
    """Yield the lowest rate among the records at which each line reaches a share of the time."""
    for panel, run in dict.fromkeys((record["panel"], record["run"]) for record in records):
        rates = [
            record["gbps"]
            for record in records
            if (record["panel"], record["run"]) == (panel, run) and record["utilization"] >= share
        ]
        yield panel, run, min(rates, default=None)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "xffl": xffl.__version__}


def draw_utilization(records: list[dict[str, Any]], file: Path) -> None:
    """Draw the share of time spent on training over the rate of the link, one panel for each model."""
    panels = list(dict.fromkeys(record["panel"] for record in records))
    names = list(dict.fromkeys(record["run"] for record in records))
    width, height = 4.6 * len(panels) + 0.4, 4.4
    figure = new_figure(width, height)
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=True):
        for index, name in enumerate(names):
            rows = [record for record in records if (record["panel"], record["run"]) == (panel, name)]
            (lines[name],) = axes.plot(
                [row["gbps"] for row in rows],
                [100 * row["utilization"] for row in rows],
                color=colour_of(index),
                linestyle=("-", "--", "-.", ":")[index % 4],
                linewidth=1.9,
            )
        axes.set_xscale("log")
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.set_title(panel, fontsize=11, fontweight="bold", color=INK, loc="left")
        axes.set_xlabel("link between cells (Gbit/s)", color=INK)
        plain_axes(axes, grid="both")
    all_axes[0].set_ylabel("time spent on local steps (%)", color=INK)
    figure.legend([lines[name] for name in names], names, loc="lower center", ncols=3, frameon=False, fontsize=9)
    bottom = (0.72 + 0.21 * -(-len(names) // 3)) / height
    figure.subplots_adjust(left=0.7 / width, right=0.985, top=0.91, bottom=bottom, wspace=0.08)
    save(figure, file)


def draw(options: argparse.Namespace) -> None:
    """Write the figure as PNG and SVG, and its numbers as JSON."""
    latency_s = options.latency_ms / 1e3
    records = list(forecasts(options.every, latency_s, options.points))
    for line in stated(options.every, latency_s):
        print(f"- {line}")
    print(f"\nThe lowest of {options.points} rates between cells (Gbit/s) that leaves 95 % of the time for local steps")
    title = ""
    for panel, run, rate in needed(records):
        if panel != title:
            print(panel)
            title = panel
        print(f"  {run:48s} {'more than ' + format(HIGH, 'g') if rate is None else format(rate, '.3g')}")
    for suffix in (".png", ".svg"):
        draw_utilization(records, options.out / f"scale{suffix}")
    told = {
        "benchmark": "scale",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "assumptions": stated(options.every, latency_s),
        "records": records,
    }
    (options.out / "scale.json").write_text(json.dumps(told, indent=1) + "\n")


def compare(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Forecast the rounds that ``wan.py`` has measured.

    :param record: What it has written.
    :return: For each kind of round ``run``, ``measured`` and ``forecast`` (seconds), and their ``ratio``.
    """
    sizes, hsdp, model = tuple(record["cells"]), record["hsdp"], record["model_bytes"]
    delay = record["link"]["delay_ms"] / 1e3
    rate = model * 8e-9 / (record["rows"]["tcp"]["seconds"] - delay)
    # A layer's weights have buckets of their own, of equal size; its bias hardly counts.
    weights = 2 * model / record["tensors"] / hsdp
    bucket = round(weights / -(-weights // BUCKET_BYTES))
    rows = []
    for run, row in record["rows"].items():
        if run not in WAN_ROUNDS:
            continue
        cells = (hsdp,) * len(sizes) if run == "one_replica" else sizes
        forecast = forecast_round(
            Topology(sum(cells), cells, hsdp),
            parameters=model / 4,
            link=Link(rate, delay),
            home=WAN_HOME,
            step_s=1.0,
            bucket_bytes=bucket,
            memory_gbps=WAN_MEMORY_GBPS,
            **WAN_ROUNDS[run],
        )
        rows.append(
            {
                "run": run,
                "measured": row["seconds"],
                "forecast": forecast.seconds,
                "ratio": forecast.seconds / row["seconds"],
            }
        )
    return rows


def validate(options: argparse.Namespace) -> None:
    """Print forecasts beside measurements."""
    try:
        record = json.loads(options.validate.read_text())
    except (OSError, ValueError) as wrong:
        raise SystemExit(f"{options.validate} cannot be read as JSON: {wrong}; give a file of wan.py --out") from wrong
    if not isinstance(record, dict) or record.get("benchmark") != "wan":
        raise SystemExit(f"{options.validate} is no record of wan.py; give a file of wan.py --out")
    link = record["link"]
    print(f"{record['date']}, {record['machine']}, {link['rate_mbit']:g} Mbit/s, {link['delay_ms']:g} ms one way")
    print(f"{'':14s} {'measured':>9s} {'forecast':>9s} {'ratio':>6s}")
    for row in compare(record):
        print(f"{row['run']:14s} {row['measured']:8.3f}s {row['forecast']:8.3f}s {row['ratio']:6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"), help="folder for scale.png, .svg and .json")
    parser.add_argument("--every", type=int, default=100, help="local steps between rounds")
    parser.add_argument("--latency-ms", type=float, default=10.0, help="between cells, one way")
    parser.add_argument("--points", type=int, default=41, help="rates to forecast for")
    parser.add_argument("--validate", type=Path, metavar="FILE", help="a JSON file of wan.py to compare with instead")
    options = parser.parse_args()
    # A fragment is merged before the next one starts.
    for name, least in (("every", FRAGMENTS * (DELAY + 1)), ("latency_ms", 0), ("points", 1)):
        if not least <= getattr(options, name) < math.inf:  # nan is neither
            shown = f"--{name.replace('_', '-')} {getattr(options, name)}"
            parser.error(f"{shown} is no number from {least} on; give {least} or more")
    if options.validate:
        validate(options)
        return
    try:  # before all the work
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "scale.json").touch()
    except OSError as wrong:
        parser.error(f"--out {options.out} cannot be written into: {wrong}; give another folder")
    draw(options)


if __name__ == "__main__":
    main()
