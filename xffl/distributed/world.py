"""The world as a training script sees it: who is where, which ranks share what, and collectives by name."""

from __future__ import annotations

import hashlib
import math
import numbers
import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, parallel

from xffl.checks import one_of
from xffl.cluster.environment import complete_federation, is_isolated, is_lone_cell_requested, sources_named
from xffl.cluster.sizes import Federation, read_federation
from xffl.distributed.agreement.consistency import barrier, compute_device, message_device, run_on_all_ranks
from xffl.distributed.cell_meshes import CellMeshes, ParallelDims, make_cell_meshes
from xffl.distributed.distributed_state import DistributedState, place_of, take_off_setups
from xffl.distributed.failures.uncaught import note_end
from xffl.distributed.groups import destroy_group
from xffl.distributed.parameters import AXES, DTYPES, JOINED, DeviceParameters, MeshSizes
from xffl.distributed.session import (
    cleanup_distributed_process_group,
    set_up_cells,
    setup_distributed_process_group,
    waits_when_destroyed,
)
from xffl.distributed.startup.hosts_of_ranks import find_sizes
from xffl.distributed.values.norms import total_norm
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError, StateError
from xffl.topology import Topology

__all__ = ["DistributedWorld"]

W = TypeVar("W", bound="DistributedWorld")
Parameters = torch.Tensor | Iterable[torch.Tensor]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided by the ranks afterwards: gloo has no mean
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class DistributedWorld:
    """The ranks, the mesh inside each cell, and what is done over its axes.

    .. code-block:: python

       with xffl.DistributedWorld(DeviceParameters.HSDP(dp_shard=4), federated=(8, 8)) as world:
           total = world.all_reduce(tensor, op="sum", mesh="dp")

    All facts about ranks are those of :attr:`state`.

    :param device_parameters: What is asked of the ranks inside a cell.
    :param federated: Sizes of the federated groups, one size for equal ones, or a rule that finds them (``auto``,
        ``hosts:REGEX``, ``file:PATH``); by default what ``XFFL_FEDERATED`` says, else no federation: the world is the
        only cell.
    :param backend: Communication backend; by default ``gloo``, and ``cpu:gloo,cuda:nccl`` on CUDA.
    :param link_backend: Communication backend between federated groups, as :func:`xffl.session` takes it.
    :param device: Device of this process; by default the GPU of its local rank where there are GPUs, else the CPU.
    :param streams: CUDA streams for the groups of a round; 4 by default on CUDA.
    """

    def __init__(
        self,
        device_parameters: DeviceParameters,
        federated: Federation | None = None,
        *,
        backend: str | None = None,
        link_backend: str | None = None,
        device: torch.device | str | int | None = None,
        streams: int | None = None,
    ) -> None:
        if not isinstance(device_parameters, DeviceParameters):
            raise ConfigError(f"give a DeviceParameters, such as DeviceParameters.FSDP(), got {device_parameters!r}")
        self.device_parameters = device_parameters
        self.lone_cell: int | None = None
        """Which cell this world is, where each cell is a job of its own; counts for seeds"""
        self.replica_group: tuple[int, int] | None = None
        """This replica group's number and the most groups, as ``XFFL_ISLAND`` says; ``None`` in a plain world"""
        self._state: DistributedState | None = None
        self._meshes: CellMeshes | None = None
        self._device: torch.device | None = None
        self._asked: dict[str, Any] = {"federated": federated, "backend": backend, "link_backend": link_backend}
        self._asked |= {"device": device, "streams": streams}
        self._is_joined_here = self._is_laid_here = False
        self._groups: list[dist.ProcessGroup] = []

    def setup(self, state: DistributedState | None = None) -> DistributedState:
        """Join the other processes and make the meshes; collective over the world.

        :param state: A state of a world that is joined already, with replicas as the device parameters ask for, or
            with no set-up yet; by default the world is joined, and left again by :meth:`teardown`.
        :return: The state.
        :raises StateError: if the world is set up already.
        :raises ConfigError: if the sizes do not multiply to the cells', or cells are asked for
            with the state of an isolated one.
        """
        if self._state is not None:
            raise StateError("this world is set up already; call teardown() first, or make another")
        comm = self.device_parameters.comm
        if state is None and is_isolated():
            raise StateError(
                "the cells of this job are isolated, which a world that joins them by itself does not know; open "
                "xffl.session(), and give its state: setup(state)"
            )
        if state is not None and state.isolated is not None and self._asked["federated"] is not None:
            raise ConfigError(
                f"federated={self._asked['federated']} asks for cells in one world, and the cells of this job are "
                "isolated: each has a world of its own; leave federated out, or start without isolate"
            )
        if state is None:
            limits: dict[str, Any] = {
                "timeout_s": comm.train_timeout_seconds,
                "join_timeout_s": comm.init_timeout_seconds,
            }
            state = setup_distributed_process_group(**self._asked, **limits, device_parameters=self.device_parameters)
            self._is_joined_here = True
        self._state = state
        self._device = None
        try:
            if self._is_joined_here and is_lone_cell_requested():
                from xffl.distributed.startup.lone_cell import read_lone_cell

                if (lone_cell := read_lone_cell()) is not None:
                    lone_cell.take(state)
            mesh = self._mesh_of(state)
            self._meshes = make_cell_meshes(
                self._create, mesh=mesh, topology=state.topology, cell=state.federation, device_type=self.device.type
            )
        except BaseException as error:
            note_end(error, state.topology)
            self.teardown(synchronize=False)
            raise
        return state

    def teardown(self, *, synchronize: bool = True) -> None:
        """Leave the other processes, if :meth:`setup` joined them.

        Collective over the world with ``synchronize``; after an exception give ``synchronize=False``: nothing moves.
        """
        state = self._state
        self._state = None
        self._meshes = None
        groups = self._groups
        self._groups = []
        if state is None:
            return
        if self._is_joined_here:
            self._is_joined_here = False
            cleanup_distributed_process_group(state, synchronize=synchronize)
            return
        destroys = synchronize or not waits_when_destroyed(state)
        if synchronize:
            barrier()
        for group in reversed(groups) if destroys else ():
            destroy_group(group)
        if self._is_laid_here:
            self._is_laid_here = False
            take_off_setups(state, destroys=destroys)

    def __enter__(self: W) -> W:
        if self._state is None:
            self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            note_end(error, None if self._state is None else self._state.topology)
        self.teardown(synchronize=error is None)

    # Ranks and sizes --------------------------------------------------------------------------------------------------

    @property
    def _made(self) -> CellMeshes:
        if self._meshes is None:
            raise StateError("the world is not set up; call setup() first")
        return self._meshes

    @property
    def is_set_up(self) -> bool:
        """Whether ranks and meshes are known."""
        return self._state is not None

    @property
    def state(self) -> DistributedState:
        """The one source of ranks."""
        if self._state is None:
            raise StateError("the world is not set up; call setup() first")
        return self._state

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return place_of(self.state)[0]

    @property
    def world_size(self) -> int:
        """Number of all processes, of all cells."""
        return place_of(self.state)[1]

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self.state.node_local_rank or 0

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        if self._device is None:  # asked for in every step
            self._device = compute_device(self.state)
        return self._device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0 of the world, and of the job where the job's cells are worlds of their own."""
        return self.state.is_first_of_job

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the mesh inside this rank's cell and the rank's coordinates in it."""
        return self._made.dims

    def dims_of_cell(self, cell: int) -> ParallelDims:
        """Return the sizes of the mesh inside any cell, with the place of its first rank."""
        return ParallelDims.of(self._made.mesh, self.state.topology, self.state.topology.offsets[cell])

    @property
    def dp_size(self) -> int:
        """Ranks of the cell with data of their own."""
        return self.dims.size("dp")

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with data of their own."""
        return self.dims.rank("dp")

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return self.dims.size("pp")

    @property
    def pp_rank(self) -> int:
        """The stage that this rank works on."""
        return self.dims.rank("pp")

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether FSDP cuts the model over ranks with data of their own."""
        return self.dims.size("dp_shard") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are cut."""
        return self.dims.size("cp") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are cut."""
        return self.dims.size("tp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is a pipeline."""
        return self.dims.size("pp") > 1

    @property
    def loss_parallel_enabled(self) -> bool:
        """Whether logits stay cut along the vocabulary for the loss."""
        return self.tp_enabled and self.device_parameters.loss_parallel

    @property
    def mixed_precision_enabled(self) -> bool:
        """Whether computation is done in another data type than float32."""
        return self.device_parameters.param_dtype != "float32"

    @property
    def mixed_precision_dtype(self) -> torch.dtype:
        """What computation is done in."""
        return _DTYPES[self.device_parameters.param_dtype]

    # Determinism ------------------------------------------------------------------------------------------------------

    def seed_for(self, seed: int, *axes: str) -> int:
        r"""Return a seed that is the same on ranks at the same place along some axes, and another elsewhere; local.

        :param seed: The run's seed.
        :param \*axes: ``federated``, or axes as in :meth:`size`; none for the same seed on all ranks.
        :return: An integer of 63 bits; the run's seed itself where no axis is given.
        :raises ConfigError: if there is no such axis.
        """
        for axis in axes:
            one_of("axis", axis, (*AXES, *JOINED, "federated"))
        if not axes:
            return seed
        cell = self.state.cell if self.lone_cell is None else self.lone_cell
        place = [(axis, cell if axis == "federated" else self.dims.rank(axis)) for axis in sorted(axes)]
        digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def set_determinism(self, seed: int, *axes: str, deterministic: bool = False) -> int:
        r"""Seed Python, numpy and torch on this rank; local.

        :param seed: The run's seed.
        :param \*axes: Axes along which ranks draw different numbers, as in :meth:`seed_for`. Ranks that share a layer
            or a copy of the model have to agree on dropout and initialization: ``dp`` and ``federated`` are the usual.
        :param deterministic: Whether torch is to take deterministic algorithms only, from now on.
        :return: The seed that was set.
        """
        own = self.seed_for(seed, *axes)
        random.seed(own)
        np.random.seed(own % 2**32)
        torch.manual_seed(own)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        return own

    # Meshes -----------------------------------------------------------------------------------------------------------

    @property
    def world_mesh(self) -> DeviceMesh:
        """The mesh ``pp, cp, dp_replicate, dp_shard, tp`` over this rank's cell, since cells may have different sizes.

        Take its parts by :meth:`get_mesh`: torch's own ``world_mesh["tp"]`` knows the names of a process's first world
        only. The names look the same in every world, but torch must not take two meshes of the same ranks for one.
        """
        return self._made.world_mesh

    def get_mesh(self, name: str) -> DeviceMesh:
        """Return the mesh along one axis, or along some that count as one; nothing moves.

        :param name: ``pp``, ``cp``, ``dp_replicate``, ``dp_shard``, ``tp``; ``dp`` (ranks with data of their own),
            ``dp_shard_cp`` (what FSDP cuts a replica over), ``dp_cp`` (ranks whose losses differ); ``fsdp`` (what FSDP
            takes: replicas and shards, or shards alone); ``federated`` (the ranks at the same place of all cells, where
            cells are of equal size).
        :return: The mesh.
        :raises ConfigError: if there is none of that name.
        """
        if name == "fsdp":
            return self._fsdp_mesh()
        self.get_group(name)
        if name not in (meshes := self._made.by_name):
            raise ConfigError(f"mesh {name!r} is a group of ranks without coordinates; give one of {[*meshes]}")
        return meshes[name]

    def get_group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of ``world`` (all ranks), ``cell``, or a mesh by name; nothing moves."""
        groups = self._made.groups
        one_of("mesh", name, groups, hint="it needs cells of equal size" if name == "federated" else "")
        return groups[name]

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The ranks with data of their own."""
        return self.get_mesh("dp")

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks that share a layer."""
        return self.get_mesh("tp")

    @property
    def pp_mesh(self) -> DeviceMesh:
        """The stages of the pipeline."""
        return self.get_mesh("pp")

    # Collectives ------------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor | float, op: str = "sum", mesh: str = "world") -> torch.Tensor:
        """Combine a tensor of each rank, element by element.

        Collective over the ranks of the mesh; each sends and receives about twice the tensor's bytes.

        :param tensor: This rank's values, of the same shape and data type on all ranks; left as it is. A number of
            Python's is taken as a tensor of 64 bits without dimensions, on this rank's device.
        :param op: ``sum``, ``mean``, ``max`` or ``min``.
        :param mesh: ``world`` (all ranks, across the slow link), ``cell``, or a name that :meth:`get_mesh` knows.
        :return: The same values on all of them.
        :raises ConfigError: if the operation, the mesh or the tensor is invalid.
        """
        one_of("op", op, OPERATIONS)
        tensor = self._to_tensor(float(tensor) if op == "mean" and isinstance(tensor, int) else tensor)
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"a {tensor.dtype} tensor has no mean; give a floating-point one")
        group = self.get_group(mesh)
        result = _copy_to_move(tensor, group)
        dist.all_reduce(result, op=OPERATIONS[op], group=group)
        result = result.to(tensor.device)
        return result.div_(group.size()) if op == "mean" else result

    def all_gather(self, tensor: torch.Tensor | float, mesh: str = "world") -> torch.Tensor:
        """Return a tensor of each rank of the mesh, stacked to the shape ``(ranks, *tensor.shape)``.

        Collective over the mesh, as :meth:`all_reduce`; each rank receives the tensors of all others.
        """
        group = self.get_group(mesh)
        tensor = self._to_tensor(tensor)
        values = _copy_to_move(tensor, group)
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values, group=group)
        return torch.stack(gathered).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor | float, src: int = 0, mesh: str = "world") -> torch.Tensor:
        """Give a tensor of one rank to the others.

        Collective over the ranks of the mesh.

        :param tensor: The values on the rank that sends; elsewhere a tensor of the same shape and data type.
        :param src: The rank that sends, counted along the mesh.
        :param mesh: As in :meth:`all_reduce`.
        :return: The same values on all ranks.
        :raises ConfigError: if there is no such rank.
        """
        group = self.get_group(mesh)
        if not 0 <= src < group.size():
            raise ConfigError(f"src {src} is outside mesh {mesh!r} of {group.size()} ranks; count along the mesh")
        tensor = self._to_tensor(tensor)
        result = _copy_to_move(tensor, group)
        dist.broadcast(result, group=group, group_src=src)
        return result.to(tensor.device)

    def barrier(self, mesh: str = "world") -> None:
        """Wait until all ranks of the mesh have come here; ``mesh`` as in :meth:`all_reduce`."""
        barrier(self.get_group(mesh))

    # Steps that several replica groups take together ------------------------------------------------------------------

    def average_gradients(self, model: nn.Module) -> nn.Module:
        """Return the model: a :class:`xffl.distributed.FaultTolerantWorld` averages its gradients over all groups."""
        return model

    def register(self, name: str, part: Any) -> None:
        """Do nothing: no other group may come and take the part over; local."""

    def begin_step(self) -> bool:
        """Begin an optimizer step, and tell that no other group's state was taken over; nothing moves."""
        return False

    def commit_step(self) -> bool:
        """Tell that the optimizer is to step; nothing moves."""
        return True

    @property
    def ft_manager(self) -> Any:
        """Torchft's manager, where this is one of several replica groups; ``None`` in a plain world."""
        return None

    # Gradients --------------------------------------------------------------------------------------------------------

    def get_total_norm(
        self, parameters: Parameters, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Return the norm of the gradients of the whole model, of all pipeline stages.

        Collective over the cell: one all-reduce of a number. Parts that several ranks hold count once.

        :param parameters: This rank's parameters; those without a gradient count nothing.
        :param norm_type: Order of the norm, above 0; ``inf`` for the largest absolute value.
        :param error_if_nonfinite: Whether to raise where the norm is not finite.
        :return: One number, on this rank's device, the same on all ranks of the cell.
        :raises ConfigError: if the order is invalid.
        :raises StateError: if the norm is not finite and that is to be an error; on all ranks of the cell.
        """
        if not norm_type > 0:
            raise ConfigError(f"norm_type must be a number above 0, or inf, got {norm_type}")
        several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        gradients = [parameter.grad for parameter in several if parameter.grad is not None]
        norm = total_norm(gradients, order=norm_type, dims=self.dims, cell=self.get_group("cell"), device=self.device)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise StateError(f"the gradients' norm is {norm.item()}; lower the learning rate, or look for what blew up")
        return norm

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm above 0, and return the norm before.

        Collective over the cell, with the arguments of :meth:`get_total_norm`.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm must be a number above 0, got {max_norm}")
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = self.get_total_norm(parameters, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_ does
        for parameter in parameters:
            if parameter.grad is not None:
                local = local_tensor(parameter.grad)
                local.mul_(factor.to(local.device))
        return norm

    # Contexts and policies --------------------------------------------------------------------------------------------

    @contextmanager
    def train_context(self) -> Iterator[None]:
        """Run the forward pass and the loss in this context, as the parameters ask: data type, cut logits; local.

        With ``loss_parallel`` the backward pass belongs inside, too.

        :yield: Nothing.
        """
        is_cast = self.mixed_precision_enabled and self.dims.size("dp_shard_cp") == 1  # FSDP casts by itself
        cast = torch.autocast(self.device.type, dtype=self.mixed_precision_dtype) if is_cast else nullcontext()
        with cast, self.loss_parallel():
            yield

    @contextmanager
    def loss_parallel(self) -> Iterator[None]:
        """Compute a cross-entropy, forward and backward, of logits that are cut along the vocabulary.

        No rank gathers them: a few numbers for each token are all-reduced over the mesh. Without tensor parallelism, or
        where logits are whole, the block is as any other.

        :yield: Nothing.
        """
        context: AbstractContextManager[Any] = parallel.loss_parallel() if self.loss_parallel_enabled else nullcontext()
        context.__enter__()
        try:
            yield
        finally:  # torch's own stays switched on where its block raises
            context.__exit__(None, None, None)

    def get_fsdp_mp_policy(self) -> MixedPrecisionPolicy:
        """Return FSDP's mixed-precision policy: computation in ``param_dtype``, sums in ``reduce_dtype``."""
        reduce_dtype = _DTYPES[self.device_parameters.reduce_dtype]
        if self.mixed_precision_enabled:
            return MixedPrecisionPolicy(param_dtype=self.mixed_precision_dtype, reduce_dtype=reduce_dtype)
        return MixedPrecisionPolicy(reduce_dtype=None if reduce_dtype == torch.float32 else reduce_dtype)

    def get_fsdp_config(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`torch.distributed.fsdp.fully_shard`: mesh, policies, resharding."""
        return {
            "mesh": self._fsdp_mesh(),
            "mp_policy": self.get_fsdp_mp_policy(),
            "reshard_after_forward": self.device_parameters.reshard_after_forward,
            "offload_policy": self.get_offload_policy(),
        }

    def get_offload_policy(self) -> OffloadPolicy:
        """Return where FSDP is to keep shards."""
        if not self.device_parameters.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")  # a machine without GPUs has no pinned memory

    # Internals --------------------------------------------------------------------------------------------------------

    def _to_tensor(self, value: object) -> torch.Tensor:
        """Return a tensor as it is, and a number of Python's or numpy's as one of 64 bits on this rank's device."""
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, numbers.Integral):
            return torch.tensor(int(value), dtype=torch.int64, device=self.device)
        if isinstance(value, numbers.Real):
            return torch.tensor(float(value), dtype=torch.float64, device=self.device)
        raise ConfigError(
            f"collectives take a tensor or a number, got a {type(value).__name__}; give torch.tensor(...)"
        )

    def _mesh_of(self, state: DistributedState) -> MeshSizes:
        """Fit the device parameters to a state, which is set up by them where it is not yet."""
        is_set_up = state.is_fsdp_setup() or state.is_hsdp_setup()
        sources: tuple[str, ...] = ()
        with run_on_all_ranks("federated sizes") as share:  # a rule is compared before it counts
            asked = read_federation(self._asked["federated"], "federated")
            if asked is None and not is_set_up:
                asked, _, sources = complete_federation(None, 0)  # replicas are the mesh's
            share(repr(asked))
        federated = find_sizes(asked, state.node_rank) if isinstance(asked, str) else asked
        with run_on_all_ranks("device parameters") as share:
            share(f"{self.device_parameters}, federated={federated}")
            sizes = state.topology.sizes
            if federated is not None or not is_set_up:
                with sources_named(sources):
                    sizes = Topology(state.topology.world_size, federated).sizes
            mesh = self.device_parameters.resolve(sizes)
            topology, shape = state.topology, None if mesh.cell_shape is None else tuple(mesh.cell_shape.items())
            if is_set_up and topology.sizes != sizes:
                raise ConfigError(f"the state has cells of {topology.sizes} ranks, not {sizes}; leave federated out")
            if is_set_up and (topology.replica_size, topology.cell_shape) != (mesh.replica_size, shape):
                raise ConfigError(
                    f"the state has replicas of {topology.replica_size} ranks and cell shape {topology.cell_shape}, "
                    f"the device parameters ask for {mesh.replica_size} and {shape}; set the state up with "
                    "device_parameters"
                )
        if not is_set_up:
            self._is_laid_here = True
            set_up_cells(state, federated, mesh.replica_size, mesh.cell_shape, asked=self._asked["federated"])
        return mesh

    def _create(self, ranks: tuple[int, ...], group_desc: str) -> dist.ProcessGroup:
        """Make a group that goes with this world."""
        group = self.state.create_process_group(ranks, group_desc)
        self._groups.append(group)
        return group

    def _fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh that FSDP cuts over: the state's own, or with a mesh inside the cell the part of it."""
        state = self.state
        if not self.tp_enabled and not self.pp_enabled:
            mesh = state.hsdp_mesh if state.is_hsdp_setup() else state.fsdp_mesh
            if mesh is None:
                raise StateError("the state's set-up was taken off since; make a world of your own for each state")
            return mesh
        model = self._made.model_mesh
        assert model.mesh_dim_names is not None, "made with names"
        replicas, shards, _ = model.mesh_dim_names
        return model[replicas, shards] if self.dims.size("dp_replicate") > 1 else model[shards]


def arguments_of(world: DistributedWorld) -> dict[str, Any]:
    """Return what a world was asked for beside its device parameters; local."""
    return dict(world._asked)


def _copy_to_move(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a copy of a tensor, without gradient, where a group can move it; local."""
    if isinstance(tensor, DTensor):
        raise ConfigError(f"a DTensor of {tensor.placements} is spread already; give its to_local() or full_tensor()")
    # A backend moves the memory as it is, and the flags of a conjugated or negated view stay behind.
    values = tensor.detach().resolve_conj().resolve_neg()
    device = message_device(tensor.device, group)
    is_here = device == tensor.device
    return values.clone(memory_format=torch.contiguous_format) if is_here else values.to(device).contiguous()
