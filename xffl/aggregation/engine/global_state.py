"""The state of the global model on its way between ranks: to cells that are behind, and from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xffl.aggregation.engine.exchange import BucketPipeline, Exchange, share_in_cell
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.hand_over import SharedValues
from xffl.aggregation.engine.transfers import Bucket, GroupTransfer, RoundContext
from xffl.aggregation.engine.transport import CrossCellTransport
from xffl.aggregation.report import RoundProfile
from xffl.distributed.collectives import all_reduce
from xffl.distributed.consistency import control_device, run_on_all_ranks
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.faults import inject
from xffl.errors import CheckpointError

__all__ = ["load_memory", "share_global_model"]


@torch.no_grad()
def share_global_model(exchange: Exchange, state: Mapping[str, Any], source: int, targets: Collection[int]) -> None:
    """Bring what a cell keeps beside the model to others, which have memory for it, in whatever cut each has.

    Collective over cells that are worlds of their own. ``state`` is the plain state of the global model of ``source``.
    Table by table, straight from where one keeps it to where the other one does; all wait for the end of each, also
    those that neither send nor receive, which may take as long as all of its messages: cells that send less in a round
    would take a late one for a lost one else. Raises RuntimeError where a rank was lost.
    """
    link, profile, agreed = exchange.link, RoundProfile(exchange.device), exchange.find(AgreedModel)
    world = exchange.round_groups.world
    assert agreed is not None and isinstance(world, CrossWorldGroup), "shared where there is one, across worlds"
    weights = tuple(float(cell == source) for cell in range(link.cells))
    transport = CrossCellTransport(link, RoundContext(weights, source), profile)
    is_concerned, is_receiving = link.cell in (source, *targets), link.cell in targets

    def way(transfer: GroupTransfer, bucket: Bucket, kept: torch.Tensor) -> Iterator[int]:
        values = kept.to(exchange.device)  # as it is, unless the server works on a device of its own
        if transfer.is_sent_here(bucket):
            yield from transport.move(SharedValues(transport, transfer, bucket, values, values, targets))
        elif is_receiving:  # in step with the rank that does
            yield link.pause(transfer)
        if is_receiving and transfer.cell_group is not None:
            yield from share_in_cell(link, profile, transfer, bucket, values, values)
        if values is not kept:
            kept.copy_(values)

    if link.cell == source:
        inject("share")
    # As they are: each bucket in one hop.
    plain = [replace(one, reduce_scatter=False, codec=None) for one in exchange.transfers]
    for table, _ in agreed.global_model.tables(state):
        pipeline = BucketPipeline()
        for transfer in plain if is_concerned else ():
            for bucket in transfer.buckets if transfer.number in table else ():
                pipeline.start(way(transfer, bucket, table[transfer.number][bucket.start : bucket.stop]))
            pipeline.drain()
        if profile.failure is not None:
            raise profile.failure
        # Another cell may have as many messages on one rank as this one on all.
        messages = sum(len(transfer.buckets) for transfer in plain if transfer.number in table)
        world.barrier(messages * link.sizes[link.cell])


@torch.no_grad()
def load_memory(
    exchange: Exchange,
    state: Mapping[str, Any],
    memory: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], None],
) -> None:
    """Load an aggregator's state into the parts of its memory, by their keys.

    Collective over the scope where there is a global model. Raises what ``check`` and the parts raise, on all ranks
    where it is collective.
    """

    def load(given: Mapping[str, Any]) -> None:
        for key, part in memory.items():
            part.load_state_dict(given[key])

    world = exchange.round_groups.world
    agreed = exchange.find(AgreedModel)
    if agreed is None:
        check(state)
        load(state)
        return
    with run_on_all_ranks("what the ranks have saved", describe=_describe_difference, group=world) as share:
        check(state)
        share(f"after round {state['rounds']}")
    with run_on_all_ranks("what the ranks have saved", group=world):
        load(state)
    steps = agreed.global_model.steps
    if steps:  # older states tell them on ranks alone that hold some of a fragment
        counts = torch.tensor(list(steps.values()), dtype=torch.int64, device=control_device(world))
        all_reduce(counts, dist.ReduceOp.MAX, world)
        agreed.global_model.count_steps(dict(zip(steps, counts.tolist(), strict=True)))


def _describe_difference(told: Mapping[int, str]) -> CheckpointError:
    """Name one rank for each kind of state that ranks have been given."""
    ranks: dict[str, int] = {}
    for rank, text in sorted(told.items()):
        ranks.setdefault(text, rank)
    shown = "; ".join(f"rank {rank}: {text}" for text, rank in ranks.items())
    return CheckpointError(
        f"the ranks' states are not of one checkpoint: saved {shown}; load those of one on all ranks"
    )
