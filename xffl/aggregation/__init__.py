"""What happens in a round: plan, exchange, vote, and the rounds in a training loop."""

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.report import RoundReport
from xffl.aggregation.scaling import FederatedScaling

__all__ = ["Aggregator", "FederatedScaling", "RoundReport"]
