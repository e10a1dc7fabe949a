"""What is wrong with a model that has other tensors than when its rounds were planned; rounds ask where it has."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from xffl.checks import shorten
from xffl.distributed.values.sharding import reshard
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.aggregation.engine.planning.tensors import HeldTensors, Manifest

__all__ = ["check_tensors"]


def check_tensors(manifest: Manifest, held: HeldTensors) -> HeldTensors:
    """Raise if a manifest's models no longer have the tensors that they had; local.

    :param manifest: The tensors as rounds move them.
    :param held: What the models held before.
    :return: What they hold now: other objects may be in the place of tensors that no optimizer holds.
    """
    reshard(manifest.model)  # a forward pass without a backward one has left others in the place of FSDP2's
    now = held.of(manifest.roots)
    is_same = len(now.tensors) == len(held.tensors) and all(map(operator.is_, now.tensors, held.tensors))
    if is_same and now.trains == held.trains:
        return held
    if now.places == held.places:
        _check_replaced(manifest, held, now.tensors)
        return now
    names = held.names | now.names
    other = set(now.places) ^ set(held.places)
    changed = sorted({f"{names[module]}.{leaf}".removeprefix(".") for module, leaf, *_ in other})
    raise ConfigError(
        f"the model's tensors have changed since the Aggregator was made (look at {shorten(changed)}: "
        "replaced, added, removed, tied, untied, frozen or unfrozen); make a new Aggregator"
    )


def _check_replaced(manifest: Manifest, held: HeldTensors, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a parameter that trains was replaced: optimizers and DDP still hold the old object."""
    pairs = zip(tensors, held.tensors, held.trains, strict=True)
    new = {id(now) for now, old, trains in pairs if now is not old and trains and isinstance(old, nn.Parameter)}
    if not new:
        return
    for entry in manifest.moving:
        entry.tensor()  # another shape or data type has an error of its own
    names = sorted(entry.name for entry in manifest.entries if id(entry.tensor()) in new)
    raise ConfigError(
        f"parameters {shorten(map(repr, names))} were replaced by other objects since the Aggregator was made, so "
        "an optimizer or DDP may go on training the old ones; load with assign=False, or replace parameters before "
        "xffl.shard and the optimizer, and make a new Aggregator"
    )
