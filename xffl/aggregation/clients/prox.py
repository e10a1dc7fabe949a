"""FedProx: local steps are pulled back to where the round left the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xffl.aggregation.clients.base import Client, add_to_gradient, local, restore
from xffl.errors import ConfigError

__all__ = ["FedProx"]


class FedProx(Client):
    """Add ``mu / 2 * |w - w_global|^2`` to the loss of every cell, as ``mu * (w - w_global)`` to the gradients.

    Local: one more copy of this rank's shard, and a pass over it before each step. A parameter without a gradient is
    left alone; a sparse gradient stays sparse, and gets the rows that have moved since the round. Gradients are changed
    in the optimizer's ``step``, so after any clipping. With ``mu`` 0 the weights are those of no client, to the last
    bit.

    Li et al., 2020, arXiv 1812.06127.

    :param mu: Strength of the pull, at least 0; the paper's experiments try 0.001, 0.01, 0.1 and 1.
    :raises ConfigError: if ``mu`` is no such number.
    """

    def __init__(self, mu: float = 0.01) -> None:
        is_number = isinstance(mu, (int, float)) and not isinstance(mu, bool)
        if not is_number or not 0.0 <= mu < math.inf:
            raise ConfigError(
                f"mu {mu!r} is no finite number from 0; give the strength of the pull to the global model"
            )
        self.mu = float(mu)
        self._parameters: dict[str, nn.Parameter] = {}
        self._anchors: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Copy the weights that training starts from.

        :param parameters: As :meth:`Client.setup` says.
        :param optimizers: As :meth:`Client.setup` says.
        """
        self._parameters = dict(parameters)
        self._anchors = {parameter: local(parameter).clone() for parameter in parameters.values()}

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Add the pull to the gradients.

        :param optimizer: One of the optimizers.
        """
        if self.mu == 0.0:  # adding 0 would turn a gradient of -0.0 into 0.0
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._anchors:
                    add_to_gradient(parameter, local(parameter) - self._anchors[parameter], factor=self.mu)

    @torch.no_grad()
    def after_round(self, *, is_dropped: bool) -> None:
        """Copy the agreed weights.

        :param is_dropped: As :meth:`Client.after_round` says; a cell that was left out has the agreed weights, too.
        """
        for parameter, anchor in self._anchors.items():
            anchor.copy_(local(parameter))

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last round.

        :return: Copies of this rank's elements.
        """
        return {"anchors": {name: self._anchors[one].clone() for name, one in self._parameters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        :param state: The saved state, of this rank.
        :raises CheckpointError: if it is that of other parameters.
        """
        restore({name: self._anchors[one] for name, one in self._parameters.items()}, state["anchors"], "FedProx")

    def __str__(self) -> str:
        return f"FedProx(mu={self.mu})"
