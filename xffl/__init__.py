"""xffl trains one sharded model on several groups of GPUs that are joined by slow links.

The names below are imported when they are first used, so that what needs no torch (``xffl plan``) does without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    RoundError,
    StateError,
    TopologyError,
    XfflError,
)
from xffl.lazy import lazy_names
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.aggregation import Aggregator, FederatedScaling, RoundReport
    from xffl.distributed.adoption import adopt
    from xffl.distributed.distributed_state import DistributedState
    from xffl.distributed.session import session
    from xffl.distributed.values.cell_means import mean_over_cell
    from xffl.distributed.world import DistributedWorld
    from xffl.parallel.no_sync import no_sync
    from xffl.parallel.spread import shard

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "CheckpointError",
    "ConfigError",
    "DistributedState",
    "DistributedWorld",
    "FederatedScaling",
    "LaunchError",
    "RoundError",
    "RoundReport",
    "StateError",
    "Topology",
    "TopologyError",
    "XfflError",
    "adopt",
    "mean_over_cell",
    "no_sync",
    "session",
    "shard",
]

__getattr__, __dir__ = lazy_names(__name__)
