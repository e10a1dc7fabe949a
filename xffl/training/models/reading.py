"""Reading of safetensors files into a sharded model, by torch's reader of Hugging Face's format: each rank its part."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from xffl.checkpoint.format import run_collectively
from xffl.checks import shorten
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import reshard
from xffl.errors import CheckpointError, ConfigError
from xffl.training.models.tensors import INDEX, SINGLE, agree_on_base, bare_model, file_tensors, local_part, package

__all__ = ["load_weights", "read_weights"]

MOVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files hold and that models calculate today; transformers leaves them aside, too."""


def load_weights(model: nn.Module, folder: str | os.PathLike[str], state: DistributedState) -> None:
    """Fill a sharded model with the weights of a folder.

    Collective over the world. Each rank reads from its own file system the slices that it holds, one tensor at a time,
    and converts them to the model's data type. Every tensor of the model must be in the files with its shape, and the
    files must hold no others; a tied tensor may be there under any of its names. Nothing moves but names and
    checksums: all cells must have read the same values (:func:`xffl.training.models.tensors.agree_on_base`). Adapters
    and non-persistent buffers are left as they are.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned: plain, DDP, FSDP, HSDP, tensor-parallel.
    :param folder: A folder with ``model.safetensors``, or with several files and their index.
    :param state: The state that says where this rank stands.
    :raises CheckpointError: if the files cannot be read or do not fit, with the names; the same on all ranks. Before
        anything is changed, but for a file that fails while it is read.
    :raises ConfigError: if the cells have read different values, or an argument is invalid.
    """

    def check() -> _Reader:
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"folder must be the path of the model's files, got {folder!r}")
        reader = _Reader(Path(folder))
        _check(model, reader)
        return reader

    path = Path(str(folder))
    reader = run_collectively("comparing weights", check, path, "nothing was loaded", str)
    advice = "the model is filled in part; load it again"
    run_collectively("reading weights", lambda: _fill(model, reader), path, advice)
    agree_on_base(model, state, only_frozen=False)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Do what :func:`load_weights` does for a model of this process alone; local."""
    reader = _Reader(folder)
    _check(model, reader)
    _fill(model, reader)


class _ListedFiles(FileSystem):
    """A file system that lists the given files only."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files = list(files)

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [os.path.join(path, file) for file in self._files]


class _Reader(HuggingFaceStorageReader):
    """Torch's reader, of those tensors alone that the folder's index lists: torch reads all files that it finds.

    The headers are read when it is made, the values when they are asked for.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        storage: dict[MetadataIndex, Any] = {}
        for file, names in _files_of(folder).items():
            self.fs = _ListedFiles([file])
            try:
                part = super().read_metadata()
            except (OSError, KeyError, package("safetensors").SafetensorError) as error:
                what = f"unknown data type {error}" if isinstance(error, KeyError) else error
                raise CheckpointError(f"{folder / file} cannot be read: {what}; copy the files again") from error
            listed = part.state_dict_metadata if names is None else names
            if lost := sorted(set(listed) - set(part.state_dict_metadata)):
                raise CheckpointError(
                    f"{folder / file} lacks {lost[0]!r}, which {INDEX} lists there; copy the files again"
                )
            self.tensors |= {name: part.state_dict_metadata[name] for name in listed}  # type: ignore[misc]
            storage |= {index: value for index, value in part.storage_data.items() if index.fqn in listed}
        self._metadata = Metadata(dict(self.tensors), storage_data=storage)

    def read_metadata(self) -> Metadata:
        return self._metadata

    def __str__(self) -> str:
        """List names, shapes and data types, which all ranks must have read alike."""
        return "\n".join(f"{name} {one.size} {one.properties.dtype}" for name, one in sorted(self.tensors.items()))

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements of tensors from the files, and no others."""
        try:
            with warnings.catch_warnings():
                # Each rank reads on its own: names and shapes have been compared, and a tensor of a cell is not one of
                # the world.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(dict(tensors), storage_reader=self, no_dist=True)
        except CheckpointException as wrong:  # a BaseException
            error = next(iter(wrong.failures.values()))[0]
            raise CheckpointError(f"the weights in {self.folder} cannot be read: {error}; copy them again") from wrong


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """Return a folder's files, and the names that each must hold where an index lists them."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; give a folder with weights")
        return {SINGLE: None}
    files: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
            if os.path.basename(file) != file:
                raise ValueError(f"{name!r} lies outside the folder")
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy the model's files again") from error
    return dict(files)


def _check(model: nn.Module, reader: _Reader) -> None:
    """Raise where the files do not hold what the model has."""
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "of another kind": []}
    expected: set[str] = set()
    for one in file_tensors(model):
        expected |= set(one.names)
        found = [name for name in one.names if name in reader.tensors]
        if not found:
            problems["missing"].append(one.name)
        shape, dtype = tuple(one.tensor.shape), one.tensor.dtype
        for name in found:
            size, kind = tuple(reader.tensors[name].size), reader.tensors[name].properties.dtype
            if size != shape:
                problems["of another shape"].append(f"{name} {size}, in the model {shape}")
            elif kind.is_floating_point != dtype.is_floating_point:
                problems["of another kind"].append(f"{name} {kind}, in the model {dtype}")
    skipped = [*MOVED, *(getattr(bare_model(model), "_keys_to_ignore_on_load_unexpected", ()) or ())]
    extra = sorted(name for name in reader.tensors if name not in expected)
    problems["unexpected"] = [name for name in extra if not re.search("|".join(skipped), name)]
    texts = [f"{kind}: {shorten(names, 4)}" for kind, names in problems.items() if names]
    if texts:
        raise CheckpointError(
            f"the weights in {reader.folder} do not fit the model: {'; '.join(texts)}; nothing was loaded, give the "
            "folder of this model or the configuration that belongs to the folder"
        )


@torch.no_grad()
def _fill(model: nn.Module, reader: _Reader) -> None:
    reshard(model)
    found = [
        ([name for name in one.names if name in reader.tensors], one.tensor.detach()) for one in file_tensors(model)
    ]
    reader.read({names[0]: tensor for names, tensor in found})
    for (first, *others), tensor in found:
        for other in others:  # of tied tensors
            again = torch.empty_like(tensor)
            reader.read({other: again})
            if not torch.equal(local_part(again), local_part(tensor)):
                raise CheckpointError(
                    f"{first!r} and {other!r} are one tied tensor of the model but differ in {reader.folder}; set "
                    "tie_word_embeddings=False in its configuration"
                )
