"""What is compared once, in an aggregator's first round: the replicas inside each cell, and the cells with each other.

Each rank tells two sums of its values' bits with its status in the vote, so that nothing more is sent where all is as
it should be; reading the values takes about 10 ms for 100 MB. Ranks of a cell that hold the same part of a parameter
hold the same bits if their gradients were reduced over the cell. Cells that all hold the same bits after local steps
have trained on the same data, or their gradients have crossed; unless the steps changed nothing, as those of a learning
rate of 0 that warms up. Elastic cells, whose values before their steps are not known in the first round, are judged by
the second.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from xffl.aggregation.engine.groups import RoundGroups, RoundScope
from xffl.aggregation.engine.planning.replica_tensors import ReplicaTensors
from xffl.aggregation.engine.planning.tensors import Axis, Division, Manifest, ModelTensor
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.voting.votes import RoundStatus
from xffl.checks import group as group_pairs
from xffl.distributed.agreement.consistency import control_device
from xffl.errors import RoundError

__all__ = ["FirstRound", "ValueDigest"]

PIECE = 2**16
"""Elements that are summed up at a time on a CPU: their sum in 64 bits stays in the cache."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SALT_BYTES = 16


@dataclass(frozen=True)
class ValueDigest:
    """What a rank tells of the parameters that train and are averaged; zeros from the second round on."""

    held: int = 0
    """Of all of its elements: equal on the replicas of a shard"""
    shared: int = 0
    """Of the elements that several shards of a replica hold alike: equal on these"""
    is_trained: bool = False
    """Whether the values have changed since the aggregator was made or has loaded a state; that steps were made, where
    what they started from is not known"""


@dataclass
class FirstRound(RoundStage):
    """The comparison in the first round; collective calls are those of the round's own ranks.

    Making one is collective over the cell with ``is_private``, or where the cell has several ranks: 16 bytes.
    """

    manifest: Manifest
    scope: RoundScope
    round_groups: RoundGroups
    axes: Sequence[Axis]  # of this rank's cell
    replica_tensors: ReplicaTensors | None
    processor: float  # xffl.aggregation.engine.alike.arithmetic_check.processor_number, of this rank
    is_private: bool  # whether nothing about single cells' values may be told to others
    is_over: bool = field(default=False, init=False)
    _told: ValueDigest = field(default_factory=ValueDigest, init=False)

    def __post_init__(self) -> None:
        topology = self.scope.topology
        self._at = topology.coordinates(self.scope.rank)
        self._entries = [entry for entry in self.manifest.moving if entry.is_stepped]
        self._shared = self._find_shared()
        self._sums: list[int] = []
        self._copies: dict[str, torch.Tensor] = {}
        self._is_unlike = self._find_unlike()
        self._salt = self._make_salt() if self.is_private else b""
        # Elastic cells make an aggregator right before a round; how many steps were made is told then.
        self._start = None if self.scope.goes_on else self._read_sums()
        self._is_second = False  # whether cells without a start were equal in the first round: the same on all ranks

    # Places -----------------------------------------------------------------------------------------------------------

    def _find_shared(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Return, for each shard of this rank's cell, the tensors that other shards hold alike, with these shards."""
        shards = tuple(range(self.scope.topology.shards(self._at.cell)))
        found: dict[int, dict[str, tuple[int, ...]]] = {shard: {} for shard in shards}
        tensors = self.replica_tensors
        infos = self.manifest.moving if tensors is None else tensors.moving
        axes = self.axes if tensors is None else tensors.axes
        for index, (info, axis) in enumerate(zip(infos, axes, strict=True)):
            holders = [shards] if axis is Division.REPLICATED else []
            if tensors is not None:
                holders += [part.holders for part in tensors.parts[index]]
            for several in holders:
                for shard in several if len(several) > 1 else ():
                    found[shard][info.name] = several
        return found

    def _place_of(self, entry: ModelTensor) -> tuple[int, ...]:
        return self._shared[self._at.shard].get(entry.name, (self._at.shard,))

    @property
    def _is_of_cells(self) -> bool:
        """Whether what meets here are cells, not units of several cells, whose ranks have averaged in rounds below."""
        if self.scope.cross_world is not None:
            return True
        topology, first = self.scope.state.topology, self.scope.first
        last = first + self.scope.topology.world_size - 1
        return topology.cell_of(last) - topology.cell_of(first) + 1 == self.scope.topology.cells

    # Reading ----------------------------------------------------------------------------------------------------------

    def note_start(self) -> None:
        """Take the model as it is for the start of training; local, after a state was loaded."""
        if not self.is_over and not self.scope.goes_on:
            self._start = self._read_sums()

    def end(self) -> None:
        """Note that there was a round; take the model behind it for the start of training, where that is not known."""
        self.scope.state.activity.note_round()
        if self._is_second and not self.is_over:
            self._start = self._read_sums()

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Tell what this rank has found in its values; zeros where it could not look at them."""
        return asdict(self._told)

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Forget what was told of an earlier try."""
        self._told = ValueDigest()

    def read(self, *, has_steps: bool) -> None:
        """Look at the values that are compared."""
        if self.is_over:
            return
        self._sums = self._read_sums()
        if self._is_unlike:  # the steps of a delayed round go on while it is compared
            self._copies = {entry.name: entry.elements(0).clone() for entry in self._entries}
        # Without a start: in a second round, where the first one was not written.
        is_changed = not self._is_second if self._start is None else self._sums != self._start
        shared = self._shared[self._at.shard]
        self._told = ValueDigest(
            held=self._seal(_fold(zip(self._entries, self._sums, strict=True))),
            shared=self._seal(
                _fold(pair for pair in zip(self._entries, self._sums, strict=True) if pair[0].name in shared)
            ),
            is_trained=has_steps and is_changed,
        )

    @torch.no_grad()
    def _read_sums(self) -> list[int]:
        # Scratch of each tensor's own would lie between sums that stay: malloc would take new memory for each tensor.
        scratch = torch.empty(PIECE, dtype=torch.int64, device="cpu")
        sums = [_sum_of_bits(entry.elements(0), scratch) for entry in self._entries]
        by_device = group_pairs((one.device, index) for index, one in enumerate(sums))
        values = dict.fromkeys(range(len(sums)), 0)
        for indices in by_device.values():
            values |= dict(zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True))
        return list(values.values())

    def _seal(self, number: int) -> int:
        """Return a number that only tells ranks of this cell whether two were equal, with ``is_private``."""
        if not self._salt:
            return number
        sealed = hashlib.blake2b(self._salt + number.to_bytes(8, "big", signed=True), digest_size=8).digest()
        return int.from_bytes(sealed, "big", signed=True)

    def _make_salt(self) -> bytes:
        """Draw a number that the ranks of a cell know, and no other; collective over the cell."""
        group = self.round_groups.cell
        salt = torch.frombuffer(bytearray(os.urandom(SALT_BYTES)), dtype=torch.uint8)
        if group is None:
            return bytes(salt.tolist())
        salt = salt.to(control_device(group))
        dist.broadcast(salt, group=group, group_src=0)
        return bytes(salt.tolist())

    def _find_unlike(self) -> bool:
        """Tell whether this cell's ranks compute on several kinds of processors; collective over the cell."""
        group = self.round_groups.cell
        if group is None:
            return False
        extremes = torch.tensor([self.processor, -self.processor], dtype=torch.float64, device=control_device(group))
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
        low, high = extremes.tolist()
        return bool(low != -high)

    # Comparing --------------------------------------------------------------------------------------------------------

    def compare(self, statuses: Sequence[RoundStatus]) -> None:
        """Raise RoundError, on all ranks alike, where replicas inside a cell differ; warn where all cells are equal.

        Given all ranks' statuses it moves nothing, unless there are differences: then it is collective over the ranks
        of the round.
        """
        if self.is_over:  # of a round that was not taken
            return
        if self._is_of_cells:
            cells = self._differing_cells(statuses)
            if cells:
                self._explain(cells)
        self._copies.clear()
        are_equal = not self.is_private and self._are_cells_equal(statuses)
        if are_equal and self.scope.goes_on and not self._is_second:
            self._is_second = True
            return
        self.is_over = True
        if are_equal and self.scope.rank == 0:
            print(
                f"xffl: warning: all {self.scope.topology.cells} cells have made steps and hold the same bits in their "
                f"{'second' if self._is_second else 'first'} round: they train on the same data with the same seeds, "
                "or their gradients cross between cells, so a round averages equal models; give each cell data of its "
                "own, by Subset(data, range(state.cell, len(data), state.cells)) or xffl's CellLoader (docs/data.rst)",
                file=sys.stderr,
                flush=True,
            )

    def _differing_cells(self, statuses: Sequence[RoundStatus]) -> list[int]:
        """Return the cells in which ranks that hold the same elements have told other sums."""
        topology = self.scope.topology
        cells: list[int] = []
        for cell in range(topology.cells):
            if any(statuses[rank].is_nonfinite for rank in topology.federation(cell)):
                continue  # refused, or left out, for that
            replicas, shards = range(topology.replicas(cell)), range(topology.shards(cell))
            held = [{statuses[topology.rank_of(cell, one, shard)].held for one in replicas} for shard in shards]
            shared = [
                {statuses[topology.rank_of(cell, one, shard)].shared for one in replicas for shard in alike}
                for alike in self._shards_alike(cell)
            ]
            if any(len(sums) > 1 for sums in (*held, *shared)):
                cells.append(cell)
        return cells

    def _shards_alike(self, cell: int) -> list[list[int]]:
        """Return sets of shards of a cell that hold the same shared elements."""
        if self.replica_tensors is None:
            return [list(range(self.scope.topology.shards(cell)))]
        return list(group_pairs((tuple(sorted(held.items())), shard) for shard, held in self._shared.items()).values())

    def _explain(self, cells: Collection[int]) -> None:
        """Raise for the first tensor that differs inside a cell, or write how little it does; collective."""
        from xffl.aggregation.engine.alike.unequal_replicas import ReplicasDiffer, UnequalReplicas

        held: list[tuple[str, tuple[int, ...], int]] = []
        if self._at.cell in cells:
            held = [
                (entry.name, self._place_of(entry), self._seal(one))
                for entry, one in zip(self._entries, self._sums, strict=True)
            ]
        unequal = UnequalReplicas(
            self.scope, self.round_groups, processor=self.processor, held=held, copies=self._copies
        )
        try:
            unequal.explain(cells)
        except ReplicasDiffer as differ:
            if self.scope.is_elastic:  # where each cell learns of its own ranks alone
                raise
            raise RoundError(str(differ)) from None

    def _are_cells_equal(self, statuses: Sequence[RoundStatus]) -> bool:
        """Tell whether all cells that contribute have trained and hold the same bits."""
        topology = self.scope.topology
        sums: list[tuple[int, ...]] = []
        for cell in range(topology.cells):
            told = [statuses[rank] for rank in topology.federation(cell)]
            if any(one.is_absent for one in told):
                continue
            if not any(one.is_trained for one in told) or any(one.is_nonfinite for one in told):
                return False
            sums.append(self.sums_of(cell, statuses))
        return len(sums) > 1 and len(set(sums)) == 1

    def sums_of(self, cell: int, statuses: Sequence[RoundStatus]) -> tuple[int, ...]:
        """Return what a cell has told of its values; two cells that hold the same bits tell the same; pure."""
        topology = self.scope.topology
        first = [statuses[topology.rank_of(cell, 0, shard)] for shard in range(topology.shards(cell))]
        if topology.cell_shape is None:  # cells may be cut into different numbers of shards
            return ((sum(one.held - one.shared for one in first) + first[0].shared) % 2**64,)
        return tuple(one.held for one in first)


def _fold(sums: Iterable[tuple[ModelTensor, int]]) -> int:
    """Return one number of 64 bits for the sums of several tensors; that of a whole is the sum of its parts'."""
    total = 0
    for entry, one in sums:
        factor = int.from_bytes(hashlib.blake2b(entry.name.encode(), digest_size=8).digest(), "big") | 1
        total += factor * one
    return (total + 2**63) % 2**64 - 2**63


def _sum_of_bits(values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of all elements as integers, modulo 2^64; local. ``scratch`` is overwritten."""
    flat = values.reshape(-1)
    bits = flat.view(BITS[flat.itemsize])
    if bits.device.type != "cpu":
        return bits.sum(dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for piece in torch.split(bits, PIECE) if bits.numel() else ():
        total += scratch[: piece.numel()].copy_(piece).sum()
    return total
