"""Weights of single tensors and slices in a round: each is the mean by what the cells have counted for it.

What no cell has counted anything for stays what all cells last agreed on, so the global model is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from xffl.aggregation.algorithms.tensor_weights import TensorCounts
from xffl.aggregation.arithmetic import weighted_mean
from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.tensors import NUMBERS, Axis, ModelTensor, TensorInfo
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, Piece, RoundContext
from xffl.aggregation.engine.stages.codecs import Codecs, EncodedSteps
from xffl.aggregation.engine.stages.stage import WeighedStage
from xffl.aggregation.engine.transport import Crossing, ExactValues, start_moves
from xffl.distributed.agreement.consistency import control_device
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["WeighedTensors"]

COUNTS_TAG = 7_003
"""Tells messages with counts from all others."""


class Run(NamedTuple):
    """Elements that count alike: all from ``start`` to ``stop``, or of each period some."""

    place: int | None
    """The place of their count; ``None`` where the cells' own weights hold"""
    start: int
    stop: int
    period: int = 0
    """After so many elements they come again; 0 where all count alike"""
    within: slice = slice(0, 0)
    """Which elements of a period they are"""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return these elements of a flat tensor, as a view."""
        run = values[self.start : self.stop]
        return run.view(-1, self.period)[:, self.within] if self.period else run


@dataclass(frozen=True)
class Slices:
    """Which counts the elements of a tensor have that this rank holds, in canonical order."""

    first: int
    """The place of the first count"""
    origin: int
    """The first element that this rank holds"""
    rows: tuple[int, ...]
    """By entry of the first dimension that this rank holds, its number in the whole tensor; one for a whole tensor"""
    inner: int
    """Elements that follow each other in an entry"""

    def runs(self, start: int, stop: int, at: int) -> list[Run]:
        """Return how the elements from ``start`` to ``stop`` of the tensor count, which lie from ``at`` on.

        The entries follow each other again and again where the tensor is cut along another dimension.
        """
        if len(self.rows) == 1:
            return [Run(self.first + self.rows[0], at, at + stop - start)]
        start, stop = start - self.origin, stop - self.origin
        shift = at - start
        period = self.inner * len(self.rows)
        first, last = -(-start // period) * period, stop // period * period
        if last - first <= period:  # no period, or one
            return self._entries(start, stop, shift)
        middle = [
            Run(
                self.first + row,
                start=shift + first,
                stop=shift + last,
                period=period,
                within=slice(place * self.inner, (place + 1) * self.inner),
            )
            for place, row in enumerate(self.rows)
        ]
        return [*self._entries(start, first, shift), *middle, *self._entries(last, stop, shift)]

    def _entries(self, start: int, stop: int, shift: int) -> list[Run]:
        runs = []
        while start < stop:
            entry = start // self.inner
            end = min(stop, (entry + 1) * self.inner)
            runs.append(Run(self.first + self.rows[entry % len(self.rows)], shift + start, shift + end))
            start = end
        return runs


class WeighedTensors(WeighedStage):
    """Combines some tensors, or slices of them, by counts of their own."""

    key = "tensor_weights"

    def __init__(
        self,
        counts: TensorCounts,
        moving: Sequence[TensorInfo],
        layout: Layout,
        *,
        model: GlobalModel,
        codecs: Codecs | None,
    ) -> None:
        self.counts = counts
        self._model = model
        self._codecs = codecs
        self._fragment = 0
        self._taken = counts.waiting(0)
        """What the round under way takes from what waits"""
        self._has_steps = True
        self._by_cell: list[list[float]] = []
        """What each cell has counted, of the round under way"""
        self._slices: dict[int, Slices] = {}
        """By place in the plan"""
        self._runs: dict[tuple[int, int, int], list[Run]] = {}
        self._weighed: dict[int, bool] = {}
        self._find(moving, layout)

    def _find(self, moving: Sequence[TensorInfo], layout: Layout) -> None:
        """Find the tensors that patterns match, the same on all ranks."""
        used: set[str] = set()
        for item, tensor in enumerate(moving):
            # What optimizers keep of a parameter as one number only goes to cells that are behind.
            if not tensor.is_stepped and tensor.moment in ("", NUMBERS):
                continue
            places = self.counts.places_of(tensor.beside or tensor.name, tensor.shape)
            if places is None:
                continue
            pattern, first, slices = places
            used.add(pattern)
            held = layout.entry(item)
            if held is not None:
                self._slices[item] = _slices_of(*held, first, slices, origin=layout.held(item)[0])
        unused = sorted(set(self.counts.patterns) - used)
        if unused:
            names = [tensor.name for tensor in moving if tensor.is_stepped]
            raise ConfigError(
                f"tensor_weights {unused[:3]} match no parameter that trains and is averaged, or come after patterns "
                f"that match the same; names look like {names[:3]}"
            )

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Note which part of the model moves."""
        self._fragment = fragment

    def read(self, *, has_steps: bool) -> None:
        """Ask for what was counted."""
        self.counts.collect()
        self._taken = self.counts.waiting(self._fragment)
        self._has_steps = has_steps

    def weighed(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Tell all ranks what each cell has counted: inside the cells, between their first ranks, and back.

        Collective over the world: 8 bytes a count, from each cell to each other.
        """
        groups = run.round_groups
        sizes, rank, cell = run.link.sizes, run.link.rank, run.link.cell
        firsts = [groups.first + sum(sizes[:number]) for number in range(len(sizes))]
        is_first = groups.first + rank == firsts[cell]
        table = torch.zeros(len(sizes), self.counts.size, dtype=torch.float64)
        if self._has_steps:
            table[cell] = self._taken
        if groups.cell is not None:
            table = table.to(control_device(groups.cell))
            dist.all_reduce(table, group=groups.cell)
        table = table.to(control_device(groups.world))
        if is_first:
            others = [number for number in range(len(sizes)) if number != cell]
            receive = [(table[number], firsts[number]) for number in others]
            send = [(table[cell], firsts[number]) for number in others]
            with run.profile.phase("across"):
                for work in start_moves(receive, send, groups.world, COUNTS_TAG):
                    work.wait()
            run.profile.record_send(sum(values.nbytes for values, _ in send))
        if groups.cell is not None:
            table = table.to(control_device(groups.cell))
            dist.broadcast(table, src=firsts[cell], group=groups.cell)
            run.profile.bytes_home += table.nbytes * (groups.cell.size() - 1) if is_first else 0
        self._by_cell = table.tolist()
        return context

    def payload(self, crossing: Crossing) -> ExactValues | None:
        """Combine a bucket by counts where it has any of the tensors."""
        transfer = crossing.transfer
        if transfer.group.rule != "average" or not self._is_weighed(transfer):
            return None
        if self._codecs is not None and self._codecs.is_encoding(transfer):
            return WeighedSteps(crossing, self._codecs, self)
        return WeighedValues(crossing, self)

    def _is_weighed(self, transfer: GroupTransfer) -> bool:
        if transfer.number not in self._weighed:
            self._weighed[transfer.number] = any(piece.item in self._slices for piece in transfer.group.pieces)
        return self._weighed[transfer.number]

    def combine(
        self,
        payload: ExactValues,
        values: Sequence[torch.Tensor],
        out: torch.Tensor,
        rest: Callable[[], torch.Tensor],
    ) -> None:
        """Combine this cell's part of a bucket run by run, in the order of the cells.

        ``rest`` returns what parameters become for which no cell has counted anything; for what optimizers keep of
        them, the cells' own weights hold then.
        """
        context = payload.transport.context
        by_cell = self._by_cell
        own = tuple(context.counts[cell] for cell in payload.sources)
        stands: torch.Tensor | None = None
        for run in self._runs_of(payload.transfer, payload.bucket, payload.here):
            weights = own if run.place is None else tuple(by_cell[cell][run.place] for cell in payload.sources)
            into = run.of(out)
            if not any(weights) and payload.transfer.group.is_stepped:
                if stands is None:
                    stands = rest()
                into.copy_(run.of(stands))
                continue
            if not any(weights):
                weights = own
            if not run.period:
                weighted_mean([run.of(one) for one in values], weights, into)
                continue
            result = torch.empty(into.numel(), dtype=into.dtype, device=into.device)
            weighted_mean([run.of(one).reshape(-1) for one in values], weights, result)
            into.copy_(result.view(into.shape))

    def _runs_of(self, transfer: GroupTransfer, bucket: Bucket, cell: int) -> list[Run]:
        """Return how the elements count that a cell combines of a bucket."""
        key = (transfer.number, bucket.number, cell)
        if key not in self._runs:
            part = transfer.parts(bucket)[cell]
            runs: list[Run] = []
            at = 0
            for piece in bucket.pieces:
                first, last = max(at, part.start), min(at + piece.stop - piece.start, part.stop)
                if first < last:
                    place = Piece(piece.item, piece.start + first - at, piece.start + last - at)
                    runs += self._runs_in(place, first - part.start)
                at += piece.stop - piece.start
            self._runs[key] = _joined(runs)
        return self._runs[key]

    def _runs_in(self, piece: Piece, at: int) -> list[Run]:
        slices = self._slices.get(piece.item)
        if slices is None:
            return [Run(None, at, at + piece.stop - piece.start)]
        return slices.runs(piece.start, piece.stop, at)

    def agreed(self, payload: ExactValues) -> torch.Tensor:
        """Return what all cells last agreed on of this cell's part of a bucket."""
        part = payload.transfer.parts(payload.bucket)[payload.here]
        return self._model.written(payload.transfer, payload.bucket)[part]

    def commit(self, run: RoundRun) -> None:
        """Forget what the round has taken in."""
        self.counts.subtract(self._fragment, self._taken)

    def state_dict(self) -> dict[str, Any]:
        """Return what waits for a round on this rank."""
        return self.counts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank."""
        self.counts.load_state_dict(state)


class WeighedValues(ExactValues):
    """A bucket's values as they are, combined by counts."""

    def __init__(self, crossing: Crossing, stage: WeighedTensors) -> None:
        self._stage = stage
        super().__init__(crossing)

    def combine(self) -> None:
        """Combine what has arrived."""
        result = self.results[self.here]
        if result.numel():
            with self.transport.profile.capture_failure("combine"):
                values = [self.held[cell] for cell in self.sources]
                self._stage.combine(self, values, result, lambda: self._stage.agreed(self))
        self.link.slots.release(self.slot)


class WeighedSteps(EncodedSteps):
    """Steps since the last agreed state, written by a codec, combined by counts."""

    def __init__(self, crossing: Crossing, codecs: Codecs, stage: WeighedTensors) -> None:
        self._stage = stage
        super().__init__(crossing, codecs)

    def combine_steps(self, steps: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the cells' steps; where no cell has counted anything, there is none."""
        self._stage.combine(self, steps, out, lambda: torch.zeros_like(out))


def _slices_of(entry: ModelTensor, axis: Axis, first: int, slices: int | None, *, origin: int) -> Slices:
    """Return how the elements of a tensor count that this rank holds."""
    if slices is None:
        return Slices(first, origin, rows=(0,), inner=0)
    tensor = entry.tensor()
    local = local_tensor(tensor)
    numbers = torch.arange(tensor.shape[0]).view(-1, *(1 for _ in tensor.shape[1:]))
    if isinstance(tensor, DTensor):
        numbers = _cut_like(numbers, tensor)
    rows = tuple(numbers.flatten().tolist())
    assert len(rows) == local.shape[0], "cut as the tensor is"
    shape = list(local.shape)
    if isinstance(axis, int) and axis > 0:
        del shape[axis]
    inner = prod(shape[1:]) * (2 if tensor.is_complex() else 1)
    return Slices(first, origin, rows, inner)


def _cut_like(numbers: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Return this rank's part of the numbers of a tensor's entries; nothing moves."""
    places = [place if getattr(place, "dim", None) == 0 else Replicate() for place in tensor.placements]
    return local_tensor(distribute_tensor(numbers, tensor.device_mesh, places, src_data_rank=None))


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Return runs, those as one that follow each other and count alike."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.place == run.place and not (last.period or run.period):
            joined[-1] = Run(run.place, last.start, run.stop)
        else:
            joined.append(run)
    return joined
