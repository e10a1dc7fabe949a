"""What frameworks are asked about cells: whether their ranks are one, and whether all make equally many steps."""

from __future__ import annotations

from xffl.aggregation.algorithms.every_steps import EverySteps, Schedule, schedule_of
from xffl.aggregation.algorithms.schedules import Divergence, EveryEpochs, PerCell, Warmup
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError

__all__ = ["check_cells", "find_unlike_schedule"]


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


def find_unlike_schedule(every: object) -> Schedule | None:
    """Return the schedule, if by it one cell may make more steps than another between the same two rounds; local.

    :param every: What :class:`xffl.FederatedScaling` is given.
    :return: ``None`` where all cells make rounds after the same steps, as far as xffl knows the schedule.
    :raises ConfigError: if there is no such schedule.
    """
    schedule = None if every is None else schedule_of(every)  # without, the algorithm says it, as a number
    return schedule if schedule is not None and _may_be_unlike(schedule) else None


def _may_be_unlike(schedule: Schedule) -> bool:
    match schedule:
        case EverySteps() | Divergence():
            return False
        case PerCell():
            return len(set(schedule.counts)) > 1
        case EveryEpochs():
            return not isinstance(schedule.steps_per_epoch, int) and len(set(schedule.steps_per_epoch)) > 1
        case Warmup():
            return find_unlike_schedule(schedule.then) is not None
        case _:
            return True
