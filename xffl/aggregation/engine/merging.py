"""A mean merged into values that have changed since they were copied for it, in a delayed round."""

from __future__ import annotations

import torch

from xffl.aggregation.arithmetic import piece_length, wide_type

__all__ = ["merge_values"]


def merge_values(local: torch.Tensor, copy: torch.Tensor, mean: torch.Tensor, alpha: float | None) -> None:
    """Merge a mean into flat values in place; local.

    :param local: The values as they are now.
    :param copy: The values that the mean was made of, on this rank; not read with ``alpha``.
    :param mean: What all ranks have agreed on; it stays as it is.
    :param alpha: The part of the local value that stays; ``None`` adds what has changed since the copy to the mean.
    """
    # Piece by piece on a CPU: what is computed stays in its cache, and in memory that it has at hand.
    length = piece_length(local.device)
    for pieces in zip(*(torch.split(values, length) for values in (local, copy, mean)), strict=True):
        now, before, agreed = (piece.to(wide_type(mean.dtype)) for piece in pieces)  # rounded once
        if alpha is not None:
            merged = torch.lerp(agreed, now, alpha)
        else:  # what has not moved keeps the sign of a zero
            merged = torch.where(now == before, agreed, torch.sub(now, before).add_(agreed))
        pieces[0].copy_(merged)
