"""Norms of gradients, of what optimizer steps change, and of how far cells move between rounds.

All are L2 norms over the parameters that train, each element counted once however the model is sharded: every rank
sums over its own elements, and one number is reduced over the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.aggregation.engine.planning.tensors import tensors_of
from xffl.aggregation.steps.wrapped_optimizers import unwrap
from xffl.checks import integer
from xffl.compat.optimizer_steps import enclosing_steps
from xffl.distributed.agreement.consistency import gather_objects
from xffl.distributed.values.norms import total_norm
from xffl.distributed.values.sharding import local_tensor, reshard, sharded_parameters
from xffl.distributed.values.spread_like import spread_as
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from xffl.aggregation import RoundReport
    from xffl.distributed.world import DistributedWorld
    from xffl.training.mixins.federated import FederatedMixin
    from xffl.training.trainer import BaseTrainer

__all__ = [
    "DriftCallback",
    "GradientNormCallback",
    "UpdateNormCallback",
    "check_own_weights",
    "copies_of",
    "local",
    "norm_of",
    "spread_like",
    "trained_parameters",
]


# A model's parameters as the ranks of a cell hold them ----------------------------------------------------------------


def trained_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that train by ``MODEL.PARAMETER``, tied ones once; nothing moves."""
    for model in models.values():
        reshard(model)
    return {
        f"{name}.{key}": tensor
        for name, model in models.items()
        for key, _, _, tensor in tensors_of(model)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }


def check_own_weights(trainer: BaseTrainer, what: str) -> None:
    """Raise where an engine keeps weights and gradients to itself; local, the same on all ranks."""
    if trainer.strategy.name == "deepspeed":
        raise ConfigError(
            f"{what} reads weights and gradients, which DeepSpeed keeps in buffers of its engine; leave it out, or "
            "train with distributed.strategy fsdp or hsdp"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, sharded or not, in the same memory and without gradient."""
    return local_tensor(tensor.detach())


def copies_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy this rank's elements; nothing moves."""
    return {name: local(parameter).clone() for name, parameter in parameters.items()}


def spread_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as a tensor in the same memory that is sharded like a parameter; nothing moves."""
    return spread_as(values, parameter) if isinstance(parameter, DTensor) else values


def norm_of(world: DistributedWorld, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of this rank's tensors, which are sharded like parameters; collective over the cell."""
    return total_norm(tensors, order=2.0, dims=world.dims, cell=world.get_group("cell"), device=world.device)


class _StepCallback(Callback):
    """A callback with hooks at the optimizers' steps, which go when the run ends."""

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []

    def _remove_hooks(self, *_: Any, **__: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    post_fit = preemption = _remove_hooks


# The callbacks --------------------------------------------------------------------------------------------------------


class GradientNormCallback(_StepCallback):
    """Log the L2 norm of the gradients that the optimizer gets: ``norms/gradient``.

    It is that of the whole model, each element counted once, however it is sharded; several models are told apart as
    ``norms/gradient/MODEL``, each at the step of its optimizer (of the first one, where it has several). Each norm is
    one all-reduce of a number over the cell; the device is not waited for. Gradients are clipped already where
    ``training.max_grad_norm`` is given: what they were before is ``train/grad_norm``. Steps that float16 skips are not
    measured. DeepSpeed is refused.

    :param every: Optimizer steps between two measurements.
    :param depth: With 1 also the norms of the model's top-level modules (``norms/gradient/layers``), with 2 those one
        level below (``norms/gradient/layers.0``), and so on; 0 for the whole model only.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, every: int = 1, depth: int = 0) -> None:
        super().__init__()
        self.every = integer("every", every)
        self.depth = integer("depth", depth, 0)
        self._parts: dict[str, dict[str, list[nn.Parameter]]] = {}
        """For each model its parameters by what follows ``norms/gradient`` in the name of their norm"""
        self._measured: dict[str, int] = {}
        """The last step at which a model was measured"""

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Sort the parameters by what they count for, and add hooks to the optimizers; collective over the cell."""
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
        mine = {model: list(named) for model, named in parts.items()}
        of_ranks = gather_objects(mine, trainer.world.get_group("cell"))  # stages of a pipeline have different ones
        self._parts = {
            model: {
                name: named.get(name, []) for name in dict.fromkeys(name for one in of_ranks for name in one[model])
            }
            for model, named in parts.items()
        }
        self._measured = {}
        for optimizer in trainer.named_optimizers().values():
            self._hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, trainer)))

    def _before_step(self, trainer: BaseTrainer, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure the models that the optimizer trains, where it is due; collective over the cell."""
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


class UpdateNormCallback(_StepCallback):
    """Log the L2 norm of what an optimizer step changes in the weights: ``norms/update``.

    Rounds do not count, only the step. Each measurement copies the rank's own weights, which are freed after the step,
    and costs one all-reduce of a number over the cell. DeepSpeed is refused.

    :param every: Optimizer steps between two measurements.
    :param relative: Whether to log ``norms/update_relative`` as well, the norm relative to that of the weights.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, every: int = 10, relative: bool = False) -> None:
        super().__init__()
        self.every = integer("every", every)
        self.relative = relative
        self._before: dict[str, torch.Tensor] = {}
        self._changes: dict[str, torch.Tensor] = {}
        self._has_stepped = self._is_due = False

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Add hooks to the optimizers: what comes after their steps, such as a round, is not to be measured."""
        check_own_weights(trainer, "UpdateNormCallback")
        self._parameters = trained_parameters(trainer.named_models())
        for optimizer in trainer.named_optimizers().values():
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def pre_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Copy the weights, where it is due."""
        self._is_due = trainer.global_step % self.every == 0
        if self._is_due:
            self._before = copies_of(self._parameters)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_due:
            return
        self._has_stepped = True
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._parameters.items():
            if id(parameter) in stepped and name in self._before:
                self._changes[name] = self._before.pop(name).neg_().add_(local(parameter))

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Log, where the optimizer has stepped; float16 may have skipped it."""
        changes = self._changes
        self._changes = {}
        self._before = {}
        has_stepped = self._has_stepped
        self._has_stepped = False
        if not has_stepped:
            return
        norm = norm_of(trainer.world, [spread_like(values, self._parameters[name]) for name, values in changes.items()])
        trainer.log_scalar("norms/update", norm)
        if self.relative:
            weights = norm_of(trainer.world, [self._parameters[name].detach() for name in changes])
            trainer.log_scalar("norms/update_relative", norm / weights)


class DriftCallback(_StepCallback):
    """Log at each round how this cell has moved since the last one; of the parameters that train.

    With ``g`` the model of the last round, ``x`` this cell's before this round and ``n`` the new one:

    * ``drift/norm``: L2 norm of the cell's update, ``|x - g|``;
    * ``drift/relative``: that in relation to the model, ``|x - g| / |g|``;
    * ``drift/distance``: how far the cell was from the new model, ``|x - n|``;
    * ``drift/cosine``: the cosine between the cell's update and that of the federation, ``n - g``.

    With ``copies`` each rank keeps a copy of its own elements of ``g`` and makes one of ``x`` before a round: memory of
    twice the rank's own weights in their data type, and some all-reduces of a number inside the cell at each round;
    nothing crosses to other cells. Where ``federation.every`` is not a number, the step that ends in a round is not
    known, and ``x`` is copied after each. Rounds with a delay or of fragments are refused, since there is no such
    ``x``.

    Without, ``drift/norm`` is what the round itself has measured (of the part of the model that was exchanged), and the
    last two are not logged. That needs ``federation.aggregator: {norms: true}``, or an algorithm that measures norms.

    A round that a cell answers without a step of its own since the last one is not logged.

    :param copies: Whether to measure with copies.
    """

    def __init__(self, *, copies: bool = True) -> None:
        super().__init__()
        self.copies = copies
        self._global: dict[str, torch.Tensor] = {}
        """Copies of ``g``"""
        self._global_norm = math.nan
        """``|g|``; NaN until it is known, as in the middle between two rounds after a resume"""
        self._local: dict[str, torch.Tensor] = {}
        """Copies of ``x``"""
        self._steps = 0
        self._every: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were made since the last round."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; in the middle between two rounds the next one cannot be measured."""
        self._steps = int(state["steps"])

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Add a hook to the optimizer whose steps rounds count; refuse rounds that cannot be measured."""
        asked = getattr(trainer.config, "federation", None)
        if asked is None or not asked.has_rounds:
            raise ConfigError(
                "DriftCallback measures rounds, and there are none; give federation.every, or leave it out"
            )
        if self.copies:
            check_own_weights(trainer, "DriftCallback with copies")
        if self.copies and (asked.delay or asked.aggregator.get("fragments", 1) != 1):
            raise ConfigError(
                f"DriftCallback cannot copy what goes into rounds with delay {asked.delay} or of fragments; give "
                "copies: false and federation.aggregator: {norms: true}"
            )
        self._every = asked.every if isinstance(asked.every, int) else None
        federated = cast("FederatedMixin", trainer)
        self._parameters = trained_parameters({"model": federated.federated_model()})
        for optimizer in unwrap(federated.federated_optimizers())[-1:]:
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Take the model as that of the last round; collective over the cell."""
        if self._steps == 0:
            self._keep_global(trainer)

    def post_train(self, trainer: BaseTrainer) -> None:
        """Copy the cell's model: the last rounds follow."""
        if self._steps and not self._local:
            self._keep_local()

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Measure and log; collective over the cell."""
        steps = self._steps
        self._steps = 0
        before = self._local
        self._local = {}
        if steps and not math.isnan(self._global_norm):
            values = self._measure(trainer, before) if self.copies else self._read(trainer, report)
            if values:
                trainer.log_metrics({f"drift/{name}": value for name, value in values.items()})
        if not report.is_skipped:
            self._keep_global(trainer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(step is optimizer for step in enclosing_steps()):
            return  # super().step()
        self._steps += 1
        if self._every is None or self._steps >= self._every:
            self._keep_local()

    @torch.no_grad()
    def _keep_local(self) -> None:
        if not self.copies:
            return
        if not self._local:
            self._local = copies_of(self._parameters)
        else:
            for name, values in self._local.items():
                values.copy_(local(self._parameters[name]))

    @torch.no_grad()
    def _keep_global(self, trainer: BaseTrainer) -> None:
        self._global_norm = norm_of(trainer.world, [one.detach() for one in self._parameters.values()]).item()
        if self.copies:
            for name, parameter in self._parameters.items():
                self._global[name] = local(parameter).clone()

    def _read(self, trainer: BaseTrainer, report: RoundReport) -> dict[str, float]:
        """Return what the round has measured."""
        if report.update_norms is None:
            raise ConfigError(
                "DriftCallback without copies needs rounds that measure norms; give federation.aggregator: "
                "{norms: true}, or copies: true"
            )
        norm = report.update_norms[trainer.state.cell]
        return {"norm": norm, "relative": _ratio(norm, self._global_norm)}

    @torch.no_grad()
    def _measure(self, trainer: BaseTrainer, before: dict[str, torch.Tensor]) -> dict[str, float]:
        """Compare the three models; the copies are used up."""
        if not before:
            return {}
        for name, parameter in self._parameters.items():
            before[name].sub_(local(parameter))  # x - n
        distance = self._norm(trainer, before)
        for name, parameter in self._parameters.items():
            self._global[name].neg_().add_(local(parameter))  # n - g
        federation = self._norm(trainer, self._global)
        for name, values in before.items():
            values.add_(self._global[name])  # x - g
        norm = self._norm(trainer, before)
        # |x - n|^2 = |x - g|^2 + |n - g|^2 - 2 (x - g)(n - g)
        cosine = _ratio(norm**2 + federation**2 - distance**2, 2 * norm * federation)
        return {
            "norm": norm,
            "relative": _ratio(norm, self._global_norm),
            "distance": distance,
            "cosine": max(-1.0, min(1.0, cosine)),
        }

    def _norm(self, trainer: BaseTrainer, values: Mapping[str, torch.Tensor]) -> float:
        return norm_of(
            trainer.world, [spread_like(value, self._parameters[name]) for name, value in values.items()]
        ).item()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
