"""Reports of collectives that a script makes over all cells (``XFFL_CHECK_WORLD=1``).

In a federation torch.distributed's default group holds the ranks of all cells, so a collective without ``group=``
crosses the slow link, and mixes what each cell is to find by itself. While a check is installed, torch's public
collectives are wrapped wherever a module holds them; what xffl calls itself is not reported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler

from xffl.callers import find_caller

__all__ = ["WorldCheck", "is_world"]

_NO_COLLECTIVES = frozenset(
    {"destroy_process_group", "shrink_group", "new_subgroups"}
    | {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "isend_inplace", "irecv_inplace"}
)
"""Functions with a group that are no collectives, beside those that look something up (``get_``)."""

_CHECKPOINT_MODULES = (
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
)
_CHECKPOINT_CALLS = ("async_save", "load", "save")
"""Functions with ``process_group`` that call collectives in the place of the script."""

Collective = Callable[..., Any]


class WorldCheck:
    """Report collectives of the script on the default group, once a line of it, from one rank.

    :param cells: How many cells the default group holds.
    :param is_speaker: Whether this rank reports; the wrappers are the same on all.
    """

    def __init__(self, cells: int, *, is_speaker: bool) -> None:
        self._cells = cells
        self._is_speaker = is_speaker
        self._told: set[str] = set()
        self._originals: dict[int, Collective] = {}
        wrappers: dict[int, Collective] = {}
        for function in _collectives():
            wrapper = self._wrap(function)
            wrappers[id(function)] = wrapper
            self._originals[id(wrapper)] = function
        self._wrappers = [*wrappers.values()]  # their ids stay theirs
        _replace(wrappers)
        self._sampler_init = DistributedSampler.__init__
        self._watch_samplers()

    def remove(self) -> None:
        """Put torch's functions back, also where they were imported meanwhile."""
        _replace(self._originals)
        DistributedSampler.__init__ = self._sampler_init  # type: ignore[method-assign]

    def _wrap(self, function: Collective) -> Collective:
        name = function.__name__
        parameters = [*inspect.signature(function).parameters]
        position = parameters.index("group")
        # src and dst, and their default 0, count ranks of the world: in other cells that rank is not in the group.
        roots = "".join(f" and {root}=0" for root in ("group_src", "group_dst") if root in parameters)
        advice = f"give group=state.federation{roots} for the ranks of this cell"

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                group = args[position] if position < len(args) else kwargs.get("group")
                if is_world(group):
                    self._tell(f"calls {name}", "over", advice)
            return function(*args, **kwargs)

        return wrapper

    def _watch_samplers(self) -> None:
        """Report samplers that deal samples out to the ranks of the default group."""
        original = self._sampler_init
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(sampler: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(sampler, *args, **kwargs).arguments
            if given.get("num_replicas") is None:
                self._tell(
                    "makes a DistributedSampler",
                    "for",
                    "give num_replicas=state.cell_size and rank=state.cell_rank, and data of the cell's own, or use "
                    "xffl's CellLoader",
                )
            original(sampler, *args, **kwargs)

        DistributedSampler.__init__ = init  # type: ignore[assignment,method-assign]

    def _tell(self, what: str, preposition: str, advice: str) -> None:
        frame = inspect.currentframe()
        wrapper = None if frame is None else frame.f_back
        caller = find_caller(None if wrapper is None else wrapper.f_back)
        if caller.is_own or caller.place is None or caller.place in self._told:
            return
        self._told.add(caller.place)
        if self._is_speaker:
            if (checkpoint_call := _find_checkpoint_call(wrapper, caller.place)) is not None:
                what += f" (in {checkpoint_call} of torch.distributed.checkpoint)"
                advice = f"give process_group=state.federation to {checkpoint_call}, and a folder to each cell"
            print(
                f"xffl: {caller.place} {what} {preposition} the default group, the ranks of all {self._cells} cells; "
                f"{advice} (XFFL_CHECK_WORLD=1 reports this)",
                file=sys.stderr,
                flush=True,
            )


def _find_checkpoint_call(frame: FrameType | None, place: str) -> str | None:
    """Return the function of torch's distributed checkpoints, ``save`` or ``load``, that a line of the script calls.

    :param frame: Where a collective is called.
    :param place: The line of the script, ``FILE:LINE``.
    :return: Its name; ``None`` where the collective is not in one.
    """
    found: str | None = None
    while frame is not None and f"{frame.f_code.co_filename}:{frame.f_lineno}" != place:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") in _CHECKPOINT_MODULES and name in _CHECKPOINT_CALLS:
            found = name
        frame = frame.f_back
    return found


def is_world(group: object) -> bool:
    """Tell whether a group, in any form that torch's collectives take, is the default one; local."""
    world = dist.group.WORLD
    if group is None or world is None:
        return group is None
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        mesh, dimension = group
        return bool(mesh.get_group(dimension) is world)
    if isinstance(group, DeviceMesh):
        return group.ndim == 1 and group.get_group() is world
    if isinstance(group, str):
        return group == world.group_name
    if isinstance(group, list):
        return sorted(group) == [*range(dist.get_world_size())] if all(isinstance(one, int) for one in group) else False
    return group is world


def _collectives() -> Iterator[Collective]:
    """Yield torch's public collectives, those that are no methods."""
    modules: list[tuple[ModuleType, list[str]]] = [(distributed_c10d, [*distributed_c10d.__all__])]
    # The functional ones stand in a module with a private name; where it is gone they are in a public one.
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None:
        modules.append((functional, [*vars(functional)]))
    for module, names in modules:
        for name in names:
            function = vars(module).get(name)
            if name.startswith(("_", "get_")) or name in _NO_COLLECTIVES or type(function) is not FunctionType:
                continue
            if function.__module__ == module.__name__ and "group" in inspect.signature(function).parameters:
                yield function


def _replace(functions: dict[int, Collective]) -> None:
    """Put other functions in the place of those with these ids, in all modules."""
    # Not isinstance(): it asks the object for its class, and objects that stand for others then load or warn.
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if isinstance(module, ModuleType) and isinstance(names, dict):
            for name, value in [*names.items()]:
                if type(value) is FunctionType and id(value) in functions:
                    names[name] = functions[id(value)]
