"""What carries out a request, by its role; and the process that is handed one as a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from xffl.cluster.launch.failure import ExitCode, code_of_lost_output, tell_unmet
from xffl.errors import XfflError
from xffl.jobs.cells import keep_cell, start_all_cells
from xffl.jobs.ranks import be_one_rank, start_ranks
from xffl.jobs.request import JobRequest, Role, read_request

__all__ = ["ROLES", "carry_out", "main"]


def _show(request: JobRequest) -> int:
    assert request.work is not None
    request.work()
    return ExitCode.OK


ROLES: Mapping[Role, Callable[[JobRequest], int]] = {
    Role.SHOWN: _show,
    Role.RANK: be_one_rank,
    Role.RANKS: start_ranks,
    Role.ONE_CELL: keep_cell,
    Role.ALL_CELLS: start_all_cells,
}
"""The function that carries out a request, for each role."""


def carry_out(request: JobRequest) -> int:
    """Do what a request asks for, and return the exit code."""
    return ROLES[request.role](request)


def main() -> int:
    """Carry out the request in the file that the command line names, which the process above has written."""
    try:
        return carry_out(read_request(Path(sys.argv[1])))
    except XfflError as error:
        tell_unmet(error, {})  # who starts ranks is none itself, whatever variables it has been left
        return ExitCode.REFUSED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        code = code_of_lost_output(error)
        if code is None:
            raise
        return code
