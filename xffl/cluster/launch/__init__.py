"""Launchers: the ranks of a job are started as local processes, by srun or over ssh, and watched until they end.

``job_layout`` lays ranks over hosts; ``launch`` (local), ``srun`` and ``ssh`` (with ``ssh_agent`` on each host, which
one of the ``host_shells`` reaches) start a ``runner`` for each rank as a ``child``, which runs the ``script`` and
reports its ``failure``; ``failure`` also watches the job's end, ``logs`` shows what ranks print, and ``merged_lines``
what very many ranks print alike; ``affinity`` gives a rank its cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.cluster.launch.local import launch_distributed

__all__ = ["launch_distributed"]

__getattr__, __dir__ = lazy_names(__name__)
