"""The versions that are promised, tried one after the other: ``make matrix``, by hand before an issue ends.

A row is an environment: made on first use below ``MATRIX_DIR`` (a torch with CUDA takes 6 GB), kept, and completed
where the constraints, the requirements or this folder have changed. In each run the demo, ``tests/unit`` and a quick
selection of ``tests/ranks``. What came out replaces the row in the table of ``docs/install.rst``; a row that fails
makes the exit code 1. ``make matrix ROWS="torch-2.11 python-3.13"`` runs some rows only.

Python 3.13 is ``PYTHON313`` or ``python3.13`` where one runs, else Debian's in a chroot, which takes root and
``debootstrap``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROWS = {"torch-2.11": "2.11.*", "torch-2.13": "2.13.*", "torch-2.15": "2.15.*", "python-3.13": "2.13.*"}
RANKS = (
    *("round", "round_after", "round_votes", "round_mesh", "scaling", "strategy_steps", "pipeline_parallel"),
    *("checkpoint", "state", "session"),
)
"""Files of ``tests/ranks``: what leans most on torch's own parts, minutes on two cores."""

REPO = Path(__file__).resolve().parents[1]
HEAD = ("Environment", "Python", "PyTorch", "Date", "Demo", "tests/unit", "tests/ranks, selection", "Minutes")
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"
MATRIX_DIR = Path(os.environ.get("MATRIX_DIR") or Path.home() / ".cache/xffl-matrix").resolve()
# Ranks share the cores, and hundreds of processes are started: as in the Makefile.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPO),
    "PIP_NO_COMPILE": "1",
}


@dataclass(frozen=True)
class Table:
    """A table of a page of the manual, whose rows a command writes."""

    page: Path
    command: str
    """Of make; the marks around the table have it"""
    head: tuple[str, ...]
    rows: Collection[str]
    """The names of the rows, in order"""

    def replace_row(self, cells: list[str]) -> None:
        """Replace a row of the table, and leave the others as they were."""
        begin, end = f".. {self.command}: begin (written by make {self.command})", f".. {self.command}: end"
        before, rest = self.page.read_text().split(begin)
        table, after = rest.split(end)
        lines = csv.reader(text.strip() for text in table.splitlines())
        known = {line[0]: line for line in lines if len(line) == len(self.head)}
        known[cells[0]] = cells
        text = io.StringIO()
        csv.writer(text, lineterminator="\n   ").writerows(known[name] for name in self.rows if name in known)
        names = ", ".join(f'"{name}"' for name in self.head)
        head = f".. csv-table::\n   :header: {names}"
        self.page.write_text(f"{before}{begin}\n\n{head}\n\n   {text.getvalue().rstrip()}\n\n{end}{after}")


TABLE = Table(REPO / "docs/install.rst", "matrix", HEAD, ROWS)


def run(command: list[str], **more: str) -> int:
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, cwd=REPO, env=ENVIRONMENT | more).returncode


def output(command: list[str]) -> str:
    """What a command prints, shown as well."""
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.stdout


def chroot() -> list[str]:
    """Make Debian trixie once; what stands behind these words runs in it, in the repository at its own path."""
    root = MATRIX_DIR / "trixie"
    if not (root / "complete").exists():
        if os.getuid() or not shutil.which("debootstrap"):
            raise SystemExit("Python 3.13: give PYTHON313=/path/to/python3.13, or be root: apt-get install debootstrap")
        packages = "ca-certificates,git,python3,python3-venv"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", "trixie", str(root)], check=True)
        (root / "complete").touch()
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    script = ["set -e  # the mounts are those of one process, and end with it"]
    for kind, place in (
        *(("--rbind", place) for place in ("/proc", "/sys", "/dev", "/etc/ssl/certs")),
        *(("--bind", place) for place in (REPO, MATRIX_DIR)),
    ):
        target = shlex.quote(f"{root}{place}")
        script.append(f"mkdir -p {target}; mount {kind} {shlex.quote(str(place))} {target}")
    script.append(f'exec chroot {shlex.quote(str(root))} env -C {shlex.quote(str(REPO))} "$@"')
    (MATRIX_DIR / "chroot.sh").write_text("\n".join(script))
    return ["unshare", "--mount", "sh", str(MATRIX_DIR / "chroot.sh")]


def interpreter(row: str) -> tuple[str, list[str]]:
    """The folder of a row's environment, and how the Python is called that makes it."""
    if row != "python-3.13":
        return row, [sys.executable]
    for python in (os.environ.get("PYTHON313"), "python3.13"):
        found = shutil.which(python) if python else None
        if found and subprocess.run([found, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:  # no empty shim
            return row, [found]
    return f"{row}-trixie", [*chroot(), "python3.13"]


def environment(row: str) -> list[str]:
    """Make a row's environment, or take the one that is there; how its Python is called."""
    folder, python = interpreter(row)
    folder = str(MATRIX_DIR / folder)
    pins = re.sub(r"^torch==.*$", f"torch=={ROWS[row]}", (REPO / "constraints.txt").read_text(), flags=re.MULTILINE)
    constraints, stamp = Path(f"{folder}.txt"), Path(f"{folder}.complete")
    made_of = f"{REPO}\n{pins}\n{(REPO / 'setup.cfg').read_text()}"
    inside = [*python[:-1], f"{folder}/bin/python"]
    if not stamp.exists() or stamp.read_text() != made_of:
        constraints.write_text(pins)
        install = [*inside, "-m", "pip", "install", "--quiet", "-e", ".[examples,test]"]
        # The variable takes the place of what a site's configuration of pip may say.
        if run([*python, "-m", "venv", folder]) or run(install, PIP_CONSTRAINT=str(constraints)):
            raise SystemExit(f"{row}: the environment could not be made")
        stamp.write_text(made_of)
    return inside


def run_tests(python: list[str], name: str, *paths: str) -> tuple[bool, str]:
    """Run tests as ``make test`` does; whether all passed, and the counts."""
    told = MATRIX_DIR / f"{name}.xml"
    told.unlink(missing_ok=True)
    options = ["-q", "-n", "logical", "--dist", "loadfile", "-p", "no:cacheprovider", f"--junitxml={told}"]
    code = run([*python, "-m", "pytest", *options, *paths])
    if not told.exists():
        return False, f"ended with exit code {code}"
    [suite] = ElementTree.parse(told).getroot()
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped, seconds = int(suite.get("skipped", 0)), float(suite.get("time", 0))
    passed = int(suite.get("tests", 0)) - failed - skipped
    return code == 0, f"{passed} passed, {failed} failed, {skipped} skipped, {seconds:.0f} s"


def run_demo(python: list[str], name: str) -> tuple[bool, str]:
    out = MATRIX_DIR / f"{name}-demo"
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    if code := run([*python, "examples/01_digits/run.py", "--out", str(out)]):
        return False, f"ended with exit code {code}"
    seconds = time.monotonic() - began
    counts = output([*python, ".ci/check_demo.py", str(out)]).splitlines()[-1:]
    return bool(counts) and counts[0].endswith(" 0 failed"), f"{''.join(counts) or 'not checked'}, {seconds:.0f} s"


def try_row(row: str) -> bool:
    """Run a row and put it into the table; whether all passed."""
    print(f"\n== {row}", flush=True)
    date = datetime.date.today().isoformat()
    began = time.monotonic()
    try:
        python = environment(row)
        versions = output([*python, "-c", VERSIONS])
        began = time.monotonic()
        results = [
            run_demo(python, row),
            run_tests(python, f"{row}-unit", "tests/unit"),
            run_tests(python, f"{row}-ranks", *(f"tests/ranks/test_{name}.py" for name in RANKS)),
        ]
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        print(error, flush=True)
        versions, results = "- -", [(False, "not run")] * 3
    minutes = f"{(time.monotonic() - began) / 60:.1f}"
    TABLE.replace_row([row, *versions.split(), date, *(text for _, text in results), minutes])
    return all(passed for passed, _ in results)


def run_rows(description: str | None, known: Collection[str], try_one: Callable[[str], bool]) -> int:
    """Run the rows that the command line names, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(known)}; all by default")
    rows = parser.parse_args().rows or list(known)
    if unknown := [row for row in rows if row not in known]:
        parser.error(f"there is no row {unknown[0]!r}; give some of {', '.join(known)}")
    MATRIX_DIR.mkdir(parents=True, exist_ok=True)
    results = {row: try_one(row) for row in rows}
    for row, passed in results.items():
        print(f"{'ok  ' if passed else 'FAIL'} {row}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, ROWS, try_row))
