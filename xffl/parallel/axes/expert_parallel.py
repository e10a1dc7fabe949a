"""Expert parallelism: the experts of a layer dealt out over the ranks of a mesh, which send each other tokens.

Each rank has tokens of its own, as in data parallelism, and some of the experts. A layer sends each token to the ranks
of its experts and gets the results back, by two all-to-alls in the forward pass and two in the backward pass. The
router and all other layers are data parallel: their gradients are the mean over all ranks with data of their own. So
are those of the experts, which :class:`ExpertParallel` divides by the mesh's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from xffl.compat.group_names import fresh_names
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError
from xffl.parallel.axes.context_parallel import check_mesh

__all__ = ["ExpertParallel", "apply_expert_parallel", "meshes_of_cell"]


def meshes_of_cell(state: DistributedState) -> dict[str, DeviceMesh]:
    """Make the meshes of this rank's cell along each axis of the state's ``cell_shape``, by its name.

    Collective over the world: every rank makes a group for each axis. That of ``ep`` goes to
    :func:`apply_expert_parallel`, that of ``dp_shard`` to ``fully_shard`` of the experts, and ``state.hsdp_mesh``, over
    all ranks of the cell, to ``fully_shard`` of the rest.

    :param state: The state, set up with ``cell_shape``.
    :return: Meshes of one dimension, slices of one mesh.
    :raises ConfigError: if the state has no ``cell_shape``.
    """
    topology = state.topology
    if topology.cell_shape is None:
        raise ConfigError(
            "the state has no axes inside its cells; call state.set_federated_scaling(sizes, cell_shape="
            "{'dp_replicate': 1, 'dp_shard': 2, 'ep': 2})"
        )
    rank = dist.get_rank()
    cell = topology.cell_of(rank)
    shape = dict(topology.cell_shape)
    known = prod(size for size in shape.values() if size != -1)
    sizes = [topology.sizes[cell] // known if size == -1 else size for size in shape.values()]
    table = torch.tensor(topology.federation(cell), dtype=torch.int64, device="cpu").view(sizes)
    at = (table == rank).nonzero()[0].tolist()
    groups = []
    for place, axis in enumerate(shape):
        along = table[tuple(slice(None) if other == place else index for other, index in enumerate(at))]
        groups.append(state.create_process_group(tuple(along.tolist()), f"xffl_{axis}"))
    device_type = "cpu" if state.device_type is None else state.device_type.type
    name_of = fresh_names("meshes_of_cell", device_type)
    mesh = DeviceMesh.from_group(groups, device_type, mesh=table, mesh_dim_names=tuple(map(name_of, shape)))
    return {axis: mesh[name_of(axis)] for axis in shape}


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, *, experts: str = "*.experts") -> nn.Module:
    """Deal the experts of a model out over a mesh, in place.

    Every rank of the mesh calls it, with equal weights: each keeps its experts of its own weights, and nothing moves.
    Call it before ``fully_shard``, whose meshes must be slices of the same mesh. A rank's tokens are its own.

    :param model: The model, not yet spread.
    :param mesh: A mesh of one dimension, whose size divides the number of experts.
    :param experts: Pattern of the names of the modules with fused experts (:mod:`fnmatch`).
    :return: The same model.
    :raises ConfigError: if no module matches, or the experts do not divide by the ranks; nothing is changed then.
    """
    check_mesh(mesh, "expert")
    chosen = [(name, one) for name, one in model.named_modules() if fnmatchcase(f".{name}", experts)]
    if not chosen:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(f"experts {experts!r} match no module of the model; names look like {names[-3:]}")
    for name, module in chosen:
        _count_experts(name, module, mesh.size())
    for _, module in chosen:
        parallelize_module(module, mesh, ExpertParallel(), src_data_rank=None)
    return model


class ExpertParallel(ParallelStyle):
    """A style of :func:`torch.distributed.tensor.parallel.parallelize_module` for a module of fused experts.

    Its parameters are ``[experts, ...]``, and become DTensors cut along that dimension. It is called with hidden states
    ``[tokens, width]``, the experts of each token ``[tokens, k]`` and their factors, alike, as the experts of
    transformers' Mixtral, OLMoE and Qwen3-MoE are.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut the parameters, and send tokens where the module is called."""
        local_experts = _count_experts(type(module).__name__, module, device_mesh.size())
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        layer = _DealtExperts(module, device_mesh, local_experts)
        module.forward = layer
        return module


def _count_experts(name: str, module: nn.Module, ranks: int) -> int:
    """Return how many experts each rank gets."""
    counts = {parameter.shape[0] if parameter.dim() else 0 for parameter in module.parameters(recurse=False)}
    if len(counts) != 1 or any(True for child in module.children() for _ in child.parameters()):
        raise ConfigError(
            f"{name} is a {type(module).__name__} without parameters of one first dimension, the experts; expert "
            "parallelism deals out fused experts"
        )
    experts = counts.pop()
    if not experts or experts % ranks:
        raise ConfigError(f"{name} has {experts} experts, which do not divide by the {ranks} ranks of the mesh")
    return experts // ranks


class _DealtExperts:
    """Calls a rank's experts with the tokens that the ranks of the mesh have for them."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, local_experts: int) -> None:
        self._module = module
        self._kind = type(module)  # before FSDP2 derives another one from it
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self._local_experts = local_experts

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        width = chosen.shape[1]
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        leaving = torch.bincount(flat // self._local_experts, minlength=self._ranks)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self._group)
        sizes = coming.tolist(), leaving.tolist()
        experts = torch.empty(sum(sizes[0]), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(experts, flat[order] % self._local_experts, *sizes, group=self._group)
        tokens = _exchanged(hidden[order // width], *sizes, self._group)
        # Factors are multiplied where the tokens came from, so that the router's gradient is computed there.
        results = self._kind.forward(self._local_module(), tokens, experts[:, None], torch.ones_like(tokens[:, :1]))
        results = _exchanged(results, sizes[1], sizes[0], self._group)
        results = results * factors.reshape(-1)[order, None].to(results.dtype)
        return torch.zeros_like(hidden).index_add(0, order // width, results.to(hidden.dtype))

    def _local_module(self) -> nn.Module:
        """Return the module with this rank's experts alone."""
        local = self._kind.__new__(self._kind)
        local.__dict__.update(self._module.__dict__)
        del local.__dict__["forward"]
        parameters: dict[str, Any] = {}
        for name, parameter in self._module.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor), "cut when the style was applied"
            parameters[name] = _MeanGradient.apply(parameter.to_local(), self._ranks)  # type: ignore[no-untyped-call]
        local.__dict__["_parameters"] = parameters
        if "num_experts" in local.__dict__:
            local.__dict__["num_experts"] = self._local_experts
        return local


def _exchanged(
    rows: torch.Tensor, coming: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to the ranks of a group and return those that come; collective over the group, also backwards."""
    result: torch.Tensor = _Exchange.apply(rows, list(coming), list(leaving), group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows whose backward pass sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, coming: list[int], leaving: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = leaving, coming
        ctx.group = group
        result = rows.new_empty(sum(coming), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), coming, leaving, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [gradient] = gradients
        coming, leaving = ctx.sizes
        result = gradient.new_empty(sum(coming), *gradient.shape[1:])
        dist.all_to_all_single(result, gradient.contiguous(), coming, leaving, group=ctx.group)
        return result, None, None, None


class _MeanGradient(torch.autograd.Function):
    """Values whose gradient is divided by a number of ranks: a sum over their tokens becomes a mean over them."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.ranks, None
