"""Tensors that are cut over ranks: their parts, norms of gradients, bytes; and plain values, as they are kept and sent.

FSDP2 puts other parameters in the place of an optimizer's while a unit is gathered, and the outermost unit stays
gathered after a forward pass that no backward pass follows (a validation). Whoever compares parameters by identity, or
reads their gradients, asks here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from xffl.checks import group, shown
from xffl.distributed.parameters import AXES, AXES_OF
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.distributed.cell_meshes import ParallelDims

__all__ = [
    "Plain",
    "bytes_of",
    "dtype_of",
    "from_bytes",
    "from_plain",
    "local_tensor",
    "sharded_parameters",
    "to_plain",
]


def reshard(model: nn.Module) -> None:
    """Put every FSDP2 module into its sharded state, so that no stale gathered copy outlives a round; nothing moves."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, spread or not, in the same memory."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def spread_as(values: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's elements as a tensor that is spread like another, in the same memory; nothing moves."""
    # DTensor.from_local copies what does not lie where the mesh computes, such as shards that FSDP keeps on the CPU.
    spread: Any = like.detach()
    names, made_of = spread.__tensor_flatten__()
    # A class of tensors may forget its data type in detach(), so only what needs it is detached.
    local = values.detach() if values.requires_grad else values
    parts = {name: getattr(spread, name) for name in names} | {"_local_tensor": local}
    made: DTensor = spread.__tensor_unflatten__(parts, made_of, like.shape, like.stride())
    return made


def spread_whole(values: torch.Tensor, beside: DTensor) -> DTensor:
    """Return whole values as a tensor that each rank of another one's mesh holds, in the same memory; nothing moves."""
    mesh = beside.device_mesh
    # from_local moves all but meta tensors to the mesh's device; shards may lie on the CPU.
    everywhere = DTensor.from_local(values.to("meta"), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread_as(values, everywhere)


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, tied ones once, as its optimizer holds them; nothing moves."""
    reshard(model)
    return dict(model.named_parameters())


def load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load an optimizer's state in the data types that it was saved in; nothing moves between ranks."""
    optimizer.load_state_dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        # torch casts a state to its parameter's dtype, which would round an fp32 state of bf16 weights.
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                cast = optimizer.state[parameters[number]][key]
                if cast.dtype != value.dtype:
                    optimizer.state[parameters[number]][key] = value.to(device=cast.device)


# Axes of a cell that a dimension of a state's own meshes stands for.
AXES_OF_STATE = {"shard": tuple(axis for axis in AXES if axis != "dp_replicate"), "replica": ("dp_replicate",)}


def total_norm(
    gradients: Iterable[torch.Tensor],
    order: float,
    dims: ParallelDims,
    cell: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a cell; collective over it: one all-reduce of one number.

    What several ranks hold counts on the one whose coordinate is 0 along every axis that does not cut the tensor.
    """
    held = [_whole(gradient) for gradient in gradients]
    local = [values_of(gradient) for gradient in held]
    if math.isinf(order):
        largest = norms_of([part for part in local if part.numel()], order, device)
        own = largest.max() if len(largest) else largest.sum()
        # gloo's maximum skips NaN, so a flag for it goes beside the value.
        both = torch.stack([own.isnan().to(own), own.nan_to_num(0.0, posinf=torch.inf)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=cell)
        return both[1].where(both[0] == 0, torch.nan).float()
    counted = [part for part, gradient in zip(local, held, strict=True) if _counts_here(gradient, dims)]
    total = (norms_of(counted, order, device) ** order).sum()
    dist.all_reduce(total, group=cell)
    return (total ** (1.0 / order)).float()


def norms_of(parts: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of each tensor by itself; local."""
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for same in alike(parts):
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        norms.append(torch.stack(torch._foreach_norm(same, norm_type, dtype=dtype)).to(device, torch.float64))
    return torch.cat(norms)


def alike(parts: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return the tensors of each device and data type, which one kernel can work on; local."""
    return group(((part.device, part.dtype), part) for part in parts).values()


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of a gradient; of a sparse one those that are not 0, each once."""
    local = local_tensor(gradient)
    return local.coalesce().values() if local.is_sparse else local


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose parts are values, not summands that are still to be added up."""
    if not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _counts_here(gradient: torch.Tensor, dims: ParallelDims) -> bool:
    """Tell whether this rank is the one that counts its part: 0 along every axis that does not cut the tensor."""
    cut = {"pp"}
    if isinstance(gradient, DTensor):
        names = gradient.device_mesh.mesh_dim_names
        if not names:
            raise ConfigError(f"a gradient's mesh {gradient.device_mesh} has no names; shard over world.get_mesh")
        for name, placement in zip(names, gradient.placements, strict=True):
            if placement.is_replicate():
                continue
            text = str(name)  # those of later meshes of a process equal no text
            axes = AXES_OF.get(text) or AXES_OF_STATE.get(text)
            if axes is None:
                raise ConfigError(f"a gradient is cut along {name!r}, no axis of the world; shard over world.get_mesh")
            cut.update(axes)
    return all(axis in cut or dims.at[axis] == 0 for axis in AXES)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order as one flat row of bytes, whatever the tensor's memory layout.

    A view where the elements follow each other in memory, else a copy: read it, do not write to it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element, or none, counts as contiguous with any stride, but only one of 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a copy of what :func:`bytes_of` gave as a tensor; the copy is aligned for any data type."""
    return data.clone().view(dtype).view(shape)


Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What JSON can hold."""

# The only keys of a JSON object that stands for something that JSON does not have.
TAGS = ("__tensor__", "__tuple__", "__pairs__", "__counter__", "__float__", "__dtype__")


def to_plain(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Plain:
    """Write a value as what JSON can hold; its tensors are put aside and named by where they stand."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": repr(number)}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        if tensors is None:
            raise ConfigError(f"{path} is a tensor, but values are plain Python values; give tensors as a part")
        if path in tensors:
            raise ConfigError(f"two tensors are called {path!r}; rename one of them")
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, Mapping):
        pairs = [
            (to_plain(key, f"{path}/{key}"), to_plain(item, f"{path}/{key}", tensors)) for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"__counter__": [list(pair) for pair in pairs]}
        if all(isinstance(key, str) and key not in TAGS for key, _ in pairs):
            return {str(key): item for key, item in pairs}
        return {"__pairs__": [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    raise ConfigError(
        f"{path} is {type(value).__name__}, which a checkpoint does not keep (it holds no pickled code); make it of "
        "numbers, strings, booleans, None, lists, tuples, dictionaries and tensors"
    )


def from_plain(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Read what :func:`to_plain` has written; local.

    :param plain: The value, which somebody else may have written.
    :param tensors: Tensors by name, of those that the value refers to.
    :return: What was written.
    :raises ValueError: if the value is not of the form that is written; nothing in it is called or imported.
    """
    try:
        return _read_plain(plain, tensors)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no plain value as it is written ({type(error).__name__}: {error})") from error


def _read_plain(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_read_plain(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "__tensor__":
            return tensors[content]
        if tag == "__float__":
            return float(content)
        if tag == "__dtype__":
            return dtype_of(content)
        if tag == "__tuple__":
            return tuple([_read_plain(item, tensors) for item in content])
        if tag in ("__pairs__", "__counter__"):
            pairs = {_read_plain(key, tensors): _read_plain(item, tensors) for key, item in content}
            return Counter(pairs) if tag == "__counter__" else pairs
    return {key: _read_plain(item, tensors) for key, item in plain.items()}


def dtype_of(name: object) -> torch.dtype:
    """Return the data type of a name that somebody else may have written, or raise ValueError; local."""
    # Not by getattr: torch imports modules of its own when it is asked for their names.
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(name)} is no data type of torch")
    return dtype


def tensors_named(plain: Plain) -> Iterator[str]:
    """Yield the names of the tensors that a value refers to."""
    if isinstance(plain, dict) and plain.keys() == {"__tensor__"}:
        yield str(plain["__tensor__"])
    elif isinstance(plain, (list, dict)):
        for item in plain if isinstance(plain, list) else plain.values():
            yield from tensors_named(item)
