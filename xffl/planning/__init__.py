"""Forecasts of a federation and their figures: topology, traffic and time of rounds, the inside of a cell.

``text`` and ``figures`` draw the topology and hold what the other files draw with; ``traffic``, ``memory``,
``codec_links`` and ``forecast`` calculate; ``mesh``, ``partition`` and ``bench`` each write one thing as text and as a
figure; ``plan_text`` and ``summary`` write what ``xffl plan`` prints: its numbers, and its end. Names are imported when
they are first used. None needs torch; figures load matplotlib when they are drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.message_sizes.codecs import codec_bytes, codec_ratio
    from xffl.planning.bench_tables import bench_figure, bench_table
    from xffl.planning.codec_links import codec_limits
    from xffl.planning.figures import topology_figure
    from xffl.planning.forecast import Link, forecast_data_parallel, forecast_round
    from xffl.planning.memory import ModelSize, TrainingSize, rank_memory
    from xffl.planning.mesh import mesh_figure, mesh_text
    from xffl.planning.partition import partition_figure, partition_table
    from xffl.planning.text import topology_text
    from xffl.planning.traffic import round_traffic, step_traffic

__all__ = [
    "Link",
    "ModelSize",
    "TrainingSize",
    "bench_figure",
    "bench_table",
    "codec_bytes",
    "codec_limits",
    "codec_ratio",
    "forecast_data_parallel",
    "forecast_round",
    "mesh_figure",
    "mesh_text",
    "partition_figure",
    "partition_table",
    "rank_memory",
    "round_traffic",
    "step_traffic",
    "topology_figure",
    "topology_text",
]

__getattr__, __dir__ = lazy_names(__name__)
