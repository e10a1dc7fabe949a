"""A mesh of the caller's own, over which FSDP is to shard."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from xffl.errors import ConfigError, TopologyError

__all__ = ["check_mesh"]


def check_mesh(mesh: object, kind: str) -> DeviceMesh:
    """Return a mesh of one dimension on a kind of device that holds this rank; else raise; local."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a DeviceMesh of one dimension, or None for all ranks, got {mesh!r}")
    if mesh.ndim != 1:
        raise ConfigError(f"mesh {mesh!r} has {mesh.ndim} dimensions; give a one-dimensional one, or call set_hsdp")
    if mesh.device_type != kind:
        raise ConfigError(f"mesh {mesh!r} is on {mesh.device_type}, the state on {kind}; give a mesh on {kind}")
    if mesh.get_coordinate() is None:
        raise TopologyError(f"mesh {mesh!r} does not hold rank {mesh.get_rank()}; give each rank its own mesh")
    return mesh
