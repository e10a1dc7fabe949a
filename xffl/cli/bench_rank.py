"""One process of ``xffl bench --processes N``, started by that command only.

What goes wrong here reaches the launcher, which tells it once, and not a line for each rank.
"""

from __future__ import annotations

import sys

from xffl.cli import bench

__all__ = ["main"]


def main() -> None:
    """Measure with the options of the command line, and leave with an exit code."""
    sys.exit(bench.run(bench.build_parser().parse_args(sys.argv[1:])))


if __name__ == "__main__":
    main()
