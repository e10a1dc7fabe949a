"""Streams: data without a length or an index, dealt out to the ranks sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate

from xffl.checks import integer, one_of
from xffl.distributed.agreement.consistency import control_device
from xffl.errors import ConfigError, StateError
from xffl.topology import DataPlace
from xffl.training.data.first_samples import FirstSamples, Meeting
from xffl.training.data.loaders import Randomness, identity_of, open_loader
from xffl.training.data.place import (
    DATA_AXES,
    OWN,
    WHOLE,
    Placed,
    cell_shares,
    place_along,
    place_of,
    share_of,
    takes_state,
)
from xffl.training.data.position import EpochPosition
from xffl.training.data.rng import AUGMENTING
from xffl.training.data.sampler import check_identity

__all__ = ["CellStream"]

RANK = "rank"
"""The part of a stream that is a rank's share already"""
ADVICE_ALL = (
    "The ranks of all cells share out one stream here, so each must read the whole of it in the same order: leave out "
    "what splits it by rank (webdataset's split_by_node, datasets' split_dataset_by_node, dist.get_rank()), and "
    'shuffle by a seed that is the same on all ranks; or give part="rank" where each rank\'s stream is its own share '
    'already, part="own" where it is its cell\'s, or is_compared=False where only the augmentation of samples differs'
)
ADVICE_CELL = (
    "The ranks of a cell share out one stream here, so each must read the whole of it in the same order: leave out "
    "what splits it by rank (webdataset's split_by_node, datasets' split_dataset_by_node, dist.get_rank()), and "
    'shuffle by a seed that is the same on all ranks of the cell; or give part="rank" where each rank\'s stream is its '
    "own share already, or is_compared=False where only the augmentation of samples differs"
)

Step = tuple[Any, int, int, Any]
"""A batch, its samples, those of the whole cell in the step, and the dataset's state behind it"""


class CellStream(Iterable[Any]):
    """One rank's batches of a stream that all ranks read: sample ``i`` goes to the ranks in turn.

    Every rank reads the whole stream and keeps its share, so the stream must be the same on all of them: shuffle by a
    seed of its own, or by the global generators of Python, numpy or torch, which are seeded alike while it is read.
    All ranks see where the stream ends, and all ranks of a cell make the same number of batches. In the last step the
    ranks have fewer samples; where some rank of a cell would have none, or with ``drop_last``, the cell leaves that
    step out. An epoch without any step is an error.

    Before its first batch each rank compares the first samples of the stream with those of the others: where they
    differ, the stream splits itself by rank, or is shuffled without a seed, and all ranks raise ConfigError. The ranks
    of all cells are compared; those of the cell alone with ``part`` ``"own"`` or ``"whole"``, and where each cell is a
    job of its own. Floating-point numbers are compared roughly. The ranks of a cell wait for each other there, for a
    minute at most, and cells for each other for 5 s at most (less where the session's timeout is short): a cell that
    comes later raises alone. Nothing else is communicated, except with ``part="rank"``.

    Iterating, epochs and resuming are as in :class:`CellLoader <xffl.training.data.loaders.CellLoader>`, except that
    nobody knows the length before the end. A resumed stream reads the consumed part of the epoch again and throws it
    away, or takes the dataset's own state (``resume="state"``), which is quick, and exact if the dataset keeps all that
    it has read ahead (a shuffle buffer often is lost).

    To make one is local. All ranks give the same arguments; with a ``part``, those of a cell.

    :param dataset: Anything to iterate over anew in each epoch. Its ``set_epoch`` is called if it has one.
    :param state: The state of this process, which knows its cell and its place in it; where there is none, a
        :class:`xffl.topology.DataPlace`.
    :param batch_size: Samples of each rank in a step.
    :param part: ``None`` deals the stream out over the ranks of all cells. ``"whole"`` deals all of it to every cell;
        what it draws from global generators, and so its shuffling by them, is the cell's own. ``"own"``: the stream is
        this cell's alone. ``"rank"``: the stream of each rank is its own share already (it splits itself by rank, as
        by webdataset's ``split_by_node`` or datasets' ``split_dataset_by_node``), and is taken as it is. The ranks of a
        cell stop where the first of them has no full batch left: they tell each other before each batch, in a
        reduction of 24 bytes over the cell.
    :param seed: Of what the stream draws from global generators.
    :param drop_last: Leave the last step out if it is not full; so it is with ``part="rank"`` in any case.
    :param workers: 0 reads in this process, 1 reads ahead in another one. More would each read the whole stream.
    :param pin_memory: Whether batches are put into pinned memory; ``None`` where there is CUDA.
    :param prefetch_factor: Batches that the worker reads ahead.
    :param collate: Makes a batch of a list of samples; ``None`` takes torch's ``default_collate``.
    :param resume: ``"count"`` or ``"state"``.
    :param start_method: How the worker starts, such as ``"fork"``; ``None`` is Python's default.
    :param is_compared: Whether the first samples are compared. ``False`` is for samples that come in the same order on
        all ranks and differ in what a generator of the dataset's own adds to them.
    :raises ConfigError: if an argument is invalid.
    """

    @takes_state
    def __init__(
        self,
        dataset: Any,
        state: Placed | DataPlace,
        *,
        batch_size: int,
        part: Literal["own", "whole", "rank"] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        resume: Literal["count", "state"] = "count",
        start_method: Any = None,
        is_compared: bool = True,
    ) -> None:
        _check(dataset, part, workers, resume)
        at = place_of(state)
        self.dataset = dataset
        self.cell = at.cell
        self.batch_size = integer("batch_size", batch_size, 1)
        place, ranks = share_of(at)
        counts = cell_shares(at.topology)
        first, count = (0, ranks) if part is not None else (sum(counts[: self.cell]), sum(counts))
        turns, turn = range(first, first + ranks), first + place
        self._cell_sums = CellSums(state) if part == RANK else None
        if part == RANK:
            turns, turn, count = range(1), 0, 1
        stream = (AUGMENTING, self.cell, place) if part == RANK else (AUGMENTING, 0 if part is None else self.cell)
        self._steps = _Steps(
            dataset=dataset,
            per_step=self.batch_size * count,
            turns=turns,
            turn=turn,
            of=count,
            collate=collate or default_collate,
            # A stream that all cells read must be the same in all of them.
            randomness=Randomness(seed, *stream),
            drop_last=drop_last or part == RANK,
            is_state_kept=resume == "state",
        )
        self._identity = {
            "kind": type(self).__name__,
            "dataset": identity_of(dataset),
            "cell": self.cell,
            "part": part or "all",
            "ranks": ranks if part == RANK else count,
            "batch_size": self.batch_size,
            "seed": integer("seed", seed, 0),
            "resume": resume,
        }
        self._meeting: Meeting | None = None
        if is_compared and part != RANK:
            meeting = Meeting(
                state,
                type(dataset).__name__,
                over_cells=part is None,
                advice=ADVICE_ALL if part is None else ADVICE_CELL,
                # Not the seed: by another one in each cell the stream may be shuffled otherwise, which must be found.
                kind=f"{part or ''} {batch_size}",
            )
            self._meeting = meeting if meeting.is_needed else None
        self.batches = open_loader(
            self._steps,
            None,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            is_persistent=False,  # a worker that is kept would not learn where to begin
            start_method=start_method,
        )
        """Torch's loader, of batches with the numbers that belong to them."""
        self.at = EpochPosition()
        """Where the loop stands."""
        self._state: Any = None
        """Of the dataset, behind the batch that was yielded last."""
        self.batch_samples = 0
        """This rank's samples in the batch that was yielded last."""
        self.samples_seen = 0
        """Samples that the whole cell has taken since the first epoch; ranks that share a part count once."""

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is being read, from 0."""
        return self.at.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken."""
        return self.at.batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, then stand at the start of the next one."""
        self._steps.begin = (self.at.epoch, self.at.batches, self._state)
        batches = self._read() if self._cell_sums is None else self._cell_sums.together(self._read())
        for batch, mine, all_of_cell, state in batches:
            self.at.take()
            self._state = state
            self.batch_samples = mine
            self.samples_seen += all_of_cell
            yield batch
        self.set_epoch(self.at.epoch + 1)

    def _read(self) -> Iterator[Step]:
        """Yield the steps that are left of the epoch; at the first time, compare the first samples before."""
        meeting = self._meeting
        self._meeting = None
        self._steps.tells_first = meeting is not None
        if meeting is None:
            yield from self.batches
            return
        try:
            batches = iter(self.batches)
            first = next(batches)
        except Exception as error:
            # The others would wait for this rank, here or in the collectives of its first step.
            with suppress(ConfigError):
                meeting.compare(FirstSamples(error=f"{type(error).__name__}: {error}"))
            raise
        meeting.compare(replace(first, layout=f"identity {identity_of(self.dataset)!r}"))
        yield from batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, another starts at its first batch. Local."""
        if self.at.choose(epoch):
            self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands; local, and the same on all ranks of the cell."""
        return {**self.at.state_dict(), "samples": self.samples_seen, "stream": self._state, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loop stood; local, and to be called on all ranks of the cell, before iterating.

        :param state: What :meth:`state_dict` returned on a rank of this cell.
        :raises ConfigError: if it is of another stream or other steps than this one's.
        """
        names = (*EpochPosition.NAMES, "samples", "stream")
        check_identity("stream", state, self._identity, *names, of_steps=("ranks", "batch_size"))
        samples = integer("samples", state["samples"], 0)
        self.at.load_state_dict(state)
        self._state = state["stream"]
        self.samples_seen = samples


class CellSums:
    """What the ranks of a cell tell each other before each batch, where each reads a stream of its own.

    :param state: The state of this process.
    :raises ConfigError: if it is a mere place, and the cell has ranks that cannot be asked.
    """

    def __init__(self, state: Placed | DataPlace) -> None:
        place = place_of(state)
        self._is_alone = place.in_job.cell_size == 1
        if not self._is_alone and (isinstance(state, DataPlace) or not dist.is_initialized()):
            raise ConfigError(
                f'part="rank" needs the state of a process group: the {place.cell_size} ranks of the cell stop at the '
                "same batch, which they tell each other"
            )
        # Without a federation, and where each cell is a job of its own, the world is the cell.
        self._group = getattr(state, "federation", None)
        self._counts = place_along(place.topology, place.rank, DATA_AXES)[2]

    def together(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield steps as long as all ranks of the cell have one, each with the cell's samples; collective over it."""
        while True:
            step, error = None, None
            try:
                step = next(steps, None)
            except Exception as wrong:  # noqa: BLE001 - raised below; whatever it is, the other ranks must hear of it
                error = wrong
            is_ended, has_failed, samples = self._sum(step, error)
            if error is not None:
                raise error
            if has_failed:
                raise ConfigError("another rank of this cell could not read its stream; see that rank's error")
            if is_ended or step is None:
                return
            batch, mine, _, state = step
            yield batch, mine, samples, state

    def _sum(self, step: Step | None, error: Exception | None) -> tuple[bool, bool, int]:
        """Return whether some rank has no step left, or failed, and the samples of all that have data of their own."""
        mine = step[1] if step is not None and self._counts else 0
        if self._is_alone:
            return step is None, error is not None, mine
        numbers = [int(step is None), int(error is not None), mine]
        sums = torch.tensor(numbers, dtype=torch.int64, device=control_device(self._group))
        dist.all_reduce(sums, group=self._group)
        ended, failed, samples = sums.tolist()
        return ended > 0, failed > 0, samples


@dataclass(eq=False, kw_only=True)
class _Steps(IterableDataset[Any]):
    """One rank's batches of the rest of an epoch, each with its numbers; runs in the process that reads.

    A step has ``per_step`` samples of all ranks. Of the ``of`` places that take turns, ``turns`` are the cell's ranks'
    and ``turn`` is this rank's. With ``is_state_kept`` the dataset's state goes with each batch.
    """

    dataset: Any
    per_step: int
    turns: range
    turn: int
    of: int
    collate: Callable[[list[Any]], Any]
    randomness: Randomness
    drop_last: bool
    is_state_kept: bool
    begin: tuple[int, int, Any] = (0, 0, None)
    """Epoch, position, and the dataset's state there"""
    tells_first: bool = False
    """Whether the first samples come before the first batch"""

    def __iter__(self) -> Iterator[Any]:
        epoch, position, state = self.begin
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        step = count = 0
        if state is not None:
            self.dataset.load_state_dict(state)
            step = position
        with self.randomness.of(epoch, step):
            source = iter(self.dataset)
        while True:
            # Seeded anew in each step: a stream that goes on from its state draws what a whole one would draw.
            with self.randomness.of(epoch, step):
                samples = list(islice(source, self.per_step))
            if self.tells_first and not count:
                yield FirstSamples.of(samples, (epoch, step))
            count += len(samples)
            counts = [len(samples[turn :: self.of]) for turn in self.turns]
            is_short = len(samples) < self.per_step
            if not min(counts) or (is_short and self.drop_last):
                break
            if step >= position:
                # At its end a dataset may say that it starts anew: then the epoch is read again, which tells the truth.
                kept = self.dataset.state_dict() if self.is_state_kept and not is_short else None
                with self.randomness.of(epoch, step, self.turn):
                    batch = self.collate(samples[self.turn :: self.of])
                yield batch, counts[self.turn - self.turns.start], sum(counts), kept
            step += 1
            if is_short:
                break
        if not step:
            raise ConfigError(
                f"the stream ended after {count} samples, too few for one step of {self.of} ranks with up to "
                f"{self.per_step} samples; give a longer one, a smaller batch_size, or drop_last=False"
            )
        if step < position:
            raise StateError(
                f"the stream ended after {step} batches, but {position} were consumed before; give the same stream, or "
                "start another epoch with set_epoch"
            )


def _check(dataset: Any, part: object, workers: object, resume: object) -> None:
    if not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator):
        raise ConfigError(
            f"dataset must have an __iter__ that returns a new iterator in each epoch, got a {type(dataset).__name__}"
        )
    if part is not None:
        one_of("part of a stream", part, [OWN, WHOLE, RANK], hint="or give None to deal it out over all cells")
    if integer("workers", workers, 0) > 1:
        raise ConfigError(f"workers {workers} would each read the whole stream; give 0 or 1")
    one_of("resume", resume, ["count", "state"])
    if resume == "state" and part == RANK:
        raise ConfigError(
            'part="rank" has a stream of its own on each rank, but the state of a stream is saved once for a cell; '
            'give resume="count"'
        )
    if resume == "state" and not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        raise ConfigError(
            f'{type(dataset).__name__} has no state_dict and load_state_dict; give resume="count", or a dataset that '
            "has them"
        )
