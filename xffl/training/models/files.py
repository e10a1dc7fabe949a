"""The safetensors files of a folder, read slice by slice."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from xffl.errors import CheckpointError
from xffl.training.models.held import local_part, places_held
from xffl.training.models.packages import package

__all__ = ["INDEX", "SINGLE", "WeightFiles", "has_weights"]

SINGLE = "model.safetensors"
"""The one file of a small model."""
INDEX = "model.safetensors.index.json"
"""Says which file holds which tensor, where there are several."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls the types that models are kept in."""


def has_weights(folder: Path) -> bool:
    """Tell whether a folder holds the weights of a model; local.

    :param folder: The folder.
    :return: Whether there is a file of them, or the index of several.
    """
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


class WeightFiles:
    """The tensors of a folder, by name. Headers are read at once, values where they are asked for.

    A context manager, which closes the files.

    :param folder: A folder with ``model.safetensors``, or with several files and ``model.safetensors.index.json``.
    :raises CheckpointError: if the files cannot be read, or are not those that the index tells of.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._open = ExitStack()
        self._holders: dict[str, Any] = {}
        try:
            self._read_headers()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._holders.clear()
        self._open.close()

    def __str__(self) -> str:
        return "\n".join(f"{name} {self.shapes[name]} {self.dtypes[name]}" for name in sorted(self.shapes))

    def _read_headers(self) -> None:
        safetensors = package("safetensors")
        for file, expected in self._parts().items():
            path = self.folder / file
            try:
                holder = self._open.enter_context(safetensors.safe_open(path, framework="pt", device="cpu"))
            except (OSError, safetensors.SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}; copy the model's files again") from error
            names = set(holder.keys())
            if expected is not None and (lost := sorted(expected - names)):
                raise CheckpointError(f"{path} lacks {lost[0]!r}, which {INDEX} looks for there; copy the files again")
            for name in sorted(names if expected is None else expected):
                told = holder.get_slice(name)
                kind = told.get_dtype()
                if kind not in DTYPES:
                    raise CheckpointError(f"{path} holds {name!r} as {kind}, which is not read here; convert the file")
                self._holders[name] = holder
                self.shapes[name], self.dtypes[name] = tuple(told.get_shape()), DTYPES[kind]

    def _parts(self) -> dict[str, set[str] | None]:
        """Return the files, and what each must hold where an index says so."""
        path = self.folder / INDEX
        if not path.is_file():
            if not (self.folder / SINGLE).is_file():
                raise CheckpointError(f"{self.folder} holds neither {SINGLE} nor {INDEX}; give a folder with weights")
            return {SINGLE: None}
        try:
            told = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            parts: dict[str, set[str] | None] = {}
            for name, file in told.items():
                if os.path.basename(file) != file:
                    raise ValueError(f"{name!r} lies outside the folder")
                (parts.setdefault(file, set()) or parts[file]).add(name)  # type: ignore[union-attr]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; copy the model's files again") from error
        return parts

    def fill(self, tensor: torch.Tensor, name: str) -> None:
        """Copy this rank's elements of a tensor from the files, and no others; local.

        :param tensor: A plain tensor or a DTensor, of the shape in the files.
        :param name: Its name there.
        """
        part = local_part(tensor)
        for box, values in self._pieces(tensor, name):
            part[box].copy_(values)

    def is_equal(self, tensor: torch.Tensor, name: str) -> bool:
        """Tell whether this rank's elements of a tensor are those of the files, in the tensor's data type; local.

        :param tensor: As for :meth:`fill`.
        :param name: Its name in the files.
        :return: Whether they are.
        """
        part = local_part(tensor)
        return all(torch.equal(part[box], values.to(part)) for box, values in self._pieces(tensor, name))

    def _pieces(self, tensor: torch.Tensor, name: str) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Yield the boxes of this rank's part, and their values."""
        holder = self._holders[name]
        if tensor.dim() == 0:
            yield (), holder.get_tensor(name)
            return
        told = holder.get_slice(name)
        for runs in itertools.product(*map(_runs, places_held(tensor))):
            # In each dimension: where the run begins in this rank's part, where in the whole, and how long it is.
            here = tuple(slice(start, start + length) for start, _, length in runs)
            there = tuple(slice(place, place + length) for _, place, length in runs)
            yield here, told[there]


def _runs(places: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of indices that follow each other: position, first index, length."""
    if not len(places):
        return []
    starts = [0, *(torch.nonzero(places.diff() != 1).flatten() + 1).tolist()]
    ends = [*starts[1:], len(places)]
    return [(start, int(places[start]), end - start) for start, end in zip(starts, ends, strict=True)]
