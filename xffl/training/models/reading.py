"""Weights from safetensors files into a model that is spread: each rank reads what it holds."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from xffl.checkpoint.format import run_collectively
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import reshard
from xffl.errors import CheckpointError, ConfigError
from xffl.training.models.base import agree_on_base
from xffl.training.models.files import WeightFiles, has_weights
from xffl.training.models.held import Held, bare_model, held_tensors

__all__ = ["has_weights", "load_weights", "read_weights"]

SHOWN = 4
"""Names that a message writes out."""

MOVED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files hold and that models calculate today; transformers leaves them aside, too."""


def load_weights(model: nn.Module, folder: str | os.PathLike[str], state: DistributedState) -> None:
    """Fill a model that is spread with the weights of a folder.

    Collective over the world. Each rank reads from its own file system the slices that it holds, one tensor at a time,
    and converts them to the model's data type. Every tensor of the model must be in the files with its shape, and the
    files must hold no others; a tied tensor may be there under any of its names. Nothing moves but names and
    checksums: all cells must have read the same values (:func:`xffl.training.models.base.agree_on_base`). Adapters and
    non-persistent buffers are left as they are.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned: plain, DDP, FSDP, HSDP, tensor-parallel.
    :param folder: A folder with ``model.safetensors``, or with several files and their index.
    :param state: The state that says where this rank stands.
    :raises CheckpointError: if the files cannot be read or do not fit, with the names; the same on all ranks. Before
        anything is changed, but for a file that fails while it is read.
    :raises ConfigError: if the cells have read different values, or an argument cannot be meant.
    """
    files: list[WeightFiles] = []

    def look() -> WeightFiles:
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"folder {folder!r} is no path; give the folder of the model's files")
        files.append(WeightFiles(Path(folder)))
        _check(model, files[0])
        return files[0]

    path = Path(str(folder))
    try:
        run_collectively("comparing weights", look, path, "nothing was loaded", str)
        run_collectively(
            "reading weights", lambda: _fill(model, files[0]), path, "the model is filled in part; load it again"
        )
    finally:
        for opened in files:
            opened.__exit__()
    agree_on_base(model, state, only_frozen=False)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Do what :func:`load_weights` does for a model of this process alone; local.

    :param model: The model.
    :param folder: As there.
    :raises CheckpointError: as there.
    """
    with WeightFiles(folder) as files:
        _check(model, files)
        _fill(model, files)


def _check(model: nn.Module, files: WeightFiles) -> None:
    """Raise where the files do not hold what the model has."""
    tensors = list(held_tensors(model))
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "of another kind": [], "unexpected": []}
    for held in tensors:
        found = _names_in(held, files)
        if not found:
            problems["missing"].append(held.name)
        for name in found:
            shape, dtype = files.shapes[name], files.dtypes[name]
            if shape != tuple(held.tensor.shape):
                problems["of another shape"].append(f"{name} {shape}, in the model {tuple(held.tensor.shape)}")
            elif dtype.is_floating_point != held.tensor.dtype.is_floating_point:
                problems["of another kind"].append(f"{name} {dtype}, in the model {held.tensor.dtype}")
    wanted = {name for held in tensors for name in held.names}
    ignored = re.compile(
        "|".join([*MOVED, *(getattr(bare_model(model), "_keys_to_ignore_on_load_unexpected", ()) or ())])
    )
    problems["unexpected"] = sorted(name for name in files.shapes if name not in wanted and not ignored.search(name))
    told = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if told:
        raise CheckpointError(
            f"the weights in {files.folder} do not fit the model: {'; '.join(told)}; nothing was loaded, give the "
            "folder of this model or the configuration that belongs to the folder"
        )


@torch.no_grad()
def _fill(model: nn.Module, files: WeightFiles) -> None:
    reshard(model)
    for held in held_tensors(model):
        first, *others = _names_in(held, files)
        files.fill(held.tensor, first)
        for other in others:
            if not files.is_equal(held.tensor, other):
                raise CheckpointError(
                    f"{first!r} and {other!r} are one tied tensor of the model but differ in {files.folder}; set "
                    "tie_word_embeddings=False in its configuration"
                )


def _names_in(held: Held, files: WeightFiles) -> list[str]:
    return [name for name in held.names if name in files.shapes]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
