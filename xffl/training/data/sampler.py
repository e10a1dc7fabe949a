"""Samplers: each cell draws from its own part only, and the ranks of a cell share every step's samples out.

All ranks of a cell draw one shuffled order in each epoch, cut it into the same number of steps, and take a part of each
step. So collectives inside the cell (FSDP's, DDP's) meet, and every sample counts once. Nothing is communicated, except
that the ranks compare what they draw from, once (:mod:`xffl.training.data.first_samples`).
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from xffl.checks import integer
from xffl.errors import ConfigError, OtherStepsError, StateError
from xffl.topology import DataPlace
from xffl.training.data.first_samples import FirstSamples, Meeting
from xffl.training.data.partition import Partition, index_array
from xffl.training.data.place import Placed, place_of, share_of, takes_state
from xffl.training.data.position import EpochPosition, checked_batches
from xffl.training.data.rng import SHUFFLING, Draws, Indices

__all__ = [
    "CellBatchSampler",
    "CellOrder",
    "CellSampler",
    "check_identity",
    "even_cut",
]

ADVICE_CELL = (
    "The ranks of a cell share its samples out, so each must have the same dataset, part and options: give all of them "
    "the whole dataset of the cell, not a rank's share of it"
)
ADVICE_PARTS = (
    "All cells must make the same partition of the same dataset: give all ranks the same samples, labels and seed, or, "
    'where each cell has data of its own, part="own" or its indices'
)
Drawn = TypeVar("Drawn")
"""What a sampler yields: indices, or lists of them."""
Batch = TypeVar("Batch")


class CellOrder(Sampler[Drawn]):
    """What both samplers share: the cell's order, its steps, and where the training loop stands in them.

    Local. All ranks of a cell give the same arguments, and the same calls.

    :param part: The partition, of which each cell takes its part, or this cell's own indices in any order:
        ``range(len(dataset))`` in all cells deals all samples to every cell, each with a shuffle of its own.
    :param state: The state of this process, which knows its cell and its place in it; where there is none, a
        :class:`xffl.topology.DataPlace`.
    :param batch_size: Samples of each rank in a step, at most.
    :param seed: Of the shuffling; each cell and epoch has a random stream of its own.
    :param is_shuffled: Whether each epoch has a new random order; ``False`` keeps the order of the part, as validation
        wants it, and needs no ``set_epoch``.
    :param drop_last: Leave out what does not fill a step on all ranks; with shuffling other samples in each epoch.
    :param is_padded: Repeat the first samples of the epoch's order so that all batches are full.
    :param is_compared: Whether the ranks of the cell compare what they draw from before they first draw, and all cells
        the partition, if it is one.
    :raises ConfigError: if an argument is invalid, or a rank would have no sample in some step.
    """

    @takes_state
    def __init__(
        self,
        part: Partition | npt.ArrayLike,
        state: Placed | DataPlace,
        *,
        batch_size: int,
        seed: int = 0,
        is_shuffled: bool = True,
        drop_last: bool = False,
        is_padded: bool = False,
        is_compared: bool = True,
    ) -> None:
        super().__init__()
        place = place_of(state)
        self.cell = place.cell
        self._indices = _indices_of(part, place.cells, self.cell)
        self._place, self._places = share_of(place)
        self.batch_size = integer("batch_size", batch_size, 1)
        self._seed = integer("seed", seed, 0)
        for what, switch in (("is_shuffled", is_shuffled), ("drop_last", drop_last), ("is_padded", is_padded)):
            if not isinstance(switch, bool):
                raise ConfigError(f"{what} must be True or False, got {switch!r}")
        if drop_last and is_padded:
            raise ConfigError("drop_last and is_padded are both True; choose to leave samples out or to repeat some")
        self._is_shuffled = is_shuffled
        self._tail = "drop" if drop_last else "pad" if is_padded else "keep"
        count, per_step = len(self._indices), self.batch_size * self._places
        self.steps = count // per_step if drop_last else -(-count // per_step)
        """Batches of an epoch: the same number on all ranks of the cell."""
        self.samples = count if self._tail == "keep" else self.steps * per_step
        """Samples of the whole cell in an epoch; repeated ones count as often as they come."""
        self._check_steps()
        self._meetings = self._meetings_of(part, state) if is_compared else []
        self.at = EpochPosition()
        """Where the loop stands, as :meth:`follow` and :meth:`load_state_dict` say; drawing goes on there."""
        self._is_followed = self._is_drawn = False

    @property
    def epoch(self) -> int:
        """The epoch that is being drawn, from 0."""
        return self.at.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that the loop has taken, as :meth:`follow` and :meth:`load_state_dict` say.

        Drawing goes on there.
        """
        return self.at.batches

    @property
    def samples_seen(self) -> int:
        """Samples that the whole cell has taken since the first epoch, at the loop's position."""
        return self.at.epoch * self.samples + (self._step(self.at.batches - 1)[1] if self.at.batches else 0)

    @property
    def first_index(self) -> int:
        """A sample of the cell's, the same on all of its ranks."""
        return int(self._indices[0])

    def samples_of(self, step: int) -> int:
        """Count this rank's samples of a step."""
        start, stop = self._share(step)
        return stop - start

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to draw; local, and to be called alike on all ranks of the cell.

        Another epoch starts at its first batch. The current one keeps its position, so that a loop that has been
        resumed may call this first thing, as usual.
        """
        self.at.choose(epoch)
        self._is_drawn = False

    def follow(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the rest of the epoch and count what the loop takes; then go on to the next epoch.

        A loader with workers draws ahead: what it has drawn says nothing about what was trained on. This counts where
        the loop takes a batch, so ``state_dict()`` is right from the batch's optimizer step until the next batch is
        taken. A loop that was left by ``break`` goes on where it stopped. Wrap the outermost iterable, such as a
        prefetcher around the loader.

        :param loader: The ``DataLoader`` of this sampler, or what is around it, or the sampler itself.
        :yield: The loader's batches.
        :raises StateError: if the loader yields another number of batches than the epoch has left, as one does that
            does not draw from this sampler.
        """
        self._is_followed = True
        self._is_drawn = False
        knob = self._knob.format(self.batch_size)
        try:
            for batch in loader:
                if self.at.batches == self.steps:
                    raise StateError(f"the loader yields more than the {self.steps} batches of the epoch; {knob}")
                self.at.take()
                yield batch
            if self.at.batches != self.steps:
                raise StateError(f"the loader ended at {self.at.batches} of {self.steps} batches; {knob}")
        finally:
            self._is_followed = False
        self.set_epoch(self.at.epoch + 1)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return where the training loop stands; local, and the same on all ranks of the cell.

        :param consumed: Batches of this epoch that the loop has taken, those before a resume among them. ``None`` takes
            what :meth:`follow` has counted.
        :return: Numbers and strings only; for :meth:`load_state_dict`.
        :raises StateError: if batches were drawn that :meth:`follow` has not counted, and nothing else says how many.
        :raises ConfigError: if ``consumed`` is not a number of batches of an epoch.
        """
        if consumed is None:
            if self._is_drawn:
                raise StateError(
                    f"epoch {self.at.epoch} was drawn from, but how far the loop got is not known (loaders draw "
                    "ahead); iterate over sampler.follow(loader), or give state_dict(consumed=...)"
                )
            consumed = self.at.batches
        return {**self.at.state_dict(), "position": checked_batches(consumed, self.steps), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a loop stood; local, and to be called on all ranks of the cell, before iterating.

        The batches that follow are those that would have followed without a stop. The cell may have another number of
        ranks, if ``batch_size`` changes with it: then the steps that follow are the same, shared out anew.

        :param state: What :meth:`state_dict` returned on a rank of this cell.
        :raises ConfigError: if the state is of other data, another shuffling, or other steps than this sampler's.
        """
        check_identity("sampler", state, self._identity(), *EpochPosition.NAMES, of_steps=("samples_a_step",))
        self.at.load_state_dict(state, self.steps)
        self._is_drawn = False

    # Steps ------------------------------------------------------------------------------------------------------------

    _knob: str
    """What to check where a loader does not fit; takes the batch size"""
    _spread_knob: str
    """What to change where a step has fewer samples than ranks"""

    @abstractmethod
    def _step(self, step: int) -> tuple[int, int]:
        """Return where a step's samples start and stop in the order, over all ranks of the cell."""

    def draw(self) -> Iterator[Indices]:
        """Start to draw this rank's batches, from the position to the end of the epoch; local.

        :return: The samples of each batch.
        :raises StateError: if the epoch has been drawn, and neither :meth:`set_epoch` nor :meth:`follow` followed.
        """
        if not self._is_followed:
            if self._is_drawn and self._is_shuffled:
                raise StateError(
                    f"epoch {self.at.epoch} is drawn a second time, in the same order; call set_epoch before each "
                    "epoch, or iterate over sampler.follow(loader), which does"
                )
            self._is_drawn = True
        while self._meetings:
            meeting, layout = self._meetings.pop()
            meeting.compare(FirstSamples(layout=layout))
        order = self._indices
        if self._is_shuffled:
            order = order[Draws(self._seed, SHUFFLING, self.cell, self.at.epoch).permutation(len(order))]
        order = np.resize(order, self.samples)  # a longer one begins again
        return (order[slice(*self._share(step))] for step in range(self.at.batches, self.steps))

    def _meetings_of(self, part: Partition | npt.ArrayLike, state: Placed | DataPlace) -> list[tuple[Meeting, str]]:
        """Return who must draw from the same samples in the same way, and what they compare before they first draw."""
        layout_text = ", ".join(f"{name} {str(value)[:12]}" for name, value in self._identity().items())
        layout = f"{len(self._indices)} samples ({layout_text})"
        meetings = [(Meeting(state, type(self).__name__, over_cells=False, advice=ADVICE_CELL), layout)]
        if isinstance(part, Partition):
            parts = f"a partition of {part.samples} samples with digest {part.digest[:12]}"
            meeting = Meeting(
                state,
                "partition",
                over_cells=True,
                advice=ADVICE_PARTS,
                # Not the seed: parts that were dealt out by another one in each cell must be found.
                kind=f"{type(self).__name__} {self.batch_size}",
                length=part.samples,
            )
            meetings.append((meeting, parts))
        return [(meeting, text) for meeting, text in meetings if meeting.is_needed]

    def _share(self, step: int) -> tuple[int, int]:
        """Return where this rank's samples of a step start and stop in the order."""
        start, stop = self._step(step)
        first, last = even_cut(stop - start, self._places, self._place)
        return start + first, start + last

    def _check_steps(self) -> None:
        """Refuse what would leave a rank without a batch while others have one: their collectives would not meet."""
        if not self.steps:
            raise ConfigError(
                f"cell {self.cell} has {len(self._indices)} samples, less than a step of {self.batch_size} on each of "
                f"{self._places} ranks; give it more, a smaller batch_size, or drop_last=False"
            )
        start, stop = self._step(self.steps - 1)
        if stop - start < self._places:
            raise ConfigError(
                f"a step of cell {self.cell} has {stop - start} samples for {self._places} ranks ({self.steps} steps "
                f"of {len(self._indices)} samples, batch_size {self.batch_size}); {self._spread_knob}"
            )

    def _identity(self) -> dict[str, Any]:
        """Return what the batches of an epoch depend on."""
        return {
            "kind": type(self).__name__,
            "cell": self.cell,
            # Not both numbers: other ranks that share the same steps out may go on.
            "samples_a_step": self.batch_size * self._places,
            "seed": self._seed,
            "is_shuffled": self._is_shuffled,
            "tail": self._tail,
            "data": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._indices.astype("<i8").tobytes()).hexdigest()


class CellBatchSampler(CellOrder[list[int]]):
    """Yield one rank's batches of its cell's samples: ``DataLoader(dataset, batch_sampler=...)``.

    The steps of an epoch, and the ranks' batches in each, differ in size by one sample at most, none has more than
    ``batch_size``, and every sample of the cell is in one batch of one rank. So an epoch has exactly as many samples as
    the cell (a weighted mean over cells needs true counts, and so does accuracy), and no step is much smaller than the
    others.

    Local. Parameters and rules are those of :class:`CellOrder`.
    """

    _knob = "is this sampler its batch_sampler?"
    _spread_knob = "give it more samples, or drop_last=True or is_padded=True"

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches from the position to the end of the epoch."""
        return (batch.tolist() for batch in self.draw())

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self.steps

    def _step(self, step: int) -> tuple[int, int]:
        return even_cut(self.samples, self.steps, step)


class CellSampler(CellOrder[int]):
    """Yield one rank's samples of its cell one by one: ``DataLoader(dataset, batch_size=b, sampler=...)``.

    For what makes its own batches. The same as :class:`CellBatchSampler`, except that all batches are full but the
    last, since the loader cuts them. A last step with fewer samples than ranks would be missing on some, so it is
    refused; :class:`CellBatchSampler` would spread it.

    Local. Parameters and rules are those of :class:`CellOrder`; ``batch_size`` is the loader's.
    """

    _knob = "is this sampler its sampler, with batch_size={}?"
    _spread_knob = "take CellBatchSampler, which spreads them, or drop_last=True or is_padded=True"

    def __iter__(self) -> Iterator[int]:
        """Draw the samples from the position to the end of the epoch."""
        batches = self.draw()
        return (index for batch in batches for index in batch.tolist())

    def __len__(self) -> int:
        """Count this rank's samples of a whole epoch."""
        start, stop = self._share(self.steps - 1)
        return (self.steps - 1) * self.batch_size + stop - start

    def _step(self, step: int) -> tuple[int, int]:
        per_step = self.batch_size * self._places
        return step * per_step, min((step + 1) * per_step, self.samples)


def _indices_of(part: Partition | npt.ArrayLike, cells: int, cell: int) -> Indices:
    """Return the cell's samples in the order in which they were given."""
    if isinstance(part, Partition):
        if part.cells != cells:
            raise ConfigError(
                f"the partition is for {part.cells} cells, but there are {cells}; make it for state.cells, which "
                "counts cells that are jobs of their own, too"
            )
        if empty := [number for number, mine in enumerate(part.parts) if not len(mine)]:
            # Raised by all cells: the others would wait for these at the next round.
            raise ConfigError(f"cell {empty[0]} has no samples to draw; give it some (minimum= in the partition)")
        indices = part.parts[cell]
    else:
        indices = index_array("part", part)
    if not len(indices):
        raise ConfigError(f"cell {cell} has no samples to draw; give it some")
    return indices


def check_identity(
    what: str, state: Mapping[str, Any], mine: Mapping[str, Any], *others: str, of_steps: Collection[str] = ()
) -> None:
    """Raise where a saved state lacks one of the names, or is of other batches than those of this identity.

    ``of_steps`` are those that other ranks have otherwise. OtherStepsError is raised where nothing else differs.
    """
    for name in (*others, *mine):
        if name not in state:
            raise ConfigError(f"the {what}'s state lacks {name!r}; give what state_dict returned")
    for name in sorted(mine, key=lambda name: name in of_steps):
        if state[name] != mine[name]:
            kind = OtherStepsError if name in of_steps else ConfigError
            raise kind(
                f"the {what}'s state was saved with {name} {state[name]!r}, but this one has {mine[name]!r}; make it "
                f"as it was, or start epoch {state['epoch']} anew with set_epoch (or experiment.reset: true)"
            )


def even_cut(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return where one of so many parts of ``range(total)`` starts and stops; they differ by one at most."""
    size, larger = divmod(total, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)
