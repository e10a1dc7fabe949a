"""One cell hands its model over to all others."""

from __future__ import annotations

from collections.abc import Collection

from xffl.aggregation.engine.buffers import BucketMemory
from xffl.aggregation.engine.exchange import ExchangeWalk, RoundRun, Way
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import Crossing, ExactValues

__all__ = ["HandOver", "SharedValues"]


class HandOver(Way):
    """A round in which all take over the model of one cell: nothing is clipped, combined or stepped."""

    def __init__(self, global_model: GlobalModel | None) -> None:
        self._global_model = global_model

    def exchange(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Bring the model of the context's source to all others."""
        run.walk(_HandOverWalk(run, context, self._global_model))
        return context


class _HandOverWalk(ExchangeWalk):
    """Brings each bucket from the source to all others as it is, in one hop."""

    def __init__(self, run: RoundRun, context: RoundContext, global_model: GlobalModel | None) -> None:
        super().__init__(run, context)
        self._global_model = global_model
        self._is_source = self.link.cell == context.source
        self._targets = {*range(self.link.cells)} - {context.source}
        self._plain = {transfer.number: transfer.as_plain() for transfer in run.plan.transfers}

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        memory = (
            self.run.memory.read(transfer, bucket) if self._is_source else self.run.memory.acquire(transfer, bucket)
        )
        with self.profile.capture_failure("pack"):
            self.link.copies.settle(bucket)  # before anything arrives there
            if self._is_source and self._global_model is not None and transfer.group.is_stepped:
                # Without steps since: these are not clipped.
                return memory._replace(values=self._global_model.written(transfer, bucket))
        return memory

    def payload(self, crossing: Crossing) -> ExactValues:
        plain = self._plain[crossing.transfer.number]
        return SharedValues(crossing._replace(transfer=plain), self._targets)

    def pause(self, transfer: GroupTransfer) -> int:
        return super().pause(self._plain[transfer.number])


class SharedValues(ExactValues):
    """Values that one cell has and the targets take over as they are."""

    def __init__(self, crossing: Crossing, targets: Collection[int]) -> None:
        self._targets = targets
        super().__init__(crossing)

    def prepare(self) -> None:
        """Send to the targets; receive in place of the result."""
        self.send = dict.fromkeys(self._targets, self.values) if self.is_source else {}
        self.receive = dict.fromkeys(self.arriving, self.out) if self.here in self._targets else {}

    def combine(self) -> None:
        """Leave what has arrived where it is; what was sent goes there, too."""
        if self.is_source and self.out is not self.values:
            with self.transport.profile.capture_failure("combine"):
                self.out.copy_(self.values)
