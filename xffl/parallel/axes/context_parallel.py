"""Context parallelism: each rank of a mesh trains on a part of every sequence, and attention sees all of it.

The parts are equal and contiguous, in the order of the ranks. Everything but attention works on each token alone. For
attention the keys and values of all parts are gathered, and each rank's queries attend to what comes before them
(about as Llama 3 was trained, https://arxiv.org/abs/2407.21783, section 3.3.2). In the backward pass the gradients of
keys and values are summed back to their owners. With causal attention later ranks have more to compute.

The loss of a rank is the mean over its part; gradients are averaged over the mesh like over data-parallel ranks
(FSDP2 over all ranks of both does it), which is right where all parts count equally many targets. Shift the targets
before they are cut: a model that shifts labels itself would lose one at the end of each part.

Three things make a model unfit. Attention that is not computed by ``F.scaled_dot_product_attention`` would see a part
only; the block raises on what it can see of that (``nn.MultiheadAttention``, softmax of scores, no attention at all).
Positions counted from the local length would start from 0 on every rank: give the model those of the global sequence,
or let :func:`give_positions` do it. And masks are refused, since they would need the global sequence, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from xffl.errors import ConfigError

__all__ = ["check_mesh", "context_parallel", "fill_positions", "find_positions", "give_positions", "split_sequence"]

SOFTMAX: tuple[Callable[..., Any], ...] = (F.softmax, torch.softmax, torch.special.softmax, torch.Tensor.softmax)


@contextmanager
def context_parallel(
    mesh: DeviceMesh, *, buffers: Sequence[torch.Tensor] = (), buffer_seq_dims: Sequence[int] = (), ring: bool = False
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Let attention inside the block see whole sequences, of which each rank has its part.

    Every rank of the mesh enters it with equal buffers and runs the same model. Each attention all-gathers keys and
    values in its forward pass, and reduce-scatters their gradients (16-bit ones in fp32) in its backward pass. Where
    activations are recomputed (checkpointing), the backward pass belongs inside the block, too; torch's check of what
    was saved raises otherwise.

    .. code-block:: python

       with context_parallel(mesh, buffers=(tokens, targets, positions), buffer_seq_dims=(1, 1, 0)) as parts:
           tokens, targets, positions = parts
           loss_of(model(tokens, positions), targets).backward()

    :param mesh: A mesh of one dimension.
    :param buffers: Tensors of whole sequences: tokens, targets, positions. They stay as they are.
    :param buffer_seq_dims: The dimension of each that is the sequence.
    :param ring: Whether to use torch's prototype of ring attention, which needs CUDA and deals out the sequence in its
        own balanced order, so that positions must be among the buffers. It has not been run on a GPU here.
    :yield: This rank's parts, in the order of the buffers.
    :raises ConfigError: if an argument is invalid, or the model's attention cannot be spread.
    """
    check_mesh(mesh, "context", ring=ring)
    parts = split_sequence(buffers, mesh, buffer_seq_dims)
    if ring:
        from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

        if not buffers:
            raise ConfigError("the ring of context parallelism takes buffers; give tokens, targets and positions")
        # Not run here, since it needs several GPUs. Torch's prototype changes its buffers in place.
        parts, dims = tuple(buffer.clone() for buffer in buffers), list(buffer_seq_dims)
        with torch_context_parallel(mesh, buffers=list(parts), buffer_seq_dims=dims, no_restore_buffers=set(parts)):
            yield parts
    else:
        attention = _GatheredAttention(mesh)
        with attention, attention.in_recomputation():
            yield parts
        if buffers and not attention.calls:
            raise ConfigError(
                "no attention was computed by F.scaled_dot_product_attention under context parallelism, so each rank's "
                "model saw only its part of the sequences; use a model that calls it (attn_implementation='sdpa'), or "
                "cp=1"
            )


def split_sequence(
    tensors: Sequence[torch.Tensor], mesh: DeviceMesh, dim: int | Sequence[int] = 1
) -> tuple[torch.Tensor, ...]:
    """Return this rank's parts of whole sequences, as tensors of their own. Nothing moves."""
    check_mesh(mesh, "context")
    dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
    if len(dims) != len(tensors):
        raise ConfigError(f"{len(tensors)} tensors came with {len(dims)} dimensions; give one for each, or one for all")
    parts = []
    for tensor, place in zip(tensors, dims, strict=True):
        if not -tensor.ndim <= place < tensor.ndim:
            raise ConfigError(f"a tensor {tuple(tensor.shape)} has no dimension {place}; give that of its sequence")
        length, rest = divmod(tensor.shape[place], mesh.size())
        if rest or not length:
            raise ConfigError(
                f"a sequence of {tensor.shape[place]} (dimension {place} of {tuple(tensor.shape)}) does not divide by "
                f"the {mesh.size()} ranks of the context-parallel mesh; pad it to a multiple"
            )
        part = tensor.narrow(place, mesh.get_local_rank() * length, length)
        parts.append(part.clone(memory_format=torch.contiguous_format))
    return tuple(parts)


def give_positions(model: nn.Module, mesh: DeviceMesh, *, activation_parts: int = 1) -> RemovableHandle:
    """Give a model the positions of its part in the global sequence wherever a call leaves them out.

    For models whose ``forward`` takes ``positions``, then of shape (sequence), or ``position_ids``, then (1, sequence).
    Nothing moves.
    """
    check_mesh(mesh, "context")
    name = find_positions(model)
    if name is None:
        raise ConfigError(
            f"{type(model).__name__}.forward takes neither of {', '.join(POSITIONS)}, so under context parallelism "
            "every rank would count positions from 0; give it such an argument, or cp=1"
        )

    def make(first: torch.Tensor) -> torch.Tensor:
        # A later pipeline stage gets activations, whose sequence tensor parallelism has cut in activation_parts.
        length = first.shape[1] * (activation_parts if first.is_floating_point() else 1)
        start = mesh.get_local_rank() * length
        return torch.arange(start, start + length, device=first.device)

    return fill_positions(model, name, make, is_first=True)


class _GatheredAttention(TorchFunctionMode):
    """Put one over gathered keys and values in place of ``F.scaled_dot_product_attention``, by whatever name called."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.calls = 0
        self._attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
        self._is_attending = False
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._rank = mesh.get_local_rank()
        self._mask: torch.Tensor | None = None

    @contextmanager
    def in_recomputation(self) -> Iterator[None]:
        """Replace the function in its module, too: modes are off in a backward pass, which may recompute a layer."""
        F.scaled_dot_product_attention = self._attend  # type: ignore[assignment]
        try:
            yield
        finally:
            F.scaled_dot_product_attention = self._attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self._attention and not self._is_attending:
            return self._attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ConfigError(
                "context parallelism cannot spread nn.MultiheadAttention; use F.scaled_dot_product_attention or cp=1"
            )
        if func in SOFTMAX and args[0].ndim > 3 and args[0].shape[-1] == args[0].shape[-2]:
            raise ConfigError(
                f"a softmax of scores {tuple(args[0].shape)} looks like attention over one rank's part of the "
                "sequence; call F.scaled_dot_product_attention (attn_implementation='sdpa'), or give cp=1"
            )
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,  # each (..., heads, sequence, width)
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ConfigError(
                f"context parallelism cannot spread a mask {tuple(attn_mask.shape)}; use is_causal, or cp=1"
            )
        if dropout_p > 0:
            raise ConfigError(
                f"attention drops out {dropout_p:g} of its weights, which context parallelism cannot do as one rank "
                "would; set the model's attention dropout to 0, or give cp=1"
            )
        if isinstance(query, DTensor) or isinstance(key, DTensor) or isinstance(value, DTensor):
            raise ConfigError(
                "context parallelism takes plain tensors, no DTensors; give projections use_local_output=True"
            )
        if not query.shape[-2] == key.shape[-2] == value.shape[-2]:
            raise ConfigError(
                f"attention has {query.shape[-2]} queries, {key.shape[-2]} keys and {value.shape[-2]} values, but "
                "context parallelism spreads self-attention only; give cp=1 for caches of keys and for cross-attention"
            )
        self.calls += 1
        length = query.shape[-2]
        # Keys and values together: one message instead of two.
        both = _Gather.apply(torch.cat((key, value), dim=-1), self._group, self._size)  # type: ignore[no-untyped-call]
        mask = None
        if is_causal:
            keys = (self._rank + 1) * length
            both = both[..., :keys, :]  # later keys are hidden from all of this rank's queries
            mask = self._mask
            if mask is None or mask.shape[0] != length or mask.device != query.device:
                # Which keys each query sees, (queries, keys). All layers share the last one.
                mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
                self._mask = mask
        key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        self._is_attending = True  # the mode may be on here, or not
        try:
            return self._attention(query, key, value, mask, **more)
        finally:
            self._is_attending = False


class _Gather(torch.autograd.Function):
    """All-gather parts along the sequence; backward, sum what all ranks have for a part, on its owner."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        ctx.group = group
        ctx.size = size
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        # One rank would sum these in fp32 before rounding; so do many.
        wide = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
        parts = [part.contiguous() for part in wide.chunk(ctx.size, dim=-2)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=ctx.group)
        return total.to(gradient.dtype), None, None


def check_mesh(mesh: DeviceMesh, kind: str, *, ring: bool = False) -> None:
    """Raise unless a mesh has one dimension, as context and tensor parallelism need it; local."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError(f"{kind} parallelism needs a mesh of one dimension, such as mesh['{kind[0]}p'], got {mesh}")
    if ring and mesh.device_type != "cuda":
        raise ConfigError(f"the ring of context parallelism needs CUDA, not {mesh.device_type}; give ring=False")


POSITIONS = ("positions", "position_ids")
"""Arguments by which models take positions: of shape (sequence), and of shape (1, sequence)."""


def find_positions(model: nn.Module) -> str | None:
    """Return the argument by which a model's ``forward`` takes positions."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in POSITIONS if name in parameters), None)


def fill_positions(
    model: nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor | None], *, is_first: bool
) -> RemovableHandle:
    """Give a model positions wherever a call leaves them out. Nothing moves."""
    place = list(inspect.signature(model.forward).parameters).index(name)

    def fill(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = args[place] if place < len(args) else kwargs.get(name)
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        positions = None if own is not None or first is None else make(first)
        if positions is None:
            return args, kwargs
        if name == "position_ids":
            positions = positions[None]
        if place < len(args):
            return (*args[:place], positions, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: positions}

    return model.register_forward_pre_hook(fill, prepend=is_first, with_kwargs=True)
