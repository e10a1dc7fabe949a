"""Run both demonstrations and draw them: what ``make noniid`` does.

First federated algorithms in four cells that lack most classes, five seeds each, and the centralized run; then one of
five cells that sends garbage, against combiners that stand it. Everything is written into ``runs/noniid/``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import garbage
import noniid
from figure import Result, algorithms_figure, sum_up_seeds
from jobs import read_records, start
from methods import Trial, chosen_trials
from rich.console import Console
from rich.table import Table

from xffl.planning import partition_figure, partition_table

TARGET = 0.9
POINTS = 0.02
"""How far below the clean accuracy a combiner that stands garbage may end, in the mean over the seeds."""


def show_partition(seed: int, out: Path) -> None:
    """Tell and draw which cell has which classes."""
    labels = noniid.load().labels
    parts = noniid.deal(labels, noniid.CELLS, "noniid", seed)
    counts = parts.table(labels).tolist()
    print(f"Who has what (training part, seed {seed}; {parts.method})", flush=True)
    partition_table(counts, sys.stdout)
    partition_figure(counts, out / "partition.png", title=f"Digits, seed {seed}")


# Algorithms -----------------------------------------------------------------------------------------------------------


def sum_up(records: list[dict[str, Any]], found: list[Result], trials: list[Trial]) -> list[dict[str, Any]]:
    """Return a summary of each algorithm, as numbers only."""
    rows = []
    for one in found:
        trial = next(trial for trial in trials if trial.run == one.run)
        sent = [record["bytes_across"] for record in records if record["run"] == one.run]
        rows.append(
            {
                "run": one.run,
                "setting": trial.text,
                "final_mean": round(one.final, 4),
                "final_std": round(one.spread, 4),
                "finals": [round(value, 4) for value in one.finals],
                "rounds_to_target": list(one.reached),
                "bytes_a_round_and_cell": statistics.fmean(sent),
            }
        )
    return rows


def algorithms_table(rows: list[dict[str, Any]]) -> Table:
    """Return the comparison as a table for the terminal."""
    seeds = len(rows[0]["finals"])
    result = Table(title=f"Test accuracy, {seeds} seeds", title_justify="left", caption_justify="left")
    result.caption = (
        "a round: each cell has gone through its data once; (..): rounds of each seed\n"
        "kB: sent by a cell in a round; lr: of local steps; server: its learning rate"
    )
    result.add_column("algorithm")
    result.add_column("setting")
    result.add_column("accuracy", justify="right")
    result.add_column(f"rounds to {TARGET:.0%}", justify="right")
    result.add_column("kB", justify="right")
    for row in rows:
        final = f"{row['final_mean']:.1%} ± {100 * row['final_std']:.1f}"
        result.add_row(
            row["run"],
            row["setting"],
            final,
            told_rounds(row["rounds_to_target"]),
            f"{row['bytes_a_round_and_cell'] / 1e3:.1f}" if row["bytes_a_round_and_cell"] else "-",
        )
    return result


def told_rounds(reached: list[int | None]) -> str:
    """Write the median over the seeds, and each of them."""
    middle = statistics.median(math.inf if first is None else first for first in reached)
    each = " ".join("never" if first is None else str(first) for first in reached)
    return f"{middle:g} ({each})" if math.isfinite(middle) else f"never ({each})"


# Garbage --------------------------------------------------------------------------------------------------------------


def garbage_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gather the seeds of each case, and compare them with the clean runs of the same seeds."""
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        cases.setdefault((record["garbage"], record["combine"], record["nonfinite"]), []).append(record)
    clean = {record["seed"]: record["accuracy"] for record in cases[garbage.CLEAN, "mean", "reject"]}
    rows = []
    for (kind, combine, nonfinite), ended in cases.items():
        behind = [clean[one["seed"]] - one["accuracy"] for one in ended]
        errors = [one["error"] for one in ended]
        rows.append(
            {
                "garbage": kind,
                "combine": combine,
                "nonfinite": nonfinite,
                "accuracies": [round(one["accuracy"], 4) for one in ended],
                "rounds": [one["rounds"] for one in ended],
                "mean_behind_clean": round(statistics.fmean(behind), 4),
                "worst_behind_clean": round(max(behind), 4),
                "is_within": statistics.fmean(behind) <= POINTS and not any(errors),
                "errors": errors,
                "dropped": [one["dropped"] for one in ended],
                "named": [one["named"] for one in ended],
            }
        )
    return rows


def garbage_table(rows: list[dict[str, Any]]) -> Table:
    """Return who stood what as a table for the terminal."""
    seeds = len(rows[0]["accuracies"])
    result = Table(
        title=f"Cell {garbage.BAD_CELL} of {garbage.CELLS} sends garbage, {seeds} seeds",
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("garbage")
    result.add_column("combine")
    result.add_column("accuracy", justify="right")
    result.add_column("behind", justify="right")
    result.add_column("worst", justify="right")
    result.add_column("what happened")
    notes: list[str] = []
    for row in rows:
        mean, is_clean = statistics.fmean(row["accuracies"]), row["garbage"] == garbage.CLEAN
        gaps = ["" if is_clean else f"{100 * row[f'{which}_behind_clean']:.1f}" for which in ("mean", "worst")]
        # Where rounds were rejected from the first on, the cells have only trained for themselves.
        accuracy = f"{mean:.1%}"
        if not max(row["rounds"]):
            accuracy, gaps = "-", ["-", "-"]
        kind = row["garbage"] + (", drop_cell" if row["nonfinite"] == "drop_cell" else "")
        style = "bold" if row["is_within"] and not is_clean else None
        result.add_row(kind, row["combine"], accuracy, *gaps, story(row, notes), style=style)
    result.caption = "\n".join(
        [
            *(f"{kind}: {what}" for kind, what in garbage.KINDS.items()),
            "drop_cell: with nonfinite='drop_cell', else 'reject'",
            "behind: points below the clean run of the same seed, mean over the seeds; worst: of the worst seed",
            f"bold: at most {100 * POINTS:g} points behind in the mean, and no seed ended by an error",
            *(f"({number}) {note}" for number, note in enumerate(notes, 1)),
        ]
    )
    return result


def story(row: dict[str, Any], notes: list[str]) -> str:
    """Tell in a few words what the first seed with something to tell has met; reasons become numbered notes."""
    for error, rounds in zip(row["errors"], row["rounds"], strict=True):
        if error:
            reason = error.split(";")[0]
            if reason not in notes:
                notes.append(reason)
            return f"round {rounds + 1} rejected ({notes.index(reason) + 1})"
    if row["dropped"][0]:
        return ", ".join(f"cell {cell} out: {' '.join(names)}" for cell, names in row["named"][0].items())
    return ""


# ----------------------------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/noniid"), help="folder for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--garbage-seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4], help="none: leave garbage out")
    parser.add_argument("--rounds", type=int, default=40, help="of the algorithms")
    parser.add_argument("--garbage-rounds", type=int, default=180)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    begin = time.perf_counter()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    show_partition(options.seeds[0], out)
    metrics, spoiled = out / "metrics.jsonl", out / "garbage.jsonl"
    for file in (metrics, spoiled):
        file.write_text("")
    for cells in (noniid.CELLS, 1):
        start("train.py", cells, "--seeds", *options.seeds, "--rounds", options.rounds, "--out", metrics)
    records = read_records(metrics)
    trials = chosen_trials()
    rows = sum_up(records, sum_up_seeds(records, TARGET), trials)
    summary: dict[str, Any] = {"target": TARGET, "rounds": options.rounds, "algorithms": rows}
    algorithms_figure(
        records, out / "algorithms.png", target=TARGET, title="Digits in four cells that lack most classes"
    )
    console.print(algorithms_table(rows))
    if options.garbage_seeds:
        arguments = ("--seeds", *options.garbage_seeds, "--rounds", options.garbage_rounds, "--out", spoiled)
        start("garbage.py", garbage.CELLS, *arguments)
        summary["garbage_rounds"] = options.garbage_rounds
        summary["garbage"] = garbage_rows(read_records(spoiled))
        console.print(garbage_table(summary["garbage"]))
    summary["chosen"] = [asdict(trial) for trial in trials]
    summary["seconds"] = round(time.perf_counter() - begin, 1)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name in ("metrics.jsonl", "garbage.jsonl", "summary.json", "algorithms.png", "partition.png"):
        console.print(f"  {options.out / name}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
