"""A loss in float16 is scaled up, so that small gradients do not vanish; all ranks of a cell skip a step together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from xffl.distributed.norms import alike, norms_of, values_of
from xffl.errors import ConfigError, StateError

__all__ = ["LossScale"]


class LossScale:
    """A factor that halves after a step whose gradients overflow and doubles after many that do not.

    torch's ``GradScaler`` decides on each rank by the gradients that the rank holds; here the ranks of a cell decide
    together, whatever part of the gradients each of them holds.

    Source: Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740).

    :param scale: The factor to begin with.
    :param growth_interval: Steps without overflow after which it doubles.
    :param group: The ranks of the cell; ``None`` for a rank alone.
    :param device: Where the group's backend communicates from.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth_interval: int = 2000,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device,
    ) -> None:
        self.scale = scale
        self._growth_interval = growth_interval
        self._steps = 0
        self._group = group
        self._device = device
        self._unscaled: set[int] = set()
        self._has_overflowed = False
        self._is_spent = False

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to compute gradients of; local."""
        self._is_spent = False
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Divide gradients by the factor, those of each parameter once before :meth:`update`.

        Collective over the cell: one all-reduce of a number.

        :param parameters: This rank's parameters.
        :return: Whether a gradient of any rank is not finite, so that the step is to be skipped.
        :raises StateError: if these gradients were stepped on already.
        """
        if self._is_spent:
            raise StateError("the gradients were stepped on already; give all optimizers to one call of step")
        found = [parameter for parameter in parameters if id(parameter) not in self._unscaled]
        local = [_local(parameter.grad) for parameter in found if parameter.grad is not None]
        for same in alike(gradient for gradient in local if not gradient.is_sparse):
            torch._foreach_div_(same, self.scale)
        for gradient in local:
            if gradient.is_sparse:
                gradient.div_(self.scale)
        held = [values for values in map(values_of, local) if values.numel()]
        worst = norms_of(held, torch.inf, self._device).isfinite().all().logical_not().float()
        if self._group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        self._unscaled.update(map(id, found))
        self._has_overflowed |= bool(worst.item())
        return self._has_overflowed

    def update(self, *, is_lost: bool = False) -> None:
        """Choose the factor for the next step; local, after :meth:`unscale` and the step.

        :param is_lost: Whether the step was not taken for another reason: then the gradients say nothing.
        """
        if is_lost:
            pass
        elif self._has_overflowed:
            self.scale, self._steps = max(self.scale / 2.0, 1.0), 0
        else:
            self._steps += 1
            if self._steps == self._growth_interval:
                self.scale, self._steps = min(self.scale * 2.0, 2.0**24), 0
        self._unscaled.clear()
        self._has_overflowed, self._is_spent = False, True

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs, the same on all ranks of a cell."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; local.

        :param state: What :meth:`state_dict` gave.
        :raises ConfigError: if it is another object's.
        """
        if set(state) != {"scale", "steps"}:
            raise ConfigError(f"a loss scale's state has 'scale' and 'steps', not {sorted(state)}; give its own")
        self.scale, self._steps = float(state["scale"]), int(state["steps"])


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
