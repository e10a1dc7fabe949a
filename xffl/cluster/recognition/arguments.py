"""The place of a process as arguments say it, where no launcher is to be asked: what they leave open, and refusals."""

from __future__ import annotations

from collections.abc import Mapping

from xffl.cluster.recognition.launcher import Fields, honour_master
from xffl.cluster.recognition.refusals import refuse_half_a_place, refuse_other_launchers
from xffl.errors import LaunchError

__all__ = ["complete_arguments"]

_PLACE_ON_NODES = ("node_local_rank", "node_local_size", "node_rank", "node_world_size")
"""Fields that say where the process stands on its node, and among the nodes"""


def complete_arguments(found: Fields, environ: Mapping[str, str], called: Mapping[str, str]) -> None:
    """Fill in what arguments leave open where no launcher is to be asked."""
    shown = ", ".join(f"{called[name]}={value!r}" for name, value in found.items())
    if "rank" not in found and found.get("world_size", 1) == 1:
        refuse_other_launchers(environ)
        if not found:
            refuse_half_a_place(environ)
            return
        found.take("a single process", rank=0, world_size=1)
    if "rank" not in found or "world_size" not in found:
        raise LaunchError(f"{shown} without a launcher of that world needs rank and world_size; give both")
    world = found["world_size"]
    if not any(name in found for name in _PLACE_ON_NODES) or found.get("node_local_size") == world:
        found.take(found.sources["rank"], node_local_rank=found["rank"])
        found.take(found.sources["world_size"], node_local_size=world, node_rank=0, node_world_size=1)
    absent = [name for name in _PLACE_ON_NODES if name not in found]
    if world > 1:
        honour_master(found, environ)
        absent += [name for name in ("master_addr", "master_port") if name not in found]
    if absent:
        wanted = ", ".join(called[name] for name in absent)
        raise LaunchError(f"{shown} leaves {wanted} open; give them, or start with a launcher")
