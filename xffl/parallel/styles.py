"""Styles of tensor parallelism beside torch's own, and its loss on logits that are cut by the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from xffl.errors import ConfigError

__all__ = ["GatheredInput", "Replicated"]


class Replicated(ParallelStyle):
    """Let every rank hold a module's whole weights, as DTensors, and compute with them on what it has.

    Nothing moves in the forward pass. Unlike torch's ``SequenceParallel`` it takes weights of any values and leaves
    frozen ones frozen, and what goes in and comes out are plain tensors.

    :param layout: How the first input lies over the mesh: ``Shard(1)`` for parts of a sequence.
    :param output_layout: How the output shall lie; by default as it comes.
    """

    def __init__(self, *, layout: Placement | None = None, output_layout: Placement | None = None) -> None:
        super().__init__()
        self.layout = layout or Replicate()
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replica = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(replica, parameter.requires_grad))
        module.register_forward_pre_hook(partial(_take, device_mesh, self.layout, self.layout), with_kwargs=True)
        module.register_forward_hook(self._give)
        return module

    def _give(self, module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
        if self.output_layout is not None:
            output = output.redistribute(placements=[self.output_layout])
        return output.to_local()

    def __repr__(self) -> str:
        return f"Replicated(layout={self.layout}, output_layout={self.output_layout})"


class GatheredInput(ParallelStyle):
    """Make a module's first input whole once for all projections that read it, and reduce its gradient once.

    One all-gather forward and one reduce-scatter backward for ``Shard(1)``; one all-reduce backward for
    ``Replicate()``. The first input is the first floating-point tensor of the call, by position or by name (torch's
    ``PrepareModuleInput`` wants to know all arguments of the call).

    :param layout: How the input lies over the mesh.
    """

    def __init__(self, *, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_take, device_mesh, self.layout, Replicate()), with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"GatheredInput(layout={self.layout})"


def _take(
    mesh: DeviceMesh, layout: Placement, wanted: Placement, module: nn.Module, args: tuple[Any, ...], kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the first tensor of a call from its layout into the wanted one, as a DTensor."""
    values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    floating = [key for key, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    tensors = floating or [key for key, value in values.items() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ConfigError(f"{type(module).__name__} was called without a tensor, but its plan says how one lies")
    value = values[tensors[0]]
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [layout], run_check=False)
    values[tensors[0]] = value.redistribute(placements=[wanted])
    return tuple(values[index] for index in range(len(args))), {key: values[key] for key in kwargs}
