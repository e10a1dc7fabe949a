"""Rounds: plan, exchange, vote, and the rounds in a training loop.

The names below are imported when they are first used, so that the registry of algorithms needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.aggregation.aggregator import Aggregator
    from xffl.aggregation.federated_scaling import FederatedScaling
    from xffl.aggregation.federations.hierarchical import Level, Levels
    from xffl.aggregation.report import RoundReport
    from xffl.aggregation.rounds.loop_hooks import LoopHooks
    from xffl.aggregation.steps.expert_tokens import ExpertTokens

__all__ = ["Aggregator", "ExpertTokens", "FederatedScaling", "Level", "Levels", "LoopHooks", "RoundReport"]

__getattr__, __dir__ = lazy_names(__name__)
