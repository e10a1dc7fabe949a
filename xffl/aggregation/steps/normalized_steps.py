"""The effective number of local steps, where optimizers have momentum or several make a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from torch.optim import SGD, Optimizer

from xffl.errors import CheckpointError

__all__ = ["NormalizedSteps"]


class NormalizedSteps:
    """Follow the momentum of optimizers, step by step; local, and the same on all ranks of a cell.

    A step's effective number is FedNova's tau (arXiv 2007.07481): how often each gradient counts in the end, relative
    to plain SGD. Momentum counts for :class:`torch.optim.SGD`. The steps of other optimizers do not grow with what they
    hold (Adam's are normalized): each counts 1.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        # For each optimizer and parameter group: gradients that the momentum holds, and factors since of_step().
        self._momenta: list[list[float]] = [[] for _ in optimizers]
        self._factors: list[list[float]] = [[] for _ in optimizers]

    def before_step(self, optimizer: Optimizer) -> None:
        """Look whether the momentum of an optimizer is empty when it is about to step."""
        if not optimizer.state:
            self._momenta[self._index(optimizer)] = []

    def after_step(self, optimizer: Optimizer) -> list[float]:
        """Note a step of an optimizer; return its factor for each parameter group."""
        index = self._index(optimizer)
        momenta = self._momenta[index]
        momenta += [0.0] * (len(optimizer.param_groups) - len(momenta))
        factors = [1.0] * len(momenta)
        for number, group in enumerate(optimizer.param_groups if isinstance(optimizer, SGD) else ()):
            momentum = float(group["momentum"])
            # Dampening does not count for the gradient that comes first.
            gradient = 1.0 - float(group["dampening"]) if momenta[number] else 1.0
            momenta[number] = momentum * momenta[number] + gradient if momentum else 0.0
            if momentum:
                factors[number] = 1.0 + momentum * momenta[number] if group["nesterov"] else momenta[number]
        waiting = self._factors[index]
        waiting += [0.0] * (len(factors) - len(waiting))  # groups may have been added
        for number, factor in enumerate(factors):
            waiting[number] += factor
        return factors

    def of_step(self) -> float:
        """Return the effective steps since the last call: the mean over all elements, 0 for those not stepped."""
        factors: list[float] = []
        groups: list[dict[str, Any]] = []
        for index, optimizer in enumerate(self._optimizers):
            for group, factor in zip(optimizer.param_groups, self._factors[index] or repeat(0.0), strict=False):
                factors.append(factor)
                groups.append(group)
            self._factors[index] = []
        if not factors:
            return 0.0
        if factors.count(factors[0]) == len(factors):
            return factors[0]
        numels: list[int] = [sum(parameter.numel() for parameter in group["params"]) for group in groups]
        return sum(factor * numel for factor, numel in zip(factors, numels, strict=True)) / sum(numels)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the same on all ranks of a cell."""
        return {"held": [list(one) for one in self._momenta], "factors": [list(factors) for factors in self._factors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; ``CheckpointError`` for another number of optimizers."""
        if len(state["held"]) != len(self._momenta):
            raise CheckpointError(
                f"the saved momentum is that of {len(state['held'])} optimizers, and there are {len(self._momenta)}; "
                "resume with the same optimizers"
            )
        self._momenta = [list(one) for one in state["held"]]
        # Older checkpoints were saved between local steps.
        self._factors = [list(factors) for factors in state.get("factors", [[] for _ in self._momenta])]

    def _index(self, optimizer: Optimizer) -> int:
        return self._optimizers.index(optimizer)
