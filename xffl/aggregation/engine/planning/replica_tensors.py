"""The tensors of a replica that a mesh cuts inside the cells, so that its ranks hold different tensors or parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from xffl.aggregation.engine.planning.mesh_cut import Part
from xffl.aggregation.engine.planning.tensors import (
    Axis,
    Division,
    Manifest,
    ModelTensor,
    TensorInfo,
    chunk_numel,
    cuts_of,
)
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

__all__ = ["RankTensors", "ReplicaTensors", "describe_rank_tensors", "gather_replica_tensors"]


class TensorPlacement(NamedTuple):
    """What a shard holds of a tensor."""

    axis: Axis  # the axis of which this is the shard's chunk; REPLICATED for the whole tensor
    # Placement, number of parts and part along each mesh dimension that cuts it: equal keys mean equal elements.
    key: tuple[tuple[str, int, int], ...]
    numel: int  # number of elements


class RankTensors(NamedTuple):
    """A rank's tensors, its part of each, and which patterns matched; sent to the other ranks of the replica."""

    tensors: tuple[TensorInfo, ...]
    placements: tuple[TensorPlacement, ...]
    is_used: tuple[bool, ...]


@dataclass(frozen=True)
class ReplicaTensors:
    """The tensors of all shards of a replica, by name."""

    moving: tuple[TensorInfo, ...]  # those that take part in rounds
    axes: tuple[Axis, ...]  # how the cells cut each of these
    parts: tuple[tuple[Part, ...], ...]  # for each of these its parts, if it is held by parts
    names: tuple[str, ...]  # the names of all
    is_used: tuple[bool, ...]  # whether each pattern has matched on some shard
    shards: Mapping[str, tuple[int, ...]]  # by tensor name, the shards that hold it or a part of it
    text: str  # all of this as text; ranks that average with each other have the same

    @property
    def holders(self) -> frozenset[tuple[int, ...]]:
        """The sets of several shards that hold the same part."""
        return frozenset(part.holders for parts in self.parts for part in parts if len(part.holders) > 1)


def describe_rank_tensors(manifest: Manifest, topology: Topology, at: Coordinates, first: int) -> RankTensors:
    """Return the tensors of this rank and their parts; local."""
    replica = [first + rank for rank in topology.shard_group(at.cell, at.replica)]
    placements = tuple(_placement(entry, replica, at.shard) for entry in manifest.entries)
    return RankTensors(tuple(entry.facts for entry in manifest.entries), placements, manifest.is_used)


def _placement(entry: ModelTensor, replica: Sequence[int], shard: int) -> TensorPlacement:
    tensor = entry.tensor()
    if entry.policy == "local" or not isinstance(tensor, DTensor):
        return TensorPlacement(Division.REPLICATED, (), prod(entry.real_shape))
    cuts, mesh = cuts_of(tensor), tensor.device_mesh
    numel, at = entry.elements(0).numel(), mesh.get_coordinate()
    hint = "shard it over the ranks of one replica, as the state's cell_shape says"
    if at is None or any(place.is_partial() for _, place in cuts):
        raise ConfigError(f"tensor {entry.name!r} has placements {tensor.placements} on {mesh}; {hint}")
    if not cuts:
        return TensorPlacement(Division.REPLICATED, (), numel)
    dims = {dim for dim, _ in cuts}
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else at[dim] for dim in range(mesh.ndim))].flatten().tolist()
    if not set(ranks) <= set(replica):
        raise ConfigError(
            f"tensor {entry.name!r} with placements {tensor.placements} is cut over ranks {ranks}, but the replica "
            f"here has ranks {list(replica)}; {hint}"
        )
    key = tuple((str(place), mesh.size(dim), at[dim]) for dim, place in cuts)
    dim, place = cuts[0]
    if len(cuts) == 1 and type(place) is Shard:  # not a subclass: it may cut in other ways
        whole_replica = (len(replica), shard, chunk_numel(entry, place.dim, len(replica), shard))
        if (mesh.size(dim), at[dim], numel) == whole_replica:
            return TensorPlacement(place.dim, key, numel)
    return TensorPlacement(Division.BY_PARTS, key, numel)


def gather_replica_tensors(rank_tensors: RankTensors, group: dist.ProcessGroup) -> ReplicaTensors:
    """Gather the tensors of a replica's shards into one table; collective over the ranks of each replica."""
    gathered: list[RankTensors] = [rank_tensors] * group.size()
    dist.all_gather_object(gathered, rank_tensors, group=group)
    if len({len(rank.is_used) for rank in gathered}) > 1:
        raise ConfigError("the ranks of a replica were given different policies or codecs; give all the same")
    by_name: dict[str, dict[int, tuple[TensorInfo, TensorPlacement]]] = {}
    for shard, held in enumerate(gathered):
        for info, placement in zip(held.tensors, held.placements, strict=True):
            by_name.setdefault(info.name, {})[shard] = info, placement
    moving, axes, parts, lines = [], [], [], []
    for name in sorted(by_name):
        by_shard = by_name[name]
        info = _common(name, {shard: described for shard, (described, _) in by_shard.items()})
        if info.policy == "local":
            lines.append(f"{info}{'' if len(by_shard) == len(gathered) else f', on shards {sorted(by_shard)}'}")
            continue
        placements = {shard: placement for shard, (_, placement) in by_shard.items()}
        cuts = {placement.axis for placement in placements.values()}
        axis = cuts.pop() if len(placements) == len(gathered) and len(cuts) == 1 else Division.BY_PARTS
        by_key = _by_key(info, placements) if axis is Division.BY_PARTS else {}
        moving.append(info)
        axes.append(axis)
        parts.append(tuple(part for part in by_key.values() if part.numel))
        lines.append(f"{info}{_text(axis, by_key)}")
    is_used = tuple(map(any, zip(*(rank.is_used for rank in gathered), strict=True)))
    return ReplicaTensors(
        moving=tuple(moving),
        axes=tuple(axes),
        parts=tuple(parts),
        names=tuple(by_name),
        is_used=is_used,
        shards={name: tuple(by_shard) for name, by_shard in by_name.items()},
        text="\n".join(lines),
    )


def _common(name: str, by_shard: dict[int, TensorInfo]) -> TensorInfo:
    """Return a tensor's description, which must be equal on all shards."""
    first, info = next(iter(by_shard.items()))
    for shard, other in by_shard.items():
        if other != info:
            shown = [str(described).partition("\t")[2] for described in (info, other)]
            raise ConfigError(
                f"tensor {name!r} is {shown[0]} on shard {first} and {shown[1]} on shard {shard} of a replica; give "
                "the tensors of a stage the names that they have in the whole model"
            )
    return info


def _by_key(info: TensorInfo, placements: dict[int, TensorPlacement]) -> dict[tuple[tuple[str, int, int], ...], Part]:
    """Return the parts of a tensor, in the order of their first shards."""
    parts: dict[tuple[tuple[str, int, int], ...], Part] = {}
    for shard, (_, key, numel) in sorted(placements.items()):
        parts[key] = Part(numel, (*parts[key].holders, shard) if key in parts else (shard,))
    numel = sum(part.numel for part in parts.values())
    if numel != prod(info.real_shape):
        raise ConfigError(
            f"tensor {info.name!r} has {prod(info.real_shape)} elements, but the shards of a replica hold parts of "
            f"{numel}{_text(Division.BY_PARTS, parts)}; shard it over one mesh, as the state's cell_shape says"
        )
    return parts


def _text(axis: Axis, parts: dict[tuple[tuple[str, int, int], ...], Part]) -> str:
    if axis is Division.REPLICATED:
        return ""
    if axis is not Division.BY_PARTS:
        return f", cut along axis {axis} over all shards"
    shown = (
        f"{' '.join(f'{place} {at}/{size}' for place, size, at in key) or 'all'} ({part.numel}) on "
        f"{'+'.join(map(str, part.holders))}"
        for key, part in parts.items()
    )
    return f", parts by shard: {', '.join(shown)}"
