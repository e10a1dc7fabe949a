"""Quantized training: linear layers that compute with 8-bit numbers, while their weights stay as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from xffl.checks import one_of, shorten
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.errors import ConfigError, StateError
from xffl.extras import optional_import
from xffl.training.mixins.base import TrainerMixin

__all__ = ["QuantizeConfig", "QuantizeConfigMixin", "QuantizeMixin"]

KINDS = ("int8", "fp8")
HEADS = ("lm_head",)
"""What is excluded by default, where a model has it."""
FP8_MULTIPLE = 16
"""What the sizes of a layer must be multiples of for matrix products in float8."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Which layers compute with 8-bit numbers.

    :param kind: ``int8`` (weights and inputs are rounded, as a model that is to run in int8 needs it; no faster),
        ``fp8`` (all matrix products of training in float8, by torchao, faster on GPUs that have it) or ``None`` for
        none.
    :param exclude: Linear layers that stay as they are: patterns (``fnmatch``) of their full names or of the end of
        them, such as ``lm_head`` or ``layers.0.*``.
    :param emulate: Whether float8 is only rounded to and computed with in the layer's own data type; ``None`` for yes
        where the device has no float8 (CPUs, GPUs older than NVIDIA's Ada or AMD's MI300). int8 always is.
    """

    kind: str | None = None
    exclude: tuple[str, ...] = HEADS
    emulate: bool | None = None

    def __post_init__(self) -> None:
        if self.kind is not None:
            one_of("quantize.kind", self.kind, KINDS)
        if isinstance(self.exclude, str) or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigError(f"quantize.exclude must be a list of names, such as ['lm_head'], got {self.exclude!r}")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.kind == "int8" and self.emulate is False:
            raise ConfigError(
                "quantize.emulate is False, but int8 is always emulated in training; leave it out, or give kind='fp8'"
            )


@dataclass(kw_only=True)
class QuantizeConfigMixin:
    """The section of quantized training.

    :param quantize: Which layers compute with 8-bit numbers.
    """

    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)


class QuantizeMixin(TrainerMixin):
    """Let the linear layers of a trainer's models compute with 8-bit numbers.

    Weights, their names, shapes and data types, gradients and optimizers stay as they are, and so do checkpoints and
    rounds: values are rounded where a layer multiplies, and gradients take the rounding for the identity. Layers are
    the modules whose class is ``torch.nn.Linear`` itself; classes derived from it say themselves how they compute.

    ``int8`` rounds each row of weights and each token's inputs by a scale of its own, as torchao's
    ``Int8DynamicActivationInt8WeightConfig`` does in inference. ``fp8`` is torchao's float8 training with one scale for
    each tensor (P. Micikevicius et al., FP8 Formats for Deep Learning, 2022, https://arxiv.org/abs/2209.05433): inputs
    and gradients of a rank's batch share a scale, so that results depend a little on how batches are cut.

    In evaluation, torch's ``TransformerEncoderLayer`` reads its layers' weights itself, as they are, unless
    ``torch.backends.mha.set_fastpath_enabled(False)`` is called.
    """

    _left_alone: frozenset[nn.Module] | None = None
    """The linear layers that are excluded, once the others are quantized"""

    def configure(self) -> None:
        """Quantize the models that the other mixins made, before they are sharded; collective over the world."""
        # ModelSetupMixin makes models before it calls the next class, so they exist in any order of the mixins.
        super().configure()
        self._quantize()

    def apply_quantization(self) -> None:
        """Quantize the models; collective over the world where it has not been done yet.

        Sharding remembers the layers that it has met, so :meth:`configure` does this already; calling it again, after
        ``super().setup()`` say, changes nothing.

        :raises ConfigError: if the models cannot be quantized as asked; on all ranks.
        :raises StateError: if there are no models yet, or layers have come since then.
        """
        if self._left_alone is None:
            self._quantize()
            return
        late = [name for name, layer in _linear_layers(self.named_models()).items() if layer not in self._left_alone]
        if late:
            raise StateError(
                f"{shorten(late, 4)}: added after the models were quantized; add layers in configure_models or "
                "post_configure_models, or name them in quantize.exclude"
            )

    def _quantize(self) -> None:
        asked: QuantizeConfig | None = getattr(self.config, "quantize", None)
        if asked is None:
            raise ConfigError(
                f"{type(self.config).__name__} has no section quantize; derive it from QuantizeConfigMixin, as the "
                "trainer is derived from QuantizeMixin"
            )
        if asked.kind is None:
            return
        with run_on_all_ranks("layers to quantize") as share:
            models = self.named_models()
            if not models:
                raise StateError("there are no models to quantize; use SetupMixin, and call super().configure() first")
            layers, left_alone = _choose(models, asked.exclude)
            if not layers and self._left_alone is None:
                raise ConfigError(
                    f"the models {sorted(models)} have no torch.nn.Linear that quantize.exclude {asked.exclude} leaves "
                    "over; give kind=None, or exclude less"
                )
            how, make = _maker(asked, layers, self.device)
            share(f"{how}: {', '.join(layers)}")
        for layer in dict.fromkeys(layers.values()):
            # It computes as another one, with its own tensors; parents and hooks that hold it hold it still.
            other = make(layer)
            vars(layer).update({name: value for name, value in vars(other).items() if name not in vars(layer)})
            layer.__class__ = type(other)
        self._left_alone = left_alone


class Int8Linear(nn.Linear):
    """A linear layer whose weights and inputs are rounded to 8-bit integers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its name in torch
        """Multiply rounded inputs by rounded weights.

        :param input: Of shape (..., in_features).
        :return: Of shape (..., out_features).
        """
        output: torch.Tensor = _RoundedProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class _RoundedProduct(torch.autograd.Function):
    """Keep what was rounded for the backward pass and round it again: FSDP frees weights in between, but no copies.

    torchao's fake quantization keeps copies, and gives no gradient to a row's largest weight.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(_rounded(inputs), _rounded(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (inputs, weight) = gradients, ctx.saved_tensors
        rows, dtype = gradient.reshape(-1, gradient.shape[-1]), gradient.dtype
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = (gradient @ _rounded(weight).to(dtype)).to(inputs.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.T @ _rounded(inputs).reshape(-1, inputs.shape[-1]).to(dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_inputs, of_weight, of_bias


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round each row to 256 steps around zero."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True) / 127.5).clamp_min(torch.finfo(torch.float32).eps)
    return ((wide * (1.0 / scale)).round().clamp(-128, 127) * scale).to(values.dtype)


def _linear_layers(models: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    """Return the layers that are not quantized, by all of their names."""
    return {
        f"{model}.{name}" if name else model: module
        for model, whole in models.items()
        for name, module in whole.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear
    }


def _choose(
    models: Mapping[str, nn.Module], exclude: Sequence[str]
) -> tuple[dict[str, nn.Linear], frozenset[nn.Module]]:
    """Return the layers to quantize by name, and those to leave alone."""
    layers = _linear_layers(models)
    excluded: set[nn.Module] = set()
    for pattern in exclude:
        names = [name for name in layers if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not names and pattern not in HEADS:
            raise ConfigError(
                f"quantize.exclude {pattern!r} matches no linear layer; the models have {shorten(layers, 4)}"
            )
        excluded.update(layers[name] for name in names)
    return {name: layer for name, layer in layers.items() if layer not in excluded}, frozenset(excluded)


def _maker(
    asked: QuantizeConfig, layers: Mapping[str, nn.Linear], device: torch.device
) -> tuple[str, Callable[[nn.Linear], nn.Linear]]:
    """Return how layers compute, and what makes such a layer of another one."""
    if asked.kind == "int8":
        return "int8", lambda layer: Int8Linear(layer.in_features, layer.out_features, device="meta")
    has_float8 = _has_float8(device)
    emulate = not has_float8 if asked.emulate is None else asked.emulate
    if not emulate and not has_float8:
        raise ConfigError(f"quantize.emulate is False, but {device} has no float8; give True, or leave it out")
    odd = [name for name, layer in layers.items() if any(size % FP8_MULTIPLE for size in layer.weight.shape)]
    if not emulate and odd:
        raise ConfigError(
            f"{shorten(odd, 4)}: float8 needs sizes that are multiples of {FP8_MULTIPLE}; name them in "
            "quantize.exclude, or give quantize.emulate=True"
        )
    with optional_import("quantize", "quantize.kind 'fp8' needs torchao"):
        float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    return "emulated fp8" if emulate else "fp8", partial(float8.convert_to_float8_training, config=config)


def _has_float8(device: torch.device) -> bool:
    """Tell whether a device multiplies float8 matrices."""
    least = (9, 4) if torch.version.hip else (8, 9)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
