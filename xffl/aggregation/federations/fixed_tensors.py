"""What rounds of an elastic federation do not move, and its cells have alike nevertheless.

Frozen parameters and buffers that no checkpoint has stay as they are in a round. So do, with fragments, the buffers of
those that it does not move. A cell that comes to the others takes theirs over: it may have started from other random
numbers. What the user has given the policy ``local`` is a cell's own.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.engine.decision.elastic_votes import ElasticCoordinator, RoundInDoubt
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.tensors import (
    Pattern,
    check_tensor,
    choose_by_pattern,
    default_policy,
    owners_of,
    tensors_of,
    ties_of,
)
from xffl.aggregation.engine.voting.votes import Seal
from xffl.distributed.collectives import all_gather_json
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["FixedTensors", "find_fixed"]


class FixedTensors:
    """Tensors of a model that newcomers to a federation take over once, from a cell that trains already.

    :param model: The model.
    :param names: All names of these tensors on this rank.
    """

    def __init__(self, model: nn.Module, names: Collection[Sequence[str]]) -> None:
        self._model = model
        self._names = [list(several) for several in names]

    def take_over(self, scope: RoundScope, source: int, targets: Collection[int]) -> list[str]:
        """Bring to some cells what another one holds otherwise than they do; collective over the scope.

        Where all cells hold the same bits this moves a few numbers.

        :param scope: The ranks of all cells that have met, with the groups inside this one.
        :param source: The cell that gives, as the scope's topology counts.
        :param targets: The cells that take over.
        :return: The names of what has moved.
        :raises RoundBroken: if a rank is lost meanwhile.
        """
        told = all_gather_json(self._names, torch.device("cpu"), scope.world)
        names = sorted({tuple(several) for of_rank in told for several in of_rank})
        if not names:
            return []
        # What is moved here is no round of the run: the journal gets no record of it.
        coordinate = partial(ElasticCoordinator, seal=lambda _: Seal.STANDS)
        scope = replace(scope, arena=None, coordinate=coordinate, goes_on=True)
        unequal = self._make_aggregator(scope, names).find_unequal()
        differing = [several for several in names if set(several) & set(unequal)]
        if not differing:
            return []
        moving = self._make_aggregator(scope, differing)
        cell = scope.topology.cell_of(scope.rank)
        kept = [] if cell == source or cell in targets else self._copies(differing)
        try:
            moving.participate(RoundInput(is_absent=True, source=source))
        except RoundInDoubt as doubt:  # no round of the run: it is simply done again
            raise RoundBroken(str(doubt)) from doubt
        with torch.no_grad():
            for tensor, copy in kept:
                tensor.copy_(copy)
        return [several[0] for several in differing]

    def _make_aggregator(self, scope: RoundScope, names: Sequence[Sequence[str]]) -> Aggregator:
        """Return what moves these tensors and no others."""
        policies: dict[Pattern, str] = {glob.escape(name): "first" for several in names for name in several}
        policies["*"] = "local"
        return Aggregator(self._model, scope, policies=policies, gradients_reduced_by_caller=True)  # type: ignore[arg-type]

    def _copies(self, names: Sequence[Sequence[str]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's part of these tensors, each with a copy."""
        wanted = {name for several in names for name in several}
        held = [local_tensor(tensor).detach() for name, _, _, tensor in tensors_of(self._model) if name in wanted]
        return [(tensor, tensor.clone()) for tensor in held]


def find_fixed(
    model: nn.Module, policies: Mapping[Pattern, str] | None, *, with_buffers: bool = False
) -> list[list[str]]:
    """Return all names of each tensor that no round moves, though no pattern of the policies says so; local.

    With ``with_buffers`` those of the buffers that rounds move, too.
    """
    fixed: list[list[str]] = []
    ties = ties_of(model)
    for name, module, leaf, tensor in tensors_of(model):
        owners = {other: owners_of(model, other) for other in ties[id(tensor)]}
        chosen = choose_by_pattern("policies", owners, policies or {}, set())
        policy = chosen or default_policy(module, leaf, tensor)
        is_moving_buffer = policy != "local" and leaf in module._buffers
        if (chosen is None and policy == "local") or (with_buffers and is_moving_buffer):
            try:
                check_tensor(name, "first", tensor)
            except ConfigError:  # it cannot be moved, and need not be: its policy is that of one that stays
                continue
            fixed.append(sorted(owners))
    return fixed
