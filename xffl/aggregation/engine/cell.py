"""What the ranks of a cell exchange in a round: the result of a bucket, and before it the mean of a bucket of buffers.

Where values cross in the host's memory and NCCL works inside the cell, both lie on the GPU. A sender's bucket then goes
through memory as follows, each arrow behind the one before on streams of their own, bucket by bucket::

    model --copy stream--> pinned host ..gloo.. pinned host --round's stream--> GPU --NCCL--> replicas' GPUs
                          event: host waits     event: before the host's memory is used again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from xffl.aggregation.engine.buffers import Pool, aligned
from xffl.aggregation.engine.plan import Bucket, GroupTransfer
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.report import RoundProfile

__all__ = ["HOME_LAG", "BucketMemory", "mean_in_cell", "reserve_cell_rows", "share_in_cell"]


HOME_LAG = 2
"""Buckets after which a broadcast inside the cell is waited for: the next one is combined meanwhile."""


class BucketMemory(NamedTuple):
    """Where a bucket's values lie on one rank in a round, and the buffers lent for them."""

    values: torch.Tensor  # as they are sent to other cells
    out: torch.Tensor  # what the cells have made of them
    lent: torch.Tensor | None
    result: torch.Tensor  # what all ranks of the cell get: out, or memory of the GPU
    result_lent: torch.Tensor | None = None


def share_in_cell(
    link: Link, profile: RoundProfile, transfer: GroupTransfer, bucket: Bucket, out: torch.Tensor, result: torch.Tensor
) -> Iterator[int]:
    """Hand what a bucket's sender has in ``out`` round inside the cell; all get it in ``result``, which may be that."""
    home, is_sender = transfer.cell_group, transfer.is_sent_here(bucket)
    assert home is not None
    if is_sender and result is not out:
        with profile.capture_failure("home"):
            link.host_copies.bring(out, result)
    with profile.phase("home"):
        source = link.round_groups.first + transfer.senders_of(bucket)[transfer.cell]
        work = dist.broadcast(result.view(torch.uint8), src=source, group=home, async_op=True)
    profile.bytes_home += result.nbytes * (home.size() - 1) if is_sender else 0
    yield HOME_LAG
    with profile.phase("home"):
        work.wait()
    link.home_progress.note()


def reserve_cell_rows(link: Link, pools: Mapping[torch.device, Pool], transfers: Sequence[GroupTransfer]) -> None:
    """Make room for a bucket's values of all ranks of a cell, where their mean is taken; local."""
    needed: dict[torch.device, int] = {}
    for transfer in transfers:
        if transfer.group.is_mean_in_cell and transfer.cell_group is not None:
            device = (link.home_device if transfer.is_shared_on_gpu else None) or link.device
            largest = max((bucket.stop - bucket.start for bucket in transfer.buckets), default=0)
            nbytes = aligned(largest * transfer.dtype.itemsize) * transfer.cell_group.size()
            needed[device] = max(needed.get(device, 0), nbytes)
    for device, nbytes in needed.items():
        pools[device].reserve(1, nbytes)


def mean_in_cell(
    pools: Mapping[torch.device, Pool], profile: RoundProfile, home: dist.ProcessGroup, values: torch.Tensor
) -> None:
    """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
    pool = pools[values.device]
    with profile.phase("home"):
        lent = pool.acquire(aligned(values.nbytes) * home.size())
        rows = [row[: values.nbytes] for row in pool.rows(lent, torch.uint8, home.size())]
        dist.all_gather(rows, values.view(torch.uint8), group=home)
        profile.bytes_home += values.nbytes * (len(rows) - 1)
    with profile.capture_failure("combine"):
        weighted_mean([row.view(values.dtype) for row in rows], [1.0] * len(rows), values)
    pool.release(lent)
