"""Run the whole comparison and draw it: what ``make demo`` does.

Three jobs of four processes: two cells that federate, the same two cells each for itself, and one cell with all data.
Everything is written into ``runs/digits/``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from curves import curves_figure
from rich.console import Console
from rich.table import Table

from xffl.planning import topology_figure, topology_text
from xffl.topology import Topology

HERE = Path(__file__).resolve().parent
SETTINGS = {"iid": "each cell has a random half of the data", "noniid": "each cell lacks half of the classes"}
TOPOLOGY = Topology(4, (2, 2))


def start(mode: str, federated: str | None, metrics: Path, options: argparse.Namespace) -> None:
    """Run ``train.py`` on four processes, in both settings; leave with its exit code if it fails."""
    settings = [] if mode == "centralized" else ["--setting", *SETTINGS]
    script = [str(HERE / "train.py"), "--mode", mode, *settings, "--out", str(metrics)]
    script += ["--epochs", str(options.epochs), "--every", str(options.every), "--seed", str(options.seed)]
    cells = [] if federated is None else ["--federated", federated]
    job = [sys.executable, "-m", "xffl", "exec", "--processes", "4", *cells, *script]
    if code := subprocess.run(job, check=False).returncode:
        sys.exit(code)


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Pick the last measurement of each curve, and add up what crossed between the cells."""
    last = {(record["run"], record["setting"], record["cell"]): record for record in records}
    summary: dict[str, Any] = {"centralized": last["centralized", None, None]["accuracy"], "settings": {}}
    for setting in SETTINGS:
        federated = last["federated", setting, None]
        summary["settings"][setting] = {
            "federated": federated["accuracy"],
            "alone": [last["alone", setting, cell]["accuracy"] for cell in range(TOPOLOGY.cells)],
            "rounds": federated["round"],
            "steps": federated["step"],
            "bytes_across": sum(
                r["bytes_across"] for r in records if (r["run"], r["setting"]) == ("federated", setting)
            ),
        }
    return summary


def table(summary: dict[str, Any]) -> Table:
    """Return the comparison as a table for the terminal."""
    caption = "\n".join(f"{setting}: {meaning}" for setting, meaning in SETTINGS.items())
    result = Table(
        title="Accuracy on the held-out digits", caption=caption, title_justify="left", caption_justify="left"
    )
    result.add_column("trained on")
    for setting in SETTINGS:
        result.add_column(setting, justify="right")
    rows = [summary["settings"][setting] for setting in SETTINGS]
    for cell in range(TOPOLOGY.cells):
        result.add_row(f"cell {cell}'s data, alone", *(f"{row['alone'][cell]:.1%}" for row in rows))
    told = f"{rows[0]['rounds']} rounds, {rows[0]['bytes_across'] / 1e6:.1f} MB crossed"
    result.add_row(f"both, federated ({told})", *(f"{row['federated']:.1%}" for row in rows), style="bold")
    result.add_row("all data in one cell (centralized)", *(f"{summary['centralized']:.1%}" for _ in rows))
    return result


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for the results")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--every", type=int, default=10, help="steps between two rounds")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    begin = time.perf_counter()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    metrics = out / "metrics.jsonl"
    metrics.write_text("")
    for suffix in ("svg", "png"):
        topology_figure(TOPOLOGY, out / f"topology.{suffix}")
    console = Console()
    console.print(topology_text(TOPOLOGY, max(40, console.width)), highlight=False, markup=False)
    console.print()
    for mode, federated in (("federated", "2,2"), ("alone", "2,2"), ("centralized", None)):
        start(mode, federated, metrics, options)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    summary = summarize(records)
    summary["seconds"] = round(time.perf_counter() - begin, 1)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    curves_figure(records, out / "curves.png")
    console.print()
    console.print(table(summary))
    for name in ("metrics.jsonl", "summary.json", "curves.png", "topology.svg", "topology.png"):
        console.print(f"  {options.out / name}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
