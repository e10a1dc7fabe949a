"""Causal language models of Hugging Face from local configurations and folders, their first values and their loss."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from xffl.distributed.values.sharding import dtype_of
from xffl.errors import ConfigError
from xffl.training.models.weights import INDEX, SINGLE, bare_model, is_adapter, package, read_weights

__all__ = ["ModuleInitializer", "causal_lm", "causal_lm_loss", "count_targets", "layer_classes"]

IGNORED = -100
"""Label of tokens that do not count, as in torch and transformers."""

Source = str | os.PathLike[str] | Mapping[str, Any] | Any
"""A configuration of transformers, the same as a mapping, its file, or a folder that holds it."""


def causal_lm(source: Source, *, dtype: torch.dtype | str | None = None, weights: bool = True) -> nn.Module:
    """Build a causal language model; local. Nothing is ever downloaded, and no code of a folder is run.

    With ``weights`` the model has its values on the CPU: those of a folder's safetensors files, or of transformers' own
    initialization with torch's random numbers where a configuration was given. Without, it is on the meta device: give
    it to ``strategy.wrap_model(model, init_weights=ModuleInitializer(model))``, or, for weights of a folder, with
    ``ModuleInitializer(model, only_buffers=True)``, and call :func:`xffl.training.models.weights.load_weights`. No rank
    holds all of it then.

    The model keeps no cache of keys and values in its forward pass (``config.use_cache``), which training has no use
    for and which layers that are computed again would fill twice; ``generate`` has its own setting.

    :param source: A configuration of transformers, the same as a mapping with ``model_type``, a configuration's file,
        or a folder with ``config.json`` and safetensors files.
    :param dtype: Data type of the weights; by default the configuration's.
    :param weights: Whether the model gets its values now.
    :return: The model, such as ``LlamaForCausalLM``.
    :raises ConfigError: if the source is invalid, or transformers is not installed.
    :raises CheckpointError: if a folder's files do not hold the model's weights.
    """
    transformers = package("transformers")
    config = _configuration(source, transformers)
    folder = Path(source) if isinstance(source, (str, os.PathLike)) and Path(source).is_dir() else None
    if weights and folder is not None and not any((folder / name).is_file() for name in (INDEX, SINGLE)):
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
        raise ConfigError(f"configuration {config.model_type!r} is not of a causal language model: {wrong}") from wrong
    model.config.use_cache = False
    trained: nn.Module = model.train()
    if folder is not None and hasattr(model, "generation_config") and (folder / "generation_config.json").is_file():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as wrong:
            raise ConfigError(f"{folder / 'generation_config.json'} cannot be read: {wrong}") from wrong
    if not weights:
        return trained
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
                if _own(module):
                    fill(module)
    model.tie_weights()
    if folder is not None:
        read_weights(model, folder)
    return trained


def layer_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of layers to shard, compute again and compile one at a time: a strategy's ``wrap``; local.

    They are those that a model of transformers says must not be split, else those that a list of the model repeats.

    :param model: The model, before it is sharded; with or without adapters.
    :return: The classes, in the order in which they come in the model.
    :raises ConfigError: if there are none.
    """
    inner = bare_model(model)
    asked = {name for module in inner.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    chosen = {type(module): None for module in inner.modules() if type(module).__name__ in asked}
    if not chosen:
        lists = [module for module in inner.modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
        counts = Counter(type(layer) for layers in lists for layer in layers.children())
        chosen = {layer: None for layer, count in counts.items() if count > 1}
    if not chosen:
        raise ConfigError(f"{type(inner).__name__} repeats no layers; name the classes to wrap yourself")
    return tuple(chosen)


def _configuration(source: Source, transformers: Any) -> Any:
    """Return a configuration that may be changed."""
    if isinstance(source, transformers.PreTrainedConfig):
        return copy.deepcopy(source)
    if isinstance(source, Mapping):
        given = dict(source)
        kind = given.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"model_type {kind!r} is unknown to transformers {transformers.__version__}")
        return transformers.AutoConfig.for_model(kind, **given)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"source must be a configuration, a mapping, or the path of a file or folder, got {source!r}")
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


def _dtype(asked: torch.dtype | str | None, config: Any) -> torch.dtype:
    dtype = asked if asked is not None else config.dtype
    named: Any = dtype
    if isinstance(dtype, str):
        with suppress(ValueError):  # which is reported below
            named = dtype_of(dtype)
    if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ConfigError(f"dtype must be a floating-point type of torch, such as 'bfloat16', got {dtype!r}")
    chosen: torch.dtype = torch.float32 if named is None else named
    return chosen


# First values ---------------------------------------------------------------------------------------------------------


class ModuleInitializer:
    """Initialize a Hugging Face model module by module: the ``init_weights`` of ``wrap_model``.

    It asks the model's own ``_init_weights`` (for adapters it does what peft does by default). With the same random
    numbers the values are those of :func:`causal_lm`, however the model is sharded.

    :param model: The model, with its adapters, before it is sharded.
    :param only_buffers: Whether weights are about to be read from files, so that zeros will do; buffers that are in no
        file, and adapters, are initialized.
    :raises ConfigError: if the model is not one of transformers, or has modules that initialize others (GPT-2 scales
        projections by its depth), which cannot be done module by module.
    """

    def __init__(self, model: nn.Module, *, only_buffers: bool = False) -> None:
        self._only_buffers = only_buffers
        self._owners = _owners_of(model)
        self._adapters = {id(module): name for name, module in model.named_modules() if is_adapter(name)}
        if not only_buffers:
            _check_reach(model, self._owners)

    def __call__(self, module: nn.Module) -> None:
        """Initialize the tensors of a module itself.

        :param module: A module of the model; its own tensors are whole.
        :raises ConfigError: if it is of another model.
        """
        if (adapter := self._adapters.get(id(module))) is not None:
            # It begins as nothing: its first factor random, its second one zero, as in the paper on LoRA.
            for parameter in module.parameters(recurse=False):
                if "lora_A" in adapter.split("."):
                    nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                else:
                    nn.init.zeros_(parameter)
            return
        owner = self._owners.get(id(module))
        if owner is None:
            raise ConfigError(
                f"a {type(module).__name__} does not belong to the model that this ModuleInitializer was made for"
            )
        if self._only_buffers:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)
        if not self._only_buffers or any(True for _ in module.buffers(recurse=False)):
            owner._init_weights(module)


def _owners_of(model: nn.Module) -> dict[int, Any]:
    """Return the model of transformers that each module belongs to, the innermost one."""
    base = package("transformers").PreTrainedModel
    owners: dict[int, Any] = {}
    for module in model.modules():  # from outside in, so that the innermost is noted last
        if isinstance(module, base):
            owners |= dict.fromkeys(map(id, module.modules()), module)
    if not owners:
        raise ConfigError(
            f"model must be a model of transformers, got a {type(model).__name__}; give init_weights of your own"
        )
    return owners


def _check_reach(model: nn.Module, owners: Mapping[int, Any]) -> None:
    """Raise where a module initializes tensors of its children; judged on the meta device, where that costs nothing."""
    places = {id(tensor): module for module in model.modules() for tensor in _own(module)}
    if not all(tensor.is_meta for module in model.modules() for tensor in _own(module)):
        return
    for name, module in model.named_modules():
        if is_adapter(name) or id(module) not in owners or not any(True for _ in module.children()):
            continue
        with torch.no_grad(), _Changes() as changes:
            owners[id(module)]._init_weights(module)
        if any(places.get(changed, module) is not module for changed in changes.tensors):
            raise ConfigError(
                f"{type(module).__name__} ({name or 'model'}) initializes the tensors of its children, which cannot be "
                "done module by module; build the model with weights=True, or read its weights from files"
            )


class _Changes(TorchFunctionMode):
    """Note which tensors are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            self.tensors.add(id(args[0] if args else (kwargs or {}).get("tensor")))  # torch.nn.init says it by name
        return func(*args, **(kwargs or {}))


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


# Loss -----------------------------------------------------------------------------------------------------------------


def causal_lm_loss(output: Any, labels: torch.Tensor, *, is_shifted: bool = False) -> torch.Tensor:
    """Return the mean cross-entropy of the next token; local.

    Computed in float32. Ranks or micro-batches whose labels count unequally many tokens have to be weighted by
    :func:`count_targets`.

    :param output: What the model returned, or its logits (batch, sequence, vocabulary).
    :param labels: Tokens (batch, sequence), -100 where they do not count: the tokens that went in, or with
        ``is_shifted`` those that follow them.
    :param is_shifted: Whether ``labels`` are the tokens that follow; where ranks have parts of sequences they must be.
    :return: The mean over the tokens that count; 0 where none does.
    """
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    if not is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)  # no branch, which would wait for the device


def count_targets(labels: torch.Tensor, *, is_shifted: bool = False) -> int:
    """Return how many tokens :func:`causal_lm_loss` takes the mean of; local.

    :param labels: As there.
    :param is_shifted: As there.
    :return: The number.
    """
    return int(((labels if is_shifted else labels[:, 1:]) != IGNORED).sum())
