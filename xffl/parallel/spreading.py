"""How a model is spread over a cell, step by step: stages, parts of layers, layers computed again, shards, replicas."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from xffl.cluster.allocator import return_large_blocks
from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.world import DistributedWorld
from xffl.errors import ConfigError, StateError, XfflError
from xffl.parallel.checks import check_model, named_tensors
from xffl.parallel.config import DDPConfig, read_ddp
from xffl.parallel.materialize import check_initializers, is_meta, materialize
from xffl.parallel.options import SpreadOptions
from xffl.parallel.stages import split_model
from xffl.parallel.tensor_parallel import apply_tensor_parallel
from xffl.parallel.weights import send_weights

__all__ = ["spread"]

SAVED_OPERATORS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective checkpointing keeps: what takes longest to compute again."""


def spread(
    model: nn.Module, state: DistributedState, options: SpreadOptions, world: DistributedWorld | None = None
) -> nn.Module:
    """Spread a model over the ranks of each cell, starting from the same weights everywhere.

    Collective over the world: the ranks compare the model's tensors and the options; rank 0's parameters and buffers go
    once to each cell and from there to its ranks (a model on the meta device gets its weights part by part instead, see
    :func:`xffl.parallel.materialize.materialize`), and each cell spreads its copy.

    :param model: The whole model; it is changed in place.
    :param state: The state that says where this rank stands.
    :param options: What is asked for.
    :param world: The mesh inside the cell; ``None`` for what the state alone says.
    :return: The model to use: the same object, or its DDP wrapper.
    :raises StateError: if torch.distributed is not initialized, or the state is not set up.
    :raises ConfigError: if the model or an option cannot be meant, or the ranks' models differ; on all ranks alike.
    """
    if not dist.is_initialized():
        raise StateError("torch.distributed is not initialized; open xffl.session() or call init_process_group first")
    options, is_bare = _agree_on_model(model, state, options, world)
    device = _device(state)
    modules = dict(model.named_modules())
    if not is_bare:
        model.to(device)
        send_weights(model, state)
    if world is not None and world.pp_enabled:
        model = split_model(model, world.pp_rank, world.pp_size)
    if world is not None and world.tp_enabled:
        is_cut = options.sequence_parallel
        model = apply_tensor_parallel(
            model, world.get_mesh("tp"), sequence_parallel=is_cut, loss_parallel=options.loss_parallel
        )
    form = _form(state, world, state.topology.cell_of(dist.get_rank()))
    _normalize_at_home(model, state, world)
    _prepare_layers(model, options)
    if form == "fsdp":
        _cut(model, _fsdp_mesh(state, world), options)
    if is_bare:
        is_offloaded = form == "fsdp" and isinstance(options.offload_policy, CPUOffloadPolicy)
        place = torch.device("cpu") if is_offloaded else device
        materialize(model, place, options.init_weights, modules=modules)
    if form == "plain" and world is not None and world.ft_manager is not None and read_ddp(options.ddp) != DDPConfig():
        raise ConfigError("torchft's DDP between replica groups follows no ddp options; leave distributed.ddp out")
    spread_model = _replicate(model, state, world, read_ddp(options.ddp)) if form == "ddp" else model
    return spread_model if world is None else world.average_gradients(spread_model)


def _agree_on_model(
    model: nn.Module, state: DistributedState, options: SpreadOptions, world: DistributedWorld | None
) -> tuple[SpreadOptions, bool]:
    """Check the arguments, let the ranks compare them, and tell whether the model has no values yet."""
    error: XfflError | None = None
    text, is_bare = "", False
    try:
        is_ddp_asked = options.ddp is not None
        options = replace(options, layers=tuple(options.layers), ddp=read_ddp(options.ddp))
        if not state.is_fsdp_setup() and not state.is_hsdp_setup():
            raise StateError(
                "the state says nothing about sharding; call set_fsdp(), set_hsdp(n) or set_federated_scaling(...) "
                "first"
            )
        is_bare = is_meta(model)
        if is_bare:
            check_initializers(model, options.init_weights)
        forms = [_form(state, world, cell) for cell in range(state.topology.cells)]
        if world is None and is_ddp_asked and "fsdp" in forms:  # a strategy's configuration has options for all
            raise ConfigError(
                "ddp options were given, but the cells are FSDP, which follows none of them; leave ddp out, or make "
                "replicas of one rank (hsdp=1)"
            )
        # Where FSDP has a single rank in a cell, a strategy computes in the same data type by autocast.
        checked = options if world is None else replace(options, mp_policy=None)
        is_staged = world is not None and world.pp_enabled
        check_model(model, forms, checked, is_meta=is_bare, is_staged=is_staged)
        text = _text(model, options)
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = ConfigError(
            f"the arguments of xffl.shard cannot be read: {type(wrong).__name__}: {wrong}; give a module, a state and "
            "a list of layer classes"
        )
    agree("models given to xffl.shard", text, error=error)
    return options, is_bare


def _text(model: nn.Module, options: SpreadOptions) -> str:
    """Return what must be the same on all ranks."""
    tensors = (
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {tensor.is_meta}"
        for name, tensor in named_tensors(model)
    )
    return "\n".join([str(options), *tensors])


def _form(state: DistributedState, world: DistributedWorld | None, cell: int) -> str:
    """Tell how a cell holds its model, or a pipeline's stage its layers: ``plain``, ``ddp`` or ``fsdp``."""
    if world is None:
        if state.topology.sizes[cell] == 1:
            return "plain"
        return "ddp" if state.topology.replica_size == 1 else "fsdp"
    place = world.place_in(cell)
    replicas = place.size("dp_replicate")
    # DDP knows nothing of parameters that are cut by tensor parallelism; FSDP with shards of one rank does.
    if place.size("dp_shard_cp") > 1 or (place.size("tp") > 1 and replicas > 1):
        return "fsdp"
    return "ddp" if replicas > 1 else "plain"


def _device(state: DistributedState) -> torch.device:
    device = state.current_device if state.current_device is not None else state.device_type
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")


def _fsdp_mesh(state: DistributedState, world: DistributedWorld | None) -> Any:
    if world is not None:
        return world.get_mesh("fsdp")
    return state.hsdp_mesh if state.is_hsdp_setup() else state.fsdp_mesh


def _prepare_layers(model: nn.Module, options: SpreadOptions) -> None:
    """Let layers be computed again in the backward pass, and compile them; names stay as they are."""
    for module in model.modules():
        if not isinstance(module, options.layers):
            continue
        if options.checkpointing != "none":
            contexts: dict[str, Any] = {} if options.checkpointing == "full" else {"context_fn": _selective_contexts}
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, **contexts)
        if options.compile:
            module.compile()


def _normalize_at_home(model: nn.Module, state: DistributedState, world: DistributedWorld | None) -> None:
    """Let SyncBatchNorm compare a cell's batches, where it would take the world: across the slow link in every step."""
    group = state.federation if world is None else world.get_group("dp_cp")
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            module.process_group = group


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_or_recompute)  # type: ignore[no-untyped-call]


def _keep_or_recompute(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _cut(model: nn.Module, mesh: Any, options: SpreadOptions) -> None:
    """Shard a model with FSDP2, inner layers first: a module shards what its children have not claimed."""
    if mesh.device_type == "cpu":
        return_large_blocks()
    for module in reversed(list(model.modules())):
        if module is model or (options.layers and isinstance(module, options.layers)):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=options.mp_policy or MixedPrecisionPolicy(),
                offload_policy=options.offload_policy or OffloadPolicy(),
                reshard_after_forward=options.reshard_after_forward and (module is not model or None),
            )
    if options.prefetch:
        units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        for module, following in itertools.pairwise(units):
            module.set_modules_to_forward_prefetch([following])


def _replicate(
    model: nn.Module, state: DistributedState, world: DistributedWorld | None, asked: DDPConfig
) -> nn.Module:
    """Wrap a whole copy, or a stage, with DDP over its replicas; the weights are the same already."""
    device = _device(state)
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            if tensor.is_contiguous():
                # Dimensions of size 1 may have any stride, but DDP refuses to copy between tensors of other strides.
                tensor.as_strided_(tensor.shape, torch.empty(tensor.shape, device="meta").stride())
    if world is not None and world.pp_enabled:
        group: dist.ProcessGroup | None = world.get_group("dp_replicate")
    else:
        group = state.replica_group[0] if state.replica_group else dist.group.WORLD
    ddp = nn.parallel.DistributedDataParallel(
        model,
        process_group=group,
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,
        find_unused_parameters=asked.find_unused_parameters,
        gradient_as_bucket_view=asked.gradient_as_bucket_view,
        static_graph=asked.static_graph,
        bucket_cap_mb=asked.bucket_cap_mb,
    )
    _add_hook(ddp, group, asked)
    return ddp


def _add_hook(ddp: nn.parallel.DistributedDataParallel, group: dist.ProcessGroup | None, asked: DDPConfig) -> None:
    if asked.communication_hook == "none":
        return
    if asked.communication_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, asked.powersgd_rank, start_powerSGD_iter=asked.powersgd_start, use_error_feedback=True
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    if asked.communication_hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:  # DDP reads annotations, which are texts in this file
        ddp.register_comm_hook(group, lambda group, bucket: _average_in_bf16(group, bucket))


def _average_in_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bfloat16; torch's own hook for that is for NCCL alone."""
    gradients = bucket.buffer()
    rounded = gradients.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(rounded, group=group, async_op=True)
    assert work is not None, "this rank belongs to the group"
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
    return averaged
