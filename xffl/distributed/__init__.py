"""Who talks to whom: process groups, the state that describes them, and the mesh inside a cell."""

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import CommParameters, DeviceParameters
from xffl.distributed.process_group import cleanup_distributed_process_group, setup_distributed_process_group
from xffl.distributed.session import session
from xffl.distributed.world import DistributedWorld

__all__ = [
    "CommParameters",
    "DeviceParameters",
    "DistributedState",
    "DistributedWorld",
    "cleanup_distributed_process_group",
    "session",
    "setup_distributed_process_group",
]
