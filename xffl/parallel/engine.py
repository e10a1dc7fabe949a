"""DeepSpeed's engine for the ranks of one cell: what DeepSpeed takes for the world is the cell."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xffl.errors import ConfigError, StateError
from xffl.extras import optional_import
from xffl.parallel.zero import NO_ENGINE

__all__ = ["NEED", "CellUnit", "EngineOptimizer", "ZeroModel", "engine_optimizer"]

NEED = ("deepspeed", "strategy 'deepspeed' needs DeepSpeed")
"""The extra, and what is said where the package is missing."""


class CellUnit:
    """Tell DeepSpeed which ranks share the data-parallel work: those of a cell (what it calls an ``mpu``).

    :param cell: The ranks of the cell.
    :param alone: A group of this rank alone, which is all of a model-parallel group.
    """

    def __init__(self, cell: dist.ProcessGroup, alone: dist.ProcessGroup) -> None:
        self.cell, self._alone = cell, alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks of the cell."""
        return self.cell

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return their ranks in the world."""
        return dist.get_process_group_ranks(self.cell)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place in the cell."""
        return dist.get_rank(self.cell)

    def get_data_parallel_world_size(self) -> int:
        """Return the cell's size."""
        return self.cell.size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return this rank alone."""
        return self._alone

    def get_model_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Return 1."""
        return 1


class _CellBackend:
    """DeepSpeed's communication with the cell in the place of the world.

    Stage 3 compares over the world in which order modules run, in the first step and whenever that order changes. Cells
    do so at different times.

    :param inner: DeepSpeed's own backend.
    :param cell: The ranks of the cell.
    """

    def __init__(self, inner: Any, cell: dist.ProcessGroup) -> None:
        self.inner, self._cell = inner, cell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get_rank(self, group: dist.ProcessGroup | None = None) -> int:
        return dist.get_rank(group or self._cell)

    def get_world_size(self, group: dist.ProcessGroup | None = None) -> int:
        return (group or self._cell).size()

    def barrier(self, group: dist.ProcessGroup | None = None, async_op: bool = False, **named: Any) -> Any:
        return self.inner.barrier(group or self._cell, async_op, **named)

    def broadcast(
        self, tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> Any:
        place = dist.get_global_rank(self._cell, src) if group is None else src
        return self.inner.broadcast(tensor, place, group or self._cell, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        return self.inner.all_reduce(tensor, op, group or self._cell, async_op)


class ZeroModel(nn.Module):
    """The model that a script calls: the whole model, and from :meth:`make_engine` on the engine in front of it.

    :param module: The whole model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._engine: list[Any] = []  # a list, since the engine is a module, whose parameters are these already
        self._backend: _CellBackend | None = None
        self._local_rank = "0"

    @property
    def has_engine(self) -> bool:
        """Whether the engine is made."""
        return bool(self._engine)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine.

        :raises StateError: before there is one.
        """
        if not self._engine:
            raise StateError(NO_ENGINE)
        return self._engine[0]

    def make_engine(
        self,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        unit: CellUnit,
        device: torch.device,
        local_rank: int,
    ) -> Any:
        """Let DeepSpeed make the engine; collective over the cell.

        :param optimizer: An optimizer of the model's parameters, which the engine takes over.
        :param config: DeepSpeed's configuration.
        :param unit: Whom the ranks work with.
        :param device: What this process computes on.
        :param local_rank: Its rank on its node.
        :return: The engine.
        """
        # DeepSpeed takes it for the number of its device.
        self._local_rank = str(local_rank if device.index is None else device.index)
        with _environment(LOCAL_RANK=self._local_rank, DS_ACCELERATOR=device.type):
            deepspeed = _import(device, is_fp16=config["fp16"]["enabled"])
            with _without_compiler(deepspeed, device):
                comm: Any = importlib.import_module("deepspeed.comm.comm")
                if comm.cdb is None:
                    deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
                self._backend = _CellBackend(getattr(comm.cdb, "inner", comm.cdb), unit.cell)
                with self.working():
                    engine, *_ = deepspeed.initialize(
                        model=self.module, optimizer=optimizer, config=config, mpu=unit, dist_init_required=False
                    )
        engine.set_gradient_accumulation_boundary(True)
        self._engine.append(engine)
        return engine

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let DeepSpeed work in this block, with the cell as its world; local.

        :yield: Nothing.
        """
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        kept, variable = comm.cdb, os.environ.get("LOCAL_RANK")
        comm.cdb, os.environ["LOCAL_RANK"] = self._backend, self._local_rank
        try:
            yield
        finally:
            comm.cdb = kept
            if variable is None:
                del os.environ["LOCAL_RANK"]
            else:
                os.environ["LOCAL_RANK"] = variable

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the engine."""
        engine = self.engine
        with self.working():
            return engine(*inputs, **named)


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is the engine's: with the gradients of all ranks, clipping and loss scale.

    Options and state are those of the optimizer inside, whose parameters are rows of many parameters.
    """

    _model: ZeroModel
    _inner: torch.optim.Optimizer

    def look_up(self) -> None:
        """Take options and state of the inner optimizer, which a checkpoint may have replaced; local."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""
        return self._model.engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let the engine step; collective over the cell.

        :param closure: Nothing; DeepSpeed takes none.
        :raises ConfigError: if there is a closure.
        """
        if closure is not None:
            raise ConfigError("DeepSpeed takes no closure; call strategy.backward first, and step()")
        with self._model.working():
            self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine has done so in its step.

        :param set_to_none: Not used.
        """

    def state_dict(self) -> dict[str, Any]:
        """Refuse: each rank holds rows that only belong together.

        :return: Nothing.
        :raises StateError: always.
        """
        raise StateError("ZeRO has cut the optimizer's state; keep it with strategy.save_checkpoint")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse, as :meth:`state_dict`.

        :param state_dict: Not used.
        :raises StateError: always.
        """
        raise StateError("ZeRO has cut the optimizer's state; load it with strategy.load_checkpoint")


def engine_optimizer(model: ZeroModel, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer of the same class as the inner one, with the same options, that steps the engine.

    :param model: The model with its engine.
    :param inner: The optimizer that the engine has taken over.
    :return: The optimizer that scripts, schedulers and rounds use.
    """
    kind = type(inner)
    made: Any = type(f"Engine{kind.__name__}", (EngineOptimizer, kind), {})
    optimizer: EngineOptimizer = made.__new__(made)
    torch.optim.Optimizer.__init__(optimizer, [torch.zeros(1)], dict(inner.defaults))
    optimizer._model, optimizer._inner = model, inner
    optimizer.look_up()
    return optimizer


def _import(device: torch.device, *, is_fp16: bool) -> Any:
    """Import DeepSpeed for the device of this process."""
    with optional_import(*NEED):
        deepspeed = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    found = str(accelerator.device_name())
    if found != device.type:
        raise ConfigError(
            f"DeepSpeed was imported for {found!r} devices, but this process computes on {device.type!r}; set "
            f"DS_ACCELERATOR={device.type}, or leave the import to the strategy"
        )
    if is_fp16 and not accelerator.is_fp16_supported():
        raise ConfigError(f"DeepSpeed does not compute in float16 on this {device.type}; give mixed_precision='bf16'")
    return deepspeed


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables, and leave the environment as it was: DeepSpeed reads and sets some on the way."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _without_compiler(deepspeed: Any, device: torch.device) -> Iterator[None]:
    """On a CPU, keep DeepSpeed from compiling an operation of shared memory, which takes a minute."""
    if device.type != "cpu":
        yield
        return
    operations = deepspeed.ops.__compatible_ops__
    kept = dict(operations)
    operations["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        operations.update(kept)
