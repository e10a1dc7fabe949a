"""Base of a trainer's mixins: the hooks through which they work together, and the attributes that hooks have set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from xffl.aggregation import FederatedScaling, RoundReport
    from xffl.checkpoint.contents import Part
    from xffl.distributed.distributed_state import DistributedState
    from xffl.distributed.world import DistributedWorld
    from xffl.parallel.strategy import DistributedStrategy
    from xffl.training.callbacks.base import CallbackCollection
    from xffl.training.run_directory import RunDirectory

__all__ = ["StatePart", "TrainerMixin", "names_set_by"]

S = TypeVar("S")


def names_set_by(configure: Callable[[], object], owner: object, *kinds: type) -> tuple[str, ...]:
    """Call a method, and return under which names it has set objects of some classes as its owner's attributes."""
    before = dict(vars(owner))
    configure()
    after = vars(owner).items()
    return tuple(name for name, value in after if isinstance(value, kinds) and before.get(name) is not value)


@dataclass(frozen=True)
class StatePart:
    """A part of a trainer's checkpoint, as what saves it and what loads it."""

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None]
    is_same_everywhere: bool = False
    """Whether all replica groups have the same, and :attr:`load_state_dict` refuses another one's"""


class TrainerMixin:
    """A part of a trainer.

    A trainer is a class of :class:`xffl.training.BaseTrainer` and mixins, in any order; each overrides the hooks below,
    does its work and calls ``super()``, so that all are reached once. Attributes are those of the trainer.
    """

    if TYPE_CHECKING:
        config: Any
        strategy: DistributedStrategy
        callbacks: CallbackCollection
        run_directory: RunDirectory
        global_step: int
        current_epoch: int
        local_batches: int
        samples: int
        rounds: int
        training: bool
        last_round: RoundReport | None

    train_dataloader: Any = None
    """The loader of the training batches"""
    val_dataloader: Any = None
    """The loader of the validation batches; ``None`` where there is none"""
    stopped_cells: str | None = None
    """In an elastic run, why this cell asks all others to stop"""
    begins_anew: bool = False
    """In an elastic run, whether this cell came back with other ranks: what these keep for themselves begins anew"""
    are_models_spread: bool = False
    """Whether the models have the weights and the form in which they are trained"""

    # Who is where -----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> DistributedWorld:
        """The mesh and the collectives of this rank's cell; before set-up another one may take its place."""
        return self.strategy.world

    @world.setter
    def world(self, world: DistributedWorld) -> None:
        self.strategy.use_world(world)

    @property
    def state(self) -> DistributedState:
        """The state of the world."""
        return self.strategy.state

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.strategy.device

    def section(self, name: str, kind: type[S]) -> S:
        """Return a section of the configuration; its defaults, where the configuration has none of that name."""
        section = getattr(self.config, name, None)
        return kind() if section is None else section

    def train_context(self) -> AbstractContextManager[None]:
        """Return the context of the forward pass: its precision, and what the mesh needs; local."""
        return self.strategy.train_context()

    # What works together ----------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Make models; nothing is spread yet. Collective over the world."""

    def setup(self) -> None:
        """Make what training needs: spread models, optimizers, loaders, metrics, loggers. Collective over the world."""

    def teardown(self, error: BaseException | None) -> None:
        """Give back what :meth:`setup` has taken: files, hooks, threads; local, on every rank at the end.

        ``error`` is what ended the run; ``None`` where it has ended well.
        """

    def checkpoint_parts(self) -> dict[str, Part]:
        """Return what a checkpoint keeps of this part of the trainer, by name; the same on all ranks of a cell."""
        return {}

    def own_parts(self) -> dict[str, Any]:
        """Return what each rank keeps for itself in a checkpoint, by name, and loads into the same layout only.

        They are objects with ``state_dict`` and ``load_state_dict``.
        """
        return {}

    def counters(self) -> dict[str, float]:
        """Return what this part of the trainer has counted, by name; the same on all ranks of a cell, and local."""
        return {}

    def load_counters(self, state: Mapping[str, float]) -> None:
        """Take over what :meth:`counters` has returned; local. Earlier checkpoints may lack some of it."""

    def local_tensors(self) -> set[str]:
        """Return the trained tensors that rounds leave to each cell, by their names in checkpoints."""
        return set()

    def on_resumed(self) -> None:
        """Follow a checkpoint that was loaded: the counters stand where they stood. Called on every rank."""

    # What a trainer without some mixin does ---------------------------------------------------------------------------

    def named_models(self) -> dict[str, nn.Module]:
        """Return the models by the names of their attributes; there are none without :class:`SetupMixin`."""
        return {}

    def named_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers by the names of their attributes; there are none without :class:`SetupMixin`."""
        return {}

    def named_schedulers(self) -> dict[str, LRScheduler]:
        """Return the schedulers by the names of their attributes; there are none without :class:`SetupMixin`."""
        return {}

    def step_schedulers(self, interval: str, *optimizers: Optimizer) -> None:
        """Step the schedulers whose ``interval`` this is (``step``, ``epoch``); none without :class:`SetupMixin`."""

    def training_rounds(self) -> AbstractContextManager[Any]:
        """Return the context in which rounds take place; there are none without :class:`FederatedMixin`."""
        return nullcontext()

    def lone_cell(self) -> tuple[int, tuple[int, ...]] | None:
        """Return which cell this job is, and the ranks of all cells, where each cell is a job of its own."""
        return None

    @property
    def place_step(self) -> int:
        """The step after which the last round left this cell, in the previous start of its job."""
        return 0

    @property
    def last_step(self) -> int | None:
        """The optimizer step after which this job ends, where its round goes over files."""
        return None

    @property
    def has_federation_ended(self) -> bool:
        """Whether all cells together have trained as long as the federation was to."""
        return False

    def take_global(self) -> None:
        """Start from a global model, if one is given; collective over the world, after a checkpoint was loaded."""

    def give_to_round(self) -> None:
        """Export for a round over files, if that is asked for; collective over the world, at the end of training."""

    def find_rounds(self) -> FederatedScaling | None:
        """Return what runs rounds, inside :meth:`training_rounds`; there is none without :class:`FederatedMixin`."""
        return None

    def settle_round(self) -> None:
        """Merge the round that is under way; there is none without :class:`FederatedMixin`."""

    def note_batch(self, count: int) -> None:
        """Hear of a batch before it is trained on."""

    def note_round(self, report: RoundReport) -> None:
        """Hear of a round."""

    def reset_metrics(self) -> None:
        """Begin a validation; nothing is measured without :class:`EvalMetricMixin`."""

    def measuring(self, count: float) -> AbstractContextManager[None]:
        """Return the context of a ``validation_step``; ``count`` is 0 for a batch that only keeps the ranks in step."""
        return nullcontext()

    def update_outputs(self, output: Any, count: float) -> None:
        """Take in what ``validation_step`` has returned; nothing is measured without :class:`EvalMetricMixin`."""

    def compute_metrics(self, over: str = "cell") -> dict[str, float]:
        """Return the metrics over a ``cell`` or the ``federation``; there are none without :class:`EvalMetricMixin`."""
        return {}

    def log_scalar(self, name: str, value: float | torch.Tensor | None, *, weight: float = 1.0) -> None:
        """Keep a value of this rank for the next record."""

    def log_metrics(self, values: Mapping[str, float], *, over: str = "cell") -> None:
        """Record values that are the same on all ranks of the cell already."""
