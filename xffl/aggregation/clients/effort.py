"""What local steps amount to: FedNova's effective number of steps, with momentum.

A gradient goes on moving the weights in later steps where there is momentum. So a step goes along several gradients at
once; how many is its *factor*: 1 without momentum, and with it ``1 + rho + rho^2 + ...``, one term for each gradient
that the momentum holds. Over ``K`` steps from an empty momentum the factors add up to ``a = (K - rho (1 - rho^K) / (1 -
rho)) / (1 - rho)`` (Wang et al., 2020, arXiv 2007.07481). A momentum that outlives a round goes on from where it was.
Learning rates are not counted: a cell whose schedule has come further down counts its smaller steps in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from torch.optim import SGD, Optimizer

from xffl.errors import CheckpointError

__all__ = ["Effort"]


class Effort:
    """Follow the momentum of optimizers, step by step; local, and the same on all ranks of a cell.

    Momentum counts for :class:`torch.optim.SGD`. The steps of other optimizers do not grow with what they hold (Adam's
    are normalized): each counts 1.

    :param optimizers: The optimizers of a local step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        # Gradients that a group's momentum holds, for each optimizer; and the factors since of_step was asked.
        self._held: list[list[float]] = [[] for _ in optimizers]
        self._factors: list[list[float]] = [[] for _ in optimizers]

    def before_step(self, optimizer: Optimizer) -> None:
        """Look whether the momentum is empty.

        :param optimizer: The optimizer that is about to make a step.
        """
        if not optimizer.state:
            self._held[self._index(optimizer)] = []

    def after_step(self, optimizer: Optimizer) -> list[float]:
        """Note a step.

        :param optimizer: The optimizer that made it.
        :return: Its factor for each parameter group.
        """
        index = self._index(optimizer)
        factors = self._factors_of(optimizer, self._held[index])
        so_far = self._factors[index]
        so_far += [0.0] * (len(factors) - len(so_far))
        self._factors[index] = [waiting + factor for waiting, factor in zip(so_far, factors, strict=True)]
        return factors

    def of_step(self) -> float:
        """Return what steps since the last call amount to: the mean over all elements, 0 for those not stepped."""
        parts: list[tuple[float, int]] = [
            (factor, sum(parameter.numel() for parameter in group["params"]))
            for optimizer, factors in zip(self._optimizers, self._factors, strict=True)
            for group, factor in zip(optimizer.param_groups, factors or repeat(0.0), strict=False)
        ]
        self._factors = [[] for _ in self._optimizers]
        if len({factor for factor, _ in parts}) <= 1:
            return parts[0][0] if parts else 0.0
        return sum(factor * numel for factor, numel in parts) / sum(numel for _, numel in parts)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the same on all ranks of a cell.

        :return: Numbers.
        """
        return {"held": [list(held) for held in self._held], "factors": [list(factors) for factors in self._factors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        :param state: The saved state.
        :raises CheckpointError: if it is that of other optimizers.
        """
        if len(state["held"]) != len(self._held):
            raise CheckpointError(
                f"the saved momentum is that of {len(state['held'])} optimizers, and there are {len(self._held)}; "
                "resume with the same optimizers"
            )
        self._held = [list(held) for held in state["held"]]
        # Older checkpoints were saved between local steps.
        self._factors = [list(factors) for factors in state.get("factors", [[] for _ in self._held])]

    @staticmethod
    def _factors_of(optimizer: Optimizer, held: list[float]) -> list[float]:
        """Return the factor of a step for each parameter group, and note what the momentum holds after it."""
        held += [0.0] * (len(optimizer.param_groups) - len(held))
        if not isinstance(optimizer, SGD):
            return [1.0] * len(held)
        factors = []
        for number, group in enumerate(optimizer.param_groups):
            momentum = float(group["momentum"])
            # Dampening does not count for the gradient that comes first.
            taken = 1.0 - float(group["dampening"]) if held[number] else 1.0
            held[number] = momentum * held[number] + taken if momentum else 0.0
            ahead = 1.0 + momentum * held[number] if group["nesterov"] else held[number]
            factors.append(ahead if momentum else 1.0)
        return factors

    def _index(self, optimizer: Optimizer) -> int:
        return next(index for index, one in enumerate(self._optimizers) if one is optimizer)
