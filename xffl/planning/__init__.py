"""Pictures and numbers about a federation: topology, traffic and time of rounds, the inside of a cell, curves of a run.

Importing this room needs neither torch nor matplotlib; the figures load matplotlib when they are drawn.
"""

from xffl.costs import codec_bytes, codec_ratio
from xffl.planning.bench_figure import bench_figure
from xffl.planning.bench_table import bench_table
from xffl.planning.cell_traffic import step_traffic
from xffl.planning.curves import curves_figure
from xffl.planning.figure import topology_figure
from xffl.planning.forecast import forecast_data_parallel, forecast_round
from xffl.planning.memory import ModelSize, TrainingSize, rank_memory
from xffl.planning.mesh import mesh_text
from xffl.planning.mesh_figure import mesh_figure
from xffl.planning.partition_figure import partition_figure
from xffl.planning.partition_table import partition_table
from xffl.planning.pipeline import Link
from xffl.planning.text import topology_text
from xffl.planning.traffic import round_traffic
from xffl.planning.utilization import utilization_figure

__all__ = [
    "Link",
    "ModelSize",
    "TrainingSize",
    "bench_figure",
    "bench_table",
    "codec_bytes",
    "codec_ratio",
    "curves_figure",
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
    "utilization_figure",
]
