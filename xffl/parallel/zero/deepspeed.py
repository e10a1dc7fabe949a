"""ZeRO inside a cell, by DeepSpeed (extra ``deepspeed``). The package is imported where a model is cut."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from xffl.compat.deepspeed import variables_for_import, without_shared_memory
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.parameters import AXES, DeviceParameters
from xffl.distributed.values.gradients import mark_reduced
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError, StateError
from xffl.extras import optional_import
from xffl.parallel.axes.pipeline import Loss
from xffl.parallel.meta_weights import Initializer
from xffl.parallel.spread import SpreadOptions, check_model, is_meta, named_tensors, send_weights
from xffl.parallel.strategy import DistributedStrategy
from xffl.parallel.zero.mark import NO_ENGINE, UNREADY, find_masters, is_cut, mark
from xffl.parallel.zero.view import Masters

__all__ = ["DeepSpeedStrategy", "EngineOptimizer", "ZeroModel"]

NEED = ("deepspeed", "strategy 'deepspeed' needs DeepSpeed")  # the extra, and the message where it is missing
# Device parameters that are for other strategies.
FOREIGN = ("cpu_offload", "compile", "fsdp_forward_prefetch", "activation_checkpointing", "reduce_dtype")


class DeepSpeedStrategy(DistributedStrategy):
    """One copy of the optimizer's state, the gradients and the weights in a cell, cut over its ranks by ZeRO.

    ``distributed.zero_stage`` says what is cut: 1 the optimizer's state, 2 the gradients, too, 3 the weights, too; 0
    nothing, which is slower than ``ddp``. The optimizer has to be wrapped, which makes the engine:

    .. code-block:: python

       model = strategy.wrap_model(build_model(), loss=loss_of)
       optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters()))

    Gradients are computed by :meth:`backward` or :meth:`forward_backward`, not by ``loss.backward()``, where DeepSpeed
    would take all cells for one. Rounds average the master weights in fp32 that the optimizer keeps, whatever the
    weights' data type; aggregators take what :meth:`wrap_model` returned. Clients that change gradients (``fedprox``,
    ``scaffold``) cannot.

    With ``mixed_precision`` the weights themselves are bf16 or fp16. A step that is skipped where float16 has
    overflowed counts as a local step in :class:`xffl.FederatedScaling`.

    Source: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054).

    :param config: As for :class:`DistributedStrategy`.
    """

    name = "deepspeed"

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        with optional_import(*NEED):
            if importlib.util.find_spec("deepspeed") is None:  # to import it takes seconds
                raise ModuleNotFoundError("No module named 'deepspeed'")
        self._stage = self.config.distributed.zero_stage
        self._check_options()
        self._model: ZeroModel | None = None

    _preset = DeviceParameters.FSDP

    def _check_options(self) -> None:
        parameters, default = self.device_parameters, DeviceParameters()
        for axis in AXES:
            if axis != "dp_shard" and getattr(parameters, axis) != 1:
                raise ConfigError(
                    f"strategy 'deepspeed' cuts over all ranks of a cell, but {axis} is {getattr(parameters, axis)}; "
                    "leave it at 1 and dp_shard 'auto', or give strategy='fsdp'"
                )
        foreign = [name for name in FOREIGN if getattr(parameters, name) != getattr(default, name)]
        foreign += [name for name in ("wrap", "keep_whole") if getattr(self.config.distributed, name)]
        if foreign:
            name = foreign[0]
            raise ConfigError(f"strategy 'deepspeed' does not know {name}; leave it out, or give strategy='fsdp'")
        dtype = parameters.param_dtype
        if self._stage == 0 and dtype != "float32":
            raise ConfigError(f"zero_stage 0 with {dtype!r} keeps no master weights here; give 1, 2 or 3")
        if self._stage == 0 and self.config.distributed.offload:
            raise ConfigError("offload is for what ZeRO cuts, but zero_stage is 0; give 1, 2 or 3, or leave it out")

    def use_world(self, world: DistributedWorld) -> None:
        """Refuse another world: DeepSpeed averages gradients itself, and knows of no other replica groups."""
        raise ConfigError(f"strategy 'deepspeed' takes no {type(world).__name__}; give strategy='fsdp'")

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration; changes of it hold for engines that are made later."""
        return self._build_ds_config()

    @property
    def model_engine(self) -> Any:
        """DeepSpeed's engine of the model that was wrapped last."""
        if self._model is None:
            raise StateError("there is no model yet; call wrap_model and wrap_optimizer first")
        return self._model.engine

    def _build_ds_config(self) -> dict[str, Any]:
        """Write DeepSpeed's configuration; it finds out the number of ranks itself."""
        training, dtype = self.config.training, self.device_parameters.param_dtype
        scaling = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
        zero: dict[str, Any] = {"stage": self._stage, "overlap_comm": False, "round_robin_gradients": False}
        if self.config.distributed.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": training.batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation,
            "gradient_clipping": training.max_grad_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {"enabled": dtype == "float16", **scaling},
            "bf16": {"enabled": dtype == "bfloat16"},
            "steps_per_print": 2**62,
        }

    # Training ---------------------------------------------------------------------------------------------------------

    def wrap_model(
        self, model: nn.Module, *, loss: Loss | None = None, init_weights: Initializer | None = None
    ) -> nn.Module:
        """Give all ranks rank 0's weights, to be cut by :meth:`wrap_optimizer`; collective over the world."""
        with run_on_all_ranks("models given to wrap_model") as share:
            if not isinstance(model, nn.Module):
                raise ConfigError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
            if is_meta(model) or init_weights is not None:
                raise ConfigError(
                    "strategy 'deepspeed' makes no weights; give no meta device and no init_weights, or 'fsdp'"
                )
            if is_cut(model):
                raise ConfigError("DeepSpeed has cut this model already; wrap a model once")
            check_model(model, [], SpreadOptions(), is_meta=False)
            share("\n".join(f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in named_tensors(model)))
        model.to(self.device)
        send_weights(model, self.state)
        mark(model, UNREADY)
        self._model = ZeroModel(model)
        self._losses[self._model] = loss
        self._wrapped.setdefault(self._model, WeakSet())
        return self._model

    def wrap_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the engine: it takes over the optimizer and cuts what the stage says; collective over the world."""
        with run_on_all_ranks("optimizers given to wrap_optimizer") as share:
            zero_model = _zero_model(model)
            if zero_model.engines:
                raise ConfigError("this model has an engine already; wrap another model, or one optimizer")
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
            if optimizer.state:
                raise ConfigError("the optimizer has stepped already; wrap it first, and load its state afterwards")
            names = {parameter: name for name, parameter in zero_model.module.named_parameters()}
            stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if stepped - names.keys():
                raise ConfigError("the optimizer holds a parameter that the model has not; give it model.parameters()")
            if missing := [name for p, name in names.items() if p.requires_grad and p not in stepped]:
                raise ConfigError(f"the optimizer lacks parameter {missing[0]!r}; give it all that train, or freeze it")
            share(f"{type(optimizer).__name__} {self.ds_config}")
        engine = zero_model.make_engine(optimizer, self.ds_config, self.world)
        masters = None if self._stage == 0 else Masters(engine, zero_model.module, self.world.get_mesh("dp_shard"))
        mark(zero_model.module, masters)
        mark_reduced(zero_model.module, self.world.get_group("cell"), by="DeepSpeed")
        return super().wrap_optimizer(zero_model, EngineOptimizer.around(zero_model, optimizer))

    def train_context(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the weights have the data type that is asked for."""
        return nullcontext()

    def _synchronize(self, model: nn.Module, is_last: bool) -> None:
        _zero_model(model).engine.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss: torch.Tensor, *, share: float | None = None) -> None:
        """Compute gradients, in float16 of a scaled loss; collective over the cell."""
        engine = self.model_engine
        assert self._model is not None, "it has an engine"
        with self._model.working():
            engine.backward(loss * self._accumulator.factor(share), scale_wrt_gas=False)

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Let the next step scale the gradients down to a norm; collective over the cell."""
        if math.isnan(max_norm) or max_norm <= 0:  # infinite: for the norm alone
            raise ConfigError(f"max_norm {max_norm} is not positive; give a number above 0")
        engine = _zero_model(model).engine
        zero = engine.optimizer
        if self._stage == 0:
            return nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)
        zero.clip_grad = min(max_norm, self.config.training.max_grad_norm or max_norm)
        if self._stage < 3:
            norm = torch.as_tensor(zero.scaled_global_norm(), dtype=torch.float32, device=self.device)
            norm = norm.where(norm >= 0, torch.inf)  # DeepSpeed returns -1 where it is not finite
        else:
            squares = torch.zeros((), dtype=torch.float32, device=self.device)
            for group in zero.get_fp32_grad_partitions().values():
                for part in group.values():
                    squares += part.to(self.device).square().sum()
            norm = self.world.all_reduce(squares, "sum", "cell").sqrt()
            norm = norm.where(norm.isfinite(), torch.inf)
        return norm / float(zero.loss_scale)

    def step(self, *optimizers: torch.optim.Optimizer) -> bool:
        """Step the engine; collective over the cell."""
        self._accumulator.check_complete()
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        if not isinstance(optimizer, EngineOptimizer):
            raise StateError("ZeRO steps only what wrap_optimizer(model, optimizer) returned; give that to step")
        optimizer.step()
        if self._stage:  # clip_grad_norm asks for one step
            optimizer.engine.optimizer.clip_grad = self.config.training.max_grad_norm or 0.0
        return bool(optimizer.engine.was_step_applied())

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, model: Any, optimizer: Any = None, **options: Any) -> Any:
        """Write a checkpoint, each rank its part; collective over the world. Other strategies cannot read it.

        With stages 1 to 3 it holds the master weights in fp32 by parameter, for any number of ranks and any of these
        stages.
        """
        _read_masters(_only("model", model))
        return super().save_checkpoint(path, model, optimizer, **options)

    def load_checkpoint(
        self, path: str | Path, model: Any = None, optimizer: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Read a checkpoint; collective over the world."""
        if model is None:
            model, optimizer = self._only_model(optimizer, Path(path))
        only_model, only_optimizer = _only("model", model), _only("optimizer", optimizer)
        masters = _read_masters(only_model)
        if masters is not None and only_optimizer is not None:
            masters.fill_state()
        values = super().load_checkpoint(path, model, optimizer, **options)
        if masters is not None:
            masters.write()
        if isinstance(only_optimizer, EngineOptimizer):
            only_optimizer.look_up()
        # Changes nothing, but an inconsistent model learns that it is whole again.
        only_model.load_state_dict(only_model.state_dict())
        return values

    def _parts(self, models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
        model, optimizer = _only("model", models), _only("optimizer", optimizers)
        if optimizer is not None and not isinstance(optimizer, EngineOptimizer):
            raise StateError("a checkpoint takes the optimizer that wrap_optimizer(model, optimizer) returned")
        masters = find_masters(model)
        if masters is None:
            engine = _zero_model(model).engine
            return super()._parts(dict.fromkeys(models, engine.module), dict.fromkeys(optimizers, engine.optimizer))
        return {**dict.fromkeys(models, masters.view), **dict.fromkeys(optimizers, masters)}


def _only(what: str, value: Any) -> Any:
    """Return the only model or optimizer, which may come by name; ``None`` where there is none."""
    if not isinstance(value, Mapping):
        return value
    if len(value) > 1:
        raise ConfigError(f"DeepSpeed trains one model, and {sorted(value)} are several of {what}; give one")
    return next(iter(value.values()), None)


def _zero_model(model: nn.Module) -> ZeroModel:
    if not isinstance(model, ZeroModel):
        raise ConfigError(f"model is a {type(model).__name__}; give what wrap_model returned")
    return model


def _read_masters(model: nn.Module) -> Masters | None:
    """Return the masters of a model, which must have an engine, their view filled; ``None`` with stage 0."""
    masters = find_masters(_zero_model(model))
    if masters is not None:
        masters.read()
    return masters


class _CellBackend:
    """DeepSpeed's communication with the cell in the place of the world.

    Stage 3 compares over the world in which order modules run, whenever that changes; cells do so at different times.
    """

    def __init__(self, inner: Any, cell: dist.ProcessGroup) -> None:
        self.inner = inner
        self._cell = cell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        return dist.get_rank(group or self._cell)

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        return (group or self._cell).size()

    def barrier(self, group: dist.ProcessGroup | None = None, async_op: bool = False, **named: Any) -> Any:
        return self.inner.barrier(group or self._cell, async_op, **named)

    def broadcast(self, tensor: Any, src: int, group: Any = None, async_op: bool = False) -> Any:
        source = dist.get_global_rank(self._cell, src) if group is None else src
        return self.inner.broadcast(tensor, source, group or self._cell, async_op)

    def all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return self.inner.all_reduce(tensor, op, group or self._cell, async_op)


class ZeroModel(nn.Module):
    """The model that a script calls: the whole model, and from :meth:`make_engine` on the engine in front of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.engines: list[Any] = []  # a list, since the engine is a module, whose parameters are these already
        self._backend: _CellBackend | None = None
        self._local_rank = "0"

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""
        if not self.engines:
            raise StateError(NO_ENGINE)
        return self.engines[0]

    def make_engine(self, optimizer: torch.optim.Optimizer, config: dict[str, Any], world: DistributedWorld) -> Any:
        """Let DeepSpeed make the engine; collective over the cell."""
        device, cell, alone = world.device, world.get_group("cell"), world.get_group("tp")
        unit = SimpleNamespace(  # the ranks that share the data-parallel work, as DeepSpeed's mpu tells them
            get_data_parallel_group=lambda: cell,
            get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(cell),
            get_data_parallel_rank=lambda: dist.get_rank(cell),
            get_data_parallel_world_size=lambda: cell.size(),
            get_model_parallel_group=lambda: alone,
            get_model_parallel_rank=lambda: 0,
            get_model_parallel_world_size=lambda: 1,
        )
        self._local_rank = str(world.local_rank if device.index is None else device.index)
        with variables_for_import(self._local_rank, device.type):
            deepspeed = _import(device, is_fp16=config["fp16"]["enabled"])
            is_cpu = device.type == "cpu"
            with without_shared_memory(deepspeed.ops.__compatible_ops__) if is_cpu else nullcontext():
                comm: Any = importlib.import_module("deepspeed.comm.comm")
                if comm.cdb is None:
                    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
                self._backend = _CellBackend(getattr(comm.cdb, "inner", comm.cdb), cell)
                with self.working():
                    engine, *_ = deepspeed.initialize(
                        model=self.module, optimizer=optimizer, config=config, mpu=unit, dist_init_required=False
                    )
        engine.set_gradient_accumulation_boundary(True)
        self.engines.append(engine)
        return engine

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let DeepSpeed work in this block, with the cell as its world; local."""
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        # In every forward pass, so only what DeepSpeed reads: variables_for_import copies all variables.
        backend, variable = comm.cdb, os.environ.get("LOCAL_RANK")
        comm.cdb = self._backend
        os.environ["LOCAL_RANK"] = self._local_rank
        try:
            yield
        finally:
            comm.cdb = backend
            if variable is None:
                del os.environ["LOCAL_RANK"]
            else:
                os.environ["LOCAL_RANK"] = variable

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the engine."""
        engine = self.engine
        with self.working():
            return engine(*inputs, **named)


class SteppedModel(Protocol):
    """A model as :class:`EngineOptimizer` steps it."""

    @property
    def engine(self) -> Any:
        """What has the step: DeepSpeed's engine."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context in which DeepSpeed may work."""


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is the engine's: with the gradients of all ranks, clipping and loss scale.

    Options and state are those of the optimizer inside, whose parameters are rows of many parameters.
    """

    _model: SteppedModel
    _inner: torch.optim.Optimizer

    @classmethod
    def around(cls, model: SteppedModel, inner: torch.optim.Optimizer) -> EngineOptimizer:
        """Make an optimizer of the class and with the options of the inner one that steps the model's engine."""
        kind = type(inner)
        subclass: Any = type(f"Engine{kind.__name__}", (cls, kind), {})
        optimizer: EngineOptimizer = subclass.__new__(subclass)
        torch.optim.Optimizer.__init__(optimizer, [torch.zeros(1, dtype=torch.float32)], dict(inner.defaults))
        optimizer._model = model
        optimizer._inner = inner
        optimizer.look_up()
        return optimizer

    def look_up(self) -> None:
        """Take options and state of the inner optimizer, which a checkpoint may have replaced; local."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""
        return self._model.engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let the engine step; collective over the cell."""
        if closure is not None:
            raise ConfigError("DeepSpeed takes no closure; call strategy.backward first, and step()")
        with self._model.working():
            self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine has done so in its step."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse: each rank holds rows that only belong together."""
        raise StateError("ZeRO has cut the optimizer's state; keep it with strategy.save_checkpoint")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse, as :meth:`state_dict`."""
        raise StateError("ZeRO has cut the optimizer's state; load it with strategy.load_checkpoint")


def _import(device: torch.device, *, is_fp16: bool) -> Any:
    with optional_import(*NEED):
        deepspeed = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    name = str(accelerator.device_name())
    if name != device.type:
        raise ConfigError(
            f"DeepSpeed was imported for {name!r} devices, but this process computes on {device.type!r}; set "
            f"DS_ACCELERATOR={device.type}, or leave the import to the strategy"
        )
    if is_fp16 and not accelerator.is_fp16_supported():
        raise ConfigError(f"DeepSpeed does not compute in float16 on this {device.type}; give mixed_precision='bf16'")
    return deepspeed
