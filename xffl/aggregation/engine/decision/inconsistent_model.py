"""The mark of a model whose ranks could not commit alike: it makes the model unusable until a state dict is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.engine.decision.inconsistent import INCONSISTENT_COUNT, INCONSISTENT_MARK, find_inconsistent
from xffl.distributed.values.sharding import without_wrappers
from xffl.errors import RoundError, TornError

__all__ = ["InconsistentModel", "mark_inconsistent"]


class InconsistentModel:
    """The mark of an inconsistent model: each forward pass of it and its parts raises until a state dict is loaded.

    Local. The mark stands on the model itself, without wrappers, so it holds for whoever uses the model, and for copies
    of it. ``reason`` says why the ranks may no longer agree.
    """

    def __init__(self, model: nn.Module, reason: str) -> None:
        self.reason = reason
        self.is_repaired = False
        """Whether a whole state dict has been loaded."""
        self._model = without_wrappers(model)
        self._errors: Sequence[str] = ()
        self._uses = [
            module.register_forward_pre_hook(self._refuse) for module in {*model.modules(), *self._model.modules()}
        ]
        self._loads: list[RemovableHandle] = [
            self._model.register_load_state_dict_pre_hook(self._begin_load),  # type: ignore[no-untyped-call]
            self._model.register_load_state_dict_post_hook(self._repair),  # type: ignore[no-untyped-call]
        ]
        object.__setattr__(self._model, INCONSISTENT_MARK, self)
        _forget_compiled()

    def check(self) -> None:
        """Raise RoundError."""
        raise RoundError(f"the model is torn: {self.reason}; load a checkpoint on all ranks before going on")

    def remove(self) -> None:
        """Remove the mark of a repaired model; not from within a hook of loading, since torch iterates over these."""
        object.__delattr__(self._model, INCONSISTENT_MARK)
        for handle in self._loads:
            handle.remove()

    def _refuse(self, module: nn.Module, args: Any) -> None:
        self.check()

    def _begin_load(self, module: nn.Module, *args: Any) -> None:
        self._errors = args[-1]  # torch adds to them as it goes, and raises after the hooks

    def _repair(self, module: nn.Module, keys: Any) -> None:
        if self.is_repaired or self._errors or keys.missing_keys or keys.unexpected_keys:
            return
        self.is_repaired = True
        while self._uses:
            self._uses.pop().remove()
        _forget_compiled()


def mark_inconsistent(model: nn.Module, torn: TornError) -> NoReturn:
    """Mark a model, wrapped or not, whose ranks may hold different weights, as the error says.

    A RoundError is raised in its place; an interrupt that caused it goes on as it is.
    """
    cause = torn.__cause__
    bare = without_wrappers(model)
    object.__setattr__(bare, INCONSISTENT_COUNT, getattr(bare, INCONSISTENT_COUNT, 0) + 1)
    if find_inconsistent(bare) is None:
        InconsistentModel(model, str(torn))
    if cause is not None and not isinstance(cause, Exception):
        raise cause from None
    raise RoundError(
        f"{torn}; the model is torn: load a checkpoint of the model and of the aggregator on all ranks"
    ) from cause


def _forget_compiled() -> None:
    """Have functions compiled anew that use the model: torch.compile does not look whether a module's hooks changed."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
