"""Set-ups lie on each other like layers: one counts once all ranks have it, and taking it off restores what was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from xffl.distributed.agreement import agree
from xffl.distributed.groups import destroy_group
from xffl.errors import StateError, XfflError

__all__ = ["SETUP_FIELDS", "Layer", "laid", "take_off"]

SETUP_FIELDS = (
    "_topology",
    "replica_local_rank",
    "replica_local_size",
    "replica_rank",
    "replica_world_size",
    "federated_local_rank",
    "federated_local_size",
    "federated_rank",
    "federated_world_size",
    "fsdp_mesh",
    "hsdp_mesh",
    "is_sender",
    "receive_from",
    "federated_group",
    "replica_group",
    "federation",
)
"""The fields that a set-up fills; each set-up says all of them."""


@dataclass(eq=False)
class Layer:
    """One set-up: the call that made it, the fields to put back and the groups to destroy with it."""

    call: str
    before: dict[str, Any]
    world: dist.ProcessGroup | None
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    is_open: bool = True
    """Whether the set-up is still being made; its steps belong to it."""

    def destroy(self) -> None:
        """Destroy the groups, newest first. Nothing moves; groups of a world that is gone went with it."""
        if self.world is not None and self.world is _world():
            while self.groups:
                destroy_group(self.groups.pop())


class Layered(Protocol):
    """What has layers, the newest last."""

    _layers: list[Layer]


@contextmanager
def laid(state: Layered, call: str) -> Iterator[None]:
    """Lay a set-up over a state while the block fills its fields; within another set-up, be a step of that.

    Collective over the world: at the end the ranks tell each other whether it worked, so that either all have it, or
    all raise the same error and are as they were. No rank goes on before all have made their groups. Where making a
    group failed (a network that broke, not an argument), its half may stay behind in the store: make a new world then.

    :param state: The state whose fields are filled.
    :param call: Name of the setter, for messages.
    :raises XfflError: if the set-up failed on any rank.
    """
    layers = state._layers
    if layers and layers[-1].is_open:
        yield
        return
    layer = Layer(call, {name: getattr(state, name) for name in SETUP_FIELDS}, _world())
    for name in SETUP_FIELDS:
        setattr(state, name, None)
    layers.append(layer)
    error: XfflError | None = None
    try:
        try:
            yield
        except XfflError as wrong:
            error = wrong
        except Exception as wrong:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = StateError(f"{call} could not make its process groups: {wrong}")
            error.__cause__ = wrong
        agree(f"outcomes of {call}", "done", error=error)
        layer.is_open = False
    except BaseException:
        take_off(state)
        raise


def take_off(state: Layered, *, destroys: bool = True) -> None:
    """Take the newest set-up off: put back the fields of before, and destroy the groups. Nothing moves.

    :param state: A state with at least one set-up.
    :param destroys: Whether the groups are destroyed, for which NCCL waits until all that they carry has ended. Those
        of a rank that leaves by itself go with its process.
    """
    layer = state._layers.pop()
    for name, value in layer.before.items():
        setattr(state, name, value)
    if destroys:
        layer.destroy()


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
