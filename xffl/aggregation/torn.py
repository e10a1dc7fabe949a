"""A model whose weights may differ between ranks is not to be used."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from xffl.errors import RoundError

__all__ = ["Tear"]


class Tear:
    """Mark a model as torn: every forward pass raises until a state dict is loaded into it.

    Local. The mark stands on the model itself, so it holds for whoever uses it.

    :param model: The model.
    :param reason: Why the ranks may no longer agree.
    """

    def __init__(self, model: nn.Module, reason: str) -> None:
        self.reason = reason
        self.is_mended = False
        self._handles: list[RemovableHandle] = []
        wrapped = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        for module in (model, wrapped):
            if isinstance(module, nn.Module):
                self._handles.append(module.register_forward_pre_hook(self._refuse))
                self._handles.append(module.register_load_state_dict_post_hook(self._mend))  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise while the model is torn.

        :raises RoundError: always, until a state dict has been loaded.
        """
        if not self.is_mended:
            raise RoundError(f"the model is torn: {self.reason}; load a checkpoint on all ranks before going on")

    def _refuse(self, module: nn.Module, args: Any) -> None:
        self.check()

    def _mend(self, module: nn.Module, keys: Any) -> None:
        self.is_mended = True
        for handle in self._handles:
            handle.remove()
