"""Steps inside a backward pass, which are refused where rounds count them."""

from __future__ import annotations

from xffl.errors import ConfigError

__all__ = ["backward_error"]


def backward_error(what: str) -> ConfigError:
    """Return what is raised where a step is made in a backward pass, which still reads what a round would change."""
    return ConfigError(
        f"{what} inside a backward pass, where a round would change parameters that gradients are still computed "
        "from; give optimizer=None, and call scaling.step() after backward()"
    )
