"""Flat tensors of whole bucket groups, by the names of the tensors that their elements are of.

The groups of a rank change with the cells that make rounds, but what it holds of each tensor stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.planning.transfers import GroupTransfer

__all__ = ["NamedPiece", "named_pieces"]


class NamedPiece(NamedTuple):
    """A piece of a tensor in a flat tensor."""

    values: torch.Tensor
    name: str
    numel: int
    """Elements of the tensor that this rank holds"""
    part: slice
    """The piece's place among these"""


def named_pieces(
    flat: Mapping[int, torch.Tensor], transfers: Sequence[GroupTransfer], layout: Layout
) -> Iterator[NamedPiece]:
    """Yield all pieces of flat tensors, which are given by the number of their transfer; local."""
    for transfer in transfers:
        if transfer.number not in flat:
            continue
        at = 0
        for bucket in transfer.buckets:
            for item, start, stop in bucket.pieces:
                origin, numel = layout.held(item)
                values = flat[transfer.number][at : at + stop - start]
                yield NamedPiece(values, layout.name(item), numel, slice(start - origin, stop - origin))
                at += stop - start
