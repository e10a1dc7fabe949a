"""Interface of the strategies: what a training script calls, whether its model is on one device or over many."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from xffl.checkpoint.format import Record, find_record
from xffl.checkpoint.load import load_with_record
from xffl.checkpoint.save import save_checkpoint
from xffl.checks import one_of
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.replicas.plain_values import from_plain
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError, StateError
from xffl.parallel.axes.context_parallel import split_sequence
from xffl.parallel.axes.pipeline import Loss
from xffl.parallel.config import PRECISIONS, StrategyConfig, read_config
from xffl.parallel.meta_weights import Initializer

__all__ = ["DistributedStrategy", "to_device"]

T = TypeVar("T")
Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


class DistributedStrategy(ABC):
    """How a model is trained inside a cell; the script is the same for all of them.

    .. code-block:: python

       with DistributedStrategy.from_config(config) as strategy:
           model = strategy.wrap_model(build_model(), loss=loss_of)
           optimizer = strategy.wrap_optimizer(model, torch.optim.AdamW(model.parameters()))
           for inputs, target in strategy.micro_batches(loader, model):
               strategy.forward_backward(model, inputs, target=target)
               if not strategy.is_accumulating_gradients:
                   strategy.clip_grad_norm(model, 1.0)
                   strategy.step(optimizer)

    Where there is no pipeline, a script may compute its loss itself, inside :meth:`train_context`, and call
    :meth:`backward`.

    All methods but the properties are called by every rank of a cell in the same order. Across cells nothing moves but
    in :meth:`setup`, :meth:`wrap_model`, checkpoints and :meth:`teardown`; rounds are those of
    :class:`xffl.FederatedScaling` with :attr:`state`.

    :param config: A :class:`xffl.parallel.StrategyConfig`, or anything that :func:`xffl.parallel.read_config` reads.
    """

    name: ClassVar[str]
    _preset: ClassVar[Callable[[], DeviceParameters]]
    """Makes the mesh where none is asked for."""

    def __init__(self, config: object = None) -> None:
        self.config: StrategyConfig = StrategyConfig() if config is None else read_config(config)
        asked = self.config.distributed
        mesh = type(self)._preset() if asked.device_parameters is None else asked.device_parameters
        if (precision := self.config.training.mixed_precision) is not None:
            dtype = PRECISIONS[precision]
            if asked.device_parameters is not None and mesh.param_dtype not in ("float32", dtype):
                raise ConfigError(
                    f"mixed_precision {precision!r} and param_dtype {mesh.param_dtype!r} differ; give one"
                )
            mesh = dataclasses.replace(mesh, param_dtype=dtype)
        self.device_parameters = mesh
        self.world = DistributedWorld(
            mesh, asked.federated, backend=asked.backend, link_backend=asked.link_backend, device=asked.device
        )
        self._accumulator = Accumulator(self._synchronize)
        self.loaded_record: Record | None = None
        """The record of the checkpoint that was loaded last; the folder may be another save's, or gone, since then"""
        self.has_taken_over = False
        """Whether the last batches ended because another replica group's state was taken over"""
        self.is_step_lost = False
        """Whether the last step was not taken, since another replica group was lost: its batches are to come again"""
        self._losses: WeakKeyDictionary[nn.Module, Loss | None] = WeakKeyDictionary()  # what wrap_model was given
        self._wrapped: WeakKeyDictionary[nn.Module, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()
        """What load_checkpoint may be called without: models that are still in use, and their optimizers."""

    @classmethod
    def from_config(cls, config: object) -> DistributedStrategy:
        """Make the strategy that a configuration names in ``distributed.strategy``, not yet set up; nothing moves."""
        from xffl.parallel import STRATEGIES

        parsed = read_config(config)
        one_of("strategy", parsed.distributed.strategy, STRATEGIES)
        return STRATEGIES[parsed.distributed.strategy](parsed)

    # Who is where -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> DistributedState:
        """The state that aggregators take."""
        return self.world.state

    @property
    def world_size(self) -> int:
        """Number of all processes, of all cells."""
        return self.world.world_size

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self.world.local_rank

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the world, and of the job where the job's cells are worlds of their own."""
        return self.world.is_global_zero

    @property
    def effective_batch_size(self) -> int:
        """Examples of one optimizer step: of all ranks of this cell with data of their own, and all micro-batches."""
        training = self.config.training
        return training.batch_size * training.gradient_accumulation * self.world.dp_size

    # Life -------------------------------------------------------------------------------------------------------------

    def use_world(self, world: DistributedWorld) -> None:
        """Let another world for the same device parameters, not set up either, take the place of this one; local."""
        if self.world.is_set_up or world.is_set_up:
            raise StateError("a world that is set up keeps its place; give another one before fit() or setup()")
        if world.device_parameters != self.device_parameters:
            raise ConfigError("the world is for other device parameters; make it of the trainer's own world")
        self.world = world

    def setup(self, state: DistributedState | None = None) -> None:
        """Join the other processes, or take a state that is set up; collective over the world, as its ``setup``."""
        self.world.setup(state)

    def teardown(self, *, synchronize: bool = True) -> None:
        """Leave the other processes; with ``synchronize``, not after an exception, the ranks wait for each other."""
        self.world.teardown(synchronize=synchronize)

    def __enter__(self) -> DistributedStrategy:
        if not self.world.is_set_up:
            self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.world.__exit__(kind, error, _)

    # Training ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def wrap_model(
        self, model: nn.Module, *, loss: Loss | None = None, init_weights: Initializer | None = None
    ) -> nn.Module:
        """Spread a model over the ranks of each cell, all from the same weights; collective over the world.

        :param model: The whole model, the same on all ranks; built on the meta device, it gets its weights part by
            part.
        :param loss: What :meth:`forward_backward` calls as ``loss(output, target)``: a mean over the elements.
        :param init_weights: For a model on the meta device: initializes the own tensors of the module that it is called
            with; by default ``reset_parameters`` of each.
        :return: The model to use.
        """

    def wrap_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to use: the same one, except with DeepSpeed.

        Collective over the world with DeepSpeed, where it makes the engine; else nothing moves.

        :param model: What :meth:`wrap_model` returned.
        :param optimizer: An optimizer of its parameters.
        :return: The optimizer that :meth:`step` and rounds take.
        """
        self._wrapped.setdefault(model, WeakSet()).add(optimizer)
        return optimizer

    def train_context(self) -> AbstractContextManager[None]:
        """Return the context of the forward pass and the loss; local."""
        return self.world.train_context()

    @property
    def is_accumulating_gradients(self) -> bool:
        """Whether more micro-batches follow before the optimizer steps."""
        return not self._accumulator.is_last

    def micro_batches(self, loader: Iterable[T], *models: nn.Module) -> Generator[T, None, None]:
        r"""Yield a loader's batches on this rank's device, and let gradients add up over each window of them.

        A window is ``training.gradient_accumulation`` batches, the last of a loader what is left of them. Gradients are
        synchronized in the backward pass of a window's last batch only, so all ranks of a cell need as many batches. A
        loop that is left in the middle of a window leaves gradients that no optimizer steps on: leave it at a window's
        end.

        In a :class:`xffl.distributed.FaultTolerantWorld` each window begins a step of all groups. Where this one takes
        the state of another group over, the batches end and :attr:`has_taken_over` is True: begin anew, where the
        loader stands now.

        :param loader: Batches.
        :param \*models: What :meth:`wrap_model` returned, of all models that train on them.
        :yield: The batches.
        """
        batches = iter(loader)
        try:
            while True:
                self.has_taken_over = self.world.begin_step()
                if self.has_taken_over:
                    return
                window = list(itertools.islice(batches, self.config.training.gradient_accumulation))
                if not window:
                    return
                for index, batch in enumerate(window):
                    self._accumulator.enter(index, len(window), models)
                    yield self.to_device(batch)
        finally:
            self._accumulator.enter(0, 1, models)  # what follows the batches is a window of its own

    @contextmanager
    def no_gradient_sync(self, *models: nn.Module) -> Iterator[None]:
        r"""Let backward passes of what is called in the block add gradients up without any communication; local.

        :param \*models: What :meth:`wrap_model` returned.
        :yield: Nothing.
        """
        self._accumulator.set_last(False, models)
        try:
            yield
        finally:
            self._accumulator.set_last(True, models)

    @abstractmethod
    def _synchronize(self, model: nn.Module, is_last: bool) -> None:
        """Let the next backward pass of a model synchronize gradients, or only add them up; local."""

    def split_sequence(self, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
        r"""Return this rank's parts of whole sequences, where ranks share them (``cp``); nothing moves.

        :param \*tensors: Tokens, targets, positions: tensors of whole sequences, equal on the ranks that share them.
        :param dim: The dimension that is the sequence.
        :return: The parts, in the same order; without context parallelism what was given.
        """
        return split_sequence(tensors, self.world.get_mesh("cp"), dim) if self.world.cp_enabled else tensors

    def forward_backward(
        self, model: nn.Module, *inputs: torch.Tensor, target: torch.Tensor, share: float | None = None, **named: Any
    ) -> torch.Tensor:
        r"""Run a micro-batch forward and backward, with the loss that :meth:`wrap_model` was given.

        Collective over the cell where gradients are synchronized, with a pipeline always.

        :param model: What :meth:`wrap_model` returned.
        :param \*inputs: What the model is called with; with context parallelism this rank's parts.
        :param target: What its output is compared with.
        :param share: As in :meth:`backward`.
        :param \**named: Keyword arguments of the model.
        :return: The micro-batch's mean loss on this rank, without gradient.
        :raises StateError: if no loss was given.
        """
        with self.train_context():
            output = model(*inputs, **named)
            if (loss_of := self._losses.get(model)) is None:
                raise StateError("forward_backward needs a loss; give wrap_model(model, loss=...)")
            loss = loss_of(output, target)
            self.backward(loss, share=share)
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def backward(self, loss: torch.Tensor, *, share: float | None = None) -> None:
        """Compute gradients; collective over the cell where they are synchronized.

        :param loss: This micro-batch's mean loss on this rank.
        :param share: What the micro-batch counts for in its window; by default all count alike.
        """
        factor = self._accumulator.factor(share)
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm; collective over the cell.

        :param model: What :meth:`wrap_model` returned.
        :param max_norm: The largest norm that stays.
        :return: The norm before, the same on all ranks of the cell.
        """

    def step(self, *optimizers: torch.optim.Optimizer) -> bool:
        r"""Step the optimizers and zero their gradients; the ranks of a cell do so together.

        :param \*optimizers: All optimizers of the window's gradients.
        :return: Whether they stepped; False where gradients in float16 have overflowed, or another replica group was
            lost on the way.
        :raises StateError: in the middle of a window, where gradients are not synchronized yet.
        """
        self._accumulator.check_complete()
        are_finite = self._are_finite(optimizers)
        self.is_step_lost = not self.world.commit_step()
        is_taken = are_finite and not self.is_step_lost
        for optimizer in optimizers:
            if is_taken:
                optimizer.step()
            optimizer.zero_grad()
        return is_taken

    def _are_finite(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Tell whether the optimizers may step on their gradients; collective over the cell with float16."""
        del optimizers
        return True

    def to_device(self, batch: T) -> T:
        """Return a batch with its tensors on this rank's device, an object of the same kind; local."""
        return to_device(batch, self.device)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        model: Models,
        optimizer: Optimizers = None,
        *,
        others: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        after_round: bool = False,
        saver: Callable[..., T] | None = None,
        **values: Any,
    ) -> T | None:
        r"""Write a checkpoint, each rank its part; collective over the world.

        :param path: Folder of the checkpoint, on a file system that all ranks see.
        :param model: What :meth:`wrap_model` returned, or several by name.
        :param optimizer: Its optimizer, or several by name.
        :param others: Other parts by name, the same on all ranks of a cell: schedulers, samplers.
        :param own: What each rank keeps for itself, by name: random numbers, the state of rounds.
        :param after_round: Whether all cells hold the weights of a round, without a step since.
        :param saver: What writes, such as ``AsyncSaver.save``; by default :func:`xffl.checkpoint.save_checkpoint`.
        :param \**values: Plain numbers, texts, lists and mappings to keep beside.
        :return: What the saver has returned.
        :raises CheckpointError: if it could not be written; on all ranks.
        """
        parts = self._all_parts(model, optimizer, others)
        if saver is not None:
            return saver(path, parts, values=values, own=own, after_round=after_round)
        save_checkpoint(path, parts, self.state, values=values, own=own, after_round=after_round)
        return None

    def load_checkpoint(
        self,
        path: str | Path,
        model: Models | None = None,
        optimizer: Optimizers = None,
        *,
        others: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        reset: Collection[str] = (),
        local: Collection[str] = (),
    ) -> dict[str, Any]:
        """Read a checkpoint into a model and an optimizer, however they are spread now; collective over the world.

        :param path: Folder of the checkpoint.
        :param model: What :meth:`wrap_model` returned, or several by name. ``None`` for the only model that it was
            called with, together with its optimizer: what :meth:`wrap_optimizer` returned for it, or else, where the
            checkpoint has an optimizer's state, the only optimizer of torch that holds parameters of it.
        :param optimizer: Its optimizer, or several by name.
        :param others: As in :meth:`save_checkpoint`.
        :param own: As in :meth:`save_checkpoint`.
        :param reset: Names among ``own`` that stay as they are: in another layout, where they cannot be loaded; ``*``
            for all.
        :param local: Names of trained tensors (``model/head.weight``) that rounds leave to each cell: they may differ
            between cells where another number of cells loads them.
        :return: The values that were kept beside.
        :raises StateError: if no model is given and none was wrapped; on all ranks.
        :raises ConfigError: if no model is given and several were wrapped; on all ranks.
        :raises CheckpointError: if it cannot be read or does not fit; on all ranks.
        """
        if model is None:
            model, optimizer = self._only_model(optimizer, Path(path))
        parts = self._all_parts(model, optimizer, others)
        record = load_with_record(path, parts, self.state, own=own, reset=reset, local=local)
        self.loaded_record = record
        return {name: from_plain(value, {}) for name, value in record.values.items()}

    def register(self, model: Models, optimizer: Optimizers = None, *, others: Mapping[str, Any] | None = None) -> None:
        """Let replica groups that come back take these parts over; local, with arguments as :meth:`save_checkpoint`."""
        for name, part in self._all_parts(model, optimizer, others).items():
            self.world.register(name, part)

    def _only_model(self, optimizer: Optimizers, path: Path) -> tuple[nn.Module, Optimizers]:
        """Return the only model that was wrapped, and its optimizer where none is given; collective over the world."""
        with run_on_all_ranks("models to load a checkpoint into") as share:
            gc.collect()  # a model that was dropped stays in the dictionary until its reference cycles are collected
            wrapped = list(self._wrapped.items())
            if not wrapped:
                raise StateError("no model to load into; call wrap_model first, or give load_checkpoint a model")
            if len(wrapped) > 1 or (optimizer is None and len(wrapped[0][1]) > 1):
                what = "models" if len(wrapped) > 1 else "optimizers"
                raise ConfigError(
                    f"the strategy has wrapped several {what}; give load_checkpoint(path, model, optimizer), or "
                    "mappings of them by the names that were saved"
                )
            model, known = wrapped[0]
            optimizers = [*known]
            if optimizer is None and not optimizers:
                record = find_record(path)  # a checkpoint that cannot be read is refused when it is loaded
                has_one = record is not None and "optimizer" in record.parts
                optimizers = find_optimizers(model) if has_one else []
            if optimizer is None and len(optimizers) > 1:
                kinds = ", ".join(sorted(type(one).__name__ for one in optimizers))
                raise ConfigError(
                    f"several optimizers hold parameters of the model ({kinds}); give load_checkpoint(path, model, "
                    "optimizer)"
                )
            share([len(wrapped), len(optimizers)])
        return model, next(iter(optimizers), None) if optimizer is None else optimizer

    def _all_parts(self, model: Models, optimizer: Optimizers, others: Mapping[str, Any] | None) -> dict[str, Any]:
        models = {"model": model} if isinstance(model, nn.Module) else dict(model)
        optimizers = {"optimizer": optimizer} if isinstance(optimizer, torch.optim.Optimizer) else dict(optimizer or {})
        parts = self._parts(models, optimizers)
        if twice := sorted(parts.keys() & (others or {}).keys()):
            raise ConfigError(f"the checkpoint has two parts called {twice[0]!r}; give one another name")
        return {**parts, **(others or {})}

    def _parts(self, models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
        """Return what a checkpoint keeps of models and optimizers."""
        return {**models, **optimizers}


class Accumulator:
    """The window of micro-batches whose gradients add up; the last one's backward pass synchronizes them."""

    def __init__(self, synchronize: Callable[[nn.Module, bool], None]) -> None:
        self.size = 1
        self.is_last = True
        self._synchronize = synchronize

    def enter(self, index: int, size: int, models: Iterable[nn.Module]) -> None:
        """Go on to a micro-batch of a window."""
        self.size = size
        if self.is_last != (index + 1 == size):
            self.set_last(not self.is_last, models)

    def set_last(self, is_last: bool, models: Iterable[nn.Module]) -> None:
        """Say whether the next backward pass of the models synchronizes gradients."""
        self.is_last = is_last  # also where there is no model
        for model in models:
            self._synchronize(model, is_last)

    def factor(self, share: float | None) -> float:
        """Return what a micro-batch's loss counts for in its window."""
        return 1.0 / self.size if share is None else share

    def check_complete(self) -> None:
        """Raise in the middle of a window."""
        if not self.is_last:
            raise StateError(
                "step was called in the middle of a window, whose gradients are not synchronized; call it where "
                "is_accumulating_gradients is False, and close() a generator of micro_batches that is left early"
            )


def find_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that hold parameters of a model, looked for among all objects; local."""
    held = set(map(id, model.parameters()))
    # By the type: isinstance() would ask objects that stand for others, which may load what they stand for.
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    return [
        one
        for one in found
        if any(id(parameter) in held for group in getattr(one, "param_groups", ()) for parameter in group["params"])
    ]


def to_device(batch: T, device: torch.device) -> T:
    """Return a batch with its tensors on a device; local.

    Mappings, lists, tuples, named tuples, packed sequences and dataclasses are made anew with what they hold moved,
    however deep; where nothing has to move, and whatever else there is, comes back as it is.
    """
    # Copies from a GPU are not asynchronous: the CPU would read them before they are there.
    is_async = device.type == "cuda"
    moved: Any = batch
    if isinstance(batch, (torch.Tensor, PackedSequence)):  # the latter is a named tuple whose sizes stay on the CPU
        moved = batch.to(device=device, non_blocking=is_async)  # type: ignore[call-arg]
    elif isinstance(batch, (list, tuple)):
        items = [to_device(item, device) for item in batch]
        if any(new is not old for new, old in zip(items, batch, strict=True)):
            moved = type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    elif isinstance(batch, Mapping) or (dataclasses.is_dataclass(batch) and not isinstance(batch, type)):
        is_mapping = isinstance(batch, Mapping)
        fields = dict(batch) if is_mapping else {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}  # type: ignore[arg-type]
        values = {key: to_device(value, device) for key, value in fields.items()}
        changed = {key: value for key, value in values.items() if value is not fields[key]}
        if changed and isinstance(batch, dict):
            moved = copy.copy(batch)  # keeps the class, and what a subclass holds beside its items
            moved.update(changed)
        elif changed and is_mapping:
            moved = type(batch)(values)  # type: ignore[call-arg]
        elif changed:
            moved = copy.copy(batch)
            for name, value in changed.items():
                object.__setattr__(moved, name, value)  # a frozen dataclass, too
    result: T = moved
    return result
