"""Streams: data without a length or an index, dealt out to the ranks sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch.utils.data import IterableDataset, default_collate

from xffl.checks import integer, one_of
from xffl.errors import ConfigError, StateError
from xffl.topology import Topology
from xffl.training.data.loaders import Randomness, identity_of, open_loader
from xffl.training.data.rng import AUGMENTING
from xffl.training.data.sampler import check_identity, data_place, data_places

__all__ = ["CellStream"]


class CellStream(Iterable[Any]):
    """One rank's batches of a stream that all ranks read: sample ``i`` goes to the ranks in turn.

    Every rank reads the whole stream and keeps its share, so the stream must be the same on all of them: shuffle by a
    seed of its own, or by the global generators of Python, numpy or torch, which are seeded alike while it is read.
    Nothing is communicated: all ranks see where the stream ends, and all ranks of a cell make the same number of
    batches. In the last step the ranks have fewer samples; where some rank of a cell would have none, or with
    ``drop_last``, the cell leaves that step out. An epoch without any step is an error.

    Iterating, epochs and resuming are as in :class:`CellLoader <xffl.training.data.loaders.CellLoader>`, except that
    nobody knows the length before the end. A resumed stream reads the consumed part of the epoch again and throws it
    away, or takes the dataset's own state (``resume="state"``), which is quick, and exact if the dataset keeps all that
    it has read ahead (a shuffle buffer often is lost).

    Local. All ranks give the same arguments, except ``rank``; with ``part="own"`` those of a cell.

    :param dataset: Anything to iterate over anew in each epoch. Its ``set_epoch`` is called if it has one.
    :param topology: The federation, ``state.topology``.
    :param rank: This process's global rank.
    :param batch_size: Samples of each rank in a step.
    :param part: ``None`` deals the stream out over the ranks of all cells; ``"own"``: the stream is this cell's alone.
    :param seed: Of what the stream draws from global generators.
    :param drop_last: Leave the last step out if it is not full.
    :param workers: 0 reads in this process, 1 reads ahead in another one. More would each read the whole stream.
    :param pin_memory: Whether batches are put into pinned memory; ``None`` where there is CUDA.
    :param prefetch_factor: Batches that the worker reads ahead.
    :param collate: Makes a batch of a list of samples; ``None`` takes torch's ``default_collate``.
    :param resume: ``"count"`` or ``"state"``.
    :param start_method: How the worker starts, such as ``"fork"``; ``None`` is Python's default.
    :raises ConfigError: if an argument is invalid.
    """

    _epoch = _position = 0
    _state: Any = None
    """Of the dataset, behind the batch that was yielded last"""

    def __init__(
        self,
        dataset: Any,
        topology: Topology,
        rank: int,
        *,
        batch_size: int,
        part: Literal["own"] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
        resume: Literal["count", "state"] = "count",
        start_method: Any = None,
    ) -> None:
        _check(dataset, part, workers, resume)
        self.dataset, self.cell = dataset, topology.cell_of(rank)
        self.batch_size = integer("batch_size", batch_size, 1)
        place, ranks = data_place(topology, rank)
        counts = data_places(topology)
        first, count = (0, ranks) if part == "own" else (sum(counts[: self.cell]), sum(counts))
        self._steps = _Steps(
            dataset=dataset,
            per_step=self.batch_size * count,
            turns=range(first, first + ranks),
            turn=first + place,
            of=count,
            collate=collate or default_collate,
            # A stream that all cells read must be the same in all of them.
            randomness=Randomness(seed, AUGMENTING, self.cell if part == "own" else 0),
            drop_last=drop_last,
            is_state_kept=resume == "state",
        )
        self._identity = {
            "kind": type(self).__name__,
            "dataset": identity_of(dataset),
            "cell": self.cell,
            "part": part or "all",
            "ranks": count,
            "batch_size": self.batch_size,
            "seed": integer("seed", seed, 0),
            "resume": resume,
        }
        self.batches = open_loader(
            self._steps,
            None,
            seed=seed,
            workers=workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            is_persistent=False,  # a worker that lives on would not learn where to begin
            start_method=start_method,
        )
        """Torch's loader, of batches with the numbers that belong to them."""
        self.batch_samples = 0
        """This rank's samples in the batch that was yielded last."""
        self.samples_seen = 0
        """Samples that the whole cell has taken since the first epoch; ranks that share a part count once."""

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is being read, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken."""
        return self._position

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, then stand at the start of the next one."""
        self._steps.begin = (self._epoch, self._position, self._state)
        for batch, mine, all_of_cell, state in self.batches:
            self._position += 1
            self._state = state
            self.batch_samples = mine
            self.samples_seen += all_of_cell
            yield batch
        self.set_epoch(self._epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the current one keeps its position, another starts at its first batch. Local."""
        number = integer("epoch", epoch, 0)
        if number != self._epoch:
            self._epoch, self._position, self._state = number, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands; local, and the same on all ranks of the cell."""
        numbers = {"epoch": self._epoch, "position": self._position, "samples": self.samples_seen}
        return {**numbers, "stream": self._state, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loop stood; local, and to be called on all ranks of the cell, before iterating.

        :param state: What :meth:`state_dict` returned on a rank of this cell.
        :raises ConfigError: if it is of another stream or other steps than this one's.
        """
        check_identity("stream", state, self._identity, "epoch", "position", "samples", "stream")
        position, samples = (integer(name, state[name], 0) for name in ("position", "samples"))
        self.set_epoch(state["epoch"])
        self._position, self._state, self.samples_seen = position, state["stream"], samples


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

    def __iter__(self) -> Iterator[tuple[Any, int, int, Any]]:
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
        one_of("part of a stream", part, ["own"], hint="or give None to deal it out over all cells")
    if integer("workers", workers, 0) > 1:
        raise ConfigError(f"workers {workers} would each read the whole stream; give 0 or 1")
    one_of("resume", resume, ["count", "state"])
    if resume == "state" and not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        raise ConfigError(
            f'{type(dataset).__name__} has no state_dict and load_state_dict; give resume="count", or a dataset that '
            "has them"
        )
