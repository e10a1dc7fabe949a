"""The tensors that optimizers keep beside the parameters: where they are, and their start.

An optimizer makes the state of a parameter in the first step that has a gradient for it. Rounds need it before, on all
ranks alike, so it is made here by a step of zero gradients, after which parameters, settings and counts of steps are as
they were: what is left is what the optimizer starts from.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xffl.aggregation.algorithms.moments import Moments, moments_of
from xffl.aggregation.engine.planning.tensors import NUMBERS, ModelTensor
from xffl.aggregation.steps.weight_copies import swaps_weights
from xffl.checks import shorten
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["COUNT", "OptimizerMoments"]

COUNT = "step"
"""What optimizers call the number of steps that a parameter has behind it."""

PLAIN = (torch.Tensor, nn.Parameter, DTensor)
"""Types of tensors that rounds can move; others hold codes and scales."""


class OptimizerMoments:
    """What some optimizers keep beside a model's parameters, for rounds that average it or start it anew.

    Give it to :class:`xffl.Aggregator` as ``moments``; :class:`xffl.FederatedScaling` makes it by itself. Local.

    :param moments: What rounds do with it, see :func:`~xffl.aggregation.algorithms.moments.moments_of`.
    :param optimizers: The optimizer, or several.
    :raises ConfigError: if ``moments`` cannot be read, or leaves nothing to do.
    """

    def __init__(self, moments: str | Mapping[str, Any] | Moments, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        read = moments_of(moments)
        if read is None:
            raise ConfigError(f"moments {moments!r} leave optimizers alone; give average or reset, or leave them out")
        self.asked = read
        """What rounds do with the moments."""
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._holders: dict[nn.Parameter, nn.Module] = {}
        """By parameter a module whose parameters share the memory of its state"""
        self._sources: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        """By parameter the tensors of its state that its holder shows"""
        self._numbers: dict[nn.Parameter, list[str]] = {}
        """By parameter what counts its steps, which a cell takes over that comes late"""

    def __str__(self) -> str:
        return str(self.asked)

    @torch.inference_mode(False)
    @torch.no_grad()
    def tensors_beside(self, entries: Sequence[ModelTensor]) -> list[ModelTensor]:
        """Return what rounds move beside these parameters, after the optimizers have made what they lack; local.

        :param entries: Parameters that training changes and rounds average.
        :return: Tensors of the optimizers' states, named after the parameters.
        :raises ConfigError: if an optimizer keeps something else than such tensors, or none.
        """
        by_parameter = {entry.tensor(): entry for entry in entries}
        self._make_missing(by_parameter)
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        if not any(parameter in by_parameter for one in self._optimizers for parameter in _parameters_of(one)):
            raise ConfigError(
                f"optimizer {kinds} holds no parameter that rounds average, so moments={self.asked} has nothing to do: "
                "an engine such as DeepSpeed steps masters of its own; leave moments out"
            )
        names: set[str] = set()
        beside: list[ModelTensor] = []
        for optimizer in self._optimizers:
            if self.asked.mode == "reset":
                names |= _names_to_restart(optimizer, by_parameter)
                continue
            for parameter in _parameters_of(optimizer):
                entry = by_parameter.get(parameter)
                if entry is None:
                    continue
                tensors = _moments_in(optimizer, parameter, entry.name)
                names |= tensors.keys()
                if tensors:
                    beside += self._entries_of(entry, parameter, tensors, optimizer.state[parameter])
        if not names:
            raise ConfigError(
                f"optimizer {kinds} keeps no tensor beside the parameters, so moments={self.asked} has nothing to do; "
                "leave moments out"
            )
        unknown = sorted(set(self.asked.periods) - names)
        if unknown:
            raise ConfigError(
                f"moments have a period for {', '.join(unknown)}, which optimizer {kinds} does not keep; there are "
                f"{', '.join(sorted(names))}"
            )
        return beside

    def _entries_of(
        self, entry: ModelTensor, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> Iterator[ModelTensor]:
        """Yield entries of a parameter's moments, and of the numbers that go with them."""
        holder = self._holders[parameter] = nn.Module()
        self._sources[parameter] = {}
        self._numbers[parameter] = [name for name in state if name not in tensors and _is_number(state[name])]
        device = local_tensor(parameter).device
        for name in self._numbers[parameter]:
            number = torch.zeros((), dtype=torch.float64, device="cpu" if device.type == "mps" else device)
            holder.register_parameter(name, nn.Parameter(number, requires_grad=False))
        self._show(parameter, tensors)
        for name, tensor in holder.named_parameters():
            yield ModelTensor(
                f"{entry.name} ({name})",
                policy="average",
                codec="none",
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                is_buffer=False,
                is_stepped=False,
                moment=name if name in tensors else NUMBERS,
                beside=entry.name,
                module=holder,
                leaf=name,
            )

    def _show(self, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let a parameter's holder show these tensors of its state, in their memory."""
        shown = self._sources[parameter]
        for name, tensor in tensors.items():
            if shown.get(name) is not tensor:
                shown[name] = tensor
                self._holders[parameter].register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Look the states up anew: a loaded checkpoint has put others in their place; local."""
        self._make_missing(self._holders)
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                holder = self._holders.get(parameter)
                if holder is None:
                    continue
                state = optimizer.state[parameter]
                self._show(parameter, {name: state[name] for name in self._sources[parameter]})
                for name in self._numbers[parameter]:
                    getattr(holder, name).fill_(float(state[name]))

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_numbers(self) -> None:
        """Take the counts of steps over that the last round has brought, with the moments that they belong to; local.

        All cells have made about as many steps, and a bias is corrected by whole numbers.
        """
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                for name in self._numbers.get(parameter, ()):
                    value = float(getattr(self._holders[parameter], name))
                    value = float(round(value)) if name == COUNT else value
                    state = optimizer.state[parameter]
                    if isinstance(state[name], torch.Tensor):
                        state[name].fill_(value)
                    else:
                        state[name] = type(state[name])(value)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restart(self, parameters: Collection[torch.Tensor]) -> None:
        """Start the state of some parameters anew, as in a new optimizer; local."""
        chosen = set(map(id, parameters))
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                if id(parameter) in chosen:
                    optimizer.state.pop(parameter, None)
        self._make_missing(dict.fromkeys(parameters))

    def _make_missing(self, among: Mapping[Any, object]) -> None:
        """Have the optimizers make the state of those parameters that have none."""
        for optimizer in self._optimizers:
            missing = [
                parameter
                for parameter in _parameters_of(optimizer)
                if parameter in among and parameter.requires_grad and not optimizer.state.get(parameter)
            ]
            if missing:
                _step_with_zeros(optimizer, missing)


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_number(value: object) -> bool:
    """Tell whether an entry of a state is one number for the whole parameter."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _moments_in(optimizer: Optimizer, parameter: nn.Parameter, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's state that have its shape; raise where there are others, or other things."""
    what = f"optimizer {type(optimizer).__name__}"
    moments: dict[str, torch.Tensor] = {}
    for key, value in optimizer.state[parameter].items():
        if key == COUNT or (_is_number(value) and parameter.dim() > 0) or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            shape = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise ConfigError(
                f"{what} keeps {key!r}, {shape}, for parameter {name!r} of shape {tuple(parameter.shape)}: only "
                "tensors of the parameter's shape can be averaged beside it; leave moments out"
            )
        local = local_tensor(value)
        if type(value) not in PLAIN or type(local) not in PLAIN or not value.is_floating_point():
            kind = f"{type(local).__name__} of {value.dtype}"
            raise ConfigError(
                f"{what} keeps {key!r} as {kind} for parameter {name!r}: only plain floating-point tensors can be "
                "averaged; leave moments out"
            )
        moments[key] = value
    return moments


def _names_to_restart(optimizer: Optimizer, among: Mapping[Any, object]) -> set[str]:
    """Return what an optimizer keeps for parameters; raise where it cannot start anew, before a round depends on it."""
    what = f"optimizer {type(optimizer).__name__}"
    if swaps_weights(optimizer):
        raise ConfigError(
            f"moments 'reset' would start the weights that {what} evaluates anew; average moments instead"
        )
    states = {parameter: optimizer.state[parameter] for parameter in _parameters_of(optimizer) if parameter in among}
    kept = next(((parameter, state) for parameter, state in states.items() if state), None)
    if kept is not None:
        parameter, state = kept
        del optimizer.state[parameter]
        try:
            _step_with_zeros(optimizer, [parameter])
        finally:
            optimizer.state[parameter] = state
    return {str(name) for state in states.values() for name in state}


def _step_with_zeros(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Make a step of zero gradients with some parameters, and undo what it did but for the states that it made.

    It calls the optimizer's own function, without the hooks that count steps. Collective over the cell where a step is.
    """
    every = list(_parameters_of(optimizer))
    gradients = [parameter.grad for parameter in every]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kept = [local_tensor(parameter).clone() for parameter in parameters]
    for parameter in every:
        parameter.grad = None
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        inspect.unwrap(type(optimizer).step)(optimizer)
    except (TypeError, KeyError, RuntimeError, NotImplementedError) as wrong:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot make the state of a parameter by a step of zero gradients "
            f"({type(wrong).__name__}: {wrong}); leave moments out"
        ) from wrong
    finally:
        for parameter, values in zip(parameters, kept, strict=True):
            local_tensor(parameter).copy_(values)
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
    counters: set[str] = set()
    for parameter in parameters:
        state = optimizer.state[parameter]
        counters |= {key for key, value in state.items() if _is_number(value) and parameter.dim() > 0} - {COUNT}
        count = state.get(COUNT)
        if isinstance(count, torch.Tensor):
            count.zero_()
        elif count is not None:
            state[COUNT] = type(count)(0)
    if counters:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} keeps {shorten(sorted(counters))} for each parameter, numbers whose "
            "start is not known; leave moments out"
        )
