"""Exponential moving average of the weights, sharded as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from xffl.checks import integer, number
from xffl.distributed.values.sharding import reshard
from xffl.errors import CheckpointError, ConfigError, StateError
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.param_norms import check_own_weights, local, spread_like, trained_parameters

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = ["EMACallback"]


class EMACallback(Callback):
    """Keep an exponential moving average of the weights that train, and validate with it.

    After every ``every`` optimizer steps ``average = decay * average + (1 - decay) * weight``. Each rank averages the
    elements that it holds, in fp32 (fp64 for fp64), so nothing moves and nobody has a full copy; the memory is that of
    one more copy of the rank's own weights, and of a second one while the averages stand in the model. Buffers (running
    statistics) and frozen parameters are not averaged: a validation uses the model's.

    In a federation each cell averages its own weights, with what rounds bring into them: the averages themselves are
    never exchanged, and differ between cells. A validation of the federation measures each cell's averages, then; with
    ``validates=False`` it measures the model that a round has made.

    Checkpoints keep the averages spread like the parameters, so they load into another number of ranks or another
    strategy of the same cells. Pipelines and DeepSpeed are refused.

    :param decay: What stays of the average at each update, above 0 and below 1.
    :param every: Optimizer steps between two updates; the decay is that of an update.
    :param start: Optimizer steps after which averaging begins, with the weights of then. Until then validations use the
        weights.
    :param validates: Whether validations use the averages.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, decay: float = 0.999, every: int = 1, start: int = 0, validates: bool = True) -> None:
        self.decay = number("decay", decay, above=0.0, below=1.0, hint="give such as 0.999")
        self.every = integer("every", every)
        self.start = integer("start", start, 0)
        self.validates = validates
        self.steps = 0
        self._models: list[nn.Module] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._averages: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] | None = None

    @property
    def averages(self) -> Mapping[str, torch.Tensor]:
        """The averages, spread like the parameters, by ``MODEL.PARAMETER``."""
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and how many steps were made."""
        return {"steps": self.steps, "averages": dict(self._averages)} if self._averages else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over averages; local."""
        if not state:
            return
        if not self._averages:
            raise StateError("averages are loaded after the models are spread; set the trainer up first")
        saved: Mapping[str, torch.Tensor] = state["averages"]
        if differing := sorted(saved.keys() ^ self._averages.keys()):
            raise CheckpointError(f"the saved averages are of another model: {differing[0]!r} is only in one of them")
        for name, average in self._averages.items():
            values = saved[name]
            if values.shape != average.shape:
                raise CheckpointError(f"the average of {name!r} is {tuple(values.shape)}, not {tuple(average.shape)}")
            if isinstance(average, DTensor) and not isinstance(values, DTensor):
                values = distribute_tensor(values, average.device_mesh, average.placements, src_data_rank=None)
            if values is not average:
                local(average).copy_(local(values))
        self.steps = int(state["steps"])

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Make the averages: a checkpoint is read into them."""
        check_own_weights(trainer, "EMACallback")
        if trainer.world.pp_enabled:
            raise ConfigError(
                "EMACallback does not go with a pipeline, whose stages hold different weights; leave it out, or "
                "give pp=1"
            )
        models = trainer.named_models()
        self._models = list(models.values())
        self._parameters = trained_parameters(models)
        for name, parameter in self._parameters.items():
            values = local(parameter)
            wide = torch.promote_types(values.dtype, torch.float32)
            self._averages[name] = spread_like(values.to(wide, copy=True), parameter)

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Begin with the weights as they are, unless averages were loaded."""
        if self.steps <= self.start:
            self._update(0.0)

    def post_optimizer_step(self, trainer: BaseTrainer) -> None:
        """Average, where it is due."""
        self.steps += 1
        since = self.steps - self.start
        if since == 0:
            self._update(0.0)
        elif since > 0 and since % self.every == 0:
            self._update(self.decay)

    def pre_val_epoch(self, trainer: BaseTrainer) -> None:
        """Put the averages into the models."""
        if self.validates and self.steps > self.start:
            self.swap_in()

    def _put_back(self, *_: Any, **__: Any) -> None:
        self.swap_out()

    post_val_epoch = exception = _put_back

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the models have the averages in the block; local."""
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages into the models and keep the weights aside; local, on all ranks of a cell."""
        if self._weights is not None:
            raise StateError("the averages stand in the models already; call swap_out() first")
        self._weights = {}
        for name, parameter in self._parameters.items():
            self._weights[name] = local(parameter).clone()
            local(parameter).copy_(local(self._averages[name]))
        self._forget_gathered()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the weights back, bit for bit, if the averages stand in the models; local."""
        weights = self._weights
        self._weights = None
        for name, values in (weights or {}).items():
            local(self._parameters[name]).copy_(values)
        if weights is not None:
            self._forget_gathered()

    def _forget_gathered(self) -> None:
        # FSDP keeps the root's weights gathered after a forward pass without a backward one.
        for model in self._models:
            reshard(model)

    @torch.no_grad()
    def _update(self, decay: float) -> None:
        for name, parameter in self._parameters.items():
            average = local(self._averages[name])
            values = local(parameter).to(average.dtype)
            average.copy_(values) if decay == 0.0 else average.lerp_(values, 1.0 - decay)
