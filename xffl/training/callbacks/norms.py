"""Norms of gradients and of what a step changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from xffl.checks import integer
from xffl.distributed.sharding import sharded_parameters
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.spread import (
    check_own_weights,
    copies_of,
    local,
    norm_of,
    spread_like,
    trained_parameters,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from xffl.training.trainer import BaseTrainer

__all__ = ["GradientNormCallback", "UpdateNormCallback"]


class GradientNormCallback(Callback):
    """Log the L2 norm of the gradients that the optimizer gets: ``norms/gradient``.

    It is that of the whole model, each element counted once, however it is spread; several models are told apart as
    ``norms/gradient/MODEL``, each at the step of its optimizer (of the first one, where it has several). Each norm is
    one all-reduce of a number over the cell; the device is not waited for. Gradients are clipped already where
    ``training.max_grad_norm`` is given: what they were before is ``train/grad_norm``. Steps that float16 skips are not
    measured. DeepSpeed is refused.

    :param every: Optimizer steps between two measurements.
    :param depth: With 1 also the norms of the model's top-level modules (``norms/gradient/layers``), with 2 those one
        level below (``norms/gradient/layers.0``), and so on; 0 for the whole model only.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, every: int = 1, depth: int = 0) -> None:
        self.every = integer("every", every)
        self.depth = integer("depth", depth, 0)
        self._parts: dict[str, dict[str, list[nn.Parameter]]] = {}
        self._measured: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Sort the parameters by what they count for, and listen to the optimizers; collective over the cell.

        :param trainer: The trainer.
        :raises ConfigError: with DeepSpeed.
        """
        check_own_weights(trainer, "GradientNormCallback")
        models = trainer.named_models()
        parts: dict[str, dict[str, list[nn.Parameter]]] = {name: {} for name in models}
        for name, parameter in trained_parameters(models).items():
            model, *path = name.split(".")
            whole = f"/{model}" if len(models) > 1 else ""
            parts[model].setdefault(whole, []).append(parameter)
            if self.depth:
                inner = ".".join(path[: self.depth] if len(path) > self.depth else path[:-1] or path)
                parts[model].setdefault(f"{whole}/{inner}", []).append(parameter)
        group = trainer.world.get_group("cell")
        told: list[dict[str, list[str]]] = [{} for _ in range(group.size())]
        mine = {model: list(named) for model, named in parts.items()}
        dist.all_gather_object(told, mine, group=group)  # stages of a pipeline have different ones
        self._parts = {
            model: {name: named.get(name, []) for name in dict.fromkeys(name for one in told for name in one[model])}
            for model, named in parts.items()
        }
        self._measured = {}
        for optimizer in trainer.named_optimizers().values():
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before_step, trainer)))

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Stop listening.

        :param trainer: The trainer.
        :param path: The checkpoint that the run goes on from.
        """
        del path
        self.post_fit(trainer)

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Stop listening.

        :param trainer: The trainer.
        """
        del trainer
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, trainer: BaseTrainer, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Measure the model that the optimizer trains, where it is due; collective over the cell."""
        step = trainer.global_step
        if step % self.every:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, model in trainer.named_models().items():
            if self._measured.get(name) == step or stepped.isdisjoint(map(id, sharded_parameters(model).values())):
                continue
            self._measured[name] = step
            for part, parameters in self._parts[name].items():
                trainer.log_scalar(f"norms/gradient{part}", trainer.world.get_total_norm(parameters))


class UpdateNormCallback(Callback):
    """Log the L2 norm of what an optimizer step changes in the weights: ``norms/update``.

    Rounds do not count, only the step. Each measurement copies the rank's own weights, which are freed after the step,
    and costs one all-reduce of a number over the cell. DeepSpeed is refused.

    :param every: Optimizer steps between two measurements.
    :param relative: Whether to log ``norms/update_relative`` as well, the norm relative to that of the weights.
    :raises ConfigError: if an argument cannot be meant.
    """

    def __init__(self, *, every: int = 10, relative: bool = False) -> None:
        self.every = integer("every", every)
        self.relative = relative
        self._parameters: dict[str, nn.Parameter] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._changes: dict[str, torch.Tensor] = {}
        self._has_stepped = False
        self._is_due = False
        self._handles: list[RemovableHandle] = []

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Listen to the optimizers: what comes after their steps, such as a round, is not to be measured.

        :param trainer: The trainer.
        :raises ConfigError: with DeepSpeed.
        """
        check_own_weights(trainer, "UpdateNormCallback")
        self._parameters = trained_parameters(trainer.named_models())
        for optimizer in trainer.named_optimizers().values():
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def pre_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Copy the weights, where it is due.

        :param trainer: The trainer.
        """
        self._is_due = trainer.global_step % self.every == 0
        if self._is_due:
            self._before = copies_of(self._parameters)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Log, where the optimizer has stepped; float16 may have skipped it.

        :param trainer: The trainer.
        """
        changes, self._changes, self._before = self._changes, {}, {}
        has_stepped, self._has_stepped = self._has_stepped, False
        if not has_stepped:
            return
        spread = [spread_like(values, self._parameters[name]) for name, values in changes.items()]
        norm = norm_of(trainer.world, spread)
        trainer.log_scalar("norms/update", norm)
        if self.relative:
            weights = norm_of(trainer.world, [self._parameters[name].detach() for name in changes])
            trainer.log_scalar("norms/update_relative", norm / weights)

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Stop listening.

        :param trainer: The trainer.
        :param path: The checkpoint that the run goes on from.
        """
        del path
        self.post_fit(trainer)

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Stop listening.

        :param trainer: The trainer.
        """
        del trainer
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_due:
            return
        self._has_stepped = True
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._parameters.items():
            if id(parameter) in own and name in self._before:
                self._changes[name] = self._before.pop(name).neg_().add_(local(parameter))
