"""A model that is spread, written as a folder that transformers reads."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from xffl.checkpoint.format import check_path, replace_folder, run_collectively, sync_all, temporary_path, this_cell
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import reshard
from xffl.errors import ConfigError
from xffl.training.models.files import INDEX
from xffl.training.models.held import Held, adapted_layers, bare_model, held_tensors, is_adapter
from xffl.training.models.packages import package

__all__ = ["NewFolder", "save_pretrained", "whole"]

FILES = "model{suffix}.safetensors"
WRITTEN = ("config.json", "generation_config.json", "model*.safetensors", INDEX)
"""What :func:`save_pretrained` writes"""
ADVICE = "nothing was written; free the place, or give another folder"


@dataclass(frozen=True)
class _Plan:
    """Which tensors come into which file, in the order in which they are written."""

    tensors: dict[str, Held]
    files: dict[str, list[str]]


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], state: DistributedState, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write a model as a folder that transformers' ``from_pretrained`` reads: safetensors, configuration, generation.

    Collective over the world. The ranks of cell 0 gather one tensor after the other, and rank 0 writes them, so it
    holds at most the tensors of one file; the other cells wait. Adapters are added to the weights that they belong to,
    as ``merge_and_unload`` does; the model stays as it is. A folder of this name is replaced once the new one is
    finished, if nothing else is in it.

    :param model: What ``strategy.wrap_model`` or ``xffl.shard`` returned; a model of transformers, or of peft.
    :param folder: The folder to write, on rank 0's file system.
    :param state: The state that says where this rank stands.
    :param max_shard_size: Bytes of a file, such as ``"5GB"``.
    :raises CheckpointError: if it cannot be written; on all ranks.
    :raises ConfigError: if an argument cannot be meant; on all ranks.
    """

    def look() -> tuple[Path, int, Any, _Plan]:
        return check_path(folder), this_cell(state).number, _base_of(model), _plan(model, max_shard_size)

    path = Path(str(folder))
    path, number, base, plan = run_collectively(
        "comparing the model", look, path, ADVICE, lambda found: f"{found[0]}: {found[3].files}"
    )

    with NewFolder(path, WRITTEN, is_writer=state.rank == 0) as target:
        run_collectively(
            "writing the model",
            lambda: _write(model, base, plan, target.partial) if number == 0 else None,
            path,
            ADVICE,
        )


class NewFolder:
    """A folder that gets its name once all of it is written: by one rank, in steps that all take or fail together.

    A context manager; entering and leaving it is collective over the world.

    :param path: The folder; one of this name is replaced.
    :param files: Patterns of the files that may be in one that is replaced.
    :param is_writer: Whether this rank writes it.
    """

    def __init__(self, path: Path, files: Sequence[str], *, is_writer: bool) -> None:
        self._path, self._files = path, files
        self.partial = temporary_path(path, "partial") if is_writer else None
        """Where to write, ``None`` on the ranks that do not"""

    def __enter__(self) -> NewFolder:
        run_collectively("making a folder", self._begin, self._path, ADVICE)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            run_collectively("naming the folder", self._publish, self._path, ADVICE)
        elif self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _begin(self) -> None:
        if self.partial is not None:
            if self._path.exists() and not self._path.is_dir():
                raise ConfigError(f"{self._path} is a file; give the name of a folder")
            there = sorted(entry.name for entry in self._path.iterdir()) if self._path.exists() else []
            if kept := [name for name in there if not any(fnmatch(name, pattern) for pattern in self._files)]:
                raise ConfigError(
                    f"{self._path} holds {kept[0]!r}, which is not written here and would be lost; give another folder"
                )
            if self.partial.exists():  # of a process that was killed
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)

    def _publish(self) -> None:
        if self.partial is not None:
            sync_all(self.partial)
            replace_folder(self._path)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; collective over the mesh that it is cut over.

    :param tensor: A plain tensor or a DTensor.
    :return: A plain tensor without gradient, on the device.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _base_of(model: nn.Module) -> Any:
    """Return the model of transformers that peft may have wrapped."""
    inner: Any = bare_model(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if not isinstance(base, package("transformers").PreTrainedModel):
        raise ConfigError(f"{type(base).__name__} is no model of transformers, which save_pretrained is for")
    return base


def _plan(model: nn.Module, max_shard_size: int | str) -> _Plan:
    """Deal the tensors out to files, as transformers does."""
    reshard(model)
    tensors = {held.name: held for held in held_tensors(model)}
    _check_adapters(model, tensors)
    split = package("huggingface_hub").split_state_dict_into_shards_factory
    try:
        dealt = split(
            {name: held.tensor for name, held in tensors.items()},
            get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
            filename_pattern=FILES,
            max_shard_size=max_shard_size,
        )
    except ValueError as wrong:
        raise ConfigError(
            f"max_shard_size {max_shard_size!r} is no size of a file: {wrong}; give one such as '5GB'"
        ) from wrong
    return _Plan(tensors, {file: list(names) for file, names in dealt.filename_to_tensors.items()})


def _check_adapters(model: nn.Module, tensors: Mapping[str, Held]) -> None:
    """Raise where adapters cannot be added to the weights one by one."""
    strange = [
        name
        for name, _ in model.named_parameters()
        if any(part.startswith("lora_") for part in name.split("."))
        and not (is_adapter(name) and name.endswith("weight"))
    ]
    if strange:
        raise ConfigError(
            f"{strange[0]!r} is no adapter of add_lora; call merge_and_unload() of peft before the model is spread"
        )
    tied = {id(held.tensor): held for held in tensors.values() if len(held.names) > 1}
    for layer in adapted_layers(model).values():
        if (held := tied.get(id(layer.base_layer.weight))) is not None:
            raise ConfigError(
                f"{', '.join(held.names)} are one tied tensor, to which the adapters of one layer cannot be added; "
                "leave the layer out of target_modules, or call save_adapters"
            )


@torch.no_grad()
def _write(model: nn.Module, base: Any, plan: _Plan, folder: Path | None) -> None:
    """Gather the tensors one by one; where there is a folder, write them."""
    failed: Exception | None = None
    total, adapted = 0, adapted_layers(model)
    for file, names in plan.files.items():
        kept: dict[str, torch.Tensor] = {}
        for name in names:
            held = plan.tensors[name]
            values = _merged(held, adapted)
            total += held.tensor.numel() * held.tensor.itemsize
            if folder is not None:
                kept[name] = values.cpu().contiguous()
        failed = failed or _try(lambda file=file, kept=kept: _write_file(folder, file, kept))  # type: ignore[misc]
    if failed is not None:  # told only now, since the others gather with this rank
        raise failed
    if folder is None:
        return
    if len(plan.files) > 1:
        where = {name: file for file, names in plan.files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = copy.deepcopy(base.config)
    config.use_cache = True  # causal_lm has switched it off for training
    config.architectures = [_plain_class(base).__name__]
    config.dtype = next(base.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)


def _write_file(folder: Path | None, file: str, tensors: dict[str, torch.Tensor]) -> None:
    if folder is not None:
        package("safetensors.torch").save_file(tensors, folder / file, metadata={"format": "pt"})


def _try(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised when all tensors are gathered
        return error
    return None


def _plain_class(model: nn.Module) -> type:
    """Return the class of a model, which FSDP2 has put another in front of."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _merged(held: Held, adapted: Mapping[int, Any]) -> torch.Tensor:
    """Return all of a tensor, with the adapters of the layer that it is the weight of."""
    values = whole(held.tensor)
    layer = adapted.get(id(held.module))
    if layer is None or layer.merged or held.leaf != "weight":
        return values
    for name in layer.active_adapters:
        first, second = (whole(factors[name].weight).float() for factors in (layer.lora_A, layer.lora_B))
        change = (second @ first) * layer.scaling[name]
        values = values + (change.T if layer.fan_in_fan_out else change)
    return values.to(held.tensor.dtype)
