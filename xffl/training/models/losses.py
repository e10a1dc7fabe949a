"""The loss of causal language models: each token is told from those before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["causal_lm_loss", "count_targets"]

IGNORED = -100
"""Label of tokens that do not count, as in torch and transformers."""


def causal_lm_loss(output: Any, labels: torch.Tensor, *, is_shifted: bool = False) -> torch.Tensor:
    """Return the mean cross-entropy of the next token; local.

    Computed in float32. Ranks or micro-batches whose labels count unequally many tokens have to be weighted by
    :func:`count_targets`.

    :param output: What the model returned, or its logits (batch, sequence, vocabulary).
    :param labels: Tokens (batch, sequence), -100 where they do not count: the tokens that went in, or with
        ``is_shifted`` those that follow them.
    :param is_shifted: Whether ``labels`` are the tokens that follow; where ranks have parts of sequences they must be.
    :return: The mean over the tokens that count; 0 where none does.
    """
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    if not is_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)  # no branch, which would wait for the device


def count_targets(labels: torch.Tensor, *, is_shifted: bool = False) -> int:
    """Return how many tokens :func:`causal_lm_loss` takes the mean of; local.

    :param labels: As there.
    :param is_shifted: As there.
    :return: The number.
    """
    return int(((labels if is_shifted else labels[:, 1:]) != IGNORED).sum())
