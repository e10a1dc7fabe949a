"""The check that the ranks of a cell train one model: who reduces each parameter's gradient, over which ranks.

A round takes each shard from one rank of a cell and gives the result to all ranks that hold it. If ranks of a cell
trained independently, the result would be a patchwork of their models; if gradients were reduced across cells, there
would be only one cell. Neither is visible in a loss curve, so both are refused when the model is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from xffl.aggregation.engine.planning.ddp_parameters import reduced_parameters
from xffl.aggregation.engine.planning.tensors import tensors_of
from xffl.distributed.agreement.consistency import ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.gradients import REDUCTION_MARK, find_reduction
from xffl.errors import ConfigError

__all__ = ["check_gradients"]

REMEDY = (
    "spread the whole model by xffl.shard(model, state{whole}), or wrap it by DistributedDataParallel(model, "
    "process_group=state.federation), before the Aggregator or FederatedScaling is made, and give them what "
    "DistributedDataParallel returned, not the module in it; freeze what does not train, such as an average of the "
    "weights, by requires_grad_(False); policy 'local' leaves a parameter out of rounds, but a cell trains it as one, "
    "too; where a framework wraps the model by itself, start with xffl exec --isolate, give what it has wrapped, and "
    "take the state from xffl.adopt(); where the training loop reduces gradients over the cell itself, say so by "
    "Aggregator(..., gradients_reduced_by_caller=True), or FederatedScaling(..., "
    "aggregator={'gradients_reduced_by_caller': True})"
)


class Reduction(NamedTuple):
    """The ranks over which a parameter's gradient is reduced, and what reduces it."""

    ranks: frozenset[int]
    by: str


def check_gradients(
    model: nn.Module,
    state: DistributedState,
    *,
    is_reduced_by_caller: bool,
    holders_of: Callable[[str], Collection[int]] | None = None,
) -> None:
    """Raise unless the gradients of all trainable parameters are reduced over this rank's cell, and no further.

    Local. The ranks come from the mesh of a DTensor, from the DistributedDataParallel module that wraps the parameter,
    and from :func:`xffl.distributed.values.gradients.mark_reduced`. ``holders_of`` returns the ranks of the cell that
    hold a tensor, if not all of them do (pipeline stages).
    """
    topology, rank = state.topology, dist.get_rank()
    cell = frozenset(topology.federation(topology.cell_of(rank)))
    wrapped = _ddp_reductions(model)
    meshes: dict[DeviceMesh, frozenset[int]] = {}
    for name, module, leaf, tensor in tensors_of(model):
        if leaf not in module._parameters:
            continue
        reductions = list(wrapped.get(id(tensor), ()))
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            ranks = meshes.setdefault(mesh, frozenset(mesh.mesh.flatten().tolist()))
            reductions.append(Reduction(ranks, "the mesh of its DTensor"))
        if hasattr(tensor, REDUCTION_MARK) and (mark := find_reduction(tensor)) is not None:
            reductions.append(Reduction(frozenset(mark.ranks), mark.by))
        for reduction in reductions:
            _check_inside(name, reduction, cell, state)
        if not tensor.requires_grad or is_reduced_by_caller:
            continue
        needed = cell if holders_of is None else frozenset(holders_of(name))
        if (reached := _count_reached(reductions, needed)) < len(needed):
            raise ConfigError(
                _uncovered(name, tensor=tensor, reductions=reductions, reached=reached, needed=len(needed))
            )


def _ddp_reductions(model: nn.Module) -> Mapping[int, list[Reduction]]:
    """Return, by the id of each parameter whose gradient a DDP module reduces, the ranks of its process group."""
    reductions: dict[int, list[Reduction]] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        ranks = _ranks_of(module.process_group)
        if ranks is None:
            continue
        for parameter in reduced_parameters(prefix, module):
            reductions.setdefault(id(parameter), []).append(Reduction(ranks, "DistributedDataParallel"))
    return reductions


def _ranks_of(group: dist.ProcessGroup) -> frozenset[int] | None:
    """Return a group's global ranks; ``None`` if torch does not know the group (torchft's managed process group).

    Code that passes such a group to DDP reduces gradients in a communication hook, and marks the parameters.
    """
    try:
        return frozenset(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return None


def _check_inside(name: str, reduction: Reduction, cell: frozenset[int], state: DistributedState) -> None:
    """Raise if gradients would be reduced across cells in every step."""
    if reduction.ranks <= cell:
        return
    cells = sorted({state.topology.cell_of(rank) for rank in reduction.ranks})
    raise ConfigError(
        f"the gradient of parameter {name!r} is reduced over {ranks_text(reduction.ranks)} (by {reduction.by}), which "
        f"are of cells {', '.join(map(str, cells))}: it would cross between cells in every step, and the cells would "
        "be one; a cell's gradients stay in the cell: give DistributedDataParallel(model, "
        "process_group=state.federation), fully_shard(model, mesh=state.fsdp_mesh), or xffl.shard(model, state); where "
        "a framework wraps the model by itself, make each cell its default group: xffl exec --isolate"
    )


def _count_reached(reductions: Collection[Reduction], needed: frozenset[int]) -> int:
    """Return how many of the needed ranks the reductions connect with this one.

    Groups that share only this rank are the axes of a grid, whose sizes multiply: if each of b ranks is also in a group
    of a ranks that contains none of the others, at least a * b ranks are connected.
    """
    axes: list[frozenset[int]] = []
    for reduction in reductions:
        axis = reduction.ranks & needed
        for other in [known for known in axes if len(known & axis) > 1]:
            axes.remove(other)
            axis |= other
        axes.append(axis)
    return prod(len(axis) for axis in axes)


def _uncovered(name: str, tensor: torch.Tensor, reductions: Collection[Reduction], reached: int, needed: int) -> str:
    what = "a DTensor" if isinstance(tensor, DTensor) else "a plain tensor"
    if reductions:
        known = ", ".join(f"over {len(reduction.ranks)} ranks by {reduction.by}" for reduction in reductions)
        why = f"its gradient is reduced {known}, which reaches {reached} of the {needed} ranks of a cell"
    else:
        why = f"nothing reduces its gradient over the {needed} ranks of a cell (neither DDP nor FSDP2 has it)"
    # FSDP cannot cut a scalar, so a script that shards by itself may have ignored it.
    whole = f", keep_whole=[{name!r}]" if tensor.ndim == 0 else ""
    return f"parameter {name!r} is {what}, and {why}: they would train it apart; {REMEDY.replace('{whole}', whole)}"
