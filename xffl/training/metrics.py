"""Means and metrics over the ranks of a cell, or of the federation, in which every sample counts once.

The first half reduces weighted means, the second one the metrics of torchmetrics. A metric's states are exchanged here,
not by torchmetrics, which knows neither ranks that measure the same data nor ranks that have not measured any, and
whose number of collectives depends on what a rank has seen. Its ``merge_state`` does not serve: it refuses metrics with
``full_state_update``, weighs means by its own number of updates, and stacks states without a reduction pair by pair.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from xffl.checks import group, one_of
from xffl.distributed.agreement.consistency import compute_device, gather_objects, message_device, ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import bytes_of, from_bytes
from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.topology import Topology
from xffl.training.data.place import place_along

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = [
    "SCOPES",
    "WeightedSums",
    "check_value_name",
    "compute_metrics",
    "counted_place",
    "find_loss",
    "metric_group",
    "metric_kinds",
    "prepare_metrics",
    "reduce_mean",
    "reduce_sums",
    "uncounted",
]

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
    """Return which part of its cell's measurements a rank makes, and whether it is the first of those that make it."""
    part, _, is_first = place_along(topology, rank, COUNTED_AXES)
    return part, is_first


def check_value_name(name: object) -> None:
    """Refuse what is not a name of a value: a text that prints."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"the name of a value must be a text such as 'train/loss', got {name!r}")


def metric_group(state: DistributedState, over: str) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """Return the group over which values are reduced (``None`` for the world), and its ranks in order; local."""
    one_of("over", over, SCOPES)
    topology = state.topology
    if over == "federation" or state.federation is None:
        return None, tuple(range(topology.world_size))
    rank = state.rank
    assert rank is not None, "a state with a federation has a rank"
    return state.federation, topology.federation(topology.cell_of(rank))


class WeightedSums:
    """Sums of values times weights, by name, in float64; local.

    Tensors stay on their device and are added there: nothing waits for them until :func:`reduce_sums`.
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
        """Add a value; a weight of 0 only adds the name."""
        sums = self._sums
        if name not in sums:
            check_value_name(name)
            sums[name] = self._weights[name] = 0.0
        if not 0.0 <= weight < math.inf:
            raise ConfigError(f"the weight of {name!r} must be 0 or a positive number, got {weight}")
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
        """Return all sums, then all weights, in float64 on this rank's device; zeros where it does not count."""
        chosen = list(names)
        sums = [self._sums.get(name, 0.0) for name in chosen]
        if not is_counted:
            return torch.zeros(2 * len(chosen), dtype=torch.float64, device=self._device)
        weights = [self._weights.get(name, 0.0) for name in chosen]
        numbers = [0.0 if isinstance(one, torch.Tensor) else one for one in sums]
        vector = torch.tensor(numbers + weights, dtype=torch.float64, device=self._device)
        tensors = {place: one for place, one in enumerate(sums) if isinstance(one, torch.Tensor)}
        if tensors:
            places = torch.tensor(list(tensors), dtype=torch.int64, device=self._device)
            vector[places] = torch.stack(list(tensors.values()))
        return vector

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and weights of this rank; waits for the device."""
        return {"sums": {name: float(one) for name, one in self._sums.items()}, "weights": dict(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; adding goes on to the same bits."""
        self._sums = {name: float(one) for name, one in state["sums"].items()}
        self._weights = {name: float(one) for name, one in state["weights"].items()}


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in what a training step returned: a tensor, or a mapping or object with ``loss``; local."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def reduce_sums(sums: WeightedSums, state: DistributedState, *, over: str, device: torch.device) -> dict[str, float]:
    """Return the weighted means over all ranks.

    Collective over the cell or the world: one all-reduce of about 1 KiB, and another one where there are more than
    :data:`SLOTS` names. Ranks that measure the same, as those of a tensor or pipeline parallel group do, count once;
    those that have added nothing count nothing. Nothing moves with one rank.
    """
    group, ranks = metric_group(state, over)
    is_alone = len(ranks) == 1 or not dist.is_initialized()
    is_counted = is_alone or counted_place(state.topology, dist.get_rank())[1]
    names = sums.names
    if is_alone:
        return _means(names, sums.vector(names, True).tolist())
    device = message_device(device, group)
    first = torch.zeros(HEAD + 2 * SLOTS, dtype=torch.float64)
    first[:HEAD] = torch.tensor(_head(names), dtype=torch.float64)
    first = first.to(device)
    some = names[:SLOTS]
    vector = sums.vector(some, is_counted)
    first[HEAD : HEAD + len(some)] = vector[: len(some)]
    first[HEAD + SLOTS : HEAD + SLOTS + len(some)] = vector[len(some) :]
    dist.all_reduce(first, group=group)
    reduced = first.tolist()
    counted = int(reduced[0])
    is_alike = all(
        counted * int(reduced[2 + 2 * piece]) == int(reduced[1 + 2 * piece]) ** 2 for piece in range(PIECES)
    )  # Cauchy and Schwarz: equal only where all hashes are
    if counted < len(ranks) or not is_alike:
        names = _agreed_names(names, gather_objects(names, group), ranks)
        some = names[:SLOTS]
    means = _means(some, reduced[HEAD : HEAD + len(some)] + reduced[HEAD + SLOTS : HEAD + SLOTS + len(some)])
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
    :raises ConfigError: if the ranks have different names, or a weight is invalid.
    """
    device = compute_device(state)
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
    """Return a hash of the names whose sums show whether all ranks that have any have the same."""
    if not names:
        return [0.0] * HEAD
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    head = [1.0]
    for piece in range(PIECES):
        number = int.from_bytes(digest[2 * piece : 2 * piece + 2], "big")
        head += [float(number), float(number * number)]
    return head


def _agreed_names(mine: tuple[str, ...], by_rank: list[tuple[str, ...]], ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names that those have who have any; raise the same error on all ranks where they differ."""
    by_names = group((names, rank) for rank, names in zip(ranks, by_rank, strict=True) if names)
    if len(by_names) > 1:
        common = set.intersection(*map(set, by_names))
        shown = "; ".join(
            f"{ranks_text(who)}: {', '.join(sorted(set(names) - common)) or 'no more'}"
            for names, who in list(by_names.items())[:4]
        )
        raise ConfigError(
            f"ranks have logged values of different names: {shown}; log the same names on all ranks, with weight=0 "
            "where a value counts nothing"
        )
    return next(iter(by_names), mine)


def _means(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    pairs = zip(names, numbers[: len(names)], numbers[len(names) :], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight}


# Metrics of torchmetrics ----------------------------------------------------------------------------------------------


def metric_kinds() -> tuple[type[nn.Module], type[nn.Module]]:
    """Return torchmetrics' classes of metrics and of collections of them."""
    with optional_import("metrics", "EvalMetricMixin needs torchmetrics"):
        from torchmetrics import Metric, MetricCollection
    return Metric, MetricCollection


def prepare_metrics(metrics: Mapping[str, nn.Module], device: torch.device) -> None:
    """Move metrics to a device, and let them communicate through :func:`compute_metrics` only; local.

    Their own ``compute()`` gives this rank's value from now on.
    """
    for metric in metrics.values():
        metric.to(device)
        for _, part in _parts({"": metric}):
            part.distributed_available_fn = bool  # which returns False
            part.compute_with_cache = False  # the same metric is computed over several sets of ranks


@contextmanager
def uncounted(metrics: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let a block's updates count nothing; local. It costs a copy of what the metrics have summed up."""
    before = [
        {name: list(one) if isinstance(one, list) else one.clone() for name, one in part.metric_state.items()}
        if part.update_called
        else None
        for _, part in _parts(metrics)
    ]
    yield
    for (_, part), kept in zip(_parts(metrics), before, strict=True):
        if kept is None:
            part.reset()
        else:
            _set(part, kept)


class _Description(NamedTuple):
    """A rank's metrics."""

    place: tuple[int, int]
    """Cell, and which part of its samples the rank measures"""
    names: list[str]
    is_updated: list[bool]
    error: str | None


_States = dict[str, torch.Tensor | list[torch.Tensor]]
"""What a metric has summed up or collected, by the attribute's name."""


def compute_metrics(metrics: Mapping[str, nn.Module], state: DistributedState, *, over: str) -> dict[str, float]:
    """Return the values of metrics over all ranks, as one process would compute them of all samples.

    Collective over the cell or the world: a gather of descriptions of some 100 bytes for each metric, then one of the
    states themselves. Of the ranks that measure the same (of a tensor or pipeline parallel group) the first one counts
    that has updated the metric. The metrics go on with this rank's own state.
    """
    parts = list(_parts(metrics))
    group, ranks = metric_group(state, over)
    described: list[_Description] = gather_objects(_describe(parts, state), group)
    _check(described, metrics, ranks)
    counted = [_counted(described, number) for number in range(len(parts))]
    here = 0 if len(ranks) == 1 else ranks.index(dist.get_rank())
    mine = [_packed(part) if here in places else None for (_, part), places in zip(parts, counted, strict=True)]
    by_rank = gather_objects(mine, group)
    values: dict[str, float] = {}
    before: list[_States] = [dict(part.metric_state) for _, part in parts]
    try:
        for number, (_, part) in enumerate(parts):
            if counted[number]:
                _set(part, _joined(part, [_unpacked(by_rank[place][number]) for place in counted[number]]))
        for name, metric in metrics.items():
            with warnings.catch_warnings():  # this rank may not have updated what others have
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                computed = metric.compute()  # type: ignore[operator]
            for key, value in _numbers(name, computed):
                if key in values:
                    raise ConfigError(f"two metrics give a value {key!r}; rename one of them")
                values[key] = value
    finally:
        for (_, part), own in zip(parts, before, strict=True):
            _set(part, own)
    return values


def _describe(parts: list[tuple[str, Metric]], state: DistributedState) -> _Description:
    rank = state.rank or 0
    error = None
    for name, part in parts:
        for attribute, kept in part.metric_state.items():
            for one in kept if isinstance(kept, list) else [kept]:
                if type(one) is not torch.Tensor:
                    advice = "give the metric full_tensor()s" if isinstance(one, DTensor) else "only tensors can move"
                    error = f"metric {name!r} keeps a {type(one).__name__} in {attribute!r}; {advice}"
    place = (state.topology.cell_of(rank), counted_place(state.topology, rank)[0])
    return _Description(place, [name for name, _ in parts], [part.update_called for _, part in parts], error)


def _check(described: list[_Description], metrics: Mapping[str, nn.Module], ranks: Sequence[int]) -> None:
    """Raise the same on all ranks where they do not fit."""
    for rank, description in zip(ranks, described, strict=True):
        if description.error is not None:
            raise ConfigError(f"{description.error} (rank {rank})")
    alike = group((", ".join(one.names), rank) for rank, one in zip(ranks, described, strict=True))
    if len(alike) > 1:
        shown = "; ".join(f"{ranks_text(who)}: {names or 'none'}" for names, who in list(alike.items())[:4])
        raise ConfigError(f"ranks have different metrics: {shown}; make the same in configure_metrics on all ranks")
    for name in metrics:
        places = [
            place for place, one in enumerate(described[0].names) if one == name or one.startswith(f"{name}.")
        ]  # its parts come after it
        if not any(description.is_updated[place] for description in described for place in places):
            raise ConfigError(
                f"metric {name!r} was updated on none of {ranks_text(ranks)} in this validation; call "
                f"self.{name}.update(...) in validation_step, or make no such metric"
            )


def _counted(described: list[_Description], number: int) -> list[int]:
    """Return whose state of a metric counts: for each part of the samples the first rank that has updated it."""
    first: dict[tuple[int, int], int] = {}
    for place, description in enumerate(described):
        if description.is_updated[number]:
            first.setdefault(description.place, place)
    return sorted(first.values())


_Packed = dict[str, list[tuple[npt.NDArray[Any], torch.dtype, torch.Size]]]
"""The states of a metric: the bytes of their tensors."""


def _packed(part: Metric) -> _Packed:
    """Return a metric's states as arrays of bytes: of a tensor that is a view, pickle would copy all of its storage."""
    return {
        attribute: [
            (bytes_of(one).cpu().numpy(), one.dtype, one.shape) for one in (kept if isinstance(kept, list) else [kept])
        ]
        for attribute, kept in part.metric_state.items()
    }


def _unpacked(packed: _Packed) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each state."""
    return {
        attribute: [from_bytes(torch.from_numpy(row), dtype, shape) for row, dtype, shape in rows]
        for attribute, rows in packed.items()
    }


def _joined(part: Metric, counted: list[dict[str, list[torch.Tensor]]]) -> _States:
    """Join states of several ranks as the metric says; torchmetrics does it, and is given them instead of a gather."""
    answers: dict[int, list[torch.Tensor]] = {}
    for attribute, kept in list(part.metric_state.items()):
        every = [tensor.to(part.device) for states in counted for tensor in states[attribute]]
        # A list asks once, however many tensors each rank has; one that is empty everywhere asks for nothing.
        asks = torch.empty(0, dtype=torch.float32) if isinstance(kept, list) else every[0]
        setattr(part, attribute, [asks][: len(every)] if isinstance(kept, list) else asks)
        answers[id(asks)] = every

    def answer(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        del group
        return answers.get(id(tensor), [tensor])

    part.sync(dist_sync_fn=answer, distributed_available=lambda: True)
    joined: _States = dict(part.metric_state)
    part.unsync()
    return joined


def _set(part: Metric, states: _States) -> None:
    for attribute, kept in states.items():
        setattr(part, attribute, kept)


def _parts(metrics: Mapping[str, nn.Module]) -> Iterator[tuple[str, Metric]]:
    """Yield all metrics in metrics and collections, by dotted name."""
    kind, _ = metric_kinds()
    for name, metric in metrics.items():
        for inner, part in metric.named_modules():
            if isinstance(part, kind):
                yield (f"{name}.{inner}" if inner else name), part  # type: ignore[misc]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield what a metric has given as numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) > 1):
        for place, item in enumerate(value):
            yield from _numbers(f"{name}/{place}", item)
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ConfigError(
            f"metric {name!r} gives a tensor of shape {tuple(value.shape)}, but records hold numbers; keep such a "
            "metric in a list, and compute it where you need it"
        )
    else:
        yield name, float(value)
