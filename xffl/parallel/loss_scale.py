"""A loss in float16 is scaled up, so that small gradients do not vanish; all ranks of a cell skip a step together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from xffl.errors import ConfigError

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
        self._is_unscaled = False
        self._has_overflowed = False

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Divide gradients by the factor, once before each step.

        Collective over the cell, the first time since :meth:`update`: one all-reduce of a number.

        :param parameters: This rank's parameters.
        :return: Whether a gradient of any rank is not finite, so that the step is to be skipped.
        """
        if self._is_unscaled:
            return self._has_overflowed
        worst = torch.zeros((), device=self._device)
        for parameter in parameters:
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                local.div_(self.scale)
                if not torch.isfinite(local).all():
                    worst.fill_(1.0)
        if self._group is not None:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        self._is_unscaled, self._has_overflowed = True, bool(worst.item())
        return self._has_overflowed

    def update(self) -> None:
        """Choose the factor for the next step; local, after :meth:`unscale` and the step."""
        if self._has_overflowed:
            self.scale, self._steps = max(self.scale / 2.0, 1.0), 0
        else:
            self._steps += 1
            if self._steps == self._growth_interval:
                self.scale, self._steps = min(self.scale * 2.0, 2.0**24), 0
        self._is_unscaled = self._has_overflowed = False

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
