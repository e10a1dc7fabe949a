"""What can be spread over the ranks of a cell: local checks that every rank makes of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.errors import ConfigError
from xffl.parallel.options import SpreadOptions

__all__ = ["check_model", "named_tensors"]


def check_model(
    model: nn.Module, forms: Sequence[str], options: SpreadOptions, *, is_meta: bool, is_staged: bool = False
) -> None:
    """Raise where a model cannot be spread as asked, on the ranks of all cells alike; local.

    :param model: The whole model.
    :param forms: How each cell holds its model: ``plain``, ``ddp`` or ``fsdp``.
    :param options: What is asked for.
    :param is_meta: Whether its tensors have no values yet.
    :param is_staged: Whether each rank gets a stage of it, so that what no layer class holds is spread over several.
    :raises ConfigError: if a tensor, a layer class or a policy cannot be meant.
    """
    wrap = options.layers
    for layer in wrap:
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise ConfigError(f"wrap holds {layer!r}; give classes of layers, such as nn.TransformerEncoderLayer")
        if not any(isinstance(module, layer) for module in model.modules()):
            raise ConfigError(f"wrap names {layer.__name__}, but the model has no such layer; leave it out")
    for name, tensor in named_tensors(model):
        if isinstance(tensor, DTensor):
            raise ConfigError(f"tensor {name!r} is sharded already; give the whole model, once")
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensor {name!r} is {tensor.layout}; only strided tensors can be spread, make it dense")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(f"tensor {name!r} is expanded: several of its elements are one in memory; clone() it")
        if "ddp" in forms and (tensor.is_conj() or tensor.is_neg()):
            raise ConfigError(
                f"tensor {name!r} is a conjugate or negated view, which DDP would send without its sign; "
                "resolve_conj().resolve_neg() it"
            )
    units = _units(model, wrap)
    _check_ties(model, units)
    if "fsdp" in forms:
        _check_for_fsdp(model, wrap, is_meta=is_meta)
        _check_gradients(model, {name: unit for name, unit in units.items() if unit or not is_staged})
    for cell, form in enumerate(forms) if options.mp_policy is not None else ():
        if form != "fsdp":
            raise ConfigError(
                f"cell {cell} is {form}, which follows no FSDP2 mp_policy; use torch.autocast, or leave mp_policy out"
            )


def _check_for_fsdp(model: nn.Module, wrap: tuple[type[nn.Module], ...], *, is_meta: bool) -> None:
    """Refuse, on the ranks of all cells, what FSDP2 would refuse on those of some."""
    for layer in (*wrap, type(model)):
        if issubclass(layer, (nn.ModuleList, nn.ModuleDict)) and layer.forward is nn.Module.forward:
            what = f"wrap names {layer.__name__}" if layer in wrap else f"the model is a {layer.__name__}"
            raise ConfigError(
                f"{what}, which has no forward pass to gather for; wrap what it holds, or give a model with a forward"
            )
    memory: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"parameter {name!r} is a scalar, which FSDP cannot cut; give it the shape (1,)")
        if not parameter.is_contiguous():
            raise ConfigError(f"parameter {name!r} is not contiguous, which FSDP cannot cut; make it so")
        other = memory.setdefault(parameter.data_ptr(), name) if parameter.numel() and not is_meta else name
        if other != name:
            raise ConfigError(
                f"parameters {other!r} and {name!r} share memory but are two objects, which FSDP would part; tie "
                "them by assigning one Parameter to both modules"
            )


def _check_gradients(model: nn.Module, units: Mapping[str, int]) -> None:
    """Refuse what FSDP2 takes and then fails on in the first forward or backward pass, without a name."""
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.numel():
            raise ConfigError(
                f"parameter {name!r} has no elements {tuple(parameter.shape)}, and FSDP cannot reduce its gradient; "
                "leave it out, or freeze it by requires_grad_(False)"
            )
        if name not in units:
            continue
        other, dtype = first.setdefault(units[name], (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise ConfigError(
                f"parameters {other!r} ({dtype}) and {name!r} ({parameter.dtype}) train in one FSDP unit, which needs "
                "one data type; give them the same, freeze one, or name the class of a layer that holds only one of "
                "them in wrap"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} gets sparse gradients, which FSDP cannot reduce; build "
                f"{type(module).__name__} without sparse=True, or freeze it"
            )


def _units(model: nn.Module, wrap: tuple[type[nn.Module], ...]) -> dict[str, int]:
    """Tell for each name of a parameter, tied ones too, which FSDP2 unit it belongs to; 0 is the model itself."""
    units = {}
    paths = dict(model.named_modules(remove_duplicate=False))
    for name, _ in model.named_parameters(remove_duplicate=False):
        parents = name.split(".")[:-1]
        holders = (paths[".".join(parents[:depth])] for depth in range(len(parents), 0, -1))
        units[name] = next((id(holder) for holder in holders if wrap and isinstance(holder, wrap)), 0)
    return units


def _check_ties(model: nn.Module, units: Mapping[str, int]) -> None:
    """Refuse to cut one parameter in two: FSDP2 gives each of its units a copy of its own."""
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = homes.setdefault(id(parameter), name)
        if units[other] != units[name]:
            raise ConfigError(
                f"{other!r} and {name!r} are one tied parameter, but wrap puts them into two units; wrap a layer that "
                "holds both, or neither"
            )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters, then all buffers, with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()
