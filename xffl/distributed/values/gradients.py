"""Marks on parameters whose gradients are reduced over ranks by something that the parameter itself does not tell.

Rounds refuse a model whose ranks of one cell train apart (:mod:`xffl.aggregation.engine.planning.coverage`). A DTensor
tells its mesh and DistributedDataParallel its group; whoever reduces gradients in another way, such as a hook, leaves a
mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from xffl.errors import ConfigError

__all__ = ["REDUCTION_MARK", "GradientReduction", "find_reduction", "mark_reduced"]

REDUCTION_MARK = "_xffl_gradient_reduction"
"""The attribute of a parameter that holds its mark; a parameter without a mark has none"""


@dataclass(frozen=True)
class GradientReduction:
    """The ranks that a parameter's gradient is reduced over, and what does it.

    A copy of a parameter has none of the hooks of the original, so copying and pickling a mark leaves ``None``.
    """

    ranks: tuple[int, ...]
    """Ranks of the world, this one included, in ascending order"""
    by: str
    """What reduces the gradient, for messages: ``DeepSpeed``"""

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def mark_reduced(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], ranks: dist.ProcessGroup | Iterable[int], *, by: str
) -> None:
    """Note that the gradients of parameters are the same on these ranks before each optimizer step; local.

    The note lies on the parameter objects: it stays when the model is wrapped, moved or its values are loaded, and is
    gone for a parameter that takes the place of one of these, and for copies, which are not reduced either.

    :param parameters: A parameter, several, or a module: those that train in it now.
    :param ranks: The ranks of the world that the gradients are reduced over, this one included; or their group.
    :param by: What reduces them, for messages.
    :raises ConfigError: if this rank is not among the ranks.
    """
    reduced = dist.get_process_group_ranks(ranks) if isinstance(ranks, dist.ProcessGroup) else list(ranks)
    own = dist.get_rank() if dist.is_initialized() else 0
    if own not in reduced:
        raise ConfigError(f"gradients reduced by {by} over ranks {reduced} are not those of rank {own}; give its ranks")
    mark = GradientReduction(tuple(sorted(reduced)), by)
    chosen: list[torch.Tensor]
    if isinstance(parameters, nn.Module):
        chosen = [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    else:
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in chosen:
        setattr(parameter, REDUCTION_MARK, mark)


def find_reduction(parameter: torch.Tensor) -> GradientReduction | None:
    """Return what :func:`mark_reduced` has noted for a parameter, if anything; local."""
    mark: GradientReduction | None = getattr(parameter, REDUCTION_MARK, None)
    return mark
