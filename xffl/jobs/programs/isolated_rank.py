"""One process of ``xffl exec --isolate``, started by that command only: a script in an isolated cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main", "run_isolated"]


def run_isolated(command: Sequence[str]) -> None:
    """Run a script when the environment tells it of its cell alone; collective over the job at its start.

    :param command: The words behind ``python``.
    """
    from xffl.cluster.launch.runner import run_script
    from xffl.distributed.failures.uncaught import note_end
    from xffl.distributed.startup.isolation import isolate

    with isolate():
        try:
            run_script(command)
        except Exception as error:
            note_end(error)  # while the environment still tells where the other cells are
            raise


def main() -> None:
    """Run the script that the command line names."""
    here = os.path.dirname(os.path.realpath(__file__))
    # The modules of this room are not for the script's imports.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or os.curdir) != here]
    run_isolated(sys.argv[1:])


if __name__ == "__main__":
    main()
