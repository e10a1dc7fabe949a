"""The adaptive server optimizers: FedAdagrad, FedAdam and FedYogi."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim import Optimizer

from xffl.errors import ConfigError

__all__ = ["RULES", "Adaptive"]

RULES = ("adagrad", "adam", "yogi")
"""How the second moment ``v`` takes in a new pseudo-gradient."""


class Adaptive(Optimizer):
    """Step by ``lr * m / (sqrt(v) + tau)``, with moments of the pseudo-gradients (global minus mean).

    Elementwise, so it may run on any cut of the parameters. Each tensor has the state ``m``, ``v`` (in its dtype, on
    its device) and ``step``. With ``g`` the pseudo-gradient, ``m = beta1 m + (1 - beta1) g``, and ``v`` becomes

    - ``adagrad``: ``v + g^2`` (``beta2`` is not read),
    - ``adam``: ``beta2 v + (1 - beta2) g^2``,
    - ``yogi``: ``v - (1 - beta2) g^2 sign(v - g^2)``.

    Source: Reddi et al., 2021, arXiv 2003.00295, algorithm 2. The ``flwr`` package (1.41) differs from the paper: its
    ``v`` starts from 0 (here ``initial=0``), where the paper asks for ``tau^2`` at least; its FedAdam corrects the bias
    of the moments (here ``is_bias_corrected=True``), where the paper does not, and counts the first round as 2 in doing
    so, where Kingma and Ba count 1; its ``tau`` is 1e-9 unless told otherwise.

    :param params: Tensors to step, or parameter groups.
    :param lr: Server learning rate, 0 or more.
    :param betas: Decay of ``m`` and of ``v``, each from 0 to below 1.
    :param tau: Added to the root of ``v``, above 0: the larger, the closer to a plain step.
    :param rule: One of :data:`RULES`.
    :param initial: ``v`` before the first step, 0 or more; ``None`` for ``tau^2``.
    :param is_bias_corrected: Multiply the learning rate of step ``t`` by ``sqrt(1 - beta2^t) / (1 - beta1^t)`` (Kingma
        and Ba, 2015, arXiv 1412.6980). Not with ``adagrad``, whose ``v`` is a sum.
    :raises ConfigError: if an option is outside its range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        *,
        rule: str = "adam",
        initial: float | None = None,
        is_bias_corrected: bool = False,
    ) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
        if not 0.0 <= lr < math.inf:
            raise ConfigError(f"lr {lr!r} is no finite number of 0 or more; give the server's learning rate")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas {betas!r} are not two numbers from 0 to below 1; give the decays of m and v")
        if not 0.0 < tau < math.inf:
            raise ConfigError(f"tau {tau!r} is no finite number above 0; the paper's is 1e-3")
        if initial is not None and not 0.0 <= initial < math.inf:
            raise ConfigError(
                f"initial {initial!r} is no finite number of 0 or more; leave it out for tau^2 = {tau**2}"
            )
        if is_bias_corrected and rule == "adagrad":
            raise ConfigError(
                "is_bias_corrected=True needs rule adam or yogi: the v of adagrad is a sum without a bias"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "tau": tau,
            "rule": rule,
            "initial": tau**2 if initial is None else initial,
            "is_bias_corrected": is_bias_corrected,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step along the gradients; local.

        :param closure: Called first, with gradients enabled, to make them.
        :return: What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step_tensor(tensor, tensor.grad, group)
        return loss

    def _step_tensor(self, tensor: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[tensor]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["m"] = torch.zeros_like(tensor)
            state["v"] = torch.full_like(tensor, group["initial"])
        m, v = state["m"], state["v"]
        beta1, beta2 = group["betas"]
        state["step"] += 1
        m.lerp_(grad, 1 - beta1)
        if group["rule"] == "adagrad":
            v.addcmul_(grad, grad)
        elif group["rule"] == "adam":
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        else:
            square = grad * grad
            v.addcmul_(square, (v - square).sign_(), value=beta2 - 1)
        lr = group["lr"]
        if group["is_bias_corrected"]:
            count = state["step"].item()
            lr = lr * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        tensor.addcdiv_(m, v.sqrt().add_(group["tau"]), value=-lr)
