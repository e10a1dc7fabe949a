"""Parameters that FSDP leaves whole on every rank, and the mean of their gradients over the ranks that it cuts over.

FSDP2 cannot cut a scalar, and one of its units has one data type. Such a parameter is left to this module
(``ignored_params`` of :func:`torch.distributed.fsdp.fully_shard`): it is on all ranks, and an all-reduce behind the
accumulation of its gradient takes the place of FSDP's reduce-scatter, in the same backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from xffl.compat.pytorch import call_at_end_of_backward
from xffl.distributed.agreement.consistency import message_device
from xffl.distributed.values.gradients import mark_reduced
from xffl.errors import ConfigError

__all__ = ["WholeParameters"]


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returns, in the containers that models return."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for one in output.values():
            yield from _tensors_in(one)
    elif isinstance(output, (list, tuple)):
        for one in output:
            yield from _tensors_in(one)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _tensors_in(getattr(output, field.name))


def _refuse_factor(factor: float) -> None:
    raise ConfigError(
        f"set_gradient_divide_factor({factor}) was called, but gradients of parameters that keep_whole names are "
        "averaged; scale the loss instead"
    )


class WholeParameters:
    """Reduce the gradients of parameters that FSDP does not manage, whenever it reduces those of its own.

    Backward passes of which FSDP only adds gradients up (``set_requires_gradient_sync(False)``, or
    ``set_requires_all_reduce(False)``) do the same here: the next one that reduces takes the mean of what each rank has
    added up, and what was reduced before is the same on all ranks, so that its mean stays. As FSDP does, it takes at
    its end those that it has not used itself.

    As FSDP's, the reduction is collective over the mesh: a parameter is used on all of its ranks in the same passes.

    :param model: The model, after ``fully_shard``.
    :param parameters: What it was told to ignore.
    :param mesh: The mesh that FSDP cuts over; replicas count among its ranks.
    """

    def __init__(self, model: FSDPModule, parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
        self._groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        self._divisor = float(mesh.size())
        self._is_reducing = self._is_reducing_all = True
        self._is_end_awaited = False
        self._trained = trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._left: set[int] = set()  # ids of parameters whose gradients were added up and not reduced
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
        mark_reduced(trained, mesh.mesh.flatten().tolist(), by="xffl.shard (keep_whole)")
        if trained:
            assert isinstance(model, nn.Module)
            watch = torch.compiler.disable(self._watch_backward)  # type: ignore[no-untyped-call]
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.register_forward_hook(watch)
        self._follow(model, "set_requires_gradient_sync", self._set_reducing)
        self._follow(model, "set_requires_all_reduce", self._set_reducing_all)
        self._follow(model, "set_gradient_divide_factor", _refuse_factor)

    @torch.no_grad()
    def _reduce(self, parameter: torch.Tensor) -> None:
        """Replace a gradient by its mean over the ranks; collective over the mesh."""
        gradient = parameter.grad
        if gradient is None:
            return
        if not (self._is_reducing and self._is_reducing_all):
            self._left.add(id(parameter))
            return
        self._left.discard(id(parameter))
        for group in self._groups:
            moved = gradient.to(message_device(gradient.device, group))
            dist.all_reduce(moved, group=group)
            if moved is not gradient:
                gradient.copy_(moved)
        gradient.div_(self._divisor)

    def _watch_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Wait for a backward pass through what a module of FSDP returns: its own begins there, too."""
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._await_end)  # type: ignore[no-untyped-call]

    def _await_end(self, gradient: torch.Tensor) -> None:
        if self._is_end_awaited or not (self._is_reducing and self._is_reducing_all):
            return
        self._is_end_awaited = True
        call_at_end_of_backward(self._reduce_left)

    def _reduce_left(self) -> None:
        """Reduce what earlier passes have left and this one did not use; collective over the mesh where there is any.

        Gradients that were set to ``None`` since then are not there any more.
        """
        self._is_end_awaited = False
        for parameter in self._trained:
            if id(parameter) in self._left:
                self._reduce(parameter)
        self._left.clear()

    def _set_reducing(self, requires_gradient_sync: bool, **unused: Any) -> None:
        self._is_reducing = requires_gradient_sync
        self._is_reducing_all = requires_gradient_sync

    def _set_reducing_all(self, requires_all_reduce: bool, **unused: Any) -> None:
        self._is_reducing_all = requires_all_reduce

    @staticmethod
    def _follow(model: FSDPModule, name: str, heed: Callable[..., None]) -> None:
        """Hear of what a caller tells FSDP of the whole model: torch has no public way to ask it."""
        original = getattr(model, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            heed(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(model, name, told)
