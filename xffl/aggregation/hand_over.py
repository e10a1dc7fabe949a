"""What a cell of an elastic federation tells those that are behind, beside the tensors of the model.

It is a text, which holds the plain values of the server's optimizers and schedules, and what privacy has cost. Whoever
has written it: it is read as values, of the types and sizes that this cell's own have, and nothing in it is called.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from xffl.checkpoint.torch_files import load_archive
from xffl.checks import shown
from xffl.errors import RoundError
from xffl.reading import Fields

__all__ = ["HandOver", "read_hand_over", "write_hand_over"]

LONGEST = 1 << 26
"""Characters of the text, at most."""
_MOST_NAMES = 64
_MOST_SPENT = 10_000
_MOST_ELEMENTS = 16


@dataclass(frozen=True)
class HandOver:
    """What a rank has handed over."""

    optimizers: dict[int, dict[str, Any]]
    """The state of the server's optimizer of each fragment, without what it keeps for each element."""
    privacy: dict[str, Any] | None
    """What privacy has cost, where the run has any."""


def write_hand_over(agreed: Mapping[str, Any], privacy: Mapping[str, Any] | None) -> str:
    """Return as a text what :meth:`GlobalModel.plain_state` has returned, and what privacy has cost."""
    file = io.BytesIO()
    torch.save({"agreed": dict(agreed), "privacy": None if privacy is None else dict(privacy)}, file)
    return base64.b64encode(file.getvalue()).decode()


def read_hand_over(text: object, own: Mapping[str, Any], cell: int) -> HandOver:
    """Return what :func:`write_hand_over` has made a text of, compared with this cell's state.

    :param text: What has come.
    :param own: The plain state of this cell.
    :param cell: Who has sent it.
    :return: The values.
    :raises RoundError: if the text does not go with this cell's state.
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
    fragments = own["optimizers"]
    if not isinstance(optimizers, Mapping) or not all(type(part) is int for part in optimizers):
        told.fail(f"the optimizers in {what} must be a mapping of fragments, got {shown(optimizers)}")
    read = {
        part: _read_optimizer(Fields(one, f"fragment {part} in {what}", error=RoundError), fragments.get(part))
        for part, one in optimizers.items()
    }
    return HandOver(read, None if plain.get("privacy") is None else _read_privacy(told.mapping("privacy")))


def _read_optimizer(told: Fields, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the plain state of one fragment's optimizer; ``own`` is this rank's, if it holds some of the fragment."""
    elements = told.mapping_of("elements", _MOST_NAMES, Fields.mapping)
    numbers = told.mapping_of("numbers", _MOST_NAMES, _read_number)
    options = told.mapping_of("options", _MOST_NAMES, Fields.any)
    schedule = told.optional("schedule", Fields.mapping)
    state: dict[str, Any] = {
        "elements": {name: {} for name in elements},
        "numbers": numbers,
        "options": options,
        "schedule": None if schedule is None else schedule.all_of(_MOST_NAMES, Fields.any),
        "ended": told.optional("ended", Fields.text),
        "asked": told.mapping_of("asked", _MOST_NAMES, Fields.text),
    }
    # The one replaces what the optimizer steps, the others what the schedule does.
    methods = {name for name in state["schedule"] or {} if callable(getattr(LRScheduler, name, None))}
    if reserved := sorted({"params"} & {*options} | methods):
        told.fail(f"{told.place(reserved[0])} is no value of an optimizer or a schedule")
    if own is not None:
        for name in ("options", "schedule"):
            _compare(told, name, state[name], own[name])
    return state


def _compare(told: Fields, name: str, theirs: Any, own: Any) -> None:
    """Refuse values of other types than this rank's; another version of torch may have other names."""
    if isinstance(own, Mapping) and isinstance(theirs, Mapping):
        for key in own.keys() & theirs.keys():
            _compare(told, f"{name}.{key}", theirs[key], own[key])
        return
    is_number = all(type(one) in (int, float) for one in (theirs, own))
    is_unknown = theirs is None or own is None
    if not is_number and not is_unknown and type(theirs) is not type(own):
        told.fail(f"{told.place(name)} must be {type(own).__name__}, as in this cell, got {shown(theirs)}")


def _read_number(told: Fields, name: str) -> Any:
    """Return a number that an optimizer keeps, which may be a tensor of a few elements."""
    value = told.any(name)
    is_small = isinstance(value, torch.Tensor) and value.numel() <= _MOST_ELEMENTS and not value.is_complex()
    if not is_small and type(value) not in (int, float, bool, type(None)):
        told.fail(f"{told.place(name)} must be a number, got {shown(value)}")
    return value


def _read_privacy(told: Fields) -> dict[str, Any]:
    told.refuse_others("spent")
    return {"spent": told.list_of("spent", _MOST_SPENT, Fields.any)}  # whose counts PrivacyAccountant.cover() reads
