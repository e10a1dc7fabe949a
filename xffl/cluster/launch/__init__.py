"""Launchers: the ranks of a job are started here, over ssh, srun or as local processes, and watched until they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.cluster.launch.launch import launch_distributed

__all__ = ["launch_distributed"]

__getattr__, __dir__ = lazy_names(__name__, {"launch_distributed": "xffl.cluster.launch.launch"})
