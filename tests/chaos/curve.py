"""Train a small language model in three cells, one of which is away for a third of the run, and compare the curves.

    python -m tests.chaos.curve [--rounds 60] [--every 10] [--out FILE] [--picture PNG]

The project that ``xffl init --template language_model`` writes, with a job for each cell: once without a fault, once
with a cell that is killed after a third of the rounds and started again after two thirds. Its steps in between are not
made, so it makes fewer. Each cell validates after each round.

Printed is the held-out loss of cell 0 after the same rounds in both runs, and how far the last ones are apart. The exit
code is 1 if that is more than 2 %, or the cell does not come back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.storm import environment
from xffl.cluster.launch.local import held_port

CELLS, AWAY = 3, 2
MARK = "XFFL_CURVE"
BOUND = 0.02
LIMIT_S = 900.0


def start(project: Path, url: str, cell: int, words: list[str]) -> subprocess.Popen[bytes]:
    """Start the job of a cell."""
    command = [sys.executable, "-m", "xffl", "exec", "--elastic", url, "--cell", f"{cell}/{CELLS}", "--processes", "1"]
    with (project / f"cell_{cell}.log").open("ab") as output:
        return subprocess.Popen(
            [*command, "config.yaml", *words],
            cwd=project,
            env=environment() | {MARK: f"{project}/{cell}", "XFFL_TOKEN": "0" * 64},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill(project: Path, cell: int) -> None:
    """Kill all processes of a cell at once, as if its host had gone."""
    mark = f"{MARK}={project}/{cell}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_own = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if is_own:
            os.kill(int(folder.name), signal.SIGKILL)


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file; the last line may not be whole yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run(rounds: int, every: int, *, is_whole: bool) -> dict[str, Any]:
    """Train once; return cell 0's losses by round, and the rounds that the cell in question has contributed to."""
    project = Path(tempfile.mkdtemp(prefix="curve-")) / "demo"
    subprocess.run([sys.executable, "-m", "xffl", "init", "--template", "language_model", str(project)], check=True)
    words = f"--federation.every {every} --training.max_steps {every * rounds} --training.epochs 1000 --callbacks []"
    options = [*words.split(), "--training.validate_every_rounds", "1", "--experiment.name", "curve"]
    folder = project / "runs" / "curve"

    def made() -> list[dict[str, Any]]:
        return lines(folder / "cell_0" / "rounds" / "cell_0.jsonl")

    def wait(jobs: list[subprocess.Popen[bytes]], until: int | None = None) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(job.poll() is None for job in jobs):
            if until is not None and any(one["round"] >= until for one in made()):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"the run did not go on; see {project}/cell_*.log")
            time.sleep(0.1)

    with ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(held_port())}"
        lighthouse = [sys.executable, "-m", "xffl", "lighthouse", "--bind", address]
        lighthouse += ["--journal", str(project / "journal")]
        process = subprocess.Popen(
            lighthouse,
            env=environment() | {"XFFL_TOKEN": "0" * 64},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        for cell in range(CELLS):
            stack.callback(kill, project, cell)
        jobs = [start(project, f"http://{address}", cell, options) for cell in range(CELLS)]
        if not is_whole:
            wait(jobs[:1], rounds // 3)
            kill(project, AWAY)
            jobs.pop().wait()
            wait(jobs[:1], 2 * rounds // 3)
            jobs.append(start(project, f"http://{address}", AWAY, options))
        wait(jobs[:1])
        if jobs[0].returncode:
            raise SystemExit(f"cell 0 has failed; see {project}/cell_0.log")
        wait(jobs)
    measured = lines(folder / "cell_0" / "metrics" / "federation.jsonl")  # after each round
    losses = {one["round"]: values["values"]["val/loss"] for one, values in zip(made(), measured, strict=True)}
    return {
        "losses": losses,
        "contributed": [one["round"] for one in made() if one["weights"][AWAY]],
        "rounds": len(made()),
        "project": str(project),
    }


def draw(whole: dict[int, float], broken: dict[int, float], rounds: int, path: Path) -> None:
    """Draw both curves, and when the cell was away."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(rounds // 3, 2 * rounds // 3, color="0.9", label=f"cell {AWAY} is away")
    axes.plot([*whole], [*whole.values()], label="three cells", color="tab:blue")
    axes.plot([*broken], [*broken.values()], label=f"without cell {AWAY} for a third", color="tab:orange", ls="--")
    axes.set(xlabel="round", ylabel="held-out loss")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    whole, broken = (run(args.rounds, args.every, is_whole=is_whole) for is_whole in (True, False))
    for place, loss in whole["losses"].items():
        print(f"round {place}: {loss:.4f}, {broken['losses'].get(place, float('nan')):.4f}")
    last = max({*whole["losses"]} & {*broken["losses"]})
    apart = broken["losses"][last] / whole["losses"][last] - 1
    is_back = broken["contributed"][-1] > 2 * args.rounds // 3
    print(
        f"after round {last}: {whole['losses'][last]:.4f} and {broken['losses'][last]:.4f}, {apart:+.2%}; cell {AWAY} "
        f"contributed to {len(broken['contributed'])} of {broken['rounds']} rounds"
    )
    if args.out is not None:
        args.out.write_text(json.dumps({"whole": whole, "broken": broken, "apart": apart}, indent=1) + "\n")
    if args.picture is not None:
        draw(whole["losses"], broken["losses"], args.rounds, args.picture)
    return int(abs(apart) > BOUND or not is_back)


if __name__ == "__main__":
    sys.exit(main())
