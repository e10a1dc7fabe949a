"""The place of a process as arguments say it, where no launcher is to be asked: what they leave open, and refusals."""

from __future__ import annotations

from collections.abc import Mapping

from xffl.cluster.recognition.launcher import Fields, honour_master
from xffl.cluster.recognition.refusals import refuse_half_a_place, refuse_other_launchers
from xffl.errors import LaunchError

__all__ = ["complete_arguments"]

_PLACE_ON_NODES = ("node_local_rank", "node_local_size", "node_rank", "node_world_size")
"""Fields that say where the process stands on its node, and among the nodes"""


def complete_arguments(fields: Fields, environ: Mapping[str, str], called: Mapping[str, str]) -> None:
    """Fill in what arguments leave open where no launcher is to be asked."""
    shown = ", ".join(f"{called[name]}={value!r}" for name, value in fields.items())
    if "rank" not in fields and fields.get("world_size", 1) == 1:
        refuse_other_launchers(environ)
        if not fields:
            refuse_half_a_place(environ)
            return
        fields.take("a single process", rank=0, world_size=1)
    if "rank" not in fields or "world_size" not in fields:
        raise LaunchError(f"{shown} without a launcher of that world needs rank and world_size; give both")
    world = fields["world_size"]
    if not any(name in fields for name in _PLACE_ON_NODES) or fields.get("node_local_size") == world:
        fields.take(fields.sources["rank"], node_local_rank=fields["rank"])
        fields.take(fields.sources["world_size"], node_local_size=world, node_rank=0, node_world_size=1)
    absent = [name for name in _PLACE_ON_NODES if name not in fields]
    if world > 1:
        honour_master(fields, environ)
        absent += [name for name in ("master_addr", "master_port") if name not in fields]
    if absent:
        wanted = ", ".join(called[name] for name in absent)
        raise LaunchError(f"{shown} leaves {wanted} open; give them, or start with a launcher")
