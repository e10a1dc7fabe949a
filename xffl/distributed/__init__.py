"""Who talks to whom: process groups, the state that describes them, and the mesh inside a cell.

The names below are imported when they are first used, so that the parameters of a mesh need no torch. ``session`` has
the name of its module, so it stands in ``xffl`` and :mod:`xffl.distributed.session` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.distributed.distributed_state import DistributedState
    from xffl.distributed.parameters import (
        CommParameters,
        DeviceParameters,
        ElasticParameters,
        FaultToleranceParameters,
    )
    from xffl.distributed.replicas.fault_tolerance import FaultTolerantWorld
    from xffl.distributed.session import cleanup_distributed_process_group, setup_distributed_process_group
    from xffl.distributed.world import DistributedWorld

__all__ = [
    "CommParameters",
    "DeviceParameters",
    "DistributedState",
    "DistributedWorld",
    "ElasticParameters",
    "FaultToleranceParameters",
    "FaultTolerantWorld",
    "cleanup_distributed_process_group",
    "setup_distributed_process_group",
]

__getattr__, __dir__ = lazy_names(__name__)
