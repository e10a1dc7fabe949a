"""Strategies made of torch's own parts: one body, for any mesh inside a cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.values.norms import alike, norms_of, values_of
from xffl.distributed.values.sharding import local_tensor, sharded_parameters
from xffl.errors import ConfigError, StateError
from xffl.parallel.axes.context_parallel import context_parallel, give_positions
from xffl.parallel.axes.pipeline import Loss, PipelineModel
from xffl.parallel.meta_weights import Initializer
from xffl.parallel.spread import SpreadOptions, spread
from xffl.parallel.strategy import DistributedStrategy
from xffl.parallel.zero.deepspeed import DeepSpeedStrategy

__all__ = ["STRATEGIES", "DDPStrategy", "FSDPStrategy", "HSDPStrategy", "NativeStrategy", "SingleStrategy"]


class NativeStrategy(DistributedStrategy):
    """A strategy of torch's DDP, FSDP2, tensor, context and pipeline parallelism."""

    kinds: ClassVar[tuple[str, ...]]
    """What the plainest strategy for the device parameters may be called."""

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        plainest = self.device_parameters.strategy
        if plainest not in self.kinds:
            raise ConfigError(f"strategy {self.name!r} does not do what the sizes ask for; give strategy={plainest!r}")
        self._scale: LossScale | None = None
        self._is_in_context = False
        distributed = self.config.distributed
        for name in ("activation_checkpointing", "compile", "fsdp_forward_prefetch"):
            if getattr(self.device_parameters, name) not in (False, "none") and not distributed.wrap:
                raise ConfigError(f"{name} goes layer by layer, but distributed.wrap names no layer class; give some")
        if distributed.ddp.static_graph and self.config.training.gradient_accumulation > 1:
            raise ConfigError("DDP with static_graph=True does not accumulate over micro-batches; leave it out")

    def setup(self, state: DistributedState | None = None) -> None:
        """Join the other processes; collective over the world."""
        super().setup(state)
        self._scale = None
        if self.device_parameters.param_dtype == "float16":
            self._scale = LossScale(group=self.world.get_group("cell"), device=self.device)

    def wrap_model(
        self, model: nn.Module, *, loss: Loss | None = None, init_weights: Initializer | None = None
    ) -> nn.Module:
        """Spread a model as :func:`xffl.parallel.spread.spread` does; collective over the world."""
        world, device_parameters = self.world, self.device_parameters
        if world.pp_enabled and loss is None:
            raise ConfigError("a pipeline computes its loss itself; give wrap_model(model, loss=...)")
        is_fsdp = device_parameters.strategy in ("fsdp", "hsdp")
        options = SpreadOptions(
            layers=self.config.distributed.wrap,
            mp_policy=world.get_fsdp_mp_policy() if is_fsdp else None,
            offload_policy=world.get_offload_policy() if is_fsdp else None,
            parameters=device_parameters,
            ddp=self.config.distributed.ddp,
            init_weights=init_weights,
            keep_whole=self.config.distributed.keep_whole,
        )
        spread_model = spread(model, self.state, options, world)
        if world.cp_enabled:
            # Stages behind the first get activations, which tensor parallelism has cut along the sequence once more.
            is_cut_further = world.tp_enabled and device_parameters.sequence_parallel
            parts = world.dims.size("tp") if is_cut_further and world.pp_rank > 0 else 1
            give_positions(spread_model, world.get_mesh("cp"), activation_parts=parts)
        if world.pp_enabled:
            assert loss is not None, "checked above"
            mesh, micro_batches = world.get_mesh("pp"), device_parameters.pp_micro_batches or world.pp_size
            schedule = device_parameters.pp_schedule
            spread_model = PipelineModel(spread_model, mesh, loss, micro_batches=micro_batches, schedule=schedule)
        self._losses[spread_model] = loss
        self._wrapped.setdefault(spread_model, WeakSet())
        return spread_model

    @contextmanager
    def train_context(self) -> Iterator[None]:
        """Compute in this context as the device parameters ask: data type, cut logits, whole sequences; local.

        It may be entered inside itself. With ``loss_parallel``, or with ``cp`` and activation checkpointing, the
        backward pass belongs inside, too.

        :yield: Nothing.
        """
        is_outermost = self.world.cp_enabled and not self._is_in_context
        sequences: AbstractContextManager[Any] = nullcontext()
        if is_outermost:
            sequences = context_parallel(self.world.get_mesh("cp"))
        self._is_in_context |= is_outermost
        try:
            with self.world.train_context(), sequences:
                yield
        finally:
            self._is_in_context &= not is_outermost

    def forward_backward(
        self, model: nn.Module, *inputs: torch.Tensor, target: torch.Tensor, share: float | None = None, **named: Any
    ) -> torch.Tensor:
        """Run a micro-batch forward and backward; with a pipeline all stages are given the same one. Collective."""
        if not isinstance(model, PipelineModel):
            return super().forward_backward(model, *inputs, target=target, share=share, **named)
        factor = self._accumulator.factor(share)
        with self.train_context():
            named |= {"scale_loss": lambda loss: loss * factor, "sync": self._accumulator.is_last}
            return model.step(*inputs, target=target, **named).detach()

    def _synchronize(self, model: nn.Module, is_last: bool) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = is_last  # what its no_sync() sets for the length of a block
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)

    def backward(self, loss: torch.Tensor, *, share: float | None = None) -> None:
        """Compute gradients, in float16 of a scaled loss; collective over the cell where they are synchronized."""
        super().backward(loss if self._scale is None else self._scale.scaled(loss), share=share)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm; collective over the cell."""
        parameters = sharded_parameters(model).values()
        if self._scale is not None and self._scale.unscale(parameters):
            return torch.full((), torch.inf, dtype=torch.float32, device=self.device)
        return self.world.clip_grad_norm(parameters, max_norm)

    def step(self, *optimizers: torch.optim.Optimizer) -> bool:
        """Step the optimizers and zero their gradients, or skip the step where float16 has overflowed on any rank.

        Collective over the cell with float16: one all-reduce of a number.
        """
        is_taken = super().step(*optimizers)
        if self._scale is not None:
            self._scale.update(is_lost=self.is_step_lost)
        return is_taken

    def _are_finite(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        if self._scale is None:
            return True
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        # Of all optimizers at once: the ranks decide together, and all optimizers step or none.
        return not self._scale.unscale([parameter for group in groups for parameter in group["params"]])

    def _parts(self, models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
        stages = {name: model.module if isinstance(model, PipelineModel) else model for name, model in models.items()}
        parts = super()._parts(stages, optimizers)
        return parts if self._scale is None else {**parts, "loss_scale": self._scale}


class SingleStrategy(NativeStrategy):
    """A whole model on one device, with one process or in cells of one rank."""

    name = "single"
    kinds = ("single",)
    _preset = DeviceParameters.SINGLE_DEVICE


class DDPStrategy(NativeStrategy):
    """A whole model on each rank of a cell, gradients added up by DDP."""

    name = "ddp"
    kinds = ("single", "ddp")
    _preset = DeviceParameters.DDP


class FSDPStrategy(NativeStrategy):
    """One copy of the model in a cell, cut over its ranks by FSDP2."""

    name = "fsdp"
    kinds = ("single", "fsdp")
    _preset = DeviceParameters.FSDP


class HSDPStrategy(NativeStrategy):
    """Several copies of the model in a cell, each cut over some of its ranks by FSDP2.

    The device parameters have to say over how many: ``DeviceParameters.HSDP(dp_shard=...)``.
    """

    name = "hsdp"
    kinds = ("single", "ddp", "fsdp", "hsdp")

    @staticmethod
    def _preset() -> DeviceParameters:
        raise ConfigError("strategy 'hsdp' needs device_parameters, such as DeviceParameters.HSDP(dp_shard=n)")


SingleGPUStrategy = SingleStrategy  # the reference document's name; it trains on a CPU as well

STRATEGIES: dict[str, type[DistributedStrategy]] = {
    strategy.name: strategy for strategy in (SingleStrategy, DDPStrategy, FSDPStrategy, HSDPStrategy, DeepSpeedStrategy)
}
"""The strategies by their names in configurations; users may add theirs."""


GROWTH_STEPS = 2000  # without an overflow, after which the factor doubles, as in torch's GradScaler


class LossScale:
    """A factor that halves after a step whose gradients overflow and doubles after many that do not.

    torch's ``GradScaler`` decides on each rank by the gradients that the rank holds; here the ranks of a cell decide
    together, whatever part of the gradients each of them holds.

    Source: Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740).
    """

    def __init__(self, scale: float = 2.0**16, *, group: dist.ProcessGroup | None = None, device: torch.device) -> None:
        self.scale = scale
        self._steps = 0
        self._group = group
        self._device = device
        self._unscaled: set[int] = set()
        self._has_overflowed = self._is_spent = False

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to compute gradients of; local."""
        self._is_spent = False
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Divide gradients by the factor, once before :meth:`update`; collective over the cell."""
        if self._is_spent:
            raise StateError("the gradients were stepped on already; give all optimizers to one call of step")
        scaled = [parameter for parameter in parameters if id(parameter) not in self._unscaled]
        gradients = [parameter.grad for parameter in scaled if parameter.grad is not None]
        local = [local_tensor(gradient) for gradient in gradients]
        for same in alike(gradient for gradient in local if not gradient.is_sparse):
            torch._foreach_div_(same, self.scale)
        for gradient in local:
            if gradient.is_sparse:
                gradient.div_(self.scale)
        values = [value for value in map(values_of, local) if value.numel()]
        worst = norms_of(values, torch.inf, self._device).isfinite().all().logical_not().float()
        if self._group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        self._unscaled.update(map(id, scaled))
        self._has_overflowed |= bool(worst.item())
        return self._has_overflowed

    def update(self, *, is_lost: bool = False) -> None:
        """Choose the factor for the next step; local, after :meth:`unscale` and the step."""
        if not is_lost and self._has_overflowed:
            self.scale = max(self.scale / 2.0, 1.0)
            self._steps = 0
        elif not is_lost:
            self._steps += 1
            if self._steps == GROWTH_STEPS:
                self.scale = min(self.scale * 2.0, 2.0**24)
                self._steps = 0
        self._unscaled.clear()
        self._has_overflowed = False
        self._is_spent = True

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs, the same on all ranks of a cell."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; local."""
        if set(state) != {"scale", "steps"}:
            raise ConfigError(f"a loss scale's state has 'scale' and 'steps', not {sorted(state)}; give its own")
        self.scale = float(state["scale"])
        self._steps = int(state["steps"])
