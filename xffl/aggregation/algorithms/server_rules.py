"""Server rules: how a round's pseudo-gradient changes the global model.

The pseudo-gradient is the global model minus the combined value of the cells, so that gradient descent moves towards
the cells' mean: :class:`SGD` with a learning rate of 1 and no momentum ends exactly there.

Every rank takes the step for the elements that it holds, and all must get the same bits, whatever their processor and
version of torch. So a rule is made of sums, differences, products and quotients of tensors, each in a kernel of its
own, and of :func:`~xffl.aggregation.arithmetic.square_root`: IEEE 754 prescribes every bit of their results
(:mod:`xffl.aggregation.arithmetic`). ``addcmul``, ``lerp``, ``alpha=`` and fused kernels round differently on other
processors.

The built-in rules have the names, options and defaults of :mod:`torch.optim`, and agree with torch up to the rounding
of single operations; :class:`Adaptive` has those of the paper "Adaptive Federated Optimization".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from xffl.aggregation.arithmetic import square_root
from xffl.checks import number, one_of
from xffl.errors import ConfigError

__all__ = ["RULES", "SGD", "Adagrad", "Adam", "AdamW", "Adaptive", "ServerRule", "power"]

State = dict[str, torch.Tensor]
Numbers = dict[str, float]


def power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by repeated products, for an exponent of 0 or more; pure.

    ``math.pow`` is libm's, which differs between systems.
    """
    result = 1.0
    square = base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


@runtime_checkable
class ServerRule(Protocol):
    """The computation of a server optimizer, as pure functions of flat tensors; all three are local.

    No base class is needed: any object with these methods is a rule. Its attributes are its options, which ranks
    compare; they must be the same on all ranks and never change.
    """

    def init(self, values: torch.Tensor) -> State:
        """Return the state before the first step.

        :param values: Elements of the global model that this rank holds, flat, in fp32 (fp64 for fp64).
        :return: By name, flat tensors with an element for each of ``values``, of its type and on its device.
        """

    def numbers(self, step: int) -> Numbers:
        """Return the numbers of a step that depend on the number of the step only.

        All ranks use the numbers that one of them has computed, so functions whose results differ between systems, such
        as ``math.cos`` or ``**``, are allowed here. A learning rate is called ``lr``: schedules change this number.

        :param step: How many steps the server has made of these elements so far; saved with the state.
        :return: Up to eight finite numbers by name, the same names in every step.
        """

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
        """Step ``values`` and ``state`` in place, element by element.

        It is called for pieces of the model, cut anywhere. Only the operations named above in this module are allowed.

        :param values: A piece of the global model.
        :param pseudo_gradient: The global model minus the combined value; its memory may be overwritten.
        :param state: The same piece of the state.
        :param numbers: The result of :meth:`numbers` on the rank that computes it, with the schedule's learning rate.
        """


@dataclass(frozen=True)
class SGD:
    """Step like :class:`torch.optim.SGD`: ``values - lr * gradient``, with momentum.

    :param lr: Learning rate, 0 or more.
    :param momentum: Factor of the old momentum in each step, 0 or more; 0 for no momentum and no state.
    :param dampening: Part of a gradient that is not added to the momentum, after the first step.
    :param weight_decay: Factor of the values that are added to the gradient.
    :param nesterov: Step by the gradient and the next momentum; needs momentum and no dampening.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        number("momentum", self.momentum, 0.0, hint="give the factor of the old momentum")
        number("dampening", self.dampening)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigError(
                f"nesterov needs momentum above 0 and no dampening, got momentum {self.momentum!r} and dampening "
                f"{self.dampening!r}"
            )

    def init(self, values: torch.Tensor) -> State:
        """Return the momentum, if there is any."""
        return {"momentum": torch.zeros_like(values)} if self.momentum else {}

    def numbers(self, step: int) -> Numbers:
        """Return the learning rate, and the factor of the gradient that is added to the momentum."""
        return {"lr": self.lr, "inflow": 1.0 - self.dampening if step else 1.0}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
        """Take one step."""
        direction = pseudo_gradient
        if self.weight_decay:
            pseudo_gradient.add_(torch.mul(values, self.weight_decay))
        if self.momentum:
            momentum = state["momentum"].mul_(self.momentum)
            inflow = numbers["inflow"]
            momentum.add_(pseudo_gradient if inflow == 1.0 else torch.mul(pseudo_gradient, inflow))
            if self.nesterov:
                pseudo_gradient.add_(torch.mul(momentum, self.momentum))
            else:
                direction = momentum
        values.sub_(torch.mul(direction, numbers["lr"], out=pseudo_gradient))


@dataclass(frozen=True)
class Adam:
    """Step like :class:`torch.optim.Adam` (Kingma and Ba, 2015, arXiv 1412.6980).

    :param lr: Learning rate, 0 or more.
    :param betas: Decay of the first and of the second moment, each from 0 to below 1.
    :param eps: Added to the root of the second moment, 0 or more.
    :param weight_decay: Factor of the values that are added to the gradient.
    :param amsgrad: Divide by the largest second moment so far.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        object.__setattr__(self, "betas", _checked_betas(self.betas))
        number("eps", self.eps, 0.0)

    def init(self, values: torch.Tensor) -> State:
        """Return both moments, and with ``amsgrad`` the largest second one."""
        names = ("m", "v", "v_max") if self.amsgrad else ("m", "v")
        return {name: torch.zeros_like(values) for name in names}

    def numbers(self, step: int) -> Numbers:
        """Return the learning rate, and the corrections of the moments' bias towards 0."""
        first, second = (1.0 - power(beta, step + 1) for beta in self.betas)
        return {"lr": self.lr, "m_factor": 1.0 / first, "root_factor": 1.0 / math.sqrt(second)}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
        """Take one step."""
        if self.weight_decay:
            self._decay(values, pseudo_gradient, numbers)
        beta1, beta2 = self.betas
        m = state["m"].mul_(beta1)
        v = state["v"].mul_(beta2)
        v.add_(torch.mul(pseudo_gradient, pseudo_gradient).mul_(1.0 - beta2))
        m.add_(pseudo_gradient.mul_(1.0 - beta1))
        if self.amsgrad:
            v = torch.maximum(state["v_max"], v, out=state["v_max"])
        scale = square_root(v).mul_(numbers["root_factor"]).add_(self.eps)
        direction = torch.div(m, scale, out=scale)
        values.sub_(direction.mul_(numbers["lr"] * numbers["m_factor"]))

    def _decay(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, numbers: Numbers) -> None:
        pseudo_gradient.add_(torch.mul(values, self.weight_decay))


@dataclass(frozen=True)
class AdamW(Adam):
    """Step like :class:`torch.optim.AdamW` (Loshchilov and Hutter, 2019, arXiv 1711.05101).

    :param lr: Learning rate, 0 or more.
    :param betas: Decay of the first and of the second moment, each from 0 to below 1.
    :param eps: Added to the root of the second moment, 0 or more.
    :param weight_decay: ``lr`` times this factor times the values is subtracted from them, beside the step.
    :param amsgrad: Divide by the largest second moment so far.
    """

    weight_decay: float = 1e-2

    def _decay(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, numbers: Numbers) -> None:
        values.mul_(1.0 - numbers["lr"] * self.weight_decay)


@dataclass(frozen=True)
class Adagrad:
    """Step like :class:`torch.optim.Adagrad` (Duchi et al., 2011).

    :param lr: Learning rate, 0 or more.
    :param lr_decay: The learning rate of step ``t``, from 0, is divided by ``1 + t * lr_decay``.
    :param weight_decay: Factor of the values that are added to the gradient.
    :param initial_accumulator_value: The sum of squares before the first step, 0 or more.
    :param eps: Added to the root of the sum, 0 or more.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            number(name, getattr(self, name), 0.0)

    def init(self, values: torch.Tensor) -> State:
        """Return the sum of squares."""
        return {"v": torch.full_like(values, self.initial_accumulator_value)}

    def numbers(self, step: int) -> Numbers:
        """Return the learning rate and its decay."""
        return {"lr": self.lr, "decay": 1.0 / (1.0 + step * self.lr_decay)}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
        """Take one step."""
        if self.weight_decay:
            pseudo_gradient.add_(torch.mul(values, self.weight_decay))
        v = state["v"].add_(torch.mul(pseudo_gradient, pseudo_gradient))
        scale = square_root(v).add_(self.eps)
        direction = torch.div(pseudo_gradient, scale, out=scale)
        values.sub_(direction.mul_(numbers["lr"] * numbers["decay"]))


RULES = ("adagrad", "adam", "yogi")
"""How a new pseudo-gradient changes the second moment ``v`` of :class:`Adaptive`."""


@dataclass(frozen=True)
class Adaptive:
    """Step by ``lr * m / (sqrt(v) + tau)``, with moments of the pseudo-gradients (global minus mean).

    With ``g`` the pseudo-gradient, ``m = beta1 m + (1 - beta1) g``, and ``v`` becomes

    - ``adagrad``: ``v + g^2`` (``beta2`` is not read),
    - ``adam``: ``beta2 v + (1 - beta2) g^2``,
    - ``yogi``: ``v - (1 - beta2) g^2 sign(v - g^2)``.

    Source: Reddi et al., 2021, arXiv 2003.00295, algorithm 2, which requires ``v`` to start from at least ``tau^2``;
    the manual says how other programs differ.

    :param lr: Server learning rate, 0 or more.
    :param betas: Decay of ``m`` and of ``v``, each from 0 to below 1.
    :param tau: Added to the root of ``v``, above 0: the larger, the closer to a plain step.
    :param rule: One of :data:`RULES`.
    :param initial: ``v`` before the first step, 0 or more; ``None`` for ``tau^2``.
    :param is_bias_corrected: Multiply the learning rate of step ``t``, from 1, by ``sqrt(1 - beta2^t) / (1 - beta1^t)``
        (Kingma and Ba, 2015, arXiv 1412.6980). Not with ``adagrad``, whose ``v`` is a sum.
    """

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3
    rule: str = "adam"
    initial: float | None = None
    is_bias_corrected: bool = False

    def __post_init__(self) -> None:
        one_of("rule", self.rule, RULES)
        number("lr", self.lr, 0.0, hint="give the server's learning rate")
        object.__setattr__(self, "betas", _checked_betas(self.betas))
        number("tau", self.tau, above=0.0, hint="the paper's is 1e-3")
        if self.initial is None:
            object.__setattr__(self, "initial", self.tau**2)
        else:
            number("initial", self.initial, 0.0, hint=f"leave it out for tau^2 = {self.tau**2}")
        if self.is_bias_corrected and self.rule == "adagrad":
            raise ConfigError("is_bias_corrected=True needs rule adam or yogi: adagrad's v is a sum without a bias")

    def init(self, values: torch.Tensor) -> State:
        """Return both moments."""
        assert self.initial is not None, "__post_init__ has set it"
        return {"m": torch.zeros_like(values), "v": torch.full_like(values, self.initial)}

    def numbers(self, step: int) -> Numbers:
        """Return the learning rate and the correction of the moments' bias."""
        correction = 1.0
        if self.is_bias_corrected:
            first, second = (1.0 - power(beta, step + 1) for beta in self.betas)
            correction = math.sqrt(second) / first
        return {"lr": self.lr, "correction": correction}

    def step(self, values: torch.Tensor, pseudo_gradient: torch.Tensor, state: State, numbers: Numbers) -> None:
        """Take one step."""
        beta1, beta2 = self.betas
        m, v = state["m"], state["v"]
        square = torch.mul(pseudo_gradient, pseudo_gradient)
        if self.rule == "adagrad":
            v.add_(square)
        elif self.rule == "adam":
            v.mul_(beta2).add_(square.mul_(1.0 - beta2))
        else:
            v.sub_(torch.sub(v, square).sign_().mul_(square).mul_(1.0 - beta2))
        m.mul_(beta1).add_(pseudo_gradient.mul_(1.0 - beta1))
        scale = square_root(v, out=square).add_(self.tau)
        direction = torch.div(m, scale, out=scale)
        values.sub_(direction.mul_(numbers["lr"] * numbers["correction"]))


def _check_rates(lr: float, weight_decay: float) -> None:
    number("lr", lr, 0.0, hint="give the server's learning rate")
    number("weight_decay", weight_decay, 0.0)


def _checked_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return the decays of two moments as a tuple."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas must be two numbers >= 0 and < 1, got {betas!r}; give the decays of m and v")
    return betas[0], betas[1]
