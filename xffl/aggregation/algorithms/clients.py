"""Clients: algorithms that change the gradients of local steps, such as FedProx and SCAFFOLD."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from xffl.aggregation.engine.planning.tensors import Manifest, Pattern
from xffl.checks import number
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import CheckpointError, ConfigError, XfflError
from xffl.parallel.zero.mark import find_masters

__all__ = [
    "Client",
    "FedProx",
    "Scaffold",
    "add_to_gradient",
    "check_step",
    "has_closure",
    "local",
    "restore",
    "set_up",
]


class Client(ABC):
    """Change what a cell's local steps do. Derive from it, and give an instance to :class:`xffl.FederatedScaling`.

    Every rank has an instance. All calls are local; tensors that the cells exchange travel in the round, as
    :attr:`extra`. Between two rounds ``before_step`` and ``after_step`` are called for each step of each optimizer,
    then ``before_round``, and ``after_round`` only if the round has changed the model. After a round that was rejected
    or skipped, or to which no cell gave anything, more steps and another ``before_round`` follow.

    The ranks compare clients as text, so ``str`` must name the options.
    """

    @abstractmethod
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Read the agreed weights from which training starts; called once, before the first step.

        :param parameters: The trainable parameters that rounds average, by name, sharded as they are in the model.
            Leave all others (frozen, or local to the cell) unchanged.
        :param optimizers: The optimizers that step them.
        """

    @property
    def extra(self) -> nn.Module | None:
        """Tensors that are averaged in each round beside the model, from :meth:`setup` on.

        They must be parameters, and stay the same objects. A tensor that belongs to a parameter of the model is
        sharded like that parameter.
        """
        return None

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """Change the gradients that an optimizer is about to use."""

    def after_step(self, optimizer: Optimizer, factors: Sequence[float]) -> None:  # noqa: B027 - not all need it
        """Record a step.

        :param optimizer: The optimizer that made it.
        :param factors: For each of its parameter groups, the number of gradients that the step amounts to: 1 without
            momentum (see :mod:`xffl.aggregation.steps.normalized_steps`).
        """

    def before_round(self) -> None:  # noqa: B027 - not all need it
        """Write the values that this cell sends in the round into :attr:`extra`."""

    def after_round(self, *, is_dropped: bool) -> None:  # noqa: B027 - not all need it
        """Read the result of the round, which the model and :attr:`extra` hold now.

        :param is_dropped: Whether this cell was left out of the round: for values that are not finite, or because the
            model that it took over has replaced steps of its own. Also where one cell of an elastic federation has only
            handed its model over: then :attr:`extra` holds no mean.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs on this rank: numbers, texts and copies of tensors."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, after :meth:`setup`; raise if it does not fit."""

    def __str__(self) -> str:
        return type(self).__qualname__


def set_up(
    client: Client, model: nn.Module, optimizers: Sequence[Optimizer], policies: Mapping[Pattern, str] | None
) -> None:
    """Call a client's ``setup`` with a model's current weights; collective over the world."""

    def unfit(wrong: Exception) -> XfflError:
        return ConfigError(f"client {client} cannot be set up: {type(wrong).__name__}: {wrong}")

    with run_on_all_ranks("clients", convert=unfit) as share:
        if find_masters(model) is not None:
            raise ConfigError("a client cannot change the gradients of ZeRO; train with strategy='fsdp'")
        stepped = {entry.name: entry.tensor() for entry in Manifest(model, policies).entries if entry.is_stepped}
        client.setup(stepped, optimizers)  # type: ignore[arg-type]
        share(client)


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the arguments of a step's hook have a closure, which computes the gradients in the step."""
    return any(argument is not None for argument in (*args[1:], kwargs.get("closure")))


def check_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where a client cannot change the gradients that a step is about to use; local."""
    if has_closure(args, kwargs):
        raise ConfigError("step(closure) computes gradients that a client cannot change; call backward(), then step()")
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "the gradients are still scaled, and what a client adds to them would not be; call "
            "scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, sharded or not, in their order in memory; call it under no_grad."""
    return local_tensor(tensor).detach()


def add_to_gradient(parameter: nn.Parameter, change: torch.Tensor, *, factor: float = 1.0) -> None:
    """Add this rank's elements to a gradient. A sparse gradient stays sparse, and gets the rows of nonzero change."""
    gradient = parameter.grad
    assert gradient is not None, "only parameters that are about to be stepped are changed"
    if gradient.is_sparse:
        rows = change.mul(factor).to(gradient.dtype).to_sparse(gradient.sparse_dim())
        parameter.grad = gradient + rows
    else:
        local(gradient).add_(change, alpha=factor)


def restore(targets: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy saved tensors into existing ones."""
    shapes, saved_shapes = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (targets, saved))
    differ = sorted(name for name in shapes | saved_shapes if shapes.get(name) != saved_shapes.get(name))
    if differ:
        raise CheckpointError(
            f"the saved {what} belongs to other parameters or another sharding (look at {', '.join(differ[:3])}); "
            "resume with the same model, policies and federation"
        )
    for name, target in targets.items():
        target.copy_(saved[name])


def _with_gradient(group: Mapping[str, Any], among: Mapping[nn.Parameter, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group that have a gradient and are keys of ``among``."""
    return [parameter for parameter in group["params"] if parameter.grad is not None and parameter in among]


class FedProx(Client):
    """Add ``mu / 2 * |w - w_global|^2`` to the loss of every cell, as ``mu * (w - w_global)`` to the gradients.

    Local: one more copy of this rank's shard, and a pass over it before each step. A parameter without a gradient is
    left unchanged; a sparse gradient stays sparse, and gets the rows that have changed since the round. Gradients are
    changed in the optimizer's ``step``, so after any clipping. With ``mu`` 0 the weights have the same bits as without
    a client.

    Li et al., 2020, arXiv 1812.06127.

    :param mu: Strength of the pull, at least 0; the paper's experiments try 0.001, 0.01, 0.1 and 1.
    :raises ConfigError: if ``mu`` is anything else.
    """

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = number("mu", mu, 0.0, hint="give the strength of the pull to the global model")
        self._parameters: dict[str, nn.Parameter] = {}
        self._anchors: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Copy the weights that training starts from."""
        self._parameters = dict(parameters)
        self._anchors = {parameter: local(parameter).clone() for parameter in parameters.values()}

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Add the pull to the gradients."""
        if self.mu == 0.0:  # adding 0 would turn a gradient of -0.0 into 0.0
            return
        for group in optimizer.param_groups:
            for parameter in _with_gradient(group, self._anchors):
                add_to_gradient(parameter, local(parameter) - self._anchors[parameter], factor=self.mu)

    @torch.no_grad()
    def after_round(self, *, is_dropped: bool) -> None:
        """Copy the agreed weights."""
        for parameter, anchor in self._anchors.items():
            anchor.copy_(local(parameter))

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last round."""
        return {"anchors": {name: self._anchors[parameter].clone() for name, parameter in self._parameters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        restore(
            {name: self._anchors[parameter] for name, parameter in self._parameters.items()},
            state["anchors"],
            "FedProx",
        )

    def __str__(self) -> str:
        return f"FedProx(mu={self.mu})"


class Scaffold(Client):
    """Add ``c - c_i`` to the gradients of cell ``i``: the difference between the cells' mean gradient and its own.

    The paper's option II: with ``x`` the weights after the last round, ``y_i`` those of the cell now, and ``K * eta``
    the sum of the learning rates of its steps, ``c_i+ = c_i - c + (x - y_i) / (K * eta)``. This is the cell's mean
    gradient since the round. It is sent in the round, and ``c`` is its mean over the cells, with the round's weights:
    with equal weights the corrections add up to zero over the cells.

    With momentum a learning rate is multiplied by the number of gradients that the step amounts to
    (:mod:`xffl.aggregation.steps.normalized_steps`); gradients of earlier rounds that the momentum still holds make the
    mean less exact. Weight decay counts as a part of the gradient. A parameter that was not stepped since the last
    round sends ``c`` again. A sparse gradient stays sparse, and gets the rows whose correction is not 0. A cell that a
    round leaves out for values that are not finite, or whose steps are lost because it takes the model over, keeps its
    correction.

    Local, except that each round sends the size of the model in fp32 in addition. Memory: four copies of this rank's
    shard, one of which only during a round; in fp32, or wider if the parameters are.

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
        """Copy the weights that training starts from, and make control variates of 0."""
        others = sorted({type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, SGD)})
        if others:
            raise ConfigError(
                f"SCAFFOLD computes mean gradients from the cells' steps, which {', '.join(others)} scales element "
                "by element; use torch.optim.SGD, with or without momentum"
            )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        stepped = {parameter for group in groups for parameter in group["params"]}
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter in stepped}
        for parameter in self._parameters.values():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._anchors[parameter] = local(parameter).clone()
            self._corrections[parameter] = torch.zeros_like(local(parameter), dtype=dtype)
            self._variates[parameter] = nn.Parameter(torch.zeros_like(parameter, dtype=dtype), requires_grad=False)
            self._reach[parameter] = 0.0
        self._extra = _nested({name: self._variates[parameter] for name, parameter in self._parameters.items()})

    @property
    def extra(self) -> nn.Module | None:
        """The control variates, named like the parameters."""
        return self._extra

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Correct the gradients."""
        for group in optimizer.param_groups:
            for parameter in _with_gradient(group, self._corrections):
                add_to_gradient(parameter, self._corrections[parameter])

    def after_step(self, optimizer: Optimizer, factors: Sequence[float]) -> None:
        """Add up the learning rates."""
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            reach = float(group["lr"]) * factor * (-1.0 if group["maximize"] else 1.0)
            for parameter in _with_gradient(group, self._reach):
                self._reach[parameter] += reach

    @torch.no_grad()
    def before_round(self) -> None:
        """Write this cell's mean gradients into :attr:`extra`."""
        self._sent = {}
        for parameter, variate in self._variates.items():
            value = local(variate)
            # Without a step since the last round the variate still holds c, the result of that round: send it again.
            if self._reach[parameter]:
                value.copy_(self._anchors[parameter]).sub_(local(parameter))
                value.div_(self._reach[parameter]).sub_(self._corrections[parameter])
            self._sent[parameter] = value.clone()

    @torch.no_grad()
    def after_round(self, *, is_dropped: bool) -> None:
        """Copy the agreed weights, and compute the corrections from the mean of the variates."""
        for parameter, variate in self._variates.items():
            self._anchors[parameter].copy_(local(parameter))
            if not is_dropped:  # the variate holds c now: the correction of the next steps is c - c_i+
                torch.sub(local(variate), self._sent[parameter], out=self._corrections[parameter])
            self._reach[parameter] = 0.0
        self._sent = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last round, the control variates, and the sums of learning rates since."""
        state: dict[str, Any] = {}
        for what, by_name in self._lasting().items():
            state[what] = {name: tensor.clone() for name, tensor in by_name.items()}
        return {**state, "reach": {name: self._reach[parameter] for name, parameter in self._parameters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        for what, by_name in self._lasting().items():
            restore(by_name, state[what], "SCAFFOLD")
        self._reach.update({parameter: float(state["reach"][name]) for name, parameter in self._parameters.items()})

    @torch.no_grad()
    def _lasting(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that outlive a round, by kind and name."""
        named = self._parameters.items()
        return {
            "anchors": {name: self._anchors[parameter] for name, parameter in named},
            "corrections": {name: self._corrections[parameter] for name, parameter in named},
            "variates": {name: local(self._variates[parameter]) for name, parameter in named},
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
