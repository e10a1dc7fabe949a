"""A partition: which samples of a dataset belong to which cell."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xffl.errors import CheckpointError, ConfigError
from xffl.training.data.rng import Indices

__all__ = ["Partition", "label_codes"]


@dataclass(frozen=True, eq=False)
class Partition:
    """Index arrays over a dataset, one for each cell; no sample is in two of them.

    Two partitions are equal if they deal equally many samples alike, however they were made.

    :param parts: The samples of each cell, counted from 0. They are kept as sorted, read-only int64 arrays.
    :param samples: Length of the dataset.
    :param method: How the partition was made, for titles and records.
    :raises ConfigError: if there is no cell, an index is outside the dataset, or two are the same.
    """

    parts: tuple[Indices, ...]
    samples: int
    method: str = ""
    digest: str = field(init=False)
    """SHA-256 of the parts, as hexadecimal digits: the same on every machine, to compare ranks and runs."""

    def __post_init__(self) -> None:
        parts = tuple(_sorted_part(part, cell) for cell, part in enumerate(self.parts))
        if not parts:
            raise ConfigError("a partition of no cells says nothing; give one index array for each cell")
        owners = np.zeros(self.samples, dtype=np.int64)
        for cell, part in enumerate(parts):
            if len(part) and (part[0] < 0 or part[-1] >= self.samples):
                raise ConfigError(
                    f"cell {cell} has samples {part[0]} to {part[-1]}, but the dataset has {self.samples}; count from "
                    f"0 to {self.samples - 1}"
                )
            np.add.at(owners, part, 1)
        if len(owners) and owners.max() > 1:
            twice = int(owners.argmax())
            cells = [cell for cell, part in enumerate(parts) for index in part if index == twice]
            raise ConfigError(f"sample {twice} is dealt to cells {cells}; a sample belongs to one cell, once")
        hashed = hashlib.sha256(np.array([self.samples, len(parts)], dtype="<i8").tobytes())
        for part in parts:
            hashed.update(np.array([len(part)], dtype="<i8").tobytes() + part.astype("<i8").tobytes())
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "digest", hashed.hexdigest())

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Partition) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each cell."""
        return tuple(len(part) for part in self.parts)

    @property
    def unused(self) -> Indices:
        """The samples that no cell has, sorted."""
        is_used = np.zeros(self.samples, dtype=bool)
        for part in self.parts:
            is_used[part] = True
        return np.flatnonzero(~is_used).astype(np.int64, copy=False)

    def table(self, labels: npt.ArrayLike) -> Indices:
        """Count each cell's samples of each class.

        :param labels: The label of every sample of the dataset, 1-D, of any kind that can be sorted.
        :return: Counts, of shape (cells, classes); classes are the labels that occur, as ``numpy.unique`` sorts them.
        :raises ConfigError: if the labels are not one for each sample.
        """
        codes, classes = label_codes(labels, "labels")
        if len(codes) != self.samples:
            raise ConfigError(
                f"there are {len(codes)} labels, but the partition is of {self.samples} samples; give the labels of "
                "the dataset that it was made for"
            )
        return np.stack([np.bincount(codes[part], minlength=classes) for part in self.parts]).astype(np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the partition into a file; a reader finds the whole of it or nothing.

        Local: let one rank do it, and the others load the file behind a barrier.

        :param path: Where to write, such as ``parts.npz``; its folder exists.
        """
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(
                    file,
                    samples=np.array(self.samples, dtype="<i8"),
                    sizes=np.array(self.sizes, dtype="<i8"),
                    indices=np.concatenate(self.parts).astype("<i8"),
                    method=np.array(self.method),
                    digest=np.array(self.digest),
                )
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Partition:
        """Read a partition from a file; local.

        :param path: What :meth:`save` wrote.
        :return: The same partition.
        :raises ConfigError: if there is no such file.
        :raises CheckpointError: if the file holds no partition, or another one than was written.
        """
        if not Path(path).is_file():
            raise ConfigError(f"there is no partition file {str(path)!r}; give what Partition.save wrote")
        try:
            with np.load(path, allow_pickle=False) as file:
                ends = np.cumsum(file["sizes"])[:-1]
                parts = tuple(np.split(file["indices"], ends))
                found = cls(parts, int(file["samples"]), str(file["method"]))
                digest = str(file["digest"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            raise CheckpointError(f"{str(path)!r} holds no partition ({error}); make and save it again") from error
        if found.digest != digest:
            raise CheckpointError(f"the partition in {str(path)!r} is not the one that was saved; make it again")
        return found


def label_codes(labels: npt.ArrayLike, what: str) -> tuple[Indices, int]:
    """Give each value of an array its number in sorted order.

    :param labels: 1-D, of any kind that can be sorted.
    :param what: What the values are, for messages.
    :return: The number of each entry's value, from 0, and how many values there are.
    :raises ConfigError: if the array is not 1-D or cannot be sorted.
    """
    try:
        values: npt.NDArray[Any] = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of bf16 or with gradients; lists of lists
        raise ConfigError(f"{what} are no array ({error}); give one number or string for each sample") from error
    if values.ndim != 1:
        raise ConfigError(f"{what} of shape {values.shape} are not one for each sample; give a 1-D array")
    try:
        classes, codes = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise ConfigError(f"{what} cannot be sorted ({error}); give numbers or strings, not a mixture") from error
    return codes.astype(np.int64, copy=False), len(classes)


def _sorted_part(part: npt.ArrayLike, cell: int) -> Indices:
    given: npt.NDArray[Any] = np.asarray(part)
    if given.ndim != 1 or (len(given) and not np.issubdtype(given.dtype, np.integer)):
        raise ConfigError(
            f"the part of cell {cell} is {given.dtype} of shape {given.shape}; give a 1-D array of whole numbers"
        )
    kept = np.sort(given.astype(np.int64))
    kept.flags.writeable = False
    return kept
