"""Which ranks of a cell hold other bits of what they should hold alike, and by how much they differ."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from xffl.aggregation.engine.groups import RoundGroups, RoundScope
from xffl.distributed.agreement.consistency import control_device, message_device, ranks_text
from xffl.distributed.collectives import all_gather_json
from xffl.errors import RoundError

__all__ = ["ReplicasDiffer", "UnequalReplicas"]

TOLERANCE = 1e-3
"""How far replicas on unlike processors may be apart, of the largest value of the tensor."""


@dataclass(frozen=True)
class Mismatch:
    """Ranks of one cell that should hold the same elements of a tensor, by what they hold."""

    name: str
    cell: int
    shards: tuple[int, ...]
    """The shards that these elements are of"""
    ranks: tuple[tuple[int, ...], ...]


class ReplicasDiffer(RoundError):
    """Report cells whose ranks hold other values of what they should hold alike; raised on all ranks of the round.

    :param mismatches: The first tensor that differs in each of these cells.
    :param by: How far it is apart, where the ranks have unlike processors.
    """

    def __init__(self, mismatches: Mapping[int, Mismatch], by: str = "") -> None:
        super().__init__(_refusal(next(iter(mismatches.values())), by))
        self._mismatches = mismatches
        self._by = by

    @property
    def cells(self) -> frozenset[int]:
        """The cells, as the round counts them."""
        return frozenset(self._mismatches)

    def of_cell(self, cell: int, *, number: int, first: int) -> RoundError:
        """Return what one of these cells raises where it ends by itself.

        :param cell: The cell, as the round counts it.
        :param number: Its number in the federation.
        :param first: Offset from a rank of the round to a rank of the cell's own world.
        :return: The error, with the cell's own ranks.
        """
        mismatch = self._mismatches[cell]
        ranks = tuple(tuple(rank + first for rank in alike) for alike in mismatch.ranks)
        return RoundError(_refusal(replace(mismatch, cell=number, ranks=ranks), self._by))


class UnequalReplicas:
    """The replicas of cells in which some have told other sums of their values in a first round.

    :param scope: The ranks of the round.
    :param round_groups: Their groups.
    :param processor: A number that is the same on ranks whose training steps give the same bits, of this rank.
    :param held: The name of each parameter that is compared, the shards that hold its elements alike, and their sum;
        nothing where this rank's cell is none of these.
    :param copies: The values that were compared, by name, where the ranks of this cell have unlike processors.
    """

    def __init__(
        self,
        scope: RoundScope,
        round_groups: RoundGroups,
        *,
        processor: float,
        held: Sequence[tuple[str, tuple[int, ...], int]],
        copies: Mapping[str, torch.Tensor],
    ) -> None:
        self._scope = scope
        self._round_groups = round_groups
        self._processor = processor
        self._held = held
        self._copies = copies

    def explain(self, cells: Collection[int]) -> None:
        """Raise for the first tensor that differs inside a cell, or write how little it does; collective."""
        mismatches, processors = self._find_mismatches(cells)
        refused: dict[int, Mismatch] = {}
        for one in mismatches:
            kinds = [{processors[rank] for rank in ranks} for ranks in one.ranks]
            if any(one_kind & other for one_kind, other in itertools.combinations(kinds, 2)):
                refused.setdefault(one.cell, one)
        if refused:
            raise ReplicasDiffer(refused)
        world = self._scope.world
        mine = [
            (index, self._distance(one))
            for index, one in enumerate(mismatches)
            if any(self._scope.rank in ranks for ranks in one.ranks)
        ]
        told = itertools.chain.from_iterable(all_gather_json(mine, control_device(world), world))
        distances: dict[int, float] = dict(told)
        index, worst = max(distances.items(), key=lambda pair: pair[1], default=(0, 0.0))
        if worst > TOLERANCE:
            mismatch = mismatches[index]
            raise ReplicasDiffer({mismatch.cell: mismatch}, f", by {worst:.1e} of the largest value,")
        if self._scope.rank == 0:
            print(
                f"xffl: in cells {', '.join(map(str, cells))} replicas on unlike processors hold slightly different "
                f"values (by {worst:.1e} of the largest value of {mismatches[index].name!r} at most); rounds make them "
                "equal",
                file=sys.stderr,
                flush=True,
            )

    def _find_mismatches(self, cells: Collection[int]) -> tuple[list[Mismatch], list[float]]:
        """Return what differs, and the kind of each rank's processor; collective over the ranks of the round."""
        topology, world = self._scope.topology, self._scope.world
        told = all_gather_json((self._processor, self._held), control_device(world), world)
        mismatches = []
        for cell in cells:
            by_place: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = {}
            for rank in topology.federation(cell):
                for name, place, value in told[rank][1]:
                    by_place.setdefault((name, tuple(place)), {}).setdefault(value, []).append(rank)
            for (name, place), by_value in sorted(by_place.items()):
                if len(by_value) > 1:
                    mismatches.append(Mismatch(name, cell, place, tuple(map(tuple, by_value.values()))))
        return mismatches, [processor for processor, _ in told]

    def _distance(self, mismatch: Mismatch) -> float:
        """Return how far ranks are apart, of the largest value; collective over those that hold these elements."""
        groups = self._round_groups
        several = groups.holders.get(mismatch.shards, groups.cell)
        group = groups.replica if len(mismatch.shards) == 1 else several
        assert group is not None, "there are several ranks"
        values = self._copies[mismatch.name]
        dtype = torch.promote_types(values.dtype, torch.float32)
        low = values.to(message_device(values.device, group), dtype).contiguous()
        high = low.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        largest = torch.maximum(low.abs(), high.abs()).max().item()
        return (high - low).max().item() / largest if largest else 0.0


def _refusal(mismatch: Mismatch, by: str = "") -> str:
    shown = " and ".join(map(ranks_text, mismatch.ranks[:4]))
    return (
        f"parameter {mismatch.name!r} is not the same on {shown} of cell {mismatch.cell}{by} which hold copies of it: "
        "they train apart, or have started from different values; all ranks keep their weights. Reduce gradients over "
        "the ranks of a cell and start from the same weights, by xffl.shard(model, state) or "
        "DistributedDataParallel(model, process_group=state.federation)"
    )
