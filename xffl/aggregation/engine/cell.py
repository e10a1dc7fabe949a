"""The mean of a bucket of buffers over the ranks of a cell, before it crosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.engine.buffers import Pool, aligned
from xffl.aggregation.engine.transfers import GroupTransfer
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.mean import weighted_mean
from xffl.aggregation.report import RoundProfile

__all__ = ["mean_in_cell", "reserve_cell_rows"]


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
