"""Batches of any make, moved to a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["to_device"]

T = TypeVar("T")


def to_device(batch: T, device: torch.device, *, non_blocking: bool = True) -> T:
    """Return a batch with its tensors on a device; local.

    Mappings, lists, tuples, named tuples and dataclasses are made anew with what they hold moved, however deep; where
    nothing has to move, and whatever else there is, comes back as it is.

    :param batch: Any object.
    :param device: Where its tensors are to lie.
    :param non_blocking: Whether copies from pinned memory may go on in the background.
    :return: An object of the same kind.
    """
    moved: Any = batch
    if isinstance(batch, torch.Tensor):
        moved = batch.to(device, non_blocking=non_blocking)
    elif isinstance(batch, Mapping):
        found = {key: to_device(value, device, non_blocking=non_blocking) for key, value in batch.items()}
        if any(found[key] is not batch[key] for key in found):
            moved = _mapping_of(batch, found)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, bytearray, range)):
        items = [to_device(item, device, non_blocking=non_blocking) for item in batch]
        if any(new is not old for new, old in zip(items, batch, strict=True)):
            moved = type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[call-arg]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        there = {name: to_device(value, device, non_blocking=non_blocking) for name, value in fields.items()}
        if any(there[name] is not fields[name] for name in fields):
            moved = _dataclass_of(batch, there)
    result: T = moved
    return result


def _mapping_of(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind; one that cannot be made from a dict (a default dict) is copied and filled."""
    if isinstance(batch, dict) and type(batch) is not dict:
        copied = batch.copy()
        copied.update(items)
        return copied
    return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]


def _dataclass_of(batch: Any, values: dict[str, Any]) -> Any:
    """Return a dataclass of the same kind, frozen ones and fields that its constructor does not take included."""
    made = object.__new__(type(batch))
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
