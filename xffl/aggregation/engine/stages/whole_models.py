"""Combiners that compare whole models: gather those of all cells, compare them, and spread what is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.algorithms.combiners import Combiner
from xffl.aggregation.arithmetic import piece_length
from xffl.aggregation.engine.buffers import BucketMemory
from xffl.aggregation.engine.exchange import ExchangeWalk, RoundRun
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.codecs import Codecs, EncodedSteps
from xffl.aggregation.engine.stages.weighing import Weighed, weigh_cells
from xffl.aggregation.engine.transport import Crossing, ExactValues, Link
from xffl.distributed.agreement.consistency import control_device

__all__ = ["WholeModels"]


class WholeModels(Weighed):
    """The way of a combiner that compares whole models: two walks, and between them the distances of all cells.

    A sender keeps a row for each cell's values, as large as the cells' shards together, from round to round.
    """

    def __init__(self, combiner: Combiner, link: Link, codecs: Codecs | None) -> None:
        super().__init__(combiner)
        self._link = link
        self.codecs = codecs
        self._rows: dict[int, torch.Tensor] = {}

    def check(self, context: RoundContext) -> None:
        """Raise where there are too few cells; nothing else is known before models are compared."""
        self.combiner.check(len(context.cells))

    def reserve(self, transfers: Sequence[GroupTransfer]) -> None:
        """Make a row for each cell's values of each group; local."""
        for transfer in transfers:
            if not transfer.is_sender:
                continue
            is_encoded = self.codecs is not None and self.codecs.is_encoding(transfer)
            dtype = torch.float32 if is_encoded else transfer.dtype
            if transfer.number not in self._rows or self._rows[transfer.number].dtype != dtype:
                with torch.inference_mode(False):
                    shape = (self._link.cells, transfer.group.numel)
                    self._rows[transfer.number] = torch.empty(shape, dtype=dtype, device=self._link.device)

    def rows_of(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        """Return a bucket's rows, ``[cells, elements]``."""
        return self._rows[transfer.number][:, bucket.start : bucket.stop]

    def exchange(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Gather, compare, and spread; return what the cells counted for. Collective over the world."""
        for stage in run.stages:
            stage.before_exchange(run, context)
        run.walk(_GatherWalk(run, context, self))
        with run.profile.phase("weigh"):
            distances = self._compare(run, context)
        context = weigh_cells(context, self.combiner, distances)
        for stage in run.stages:
            context = stage.weighed(run, context)
        run.walk(_SpreadWalk(run, context, self))
        return context

    def _compare(self, run: RoundRun, context: RoundContext) -> list[list[float]]:
        """Return the squared distances between all cells' models, as the senders of cell 0 see them; collective."""
        cells, groups = self._link.cells, run.round_groups
        table = torch.zeros(cells, cells, dtype=torch.float64, device=run.device)
        if self._link.cell == 0:
            with run.profile.capture_failure("weigh"):
                for transfer, bucket in run.sent():
                    add_distances(self.rows_of(transfer, bucket), context.cells, table)
        table = table.to(control_device(groups.world))
        if self._link.cell == 0 and groups.cell is not None:
            dist.all_reduce(table, group=groups.cell)
        run.tell_all(table)
        distances: list[list[float]] = table.tolist()
        return distances


class _GatherWalk(ExchangeWalk):
    """Takes each bucket to the other cells, and keeps what comes back until all have been compared."""

    reaches_cell = False

    def __init__(self, run: RoundRun, context: RoundContext, models: WholeModels) -> None:
        super().__init__(run, context)
        self._models = models

    def payload(self, crossing: Crossing) -> ExactValues:
        with self.profile.capture_failure("pack"):
            self.link.copies.settle(crossing.bucket)  # read as soon as the payload is made
        crossing = crossing._replace(out=self._models.rows_of(crossing.transfer, crossing.bucket))
        codecs = self._models.codecs
        if codecs is not None and codecs.is_encoding(crossing.transfer):
            return _GatheredSteps(crossing, codecs)
        return _GatheredValues(crossing, codecs)

    def pause(self, transfer: GroupTransfer) -> int:
        return 0  # nobody waits for a result

    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        self.run.memory.release(memory)


class _SpreadWalk(ExchangeWalk):
    """Combines each bucket of what was kept, and hands the result round."""

    crosses = False  # all of it has come

    def __init__(self, run: RoundRun, context: RoundContext, models: WholeModels) -> None:
        super().__init__(run, context)
        self._models = models

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        memory = self.run.memory.acquire(transfer, bucket)
        if transfer.sends[bucket.number]:
            self._combine(transfer, bucket, memory.out)
        return memory

    def pause(self, transfer: GroupTransfer) -> int:
        return 0

    def _combine(self, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor) -> None:
        rows = self._models.rows_of(transfer, bucket)
        values = [rows[cell] for cell in self.transport.context.source_cells(transfer.group)]
        codecs = self._models.codecs
        with self.profile.capture_failure("combine"):
            if codecs is not None and codecs.is_encoding(transfer):
                mean = codecs.scratch[-1, : out.numel()]
                self.transport.combine(transfer, values, mean)
                codecs.feedback[transfer.number].advance(bucket, mean, out)
            else:
                self.transport.combine(transfer, values, out)


class _GatheredValues(ExactValues):
    """A bucket's values, of which those of all cells are kept: ``out`` has a row for each."""

    def __init__(self, crossing: Crossing, codecs: Codecs | None) -> None:
        self._codecs = codecs
        super().__init__(crossing)

    def prepare(self) -> None:
        with self.transport.profile.capture_failure("pack"):
            self.out[self.here].copy_(self.values)
        self.send = dict.fromkeys(self.others, self.out[self.here]) if self.is_source else {}
        self.receive = {cell: self.out[cell] for cell in self.arriving}

    def write(self) -> None:
        """Add what codecs have left out of what was sent in rounds with other cells."""
        if self._codecs is not None and self.is_source and self._codecs.leftovers.has(self.transfer):
            with self.transport.profile.capture_failure("encode"):
                self._codecs.leftovers.add(self.transfer, self.bucket, self.out[self.here])

    def combine(self) -> None:
        """Leave what has arrived where it is."""


class _GatheredSteps(EncodedSteps):
    """What a bucket differs by from the last agreed state in each cell, which is kept."""

    def combine(self) -> None:
        """Keep what the codes say."""
        with self.transport.profile.capture_failure("combine"):
            for cell in self.sources:
                self.feedback.decode(self.codes[cell], self.out[cell])

    def finish(self) -> None:
        """Give the buffers back; what was kept is combined later."""
        self.link.slots.release(self.slot)


@torch.no_grad()
def add_distances(rows: torch.Tensor, cells: Sequence[int], table: torch.Tensor) -> None:
    """Add the squared distances between cells' values to a table; local.

    From the differences themselves: with inner products, one huge model would drown the distances between the others.
    """
    for chunk in torch.split(rows, piece_length(rows.device), dim=1):
        wide = [chunk[cell].double() for cell in cells]
        for index, one in enumerate(cells):
            for other, values in zip(cells[index + 1 :], wide[index + 1 :], strict=True):
                step = torch.sub(wide[index], values)
                distance = step.dot(step)
                table[one, other] += distance
                table[other, one] += distance
