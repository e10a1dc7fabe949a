"""Weights of models that were built on the meta device: module by module, each rank keeping its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from xffl.distributed.agreement.consistency import control_device
from xffl.errors import ConfigError

__all__ = ["check_initializers", "materialize"]

Initializer = Callable[[nn.Module], object]
"""What gives one module's own tensors their values"""


def check_initializers(model: nn.Module, init_weights: Initializer | None) -> None:
    """Raise where nothing says what a module's tensors are to be; local."""
    if init_weights is not None:
        return
    for name, module in model.named_modules():
        if _tensors_of(module) and _reset_of(module) is None:
            raise ConfigError(
                f"module {name or 'model'!r} ({type(module).__name__}) has tensors without values and no "
                "reset_parameters(); write one, or give init_weights"
            )
    if _reset_of(model) is not None and any(True for _ in model.children()):
        raise ConfigError(
            f"{type(model).__name__}.reset_parameters initializes all of the model at once, which would be whole on "
            "every rank; give init_weights, which is called module by module"
        )


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device,
    init_weights: Initializer | None = None,
    *,
    modules: Mapping[str, nn.Module] | None = None,
) -> None:
    """Give values to a model on the meta device, spread as it is; collective over the world.

    Module by module every rank makes whole tensors on the CPU, initializes them, and keeps its part, so the largest
    module is all that is ever whole; a module that initializes its children, too (torch's attention), is whole with
    them. The weights are those of the unsharded model where modules are made in the order of ``model.modules()``.

    What ``init_weights`` leaves without values begins as its module's ``reset_parameters`` makes it, before
    ``init_weights`` is called for that module once more: as it would be in a model that was built with values.
    """
    # A pipeline's stage gives the modules of the whole model: those it does not hold are initialized, too, and dropped,
    # so that random numbers are those of the whole model.
    order = dict(model.named_modules()) if modules is None else modules
    own_modules = set(map(id, model.modules()))
    _make_empty(model, device)
    done: set[int] = set()

    def keep(module: nn.Module, tensor: torch.Tensor, values: torch.Tensor) -> None:
        # A tensor that another module has initialized before (a tied one) keeps its values.
        if id(module) in own_modules and id(tensor) not in done and isinstance(tensor, DTensor):
            # src_data_rank=None: cut from the values that every rank has made, without communication.
            part = distribute_tensor(values.to(device), tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        elif id(module) in own_modules and id(tensor) not in done:
            tensor.copy_(values)
        done.add(id(tensor))

    with torch.random.fork_rng(devices=[]):
        if dist.is_initialized():  # all go on with rank 0's random numbers (5 kB)
            state = torch.get_rng_state().to(control_device())
            dist.broadcast(state, src=0)
            torch.set_rng_state(state.cpu())
        inside: set[int] = set()
        for name, module in order.items():
            # reset_parameters may initialize the children, too (torch's attention does); init_weights takes one module.
            is_alone = init_weights is not None or _reset_of(module) is None
            covered = [module] if is_alone else [*module.modules()]
            if id(module) in inside or not any(_tensors_of(part) for part in covered):
                continue
            if init_weights is not None:
                try:
                    with _whole_tensors(name, covered, keep):
                        init_weights(module)
                        if _reset_of(module) is not None and any(map(_is_empty, _values_of(module))):
                            raise _LeftOut  # only now is it known; the children may have to be whole, too
                except _LeftOut:
                    covered = [*module.modules()]
                else:
                    inside.update(map(id, covered))
                    continue
            inside.update(map(id, covered))
            with _whole_tensors(name, covered, keep):
                _reset(module)
                if init_weights is None:
                    continue
                for part in filter(_tensors_of, covered):
                    init_weights(part)


class _LeftOut(Exception):
    """An initializer has left tensors of a module without values."""


def _reset(module: nn.Module) -> None:
    """Initialize a module and all in it by their own ``reset_parameters``."""
    parts: list[nn.Module] = []
    module.apply(parts.append)  # each before the module that holds it
    for reset in filter(None, map(_reset_of, dict.fromkeys(parts))):
        reset()


def _values_of(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for _, _, tensor in _tensors_of(module)]


def _is_empty(values: torch.Tensor) -> bool:
    """Tell whether a tensor was left without some of its values."""
    return bool(values.is_floating_point() and values.isnan().any())


@contextmanager
def _whole_tensors(
    name: str, modules: Sequence[nn.Module], keep: Callable[[nn.Module, torch.Tensor, torch.Tensor], None]
) -> Iterator[None]:
    """Let modules have whole tensors on the CPU for the length of a block, then let this rank keep its part of them."""
    own = [(module, *place) for module in modules for place in _tensors_of(module)]
    for _, holder, leaf, tensor in own:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if whole.is_floating_point():
            whole.fill_(torch.nan)  # to see what nobody initializes
        is_parameter = isinstance(tensor, nn.Parameter)
        holder[leaf] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole
    try:
        yield
        initialized = [holder[leaf] for _, holder, leaf, _ in own]
    finally:
        for _, holder, leaf, tensor in own:
            holder[leaf] = tensor
    for (module, _, leaf, tensor), values in zip(own, initialized, strict=True):
        if values is None or _is_empty(values):
            raise ConfigError(
                f"tensor {leaf!r} of module {name or 'model'!r} ({type(module).__name__}) was left without values; "
                "initialize all of it in reset_parameters, or in init_weights, or build the model with values and not "
                "on the meta device (in a trainer: setup.meta_device=False)"
            )
        keep(module, tensor, values.detach())


def _make_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model's tensors memory; a tensor that several modules share stays one."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for module in model.modules():
        for leaf, tensor in module._parameters.items():
            if tensor is not None:
                home = first.setdefault(id(tensor), (module, leaf))
                ties.append((module, leaf, home))
    model.to_empty(device=device)
    for module, leaf, (owner, name) in ties:
        if module._parameters[leaf] is not owner._parameters[name]:
            module._parameters[leaf] = owner._parameters[name]


def _tensors_of(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Return a module's own tensors, with the dictionary and the name under which it keeps them."""
    holders: list[Any] = [module._parameters, module._buffers]
    return [(holder, leaf, tensor) for holder in holders for leaf, tensor in holder.items() if tensor is not None]


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return what initializes a module; torch's attention calls it by another name."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None
