"""Whose gradients DistributedDataParallel reduces."""

from __future__ import annotations

from torch import nn

from xffl.checks import shorten
from xffl.compat.ddp import delayed_parameters, find_in_reducer, parameters_at_start
from xffl.errors import ConfigError

__all__ = ["reduced_parameters"]


def reduced_parameters(prefix: str, module: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a DDP module reduces, as far as torch tells."""
    ignored = set(module.parameters_to_ignore)
    made_with = parameters_at_start(module)
    known = None if made_with is None else set(map(id, made_with))
    training = [
        (name, parameter)
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in ignored and (known is None or id(parameter) in known)
    ]
    in_reducer = find_in_reducer(module, len(training))
    if in_reducer is not None:
        unfrozen = [repr(name) for name, parameter in training if id(parameter) not in in_reducer]
        if unfrozen:
            raise ConfigError(
                f"parameters {shorten(unfrozen)} in the DistributedDataParallel module {prefix or 'model'!r} were "
                "unfrozen after it was made, and it reduces the gradients of those that trained then; call "
                "requires_grad_() before DistributedDataParallel or xffl.shard"
            )
    delayed = [parameter for parameter in delayed_parameters(module) if parameter.requires_grad]
    return [parameter for _, parameter in training] + delayed
