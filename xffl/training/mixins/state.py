"""Counters of a trainer, and its checkpoints."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from xffl.checkpoint.generators import RandomState
from xffl.checkpoint.torch_files import load_archive
from xffl.checks import shown
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.errors import CheckpointError, OtherLayoutError
from xffl.files import read_sealed, write_sealed
from xffl.reading import COUNT_LIMIT
from xffl.training.mixins.base import StatePart, TrainerMixin

__all__ = ["StateMixin"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")

PLACE = "place.pt"
"""Where the last round of an elastic run has left a cell, in the folder of its run."""

COUNTERS = (
    *("global_step", "current_epoch", "ended_epochs", "local_batches", "samples"),
    *("rounds", "measured_rounds", "steps_since_round"),
)


PLACE_LIMIT = 2**30
"""Bytes of the file at most; it has counters and states of schedulers and loaders, and no tensors of a model"""


def read_place_file(file: Path) -> dict[str, Any]:
    """Return what :meth:`StateMixin.keep_place` has written; a ValueError or an OSError says what is wrong with it."""
    place: dict[str, Any] = load_archive(read_sealed(file, PLACE_LIMIT), limit=PLACE_LIMIT)
    trainer = place.get("trainer") if isinstance(place, dict) else None
    if not isinstance(trainer, dict) or not all(isinstance(part, Mapping) for part in place.values()):
        raise ValueError("it holds no states of a trainer's parts")
    for name in COUNTERS:
        if type(trainer.get(name)) not in (int, float) or not 0 <= trainer[name] <= COUNT_LIMIT:
            raise ValueError(f"{name} must be a number from 0 to {COUNT_LIMIT}, got {shown(trainer.get(name))}")
    return place


class StateMixin(TrainerMixin):
    """Count a trainer's steps, and keep and load the states of all of its parts."""

    global_step: int = 0
    """Optimizer steps of this cell"""
    current_epoch: int = 0
    local_batches: int = 0
    """Micro-batches of this rank"""
    samples: int = 0
    """Samples that this cell has trained on"""
    ended_epochs: int = 0
    """Epochs whose end (schedulers, validation) has begun"""
    rounds: int = 0
    measured_rounds: int = 0
    """The last round whose model was validated by all cells"""
    steps_since_round: int = 0

    def furthest(self, *counts: int) -> list[int]:
        """Return the largest value of each of some counts over the cells, the same on all ranks.

        Collective over the world, where there are several cells: the numbers are reduced.
        """
        if self.state.topology.cells == 1:
            return list(counts)
        local = torch.tensor(counts, dtype=torch.int64, device=self.device)
        most: list[int] = self.world.all_reduce(local, "max", "world").tolist()
        return most

    def save_checkpoint(self, path: str | Path, *, saver: Callable[..., T] | None = None, **values: Any) -> T | None:
        r"""Write a checkpoint of all parts; collective over the world, between two steps.

        A round that is under way is merged first. Cells may stand at different steps of the same round; where one has
        made a step since the last round, the checkpoint loads into the same number of cells only. Each rank keeps its
        random numbers and its part of the rounds' state, which only load into the same layout.

        :param path: Folder of the checkpoint, on a file system that all ranks share.
        :param saver: What writes it, such as the ``save`` of an :class:`xffl.checkpoint.AsyncSaver`; by default it is
            written before this returns.
        :param \**values: Plain values to keep beside, the same on all ranks.
        :return: What the saver has returned.
        :raises CheckpointError: if it could not be written; on all ranks.
        """
        self.settle_round()
        if (lone := self.lone_cell()) is not None and (scaling := self.find_rounds()) is not None:
            values |= {"cell": lone[0], "round": scaling.aggregator.rounds, "lineage": scaling.lineage}
        # Between two rounds one cell may have made steps and another none.
        step, since_round = self.furthest(self.global_step, self.steps_since_round)
        self.callbacks.pre_save_checkpoint(self, str(path))
        saved = self.strategy.save_checkpoint(
            path,
            self.named_models(),
            self.named_optimizers(),
            others=self._others(),
            own=self.own_parts(),
            after_round=self.rounds > 0 and since_round == 0,
            saver=saver,
            **{"step": step, **values},
        )
        self.callbacks.post_save_checkpoint(self, str(path))
        return saved

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint; collective over the world, after :meth:`setup`.

        :param path: Folder of the checkpoint.
        :return: The values that were kept beside.
        :raises CheckpointError: if it cannot be read or does not fit; on all ranks.
        """
        load = partial(
            self.strategy.load_checkpoint,
            path,
            self.named_models(),
            self.named_optimizers(),
            others=self._others(),
            own=self.own_parts(),
            local=self.local_tensors(),
        )
        try:
            values = load(reset=("*",) if self.config.experiment.reset else ())
        except OtherLayoutError:
            if self.state.elastic is None:
                raise
            self._begin_anew()
            values = load(reset=("*",))
        # Not read again: another run that writes there may have replaced or deleted the checkpoint since.
        record = self.strategy.loaded_record
        if record is not None and self.run_directory.cell >= len(record.cells):
            self.samples = 0  # those that were loaded are of the cell whose files this new one has read
        self.on_resumed()
        self.callbacks.post_load_checkpoint(self, str(path))
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts on this rank; local. Files are written by :meth:`save_checkpoint`."""
        return {
            "trainer": {**self.counters(), "callbacks": self.callbacks.state_dict()},
            "models": {name: model.state_dict() for name, model in self.named_models().items()},
            "optimizers": {name: one.state_dict() for name, one in self.named_optimizers().items()},
            "schedulers": {name: one.state_dict() for name, one in self.named_schedulers().items()},
            "dataloaders": {
                "train": getattr(self.train_dataloader, "state_dict", dict)(),
                "val": getattr(self.val_dataloader, "state_dict", dict)(),
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what :meth:`state_dict` returned on this rank, in the same layout; local.

        With ``strict`` models must have exactly the saved tensors.
        """
        trainer = dict(state_dict["trainer"])
        self.callbacks.load_state_dict(trainer.pop("callbacks"))
        self.load_counters(trainer)
        for name, model in self.named_models().items():
            model.load_state_dict(state_dict["models"][name], strict=strict)
        for name, optimizer in self.named_optimizers().items():
            optimizer.load_state_dict(state_dict["optimizers"][name])
        for name, scheduler in self.named_schedulers().items():
            scheduler.load_state_dict(state_dict["schedulers"][name])
        for name, loader in (("train", self.train_dataloader), ("val", self.val_dataloader)):
            if saved := state_dict["dataloaders"][name]:
                loader.load_state_dict(saved)

    def checkpoint_parts(self) -> dict[str, Any]:
        """Return the counters, and which step of all replica groups this is, where there are several."""
        manager = self.world.ft_manager
        groups = {} if manager is None else {"replica_groups": manager}
        counters = StatePart(self.counters, self.load_counters)
        return {**super().checkpoint_parts(), "trainer": counters, **groups}

    def own_parts(self) -> dict[str, Any]:
        """Return this rank's random numbers."""
        return {**super().own_parts(), "random": RandomState(self.device)}

    # In an elastic run ------------------------------------------------------------------------------------------------

    _place: Mapping[str, Any] | None = None
    """Where the last round of this cell left it, in the previous start of its job"""

    @property
    def place_step(self) -> int:
        """The step of that round, 0 without one; records up to it have counted, whatever checkpoint there is."""
        return 0 if self._place is None else int(self._place["trainer"]["global_step"])

    def _begin_anew(self) -> None:
        """Note, and say once, that other ranks than these have left this cell's files; local."""
        if not self.begins_anew and self.state.rank == 0:
            LOG.warning(
                "this cell comes back with %d ranks, and its files are of another number: it takes the model of the "
                "others over, with its own counters, and begins what its ranks keep for themselves anew (random "
                "numbers, the rounds' state, and the epoch of its data where a step has another number of samples)",
                self.world.world_size,
            )
        self.begins_anew = True

    def read_place(self) -> bool:
        """Read what :meth:`keep_place` has written, if this is a cell of an elastic run; collective over the cell."""
        if self.state.elastic is None or not self.config.experiment.resume:
            return False
        places: list[Mapping[str, Any] | None] = [None]
        here = self.world.world_size
        file = Path(self.config.experiment.output_dir) / PLACE
        advice = "remove it, and the cell starts from its checkpoint"
        with run_on_all_ranks(
            "places in the data", convert=lambda error: CheckpointError(f"{file} cannot be read ({error}); {advice}")
        ):
            if self.state.rank == 0 and file.exists():
                places[0] = read_place_file(file)
        dist.broadcast_object_list(places, src=0)
        self._place = places[0]
        if self._place is not None and self._place.get("ranks", {}).get("count", here) != here:
            self._begin_anew()
        return self._place is not None

    def keep_place(self) -> None:
        """Write where a round has left this cell: counters, schedulers, and its place in the data; local, rank 0 does.

        A cell that is lost without a checkpoint of the same step goes on there with the model of the others: steps
        that have counted are not made again.
        """
        if self.state.elastic is None or self.state.rank != 0:
            return
        buffer = io.BytesIO()
        parts = {name: part.state_dict() for name, part in self.checkpoint_parts().items()}
        torch.save({"ranks": {"count": self.world.world_size}, **parts}, buffer)  # a part may have that name, too
        write_sealed(self.run_directory.path / PLACE, buffer.getvalue())

    def take_place(self) -> bool:
        """Join the other cells, and go on where the last round has left this cell, if they hold a model that has it.

        So does a cell with a newer checkpoint whose steps since that round are lost: it makes them again. Collective
        over the cell, of an elastic run. Returns whether the cell's records go on, too.
        """
        place, scaling = self._place, self.find_rounds()
        if self.state.elastic is None or scaling is None:
            return False
        has_lost_steps = scaling.join()  # before a batch is counted
        if has_lost_steps:
            self.steps_since_round = 0
        if place is None or (self.place_step <= self.global_step and not has_lost_steps):
            return False
        if scaling.aggregator.rounds >= place["trainer"]["rounds"]:
            for name, part in self.checkpoint_parts().items():
                self._take_part(name, part, place)
            LOG.info("going on from step %d, after round %d", self.global_step, self.rounds)
        self._place = None
        self.on_resumed()
        return True

    def _take_part(self, name: str, part: Any, place: Mapping[str, Any]) -> None:
        """Give a part the state that was kept of it, in a file that somebody else may have written; local."""
        file = Path(self.config.experiment.output_dir) / PLACE
        try:
            part.load_state_dict(place[name])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file} has no state that fits {name} ({type(error).__name__}: {error}); remove it, and the cell "
                "starts from its checkpoint"
            ) from error

    def _others(self) -> dict[str, Any]:
        return {**self.checkpoint_parts(), "callbacks": self.callbacks}

    def counters(self) -> dict[str, float]:
        """Add the steps, epochs, samples and rounds."""
        return {**super().counters(), **{name: getattr(self, name) for name in COUNTERS}}

    def load_counters(self, state: Mapping[str, float]) -> None:
        """Take them over."""
        super().load_counters(state)
        for name in COUNTERS:
            setattr(self, name, int(state[name]))
