"""Which of the visible GPUs a process takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from xffl.errors import LaunchError

__all__ = ["pick_gpu"]


def pick_gpu(local_rank: int, local_size: int, visible: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the index of the GPU for a rank: its own where all are visible, the only one where a launcher bound it.

    :param local_rank: Rank of the process on its node.
    :param local_size: Processes on the node.
    :param visible: GPUs that this process sees.
    :param environ: Environment to read; ``None`` means the process's own.
    :return: Index among the visible GPUs.
    :raises LaunchError: if there are fewer GPUs than processes.
    """
    environ = os.environ if environ is None else environ
    if visible >= local_size:
        return local_rank
    is_bound = any(
        environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    if visible == 1 and is_bound:
        return 0
    raise LaunchError(
        f"{local_size} processes run on this node, but this one sees {visible} GPUs; start one process for each GPU, "
        "or give device='cpu'"
    )
