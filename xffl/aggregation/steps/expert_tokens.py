"""Counts the tokens that each expert of a model sees, for means of experts weighed by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from xffl.distributed.values.sharding import WRAPPERS
from xffl.errors import ConfigError

__all__ = ["ExpertTokens"]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ExpertTokens:
    """Counts the tokens that the experts of a model see while it trains: give it to an aggregator as tensor_weights.

    Local; a forward pass costs one small sum a layer. Hooks look at what modules of experts are called with:

    - a :class:`torch.nn.ModuleList` of experts: the rows that each of them is given, under ``NAME.0.*``, ``NAME.1.*``;
    - a module with fused weights, ``[experts, ...]`` each: the first tensor of integers among its arguments. If that
      has two dimensions, it tells the experts of each token (as of transformers' Mixtral, OLMoE, Qwen3-MoE); with one
      dimension, how many tokens each expert gets (as in torchtitan). Numbers beyond the experts are not counted.

    Where a layer is computed again in the backward pass its tokens count twice, in all cells alike. Passes without
    gradients and modules in evaluation are not counted.

    :param model: The model, as it is trained; wrapped, cut over ranks or not.
    :param experts: Pattern of the names of the modules (:mod:`fnmatch`).
    :raises ConfigError: if no module matches, or one has no experts that are known.
    """

    def __init__(self, model: nn.Module, experts: str = "*.experts") -> None:
        self._rows: dict[str, int] = {}
        """By pattern of a single expert, its tokens since the last call"""
        self._fused: dict[str, torch.Tensor] = {}
        """By pattern of fused experts, their tokens since the last call, on the device of these"""
        for name, module in model.named_modules():
            plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            if fnmatchcase(plain, experts) or fnmatchcase(f".{plain}", experts):
                self._watch(plain, module)
        if not (self._rows or self._fused):
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigError(f"experts {experts!r} match no module of the model; names look like {names[-3:]}")

    def __call__(self) -> dict[str, torch.Tensor | float]:
        """Return what was counted since the last call, by pattern of names of parameters; local."""
        told: dict[str, torch.Tensor | float] = {}
        for pattern, rows in self._rows.items():
            told[pattern] = float(rows)
            self._rows[pattern] = 0
        for pattern, counts in self._fused.items():
            told[pattern] = counts.to("cpu", torch.float64)
            self._fused[pattern] = torch.zeros_like(counts)
        return told

    def _watch(self, name: str, module: nn.Module) -> None:
        """Count what a module of experts is called with."""
        if isinstance(module, nn.ModuleList):
            for place, expert in enumerate(module):
                pattern = f"{name}.{place}.*"
                self._rows[pattern] = 0
                self._hook(expert, partial(self._count_rows, pattern))
            return
        sizes = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim()}
        if len(sizes) != 1:
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__} whose parameters do not have one entry for each expert "
                f"(first dimensions {sorted(sizes)}); write a function that counts its tokens"
            )
        pattern = f"{name}.*"
        self._fused[pattern] = torch.zeros(sizes.pop(), dtype=torch.int64)
        self._hook(module, partial(self._count_fused, pattern))

    def _hook(self, module: nn.Module, count: Callable[[Sequence[Any]], None]) -> None:
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called.training and torch.is_grad_enabled():
                count([one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)])

        hook = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _count_rows(self, pattern: str, given: Sequence[torch.Tensor]) -> None:
        if given and given[0].numel():
            self._rows[pattern] += given[0].numel() // given[0].shape[-1]

    def _count_fused(self, pattern: str, given: Sequence[torch.Tensor]) -> None:
        before = self._fused[pattern]
        size = before.shape[0]
        numbers = next((one.detach() for one in given if one.dtype in INTEGERS), None)
        if numbers is None or (numbers.dim() == 1 and numbers.shape[0] != size):
            raise ConfigError(
                f"the experts of {pattern!r} are called without a tensor of integers that tells the experts of each "
                f"token, [tokens, k], or how many tokens each of the {size} gets; write a function that counts them"
            )
        if numbers.dim() != 1:
            flat = numbers.flatten().long()
            numbers = torch.bincount(flat[flat < size], minlength=size)
        self._fused[pattern] = before.to(numbers.device) + numbers
