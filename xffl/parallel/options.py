"""What a model that is spread over a cell is asked for, beside the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from xffl.parallel.config import DDPConfig

__all__ = ["SpreadOptions"]


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """How a model is spread.

    :param layers: Layer classes that are gathered, computed again and compiled one at a time.
    :param mp_policy: FSDP2's mixed-precision policy; ``None`` for its default.
    :param offload_policy: Where FSDP2 keeps shards; ``None`` for the device.
    :param reshard_after_forward: Whether FSDP2 frees gathered weights between the forward and the backward pass.
    :param prefetch: Whether FSDP2 gathers the next layer while one computes its forward pass.
    :param checkpointing: What is computed again in the backward pass: ``none``, ``selective`` or ``full``.
    :param compile: Whether each layer is compiled.
    :param sequence_parallel: Whether tensor-parallel norms work on a part of the sequence each.
    :param loss_parallel: Whether tensor-parallel logits stay cut.
    :param ddp: What DDP is asked for; ``None`` for the defaults.
    :param init_weights: Initializes a module's own tensors where the model was built on the meta device.
    """

    layers: tuple[type[nn.Module], ...] = ()
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool = True
    prefetch: bool = False
    checkpointing: str = "none"
    compile: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = False
    ddp: DDPConfig | Mapping[str, Any] | None = None
    init_weights: Callable[[nn.Module], object] | None = None

    def __str__(self) -> str:
        """Write what must be the same on all ranks."""
        shown = dict(vars(self), layers=[layer.__name__ for layer in self.layers])
        shown["init_weights"] = getattr(self.init_weights, "__qualname__", None)
        return ", ".join(f"{name}={value}" for name, value in shown.items())
