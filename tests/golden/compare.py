"""Run all cases on an older commit and on this checkout, and say where the two differ by a bit.

    python tests/golden/compare.py OLD_REF [--only TEXT] [--jobs N]

Compared are the bits of all ranks after rounds, reports without times, classes of errors, the options, defaults and
exit codes of all commands, the records of runs, and what the new tree makes of checkpoints and of a run that the old
one has written. What the old tree gives is kept in a folder (``--old-results``) for the next comparison.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.golden.launch import ROOT, options_of, records_of  # noqa: E402

HERE = ROOT / "tests" / "golden"
PLAN = "plan --json --federated 4,4 --hsdp 2 --params 8e9 --link-gbps 10 --link-ms 10 --step-s 1 --every 100"
NAMES = "aggregate bench consolidate doctor env exec init lighthouse list logs plan report submit workflow"
LINES = f"""
{PLAN}
{PLAN} --simulate
{PLAN} --simulate --codec int8 --form two_hop --rails
plan --json --world 32 --mesh pp=2,dp_shard=auto
plan --federated 4,3 --world 8
nothing
--version
env
list algorithms
list algorithms --json
list algorithms --kind combine --json
list algorithms --kind nothing
exec nowhere.yaml
exec --processes 0 x.py
exec --processes 3 --federated 2,2 x.py
aggregate @/nowhere --out @/x
aggregate @/made/cell_0 --out @/x
aggregate @/made/cell_0 @/made/cell_1 --out @/made/tried --dry-run
aggregate @/made/cell_0 @/made/cell_1 --out @/made/mean
aggregate @/made/cell_0 @/made/cell_1 --out @/made/weighed --weights 3,1 --combine median
aggregate @/made/cell_0 @/made/cell_1 --out @/made/served --server fedadam
consolidate @/nowhere @/x
consolidate '@/run error feedback/checkpoints/final' @/made/whole
consolidate '@/run error feedback/checkpoints/final' @/made/whole_1 --cell 1
init
init @/made/project
report @/nowhere
submit nowhere.yaml --dry-run
"""
COMMANDS = [
    *([], ["--help"], *([name, end] for name in NAMES.split() for end in ("--help", "--nothing-of-this-name"))),
    *(["workflow", name, "--help"] for name in ("init", "begin", "record")),
    *map(shlex.split, LINES.strip().splitlines()),
]
CONFIG = """\
trainer: task.TaskTrainer
launch: {processes: 2, federated: [1, 1]}
experiment: {name: golden}
training: {epochs: 3, max_steps: 14, batch_size: 16, log_every: 3, validate_every_rounds: 2, max_grad_norm: 1.0}
federation: {every: 3, algorithm: fedadam, aggregator: {codec: int8}}
samples: 150
callbacks:
  - class_path: CheckpointCallback
    init_args: {every_rounds: 1, keep_last_n: 9}
"""

Told = dict[str, Any]


def environ_of(tree: Path) -> dict[str, str]:
    """Return an environment in which the tree's xffl is imported, without what a launcher may have left."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "SLURM_", "OMPI_"))}
    return kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "GLOO_SOCKET_IFNAME": "lo"}


def run_cases(tree: Path, folder: Path, which: list[str], jobs: int, commands: list[list[str]]) -> Told:
    """Run the launcher with a tree; checkpoints are written to and read from the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        given = [*which, "--jobs", str(jobs), "--folder", str(folder), "--scratch", scratch, "--out", str(out)]
        command = [sys.executable, str(HERE / "launch.py"), *given, "--commands", json.dumps(commands)]
        ran = subprocess.run(command, cwd=scratch, env=environ_of(tree), capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"the launcher failed with {tree}:\n{ran.stdout}{ran.stderr}")
        found: Told = json.loads(out.read_text())
    return found


def execute(tree: Path, folder: Path) -> Told:
    """Run ``xffl exec`` in a folder, which may hold a run to go on with; return its code and its records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    shutil.copy(ROOT / "tests" / "tasks.py", folder / "task.py")
    where = [sys.executable, "-c", "import xffl; print(xffl.__file__)"]
    environ = environ_of(tree)
    told = subprocess.run(where, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(told).is_relative_to(tree), f"{told} is not in {tree}"
    command = [sys.executable, "-m", "xffl", "exec", "config.yaml"]
    ran = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    records = records_of(folder / "runs" / "golden") if ran.returncode == 0 else ran.stderr[-2000:]
    return {"code": ran.returncode, "records": records}


def resume(tree: Path, old: Path, folder: Path) -> Told:
    """Go on with a tree from the first checkpoint of a copy of the old tree's run."""
    shutil.copytree(old, folder)
    checkpoints = folder / "runs" / "golden" / "checkpoints"
    for one in [*checkpoints.glob("step_*"), checkpoints / "final"]:
        if one.name != "step_3":
            shutil.rmtree(one)
    (checkpoints / "latest").unlink()
    return execute(tree, folder)


def plain(line: str, told: Told) -> Told:
    """Return what is compared of a command: the code, and options or numbers, but no wording."""
    if line.endswith("--help"):
        return {"code": told["code"], "options": options_of(told["text"])}
    if "--json" in line and told["code"] == 0:
        values = json.loads(told["text"])
        if line.startswith("list"):
            values = [{key: value for key, value in one.items() if key not in ("target", "line")} for one in values]
        return {"code": told["code"], "values": values}
    return {"code": told["code"]}


def rows_of(found: Told) -> Told:
    """Return all that a tree has told, row by row."""
    rows: Told = dict(found["cases"])
    rows |= {f"xffl {line}": plain(line, told) for line, told in found["commands"].items()}
    rows |= {f"file {name}": {"digest": digest} for name, digest in found["files"].items()}
    return rows | {name: found[name] for name in ("xffl exec", "xffl exec, resumed") if name in found}


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Name the places where two records differ; a report may have fields that the old one has not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            yield from differences(old[key], new.get(key, "nothing"), f"{at}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{at}[{index}]")
    elif json.dumps(old) != json.dumps(new):
        yield f"{at.lstrip('.')}: {str(old)[:80]} -> {str(new)[:80]}"


def all_of(tree: Path, folder: Path, only: str, jobs: int) -> Told:
    """Run everything with a tree; runs and checkpoints stay in the folder."""
    is_whole = not only
    found = run_cases(tree, folder / "kept", ["--only", only], jobs, COMMANDS if is_whole else [])
    return found | ({"xffl exec": execute(tree, folder / "exec")} if is_whole else {})


def old_results(asked: argparse.Namespace) -> tuple[Told, Path]:
    """Return what the old tree has told, and its folder; run it where that is not there yet."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", asked.old], capture_output=True, text=True, check=True).stdout.strip()
    sources = b"".join(file.read_bytes() for file in (*sorted(HERE.glob("*.py")), ROOT / "tests" / "tasks.py"))
    key = hashlib.sha256(sources + asked.only.encode()).hexdigest()[:12]
    folder = asked.old_results or Path(tempfile.gettempdir(), f"xffl-golden-{os.getuid()}", f"{commit[:12]}-{key}")
    kept = folder / "results.json"
    if kept.exists() and (found := json.loads(kept.read_text()))["key"] == [commit, key]:
        return dict(found), folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch).resolve() / "tree"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            found = all_of(tree, folder, asked.only, asked.jobs)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    kept.write_text(json.dumps({**found, "key": [commit, key]}))
    return found, folder


def new_results(asked: argparse.Namespace, old: Told, old_folder: Path, scratch: Path) -> tuple[Told, Told]:
    """Run the new tree, also on what the old one has left; return pairs of rows."""
    tree = asked.new.resolve()
    found = all_of(tree, scratch / "new", asked.only, asked.jobs)
    before, after = rows_of(old), rows_of(found)
    loads = [name for name in old["cases"] if name.startswith("load ")]
    if loads:
        shutil.copytree(old_folder / "kept", scratch / "kept")
        crossed = run_cases(tree, scratch / "kept", ["--names", json.dumps(loads)], asked.jobs, [])["cases"]
        for name in loads:
            before[f"{name}, written by the old tree"] = before[name]
            after[f"{name}, written by the old tree"] = crossed[name]
    if "xffl exec" in old:
        before["xffl exec, begun by the old tree"] = old["xffl exec"]
        after["xffl exec, begun by the old tree"] = resume(tree, old_folder / "exec", scratch / "resumed")
    return before, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_REF", help="commit to compare with")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names, and no commands")
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time (default: 2)")
    parser.add_argument("--new", type=Path, default=ROOT, metavar="DIR", help="tree to compare (default: this one)")
    parser.add_argument("--old-results", type=Path, metavar="DIR", help="where the old tree's results are kept")
    asked = parser.parse_args()
    start = time.monotonic()
    old, folder = old_results(asked)
    middle = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        before, after = new_results(asked, old, folder, Path(scratch).resolve())
    wrong = 0
    for name in {**before, **after}:
        found = list(differences(before.get(name, {"there": "no"}), after.get(name, {"there": "no"})))
        found += ["a world ended early"] if "lost" in {**before.get(name, {}), **after.get(name, {})} else []
        print(f"{'DIFFERENT' if found else 'equal':9}  {name}", *found[:6], sep="\n             ")
        wrong += bool(found)
    rows = len({**before, **after})
    print(
        f"{rows} rows, {wrong} different; {middle - start:.0f} s old tree, {time.monotonic() - middle:.0f} s new tree"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
