"""A low-bit optimizer for tests, built as torchao's are: its state is a tensor class that holds codes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["BLOCK", "Coded", "Hollow", "LowBitSGD"]

BLOCK = 16
aten: Any = torch.ops.aten


class Coded(torch.Tensor):
    """Values as signed codes of 8 bits, with a scale for each block of elements, and a table that all share."""

    codes: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, shape: Any, dtype: torch.dtype | None
    ) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=dtype, device=codes.device
        )
        made.codes, made.scales, made.table, made.own_shape = codes, scales, table, tuple(shape)
        return made

    def __init__(self, *_: Any) -> None:
        self.own_shape: tuple[int, ...]

    @classmethod
    def of(cls, values: torch.Tensor) -> Coded:
        """Encode values."""
        blocks = values.float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1).clamp(min=1e-12)
        codes = (blocks / scales[:, None] * 127).round().to(torch.int8).view(-1)
        table = torch.arange(-127, 128, dtype=torch.float32) / 127
        return cls(codes, scales, table, values.shape, values.dtype)

    def decoded(self) -> torch.Tensor:
        """Return the values."""
        blocks = self.table[self.codes.long() + 127].view(-1, BLOCK) * self.scales[:, None]
        return blocks.view(self.own_shape).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "table"], [self.own_shape, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        return cls(parts["codes"], parts["scales"], parts["table"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = args[0]
        if func is aten.slice.Tensor:
            dim, start, stop = args[1], args[2], min(args[3], len(one))
            row = math.prod(one.shape[1:])
            if dim != 0 or start * row % BLOCK or stop * row % BLOCK:
                raise ValueError(f"rows {start} to {stop} are no whole blocks of {BLOCK}")
            shape = (stop - start, *one.shape[1:])
            codes, scales = one.codes[start * row : stop * row], one.scales[start * row // BLOCK : stop * row // BLOCK]
            return cls(codes, scales, one.table.clone(), shape, torch.float32)  # forgets the data type, as torchao's
        if func in (aten.detach.default, aten.view.default, aten.alias.default):
            return cls(one.codes, one.scales, one.table, one.own_shape, torch.float32)
        raise NotImplementedError(f"{func} of {cls.__name__}")


torch.serialization.add_safe_globals([Coded])  # as torchao does


class Hollow(torch.Tensor):
    """A class that does not say what it is made of."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Hollow:
        made: Hollow = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, device=values.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of {cls.__name__}")


class LowBitSGD(torch.optim.Optimizer):
    """SGD with momentum in a tensor class, where there are whole blocks of at least two; else in plain tensors."""

    def __init__(self, params: Any, lr: float = 0.1, kind: Callable[[torch.Tensor], torch.Tensor] = Coded.of) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad, values = (
                    one.to_local() if isinstance(one, DTensor) else one for one in (parameter.grad, parameter.detach())
                )
                state = self.state[parameter]
                held = state.get("momentum")
                local = held.to_local() if isinstance(held, DTensor) else held
                before = local.decoded() if isinstance(local, Coded) else local
                now = grad if before is None else before * 0.9 + grad
                is_coded = now.numel() >= 2 * BLOCK and now.numel() % BLOCK == 0
                kept = self.kind(now) if is_coded else now.clone()
                values.sub_(kept.decoded() if isinstance(kept, Coded) else now, alpha=group["lr"])
                if isinstance(parameter, DTensor):
                    kept = DTensor.from_local(
                        kept,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                state["momentum"] = kept
