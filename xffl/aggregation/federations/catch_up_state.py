"""What a cell of an elastic federation tells those that are behind, beside the tensors of the model.

It is a text, which holds how far the server is in each fragment, and what privacy has cost. Whoever has written it: it
is read as values, of the types and sizes that are written, and nothing in it is called.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xffl.aggregation.algorithms.server_optimizer import read_saved_server
from xffl.checkpoint.torch_files import load_archive
from xffl.checks import shown
from xffl.errors import RoundError
from xffl.reading import Fields

__all__ = ["CatchUpState", "read_catch_up_state", "write_catch_up_state"]

LONGEST = 1 << 26
"""Characters of the text, at most."""
_MOST_SPENT = 10_000


@dataclass(frozen=True)
class CatchUpState:
    """What a rank has handed over."""

    optimizers: dict[int, dict[str, Any]]
    """The state of the server in each fragment, without what it keeps for each element."""
    privacy: dict[str, Any] | None
    """What privacy has cost, where the run has any."""


def write_catch_up_state(agreed: Mapping[str, Any], privacy: Mapping[str, Any] | None) -> str:
    """Return as a text what :meth:`GlobalModel.plain_state` has returned, and what privacy has cost."""
    file = io.BytesIO()
    torch.save({"agreed": dict(agreed), "privacy": None if privacy is None else dict(privacy)}, file)
    return base64.b64encode(file.getvalue()).decode()


def read_catch_up_state(text: object, cell: int) -> CatchUpState:
    """Return what :func:`write_catch_up_state` has made a text of.

    :param text: What has come.
    :param cell: Who has sent it.
    :return: The values; :meth:`GlobalModel.load_plain_state` compares them with this cell's own.
    :raises RoundError: if the text is none of that kind.
    """
    what = f"what cell {cell} hands over"
    if not isinstance(text, str) or len(text) > LONGEST:
        size = f"{len(text)} characters" if isinstance(text, str) else shown(text)
        raise RoundError(f"{what} is {size}, and no text of at most {LONGEST}")
    try:
        plain = load_archive(base64.b64decode(text, validate=True), limit=LONGEST)
    except ValueError as error:
        raise RoundError(f"{what} cannot be read: {shown(str(error))}") from error
    told = Fields(plain, what, error=RoundError, hint="run one version of xffl with the same options in all cells")
    optimizers = told.mapping("agreed").any("optimizers")
    if not isinstance(optimizers, Mapping) or not all(type(part) is int for part in optimizers):
        told.fail(f"the optimizers in {what} must be a mapping of fragments, got {shown(optimizers)}")
    read = {
        part: read_saved_server(Fields(one, f"fragment {part} in {what}", error=RoundError)).plain
        for part, one in optimizers.items()
    }
    return CatchUpState(read, None if plain.get("privacy") is None else _read_privacy(told.mapping("privacy")))


def _read_privacy(told: Fields) -> dict[str, Any]:
    told.refuse_others("spent")
    return {"spent": told.list_of("spent", _MOST_SPENT, Fields.any)}  # whose counts Accountant.cover() reads
