"""Print the numbers of the code base as a table, one column for each git ref, such as before and after a refactor.

    python benchmarks/house.py [REF ...] [--path] [--chain]

Without a ref the working tree is counted; ``--path`` prints the reader's path alone. The number of a folder includes
those below it; a room that a tree lacks has zeros. Docstrings are all bare strings, blank lines in them included; code
lines hold a token that is neither comment nor docstring. A comment counts where it has a line of its own or ends one
(so a line may be both code and comment), as a share of all lines. A function goes from its ``def`` to its last line;
its body begins after its docstring.

The *reader's path* is what a reader of one plain round, or of the README's script, has to open. On rank 0, over gloo:

- a *round* is the second one of a training loop with ``xffl.FederatedScaling`` and its defaults, from the call of the
  ``optimizer.step()`` that makes it to its return: between two cells of one rank, and between cells of (2, 2) ranks,
  each a replica (``hsdp=1``);
- the *script* is that of ``README.md``, from ``import torch, xffl`` to its end, for cells of (2, 2) ranks with
  ``hsdp=2``.

*Files* are those of xffl in which a function ran. What an import runs does not count: a file that was only imported is
told in the row below, with its lines of code. *Functions* are those that ran, with lambdas and comprehensions (on
Python 3.12 and later a list comprehension is no function); of them are *named* those with a ``def``. Their lines are
counted once, also where one is defined in another. The *deepest chain* is the most functions of xffl that were on the
stack at once; in a thread of xffl's own they count from where it starts. ``--chain`` lists files, functions and chain.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("aggregation", "distributed", "parallel", "checkpoint")
TIMEOUT_S = 120
LOADED = """
import sys, xffl
xffl.Aggregator
xffl.FederatedScaling
print(xffl.__file__)
print(sum(name.split(".")[0] == "xffl" for name in sys.modules))
"""
PATHS = (
    ("round of (1, 1)", ("round", "1,1", "-")),
    ("round of (2, 2)", ("round", "2,2", "1")),
    ("README's script", ("script", "2,2", "2")),
)
"""What is followed, and its words for ``house_rank.py``."""
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>")
"""Functions that have no ``def``."""
LAYOUT = ("NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
"""Tokens that are no code."""


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of bare strings: docstrings, and what is said of a variable below it."""
    bare = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    strings = (node for node in bare if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt | None:
    """Return the first statement after the docstring."""
    after = 0 if ast.get_docstring(function) is None else 1
    return next(iter(function.body[after:]), None)


def line_count(first: ast.stmt | None, last: ast.stmt) -> int:
    """Count from the first line of a statement to the last line of another."""
    return 0 if first is None else (last.end_lineno or last.lineno) - first.lineno + 1


@functools.cache
def count_file(path: Path) -> dict[str, Any]:
    """Count one file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = docstring_lines(tree)
    code, comments = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif tokenize.tok_name[token.type] not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        "path": path,
        "code": code - docstrings,
        "lines": len(text.splitlines()),
        "code lines": len(code - docstrings),
        "docstring lines": len(docstrings),
        "comment lines": len(comments),
        ":param: lines": len(re.findall(r"^\s*:param\b", text, re.MULTILINE)),
        "functions": [(f"{path.name}: {node.name}", line_count(node, node)) for node in functions],
        "bodies": [(f"{path.name}: {node.name}", line_count(body_of(node), node)) for node in functions],
    }


def count_all(tree: Path, folders: tuple[str, ...]) -> dict[str, str]:
    """Count the files below some folders of the package together, and return each number as the table shows it."""
    paths = sorted(path for folder in folders for path in (tree / "xffl" / folder).rglob("*.py"))
    files = [count_file(path) for path in paths]
    total = {name: sum(file[name] for file in files) for name in ("lines", "code lines", "docstring lines")}
    comments = sum(file["comment lines"] for file in files)
    widths = Counter(path.parent.relative_to(tree / "xffl") for path in paths)
    longest = {str(file["path"].relative_to(tree / "xffl")): file["lines"] for file in files}
    functions, bodies = ([item for file in files for item in file[kind]] for kind in ("functions", "bodies"))
    return {
        "Python files": str(len(files)),
        **{name: str(number) for name, number in total.items()},
        "comment lines": f"{comments} ({100 * comments / max(1, total['lines']):.1f}%)",
        "widest folder": largest(((str(path), width) for path, width in widths.items())),
        "longest file": largest(longest.items()),
        "longest function": largest(functions),
        "longest body": largest(bodies),
        "median function": f"{statistics.median([length for _, length in functions] or [0]):g}",
        ":param: lines": str(sum(file[":param: lines"] for file in files)),
    }


def largest(found: Any) -> str:
    """Show the largest number of some pairs, with its name."""
    name, number = max(found, key=lambda item: item[1], default=("", 0))
    return f"{number} ({name})" if name else "0"


def clean_environment(tree: Path) -> dict[str, str]:
    """Return an environment where the package is that of the tree, and no launcher has left its variables."""
    launchers = ("XFFL_", "SLURM_", "OMPI_", "MV2_", "PMI", "PALS_", "MPI_", "GLOO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**kept, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def count_loaded(tree: Path) -> int:
    """Count the modules that are loaded with the aggregator and the scaling."""
    command, env = [sys.executable, "-c", LOADED], clean_environment(tree)
    told = subprocess.run(command, env=env, cwd=tree, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    home, number = told.stdout.split()[-2:]
    if not Path(home).is_relative_to(tree):
        raise SystemExit(f"{home} was loaded instead of the package in {tree}")
    return int(number)


def follow(tree: Path, what: str, cells: str, hsdp: str) -> dict[str, Any]:
    """Run a round or the script on as many ranks as it needs, and return what rank 0 has recorded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = sum(map(int, cells.split(",")))
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "house_rank.py"), str(tree), what, cells, hsdp]
    ranks = []
    try:
        for rank in range(count):
            own = {**place, "RANK": rank, "LOCAL_RANK": rank}
            env = {**clean_environment(tree), **{name: str(value) for name, value in own.items()}}
            ranks.append(subprocess.Popen(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True))
        told = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        raise SystemExit(f"the {what} of {tree} failed: the ranks ended with {[one.returncode for one in ranks]}")
    return dict(json.loads(told[0].splitlines()[-1]))


def count_path(tree: Path, found: dict[str, Any]) -> dict[str, str]:
    """Return the rows of a reader's path."""
    package = tree / "xffl"
    files = sorted({file for file, *_ in found["functions"]})
    only_imported = [file for file in found["imported"] if file not in files and count_file(package / file)["code"]]
    lines = {file: set[int]() for file in files}
    for file, _, first, last in found["functions"]:
        lines[file].update(range(first, last + 1))
    named = [name for _, name, *_ in found["functions"] if not name.endswith(COMPREHENSIONS)]
    return {
        "files": str(len(files)),
        "their lines": str(sum(count_file(package / file)["lines"] for file in files)),
        "their lines of code": str(sum(len(count_file(package / file)["code"]) for file in files)),
        "files only imported": str(len(only_imported)),
        "their lines of code, too": str(sum(len(count_file(package / file)["code"]) for file in only_imported)),
        "functions": str(len(found["functions"])),
        "named functions": str(len(named)),
        "lines of functions": str(sum(map(len, lines.values()))),
        "code of functions": str(sum(len(at & count_file(package / file)["code"]) for file, at in lines.items())),
        "deepest chain": str(len(found["chain"])),
    }


def list_path(tree: Path, found: dict[str, Any]) -> str:
    """Return the files of a reader's path with their functions, and the deepest chain."""
    by_file: dict[str, list[str]] = {}
    for file, name, first, _ in found["functions"]:
        by_file.setdefault(file, []).append(f"{name}:{first}")
    text = []
    for file, names in sorted(by_file.items()):
        code = len(count_file(tree / "xffl" / file)["code"])
        text.append(f"  {file}: {code} lines of code, {len(names)} functions")
        text += [f"    {name}" for name in sorted(names, key=lambda name: int(name.rpartition(":")[2]))]
    text.append("  only imported: " + " ".join(file for file in found["imported"] if file not in by_file))
    text.append("  deepest chain:")
    text += [f"    {frame}" for frame in found["chain"]]
    return "\n".join(text)


def measure(tree: Path, is_path_alone: bool) -> tuple[dict[str, str], str]:
    """Return the rows of a tree, and the list of its paths."""
    rows = {}
    if not is_path_alone:
        wholes = {"package": (".",), **{room: (room,) for room in ROOMS}, "four rooms": ROOMS}
        rows = {f"{whole}: {name}": text for whole, at in wholes.items() for name, text in count_all(tree, at).items()}
        rows["modules loaded"] = str(count_loaded(tree))
    lists = []
    for title, words in PATHS:
        found = follow(tree, *words)
        rows |= {f"{title}: {name}": text for name, text in count_path(tree, found).items()}
        lists.append(f"{title}:\n{list_path(tree, found)}")
    return rows, "\n\n".join(lists)


@contextmanager
def tree_of(ref: str | None) -> Iterator[Path]:
    """Yield the folder where a ref is checked out, for the time being; the working tree where there is none."""
    if ref is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), ref], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("refs", nargs="*", metavar="REF", help="what to count, such as HEAD~1; else the working tree")
    parser.add_argument("--path", action="store_true", help="print the reader's path alone")
    parser.add_argument("--chain", action="store_true", help="list also files, functions and the deepest chain")
    options = parser.parse_args()
    columns, lists = {}, {}
    for ref in options.refs or [None]:
        name = ref or "working tree"
        with tree_of(ref) as tree:
            columns[name], lists[name] = measure(tree, options.path)
    rows = next(iter(columns.values()))
    table = [["", *columns], *([row, *(column[row] for column in columns.values())] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for name, paths in lists.items() if options.chain else ():
        print(f"\n{name}, {paths}")


if __name__ == "__main__":
    main()
