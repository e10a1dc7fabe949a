"""One process of ``xffl exec config.yaml``, started by that command only.

What goes wrong here reaches the launcher, which tells it once, and not a line for each rank.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Train as the configuration on the command line says."""
    here = os.path.dirname(os.path.abspath(__file__))
    # The modules of the command line are not for the trainer's imports.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]
    from xffl.training.configuration import read_job
    from xffl.training.launching import fit

    trainer, resolved = read_job(sys.argv[1], sys.argv[2:])
    # Cells and processes were chosen by the command, which has set the environment.
    fit(trainer, resolved.config, resolved.origins)


if __name__ == "__main__":
    main()
