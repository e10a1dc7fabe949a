"""Causal language models of Hugging Face, from a configuration or from a local folder; never from the internet."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xffl.errors import ConfigError
from xffl.training.models.held import bare_model
from xffl.training.models.initialization import ModuleInitializer
from xffl.training.models.packages import package
from xffl.training.models.reading import has_weights, read_weights

__all__ = ["causal_lm", "layer_classes"]

Source = str | os.PathLike[str] | Mapping[str, Any] | Any
"""A configuration of transformers, the same as a mapping, its file, or a folder that holds it."""


def causal_lm(source: Source, *, dtype: torch.dtype | str | None = None, weights: bool = True) -> nn.Module:
    """Build a causal language model; local. Nothing is ever downloaded, and no code of a folder is run.

    With ``weights`` the model has its values on the CPU: those of a folder's safetensors files, or of transformers' own
    initialization with torch's random numbers where a configuration was given. Without, it is on the meta device: give
    it to ``strategy.wrap_model(model, init_weights=ModuleInitializer(model))``, or, for weights of a folder, with
    ``ModuleInitializer(model, only_buffers=True)``, and call :func:`xffl.training.models.reading.load_weights`. No rank
    holds all of it then.

    The model keeps no cache of keys and values in its forward pass (``config.use_cache``), which training has no use
    for and which layers that are computed again would fill twice; ``generate`` has its own setting.

    :param source: A configuration of transformers, the same as a mapping with ``model_type``, a configuration's file,
        or a folder with ``config.json`` and safetensors files.
    :param dtype: Data type of the weights; by default the configuration's.
    :param weights: Whether the model gets its values now.
    :return: The model, such as ``LlamaForCausalLM``.
    :raises ConfigError: if the source cannot be meant, or transformers is not installed.
    :raises CheckpointError: if a folder's files do not hold the model's weights.
    """
    transformers = package("transformers")
    config = _configuration(source, transformers)
    folder = Path(source) if isinstance(source, (str, os.PathLike)) and Path(source).is_dir() else None
    if weights and folder is not None and not has_weights(folder):
        raise ConfigError(
            f"{folder} holds no safetensors files; give {folder / 'config.json'} for a model with random weights, or "
            "weights=False for one on the meta device"
        )
    try:
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=_dtype(dtype, config), trust_remote_code=False
            )
    except ValueError as wrong:
        raise ConfigError(
            f"a configuration of type {config.model_type!r} makes no causal language model: {wrong}"
        ) from wrong
    model.config.use_cache = False
    if folder is not None and hasattr(model, "generation_config"):
        model.generation_config = _generation(folder, model.generation_config, transformers)
    if not weights:
        return _trainable(model)
    model.to_empty(device="cpu")  # which parts what is tied
    # In this order, every module is initialized by transformers as one that nobody has touched yet.
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    if folder is None:
        model.initialize_weights()
    else:
        fill = ModuleInitializer(model, only_buffers=True)
        with torch.no_grad():
            for module in model.modules():
                if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                    fill(module)
    model.tie_weights()
    if folder is not None:
        read_weights(model, folder)
    return _trainable(model)


def layer_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of layers to shard, compute again and compile one at a time: a strategy's ``wrap``; local.

    They are those that a model of transformers says must not be split, else those that a list of the model repeats.

    :param model: The model, before it is spread; with or without adapters.
    :return: The classes, in the order in which they come in the model.
    :raises ConfigError: if there are none.
    """
    inner = bare_model(model)
    asked = {name for module in inner.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = {type(module): None for module in inner.modules() if type(module).__name__ in asked}
    if not found:
        lists = [module for module in inner.modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
        counts = Counter(type(layer) for layers in lists for layer in layers.children())
        found = {layer: None for layer, count in counts.items() if count > 1}
    if not found:
        raise ConfigError(f"{type(inner).__name__} repeats no layers; name the classes to wrap yourself")
    return tuple(found)


def _configuration(source: Source, transformers: Any) -> Any:
    """Return a configuration that may be changed."""
    if isinstance(source, transformers.PreTrainedConfig):
        return copy.deepcopy(source)
    if isinstance(source, Mapping):
        given = dict(source)
        kind = given.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"model_type {kind!r} is none that transformers {transformers.__version__} knows")
        return transformers.AutoConfig.for_model(kind, **given)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"{source!r} is no source of a model; give a configuration, a mapping, or the path of a file or folder"
        )
    path = Path(source)
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise ConfigError(
            f"{path} is neither a configuration's file nor a folder with config.json; nothing is downloaded, so give a "
            "local path"
        )
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as wrong:
        raise ConfigError(f"the configuration of {path} cannot be read: {wrong}") from wrong


def _generation(folder: Path, made: Any, transformers: Any) -> Any:
    if not (folder / "generation_config.json").is_file():
        return made
    try:
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as wrong:
        raise ConfigError(f"{folder / 'generation_config.json'} cannot be read: {wrong}") from wrong


def _dtype(asked: torch.dtype | str | None, config: Any) -> torch.dtype:
    found = asked if asked is not None else config.dtype
    named = getattr(torch, found, None) if isinstance(found, str) else found
    if found is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ConfigError(f"dtype {found!r} is no floating-point type of torch; give one such as 'bfloat16'")
    return torch.float32 if named is None else named


def _trainable(model: Any) -> nn.Module:
    trained: nn.Module = model.train()
    return trained
