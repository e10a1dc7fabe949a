"""How a model is spread inside a cell: plain, DDP, FSDP2 or HSDP, as the state says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, StateError, XfflError

__all__ = ["shard"]

BROADCAST_BYTES = 32 * 2**20
"""How much of a model is sent at a time."""


def shard(
    model: nn.Module,
    state: DistributedState,
    *,
    wrap: Iterable[type[nn.Module]] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Spread a model over the ranks of each cell, starting from rank 0's weights everywhere.

    Collective over the world: the ranks compare the model's tensors, rank 0's parameters and buffers go once to each
    cell and from there to its ranks, and each cell shards its copy. A cell of one rank keeps the model plain, replicas
    of one rank (``hsdp=1``) become DDP, everything else FSDP2 over the state's mesh.

    :param model: The model, initialized, on any device; it is moved to the state's device and changed in place.
    :param state: The state that says where this rank stands.
    :param wrap: Layer classes that are sharded as units of their own (they are gathered one at a time). Plain and DDP
        cells have no use for them.
    :param mp_policy: FSDP2's mixed-precision policy; refused where a cell is plain or DDP, which cannot follow it.
    :return: The model to use: the same object, or its DDP wrapper.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if the model or an argument cannot be meant, or the ranks' models differ; on all ranks alike.
    """
    if not dist.is_initialized():
        raise StateError("torch.distributed is not initialized; open xffl.session() or call init_process_group first")
    error: XfflError | None = None
    text = ""
    try:
        layers = tuple(wrap)
        _check(model, state, layers, mp_policy)
        text = _text(model, layers, mp_policy)
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = ConfigError(
            f"the arguments of xffl.shard cannot be read: {type(wrong).__name__}: {wrong}; give a module, a state and "
            "a list of layer classes"
        )
    agree("models given to xffl.shard", text, error=error)
    model.to(_device(state))
    _send_weights(model, state)
    form = _form(state, state.topology.cell_of(dist.get_rank()))
    if form == "plain":
        return model
    if form == "ddp":
        device_ids = [state.current_device] if _device(state).type == "cuda" else None
        group = state.replica_group[0] if state.replica_group else None
        # The weights are rank 0's already.
        return nn.parallel.DistributedDataParallel(model, process_group=group, device_ids=device_ids, init_sync=False)
    mesh = state.hsdp_mesh if state.is_hsdp_setup() else state.fsdp_mesh
    policy = mp_policy or MixedPrecisionPolicy()
    # Inner layers first: a module shards what its children have not claimed.
    for module in reversed(list(model.modules())):
        if module is model or (layers and isinstance(module, layers)):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _form(state: DistributedState, cell: int) -> str:
    """Tell how a cell holds its model: ``plain``, ``ddp`` or ``fsdp``."""
    if state.topology.sizes[cell] == 1:
        return "plain"
    return "ddp" if state.topology.replica_size == 1 else "fsdp"


def _device(state: DistributedState) -> torch.device:
    device = state.current_device if state.current_device is not None else state.device_type
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")


def _check(
    model: nn.Module, state: DistributedState, wrap: tuple[type[nn.Module], ...], mp_policy: MixedPrecisionPolicy | None
) -> None:
    if not state.is_fsdp_setup() and not state.is_hsdp_setup():
        raise StateError(
            "the state says nothing about sharding; call set_fsdp(), set_hsdp(n) or set_federated_scaling(...) first"
        )
    for layer in wrap:
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise ConfigError(f"wrap holds {layer!r}; give classes of layers, such as nn.TransformerEncoderLayer")
        if not any(isinstance(module, layer) for module in model.modules()):
            raise ConfigError(f"wrap names {layer.__name__}, but the model has no such layer; leave it out")
    for name, tensor in _named_tensors(model):
        if isinstance(tensor, DTensor):
            raise ConfigError(f"tensor {name!r} is sharded already; give xffl.shard the whole model, once")
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensor {name!r} is {tensor.layout}; only strided tensors can be spread, make it dense")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(f"tensor {name!r} is expanded: several of its elements are one in memory; clone() it")
        if tensor.is_meta:
            raise ConfigError(f"tensor {name!r} is on the meta device and has no values; initialize the model first")
    _check_ties(model, wrap)
    if any(_form(state, cell) == "fsdp" for cell in range(state.topology.cells)):
        _check_for_fsdp(model, wrap)
    for cell in range(state.topology.cells) if mp_policy is not None else ():
        if (form := _form(state, cell)) != "fsdp":
            raise ConfigError(
                f"cell {cell} is {form}, which follows no FSDP2 mp_policy; use torch.autocast, or leave mp_policy out"
            )


def _check_for_fsdp(model: nn.Module, wrap: tuple[type[nn.Module], ...]) -> None:
    """Refuse, on the ranks of all cells, what FSDP2 would refuse on those of some."""
    for layer in wrap:
        if issubclass(layer, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(
                f"wrap names {layer.__name__}, which has no forward pass to gather for; wrap what it holds"
            )
    memory: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(f"parameter {name!r} is a scalar, which FSDP cannot cut; give it the shape (1,)")
        if not parameter.is_contiguous():
            raise ConfigError(f"parameter {name!r} is not contiguous, which FSDP cannot cut; make it so")
        other = memory.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            raise ConfigError(
                f"parameters {other!r} and {name!r} share memory but are two objects, which FSDP would part; tie "
                "them by assigning one Parameter to both modules"
            )


def _check_ties(model: nn.Module, wrap: tuple[type[nn.Module], ...]) -> None:
    """Refuse to cut one parameter in two: FSDP2 gives each of its units a copy of its own."""
    homes: dict[int, tuple[str, int]] = {}
    paths = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parents = name.split(".")[:-1]
        holders = (paths[".".join(parents[:depth])] for depth in range(len(parents), 0, -1))
        unit = next((id(holder) for holder in holders if wrap and isinstance(holder, wrap)), 0)
        other, where = homes.setdefault(id(parameter), (name, unit))
        if where != unit:
            raise ConfigError(
                f"{other!r} and {name!r} are one tied parameter, but wrap puts them into two units; wrap a layer that "
                "holds both, or neither"
            )


def _text(model: nn.Module, wrap: tuple[type[nn.Module], ...], mp_policy: MixedPrecisionPolicy | None) -> str:
    """Return what must be the same on all ranks."""
    tensors = (
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for name, tensor in _named_tensors(model)
    )
    return "\n".join([f"wrap={[layer.__name__ for layer in wrap]} mp_policy={mp_policy}", *tensors])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _send_weights(model: nn.Module, state: DistributedState) -> None:
    """Copy rank 0's parameters and buffers to all ranks: once to the first rank of each cell, then on at home."""
    topology, rank = state.topology, dist.get_rank()
    heads = topology.offsets[:-1]
    head = heads[topology.cell_of(rank)]
    # Outside a federation the world is the only cell.
    home = state.federation if state.federation is not None else dist.group.WORLD
    across = state.federated_group[0] if state.federated_group else None
    for tensors in _batches(tensor.detach() for _, tensor in _named_tensors(model)):
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        if rank == 0:
            for work in [dist.isend(flat, peer, group=across) for peer in heads[1:]]:
                assert work is not None, "rank 0 belongs to every group it sends through"
                work.wait()
        elif rank == head:
            dist.recv(flat, src=0, group=across)
        dist.broadcast(flat, src=head, group=home)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > BROADCAST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch
