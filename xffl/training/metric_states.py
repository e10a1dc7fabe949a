"""Metrics of torchmetrics over the ranks of a cell, or of the federation, in which every sample counts once.

A metric's state is exchanged here, not by torchmetrics, which knows neither ranks that measure the same data nor ranks
that have not measured any, and whose number of collectives depends on what a rank has seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.distributed.consistency import ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import bytes_of, from_bytes
from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.training.metrics import counted_place, gather_objects, metric_group

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["compute_metrics", "metric_kinds", "prepare_metrics", "uncounted"]

ALIGNMENT = 16
"""Bytes: every state begins at a multiple, so that it can be read as any data type."""

States = dict[str, torch.Tensor | list[torch.Tensor]]
"""What a metric has summed up or collected, by the attribute's name."""


def metric_kinds() -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the classes of metrics and of collections of them.

    :return: ``Metric`` and ``MetricCollection``.
    :raises ConfigError: if torchmetrics is not installed.
    """
    with optional_import("metrics", "EvalMetricMixin needs torchmetrics"):
        from torchmetrics import Metric, MetricCollection
    return Metric, MetricCollection


def prepare_metrics(metrics: Mapping[str, nn.Module], device: torch.device) -> None:
    """Move metrics to a device, and let them communicate through :func:`compute_metrics` only; local.

    Their own ``compute()`` gives this rank's value from now on.

    :param metrics: Metrics and collections by name.
    :param device: Where they measure.
    """
    for metric in metrics.values():
        metric.to(device)
        for _, part in _parts({"": metric}):
            part.distributed_available_fn = _never
            part.compute_with_cache = False  # the same metric is computed over several sets of ranks


def compute_metrics(
    metrics: Mapping[str, nn.Module], state: DistributedState, *, over: str, device: torch.device
) -> dict[str, float]:
    """Return the values of metrics over all ranks, as one process would compute them of all samples.

    Collective over the cell or the world: a gather of descriptions of some 100 bytes for each metric, then one of the
    states themselves. Of the ranks that measure the same (of a tensor or pipeline parallel group) the first one counts
    that has updated the metric. The metrics go on with this rank's own state.

    :param metrics: Metrics and collections that :func:`prepare_metrics` has seen, by name, the same on all ranks.
    :param state: The state of the world.
    :param over: ``cell`` or ``federation``.
    :param device: Where states are exchanged.
    :return: Numbers by the metric's name; a metric that gives several has them under its name, a slash, and theirs.
    :raises ConfigError: on all ranks, if the ranks' metrics differ, one was updated nowhere, or one gives no numbers.
    """
    parts = list(_parts(metrics))
    group, ranks = metric_group(state, over)
    mine = _describe(parts, state)
    told: list[_Description] = gather_objects(mine, group, ranks)
    _check(told, metrics, ranks)
    takers = [_counted(told, number) for number in range(len(parts))]
    here = 0 if len(ranks) == 1 else ranks.index(dist.get_rank())
    own = [part.metric_state if here in takers[number] else {} for number, (_, part) in enumerate(parts)]
    buffers = _exchange(_pack(own, device), [_bytes(told[place], takers, place) for place in range(len(told))], group)
    by_rank = [_unpack(buffer, told[place], takers, place) for place, buffer in enumerate(buffers)]
    values: dict[str, float] = {}
    with _replaced(
        [part for _, part in parts],
        [[by_rank[place][number] for place in takers[number]] for number in range(len(parts))],
    ):
        for name, metric in metrics.items():
            with warnings.catch_warnings():  # this rank may not have updated what others have
                warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                found = metric.compute()  # type: ignore[operator]
            for key, value in _numbers(name, found):
                if key in values:
                    raise ConfigError(f"two metrics give a value {key!r}; rename one of them")
                values[key] = value
    return values


@contextmanager
def uncounted(metrics: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let a block's updates count nothing; local. It costs a copy of what the metrics have summed up.

    :param metrics: Metrics and collections by name.
    :yield: Nothing.
    """
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


# What a rank has ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Description:
    """What the states of a rank's metrics look like."""

    place: tuple[int, int]
    """Cell, and which part of its samples the rank measures"""
    names: list[str] = field(default_factory=list)
    is_updated: list[bool] = field(default_factory=list)
    shapes: list[dict[str, tuple[bool, list[tuple[torch.dtype, tuple[int, ...]]]]]] = field(default_factory=list)
    """For each metric and state whether it is a list, and the tensors"""
    error: str | None = None


def _describe(parts: list[tuple[str, Metric]], state: DistributedState) -> _Description:
    rank = state.rank or 0
    topology = state.topology
    found = _Description((topology.cell_of(rank), counted_place(topology, rank)[0]))
    for name, part in parts:
        shapes = {}
        for attribute, kept in part.metric_state.items():
            tensors = kept if isinstance(kept, list) else [kept]
            for tensor in tensors:
                if type(tensor) is not torch.Tensor:
                    why = "give the metric full_tensor()s" if isinstance(tensor, DTensor) else "only tensors can move"
                    text = f"metric {name!r} keeps a {type(tensor).__name__} in {attribute!r}; {why}"
                    return _Description(found.place, error=text)
            shapes[attribute] = (isinstance(kept, list), [(one.dtype, tuple(one.shape)) for one in tensors])
        found.names.append(name)
        found.is_updated.append(part.update_called)
        found.shapes.append(shapes)
    return found


def _check(told: list[_Description], metrics: Mapping[str, nn.Module], ranks: Sequence[int]) -> None:
    """Raise the same on all ranks where they do not fit."""
    for rank, description in zip(ranks, told, strict=True):
        if description.error is not None:
            raise ConfigError(f"{description.error} (rank {rank})")
    alike: dict[str, list[int]] = {}
    for rank, description in zip(ranks, told, strict=True):
        alike.setdefault(", ".join(description.names), []).append(rank)
    if len(alike) > 1:
        shown = "; ".join(f"{ranks_text(who)}: {names or 'none'}" for names, who in list(alike.items())[:4])
        raise ConfigError(f"ranks have different metrics: {shown}; make the same in configure_metrics on all ranks")
    for name in metrics:
        places = [
            place for place, one in enumerate(told[0].names) if one == name or one.startswith(f"{name}.")
        ]  # its parts come after it
        if not any(description.is_updated[place] for description in told for place in places):
            raise ConfigError(
                f"metric {name!r} was updated on none of {ranks_text(ranks)} in this validation; call "
                f"self.{name}.update(...) in validation_step, or make no such metric"
            )


def _counted(told: list[_Description], number: int) -> list[int]:
    """Return whose state of a metric counts: for each part of the samples the first rank that has updated it."""
    first: dict[tuple[int, int], int] = {}
    for place, description in enumerate(told):
        if description.is_updated[number]:
            first.setdefault(description.place, place)
    return sorted(first.values())


# On the way -----------------------------------------------------------------------------------------------------------


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a state on its way."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(description: _Description, takers: list[list[int]], place: int) -> int:
    """Return how much a rank sends."""
    return sum(
        _size(dtype, shape)
        for number, shapes in enumerate(description.shapes)
        if place in takers[number]
        for _, tensors in shapes.values()
        for dtype, shape in tensors
    )


def _pack(own: list[States], device: torch.device) -> torch.Tensor:
    """Put states into one row of bytes."""
    rows = [torch.empty(0, dtype=torch.uint8, device=device)]
    for states in own:
        for kept in states.values():
            for tensor in kept if isinstance(kept, list) else [kept]:
                row = bytes_of(tensor.to(device))
                rows += [row, row.new_zeros(-row.numel() % ALIGNMENT)]
    return torch.cat(rows)


def _exchange(mine: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the rows of all ranks; collective over the group."""
    if len(sizes) == 1:
        return [mine]
    if not max(sizes):
        return [mine] * len(sizes)
    padded = torch.cat([mine, mine.new_zeros(max(sizes) - mine.numel())])
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return rows


def _unpack(row: torch.Tensor, description: _Description, takers: list[list[int]], place: int) -> list[States]:
    """Read a rank's states off its bytes; those that do not count are empty."""
    found: list[States] = []
    start = 0
    for number, shapes in enumerate(description.shapes):
        states: States = {}
        for attribute, (is_list, tensors) in shapes.items() if place in takers[number] else ():
            read = []
            for dtype, shape in tensors:
                size = torch.Size(shape).numel() * dtype.itemsize
                read.append(from_bytes(row[start : start + size], dtype, shape))
                start += _size(dtype, shape)
            states[attribute] = read if is_list else read[0]
        found.append(states)
    return found


# Together -------------------------------------------------------------------------------------------------------------


@contextmanager
def _replaced(parts: list[Metric], told: list[list[States]]) -> Iterator[None]:
    """Give metrics the states of all ranks for a block."""
    before: list[States] = [dict(part.metric_state) for part in parts]
    try:
        for part, states in zip(parts, told, strict=True):
            _set(part, _reduced(part, states))
        yield
    finally:
        for part, kept in zip(parts, before, strict=True):
            _set(part, kept)


def _reduced(part: Metric, told: list[States]) -> States:
    """Join states of several ranks as the metric says; torchmetrics does it, and is given them instead of a gather."""
    if not told:
        return dict(part.metric_state)
    answers: dict[int, list[torch.Tensor]] = {}
    for attribute, kept in list(part.metric_state.items()):
        every: list[torch.Tensor] = []
        for states in told:
            one = states[attribute]
            every += [tensor.to(part.device) for tensor in (one if isinstance(one, list) else [one])]
        # A list asks once, however many tensors each rank has; one that is empty everywhere asks for nothing.
        if isinstance(kept, list):
            asks = torch.empty(0)
            setattr(part, attribute, [asks] if every else [])
        else:
            asks = every[0]
            setattr(part, attribute, asks)
        answers[id(asks)] = every

    def answer(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        del group
        return answers.get(id(tensor), [tensor])

    part.sync(dist_sync_fn=answer, distributed_available=lambda: True)
    joined: States = dict(part.metric_state)
    part.unsync()
    return joined


def _set(part: Metric, states: States) -> None:
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
        for key, one in value.items():
            yield from _numbers(f"{name}/{key}", one)
    elif isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) > 1):
        for place, one in enumerate(value):
            yield from _numbers(f"{name}/{place}", one)
    elif isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ConfigError(
            f"metric {name!r} gives a tensor of shape {tuple(value.shape)}, but records hold numbers; keep such a "
            "metric in a list, and compute it where you need it"
        )
    else:
        yield name, float(value)


def _never() -> bool:
    return False
