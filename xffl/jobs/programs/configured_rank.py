"""One process of ``xffl exec config.yaml``, started by that command only.

What goes wrong here reaches the launcher, which tells it once, and not a line for each rank.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

KEPT = {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that ask a run to leave, and would end a process that does not listen yet, or no more."""


def main() -> None:
    """Train as the configuration says that the command has read."""
    signal.pthread_sigmask(signal.SIG_BLOCK, KEPT)  # until the trainer listens
    here = os.path.dirname(os.path.realpath(__file__))
    # The modules of this room are not for the trainer's imports.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or os.curdir) != here]
    from xffl.training.config.configuration import read_resolved
    from xffl.training.signals import check_signals

    # Whatever else this process starts is another job.
    trainer, resolved = read_resolved(os.environ.pop("XFFL_RESOLVED"))
    # A trainer may have a configuration of its own, and listen to nothing.
    names = getattr(getattr(resolved.config, "experiment", None), "preempt_signals", ())
    heard = KEPT.intersection(check_signals(names))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT - heard)
    try:
        # Cells and processes were chosen by the command, which has set the environment.
        trainer(resolved.config, origins=resolved.origins).fit()
    finally:
        for number in heard:  # what is left to do takes no step that could be lost
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
