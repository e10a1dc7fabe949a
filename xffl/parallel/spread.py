"""Spreading of a model over the ranks of each cell: plain, DDP, FSDP2 or HSDP, as the state or the world says.

All ranks check and compare the model and the options, rank 0's weights go to every rank, and each cell cuts its copy. A
model that was built on the meta device gets its weights module by module instead, each rank keeping its part.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xffl.compat.libc import return_large_blocks
from xffl.distributed.agreement.consistency import (
    compute_device,
    connect,
    home_device,
    run_on_all_ranks,
    transfer_device,
)
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import bytes_of, from_bytes
from xffl.errors import ConfigError, StateError, XfflError

if TYPE_CHECKING:
    from xffl.distributed.parameters import DeviceParameters
    from xffl.distributed.world import DistributedWorld
    from xffl.parallel.config import DDPConfig
    from xffl.parallel.meta_weights import Initializer

__all__ = ["SpreadOptions", "check_model", "is_meta", "named_tensors", "send_weights", "shard", "spread"]

BROADCAST_BYTES = 32 * 2**20  # how much of a model is sent at a time


def shard(
    model: nn.Module,
    state: DistributedState,
    *,
    wrap: Iterable[type[nn.Module]] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    ddp: DDPConfig | Mapping[str, Any] | None = None,
    keep_whole: Iterable[str] = (),
) -> nn.Module:
    """Spread a model over the ranks of each cell, starting from rank 0's weights everywhere.

    Collective over the world: the ranks compare the model's tensors, rank 0's parameters and buffers go once to each
    cell and from there to its ranks, and each cell shards its copy. A model built under ``torch.device("meta")`` gets
    its weights part by part instead, by its modules' ``reset_parameters``, and is never whole on any rank. A cell of
    one rank keeps the model plain, replicas of one rank (``hsdp=1``) become DDP, everything else FSDP2 over the state's
    mesh.

    :param model: The model, initialized, on any device; it is moved to the state's device and changed in place.
    :param state: The state that says where this rank stands.
    :param wrap: Layer classes that are sharded as units of their own (they are gathered one at a time). Plain and DDP
        cells have no use for them.
    :param mp_policy: FSDP2's mixed-precision policy; refused where a cell is plain or DDP, which cannot follow it.
    :param ddp: Options of DDP, such as ``{"find_unused_parameters": True}``: a
        :class:`~xffl.parallel.config.DDPConfig` or a mapping of its fields. Refused where cells are FSDP; a plain cell
        has no use for them.
    :param keep_whole: Names of parameters, or patterns of them (:mod:`fnmatch`), that FSDP leaves whole on every rank,
        such as scalars and parameters of another data type (``"*.scale"``). Their gradients are averaged over the
        cell's ranks whenever FSDP reduces its own, one all-reduce each. torch's ``clip_grad_norm_`` refuses such a
        model: the page on strategies shows how to clip it. Plain and DDP cells have no use for them.
    :return: The model to use: the same object, or its DDP wrapper.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if the model or an argument is invalid, or the ranks' models differ; on all ranks alike.
    """
    # Read by spread, so that all ranks hear of what is not a list of classes.
    layers: tuple[type[nn.Module], ...] = wrap  # type: ignore[assignment]
    names: tuple[str, ...] = keep_whole  # type: ignore[assignment]
    return spread(model, state, SpreadOptions(layers=layers, mp_policy=mp_policy, ddp=ddp, keep_whole=names))


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What :class:`xffl.distributed.DeviceParameters` says of each layer, where there are none: nothing special."""

    cpu_offload: bool = False
    activation_checkpointing: str = "none"
    compile: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = False
    reshard_after_forward: bool = True
    fsdp_forward_prefetch: bool = False


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """How a model is spread."""

    layers: tuple[type[nn.Module], ...] = ()
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    parameters: DeviceParameters | LayerOptions = LayerOptions()
    ddp: DDPConfig | Mapping[str, Any] | None = None
    init_weights: Initializer | None = None
    keep_whole: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Write what must be the same on all ranks."""
        shown = dict(vars(self), layers=[layer.__name__ for layer in self.layers])
        shown["init_weights"] = getattr(self.init_weights, "__qualname__", None)
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def spread(
    model: nn.Module, state: DistributedState, options: SpreadOptions, world: DistributedWorld | None = None
) -> nn.Module:
    """Spread a model as :func:`shard` does, over a world's mesh where there is one; collective over the world."""
    if not dist.is_initialized():
        raise StateError("torch.distributed is not initialized; open xffl.session() or call init_process_group first")
    options, is_bare = _check_on_all_ranks(model, state, options, world)
    device = compute_device(state)
    modules = dict(model.named_modules())  # of the whole model: a stage must skip the random numbers of the others
    if not is_bare:
        model.to(device)
        send_weights(model, state)
    # From the outermost cut inwards: stages drop layers, tensor parallelism cuts what is left of them, and FSDP2 or
    # DDP come last, since they take over the parameters as they are then.
    if world is not None and world.pp_enabled:
        from xffl.parallel.axes.pipeline import split_model

        model = split_model(model, world.pp_rank, world.pp_size)
    if world is not None and world.tp_enabled:
        from xffl.parallel.axes.tensor_parallel import apply_tensor_parallel

        sequence, loss = options.parameters.sequence_parallel, options.parameters.loss_parallel
        model = apply_tensor_parallel(model, world.get_mesh("tp"), sequence_parallel=sequence, loss_parallel=loss)
    form = _form(state, world, state.topology.cell_of(dist.get_rank()))
    for module in model.modules():
        # SyncBatchNorm would compare batches of the world, across the slow link in every step; here those of a cell.
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.process_group = state.federation if world is None else world.get_group("dp_cp")
    if options.parameters.activation_checkpointing != "none" or options.parameters.compile:
        from xffl.parallel.layers import prepare_layers

        prepare_layers(
            model,
            options.layers,
            checkpointing=options.parameters.activation_checkpointing,
            is_compiled=options.parameters.compile,
        )
    if form == "fsdp":
        mesh = state.hsdp_mesh if state.is_hsdp_setup() else state.fsdp_mesh
        _fully_shard(model, mesh if world is None else world.get_mesh("fsdp"), options)
    if is_bare:  # only now, so that no rank ever holds more of the weights than its part
        from xffl.parallel.meta_weights import materialize

        is_offloaded = form == "fsdp" and isinstance(options.offload_policy, CPUOffloadPolicy)
        target = torch.device("cpu") if is_offloaded else device
        materialize(model, target, options.init_weights, modules=modules)
    if form == "fsdp" and options.keep_whole:
        from xffl.parallel.whole import WholeParameters

        assert isinstance(model, FSDPModule), "made by _fully_shard"
        whole = _whole_parameters(model, options).values()  # only now: values on a device make new parameters
        cut_over = mesh if world is None else world.get_mesh("fsdp")
        assert cut_over is not None, "a state that is set up has a mesh"
        WholeParameters(model, whole, cut_over)
    if form == "plain" and world is not None and world.ft_manager is not None and options.ddp is not None:
        raise ConfigError("torchft's DDP between replica groups follows no ddp options; leave distributed.ddp out")
    spread_model = model
    if form == "ddp":
        from xffl.parallel.ddp import replicate

        spread_model = replicate(model, state, world, options.ddp)
    return spread_model if world is None else world.average_gradients(spread_model)


def _check_on_all_ranks(
    model: nn.Module, state: DistributedState, options: SpreadOptions, world: DistributedWorld | None
) -> tuple[SpreadOptions, bool]:
    """Check the arguments, compare them between the ranks, and return whether the model has no values yet."""

    def unreadable(wrong: Exception) -> XfflError:
        return ConfigError(
            f"the arguments of xffl.shard cannot be read: {type(wrong).__name__}: {wrong}; give a module, a state and "
            "a list of layer classes"
        )

    with run_on_all_ranks("models given to xffl.shard", convert=unreadable, group=state.job_group) as share:
        is_ddp_requested = options.ddp is not None
        options = replace(options, layers=tuple(options.layers), ddp=_read_ddp(options.ddp))
        if options.keep_whole != ():
            options = _choose_whole(model, options, world)
        if not state.is_fsdp_setup() and not state.is_hsdp_setup():
            raise StateError("the state has no sharding; call set_fsdp(), set_hsdp(n) or set_federated_scaling(...)")
        is_bare = is_meta(model)
        if is_bare:
            from xffl.parallel.meta_weights import check_initializers

            check_initializers(model, options.init_weights)
        forms = [_form(state, world, cell) for cell in range(state.topology.cells)]
        # Without a world only: a strategy's configuration has DDP options for whatever its cells become.
        if world is None and is_ddp_requested and "fsdp" in forms:
            raise ConfigError("the cells are FSDP, which follows no ddp options; leave ddp out, or give hsdp=1")
        # Where FSDP has a single rank in a cell, a strategy computes in the same data type by autocast.
        checked = options if world is None else replace(options, mp_policy=None)
        check_model(model, forms, checked, is_meta=is_bare, is_staged=world is not None and world.pp_enabled)
        tensors = (
            f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.is_meta}"
            for name, tensor in named_tensors(model)
        )
        share("\n".join([str(options), *tensors]))
    return options, is_bare


def _read_ddp(given: DDPConfig | Mapping[str, Any] | None) -> DDPConfig | None:
    """Return the options of DDP, ``None`` where they are its defaults; local."""
    if given is None:
        return None
    from xffl.parallel.config import DDPConfig, read_ddp

    options = read_ddp(given)
    return None if options == DDPConfig() else options


def _choose_whole(model: nn.Module, options: SpreadOptions, world: DistributedWorld | None) -> SpreadOptions:
    """Read and check the names of parameters that are left whole; local."""
    from xffl.parallel.keep_whole import check_whole, read_names

    names = read_names(options.keep_whole)
    check_whole(model, names, world, is_offloaded=options.parameters.cpu_offload)
    return replace(options, keep_whole=names)


def check_model(
    model: nn.Module, forms: Sequence[str], options: SpreadOptions, *, is_meta: bool, is_staged: bool = False
) -> None:
    """Raise where a model cannot be spread as asked, on the ranks of all cells alike; local."""
    wrap = options.layers
    for layer in wrap:
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise ConfigError(f"wrap holds {layer!r}; give classes of layers, such as nn.TransformerEncoderLayer")
        if not any(isinstance(module, layer) for module in model.modules()):
            raise ConfigError(f"wrap names {layer.__name__}, but the model has no such layer; leave it out")
    for name, tensor in named_tensors(model):
        if isinstance(tensor, DTensor):
            raise ConfigError(f"tensor {name!r} is sharded already; give the whole model, once")
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensor {name!r} is {tensor.layout}; only strided tensors can be spread, make it dense")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(f"tensor {name!r} is expanded: several of its elements are one in memory; clone() it")
        if "ddp" in forms and (tensor.is_conj() or tensor.is_neg()):
            raise ConfigError(
                f"tensor {name!r} is a conjugate or negated view, which DDP cannot send; resolve_conj().resolve_neg()"
            )
    units = _units(model, wrap)
    # FSDP2 gives each of its units a copy of its own of a parameter that wrap parts.
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = homes.setdefault(id(parameter), name)
        if units[other] != units[name]:
            raise ConfigError(f"{other!r} and {name!r} are one tied parameter, which wrap parts; wrap both or neither")
    if "fsdp" in forms:
        known_units = {name: unit for name, unit in units.items() if unit or not is_staged}
        whole = _whole_parameters(model, options)
        _check_for_fsdp(model, wrap, known_units, is_meta=is_meta, whole=whole)
    for cell, form in enumerate(forms) if options.mp_policy is not None else ():
        if form != "fsdp":
            raise ConfigError(f"cell {cell} is {form}, which has no mp_policy; use torch.autocast, or leave it out")


def _check_for_fsdp(
    model: nn.Module,
    wrap: tuple[type[nn.Module], ...],
    units: Mapping[str, int],
    *,
    is_meta: bool,
    whole: Collection[str] = (),
) -> None:
    """Refuse, on the ranks of all cells, what FSDP2 refuses on those of some, or fails on later without a name."""
    for layer in (*wrap, type(model)):
        if issubclass(layer, (nn.ModuleList, nn.ModuleDict)) and layer.forward is nn.Module.forward:
            what = f"wrap names {layer.__name__}" if layer in wrap else f"the model is a {layer.__name__}"
            raise ConfigError(f"{what}, which has no forward; wrap what it holds, or give a model with a forward")
    memory: dict[int, str] = {}
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if name in whole:
            continue
        if parameter.dim() == 0:
            raise ConfigError(
                f"parameter {name!r} is a scalar, which FSDP cannot cut; give it the shape (1,), or leave it whole: "
                f"keep_whole=[{name!r}] (or all of the model, by hsdp=1)"
            )
        if not parameter.is_contiguous():
            raise ConfigError(f"parameter {name!r} is not contiguous, which FSDP cannot cut; make it so")
        other = memory.setdefault(parameter.data_ptr(), name) if parameter.numel() and not is_meta else name
        if other != name:
            raise ConfigError(f"parameters {other!r} and {name!r} share memory; assign one Parameter to both modules")

        if not parameter.requires_grad:
            continue
        if not parameter.numel():
            raise ConfigError(
                f"parameter {name!r} has no elements {tuple(parameter.shape)}, and FSDP cannot reduce its gradient; "
                "leave it out, or freeze it by requires_grad_(False)"
            )
        if name not in units:
            continue
        other, dtype = first.setdefault(units[name], (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise ConfigError(
                f"parameters {other!r} ({dtype}) and {name!r} ({parameter.dtype}) train in one FSDP unit, which needs "
                "one data type; give them the same, freeze one, name the class of a layer that holds only one of them "
                f"in wrap, or leave one whole: keep_whole=[{name!r}] (or all of the model, by hsdp=1)"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} gets sparse gradients, which FSDP cannot reduce; build "
                f"{type(module).__name__} without sparse=True, or freeze it"
            )


def _units(model: nn.Module, wrap: tuple[type[nn.Module], ...]) -> dict[str, int]:
    """Return for each name of a parameter, tied ones too, which FSDP2 unit it belongs to; 0 is the model itself."""
    units = {}
    paths = dict(model.named_modules(remove_duplicate=False))
    for name, _ in model.named_parameters(remove_duplicate=False):
        parents = name.split(".")[:-1]
        holders = (paths[".".join(parents[:depth])] for depth in range(len(parents), 0, -1))
        units[name] = next((id(holder) for holder in holders if wrap and isinstance(holder, wrap)), 0)
    return units


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters, then all buffers, with their names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def send_weights(model: nn.Module, state: DistributedState) -> None:
    """Copy rank 0's tensors once to the first rank of each cell, then on within the cell; collective over the job."""
    topology, rank = state.topology, dist.get_rank()
    heads = topology.offsets[:-1]
    head = heads[topology.cell_of(rank)]
    # Outside a federation the world is the only cell.
    home = state.federation if state.federation is not None else dist.group.WORLD
    across = state.federated_group[0] if state.federated_group else None
    device = transfer_device(state)
    connect((across, dist.group.WORLD, home), device)
    at_home = device
    if (gpu := home_device(state)) is not None:
        connect((home,), at_home := gpu)
    for tensors in _batches(tensor.detach() for _, tensor in named_tensors(model)):
        flat = torch.cat([bytes_of(tensor) for tensor in tensors]).to(device if rank == head else at_home)
        if rank == 0:
            moves = [dist.P2POp(dist.isend, flat, peer, across) for peer in heads[1:]]
        else:
            moves = [dist.P2POp(dist.irecv, flat, 0, across)] if rank == head else []
        # Together: for a single message NCCL would connect its two ranks anew, and keep that.
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        if state.isolated is not None and rank == head:
            from xffl.parallel.isolated_weights import swap_between_worlds

            flat = swap_between_worlds(flat, state)
        flat = flat.to(at_home)
        dist.broadcast(flat, src=head, group=home)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(from_bytes(part, tensor.dtype, tensor.shape))


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


def _whole_parameters(model: nn.Module, options: SpreadOptions) -> dict[str, nn.Parameter]:
    """Return the parameters that FSDP leaves whole, by name; local."""
    if not options.keep_whole:
        return {}
    from xffl.parallel.keep_whole import find_whole

    return find_whole(model, options.keep_whole)


def _form(state: DistributedState, world: DistributedWorld | None, cell: int) -> str:
    """Return how a cell holds its model, or a pipeline's stage its layers: ``plain``, ``ddp`` or ``fsdp``."""
    if world is None:
        if state.topology.sizes[cell] == 1:
            return "plain"
        return "ddp" if state.topology.replica_size == 1 else "fsdp"
    from xffl.planning.memory import form_of

    return form_of(world.dims_of_cell(cell).sizes)


def _fully_shard(model: nn.Module, mesh: Any, options: SpreadOptions) -> None:
    """Shard a model with FSDP2, inner layers first: a module shards what its children have not claimed."""
    if mesh.device_type == "cpu":
        return_large_blocks()
    whole = set(_whole_parameters(model, options).values())
    for module in reversed(list(model.modules())):
        if module is model or (options.layers and isinstance(module, options.layers)):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=options.mp_policy or MixedPrecisionPolicy(),
                offload_policy=options.offload_policy or OffloadPolicy(),
                reshard_after_forward=options.parameters.reshard_after_forward and (module is not model or None),
                ignored_params=whole or None,
            )
    if options.parameters.fsdp_forward_prefetch:
        units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        for module, following in itertools.pairwise(units):
            module.set_modules_to_forward_prefetch([following])


# Models on the meta device --------------------------------------------------------------------------------------------


def is_meta(model: nn.Module) -> bool:
    """Return whether a model's tensors have no values yet; local."""
    bare = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    with_values = [name for name, tensor in named_tensors(model) if not tensor.is_meta]
    if bare and with_values:
        raise ConfigError(
            f"tensor {bare[0]!r} is on the meta device and {with_values[0]!r} is not; build all there, or none"
        )
    return bool(bare)
