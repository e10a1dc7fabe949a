"""What a cell's model counts in a round: tokens, samples, or a number."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from xffl.checks import number
from xffl.errors import ConfigError

__all__ = ["SHIFTING_LOSSES", "BatchCount", "find_count", "label_names", "shifts_labels"]

IGNORED = -100
"""The label of a token that the losses of transformers leave out"""

SHIFTING_LOSSES = frozenset({"ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration"})
"""The ``loss_type`` of models of transformers whose loss compares each token with the label after it"""
SHIFTING_CLASSES = ("LMHeadModel", "DoubleHeadsModel", "ForCausalImageModeling")
"""How the names end of models of transformers that name no loss, and have that of causal models, as GPT2LMHeadModel"""


class BatchCount(Protocol):
    """Counts what this rank trains on between two rounds; local."""

    def add(self, batch: Any) -> None:
        """Count a batch that is about to be trained on."""

    def counted(self) -> float:
        """Return the count since the last round, which a checkpoint keeps."""

    def restart(self, count: float) -> None:
        """Go on from a count."""


class TokenCount:
    """Counts labels that the loss takes in; the number stays on the device until somebody asks for it.

    :param is_shifted: Whether the model compares a token with the label after it, as causal models do.
    :param names: Under which names the model takes labels.
    """

    def __init__(self, *, is_shifted: bool, names: Collection[str]) -> None:
        self._is_shifted = is_shifted
        self._names = sorted({*names} - {"shift_labels"})
        self._before = 0.0
        self._tokens: torch.Tensor | None = None

    def add(self, batch: Any) -> None:
        """Count the labels of a batch, without the first one of each sequence where the model shifts them.

        ``shift_labels``, as collators without padding make them, are shifted already. A single label of each row is
        the class, or the number, of the whole row. A batch of pairs, as TRL's DPOTrainer has it, has no labels: the
        tokens of chosen and rejected completions count. Labels of several losses, as those of GPT2DoubleHeadsModel, are
        refused: they may be of tokens, of rows, or of both.
        """
        named = batch if isinstance(batch, Mapping) else {}
        several = " and ".join(name for name in self._names if named.get(name) is not None)
        if " and " in several:
            raise ConfigError(
                f"weight='tokens' counts the labels of one loss, but a batch has {several}, each of a loss of its own; "
                "give weight='samples', or a number as the weight"
            )
        name = next((name for name in ("shift_labels", "labels", "completion_mask") if named.get(name) is not None), "")
        values = named.get(name)
        if not isinstance(values, torch.Tensor):
            given = f"a {type(values).__name__} of them" if name else _names_of(batch)
            raise ConfigError(
                f"weight='tokens' counts labels in a tensor, but a batch has {given}; give weight='samples', or a "
                "number as the weight"
            )
        is_of_rows = values.dim() < 2 or values.shape[-1] == 1
        if name == "completion_mask":
            tokens = values[..., 1:].sum()
        elif name == "shift_labels" or is_of_rows or not self._is_shifted:
            tokens = values.ne(IGNORED).sum()
        else:
            tokens = values[..., 1:].ne(IGNORED).sum()
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def counted(self) -> float:
        """Return the tokens since the last round."""
        return self._before + (0.0 if self._tokens is None else float(self._tokens.item()))

    def restart(self, count: float) -> None:
        """Go on from a number of tokens."""
        self._before = count
        self._tokens = None


class SampleCount:
    """Counts the rows of batches."""

    def __init__(self) -> None:
        self._samples = 0.0

    def add(self, batch: Any) -> None:
        """Count the rows of a batch: the length of its first tensor, or the sequences that one row is packed from."""
        bounds = batch.get("cu_seq_lens_q") if isinstance(batch, Mapping) else None
        rows = len(bounds) - 1 if bounds is not None else next(_find_rows(batch), None)
        if rows is None:
            raise ConfigError(
                f"weight='samples' counts rows of tensors, but a batch has {_names_of(batch)}; give a number as the "
                "weight"
            )
        self._samples += rows

    def counted(self) -> float:
        """Return the samples since the last round."""
        return self._samples

    def restart(self, count: float) -> None:
        """Go on from a number of samples."""
        self._samples = count


class FixedCount:
    """Counts a number of the user's for a cell that has trained since the last round.

    :param weight: The number, on one rank of the cell, and 0 on the others: a round adds them up.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._count = 0.0

    def add(self, batch: Any) -> None:
        """Note that the cell trains."""
        self._count = self._weight

    def counted(self) -> float:
        """Return the number, if there was a batch since the last round."""
        return self._count

    def restart(self, count: float) -> None:
        """Go on from the number, or from 0."""
        self._count = count


def _find_rows(batch: Any) -> Iterator[int]:
    """Return the lengths of a batch's tensors."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _find_rows(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _find_rows(value)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model of transformers compares each token with the label after it.

    :param model: The model, or what holds it.
    :return: Whether it does so; not if there is no model of transformers.
    """
    for module in model.modules():  # from the outside: those within have losses of their own, which are not used
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            return False  # its decoder may be a causal model
        name = type(module).__name__
        loss = getattr(module, "loss_type", None)
        if isinstance(loss, str):
            return loss in SHIFTING_LOSSES
        if name.endswith(SHIFTING_CLASSES):
            return not name.endswith("WithLMHeadModel")
    return False


def label_names(model: nn.Module) -> frozenset[str]:
    """Return the names under which a model, or one that it holds, takes labels.

    :param model: The model, or what holds it.
    :return: The names, such as ``labels`` and ``mc_labels``.
    """
    names: set[str] = set()
    for kind in {type(module) for module in model.modules()}:
        forward = getattr(kind, "forward", None)  # compiled scripts have none in their class
        if callable(forward):
            names.update(inspect.signature(forward).parameters)
    return frozenset(name for name in names if name.endswith(("label", "labels")))


def find_count(
    weight: str | float, cell_rank: int, *, is_shifted: bool = False, names: Collection[str] = ()
) -> BatchCount:
    """Return what counts as a user has asked for it.

    :param weight: ``tokens``, ``samples``, or a number above 0.
    :param cell_rank: This rank's number in its cell.
    :param is_shifted: Whether the model compares a token with the label after it.
    :param names: Under which names the model takes labels.
    :return: A counter of this rank.
    :raises ConfigError: if it is something else.
    """
    if weight == "tokens":
        return TokenCount(is_shifted=is_shifted, names=names)
    if weight == "samples":
        return SampleCount()
    if isinstance(weight, str):
        raise ConfigError(f"weight is {weight!r}; give 'tokens', 'samples', or a number for this cell")
    checked = number("weight", weight, above=0.0)
    return FixedCount(checked if cell_rank == 0 else 0.0)


def _names_of(batch: object) -> str:
    """Return the names of a batch's tensors, for a message; a trainer that generates has lists of prompts."""
    return str(sorted(batch)) if isinstance(batch, Mapping) else f"no names: it is a {type(batch).__name__}"
