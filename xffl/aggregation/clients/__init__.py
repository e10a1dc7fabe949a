"""What cells do differently between rounds: local methods, and the count of what local steps amount to."""

from xffl.aggregation.clients.base import Client
from xffl.aggregation.clients.prox import FedProx
from xffl.aggregation.clients.scaffold import Scaffold

__all__ = ["Client", "FedProx", "Scaffold"]
