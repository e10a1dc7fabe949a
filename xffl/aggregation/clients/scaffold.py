"""SCAFFOLD: every cell corrects its gradients by how they differ from all cells' ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from xffl.aggregation.clients.base import Client, add_to_gradient, local, restore
from xffl.errors import ConfigError

__all__ = ["Scaffold"]


class Scaffold(Client):
    """Add ``c - c_i`` to the gradients of cell ``i``: what its mean gradient lacks of the mean over the cells.

    The paper's option II: with ``x`` the weights after the last round, ``y_i`` those of the cell now, and ``K * eta``
    the sum of the learning rates of its steps, ``c_i+ = c_i - c + (x - y_i) / (K * eta)``. That is the cell's mean
    gradient since the round. It travels in the round, and ``c`` is its mean over the cells, with
    the round's weights: with equal weights the corrections add up to zero over the cells.

    With momentum a learning rate counts as often as the step goes along gradients
    (:mod:`xffl.aggregation.clients.effort`); gradients of earlier rounds that the momentum still holds blur the mean.
    Weight decay counts as a part of the gradient. A parameter that was not stepped since the last round sends ``c``
    again. A sparse gradient stays sparse, and gets the rows whose correction is not 0. A cell that a round leaves out
    for values that are not finite keeps its correction.

    Local, but for as many bytes more in each round as the model has in fp32. Memory: four copies of this rank's shard,
    one of which only during a round; in fp32, or wider if the parameters are.

    Karimireddy et al., 2020, arXiv 1910.06378.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._anchors: dict[nn.Parameter, torch.Tensor] = {}
        self._corrections: dict[nn.Parameter, torch.Tensor] = {}
        # What is sent in a round (c_i+), and what comes out of it (c).
        self._variates: dict[nn.Parameter, nn.Parameter] = {}
        self._sent: dict[nn.Parameter, torch.Tensor] = {}
        self._reach: dict[nn.Parameter, float] = {}
        self._extra: nn.Module | None = None

    @torch.no_grad()
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Copy the weights that training starts from, and make control variates of 0.

        :param parameters: As :meth:`Client.setup` says.
        :param optimizers: As :meth:`Client.setup` says.
        :raises ConfigError: if one of them is not SGD.
        """
        others = sorted({type(one).__name__ for one in optimizers if not isinstance(one, SGD)})
        if others:
            raise ConfigError(
                f"SCAFFOLD reads the cells' mean gradients off their steps, which {', '.join(others)} scales element "
                "by element; use torch.optim.SGD, with or without momentum"
            )
        stepped = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        self._parameters = {name: one for name, one in parameters.items() if one in stepped}
        for one in self._parameters.values():
            dtype = torch.promote_types(one.dtype, torch.float32)
            self._anchors[one] = local(one).clone()
            self._corrections[one] = torch.zeros_like(local(one), dtype=dtype)
            self._variates[one] = nn.Parameter(torch.zeros_like(one, dtype=dtype), requires_grad=False)
            self._reach[one] = 0.0
        self._extra = _nested({name: self._variates[one] for name, one in self._parameters.items()})

    @property
    def extra(self) -> nn.Module | None:
        """The control variates, named like the parameters."""
        return self._extra

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Correct the gradients.

        :param optimizer: One of the optimizers.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._corrections:
                    add_to_gradient(parameter, self._corrections[parameter])

    def after_step(self, optimizer: Optimizer, factors: Sequence[float]) -> None:
        """Add up the learning rates.

        :param optimizer: The optimizer that made a step.
        :param factors: As :meth:`Client.after_step` says.
        """
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            reach = float(group["lr"]) * factor * (-1.0 if group["maximize"] else 1.0)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._reach:
                    self._reach[parameter] += reach

    @torch.no_grad()
    def before_round(self) -> None:
        """Write this cell's mean gradients into :attr:`extra`."""
        self._sent = {}
        for parameter, variate in self._variates.items():
            value = local(variate)
            if self._reach[parameter]:
                value.copy_(self._anchors[parameter]).sub_(local(parameter))
                value.div_(self._reach[parameter]).sub_(self._corrections[parameter])
            self._sent[parameter] = value.clone()

    @torch.no_grad()
    def after_round(self, *, is_dropped: bool) -> None:
        """Take over the weights and the mean of the variates.

        :param is_dropped: As :meth:`Client.after_round` says.
        """
        for parameter, variate in self._variates.items():
            self._anchors[parameter].copy_(local(parameter))
            if not is_dropped:
                torch.sub(local(variate), self._sent[parameter], out=self._corrections[parameter])
            self._reach[parameter] = 0.0
        self._sent = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last round, the control variates, and the learning rates since.

        :return: Copies of this rank's elements, and numbers.
        """
        tensors = {what: {name: one.clone() for name, one in held.items()} for what, held in self._held().items()}
        return {**tensors, "reach": {name: self._reach[one] for name, one in self._parameters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        :param state: The saved state, of this rank.
        :raises CheckpointError: if it is that of other parameters.
        """
        for what, held in self._held().items():
            restore(held, state[what], "SCAFFOLD")
        self._reach.update({one: float(state["reach"][name]) for name, one in self._parameters.items()})

    @torch.no_grad()
    def _held(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that outlive a round, by kind and name."""
        named = self._parameters.items()
        return {
            "anchors": {name: self._anchors[one] for name, one in named},
            "corrections": {name: self._corrections[one] for name, one in named},
            "variates": {name: local(self._variates[one]) for name, one in named},
        }


def _nested(tensors: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a module that holds tensors under dotted names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, tensor)
    return root
