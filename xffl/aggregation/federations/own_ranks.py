"""What the ranks of one cell must have in common before it meets other cells.

Whatever differs inside a cell is no other cell's fault: it ends with the reason, and no round of the others breaks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.engine.alike.rank_differences import describe_models
from xffl.aggregation.engine.planning.tensors import Manifest
from xffl.aggregation.engine.weights.weight_keepers import read_weights
from xffl.aggregation.options import Options
from xffl.distributed.agreement.consistency import check_consistent, run_on_all_ranks
from xffl.distributed.agreement.differences import difference_of
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, XfflError
from xffl.journal.records import RoundRecord

__all__ = ["compare_held", "compare_options", "compare_steps"]

OPTIONS = (
    *("combine", "server", "privacy", "secure", "tensor_weights", "bucket_bytes", "atomic", "nonfinite", "form"),
    *("rails", "fragments", "overlap", "norms"),
)
"""Arguments of :class:`xffl.Aggregator` that :class:`Options` reads."""


def compare_options(model: nn.Module, state: DistributedState, given: Mapping[str, Any]) -> None:
    """Raise where the ranks have other models, or were given other options of rounds; collective over the cell.

    Ranks with parts of layers or stages of a pipeline have other tensors; only their options are compared here.

    :param model: The model.
    :param state: The state of the cell's world.
    :param given: Options of :class:`xffl.Aggregator`.
    :raises ConfigError: on all ranks.
    """
    parameters = inspect.signature(Aggregator).parameters
    arguments = {name: parameter.default for name, parameter in parameters.items()} | dict(given)
    with run_on_all_ranks("models", convert=_unreadable, describe=describe_models) as share:
        options = Options.of(**{name: arguments[name] for name in OPTIONS})
        text = f"(options)\t{options}\n"
        if state.topology.cell_shape is None:
            weights, _ = read_weights(model)
            text += str(Manifest(weights, arguments["policies"], arguments["codec"], extra=arguments["extra"]))
        share(text)


def compare_held(record: RoundRecord | None) -> None:
    """Raise where the ranks hold the models of other rounds; collective over the cell.

    :param record: The round whose model this rank holds; ``None`` for its own start.
    :raises ConfigError: on all ranks.
    """
    held = "none" if record is None else f"round {record.round} (record {record.number}.{record.id})"
    check_consistent("rounds of the models that ranks hold", held, describe=_describe_held)


def compare_steps(steps: float, *, is_waiting: bool) -> None:
    """Raise where the ranks have made other numbers of steps since the last round; collective over the cell.

    :param steps: How many steps count for this rank.
    :param is_waiting: Whether they wait for a round.
    :raises ConfigError: on all ranks.
    """
    made = f"{steps:g}" if is_waiting else "none"
    check_consistent("steps since the last round", made, describe=_describe_steps)


def _describe_held(held: dict[int, str]) -> XfflError:
    return difference_of("rounds by their checkpoints", held, "load one checkpoint on all ranks of the cell")


def _describe_steps(made: dict[int, str]) -> XfflError:
    advice = "all ranks of a cell make the same steps, and load one checkpoint"
    return difference_of("numbers of steps since the last round", made, advice)


def _unreadable(wrong: Exception) -> ConfigError:
    return ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
