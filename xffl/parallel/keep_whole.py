"""Which parameters FSDP leaves whole: those that ``keep_whole`` names; what becomes of them is in ``whole.py``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.distributed.world import DistributedWorld

__all__ = ["check_whole", "find_whole", "read_names"]


def read_names(names: object) -> tuple[str, ...]:
    """Return the names, or patterns of names, that ``keep_whole`` holds; local."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"keep_whole must be a list of names of parameters, got {names!r}")
    return tuple(names)


def find_whole(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the parameters that patterns of names choose, a tied one under its first name; local.

    :param model: The whole model, or what it has become.
    :param patterns: Names, or patterns of them (:mod:`fnmatch`).
    :return: The parameters by name.
    :raises ConfigError: if a pattern chooses none.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"keep_whole holds {pattern!r}; give names of parameters, or patterns such as '*.scale'")
        found = {id(parameter) for name, parameter in names.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                f"keep_whole names {pattern!r}, but no parameter of the model is called so; give names as "
                "named_parameters() has them, or patterns such as '*.scale'"
            )
        chosen |= found
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in chosen}


def check_whole(
    model: nn.Module, names: tuple[str, ...], world: DistributedWorld | None, *, is_offloaded: bool
) -> None:
    """Raise where parameters cannot be left whole; local."""
    if not find_whole(model, names) or world is None:
        return
    what = f"keep_whole {list(names)}"
    if world.tp_enabled or world.pp_enabled:
        raise ConfigError(f"{what} is for FSDP and HSDP, not for tensor or pipeline parallelism; leave it out")
    if world.ft_manager is not None:
        raise ConfigError(f"{what} is not known to torchft, which averages gradients of replica groups; leave it out")
    if is_offloaded:
        raise ConfigError(f"{what} does not go with cpu_offload, which keeps gradients on the host; leave one out")
