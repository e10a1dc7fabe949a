"""One rank of ``xffl doctor --hosts``, started by that command only: its report goes home as one line."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Look as the options on the command line say; errors are in the report, not in the exit code."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The modules of the command line are not for other imports.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    from xffl.cli.doctor import build_parser, tell_home

    tell_home(build_parser().parse_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
