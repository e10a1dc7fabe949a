"""The state of the global model on its way between ranks: to cells that are behind, and from checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from xffl.aggregation.engine.buffers import BucketMemory
from xffl.aggregation.engine.exchange import Exchange, Walk, interleave
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.hand_over import SharedValues
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.transport import CrossCellTransport, Crossing, ExactValues
from xffl.aggregation.report import RoundProfile
from xffl.distributed.agreement.consistency import control_device, run_on_all_ranks
from xffl.distributed.collectives import Group, all_reduce
from xffl.distributed.failures.faults import inject
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.errors import CheckpointError

__all__ = ["agree_on_steps", "load_memory", "save_memory", "share_global_model"]


@torch.no_grad()
def share_global_model(exchange: Exchange, state: Mapping[str, Any], source: int, targets: Collection[int]) -> None:
    """Bring what a cell keeps beside the model to others, which have memory for it, in whatever cut each has.

    Collective over cells that are worlds of their own. ``state`` is the plain state of the global model of ``source``.
    Table by table, straight from where one keeps it to where the other one does; all wait for the end of each, also
    those that neither send nor receive, which may take as long as all of its messages: cells that send less in a round
    would take a late one for a lost one else. Raises RuntimeError where a rank was lost.
    """
    link, profile, agreed = exchange.link, RoundProfile(), exchange.find(AgreedModel)
    world = exchange.round_groups.world
    assert agreed is not None and isinstance(world, CrossWorldGroup), "shared where there is one, across worlds"
    weights = tuple(float(cell == source) for cell in range(link.cells))
    transport = CrossCellTransport(link, RoundContext(weights, source), profile)
    is_concerned = link.cell in (source, *targets)
    if link.cell == source:
        inject("share")
    plain = [transfer.as_plain() for transfer in exchange.transfers]
    for table, _ in agreed.global_model.tables(state):
        walk = _TableWalk(transport, table, targets)
        for transfer in plain if is_concerned else ():
            if transfer.number in table:
                interleave(walk.steps(transfer, bucket) for bucket in transfer.buckets)
        if profile.failure is not None:
            raise profile.failure
        # Another cell may have as many messages on one rank as this one on all.
        messages = sum(len(transfer.buckets) for transfer in plain if transfer.number in table)
        world.barrier(messages * link.sizes[link.cell])


class _TableWalk(Walk):
    """Brings each bucket of a table of the global model from the source to the targets as it is, in one hop."""

    def __init__(
        self, transport: CrossCellTransport, table: Mapping[int, torch.Tensor], targets: Collection[int]
    ) -> None:
        super().__init__(transport)
        self._table = table
        self._targets = targets
        self.reaches_cell = self.link.cell in targets

    def read(self, transfer: GroupTransfer, bucket: Bucket) -> BucketMemory:
        # As it is, unless the server works on a device of its own.
        values = self._kept(transfer, bucket).to(self.link.device)
        result = values
        if self.reaches_cell and transfer.is_shared_on_gpu:
            result = torch.empty_like(values, device=self.link.home_device)
        return BucketMemory(values, values, None, result)

    def payload(self, crossing: Crossing) -> ExactValues:
        return SharedValues(crossing, self._targets)

    def pause(self, transfer: GroupTransfer) -> int:
        return transfer.pause if self.reaches_cell else 0

    def end(self, transfer: GroupTransfer, bucket: Bucket, memory: BucketMemory) -> None:
        kept = self._kept(transfer, bucket)
        arrived = memory.values if transfer.sends[bucket.number] else memory.result
        if kept.device != self.link.device or arrived is not memory.values:
            kept.copy_(arrived)

    def _kept(self, transfer: GroupTransfer, bucket: Bucket) -> torch.Tensor:
        return self._table[transfer.number][bucket.start : bucket.stop]


SAVED = (
    ("codecs", "what lossy codecs remember"),
    ("privacy", "what privacy has cost"),
    ("agreed", "the last agreed model of server, norms, privacy or tensor_weights"),
    ("tensor_weights", "what was counted for tensor_weights"),
    ("above", "levels above the lowest"),
)
"""What an aggregator's state may hold beside numbers, by its key."""


def save_memory(exchange: Exchange) -> dict[str, Any]:
    """Return what rounds remember beside the model, by its key in a state dict; local."""
    return {key: stage.state_dict() for key, stage in _memory_of(exchange).items()}


def _memory_of(exchange: Exchange) -> dict[str, RoundStage]:
    return {stage.key: stage for stage in exchange.stages if stage.key is not None}


@torch.no_grad()
def load_memory(exchange: Exchange, state: Mapping[str, Any], *, fragments: int) -> None:
    """Load an aggregator's state into what rounds remember.

    Collective over the scope where there is a global model. Raises CheckpointError for a state of another set-up, and
    what the parts raise, on all ranks where it is collective.
    """
    memory = _memory_of(exchange)

    def load() -> None:
        for key, part in memory.items():
            part.load_state_dict(state[key])

    world = exchange.round_groups.world
    agreed = exchange.find(AgreedModel)
    if agreed is None:
        _check_saved(state, memory, fragments)
        load()
        return
    with run_on_all_ranks("what the ranks have saved", describe=_describe_difference, group=world) as share:
        _check_saved(state, memory, fragments)
        share(f"after round {state['rounds']}")
    with run_on_all_ranks("what the ranks have saved", group=world):
        load()
    agree_on_steps(agreed.global_model, world)


def agree_on_steps(model: GlobalModel, group: Group | None) -> None:
    """Take the steps of fragments that a loaded state does not tell of from ranks whose state does.

    Collective over the group: 8 bytes a fragment. Before all ranks counted all fragments, the state of a rank that held
    nothing of one had no count of it.
    """
    steps = model.steps
    if not steps:
        return
    counts = torch.tensor(list(steps.values()), dtype=torch.int64, device=control_device(group))
    all_reduce(counts, dist.ReduceOp.MAX, group)
    model.count_steps(dict(zip(steps, counts.tolist(), strict=True)))


def _check_saved(state: Mapping[str, Any], memory: Collection[str], here: int) -> None:
    """Raise where an aggregator's state has parts that would be lost without a word, or lacks some; local."""
    if not isinstance(state, Mapping) or "rounds" not in state:
        raise CheckpointError(f"an aggregator's state must be what its state_dict returned, got {type(state).__name__}")
    fragments = state.get("fragments", here)
    if fragments != here:
        raise CheckpointError(
            f"the state is that of {fragments} fragments, and this aggregator has {here}; resume with the same"
        )
    for part, what in SAVED:
        is_here = part in memory
        if part in state and not is_here:
            raise CheckpointError(
                f"the state holds {what}, which this aggregator was made without; resume with the same options"
            )
        if is_here and part not in state:
            raise CheckpointError(f"the state lacks {what}; it was saved without, so resume with the same options")


def _describe_difference(told: Mapping[int, str]) -> CheckpointError:
    """Name one rank for each kind of state that ranks have been given."""
    ranks: dict[str, int] = {}
    for rank, text in sorted(told.items()):
        ranks.setdefault(text, rank)
    shown = "; ".join(f"rank {rank}: {text}" for text, rank in ranks.items())
    return CheckpointError(
        f"the ranks' states are not of one checkpoint: saved {shown}; load those of one on all ranks"
    )
