"""Where a run takes place: versions, packages, hosts, the command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from xffl import __version__
from xffl.cluster.hardware import describe_host
from xffl.distributed.distributed_state import DistributedState

__all__ = ["describe_environment", "describe_hosts"]

PACKAGES = (
    *("numpy", "torchmetrics", "transformers", "datasets", "peft", "safetensors", "deepspeed", "tensorboard", "wandb"),
    *("mlflow-skinny", "matplotlib", "rich", "jsonargparse"),
)


def describe_environment(hosts: list[dict[str, Any]], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe this process's environment; local.

    :param hosts: What :func:`describe_hosts` gave.
    :param before: What was written when the run began, where it goes on.
    :return: Plain values.
    """
    now = datetime.now(timezone.utc).isoformat()
    found = {
        "xffl": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "packages": _packages(),
        "hosts": hosts,
        "command": [sys.executable, *sys.argv],
        "started_at": now,
    }
    if before is not None:
        found["started_at"] = before.get("started_at", now)
        found["resumed_at"] = [*before.get("resumed_at", []), now]
    return found


def describe_hosts(state: DistributedState) -> list[dict[str, Any]]:
    """Describe each node once; collective over the world.

    :param state: The state of the world.
    :return: Plain values for each node.
    """
    mine = None if state.node_local_rank else (state.node_rank, describe_host())
    told: list[tuple[int | None, dict[str, Any]] | None] = [mine]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
    once = {(node, host["host"]): host for node, host in filter(None, told)}
    return list(once.values())


def _packages() -> dict[str, str]:
    """Return the versions of the packages that a run may depend on, where they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
