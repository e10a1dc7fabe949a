"""Play random histories of cells that follow the rule of the journal (tests/journal_model.py).

    python -m tests.chaos.journal [--rounds 5000] [--long] [--from SEED]

Printed is how often each event has happened. The exit code is 1 if a history has broken the rule: then its events are
printed, and the seed with which they come again. ``--long`` plays until 50,000 rounds have been made.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import count

from tests.journal_model import Broken, play


def main(words: list[str] | None = None) -> int:
    """Play histories until there are enough rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED")
    options = parser.parse_args(words)
    rounds = 50_000 if options.long else options.rounds
    counts: Counter[str] = Counter()
    for seed in count(options.first):
        try:
            counts += play(seed).counts
        except Broken as error:
            print("\n".join(error.log), error, sep="\n")
            return 1
        counts["histories"] += 1
        if counts["round"] >= rounds:
            break
    for event, number in counts.most_common():
        print(f"{number:8} {event}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
