"""Means over the ranks of a cell, or of the federation, in which every sample counts once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from xffl.distributed.consistency import ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError
from xffl.topology import REPLICATE_AXIS, Topology

__all__ = ["SCOPES", "WeightedSums", "counted_place", "gather_objects", "metric_group", "reduce_mean", "reduce_sums"]

SCOPES = ("cell", "federation")
"""Over what values can be reduced."""

COUNTED_AXES = ("dp_", "cp")
"""How the axes of a cell's shape begin along which ranks measure something of their own: other samples, or other parts
of a sequence. Along the others (tensor, pipeline) they measure the same."""

SLOTS = 64
"""Names that one reduction carries; more need a second one."""
PIECES = 4
"""Pieces of 16 bits of the names' hash: their squares' sum is exact in 53 bits for two million ranks."""
HEAD = 1 + 2 * PIECES


def counted_place(topology: Topology, rank: int) -> tuple[int, bool]:
    """Return which part of its cell's measurements a rank makes.

    :param topology: The federation.
    :param rank: Global rank.
    :return: The part's number in the cell, and whether the rank is the first of those that measure it.
    """
    at = topology.coordinates(rank)
    if topology.cell_shape is None:
        return at.local_rank, True
    part, parts, stride, is_first = 0, 1, 1, True
    for name, given in reversed(tuple(dict(topology.cell_shape).items())):
        size = topology.replicas(at.cell) if name == REPLICATE_AXIS else given
        place = at.local_rank // stride % size
        if name.startswith(COUNTED_AXES):
            part += place * parts
            parts *= size
        elif place:
            is_first = False
        stride *= size
    return part, is_first


def metric_group(state: DistributedState, over: str) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """Return the ranks whose values are reduced; local.

    :param state: The state of the world.
    :param over: ``cell`` or ``federation``.
    :return: Their group (``None`` for the world, and where there is no process group), and the ranks in its order.
    :raises ConfigError: if ``over`` is neither.
    """
    if over not in SCOPES:
        raise ConfigError(f"over {over!r} is neither 'cell' nor 'federation'; give one of them")
    topology = state.topology
    if over == "federation" or state.federation is None:
        return None, tuple(range(topology.world_size))
    rank = state.rank
    assert rank is not None, "a state with a federation has a rank"
    return state.federation, topology.federation(topology.cell_of(rank))


def gather_objects(value: Any, group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> list[Any]:
    """Return a small value of each rank; collective over the group.

    :param value: This rank's value.
    :param group: The group.
    :param ranks: Its ranks.
    :return: The values in the order of the ranks.
    """
    if len(ranks) == 1 or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, value, group=group)
    return values


class WeightedSums:
    """Sums of values times weights, by name, in float64; local.

    Tensors stay on their device and are added there: nothing waits for them until :func:`reduce_sums`.

    :param device: Where the sums of tensors are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, float | torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def __len__(self) -> int:
        """Count the names."""
        return len(self._sums)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in alphabetical order."""
        return tuple(sorted(self._sums))

    def add(self, name: str, value: float | torch.Tensor, weight: float = 1.0) -> None:
        """Add a value; a weight of 0 only tells the name.

        :param name: Its name.
        :param value: A number, or a tensor of one element.
        :param weight: What it counts for, 0 or more.
        :raises ConfigError: if one of them cannot be meant.
        """
        sums = self._sums
        if name not in sums:
            self._begin(name)
        if not 0.0 <= weight < math.inf:
            raise ConfigError(f"weight {weight} of {name!r} is none; give 0 or a positive number")
        if weight == 0.0:
            return
        before = sums[name]
        if isinstance(value, torch.Tensor):
            value = value if type(value) is torch.Tensor and not value.dim() else _scalar(name, value)
            if value.is_cpu:  # nothing to wait for, and several times faster
                value = value.item()
        if isinstance(value, torch.Tensor):
            if not isinstance(before, torch.Tensor):
                before = sums[name] = torch.full((), before, dtype=torch.float64, device=self._device)
            before.add_(value.detach(), alpha=weight)
        elif isinstance(before, torch.Tensor):
            before.add_(float(value) * weight)
        else:
            sums[name] = before + float(value) * weight
        self._weights[name] += weight

    def clear(self) -> None:
        """Begin anew."""
        self._sums.clear()
        self._weights.clear()

    def vector(self, names: Iterable[str], is_counted: bool) -> torch.Tensor:
        """Return the sums and the weights, on this rank's device.

        :param names: The names in order; those that are missing count nothing.
        :param is_counted: Whether this rank counts; zeros if not.
        :return: First all sums, then all weights, in float64.
        """
        chosen = list(names)
        sums = [self._sums.get(name, 0.0) for name in chosen]
        if not is_counted:
            return torch.zeros(2 * len(chosen), dtype=torch.float64, device=self._device)
        weights = [self._weights.get(name, 0.0) for name in chosen]
        numbers = [0.0 if isinstance(one, torch.Tensor) else one for one in sums]
        vector = torch.tensor(numbers + weights, dtype=torch.float64, device=self._device)
        tensors = {place: one for place, one in enumerate(sums) if isinstance(one, torch.Tensor)}
        if tensors:
            places = torch.tensor(list(tensors), device=self._device)
            vector[places] = torch.stack(list(tensors.values()))
        return vector

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and weights of this rank; waits for the device."""
        return {"sums": {name: float(one) for name, one in self._sums.items()}, "weights": dict(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; adding goes on to the same bits.

        :param state: The saved state.
        """
        self._sums = {name: float(one) for name, one in state["sums"].items()}
        self._weights = {name: float(one) for name, one in state["weights"].items()}

    def _begin(self, name: str) -> None:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError(f"{name!r} is no name of a value; give a text such as 'train/loss'")
        self._sums[name] = self._weights[name] = 0.0


def reduce_sums(sums: WeightedSums, state: DistributedState, *, over: str, device: torch.device) -> dict[str, float]:
    """Return the weighted means over all ranks.

    Collective over the cell or the world: one all-reduce of about 1 KiB, and another one where there are more than
    :data:`SLOTS` names. Ranks that measure the same, as those of a tensor or pipeline parallel group do, count once;
    those that have told nothing since count nothing. Nothing moves with one rank.

    :param sums: What this rank has added up; left as it is.
    :param state: The state of the world.
    :param over: ``cell`` or ``federation``.
    :param device: Where the reduction takes place.
    :return: The means by name, the same on all ranks; none for names whose weights sum to 0.
    :raises ConfigError: if the ranks have told different names; on all of them.
    """
    group, ranks = metric_group(state, over)
    is_alone = len(ranks) == 1 or not dist.is_initialized()
    is_counted = is_alone or counted_place(state.topology, dist.get_rank())[1]
    names = sums.names
    if is_alone:
        return _means(names, sums.vector(names, True).tolist())
    first = torch.zeros(HEAD + 2 * SLOTS, dtype=torch.float64)
    first[:HEAD] = torch.tensor(_head(names), dtype=torch.float64)
    first = first.to(device)
    some = names[:SLOTS]
    vector = sums.vector(some, is_counted)
    first[HEAD : HEAD + len(some)] = vector[: len(some)]
    first[HEAD + SLOTS : HEAD + SLOTS + len(some)] = vector[len(some) :]
    dist.all_reduce(first, group=group)
    told = first.tolist()
    speaking = int(told[0])
    is_alike = all(
        speaking * int(told[2 + 2 * piece]) == int(told[1 + 2 * piece]) ** 2 for piece in range(PIECES)
    )  # Cauchy and Schwarz: equal only where all hashes are
    if speaking < len(ranks) or not is_alike:
        names = _agreed_names(names, gather_objects(names, group, ranks), ranks)
        some = names[:SLOTS]
    means = _means(some, told[HEAD : HEAD + len(some)] + told[HEAD + SLOTS : HEAD + SLOTS + len(some)])
    if rest := names[SLOTS:]:
        vector = sums.vector(rest, is_counted).to(device)
        dist.all_reduce(vector, group=group)
        means |= _means(rest, vector.tolist())
    return means


def reduce_mean(
    values: Mapping[str, float | torch.Tensor],
    weights: Mapping[str, float] | float,
    state: DistributedState,
    *,
    over: str = "cell",
) -> dict[str, float]:
    """Return the weighted means of values of all ranks; collective as :func:`reduce_sums`.

    .. code-block:: python

       reduce_mean({"val/loss": loss}, len(batch), state, over="federation")

    :param values: This rank's means by name, the same names on all ranks.
    :param weights: What each counts for (samples, tokens), or one weight for all.
    :param state: The state of the world.
    :param over: ``cell`` or ``federation``.
    :return: The means, the same on all ranks.
    :raises ConfigError: if the ranks have different names, or a weight cannot be meant.
    """
    kept = state.current_device if state.current_device is not None else state.device_type
    device = torch.device("cuda", kept) if isinstance(kept, int) else torch.device(kept or "cpu")
    sums = WeightedSums(device)
    for name, value in values.items():
        sums.add(name, value, weights[name] if isinstance(weights, Mapping) else weights)
    return reduce_sums(sums, state, over=over, device=device)


def _scalar(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one element as one without dimensions."""
    if isinstance(value, DTensor):
        if not all(isinstance(placement, Replicate) for placement in value.placements):
            raise ConfigError(
                f"{name!r} is a DTensor of placements {value.placements}, of which no rank has the value; give its "
                "full_tensor()"
            )
        value = value.to_local()
    if value.numel() != 1:
        raise ConfigError(f"{name!r} is a tensor of shape {tuple(value.shape)}; give one number, such as its mean")
    return value.reshape(())


def _head(names: tuple[str, ...]) -> list[float]:
    """Return what tells whether all ranks that speak have the same names."""
    if not names:
        return [0.0] * HEAD
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    head = [1.0]
    for piece in range(PIECES):
        number = int.from_bytes(digest[2 * piece : 2 * piece + 2], "big")
        head += [float(number), float(number * number)]
    return head


def _agreed_names(mine: tuple[str, ...], told: list[tuple[str, ...]], ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names that those have who have any; raise the same error on all ranks where they differ."""
    by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in zip(ranks, told, strict=True):
        if names:
            by_names.setdefault(names, []).append(rank)
    if len(by_names) > 1:
        common = set.intersection(*map(set, by_names))
        shown = "; ".join(
            f"{ranks_text(who)}: {', '.join(sorted(set(names) - common)) or 'no more'}"
            for names, who in list(by_names.items())[:4]
        )
        raise ConfigError(
            f"ranks have told values of different names: {shown}; log the same names on all ranks, with weight=0 where "
            "a value counts nothing"
        )
    return next(iter(by_names), mine)


def _means(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    pairs = zip(names, numbers[: len(names)], numbers[len(names) :], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight}
