"""Pictures and numbers about a federation: its topology, the traffic of a round, the curves of a run.

Importing this room needs neither torch nor matplotlib; the figures load matplotlib when they are drawn.
"""

from xffl.report.curves import curves_figure
from xffl.report.figure import topology_figure
from xffl.report.text import topology_text
from xffl.report.traffic import round_traffic

__all__ = ["curves_figure", "round_traffic", "topology_figure", "topology_text"]
