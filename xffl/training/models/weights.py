"""Weights of a sharded model as safetensors files: read by each rank its part, and written as transformers reads them.

They are read by torch's reader of Hugging Face's format, but not written by its ``HuggingFaceStorageWriter``: without
``save_distributed`` that needs the whole model on one rank (measured for 640 MB over two ranks: 13.4 s and 850 MB of
memory more, here 7.9 s and 257 MB), with it all ranks must share a file system on which the shards are written, read
and written again (10.9 s).
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from xffl.aggregation.engine.planning.tensors import tensors_of, ties_of
from xffl.checkpoint.format import check_path, partial_folder, replace_folder, run_collectively, sync_all, this_cell
from xffl.checkpoint.opened import OpenFolder, read_again_if_replaced
from xffl.checks import shorten, shown
from xffl.distributed.agreement.consistency import run_on_all_ranks, sum_of_bits
from xffl.distributed.agreement.unequal_cells import find_unequal_cells
from xffl.distributed.collectives import Group
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import local_tensor, reshard
from xffl.errors import CheckpointError, ConfigError
from xffl.extras import optional_import
from xffl.files import naming_errors, write_whole
from xffl.json_text import JSON_LIMIT, parse_json
from xffl.parallel.axes.pipeline import PipelineModel
from xffl.reading import Fields

__all__ = [
    "INDEX",
    "SINGLE",
    "FileTensor",
    "adapted_layers",
    "agree_on_base",
    "bare_model",
    "file_tensors",
    "is_adapter",
    "load_weights",
    "local_indices",
    "new_folder",
    "package",
    "read_weights",
    "save_pretrained",
    "whole",
]

SINGLE = "model.safetensors"
"""The one file of a small model."""
INDEX = "model.safetensors.index.json"
"""The file that lists the tensors of each file, where there are several."""
COPY_AGAIN = "copy the model's files again"
MOST_TENSORS = 10**6
"""Tensors that an index lists at most"""
EXTRAS = {"transformers": "hf", "huggingface_hub": "hf", "safetensors": "hf", "peft": "lora"}

ADAPTERS = frozenset({"lora_A", "lora_B"})
"""Parts of names that peft gives to what trains."""

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""

CHUNK = 2**20
"""Elements of one step of a checksum."""
MOVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files hold and that models calculate today; transformers leaves them aside, too."""
PATTERN = "model{suffix}.safetensors"
WRITTEN = ("config.json", "generation_config.json", "model*.safetensors", INDEX)
"""What :func:`save_pretrained` writes"""
ADVICE = "nothing was written; free the place, or give another folder"

_Files = dict[str, dict[str, "FileTensor"]]
"""The tensors of each file by their names, in the order in which they are written."""


# Reading --------------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, folder: str | os.PathLike[str], state: DistributedState) -> None:
    """Fill a sharded model with the weights of a folder.

    Collective over the job. Each rank reads from its own file system the slices that it holds, one tensor at a time,
    and converts them to the model's data type. Every tensor of the model must be in the files with its shape, and the
    files must hold no others; a tied tensor may be there under any of its names. Nothing moves but names and
    checksums: all cells must have read the same values (:func:`xffl.training.models.weights.agree_on_base`). Adapters
    and non-persistent buffers are left as they are.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned: plain, DDP, FSDP, HSDP, tensor-parallel.
    :param folder: A folder with ``model.safetensors``, or with several files and their index.
    :param state: The state that says where this rank stands.
    :raises CheckpointError: if the files cannot be read or do not fit, with the names; the same on all ranks. Before
        anything is changed, but for a file that fails while it is read.
    :raises ConfigError: if the cells have read different values, or an argument is invalid.
    """
    path = Path(str(folder))
    advice = "the model is filled in part; load it again"

    def load_one_save() -> None:
        with ExitStack() as stack:

            def check() -> _Reader:
                if not isinstance(folder, (str, os.PathLike)):
                    raise ConfigError(f"folder must be the path of the model's files, got {folder!r}")
                return _open(model, Path(folder), stack)

            reader = run_collectively(
                "comparing weights", act=check, path=path, advice="nothing was loaded", show=str, world=state.job_group
            )
            run_collectively("reading weights", lambda: _fill(model, reader), path, advice, world=state.job_group)

    read_again_if_replaced(load_one_save)
    agree_on_base(model, state, only_frozen=False)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Do what :func:`load_weights` does for a model of this process alone; local."""

    def read_one_save() -> None:
        with ExitStack() as stack:
            _fill(model, _open(model, folder, stack))

    read_again_if_replaced(read_one_save)


def _open(model: nn.Module, folder: Path, stack: ExitStack) -> _Reader:
    """Open a folder of weights until the end of ``stack``, and compare its tensors with the model."""
    try:
        source = stack.enter_context(OpenFolder(folder, (SINGLE, INDEX)))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; give a folder with weights") from None
    with source.noticing_replacement():
        reader = _Reader(source)
        _check(model, reader)
        return reader


class _ListedFiles(FileSystem):
    """A file system that lists the given files only."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files = list(files)

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [os.path.join(path, file) for file in self._files]


class _Reader(HuggingFaceStorageReader):
    """Torch's reader, of those tensors alone that the folder's index lists: torch reads all files that it finds.

    The headers are read when it is made, the values when they are asked for, both from the folder that is held open.
    """

    def __init__(self, source: OpenFolder) -> None:
        super().__init__(str(source.descriptor_path))
        self.source = source
        self.folder = source.name
        folder = self.folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        storage: dict[MetadataIndex, Any] = {}
        for file, names in _files_of(source).items():
            self.fs = _ListedFiles([file])
            try:
                part = super().read_metadata()
            except (OSError, KeyError, ValueError, TypeError, package("safetensors").SafetensorError) as error:
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


def _files_of(source: OpenFolder) -> dict[str, set[str] | None]:
    """Return a folder's files, and the names that each must hold where an index lists them."""
    folder = source.name
    path = folder / INDEX
    if not source.has(INDEX):
        if not source.has(SINGLE):
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; give a folder with weights")
        return {SINGLE: None}
    files: dict[str, set[str]] = {}
    try:
        listed = Fields(
            parse_json(source.read_bytes(INDEX, JSON_LIMIT)), str(path), error=CheckpointError, hint=COPY_AGAIN
        )
        for name, file in listed.mapping_of("weight_map", MOST_TENSORS, Fields.text, may_be_empty=False).items():
            if os.path.basename(file) != file or file in (".", ".."):
                raise ValueError(f"{shown(name)} lies outside the folder")
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {COPY_AGAIN}") from error
    return dict(files)


def _check(model: nn.Module, reader: _Reader) -> None:
    """Raise where the files do not hold what the model has."""
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "of another kind": []}
    expected: set[str] = set()
    for one in file_tensors(model):
        expected |= set(one.names)
        present = [name for name in one.names if name in reader.tensors]
        if not present:
            problems["missing"].append(one.name)
        shape, dtype = tuple(one.tensor.shape), one.tensor.dtype
        for name in present:
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
    with reader.source.noticing_replacement():
        _fill_from(model, reader)
    # Other ranks may have opened the folder after it was replaced; where that did not happen by now, all have the same.
    reader.source.check_not_replaced()


def _fill_from(model: nn.Module, reader: _Reader) -> None:
    loaded = [
        ([name for name in one.names if name in reader.tensors], one.tensor.detach()) for one in file_tensors(model)
    ]
    reader.read({names[0]: tensor for names, tensor in loaded})
    for (first, *others), tensor in loaded:
        for other in others:  # of tied tensors
            again = torch.empty_like(tensor)
            reader.read({other: again})
            if not torch.equal(local_tensor(again), local_tensor(tensor)):
                raise CheckpointError(
                    f"{first!r} and {other!r} are one tied tensor of the model but differ in {reader.folder}; set "
                    "tie_word_embeddings=False in its configuration"
                )


# Writing --------------------------------------------------------------------------------------------------------------


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], state: DistributedState, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write a model as a folder that transformers' ``from_pretrained`` reads: safetensors, configuration, generation.

    Collective over the job. The ranks of cell 0 gather one tensor after the other, and rank 0 writes them, so it
    holds at most the tensors of one file; the other cells wait. Adapters are added to the weights that they belong to,
    as ``merge_and_unload`` does; the model stays as it is. A folder of this name is replaced once the new one is
    finished, if nothing else is in it.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned; a model of transformers, or of peft.
    :param folder: The folder to write, on rank 0's file system.
    :param state: The state that says where this rank stands.
    :param max_shard_size: Bytes of a file, such as ``"5GB"``.
    :raises CheckpointError: if it cannot be written; on all ranks.
    :raises ConfigError: if an argument is invalid; on all ranks.
    """

    def check() -> tuple[Path, int, Any, _Files]:
        return check_path(folder), this_cell(state).number, _base_of(model), _plan(model, max_shard_size)

    def show(made: tuple[Path, int, Any, _Files]) -> str:
        names = {file: list(tensors) for file, tensors in made[3].items()}
        return f"{made[0]}: {names}"

    path, number, base, files = run_collectively(
        "comparing the model",
        act=check,
        path=Path(str(folder)),
        advice=ADVICE,
        show=show,
        world=state.job_group,
    )

    def write() -> None:
        if number == 0:
            _write(model, base, files, target)

    with new_folder(path, WRITTEN, is_writer=state.is_first_of_job, world=state.job_group) as target:
        run_collectively("writing the model", write, path, ADVICE, world=state.job_group)


@contextmanager
def new_folder(path: Path, files: Sequence[str], *, is_writer: bool, world: Group | None) -> Iterator[Path | None]:
    """Yield a folder to write into, ``None`` on ranks that do not write; it gets its name once all of it is written.

    Entering and leaving it is collective over ``world``, all ranks of the job: each step takes place or fails on all of
    them. A folder of this name is replaced if it has only files of these patterns.
    """
    with ExitStack() as stack:

        def begin() -> Path | None:
            if not is_writer:
                return None
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file; give the name of a folder")
            there = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
            if kept := [name for name in there if not any(fnmatch(name, pattern) for pattern in files)]:
                raise ConfigError(
                    f"{path} holds {kept[0]!r}, which is not written here and would be lost; give another folder"
                )
            return stack.enter_context(partial_folder(path))

        partial = run_collectively("making a folder", begin, path, ADVICE, world=world)
        yield partial

        def publish() -> None:
            if partial is not None:
                sync_all(partial)
                replace_folder(path)

        run_collectively("naming the folder", publish, path, ADVICE, world=world)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, without gradient and on the device; collective over the mesh that it is cut over."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _base_of(model: nn.Module) -> Any:
    """Return the model of transformers that peft may have wrapped."""
    inner: Any = bare_model(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if not isinstance(base, package("transformers").PreTrainedModel):
        raise ConfigError(f"model must be a model of transformers, got a {type(base).__name__}")
    return base


def _plan(model: nn.Module, max_shard_size: int | str) -> _Files:
    """Deal the tensors out to files, as transformers does."""
    reshard(model)
    tensors = {one.name: one for one in file_tensors(model)}
    _check_adapters(model, tensors)
    split = package("huggingface_hub").split_state_dict_into_shards_factory
    try:
        dealt = split(
            {name: one.tensor for name, one in tensors.items()},
            get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
            filename_pattern=PATTERN,
            max_shard_size=max_shard_size,
        )
    except ValueError as wrong:
        raise ConfigError(
            f"max_shard_size must be the size of a file, such as '5GB', got {max_shard_size!r}: {wrong}"
        ) from wrong
    return {file: {name: tensors[name] for name in names} for file, names in dealt.filename_to_tensors.items()}


def _check_adapters(model: nn.Module, tensors: Mapping[str, FileTensor]) -> None:
    """Raise where adapters cannot be added to the weights one by one."""
    strange = [
        name
        for name, _ in model.named_parameters()
        if any(part.startswith("lora_") for part in name.split("."))
        and not (is_adapter(name) and name.endswith("weight"))
    ]
    if strange:
        raise ConfigError(
            f"{strange[0]!r} is not an adapter of add_lora; call merge_and_unload() of peft before the model is sharded"
        )
    tied = {id(one.tensor): one for one in tensors.values() if len(one.names) > 1}
    for layer in adapted_layers(model).values():
        if (one := tied.get(id(layer.base_layer.weight))) is not None:
            raise ConfigError(
                f"{', '.join(one.names)} are one tied tensor, to which the adapters of one layer cannot be added; "
                "leave the layer out of target_modules, or call save_adapters"
            )


@torch.no_grad()
def _write(model: nn.Module, base: Any, files: _Files, folder: Path | None) -> None:
    """Gather the tensors one by one; where there is a folder, write them."""
    failed: Exception | None = None
    adapted = adapted_layers(model)
    for file, tensors in files.items():
        whole_tensors: dict[str, torch.Tensor] = {}
        for name, one in tensors.items():
            values = _merged(one, adapted)
            if folder is not None:
                whole_tensors[name] = values.cpu().contiguous()
        if folder is not None and failed is None:
            try:
                with naming_errors(folder / file):
                    package("safetensors.torch").save_file(whole_tensors, folder / file, metadata={"format": "pt"})
            except Exception as error:  # noqa: BLE001 - raised later: the others gather with this rank
                failed = error
    if failed is not None:
        raise failed
    if folder is None:
        return
    if len(files) > 1:
        where = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(one.tensor.numel() * one.tensor.itemsize for tensors in files.values() for one in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")
    config = copy.deepcopy(base.config)
    config.use_cache = True  # causal_lm has switched it off for training
    # FSDP2 has put another class in front of the model's.
    config.architectures = [next(kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))]
    config.dtype = next(base.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)


def _merged(one: FileTensor, adapted: Mapping[int, Any]) -> torch.Tensor:
    """Return all of a tensor, with the adapters of the layer that it is the weight of."""
    values = whole(one.tensor)
    layer = adapted.get(id(one.module))
    if layer is None or layer.merged or one.leaf != "weight":
        return values
    for name in layer.active_adapters:
        first, second = (whole(factors[name].weight).float() for factors in (layer.lora_A, layer.lora_B))
        change = (second @ first) * layer.scaling[name]
        values = values + (change.T if layer.fan_in_fan_out else change)
    return values.to(one.tensor.dtype)


def package(name: str) -> Any:
    """Import a package of the extras ``hf`` and ``lora``, or a module of one; local."""
    top = name.partition(".")[0]
    with optional_import(EXTRAS[top], f"Hugging Face models need {top}"):
        return importlib.import_module(name)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the model that belongs into files.

    ``names`` are what files may call it, several where it is tied; ``name`` is the first of them. The tensor lies at
    ``leaf`` of ``module``.
    """

    name: str
    names: tuple[str, ...]
    module: nn.Module
    leaf: str
    tensor: torch.Tensor


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model that DDP or ``torch.compile`` has wrapped; raise for a pipeline's stage, which lacks tensors."""
    if isinstance(model, PipelineModel):
        raise ConfigError("files of Hugging Face hold whole models, which no stage of a pipeline has; use pp=1")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    compiled: nn.Module = getattr(inner, "_orig_mod", inner)
    return compiled


def is_adapter(name: str) -> bool:
    """Tell whether a tensor's name is one that peft gives to parts of adapters."""
    return not ADAPTERS.isdisjoint(name.split("."))


def file_tensors(model: nn.Module) -> Iterator[FileTensor]:
    """Yield the tensors that belong into files, each once: no non-persistent buffers, no adapters; local."""
    inner = bare_model(model)
    ties = ties_of(inner)
    for name, module, leaf, tensor in tensors_of(inner):
        if leaf in module._non_persistent_buffers_set or is_adapter(name):
            continue
        names = tuple(other.removeprefix(PREFIX).replace(".base_layer.", ".") for other in ties[id(tensor)])
        yield FileTensor(names[0], names=names, module=module, leaf=leaf, tensor=tensor)


def adapted_layers(model: nn.Module) -> dict[int, Any]:
    """Return peft's layers with adapters, by the id of the layer inside, whose weights they change; local."""
    layers = (module for module in bare_model(model).modules() if hasattr(module, "lora_A"))
    return {id(layer.base_layer): layer for layer in layers}


def local_indices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, for each dimension, the ascending indices of the elements that this rank holds; nothing moves."""
    if not isinstance(tensor, DTensor):
        return tuple(torch.arange(size) for size in tensor.shape)
    mesh, found = tensor.device_mesh, []
    for dim, size in enumerate(tensor.shape):
        # Whichever way torch cuts a dimension, over one dimension of a mesh or over two in turn: its own function cuts
        # the indices here.
        line = torch.arange(size, device=mesh.device_type)
        line = line.view([size if axis == dim else 1 for axis in range(tensor.dim())])
        placements = [place if getattr(place, "dim", None) == dim else Replicate() for place in tensor.placements]
        part = distribute_tensor(line, mesh, placements, src_data_rank=None)
        found.append(part.to_local().flatten().cpu())
    return tuple(found)


@torch.no_grad()
def agree_on_base(model: nn.Module, state: DistributedState, *, only_frozen: bool = True) -> None:
    """Raise where the cells hold different weights under their adapters.

    Collective over the job; every rank reads its part of the weights once, and one number for each tensor and cell
    moves. Rounds leave frozen weights where they are, so cells that begin with others would average adapters that
    belong to different models, without any other sign.

    :param model: The model, sharded in any way.
    :param state: The state that says where this rank stands.
    :param only_frozen: Whether trainable weights may differ.
    :raises ConfigError: if two cells differ, with the first such tensor; on all ranks alike.
    """
    with run_on_all_ranks("base models", group=state.job_group) as share:
        cell = this_cell(state)
        reshard(model)
        tensors = [one for one in file_tensors(model) if not (only_frozen and one.tensor.requires_grad)]
        listed = "\n".join(f"{one.name} {tuple(one.tensor.shape)} {one.tensor.dtype}" for one in tensors)
        share(hashlib.sha256(listed.encode()).hexdigest())
    if not dist.is_initialized():
        return
    sums = [_checksum(one.tensor) if _counts(one.tensor, cell.place == 0) else 0 for one in tensors]
    unequal = find_unequal_cells(torch.tensor(sums, dtype=torch.int64), cell.number, len(cell.sizes), cell.world)
    if unequal is not None:
        index, others = unequal
        raise ConfigError(
            f"cells {others} hold other values of {tensors[index].name!r} than cell 0, but all must train the same "
            "base model; give them the same files, or the same seed"
        )


def _counts(tensor: torch.Tensor, is_first: bool) -> bool:
    """Tell whether this rank's part counts: one of those that hold the same elements."""
    if not isinstance(tensor, DTensor):
        return is_first
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "a rank belongs to the mesh of its tensors"
    return all(place == 0 for place, cut in zip(at, tensor.placements, strict=True) if cut.is_replicate())


def _checksum(tensor: torch.Tensor) -> int:
    """Add up the bits of this rank's elements, each times a factor for its place in the whole tensor."""
    part, shape, indices = local_tensor(tensor), tuple(tensor.shape), local_indices(tensor)
    if not part.numel():
        return 0
    if part.is_complex():  # as pairs
        part, shape, indices = torch.view_as_real(part.resolve_conj()), (*shape, 2), (*indices, torch.arange(2))
    places = torch.zeros((), dtype=torch.int64)
    inner = 1
    # Places of one row of the first dimension; the rows themselves come in chunks.
    for dim in range(len(shape) - 1, 0, -1):
        line = indices[dim] * inner
        places = line.view(-1, *[1] * (len(shape) - 1 - dim)) + places
        inner *= shape[dim]
    rows = indices[0] * inner if len(shape) else torch.zeros(1, dtype=torch.int64)
    flat, places = part.reshape(len(rows), -1), places.reshape(1, -1)
    step = max(1, CHUNK // max(1, places.numel()))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, len(rows), step):
        at = (rows[start : start + step, None] + places).to(part.device)
        total += sum_of_bits(flat[start : start + step], at)
    return int(total)
