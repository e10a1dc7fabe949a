"""Contents of a checkpoint's parts: tensors and plain values under names that do not depend on the layout."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from xffl.distributed.sharding import Plain, local_tensor, sharded_parameters, tensors_named, to_plain
from xffl.errors import ConfigError

__all__ = [
    "Contents",
    "Part",
    "check_parts",
    "check_readable",
    "collect",
    "find_buffers",
    "is_extra_state",
    "is_overlapping",
    "model_names",
    "modules_with_extra_state",
    "parameter_names",
    "saved_options",
    "trained_names",
]


Part = nn.Module | torch.optim.Optimizer | Stateful
"""What a checkpoint keeps: a model, an optimizer of models among the parts, or what has ``state_dict`` and
``load_state_dict`` (a scheduler, a sampler)."""

UNNAMED = ("params", "param_names")
"""Entries of a parameter group that list its parameters, which have other names here."""


EXTRA_STATE = "_extra_state"
"""What torch calls a module's extra state in a state dict."""
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch calls a module inside its wrappers, which names leave out."""


@dataclass
class Contents:
    """The tensors and values of all parts, by name."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Plain] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Tensors of a model that are another one of it, which comes first"""

    def on_host(self) -> Contents:
        """Return a copy in the memory of the host, that nothing else changes; what lies on GPUs comes all together."""
        copies = {
            name: tensor.detach().to("cpu", copy=True, non_blocking=tensor.is_cuda)
            for name, tensor in self.tensors.items()
        }
        for device in {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Contents(copies, self.values, self.ties)


def check_parts(parts: Mapping[str, Part]) -> None:
    """Refuse parts that cannot be kept."""
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(f"parts is {type(parts).__name__} of nothing; give a mapping such as {{'model': model}}")
    for name, part in parts.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"part name must be a string without '/', such as 'model', got {name!r}")
        if not isinstance(part, (nn.Module, torch.optim.Optimizer, Stateful)):
            raise ConfigError(
                f"part {name!r} is {type(part).__name__}; give a module, an optimizer or an object with state_dict and "
                "load_state_dict, and plain values as values"
            )


def collect(parts: Mapping[str, Part]) -> Contents:
    """Take what the parts hold now. Nothing moves and nothing is copied.

    A model's tensor is ``part/layers.0.weight``, whatever wraps the model; an optimizer's names its parameter by the
    model's part. An optimizer that has not stepped yet stays as it is.
    """
    contents = Contents()
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            state = get_model_state_dict(part)
            contents.ties |= {f"{name}/{key}": f"{name}/{first}" for key, first in _ties(state).items()}
            for key, value in state.items():
                plain = to_plain(value, f"{name}/{key}", contents.tensors)
                if not isinstance(value, torch.Tensor):
                    contents.values[f"{name}/{key}"] = plain
        elif isinstance(part, torch.optim.Optimizer):
            _collect_optimizer(name, part, parameter_names(name, part, parts), contents)
        else:
            contents.values[name] = to_plain(part.state_dict(), name, contents.tensors)
    for name, tensor in contents.tensors.items():
        _check_tensor(name, tensor)
    for name in (name for name, part in parts.items() if isinstance(part, nn.Module)):
        for key in model_names(name, contents.tensors, contents.values):
            if key in contents.tensors and not is_extra_state(key) and is_overlapping(contents.tensors[key]):
                raise ConfigError(
                    f"tensor {key!r} is expanded: several of its elements are one in memory, so nothing could be "
                    "loaded into it; clone() it"
                )
    check_readable(contents.tensors)
    return contents


def model_names(name: str, tensors: Iterable[str], values: Mapping[str, Plain]) -> list[str]:
    """Return the names of a model's state dict among those of tensors and values, without what values hold; pure."""
    own = {key: value for key, value in values.items() if key.startswith(f"{name}/")}
    inner = {key for value in own.values() for key in tensors_named(value)}
    return [key for key in tensors if key.startswith(f"{name}/") and key not in inner] + list(own)


def is_extra_state(key: str) -> bool:
    """Tell whether an entry of a model's state dict is what ``get_extra_state`` of a module returned; pure."""
    return key.replace("/", ".").rpartition(".")[2] == EXTRA_STATE


def modules_with_extra_state(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a part that have an extra state, by its name among what the part holds; local."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}{EXTRA_STATE}", module
        for leaf, child in module._modules.items():
            is_wrapped = leaf in WRAPPED or (leaf == "module" and isinstance(module, DistributedDataParallel))
            if child is not None:
                yield from walk(child, prefix if is_wrapped else f"{prefix}{leaf}.")

    yield from walk(model, f"{name}/")


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is expanded, so that torch does not write to it."""
    local = local_tensor(tensor)
    return any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True))


def check_readable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that torch would write to a file and not read again without running code of it; local.

    Of other classes than torch's own, one of each and of each dtype is written to memory and read.
    """
    seen: set[tuple[type, torch.dtype]] = set()
    for name, tensor in tensors.items():
        local = local_tensor(tensor).detach()
        kind = (type(local), local.dtype)
        if kind in seen or (kind[0] is torch.Tensor and not local.is_quantized):
            continue
        seen.add(kind)
        sample = local.cpu()
        stream = io.BytesIO()
        try:
            torch.save(sample, stream)
            stream.seek(0)
            torch.empty_like(sample).copy_(torch.load(stream, weights_only=True))
        except Exception as error:
            raise ConfigError(
                f"tensor {name!r} is {type(local).__name__} of {local.dtype}, which torch.load(weights_only=True) does "
                f"not read ({type(error).__name__}); make it a plain tensor, or give its class to "
                "torch.serialization.add_safe_globals"
            ) from error


def find_buffers(parts: Mapping[str, Part], contents: Contents) -> dict[str, torch.Tensor]:
    """Return the models' buffers among what the parts hold, but for those that are spread over ranks; local."""
    buffers: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            # A state dict mixes buffers and parameters; its tensors share the memory of the parameters.
            plain = {p.data_ptr() for p in sharded_parameters(part).values() if type(p.detach()) is torch.Tensor}
            buffers |= {
                key: tensor
                for key, tensor in contents.tensors.items()
                if key.startswith(f"{name}/") and type(tensor) is torch.Tensor and tensor.data_ptr() not in plain
            }
    return buffers


def parameter_names(name: str, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]) -> list[list[str]]:
    """Name an optimizer's parameters by the models that hold them, group by group."""
    names: dict[int, str] = {}
    for home, model in parts.items():
        if not isinstance(model, nn.Module):
            continue
        wanted = set(map(id, sharded_parameters(model).values())) - names.keys()
        own = [parameter for parameter in _parameters(optimizer) if id(parameter) in wanted]
        if not own:
            continue
        # torch names what an optimizer holds, and fills one without state by stepping it: this one has a state and is
        # thrown away, so that the user's is left alone.
        probe = torch.optim.Optimizer(own, {})
        probe.state[own[0]] = {}
        groups: Any = get_optimizer_state_dict(model, probe)["param_groups"]
        names |= {id(parameter): f"{home}/{key}" for parameter, key in zip(own, groups[0]["params"], strict=True)}
    for parameter in _parameters(optimizer):
        if id(parameter) not in names:
            raise ConfigError(
                f"optimizer {name!r} holds a parameter of shape {tuple(parameter.shape)} that no model among the parts "
                f"{sorted(parts)} has; give its model as a part, too, and make the optimizer after the model is sharded"
            )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def saved_options(name: str, values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the options of an optimizer's parameters."""
    options: dict[str, Plain] = {}
    for key, group in values.items():
        if key.startswith(f"{name}/group/") and isinstance(group, dict):
            options |= dict.fromkeys(group["params"], group["options"])
    return options


def trained_names(parts: Mapping[str, Part]) -> list[str]:
    """Return the names of what is trained in the models among the parts."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    trained = {id(p): p for model in models for p in sharded_parameters(model).values() if p.requires_grad}
    if not trained:
        return []
    return parameter_names("", torch.optim.Optimizer(list(trained.values()), {}), parts)[0]


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which a tensor comes again, with the first one."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for key, value in state.items():
        local = local_tensor(value)
        if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.is_meta or not local.numel():
            continue
        try:
            address = local.data_ptr()
        except RuntimeError:  # a tensor made of others, such as a quantized one
            continue
        place = (address, local.device, local.dtype, value.shape, local.stride())
        if address and first.setdefault(place, key) != key:
            ties[key] = first[place]
    return ties


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _collect_optimizer(name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], contents: Contents) -> None:
    state = optimizer.state_dict()
    flat = [parameter for group in names for parameter in group]
    unknown = list(state.keys() - {"state", "param_groups"})
    unknown += [key for key in state["state"] if key not in range(len(flat))]
    if unknown:
        raise ConfigError(
            f"optimizer {name!r} ({type(optimizer).__name__}) keeps {unknown[0]!r} beside its parameters' state, which "
            "cannot be cut anew for other ranks; keep that in a part of its own"
        )
    for group, members in zip(state["param_groups"], names, strict=True):
        if members:  # an empty group has no name, and its options touch nothing
            options = {key: value for key, value in group.items() if key not in UNNAMED}
            key = f"{name}/group/{members[0]}"
            contents.values[key] = {"params": members, "options": to_plain(options, key, contents.tensors)}
    for number, of_parameter in state["state"].items():
        key = f"{name}/state/{flat[number]}"
        contents.values[key] = to_plain(of_parameter, key, contents.tensors)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ConfigError(f"tensor {name!r} is {tensor.layout}; a checkpoint keeps strided ones, make it dense")
    if tensor.is_meta:
        raise ConfigError(f"tensor {name!r} is on the meta device and has no values; initialize the model first")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(f"tensor {name!r} is a partial sum; redistribute it before it is kept")
