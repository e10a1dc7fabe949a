"""Parts of a pipeline that torch runs: a stage, and its schedules.

Imported where a pipeline runs, since torch's compiler comes with it: half a second for whoever has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from xffl.errors import ConfigError
from xffl.parallel.pipeline import sizes_of

__all__ = ["Schedule", "Stage", "make_schedule"]

Schedule = ScheduleGPipe | Schedule1F1B
"""How micro-batches follow each other."""

_SCHEDULES: dict[str, type[ScheduleGPipe] | type[Schedule1F1B]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Stage(PipelineStage):
    """Torch's stage with known sizes, arguments that are not cut, and a say in when gradients are reduced."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        device: torch.device,
        *,
        flows: Sequence[tuple[torch.Tensor, ...]],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(
            module, number, len(flows) - 1, device, input_args=flows[number], output_args=flows[number + 1], group=group
        )
        self.shared: dict[str, Any] = {}
        self.sync = True
        self._sent = sizes_of(flows[number + 1])

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what is sent on is contiguous and of the size that the next stage expects."""
        output: Any = super().forward_maybe_with_nosync(*args, **kwargs, **self.shared)  # type: ignore[no-untyped-call]
        if self.is_last:
            return output
        sent = tuple(tensor.contiguous() for tensor in (output if isinstance(output, tuple) else (output,)))
        if sizes_of(sent) != self._sent:  # gloo would take fewer bytes than it expects, and leave the rest as it was
            raise ConfigError(
                f"stage {self.stage_index} sends {sizes_of(sent)}, but the next one expects {self._sent}; the module's "
                "output must have the same size and dtype in training as in evaluation"
            )
        return sent

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Keep torch 2.11 from comparing the last stage's output, too, which may be a DTensor."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a micro-batch backward; the last one makes DDP reduce."""
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and self.sync)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Make FSDP2 reduce, after the last micro-batch."""
        if self.sync:
            super().perform_reduce_grad(grad_scale_factor)


def make_schedule(stage: Stage, mode: str, micro_batches: int, loss: Callable[..., torch.Tensor] | None) -> Schedule:
    """Return a schedule of a stage; local."""
    # Torch's scale_grads would divide the gradients of earlier calls once more; the loss is divided instead.
    return _SCHEDULES.get(mode, ScheduleGPipe)(stage, micro_batches, loss_fn=loss, scale_grads=False)
