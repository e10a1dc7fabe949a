"""Who talks to whom: process groups, their state, and the session around them."""

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.process_group import cleanup_distributed_process_group, setup_distributed_process_group
from xffl.distributed.session import session

__all__ = [
    "DistributedState",
    "cleanup_distributed_process_group",
    "session",
    "setup_distributed_process_group",
]
