"""The process groups inside one cell that the rounds of an elastic federation use.

They are made before the cell meets others, and given back after it has left them. In a try they could not be: one may
break on some ranks of a cell before a group was made and on others after, and then these ranks have made unlike numbers
of groups, by which torch tells groups apart.

Over NCCL a try that broke may have left messages that some ranks of the cell have given to a group and others not. The
next round would take them for its own, so the cell then makes other groups (:meth:`ElasticCellGroups.renew`).
"""

from __future__ import annotations

import glob
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from xffl.aggregation.engine.holder_groups import make_holder_groups
from xffl.aggregation.engine.planning.replica_tensors import describe_rank_tensors, gather_replica_tensors
from xffl.aggregation.engine.planning.tensors import Manifest, Pattern
from xffl.aggregation.engine.several_worlds.cell_groups import make_cell_groups
from xffl.aggregation.engine.weights.weight_keepers import read_weights
from xffl.aggregation.federations.fixed_tensors import find_fixed
from xffl.distributed.agreement.consistency import (
    barrier,
    cell_gpu,
    connect,
    gather_objects,
    run_on_all_ranks,
    sends_from_gpu,
)
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.failures.closed_connections import close_connections
from xffl.distributed.groups import Groups, destroy_group
from xffl.errors import ConfigError

__all__ = ["ElasticCellGroups"]


class ElasticCellGroups:
    """The groups inside a cell that is a world of its own; collective over the cell.

    :param model: The model that trains.
    :param state: The state of the cell's world.
    :param policies: What the user has chosen for the model's tensors.
    :param extra: Tensors that are averaged beside the model's.
    :param overlaps: Whether rounds go on during local steps, whose own collectives must not meet theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        state: DistributedState,
        *,
        policies: Mapping[Pattern, str] | None,
        extra: nn.Module | None,
        overlaps: bool,
    ) -> None:
        self._state = state
        self._gpu = cell_gpu(state)
        self._is_apart = overlaps or self._gpu is not None
        self._holder_sets: frozenset[tuple[int, ...]] = frozenset()
        if state.topology.cell_shape is not None:
            self._holder_sets = _find_holders(model, state, policies, extra)
        self._made: list[dist.ProcessGroup] = []
        self.by_kind: Groups
        """All ranks of the cell, and those that hold this rank's shard"""
        self.holders: Mapping[tuple[int, ...], dist.ProcessGroup]
        """By the shards that hold the same elements, where they are several but not all, the ranks that hold them"""
        self._make()

    @property
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups that were made for this alone, placeholders too."""
        return tuple(self._made)

    def _make(self) -> None:
        """Make the groups, and connect those that send from GPUs: in a try some ranks may not come to it."""
        state = self._state
        self.by_kind = make_cell_groups(state, self._made, overlaps=self._is_apart)
        self.holders = make_holder_groups(
            self._create, topology=state.topology, rank=dist.get_rank(), holders=self._holder_sets
        )
        if self._gpu is not None:
            used = [handles[0] for handles in self.by_kind.values() if handles] + [*self.holders.values()]
            connect([group for group in used if group.size() > 1 and sends_from_gpu(group)], self._gpu)

    def _create(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        self._made.append(self._state.create_process_group(ranks, name))
        return self._made[-1]

    def close_connections(self) -> None:
        """Close this rank's connections to its cell, which ends by that: no rank waits for it in a round; local."""
        for group in {*[handles[0] for handles in self.by_kind.values() if handles], *self.holders.values()}:
            close_connections(group)

    def renew(self) -> bool:
        """Make other groups after a round that did not come to its end, where NCCL may still hold messages of it.

        Collective over the cell. Tells whether there are other groups now.
        """
        if self._gpu is None:
            return False
        for group in self._made:
            group.abort()
        self.give_back()
        self._make()
        return True

    def give_back(self) -> None:
        """Destroy what was made, once no rank uses it; collective over the cell. A second call does nothing."""
        if not self._made:
            return
        barrier()  # nobody still listens to a group that another rank destroys
        while self._made:
            destroy_group(self._made.pop())


def _find_holders(
    model: nn.Module, state: DistributedState, policies: Mapping[Pattern, str] | None, extra: nn.Module | None
) -> frozenset[tuple[int, ...]]:
    """Return the sets of shards that hold the same part of what rounds move, or newcomers take over once.

    Collective over the cell.
    """
    mesh = state.hsdp_mesh
    assert mesh is not None, "a state with a cell shape has replicas"
    with run_on_all_ranks("models", convert=_unreadable):
        weights, _ = read_weights(model)
        names = [name for several in find_fixed(model, policies, with_buffers=True) for name in several]
    # Stages of a pipeline have unlike tensors, and are to be given the same policies.
    moving: dict[Pattern, str] = {
        glob.escape(name): "first" for name in sorted({name for held in gather_objects(names) for name in held})
    }
    with run_on_all_ranks("models", convert=_unreadable):
        manifest = Manifest(weights, moving | dict(policies or {}), extra=extra)
        at = state.topology.coordinates(dist.get_rank())
        rank_tensors = describe_rank_tensors(manifest, state.topology, at, 0)
    with run_on_all_ranks("models"):
        return gather_replica_tensors(rank_tensors, mesh.get_group(1)).holders


def _unreadable(wrong: Exception) -> ConfigError:
    return ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
