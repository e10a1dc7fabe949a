"""How the modules of a Hugging Face model get their first values, one module at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from xffl.errors import ConfigError
from xffl.training.models.held import is_adapter
from xffl.training.models.packages import package

__all__ = ["ModuleInitializer"]


class ModuleInitializer:
    """Initialize a Hugging Face model module by module: the ``init_weights`` of ``wrap_model``.

    It asks the model's own ``_init_weights`` (for adapters it does what peft does by default). With the same random
    numbers the values are those of :func:`xffl.training.models.building.causal_lm`, however the model is spread.

    :param model: The model, with its adapters, before it is spread.
    :param only_buffers: Whether weights are about to be read from files, so that zeros will do; buffers that are in no
        file, and adapters, are initialized.
    :raises ConfigError: if the model is none of transformers, or has modules that initialize others (GPT-2 scales
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
        if id(module) in self._adapters:
            _reset_adapter(self._adapters[id(module)], module)
            return
        owner = self._owners.get(id(module))
        if owner is None:
            raise ConfigError(
                f"a {type(module).__name__} is no part of the model that this ModuleInitializer was made for"
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
        raise ConfigError(f"{type(model).__name__} is no model of transformers; give init_weights of your own")
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


def _reset_adapter(name: str, module: nn.Module) -> None:
    """Let an adapter begin as nothing: its first factor random, its second one zero, as in the paper on LoRA."""
    for parameter in module.parameters(recurse=False):
        if "lora_A" in name.split("."):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        else:
            nn.init.zeros_(parameter)
