"""The ranks that a framework trains over: those of one cell."""

from __future__ import annotations

from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError

__all__ = ["check_cells"]


def check_cells(state: DistributedState, trainer: str) -> None:
    """Refuse a world in which a framework would train over several cells; local.

    :param state: The state of this rank.
    :param trainer: What trains, for the message.
    :raises ConfigError: if the world is no single cell of a federation; the text has the line to write.
    """
    ranks = state.topology.world_size
    is_in_federation = state.isolated is not None or state.lone_cell is not None
    if state.topology.cells > 1 or (ranks > 1 and not is_in_federation):
        sizes = ",".join(map(str, state.topology.sizes)) if state.topology.cells > 1 else "2,2"
        raise ConfigError(
            f"{trainer} trains over torch.distributed's default group, which holds all {ranks} ranks of this "
            "job: gradients would cross between cells in every step; start with xffl exec --isolate --federated "
            f"{sizes} SCRIPT, and without an xffl.session in the script"
        )
