"""Kill a federated Trainer of transformers or of TRL at random moments, and start it again with the same command.

    python -m tests.chaos.trainer [--kinds DDP FSDP2 SFT LoRA-SFT DPO LoRA-DPO] [--kills 10] [--seed N] [--out FILE]

Two isolated cells of two ranks, started by ``xffl exec --isolate``; a round after every third step, a save after every
second one. The kills are dealt out to the kinds: Trainer by DDP and by FSDP2 unless others are asked for. A kill ends
the launcher and all ranks with ``kill -9``, at a random moment after a random step; and as each run is killed several
times, also while it goes on from an earlier kill. Printed is a line for each kill, with the checkpoints that were being
written or removed at that moment. The exit code is 1 if the final weights of a cell are not those of the run without
kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.chaos.storm import HERE, REPO, environment
from tests.processes import still_there
from xffl.integrations.checkpoints import MARKER

CELLS = 2
LONGEST_MOMENT_S = 0.3
"""Of the time from the step that a kill waits for to the kill"""
SLOWEST_RUN_S = 600.0


def family_of(process: int) -> list[int]:
    """Return a process and all that it has started, and they."""
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [process, *(member for child in children for member in family_of(int(child)))]
    return []


@contextmanager
def running(folder: Path, kind: str, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run of a folder, or start it again; it has ended behind the block."""
    command = [sys.executable, "-m", "xffl", "exec", "--isolate", "--processes", "4", "--federated", "2,2"]
    command += [str(HERE / "trainer_cell.py"), str(folder), "--steps", str(steps), "--kind", kind]
    with (folder / "output.log").open("ab") as output:
        process = subprocess.Popen(
            command,
            env=environment() | {"HF_HUB_OFFLINE": "1"},  # TRL asks for a template of its own for cards of models
            cwd=REPO,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_family(process)


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Let a launcher and its ranks die at once."""
    if process.poll() is not None:
        return
    family = family_of(process.pid)
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    process.wait()
    if left := still_there(family, 30.0):
        raise SystemExit(f"processes {left} are still there")


def step_of(folder: Path) -> int:
    """Return the last step that the run has told."""
    with suppress(FileNotFoundError):
        return int((folder / "progress").read_text() or 0)
    return 0


def kill_once(folder: Path, kind: str, steps: int, after: int, moment_s: float) -> dict[str, Any]:
    """Start a run, kill it at a moment after a step, and return where that was."""
    (folder / "progress").unlink(missing_ok=True)
    deadline = time.monotonic() + SLOWEST_RUN_S
    with running(folder, kind, steps) as process:
        while step_of(folder) < after:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no step {after} with {kind}: exit code {process.poll()}; see {folder}/output.log")
            time.sleep(0.002)
        time.sleep(moment_s)
        was_alive = process.poll() is None
    folders = sorted([*folder.glob("cell_*/checkpoint-*"), *folder.glob("cell_*/.checkpoint-*.removed")])
    return {
        "kind": kind,
        "step": step_of(folder),
        "moment_s": round(moment_s, 3),
        "was_alive": was_alive,
        "unfinished": [
            str(path.relative_to(folder))
            for path in folders
            if path.suffix == ".removed" or not (path / MARKER).is_file()
        ],
    }


def finish(folder: Path, kind: str, steps: int) -> list[bytes]:
    """Let a run come to its end, and return each cell's model."""
    with running(folder, kind, steps) as process:
        code = process.wait(timeout=SLOWEST_RUN_S)
    if code:
        raise SystemExit(f"the run with {kind} has ended with exit code {code}; see {folder}/output.log")
    files = [next((folder / f"cell_{cell}").glob("*model.safetensors")) for cell in range(CELLS)]
    return [file.read_bytes() for file in files]


def try_kind(folder: Path, kind: str, kills: int, steps: int, chance: random.Random) -> dict[str, Any]:
    """Compare a run of one kind that is killed with one that is not."""
    whole, killed = folder / f"{kind}-whole", folder / f"{kind}-killed"
    for path in (whole, killed):
        path.mkdir()
    expected = finish(whole, kind, steps)
    deaths = []
    for number in range(kills):
        # Each kill has its part of the steps, so that none comes before what an earlier one has left.
        part = (steps - 1) / kills
        after = 1 + int(number * part + chance.random() * part)
        deaths.append(kill_once(killed, kind, steps, after, chance.random() * LONGEST_MOMENT_S))
        print(json.dumps(deaths[-1]), flush=True)
    models = finish(killed, kind, steps)
    is_equal = len({*expected, *models}) == 1
    print(f"{kind}: {kills} kills, {'equal to the bit' if is_equal else 'UNEQUAL'}", flush=True)
    return {"kind": kind, "is_equal": is_equal, "kills": deaths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["DDP", "FSDP2"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="xffl-trainer-"))
    print(f"seed {options.seed}, {folder}", flush=True)
    results = []
    for number, kind in enumerate(options.kinds):
        kills = (options.kills + len(options.kinds) - 1 - number) // len(options.kinds)
        results.append(try_kind(folder, kind, kills, options.steps, chance))
    if options.out is not None:
        options.out.write_text(json.dumps({"seed": options.seed, "results": results}, indent=1) + "\n")
    return 0 if all(result["is_equal"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
