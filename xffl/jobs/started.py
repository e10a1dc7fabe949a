"""Whether a launcher has started this process as one of several ranks."""

from __future__ import annotations

import os

from xffl.cluster.launch.job_layout import check_started
from xffl.cluster.recognition.find import find_launcher, launcher_of
from xffl.errors import ConfigError
from xffl.jobs.options import JobOptions

__all__ = ["count_started"]


def count_started(options: JobOptions) -> int | None:
    """Return how many processes a launcher has started, of which this is one; ``None`` where none has."""
    if options.launcher != "auto":
        return None
    row = launcher_of(os.environ) if options.hosts is None else find_launcher(os.environ)
    if row is None:
        return None
    started: int = row.read(os.environ)["world_size"]
    if options.hosts is not None:
        raise ConfigError(f"--hosts is given, but {row.title} has started {started} processes already; leave it out")
    check_started(row, started, options.processes)
    return started
