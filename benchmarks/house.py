"""Print the numbers of the code base as a table, one column for each git ref, such as before and after a refactor.

    python benchmarks/house.py [REF ...] [--chain]

Without a ref the working tree is counted. The number of a folder includes those below it; a room that a tree lacks has
zeros. Docstrings are all bare strings, blank lines in them included; code lines hold a token that is neither comment
nor docstring. A comment counts where it has a line of its own or ends one (so a line may be both code and comment), as
a share of all lines. A function goes from its ``def`` to its last line; its body, as in ``tests/unit/test_package.py``,
begins after its docstring.

The round is one of ``xffl.Aggregator`` with its defaults, as in ``docs/round.rst``, between two ranks on gloo, each a
cell. On rank 0, from the call of ``aggregate`` to its return, *frames* are the most frames of xffl that are on the
stack at once when bytes are sent: when a function of ``torch.distributed`` is called, or a method of its groups. The
frame of this script does not count; those of list comprehensions do (Python 3.12 has none). In a thread of xffl's own,
frames count from where it starts. *Files* are those of xffl whose functions are called meanwhile. ``--chain`` prints
both.
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
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
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
SENDING = re.compile(
    r"_?(all_?gather|all_?reduce|all_?to_?all|batch_isend_irecv|broadcast|gather|i?send|(monitored_)?barrier|"
    r"reduce|reduce_scatter|scatter)(_base|_coalesced|_into_tensor|_list|_object|_single|_tensor)*"
)
"""What sends, in ``torch.distributed`` and as methods of its groups."""
TORCH = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
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


def run_round(tree: Path) -> dict[str, Any]:
    """Run a round of two ranks, and return what rank 0 has recorded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
    ranks = []
    try:
        for rank in range(2):
            own = {**place, "RANK": rank, "LOCAL_RANK": rank}
            env = {**clean_environment(tree), "MASTER_ADDR": "127.0.0.1", **{n: str(v) for n, v in own.items()}}
            command = [sys.executable, __file__, "--rank", str(tree)]
            ranks.append(subprocess.Popen(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True))
        told = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        raise SystemExit(f"the round of {tree} failed: the ranks ended with {[one.returncode for one in ranks]}")
    return dict(json.loads(told[0].splitlines()[-1]))


class Recorder:
    """A profile function that notes, while it is on, the deepest stack that sends and the files that are called."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.is_on = False
        self.chain: list[str] = []
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event not in ("call", "c_call"):
            return
        code = frame.f_code
        # The bodies of modules and classes are no functions: they are run by an import, and have no fast locals.
        if event == "call" and code.co_filename.startswith(self.package) and code.co_flags & 1:
            self.files.add(code.co_filename.removeprefix(self.package))
        elif event == "call" and code.co_filename.endswith(TORCH) and SENDING.fullmatch(code.co_name):
            self.note(frame, code.co_name)
        elif (
            event == "c_call"
            and SENDING.fullmatch(argument.__name__)
            and "_distributed_c10d" in (argument.__doc__ or "")
        ):
            self.note(frame, argument.__name__)

    def note(self, frame: FrameType | None, sends: str) -> None:
        """Keep the stack, from the user's call on, if it is the deepest."""
        chain = [sends]
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.package):
                function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
                chain.append(f"{name.removeprefix(self.package)}:{frame.f_lineno} {function}")
            frame = frame.f_back
        if len(chain) > len(self.chain):
            self.chain = chain[::-1]


def take_part(tree: Path) -> None:
    """Take part in a round, and print on rank 0 what was called meanwhile."""
    import torch

    import xffl

    recorder = Recorder(tree / "xffl")
    with xffl.session(federated=(1, 1), device="cpu") as state:
        model = xffl.shard(torch.nn.Linear(1000, 1000), state)
        if state.rank == 0:
            threading.setprofile(recorder)  # before the aggregator may start threads
            sys.setprofile(recorder)
        aggregator = xffl.Aggregator(model, state)
        recorder.is_on = True
        aggregator.aggregate()
        recorder.is_on = False
        sys.setprofile(None)
        if state.rank == 0:
            print(json.dumps({"chain": recorder.chain, "files": sorted(recorder.files)}))


def measure(tree: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the rows of a tree, and what its round has called."""
    wholes = {"package": (".",), **{room: (room,) for room in ROOMS}, "four rooms": ROOMS}
    rows = {f"{whole}: {name}": number for whole, at in wholes.items() for name, number in count_all(tree, at).items()}
    rows["modules loaded"] = str(count_loaded(tree))
    found = run_round(tree)
    rows["frames of a round"] = str(len(found["chain"]) - 1)  # the last is what sends
    rows["files of a round"] = str(len(found["files"]))
    return rows, found


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
    parser.add_argument("--chain", action="store_true", help="print also which frames and files a round has")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        take_part(options.rank)
        return
    columns, rounds = {}, {}
    for ref in options.refs or [None]:
        name = ref or "working tree"
        with tree_of(ref) as tree:
            columns[name], rounds[name] = measure(tree)
    rows = next(iter(columns.values()))
    table = [["", *columns], *([row, *(column[row] for column in columns.values())] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for name, found in rounds.items() if options.chain else ():
        print(f"\n{name}, frames of a round:", *found["chain"], sep="\n  ")
        print(f"{name}, files of a round:", *found["files"], sep="\n  ")


if __name__ == "__main__":
    main()
