"""Which rounds a training loop gets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from xffl.aggregation.rounds.backend import RoundBackend
from xffl.aggregation.rounds.config import RoundArguments, RoundConfig
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError

__all__ = ["choose_rounds"]


def choose_rounds(
    model: nn.Module, state: DistributedState, config: RoundConfig, asked: RoundArguments
) -> RoundBackend:
    """Return what makes the rounds, as the state says; local, and nothing else is made yet.

    Each kind is imported where it is chosen: torchft, checkpoints and levels are for those who ask for them.
    """
    given = None if isinstance(asked.aggregator, Mapping | None) else asked.aggregator
    if state.elastic is not None:
        from xffl.aggregation.rounds.elastic import ElasticRounds

        if given is not None:
            raise ConfigError(
                f"an elastic federation makes its own aggregator, got {type(given).__name__}; give aggregator as a "
                "mapping of its options"
            )
        return ElasticRounds(model, state, config)
    if state.lone_cell is not None:
        from xffl.aggregation.rounds.files import FileRounds

        return FileRounds(model, state, config, asked)
    from xffl.aggregation.rounds.network import NetworkRounds

    return NetworkRounds(model, state, config, given)
