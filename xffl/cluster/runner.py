"""One rank of a local job: ``python -m xffl.cluster.runner SCRIPT [arguments]``, started by the launcher only.

It runs the script as Python itself would, except that an uncaught exception is written to a file for the launcher
instead of being printed by every rank.
"""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from xffl.cluster.failure import record_failure

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_EXIT_DEADLINE_S = 10.0
_OWN_FILES = (__file__, runpy.run_path.__code__.co_filename)


def main() -> None:
    """Run the script that the command line names, and leave with its exit code."""
    _die_with_parent()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines come at once and whole, even where Python is told not to buffer: ranks would mix words.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    script = sys.argv[1]
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later, with -P or PYTHONSAFEPATH
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            _report(error)
        raise  # Python prints the message of sys.exit("message") itself
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is to be told
        code = _report(error)
    else:
        return
    sys.exit(code)


def _report(error: BaseException) -> int:
    """Write the failure down and return the exit code, with a limit on what still runs at exit.

    A failed rank whose threads or exit handlers wait for the others would keep the launcher waiting too.
    """
    try:
        record = record_failure(error, Path(os.environ["TORCHELASTIC_ERROR_FILE"]), skip=_OWN_FILES)
    except (KeyError, OSError):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    sys.stdout.flush()
    deadline = threading.Timer(_EXIT_DEADLINE_S, os._exit, (record.exit_code,))
    deadline.daemon = True
    deadline.start()
    return record.exit_code


def _die_with_parent() -> None:
    """Ask Linux to end this process when the launcher dies, even by SIGKILL. Elsewhere this is left out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
