"""Batches of any make, moved to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["to_device"]

T = TypeVar("T")


def to_device(batch: T, device: torch.device, *, non_blocking: bool = True) -> T:
    """Return a batch with its tensors on a device; local.

    Mappings, lists, tuples, named tuples, packed sequences and dataclasses are made anew with what they hold moved,
    however deep; where nothing has to move, and whatever else there is, comes back as it is.

    :param batch: Any object.
    :param device: Where its tensors are to lie.
    :param non_blocking: Whether copies from pinned memory to a GPU may go on in the background. Copies from a GPU never
        do, since the CPU would read them before they are there.
    :return: An object of the same kind.
    """
    moved: Any = batch
    if isinstance(batch, torch.Tensor):
        moved = batch.to(device, non_blocking=non_blocking and device.type == "cuda")
    elif isinstance(batch, PackedSequence):  # a named tuple whose sizes stay on the CPU
        is_behind = non_blocking and device.type == "cuda"
        moved = batch.to(device=device, non_blocking=is_behind)  # type: ignore[call-arg]
    elif isinstance(batch, dict):
        moved = _with(batch, dict(batch), device, non_blocking, _put_items)
    elif isinstance(batch, (list, tuple)):
        items = [to_device(item, device, non_blocking=non_blocking) for item in batch]
        if any(new is not old for new, old in zip(items, batch, strict=True)):
            moved = type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    elif isinstance(batch, Mapping):
        found = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        if any(found[key] is not batch[key] for key in found):
            moved = type(batch)(found)  # type: ignore[call-arg]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        moved = _with(batch, fields, device, non_blocking, _put_attributes)
    result: T = moved
    return result


def _with(
    batch: Any,
    held: dict[Any, Any],
    device: torch.device,
    non_blocking: bool,
    put: Callable[[Any, dict[Any, Any]], None],
) -> Any:
    """Return a copy of an object in which what moved stands in its place; the object itself where nothing did."""
    there = {key: to_device(value, device, non_blocking=non_blocking) for key, value in held.items()}
    moved = {key: value for key, value in there.items() if value is not held[key]}
    if not moved:
        return batch
    copied = copy.copy(batch)
    put(copied, moved)
    return copied


def _put_items(batch: Any, items: dict[Any, Any]) -> None:
    batch.update(items)


def _put_attributes(batch: Any, values: dict[Any, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(batch, name, value)  # a frozen dataclass, too
