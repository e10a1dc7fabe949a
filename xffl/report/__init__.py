"""Pictures and numbers about a federation: topology, traffic and time of rounds, the inside of a cell, curves of a run.

Importing this room needs neither torch nor matplotlib; the figures load matplotlib when they are drawn.
"""

from xffl.costs import codec_bytes, codec_ratio
from xffl.report.bench_figure import bench_figure
from xffl.report.bench_table import bench_table
from xffl.report.cell_traffic import step_traffic
from xffl.report.curves import curves_figure
from xffl.report.figure import topology_figure
from xffl.report.forecast import forecast_data_parallel, forecast_round
from xffl.report.memory import ModelSize, TrainingSize, rank_memory
from xffl.report.mesh import mesh_text
from xffl.report.mesh_figure import mesh_figure
from xffl.report.partition_figure import partition_figure
from xffl.report.partition_table import partition_table
from xffl.report.pipeline import Link
from xffl.report.text import topology_text
from xffl.report.traffic import round_traffic
from xffl.report.utilization import utilization_figure

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
