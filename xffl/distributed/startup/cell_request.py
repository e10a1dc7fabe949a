"""What a session is asked to be, where its world is one cell of a federation and other cells are other worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from xffl.cluster.environment import is_isolated, is_lone_cell_requested
from xffl.cluster.sizes import Federation
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import ElasticParameters
from xffl.errors import ConfigError

__all__ = ["CellRequest", "find_cell_request"]


class CellRequest(Protocol):
    """A cell that a session's world is to be; its methods are called in their order, each once at most."""

    def join(self, join: Callable[..., DistributedState], federated: Federation | None) -> DistributedState:
        """Return the state of the cell's world; collective over its ranks.

        :param join: Joins the world that the environment tells of.
        :param federated: The cells that the session was asked for, which ``join`` takes by default.
        :return: The state.
        """
        ...

    def take(self, state: DistributedState) -> None:
        """Let the world be the cell, as the state tells from here on; collective over the world.

        :param state: The state of the world.
        """
        ...

    def leave(self, error: BaseException | None) -> None:
        """Put back what was changed to join, when the world is left; local.

        :param error: The error that the world is left by, if any.
        """
        ...


def find_cell_request(
    *,
    cell: int | None,
    cells: int | Sequence[int] | None,
    elastic: str | ElasticParameters | None,
    link_backend: str | None,
    isolate: bool,
    ifname: str | None,
    timeout_s: float,
) -> CellRequest | None:
    """Return what arguments, those of :func:`xffl.session`, or else the environment ask for; local.

    ``None`` where the job is no cell by itself, and its cells are not isolated.
    """
    request: CellRequest | None = None
    if is_lone_cell_requested() or any(given is not None for given in (cell, cells, elastic)):
        from xffl.distributed.startup.lone_cell import find_lone_cell

        request = find_lone_cell(cell, cells, elastic, link_backend)
    if not isolate and not is_isolated():
        return request
    from xffl.distributed.startup.isolation import IsolationRequest

    try:
        if request is not None:
            raise ConfigError("isolate is for a job of all cells, but this job is one cell; leave one of them out")
        if link_backend not in (None, "auto", "gloo"):
            raise ConfigError(f"isolated cells have gloo between them; leave link_backend {link_backend!r} out")
        return IsolationRequest(ifname=ifname, timeout_s=timeout_s)
    except ConfigError as wrong:
        from xffl.distributed.startup.mistakes import own_place, raise_at_meeting

        raise_at_meeting(wrong, own_place())  # the others of the job would wait for this rank
