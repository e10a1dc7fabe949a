"""How a model is spread inside a cell: plain, DDP, FSDP2 or HSDP, as the state says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from xffl.distributed.distributed_state import DistributedState
from xffl.parallel.config import DDPConfig
from xffl.parallel.options import SpreadOptions
from xffl.parallel.spreading import spread

__all__ = ["shard"]


def shard(
    model: nn.Module,
    state: DistributedState,
    *,
    wrap: Iterable[type[nn.Module]] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    ddp: DDPConfig | Mapping[str, Any] | None = None,
) -> nn.Module:
    """Spread a model over the ranks of each cell, starting from rank 0's weights everywhere.

    Collective over the world: the ranks compare the model's tensors, rank 0's parameters and buffers go once to each
    cell and from there to its ranks, and each cell shards its copy. A model built under ``torch.device("meta")`` gets
    its weights part by part instead, by its modules' ``reset_parameters``, and is never whole on any rank. A cell of
    one rank keeps the model plain, replicas of one rank (``hsdp=1``) become DDP, everything else FSDP2 over the state's
    mesh.

    :param model: The model, initialized, on any device; it is moved to the state's device and changed in place.
    :param state: The state that says where this rank stands.
    :param wrap: Layer classes that are sharded as units of their own (they are gathered one at a time). Plain and DDP
        cells have no use for them.
    :param mp_policy: FSDP2's mixed-precision policy; refused where a cell is plain or DDP, which cannot follow it.
    :param ddp: Options of DDP, such as ``{"find_unused_parameters": True}``: a
        :class:`~xffl.parallel.config.DDPConfig` or a mapping of its fields. Refused where cells are FSDP; a plain cell
        has no use for them.
    :return: The model to use: the same object, or its DDP wrapper.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if the model or an argument cannot be meant, or the ranks' models differ; on all ranks alike.
    """
    # What is no list of classes is told to all ranks together.
    layers: tuple[type[nn.Module], ...] = wrap  # type: ignore[assignment]
    return spread(model, state, SpreadOptions(layers=layers, mp_policy=mp_policy, ddp=ddp))
