"""The tensors of a model: each once, with its name without wrappers and where it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from xffl.errors import ConfigError

__all__ = [
    "WRAPPERS",
    "Entry",
    "Facts",
    "check_reduced",
    "check_tensor",
    "default_policy",
    "held",
    "owners_of",
    "places",
    "tensors_of",
    "ties_of",
]

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that DDP, torch.compile and activation checkpointing put in."""


@dataclass(frozen=True)
class Facts:
    """One tensor: its name without wrappers, what happens to it, and how it is written on its way.

    ``is_stepped`` tells what training changes: averaged parameters that are not frozen. Server optimizers, norms and
    distances are about these.
    """

    name: str
    policy: str
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    is_stepped: bool

    def __str__(self) -> str:
        kind = "buffer" if self.is_buffer else "parameter"
        codec = "" if self.codec == "none" else f", {self.codec}"
        return f"{self.name}\t{self.shape} {str(self.dtype).removeprefix('torch.')} {kind}, {self.policy}{codec}"

    @property
    def real_shape(self) -> tuple[int, ...]:
        """The shape with complex numbers as pairs of real ones."""
        return (*self.shape, 2) if self.dtype.is_complex else self.shape

    @property
    def real_dtype(self) -> torch.dtype:
        """The data type with complex numbers as pairs of real ones."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype


@dataclass(frozen=True)
class Entry(Facts):
    """One tensor of this rank's model, and where it is kept."""

    module: nn.Module = field(repr=False, compare=False)
    leaf: str = field(repr=False, compare=False)

    @property
    def facts(self) -> Facts:
        """What there is to say of the tensor without the model."""
        return Facts(*(getattr(self, one.name) for one in fields(Facts)))

    def tensor(self) -> torch.Tensor:
        """Return the tensor as the model holds it now.

        :return: The parameter or buffer itself.
        :raises ConfigError: if its shape or data type is no longer that of the manifest.
        """
        tensor = getattr(self.module, self.leaf)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ConfigError(
                f"tensor {self.name!r} was {self.shape} {self.dtype} when the Aggregator was made and is {got} now; "
                "make a new Aggregator after changing the model"
            )
        return tensor

    @property
    def held(self) -> Mapping[str, torch.Tensor | None]:
        """What the module keeps the tensor among, to look it up without any check."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    def elements(self, axis: int) -> torch.Tensor:
        """Return this rank's elements as a view in canonical order: the cut axis first, complex numbers as pairs."""
        tensor = self.tensor()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = torch.view_as_real(local.detach()) if local.is_complex() else local.detach()
        return local.movedim(axis, 0) if axis > 0 else local


def tensors_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield each parameter and buffer once, with its name without wrappers and the module that holds it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"module {prefix or 'model'!r} is wrapped by FSDP1, whose flat parameters hide the tensors; use "
                "xffl.shard"
            )
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _name(prefix, leaf), module, leaf, tensor


def ties_of(model: nn.Module) -> dict[int, list[str]]:
    """Return, by the id of each parameter and buffer, all names that it has, without wrappers."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(_name(prefix, leaf))
    return names


def _name(prefix: str, leaf: str) -> str:
    return ".".join(part for part in (*prefix.split("."), leaf) if part and part not in WRAPPERS)


def owners_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules that a tensor lies in, from the model inwards, wrappers too."""
    owners = [model]
    for part in (*name.split(".")[:-1], None):
        inside = owners[-1]._modules
        while part not in inside and (wrapped := [inside[key] for key in inside if key in WRAPPERS]):
            assert wrapped[0] is not None
            owners.append(wrapped[0])
            inside = wrapped[0]._modules
        child = None if part is None else inside[part]
        owners += [] if child is None else [child]
    return owners


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that the model's modules hold, in order."""
    return [
        tensor
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
        if tensor is not None
    ]


def places(model: nn.Module) -> tuple[tuple[int, str, bool, tuple[int, str]], ...]:
    """Return where the model keeps its tensors, in order, which of them train, and the first place of tied ones."""
    first: dict[int, tuple[int, str]] = {}
    return tuple(
        (id(module), leaf, tensor.requires_grad, first.setdefault(id(tensor), (id(module), leaf)))
        for module in model.modules()
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )


def check_reduced(model: nn.Module) -> None:
    """Raise where DDP adds up the gradients of parameters that are no longer the model's."""
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        known = _reduced_by(module)
        for name, parameter in module.module.named_parameters():
            if known is not None and parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"parameter {_name(prefix, name)!r} is another object than when DDP was made, and DDP adds up the "
                    "gradients of others; replace or add parameters before xffl.shard, or load with assign=False"
                )


def _reduced_by(ddp: nn.parallel.DistributedDataParallel) -> set[int] | None:
    """Return the ids of the parameters that DDP was made with; ``None`` where torch does not tell, or some are left."""
    kept = getattr(ddp, "_module_parameters", None)
    return None if kept is None or ddp.parameters_to_ignore else set(map(id, kept))


def default_policy(module: nn.Module, leaf: str, tensor: torch.Tensor) -> str:
    """Return what happens to a tensor that no pattern names."""
    if leaf in module._parameters:
        return "average" if tensor.requires_grad else "local"
    if leaf in module._non_persistent_buffers_set:
        return "local"
    return "average" if tensor.is_floating_point() or tensor.is_complex() else "first"


def check_tensor(name: str, policy: str, tensor: torch.Tensor) -> None:
    """Raise where a tensor cannot take part in a round as its policy says."""
    if nn.parameter.is_lazy(tensor) or (tensor.is_meta and policy != "local"):
        raise ConfigError(f"tensor {name!r} has no values yet; initialize the model before making the Aggregator")
    if policy == "local":
        return
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"tensor {name!r} is {tensor.layout}; only strided tensors are exchanged, set its policy to 'local'"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(
            f"tensor {name!r} is expanded: several of its elements are one in memory; set its policy to 'local', or "
            "clone() it"
        )
    if tensor.is_conj():
        raise ConfigError(f"tensor {name!r} is a conjugate view; resolve_conj() it")
    if tensor.is_neg():  # its memory has the opposite sign
        raise ConfigError(f"tensor {name!r} is a negated view; resolve_neg() it")
    if policy == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"tensor {name!r} is {tensor.dtype} and has no mean; set its policy to 'first' or 'local'")
