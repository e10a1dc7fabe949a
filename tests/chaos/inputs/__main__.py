"""Mutate valid inputs of every reader of files and of peers, and count what comes of reading them.

    python -m tests.chaos.inputs                       # a few of each, seconds; CI runs it so
    python -m tests.chaos.inputs --long                # 2,000 of each, minutes
    python -m tests.chaos.inputs "run configuration"   # these parsers alone; --list names all

Printed is a table of parsers and outcomes: ``ok``, it was read (many changes leave an input valid); ``named``, an error
of xffl that says what is wrong; ``raw``, any other error; ``slow``, over 10 s. The exit code is 1 if there is a raw or
a slow one; these are listed below the table, with the number of a case for ``--case``.

A new parser is a :class:`tests.chaos.inputs.parser.Parser` in ``PARSERS`` of a file ``parsers_*.py`` in this folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import pkgutil
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tests.chaos.inputs
from tests.chaos.inputs.attempts import attempt, input_of, try_parser
from tests.chaos.inputs.parser import Parser

HOME = Path.cwd()
SHORT, LONG = 6, 2000
MEMORY = 6 * 2**30
"""How much more memory than at the start an input may take, so that one that fills it is told and not killed"""


def find_parsers() -> dict[str, Parser]:
    """Return all parsers by their names."""
    found: dict[str, Parser] = {}
    for module in pkgutil.iter_modules(tests.chaos.inputs.__path__):
        if module.name.startswith("parsers_"):
            for parser in importlib.import_module(f"{tests.chaos.inputs.__name__}.{module.name}").PARSERS:
                if parser.name in found:
                    raise ValueError(f"two parsers are called {parser.name!r}")
                found[parser.name] = parser
    return found


def main(words: Sequence[str] | None = None) -> int:
    known = find_parsers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help="names of parsers; all by default")
    parser.add_argument("--long", action="store_true", help=f"{LONG} inputs of each in place of {SHORT}")
    parser.add_argument("--cases", type=int, help="so many inputs of each")
    parser.add_argument("--seed", type=int, default=0, help="for other inputs")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    parser.add_argument("--case", type=int, help="show this input of one parser, and what comes of it")
    parser.add_argument("--list", action="store_true", help="names of all parsers")
    options = parser.parse_args(words)
    if unknown := [name for name in options.parsers if name not in known]:
        parser.error(f"unknown parser {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = [known[name] for name in options.parsers or known]
    if options.list:
        print("\n".join(known))
        return 0
    _limit_memory()
    if options.case is not None:
        return _show(chosen[0], options.seed, options.case)
    cases = options.cases or (LONG if options.long else SHORT)
    keep = None if options.keep is None else options.keep.resolve()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # whatever a word names lies there, or nowhere
        try:
            return _try_all(chosen, cases, options.seed, keep)
        finally:
            os.chdir(HOME)


def _try_all(parsers: Sequence[Parser], cases: int, seed: int, keep: Path | None) -> int:
    """Print the table, and what is to be mended."""
    print(f"{'parser':<34} {'cases':>6} {'ok':>6} {'named':>6} {'raw':>6} {'slow':>6} {'longest s':>10}")
    faults: list[str] = []
    for one in parsers:
        number = int(cases * one.share)
        if number == 0:  # one that takes long, in the short form
            continue
        tally = try_parser(one, number, seed, keep)
        counts = "".join(f" {tally.counts[outcome]:>6}" for outcome in ("ok", "named", "raw", "slow"))
        print(f"{one.name:<34} {number:>6}{counts} {tally.longest:>10.2f}", flush=True)
        for told, numbers in sorted(tally.faults.items(), key=lambda item: -len(item[1])):
            faults.append(f"{one.name}: {len(numbers)} times, first in case {numbers[0]}: {told}")
    print(*faults, sep="\n")
    return 1 if faults else 0


def _show(parser: Parser, seed: int, case: int) -> int:
    """Print one input and what comes of it."""
    with tempfile.TemporaryDirectory() as place:
        examples = list(parser.examples(Path(place)))
        content = input_of(parser, examples, seed, case)
        outcome, told, seconds = attempt(parser, content, Path(place))
    print(content[:5000].decode("utf-8", errors="backslashreplace"))
    print(f"{outcome} after {seconds:.2f} s: {told}")
    return 1 if outcome in ("raw", "slow") else 0


def _limit_memory() -> None:
    """Let an input that takes all memory raise MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
