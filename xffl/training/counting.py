"""What a loop reads off batches and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xffl.errors import ConfigError

__all__ = ["count_samples", "find_loss"]


def count_samples(batch: Any) -> int:
    """Return the rows of a batch's first tensor; local.

    :param batch: A tensor, or mappings and sequences of them.
    :return: The number of samples.
    :raises ConfigError: if there is no tensor with rows in it.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        raise ConfigError(
            f"a batch of {type(batch).__name__} has no tensor whose rows are samples; overload count_samples"
        )
    return int(tensor.shape[0])


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a training step has returned; local.

    :param output: A tensor, or a mapping or an object with ``loss``.
    :return: The loss; ``None`` where there is none.
    """
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    inside: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        inside = batch
    return next((found for one in inside if (found := _first_tensor(one)) is not None), None)
