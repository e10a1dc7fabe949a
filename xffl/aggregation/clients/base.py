"""The local method of the cells: what changes the gradients between rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xffl.aggregation.manifest import Manifest, Pattern
from xffl.distributed.agreement import agree
from xffl.errors import CheckpointError, ConfigError, XfflError
from xffl.parallel.zero import find_masters

__all__ = ["Client", "add_to_gradient", "check_step", "local", "restore", "set_up"]


class Client(ABC):
    """Change what a cell's local steps do. Derive from it, and give an instance to :class:`xffl.FederatedScaling`.

    Every rank has one. All calls are local: what cells have to tell each other travels in the round, as :attr:`extra`.
    Between two rounds come ``before_step`` and ``after_step`` of each optimizer, then ``before_round``, and, only if
    the round was taken, ``after_round``; after a round that was rejected or skipped, more steps and another
    ``before_round`` follow.

    The ranks compare clients as text: let ``str`` name the options.
    """

    @abstractmethod
    def setup(self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Take the agreed weights that training starts from; called once, before the first step.

        :param parameters: The trainable parameters that rounds average, sharded as they are, by name. What is frozen or
            stays in the cell is not among them, and to be left alone.
        :param optimizers: What steps them.
        """

    @property
    def extra(self) -> nn.Module | None:
        """Tensors that are averaged in each round beside the model, from :meth:`setup` on.

        They must be parameters and keep their identity; a tensor that belongs to a parameter of the model is sharded
        like it.
        """
        return None

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """Change the gradients that an optimizer is about to use.

        :param optimizer: One of the optimizers.
        """

    def after_step(self, optimizer: Optimizer, factors: Sequence[float]) -> None:  # noqa: B027 - not all need it
        """Take note of a step.

        :param optimizer: The optimizer that made it.
        :param factors: For each of its parameter groups, the number of gradients that the step went along (see
            :mod:`xffl.aggregation.clients.effort`): 1 without momentum.
        """

    def before_round(self) -> None:  # noqa: B027 - not all need it
        """Fill :attr:`extra` with what this cell has to tell."""

    def after_round(self, *, is_dropped: bool) -> None:  # noqa: B027 - not all need it
        """Take over what was agreed: the model and :attr:`extra` hold it now.

        :param is_dropped: Whether this cell was left out of the round for values that are not finite.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs on this rank.

        :return: Numbers, texts and copies of tensors.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank; after :meth:`setup`.

        :param state: The saved state.
        :raises CheckpointError: if it is that of other parameters.
        """

    def __str__(self) -> str:
        return type(self).__qualname__


def set_up(
    client: Client, model: nn.Module, optimizers: Sequence[Optimizer], policies: Mapping[Pattern, str] | None
) -> None:
    """Let a client take a model's weights as they are; collective over the world.

    :param client: The client of this rank.
    :param model: The model that trains.
    :param optimizers: What steps it.
    :param policies: What happens to which tensors, as :class:`xffl.Aggregator` takes it.
    :raises ConfigError: if it cannot be set up, or the ranks' clients differ; on all ranks.
    """
    error: XfflError | None = None
    try:
        if find_masters(model) is not None:
            raise ConfigError("ZeRO's gradients are out of a client's reach; train with strategy='fsdp'")
        stepped = {entry.name: entry.tensor() for entry in Manifest(model, policies).entries if entry.is_stepped}
        client.setup(stepped, optimizers)  # type: ignore[arg-type]
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = ConfigError(f"client {client} cannot be set up: {type(wrong).__name__}: {wrong}")
    agree("clients", str(client), error=error)


def check_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where a client cannot change the gradients that a step is about to use; local.

    :param optimizer: The optimizer.
    :param args: What its ``step`` was called with, itself first.
    :param kwargs: What its ``step`` was called with by name.
    :raises ConfigError: if the step computes gradients itself, or they are still scaled.
    """
    if any(one is not None for one in (*args[1:], kwargs.get("closure"))):
        raise ConfigError(
            "step(closure) computes gradients where a client cannot change them; call backward() first, and step()"
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "the gradients are still scaled, which a client's part of them would not be; call "
            "scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, sharded or not, as they lie in memory; call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def add_to_gradient(parameter: nn.Parameter, change: torch.Tensor, *, factor: float = 1.0) -> None:
    """Add this rank's elements to a gradient; a sparse one stays so, and gets the rows in which the change is not 0."""
    gradient = parameter.grad
    assert gradient is not None, "called for what is about to be stepped"
    if gradient.is_sparse:
        rows = change.mul(factor).to(gradient.dtype).to_sparse(gradient.sparse_dim())
        parameter.grad = gradient + rows
    else:
        local(gradient).add_(change, alpha=factor)


def restore(targets: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy saved tensors into those that are there.

    :param targets: This rank's elements, by name.
    :param saved: As many tensors, by the same names.
    :param what: What they are, for the message.
    :raises CheckpointError: if names or shapes differ.
    """
    differ = sorted(name for name in targets.keys() | saved.keys() if _shape(targets, name) != _shape(saved, name))
    if differ:
        raise CheckpointError(
            f"the saved {what} is that of other parameters or another sharding (look at {', '.join(differ[:3])}); "
            "resume with the same model, policies and federation"
        )
    for name, target in targets.items():
        target.copy_(saved[name])


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
