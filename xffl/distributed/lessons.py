"""The line at the end of a session in which optimizers have made steps, and no round has averaged the cells."""

from __future__ import annotations

import sys

from xffl.cluster.over_files import read_over_files
from xffl.distributed.distributed_state import DistributedState

__all__ = ["tell_lesson"]


def tell_lesson(state: DistributedState) -> None:
    """Write the line where one was expected of this rank; local.

    :param state: The state of the session, before its set-ups are taken off.
    """
    lesson = _lesson_of(state)
    if lesson is not None:
        print(lesson, file=sys.stderr, flush=True)


def _lesson_of(state: DistributedState) -> str | None:
    """Return the line for a session that has trained without a round; ``None`` where none was expected of this rank."""
    made = "although optimizers have made steps"
    own = "has trained a model of its own, unless the script averages the cells itself"
    remedy = "put the training loop into a block of xffl.FederatedScaling, or call xffl.Aggregator(...).aggregate()"
    if not state.is_first_of_job:
        return None
    if state.topology.cells > 1:
        return f"xffl: the session of {state.topology.cells} cells ends without a round, {made}: each {own}; {remedy}"
    if state.isolated is not None:
        return f"xffl: the session of an isolated cell ends without a round, {made}: each cell {own}; {remedy}"
    if state.elastic is not None:
        return f"xffl: the session of an elastic cell ends without a round, {made}: this cell {own}; {remedy}"
    if state.lone_cell is not None and (export := read_over_files().export) is not None:
        return (
            f"xffl: the session of a cell ends without an export to {export}, {made}; put the training loop into a "
            "block of xffl.FederatedScaling, or call xffl.aggregation.exports.export_cell"
        )
    return None
