"""Commands that only alpha-unito/xffl has, and what took over here: users of it may type them."""

from __future__ import annotations

from xffl.errors import ConfigError

__all__ = ["UPSTREAM_COMMANDS", "refuse_upstream_command"]

UPSTREAM_COMMANDS = {
    "config": "xffl init writes a project with its configuration, and xffl workflow init a workflow over facilities",
    "run": "streamflow run starts what xffl workflow init has written, and xffl submit a batch job on one cluster",
    "simulate": "xffl exec --processes 4 --federated 2,2 SCRIPT starts a training in cells on this machine",
}
"""Each of these commands, and what to call instead."""


def refuse_upstream_command(name: str) -> None:
    """Raise for a command of that project, with what took over; do nothing for other names."""
    if name in UPSTREAM_COMMANDS:
        raise ConfigError(
            f"{name!r} is a command of alpha-unito/xffl, not of this package: {UPSTREAM_COMMANDS[name]} "
            "(docs/from_upstream.rst)"
        )
