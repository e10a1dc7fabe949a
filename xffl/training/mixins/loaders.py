"""Data: loaders that know cells and ranks, made of what a trainer returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from xffl.aggregation.algorithms.registry import make
from xffl.checks import integer_fields
from xffl.errors import ConfigError, OtherStepsError
from xffl.naming import Writer
from xffl.training.data.loaders import CellLoader, adopt_loader, options_of, parts_by_ranks, validation_loader
from xffl.training.data.partition import Partition
from xffl.training.data.place import WHOLE
from xffl.training.mixins.base import StatePart, TrainerMixin

__all__ = ["DataConfig", "DataLoaderSetupMixin"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How batches are made.

    :param partition: How the samples are dealt out to the cells, by name with options (``dirichlet:alpha=0.3``; see
        ``xffl list algorithms --kind partition``); by default at random, in proportion to the cells' ranks.
    :param workers: Processes of each rank that make batches; 0 makes them in the rank's own.
    :param pin_memory: Whether batches lie in pinned memory; ``None`` where the run is on GPUs.
    :param prefetch_factor: Batches that each worker makes ahead.
    :param validation_batch_size: Samples of each rank in a validation batch; ``None`` for ``training.batch_size``.
    """

    partition: str | dict[str, Any] | None = None
    workers: int = 0
    pin_memory: bool | None = None
    prefetch_factor: int = 2
    validation_batch_size: int | None = None

    def __post_init__(self) -> None:
        integer_fields(self, "workers", minimum=0, prefix="data.")
        integer_fields(self, "prefetch_factor", prefix="data.")
        integer_fields(self, "validation_batch_size", prefix="data.", may_be_none=True)


class DataLoaderSetupMixin(TrainerMixin):
    """Make a trainer's loaders."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        """Return the loaders for training and for validation (or ``None``); override it.

        :meth:`train_loader` and :meth:`validation_loader` make them of datasets. A plain torch ``DataLoader``
        is taken over with its dataset and options: the samples are dealt out to the cells and their ranks. One with a
        sampler of its own is refused; ``torch.utils.data.Subset`` chooses samples. Validation counts every sample once,
        in the dataset's order: ``shuffle=True`` and ``drop_last=True`` are allowed there, and change nothing.
        """
        raise ConfigError(f"{type(self).__name__} has no data; override configure_dataloaders")

    def train_loader(
        self, dataset: Dataset[Any], part: Any = None, *, labels: npt.ArrayLike | None = None, **options: Any
    ) -> CellLoader:
        r"""Return a loader of this rank's part of the training samples, with the batch size and seed of the run.

        :param dataset: The samples.
        :param part: Which are this cell's, as in :class:`xffl.training.CellLoader`; by default as ``data.partition``
            says.
        :param labels: The label of each sample: for partitions that ask for them, and for the report's picture of who
            has what.
        :param \**options: Other options of it.
        :return: The loader.
        """
        data = self.section("data", DataConfig)
        defaults = {"batch_size": self.config.training.batch_size, "seed": self.config.experiment.seed}
        options = defaults | self._read_options(data) | options
        if part is None:
            part = self._deal(len(dataset), labels, options["seed"])  # type: ignore[arg-type]
        if labels is not None and (isinstance(part, Partition) or (isinstance(part, str) and part == WHOLE)):
            self._write_partition(part, labels)
        return CellLoader(dataset, self.state, part=part, **options)

    def _write_partition(self, part: Partition | str, labels: npt.ArrayLike) -> None:
        """Tell the run's folder how many samples of each class the cells have."""
        classes, counts = np.unique(np.asarray(labels), return_counts=True)
        table = part.table(labels).tolist() if isinstance(part, Partition) else [counts.tolist()] * self.state.cells
        # Of a cell that is a job of its own the run's folder tells its own row.
        is_lone = self.lone_cell() is not None
        self.run_directory.write_partition(classes.tolist(), [table[self.state.cell]] if is_lone else table)

    def _deal(self, samples: int, labels: npt.ArrayLike | None, seed: int) -> Partition | str:
        """Deal the samples out to the cells as the configuration says."""
        spec = self.section("data", DataConfig).partition
        if spec is None:
            return parts_by_ranks(samples, self.state, seed=seed)
        if spec == WHOLE:
            return WHOLE
        deal = make("partition", spec, writer=Writer.USER)
        try:
            made = deal(samples if labels is None else np.asarray(labels), self.state.cells, seed=seed)
        except (TypeError, IndexError, ConfigError) as wrong:
            if isinstance(wrong, ConfigError) and labels is not None:
                raise
            raise ConfigError(
                f"data.partition {spec!r} cannot deal {samples} samples out ({wrong}); does it need labels? Give "
                "train_loader(dataset, labels=...)"
            ) from wrong
        if not isinstance(made, Partition):
            raise ConfigError(f"data.partition {spec!r} must return a Partition, got a {type(made).__name__}")
        return made

    def validation_loader(self, dataset: Dataset[Any], **options: Any) -> Any:
        r"""Return a loader that gives each validation sample to one rank of the cell.

        :param dataset: The samples, the same in all cells or this cell's own.
        :param \**options: Options of :func:`xffl.training.validation_loader`.
        :return: The loader.
        """
        data = self.section("data", DataConfig)
        batch_size = data.validation_batch_size or self.config.training.batch_size
        options = {"batch_size": batch_size, **self._read_options(data), **options}
        return validation_loader(dataset, self.state, **options)

    def _read_options(self, data: DataConfig) -> dict[str, Any]:
        """Return how the configuration wants samples read; pinned memory is for a run on GPUs, not for a machine."""
        pinned = self.world.device.type == "cuda" if data.pin_memory is None else data.pin_memory
        return {"workers": data.workers, "pin_memory": pinned, "prefetch_factor": data.prefetch_factor}

    def setup(self) -> None:
        """Make the loaders; local."""
        loaders = self.configure_dataloaders()
        if not isinstance(loaders, tuple) or len(loaders) != 2:
            raise ConfigError(
                f"{type(self).__name__}.configure_dataloaders must return the loaders of training and validation, or "
                f"(train, None), got a {type(loaders).__name__}"
            )
        train, validation = loaders
        if train is None:
            raise ConfigError(f"{type(self).__name__}.configure_dataloaders returned no loader for training")
        if isinstance(train, DataLoader):
            train = self._adopt(train)
        if isinstance(validation, DataLoader):
            validation = self.validation_loader(validation.dataset, **options_of(validation))
        self.train_dataloader = train
        self.val_dataloader = validation
        super().setup()

    def _adopt(self, train: DataLoader[Any]) -> Any:
        """Make a loader for cells of a plain one, whose samples are dealt out as the configuration says."""
        seed = self.config.experiment.seed
        part = None
        if not hasattr(train, "state_dict"):  # else it is taken as it is
            options_of(train)  # refuses what has no samples to deal out
            part = self._deal(len(train.dataset), None, seed)  # type: ignore[arg-type]
        return adopt_loader(train, self.state, part=part, seed=seed)

    def checkpoint_parts(self) -> dict[str, Any]:
        """Return the training loader, where it knows its position."""
        parts = super().checkpoint_parts()
        if hasattr(self.train_dataloader, "state_dict"):
            parts["train_dataloader"] = StatePart(lambda: self.train_dataloader.state_dict(), self._load_place)
        return parts

    def _load_place(self, state: Mapping[str, Any]) -> None:
        """Let the training loader go on where a checkpoint says."""
        loader = self.train_dataloader
        try:
            loader.load_state_dict(state)
        except ConfigError as wrong:
            # Steps of another size: the samples that were seen cannot be distinguished from the others. Whoever comes
            # back with other ranks may have changed nothing else, as a seed or the data.
            may_begin_anew = self.config.experiment.reset or (self.begins_anew and isinstance(wrong, OtherStepsError))
            if not (may_begin_anew and "epoch" in state and hasattr(loader, "set_epoch")):
                raise
            loader.set_epoch(state["epoch"])
