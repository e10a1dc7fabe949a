"""The mean of a bucket of buffers over the ranks of a cell, before it crosses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from xffl.aggregation.arithmetic import weighted_mean
from xffl.aggregation.engine.buffers import Pool, aligned
from xffl.aggregation.report import RoundProfile

__all__ = ["mean_in_cell"]


def mean_in_cell(pool: Pool, profile: RoundProfile, home: dist.ProcessGroup, values: torch.Tensor) -> None:
    """Replace a bucket by its mean over the ranks of ``home``, each counted alike."""
    with profile.phase("home"):
        lent = pool.acquire(aligned(values.nbytes) * home.size())
        rows = [row[: values.nbytes] for row in pool.rows(lent, torch.uint8, home.size())]
        dist.all_gather(rows, values.view(torch.uint8), group=home)
        profile.bytes_home += values.nbytes * (len(rows) - 1)
    with profile.capture_failure("combine"):
        weighted_mean([row.view(values.dtype) for row in rows], [1.0] * len(rows), values)
    pool.release(lent)
