"""How the rounds of a framework's trainer begin: with one model in all cells, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.aggregation.report import RoundReport
from xffl.distributed.distributed_state import DistributedState
from xffl.integrations.checkpoints import CellCheckpoints, WholeCheckpoint
from xffl.integrations.first_model import take_model_of_first_cell, weights_put_aside
from xffl.integrations.weights import BatchCount

__all__ = ["enter_rounds"]


def enter_rounds(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    state: DistributedState,
    *,
    count: BatchCount,
    on_round: Callable[[RoundReport], None],
    options: Mapping[str, Any],
    checkpoints: CellCheckpoints | None,
    resumed: WholeCheckpoint | None,
) -> tuple[FederatedScaling, Mapping[str, Any]]:
    """Enter rounds, before the first step; collective over the job. ``scaling.join()`` is left to the caller.

    Isolated cells that begin take the model of cell 0. Those that go on have loaded theirs, which may differ between
    two rounds; their rounds go on from what each rank has saved. If that cannot be read, the rounds are left again.

    :param model: The model, as a framework has wrapped it.
    :param optimizers: What trains it.
    :param state: The state of this rank.
    :param count: Counts what this rank trains on, and starts anew with each round.
    :param on_round: Called with the report of each round.
    :param options: Keywords of :class:`xffl.FederatedScaling`.
    :param checkpoints: The checkpoints of this cell, if any.
    :param resumed: The checkpoint that the framework has loaded, if any.
    :return: The rounds, and what was saved with them: nothing where they begin.
    :raises CheckpointError: if this rank's file of the checkpoint cannot be read.
    """

    def take_count() -> float:
        counted = count.counted()
        count.restart(0.0)
        return counted

    if resumed is None and state.isolated is not None:
        take_model_of_first_cell(model, state)
    scaling = FederatedScaling(model, optimizers, state, weight=take_count, on_round=on_round, **options)
    if resumed is None or checkpoints is None:
        scaling.__enter__()
        return scaling, {}
    with weights_put_aside(model):
        scaling.__enter__()
    try:
        saved: Mapping[str, Any] = checkpoints.load(resumed)
        scaling.load_state_dict(saved["rounds"])
        count.restart(float(saved["count"]))
    except BaseException as error:
        scaling.__exit__(type(error), error, error.__traceback__)
        raise
    return scaling, saved
