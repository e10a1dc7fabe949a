"""The lock of a run's folder: one job at a time writes there."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from xffl.errors import ConfigError

__all__ = ["RunLock"]

LOG = logging.getLogger(__name__)

WAIT_S = 10.0
"""How long a job that has just been told to end may still hold the folder."""

POLL_S = 0.1
HELD = (errno.EACCES, errno.EAGAIN)
UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer."""


class RunLock:
    """The lock that the process of rank 0 holds while a run lasts; local.

    A record lock: hosts that share the file system see it, processes that make batches do not inherit it, and it goes
    with its process. Where a file system has no locks, nothing is locked.

    :param folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: TextIO | None = None

    def take(self, wait_s: float = WAIT_S) -> None:
        """Take the lock.

        :param wait_s: Seconds to wait for another job.
        :raises ConfigError: if another process still holds it then.
        """
        file = (self._folder / ".lock").open("a+", encoding="utf-8")
        try:
            _lock(file, time.monotonic() + wait_s)
        except OSError as error:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another job"
            if error.errno in HELD:
                raise ConfigError(
                    f"experiment.output_dir {self._folder} is in use by {holder}; wait until that has ended, or give "
                    "another experiment.output_dir"
                ) from error
            if error.errno not in UNKNOWN:
                raise
            LOG.info("%s has no locks: nothing keeps another job out", self._folder)
            return
        file.truncate(0)
        job = f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
        file.flush()
        self._file = file

    def give(self) -> None:
        """Give it back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lock(file: TextIO, deadline: float) -> None:
    """Lock a file, or raise what kept it from that, until the deadline only where another process holds it."""
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in HELD or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
