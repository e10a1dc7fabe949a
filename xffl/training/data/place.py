"""Where a rank's data lies: what loaders, samplers and partitions take as ``state``, and the share that follows.

Nothing here needs torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

from xffl.checks import integer
from xffl.errors import ConfigError
from xffl.topology import DataPlace, Topology

__all__ = [
    "OWN",
    "WHOLE",
    "Cells",
    "Placed",
    "cell_shares",
    "count_cells",
    "place_along",
    "place_of",
    "share_of",
    "takes_state",
]

DATA_AXES = "dp_"
"""How the axes of a cell's shape begin that cut the data; along the others (tensor, pipeline, ...) it is the same."""
OWN = "own"
"""The part of data that is this cell's alone: all of it."""
WHOLE = "whole"
"""The part of data that all cells have, where every cell is dealt all samples."""
SHOWN = (bool, int, float, str)
"""Types of arguments that a message writes out"""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Placed(Protocol):
    """What knows where a rank's data lies: :class:`xffl.distributed.DistributedState`."""

    @property
    def data_place(self) -> DataPlace:
        """The cells that samples are dealt out to, and the rank's number among their ranks."""
        ...


def place_of(state: Placed | DataPlace) -> DataPlace:
    """Return where a rank's data lies.

    :param state: The state of this process, or a place, where there is no state.
    :return: The place.
    :raises ConfigError: if it is neither.
    """
    place = state if isinstance(state, DataPlace) else getattr(state, "data_place", None)
    if not isinstance(place, DataPlace):
        raise ConfigError(
            f"state must be the DistributedState of xffl.session() (of a trainer or world: its .state), got a "
            f"{type(state).__name__}; where there is none, give DataPlace(topology, rank)"
        )
    return place


Cells = int | Placed | DataPlace
"""How many cells there are: the state, which knows it, or the number."""


def count_cells(cells: Cells) -> int:
    """Return how many cells there are.

    :param cells: The state, a place, or the number.
    :return: The number, at least 1.
    :raises ConfigError: if it is none of these, or a topology, which has the cells of one job only.
    """
    if isinstance(cells, Topology):
        raise ConfigError(
            "cells is a topology, which has the cells of one job: where each cell is a job of its own, it has one; "
            "give the state, or state.cells"
        )
    if isinstance(cells, DataPlace) or hasattr(cells, "data_place"):
        return place_of(cells).cells
    return integer("cells", cells)


def takes_state(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Refuse a topology and a rank in place of the state, and show the line to write.

    A topology has the ranks of its own job: where each cell is a job of its own, every cell would be dealt all samples.
    """
    names = list(inspect.signature(call).parameters)
    is_method = names[0] == "self"

    @wraps(call)
    def checked(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        given = (*args, *options.values())
        if any(isinstance(argument, Topology) for argument in given) or {"topology", "rank"} & options.keys():
            name = type(args[0]).__name__ if is_method else call.__name__
            kept = [
                f"{key}={value!r}" if isinstance(value, SHOWN) else f"{key}=..."
                for key, value in options.items()
                if key not in (names[is_method], "state", "topology", "rank")
            ]
            line = ", ".join([*names[is_method : is_method + 1], "state", *kept])
            raise ConfigError(
                f"{name} was given a topology and a rank, which are those of one job: where each cell is a job of its "
                f"own, all cells would train on the same samples; give the state, which knows all cells: {name}({line})"
            )
        return call(*args, **options)

    return checked


def place_along(topology: Topology, rank: int, axes: str | tuple[str, ...]) -> tuple[int, int, bool]:
    """Return a rank's place along those axes of its cell's shape whose names begin so, and how many places there are.

    The third value tells whether it is the first of the ranks at this place. Without a shape each rank has its own.
    """
    at = topology.coordinates(rank)
    if topology.cell_shape is None:
        return at.local_rank, topology.sizes[at.cell], True
    place, places, stride, is_first = 0, 1, 1, True
    for name, given in reversed(tuple(dict(topology.cell_shape).items())):
        size = topology.replicas(at.cell) if given == -1 else given
        along = at.local_rank // stride % size
        if name.startswith(axes):
            place += along * places
            places *= size
        elif along:
            is_first = False
        stride *= size
    return place, places, is_first


def share_of(place: DataPlace) -> tuple[int, int]:
    """Return which share of its cell's samples a rank takes, and into how many shares they are cut.

    Every rank takes a share of its own, whether its cell is cut into replicas, shards or both. In cells with a shape,
    ranks that differ only along other axes than ``dp_*`` take the same samples.
    """
    return place_along(place.topology, place.rank, DATA_AXES)[:2]


def cell_shares(topology: Topology) -> list[int]:
    """Return into how many shares each cell's samples are cut."""
    return [share_of(DataPlace(topology, topology.offsets[cell]))[1] for cell in range(topology.cells)]
