"""Flip one comparison of a module at a time, and see whether the tests that import it notice.

    python -m tests.mutants [--modules FILE ...] [--limit 90] [--jobs 1] [--only NUMBER ...] [--out FILE]

``<`` becomes ``>=``, ``==`` becomes ``!=``, ``in`` becomes ``not in``, and so on: each comparison of a module once, in
a copy of the tree. The files of tests that name the module run on it, the quickest first, until one fails; how long
they take is measured before, on the copy as it is, and those that do not fit into ``--limit`` seconds together are left
out.
A mutant with which the tests do not end in that time and half of it again has made something wait for ever: it counts
as found.

Printed as JSON: a line for each mutant, and one with the sums. A mutant that survives is a place where no test asks
which of two ways is right, unless it is in ``EQUIVALENT``, which gives the reason. The exit code is 1 if fewer than
95 % of the others are found.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

REPO = Path(__file__).resolve().parents[1]

MODULES = (
    "xffl/elastic/roster.py",
    "xffl/aggregation/engine/decision/consensus.py",
    "xffl/aggregation/arithmetic.py",
    "xffl/checkpoint/format.py",
)
"""Where a wrong comparison costs most: who goes on, whether a round counts, what it becomes, and what is on disk."""

FLIPS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Each operator as it is written, and what takes its place."""

EQUIVALENT: dict[tuple[str, str], str] = {}
"""Mutants with which nothing is wrong: the file and the comparison as they are written, and why no test can tell."""

SHARE = 0.95


@dataclass(frozen=True)
class Mutant:
    """One comparison that is flipped: where it stands, and the text of the module with it."""

    module: str
    line: int
    comparison: str
    flipped: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``found`` is how, and empty where no test noticed it."""

    module: str
    line: int
    comparison: str
    flipped: str
    found: str
    seconds: float


def mutants(module: str, text: str) -> Iterator[Mutant]:
    """Return the module with each of its comparisons flipped, one at a time."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            begin = offset(left.end_lineno or 0, left.end_col_offset or 0)
            end = offset(right.lineno, right.col_offset)
            old, new = FLIPS[type(operator)]
            at, length = _place_of(text[begin:end], old)
            flipped = text[: begin + at] + new + text[begin + at + length :]
            comparison = f"{ast.unparse(left)} {old} {ast.unparse(right)}"
            yield Mutant(module, node.lineno, comparison, f"{ast.unparse(left)} {new} {ast.unparse(right)}", flipped)


def _place_of(between: str, operator: str) -> tuple[int, int]:
    """Return where an operator stands in the text between two operands, and its length with the blanks inside it."""
    words = operator.split()
    lines = between.splitlines(keepends=True)
    # In brackets, so that lines may end anywhere; those of the operands are blanks.
    bare = "(" + between.replace(")", " ").replace("(", " ") + ")"
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(bare).readline) if token.string in words]
    first, last = tokens[0], tokens[len(words) - 1]

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column - (line == 1)

    begin = offset(*first.start)
    return begin, offset(*last.end) - begin


def files_of_tests(module: str) -> list[str]:
    """Return the files of tests that name a module, those of real launchers left out."""
    name = module.removesuffix(".py").replace("/", ".")
    package, _, last = name.rpartition(".")
    found = []
    for file in sorted((REPO / "tests").glob("*/test_*.py")):
        text = file.read_text(encoding="utf-8")
        if file.parent.name != "cluster" and (name in text or f"from {package} import {last}" in text):
            found.append(str(file.relative_to(REPO)))
    return found


class Copy:
    """A copy of the tree, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        """Copy all that git knows of, or would, to a new folder."""
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPO,
            check=True,
            capture_output=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (REPO / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, folder / name)

    def run(self, file: str, limit_s: float) -> str:
        """Run a file of tests; return how it failed, or nothing."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", file]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        with (self.folder / "output.txt").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return f"{file} did not end in {limit_s:.0f} s"
            finally:
                with suppress(ProcessLookupError):  # all have ended, as they should
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            failed = [line for line in output if line.startswith(("FAILED", "ERROR"))]
        return "" if code == 0 else (failed[0].split(" - ")[0].strip() if failed else f"{file} ended with {code}")


def measure(copy: Copy, files: Sequence[str], limit_s: float) -> dict[str, float]:
    """Return the files that fit into the limit together, the quickest first, with their seconds."""
    seconds = {}
    for file in files:
        begin = time.monotonic()
        failure = copy.run(file, 3 * limit_s)
        took = time.monotonic() - begin
        if failure and "did not end" not in failure:
            raise SystemExit(f"tests fail without a mutant: {failure}")
        seconds[file] = took
    chosen: dict[str, float] = {}
    for file in sorted(seconds, key=seconds.__getitem__):
        if sum(chosen.values()) + seconds[file] <= limit_s:
            chosen[file] = seconds[file]
    if not chosen:
        raise SystemExit(f"no file of tests ends in {limit_s:.0f} s: {seconds}")
    return chosen


def judge(copy: Copy, mutant: Mutant, files: dict[str, float]) -> Verdict:
    """Try one mutant."""
    place = copy.folder / mutant.module
    before = place.read_bytes()
    place.write_text(mutant.text, encoding="utf-8")
    begin = time.monotonic()
    found = ""
    try:
        for file, usual in files.items():
            found = copy.run(file, 1.5 * usual + 30.0)
            if found:
                break
    finally:
        place.write_bytes(before)
    took = round(time.monotonic() - begin, 1)
    return Verdict(mutant.module, mutant.line, mutant.comparison, mutant.flipped, found, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=MODULES)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of tests for each mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at the same time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants, from 0, of one module")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines: list[str] = []

    def tell(result: object) -> None:
        lines.append(json.dumps(result))
        print(lines[-1], flush=True)

    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(args.jobs):
            place = Path(folder) / str(job)
            place.mkdir()
            copies.put(Copy(place))
        for module in args.modules:
            copy = copies.get()
            files = measure(copy, files_of_tests(module), args.limit)
            copies.put(copy)
            tell({"module": module, "tests": {file: round(seconds, 1) for file, seconds in files.items()}})
            drawn = list(mutants(module, (REPO / module).read_text(encoding="utf-8")))
            drawn = [drawn[number] for number in args.only] if args.only else drawn

            def try_it(mutant: Mutant, files: dict[str, float] = files) -> Verdict:
                copy = copies.get()
                try:
                    return judge(copy, mutant, files)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(args.jobs) as pool:
                for verdict in pool.map(try_it, drawn):
                    verdicts.append(verdict)
                    tell(asdict(verdict))
            # What breaks the tests meanwhile, such as a package that is installed anew, would pass for a mutant's.
            measure(copy, list(files), args.limit)
    counted = [one for one in verdicts if (one.module, one.comparison) not in EQUIVALENT]
    survivors = [one for one in counted if not one.found]
    share = 1 - len(survivors) / len(counted) if counted else 1.0
    tell({"mutants": len(verdicts), "counted": len(counted), "survivors": len(survivors), "found": round(share, 3)})
    if args.out is not None:
        args.out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    sys.exit(share < SHARE)


if __name__ == "__main__":
    main()
