"""What each shard of a replica really holds, where a mesh inside the cells cuts or deals out the model.

With tensor and sequence parallelism a tensor is cut along several dimensions of a mesh, or along some and copied along
others; with a pipeline a rank holds the tensors of its stage alone. So the shards of each replica tell each other what
they hold, and all replicas of all cells compare what comes out, which must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from xffl.aggregation.axes import BY_PARTS, REPLICATED, cuts_of
from xffl.aggregation.entries import Entry, Facts
from xffl.aggregation.plan import Cut, Part
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

__all__ = ["Holding", "Spread", "holding_of", "spread_of"]

WHOLE: tuple[tuple[str, int, int], ...] = ()
"""The key of a tensor that is not cut."""


class Held(NamedTuple):
    """What a shard holds of a tensor.

    :param axis: The axis, where this is the shard's chunk along it; ``REPLICATED`` for all, else ``BY_PARTS``.
    :param key: Placement, parts and part along each mesh dimension that cuts it: equal keys are equal elements.
    :param numel: Number of elements.
    """

    axis: int
    key: tuple[tuple[str, int, int], ...]
    numel: int


class Holding(NamedTuple):
    """What a rank tells the others of its replica: its tensors, what it holds of them, and which patterns matched."""

    tensors: tuple[Facts, ...]
    held: tuple[Held, ...]
    is_used: tuple[bool, ...]


@dataclass(frozen=True)
class Spread:
    """The tensors of all shards of a replica, by name.

    :param moving: Those that take part in rounds.
    :param axes: For each of these the axis along which cells cut it, ``REPLICATED``, or ``BY_PARTS``.
    :param parts: For each of these its parts, where it is held by parts.
    :param names: The names of all.
    :param is_used: Which patterns have matched on some shard.
    :param text: All of this; ranks that may average with each other have the same.
    """

    moving: tuple[Facts, ...]
    axes: tuple[int, ...]
    parts: tuple[tuple[Part, ...], ...]
    names: tuple[str, ...]
    is_used: tuple[bool, ...]
    text: str

    @property
    def holders(self) -> frozenset[tuple[int, ...]]:
        """The sets of several shards that hold the same part."""
        return frozenset(part.holders for parts in self.parts for part in parts if len(part.holders) > 1)


def holding_of(
    entries: Sequence[Entry], is_used: tuple[bool, ...], topology: Topology, at: Coordinates, first: int
) -> Holding:
    """Return what this rank holds; local.

    :param entries: The tensors of its model.
    :param is_used: Which patterns have matched one.
    :param topology: The federation.
    :param at: The rank's place in it.
    :param first: The rank of the world that the topology's ranks are counted from.
    :return: Its part of what the replica holds.
    :raises ConfigError: if a tensor is spread over other ranks than those of a replica, or waits for a reduction.
    """
    replica = [first + rank for rank in topology.shard_group(at.cell, at.replica)]
    held = tuple(_held(entry, replica, at.shard) for entry in entries)
    return Holding(tuple(entry.facts for entry in entries), held, is_used)


def _held(entry: Entry, replica: Sequence[int], shard: int) -> Held:
    tensor = entry.tensor()
    if entry.policy == "local" or not isinstance(tensor, DTensor):
        return Held(REPLICATED, WHOLE, prod(entry.real_shape))
    cuts, mesh = cuts_of(tensor), tensor.device_mesh
    numel, at = entry.elements(0).numel(), mesh.get_coordinate()
    knob = "shard it over the ranks of one replica, as the state's cell_shape says"
    if at is None or any(place.is_partial() for _, place in cuts):
        raise ConfigError(f"tensor {entry.name!r} has placements {tensor.placements} on {mesh}; {knob}")
    if not cuts:
        return Held(REPLICATED, WHOLE, numel)
    dims = {dim for dim, _ in cuts}
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else at[dim] for dim in range(mesh.ndim))].flatten().tolist()
    if not set(ranks) <= set(replica):
        raise ConfigError(
            f"tensor {entry.name!r} with placements {tensor.placements} is cut over ranks {ranks}, but the replica "
            f"here has ranks {list(replica)}; {knob}"
        )
    key = tuple((str(place), mesh.size(dim), at[dim]) for dim, place in cuts)
    dim, place = cuts[0]
    if len(cuts) == 1 and isinstance(place, Shard) and type(place) is Shard:
        length = entry.real_shape[place.dim]
        cut = Cut.of_axis(length, prod(entry.real_shape) // max(1, length), len(replica))
        first, last = cut.bounds(shard)
        if (mesh.size(dim), at[dim], numel) == (len(replica), shard, last - first):
            return Held(place.dim, key, numel)
    return Held(BY_PARTS, key, numel)


def spread_of(holding: Holding, group: dist.ProcessGroup) -> Spread:
    """Exchange what the shards of a replica hold, and put it together.

    Collective over the ranks of each replica; a rank sends some hundred bytes for each of its tensors.

    :param holding: What this rank holds.
    :param group: The ranks of the replica, by shard.
    :return: What they all hold; the same on all of them.
    :raises ConfigError: if two shards say different things of a tensor, or do not make up all of it; on all of these
        ranks alike, but not on those of other replicas.
    """
    told: list[Holding] = [holding] * group.size()
    dist.all_gather_object(told, holding, group=group)
    if len({len(one.is_used) for one in told}) > 1:
        raise ConfigError("the ranks of a replica were given different policies or codecs; give all the same")
    by_name: dict[str, dict[int, tuple[Facts, Held]]] = {}
    for shard, (tensors, of_tensors, _) in enumerate(told):
        for facts, held in zip(tensors, of_tensors, strict=True):
            by_name.setdefault(facts.name, {})[shard] = facts, held
    moving, axes, parts, lines = [], [], [], []
    for name in sorted(by_name):
        said = by_name[name]
        facts = _common(name, {shard: tensor for shard, (tensor, _) in said.items()})
        here = {shard: held for shard, (_, held) in said.items()}
        if facts.policy == "local":
            lines.append(f"{facts}{'' if len(said) == len(told) else f', on shards {sorted(said)}'}")
            continue
        axis = _axis(here, len(told))
        by_key = _by_key(facts, here) if axis == BY_PARTS else {}
        moving.append(facts)
        axes.append(axis)
        parts.append(tuple(part for part in by_key.values() if part.numel))
        lines.append(f"{facts}{_text(axis, by_key)}")
    is_used = tuple(map(any, zip(*(one.is_used for one in told), strict=True)))
    return Spread(tuple(moving), tuple(axes), tuple(parts), tuple(by_name), is_used, "\n".join(lines))


def _common(name: str, said: dict[int, Facts]) -> Facts:
    """Return what all shards say of a tensor."""
    facts = next(iter(said.values()))
    others = {shard: one for shard, one in said.items() if one != facts}
    if others:
        shard, other = next(iter(others.items()))
        shown = [str(one).partition("\t")[2] for one in (facts, other)]
        raise ConfigError(
            f"tensor {name!r} is {shown[0]} on shard {next(iter(said))} and {shown[1]} on shard {shard} of a replica; "
            "give the tensors of a stage the names that they have in the whole model"
        )
    return facts


def _axis(held: dict[int, Held], shards: int) -> int:
    """Return along which axis all shards are cut like the shards of a cell."""
    axes = {one.axis for one in held.values()}
    return axes.pop() if len(held) == shards and len(axes) == 1 else BY_PARTS


def _by_key(facts: Facts, held: dict[int, Held]) -> dict[tuple[tuple[str, int, int], ...], Part]:
    """Return the parts of a tensor, in the order of their first shards."""
    parts: dict[tuple[tuple[str, int, int], ...], Part] = {}
    for shard, (_, key, numel) in sorted(held.items()):
        parts[key] = Part(numel, (*parts[key].holders, shard) if key in parts else (shard,))
    numel = sum(part.numel for part in parts.values())
    if numel != prod(facts.real_shape):
        raise ConfigError(
            f"tensor {facts.name!r} has {prod(facts.real_shape)} elements, but the shards of a replica hold parts of "
            f"{numel}{_text(BY_PARTS, parts)}; shard it over one mesh, as the state's cell_shape says"
        )
    return parts


def _text(axis: int, parts: dict[tuple[tuple[str, int, int], ...], Part]) -> str:
    if axis == REPLICATED:
        return ""
    if axis != BY_PARTS:
        return f", cut along axis {axis} over all shards"
    shown = (
        f"{' '.join(f'{place} {at}/{size}' for place, size, at in key) or 'all'} ({part.numel}) on "
        f"{'+'.join(map(str, part.holders))}"
        for key, part in parts.items()
    )
    return f", parts by shard: {', '.join(shown)}"
