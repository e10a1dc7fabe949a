"""Weights for a model that was built on the meta device: made module by module, each rank keeping its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from xffl.errors import ConfigError

__all__ = ["check_initializers", "is_meta", "materialize"]

Initializer = Callable[[nn.Module], object]


def is_meta(model: nn.Module) -> bool:
    """Tell whether a model's tensors have no values yet; local.

    :param model: The model.
    :return: Whether all of them are on the meta device.
    :raises ConfigError: if some are and some are not.
    """
    places = {name: tensor.is_meta for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if len(set(places.values())) > 1:
        with_values = next(name for name, is_bare in places.items() if not is_bare)
        without = next(name for name, is_bare in places.items() if is_bare)
        raise ConfigError(
            f"tensor {without!r} is on the meta device and {with_values!r} is not; build all of the model under "
            "torch.device('meta'), or none of it"
        )
    return True in places.values()


def check_initializers(model: nn.Module, init_weights: Initializer | None) -> None:
    """Raise where nothing says what a module's tensors are to be; local.

    :param model: The model.
    :param init_weights: As in :func:`materialize`.
    :raises ConfigError: for the first such module.
    """
    for name, module in model.named_modules() if init_weights is None else ():
        if _own(module) and _reset_of(module) is None:
            raise ConfigError(
                f"module {name or 'model'!r} ({type(module).__name__}) has tensors without values and no "
                "reset_parameters(); write one, or give init_weights"
            )


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device,
    init_weights: Initializer | None = None,
    *,
    modules: Sequence[nn.Module] | None = None,
) -> None:
    """Give values to a model on the meta device, spread as it is.

    Collective over the world: rank 0's random numbers count for all (5 kB). Module by module every rank makes whole
    tensors on the CPU, initializes them, and keeps its part, so the largest module is all that is ever whole. The
    weights are those of the unsharded model where its modules are made in the order of ``model.modules()``.

    :param model: The model, its parameters plain or DTensors.
    :param device: Where its values are to lie.
    :param init_weights: Initializes the own tensors of the module that it is called with, which are whole and on the
        CPU; by default each module's ``reset_parameters``.
    :param modules: The modules of the whole model, in order, where this rank holds some of them only (a pipeline's
        stage): the others are made, too, and forgotten, so that random numbers are those of the whole model.
    """
    order = list(model.modules()) if modules is None else list(modules)
    mine = set(map(id, model.modules()))
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        _share_random_state()
        done: set[int] = set()
        for module in order:
            if not _own(module):
                continue
            with _whole(module, device, done, is_kept=id(module) in mine):
                reset = _reset_of(module)
                if init_weights is not None:
                    init_weights(module)
                elif reset is not None:
                    reset()


def _own(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Return a module's own tensors, with where it keeps them."""
    found = []
    for kept in (module._parameters, module._buffers):
        for leaf, tensor in kept.items():
            if tensor is not None:
                found.append((kept, leaf, tensor))
    return found  # type: ignore[return-value]


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return what initializes a module; torch's attention calls it by another name."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


@contextmanager
def _whole(module: nn.Module, device: torch.device, done: set[int], *, is_kept: bool) -> Iterator[None]:
    """Let a module have whole tensors on the CPU for the length of a block, then take over this rank's part of them.

    A tensor that another module has initialized before (a tied one) keeps its values.
    """
    own = _own(module)
    for kept, leaf, tensor in own:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        kept[leaf] = nn.Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole
    try:
        yield
        made = [kept[leaf] for kept, leaf, _ in own]
    finally:
        for kept, leaf, tensor in own:
            kept[leaf] = tensor
    for (_, _, tensor), values in zip(own, made, strict=True):
        if is_kept and id(tensor) not in done and values is not None:
            _take(tensor, values.detach(), device)
        done.add(id(tensor))


def _take(tensor: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
    """Copy this rank's part of whole values."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(values)
        return
    # Cut from the values that every rank has made, without a word to the others.
    part = distribute_tensor(values.to(device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(part.to_local())


def _share_random_state() -> None:
    """Go on with rank 0's random numbers."""
    if not dist.is_initialized():
        return
    device = "cpu" if "cpu:" in dist.get_backend_config() else f"cuda:{torch.cuda.current_device()}"
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
