"""How the model is spread inside a cell."""

from xffl.parallel.shard import shard

__all__ = ["shard"]
