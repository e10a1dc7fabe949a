"""The world as a training script sees it: who is where, which ranks share what, and collectives by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, parallel

from xffl.cluster.cells import Federation, check_federation
from xffl.cluster.environment import complete_federation, sources_named
from xffl.cluster.failure import note_failure
from xffl.distributed.collectives import Collectives, total_norm
from xffl.distributed.consistency import barrier, check_consistent
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group
from xffl.distributed.parallel_dims import dtype_of, make_cell_meshes
from xffl.distributed.parameters import DeviceParameters, MeshSizes
from xffl.distributed.process_group import (
    cleanup_distributed_process_group,
    find_sizes,
    set_up_cells,
    setup_distributed_process_group,
    waits_when_destroyed,
)
from xffl.errors import ConfigError, StateError, XfflError
from xffl.topology import Topology

__all__ = ["DistributedWorld", "loss_parallel"]


class DistributedWorld(Collectives):
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
    :param device: Device of this process; by default the GPU of its local rank where there are GPUs, else the CPU.
    :param streams: CUDA streams for the groups of a round; 4 by default on CUDA.
    """

    def __init__(
        self,
        device_parameters: DeviceParameters,
        federated: Federation | None = None,
        *,
        backend: str | None = None,
        device: torch.device | str | int | None = None,
        streams: int | None = None,
    ) -> None:
        if not isinstance(device_parameters, DeviceParameters):
            raise ConfigError(
                f"device parameters {device_parameters!r} are none; give a DeviceParameters, such as "
                "DeviceParameters.FSDP()"
            )
        super().__init__(device_parameters)
        self._asked: dict[str, Any] = {"federated": federated, "backend": backend, "device": device, "streams": streams}
        self._is_joined_here = self._is_laid_here = False
        self._groups: list[dist.ProcessGroup] = []

    def setup(self, state: DistributedState | None = None) -> DistributedState:
        """Join the other processes and make the meshes.

        Collective over the world: every rank makes the same groups (see
        :func:`xffl.distributed.parallel_dims.make_cell_meshes`).

        :param state: A state of a world that is joined already, with replicas as the device parameters ask for, or
            with no set-up yet; by default the world is joined, and left again by :meth:`teardown`.
        :return: The state.
        :raises StateError: if the world is set up already.
        :raises ConfigError: if the sizes do not multiply to the cells'.
        """
        if self._state is not None:
            raise StateError("this world is set up already; call teardown() first, or make another")
        comm = self.device_parameters.comm
        if state is None:
            made = setup_distributed_process_group(
                **self._asked,
                device_parameters=self.device_parameters,
                timeout_s=comm.train_timeout_seconds,
                join_timeout_s=comm.init_timeout_seconds,
            )
            self._is_joined_here = True
        else:
            made = state
        self._state, self._device = made, None
        try:
            mesh = self._mesh_of(made)
            self._meshes = make_cell_meshes(self._create, mesh, made, self.device.type)
        except BaseException as error:
            note_failure(error)  # before the others lose this rank, so that it counts as the first to fail
            self.teardown(synchronize=False)
            raise
        return made

    def teardown(self, *, synchronize: bool = True) -> None:
        """Leave the other processes, if :meth:`setup` joined them.

        Collective over the world with ``synchronize``; after an exception give ``synchronize=False``: nothing moves.

        :param synchronize: Whether the ranks wait for each other first.
        """
        state, self._state, self._meshes = self._state, None, None
        groups, self._groups = self._groups, []
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
            state._rollback_all(destroys=destroys)

    def __enter__(self) -> DistributedWorld:
        if self._state is None:
            self.setup()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            note_failure(error)  # before the others lose this rank, so that it counts as the first to fail
        self.teardown(synchronize=error is None)

    # Meshes -----------------------------------------------------------------------------------------------------------

    @property
    def world_mesh(self) -> DeviceMesh:
        """The mesh of all axes over this rank's cell: ``pp, cp, dp_replicate, dp_shard, tp``.

        The federated axis stands outside it, since cells may have different sizes. From the second world of a process
        on, the names of its dimensions end in a number.
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
        return self._made.get_mesh(name)

    def get_group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of a mesh; nothing moves.

        :param name: ``world`` (all ranks), ``cell``, or a name that :meth:`get_mesh` knows.
        :return: The group.
        :raises ConfigError: if there is none of that name.
        """
        return self._made.group(name)

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

    # Steps that several replica groups take together ------------------------------------------------------------------

    def average_gradients(self, model: nn.Module) -> nn.Module:
        """Return the model to use: the same one, since a plain world is the only one; local.

        :param model: The model, as it is spread.
        :return: It. :class:`xffl.distributed.FaultTolerantWorld` averages its gradients over all groups.
        """
        return model

    def register(self, name: str, part: Any) -> None:
        """Do nothing: no other group may come and take the part over; local.

        :param name: What it is called.
        :param part: A model, an optimizer, or what has ``state_dict`` and ``load_state_dict``.
        """

    def begin_step(self) -> bool:
        """Begin an optimizer step; nothing moves.

        :return: Whether the state of another group was taken over; never in a plain world.
        """
        return False

    def commit_step(self) -> bool:
        """Tell whether the optimizer is to step; nothing moves.

        :return: Always True in a plain world.
        """
        return True

    @property
    def ft_manager(self) -> Any:
        """Torchft's manager, where this is one of several replica groups; ``None`` in a plain world."""
        return None

    @property
    def replica_group(self) -> tuple[int, int] | None:
        """This replica group's number and the most groups; ``None`` in a plain world."""
        return None

    # Gradients --------------------------------------------------------------------------------------------------------

    def get_total_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Return the norm of the gradients of the whole model, of all pipeline stages.

        Collective over the cell: one all-reduce of a number. Parts that several ranks hold count once.

        :param parameters: This rank's parameters; those without a gradient count nothing.
        :param norm_type: Order of the norm, above 0; ``inf`` for the largest absolute value.
        :param error_if_nonfinite: Whether to raise where the norm is not finite.
        :return: One number, on this rank's device, the same on all ranks of the cell.
        :raises ConfigError: if the order cannot be meant.
        :raises StateError: if the norm is not finite and that is to be an error; on all ranks of the cell.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not norm_type > 0:
            raise ConfigError(f"norm_type {norm_type} is no order of a norm; give a number above 0, or inf")
        found = total_norm(given, norm_type, self.dims, self._made.group("cell"), self.device)
        if error_if_nonfinite and not math.isfinite(found.item()):
            raise StateError(
                f"the gradients' norm is {found.item()}; lower the learning rate, or look for what blew up"
            )
        return found

    def clip_grad_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale the gradients of the whole model down to a norm; collective over the cell, as :meth:`get_total_norm`.

        :param parameters: This rank's parameters.
        :param max_norm: The largest norm that stays, above 0.
        :param norm_type: Order of the norm.
        :param error_if_nonfinite: Whether to raise where the norm is not finite.
        :return: The norm before.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm {max_norm} is no norm; give a number above 0")
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = self.get_total_norm(given, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in given:
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                local.mul_(factor.to(local.device))
        return norm

    # Contexts and policies --------------------------------------------------------------------------------------------

    def train_context(self) -> AbstractContextManager[None]:
        """Return a context for the forward pass and the loss, as the parameters ask: data type, cut logits; local.

        With ``loss_parallel`` the backward pass belongs inside, too.

        :return: The context.
        """
        is_cast = self.mixed_precision_enabled and not self.fsdp_enabled  # FSDP casts by itself
        return self._as_asked(is_cast) if is_cast or self.loss_parallel_enabled else nullcontext()

    @contextmanager
    def _as_asked(self, is_cast: bool) -> Iterator[None]:
        cast = torch.autocast(self.device.type, dtype=self.mixed_precision_dtype) if is_cast else nullcontext()
        with cast, self.loss_parallel():
            yield

    @contextmanager
    def loss_parallel(self) -> Iterator[None]:
        """Compute a cross-entropy, forward and backward, of logits that are cut along the vocabulary.

        Without tensor parallelism, or where logits are whole, the block is as any other.

        :yield: Nothing.
        """
        with loss_parallel() if self.loss_parallel_enabled else nullcontext():
            yield

    def get_fsdp_mp_policy(self) -> MixedPrecisionPolicy:
        """Return FSDP's mixed-precision policy: computation in ``param_dtype``, sums in ``reduce_dtype``."""
        reduce_dtype = dtype_of(self.device_parameters.reduce_dtype)
        if self.mixed_precision_enabled:
            return MixedPrecisionPolicy(param_dtype=self.mixed_precision_dtype, reduce_dtype=reduce_dtype)
        return MixedPrecisionPolicy(reduce_dtype=None if reduce_dtype == torch.float32 else reduce_dtype)

    def get_fsdp_config(self) -> dict[str, Any]:
        """Return what :func:`torch.distributed.fsdp.fully_shard` is to be called with.

        :return: ``mesh``, ``mp_policy``, ``reshard_after_forward`` and ``offload_policy``.
        """
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

    # What the parts share ---------------------------------------------------------------------------------------------

    def _mesh_of(self, state: DistributedState) -> MeshSizes:
        """Fit the device parameters to a state, which is set up by them where it is not yet."""
        is_set_up = state.is_fsdp_setup() or state.is_hsdp_setup()
        federated, sources = self._sizes_of(state, is_set_up=is_set_up)
        error: XfflError | None = None
        mesh: MeshSizes | None = None
        try:
            sizes = state.topology.sizes
            if federated is not None or not is_set_up:
                with sources_named(sources):
                    sizes = Topology(state.topology.world_size, federated).sizes
            mesh = self.device_parameters.resolve(sizes)
            if is_set_up:
                _check_state(state.topology, sizes, mesh)
        except XfflError as wrong:
            error = wrong
        check_consistent("device parameters", f"{self.device_parameters}, federated={federated}", error=error)
        assert mesh is not None, "the ranks agree on errors only by raising one"
        if not is_set_up:
            self._is_laid_here = True
            set_up_cells(state, federated, mesh.replica_size, mesh.cell_shape, asked=self._asked["federated"])
        return mesh

    def _sizes_of(
        self, state: DistributedState, *, is_set_up: bool
    ) -> tuple[int | tuple[int, ...] | None, tuple[str, ...]]:
        """Return the federated sizes that are asked for, and by which variable; a rule is compared before it counts."""
        federated: Federation | None = self._asked["federated"]
        sources: tuple[str, ...] = ()
        error: XfflError | None = None
        try:
            federated = check_federation(federated, "federated sizes")
            if federated is None and not is_set_up:
                federated, _, sources = complete_federation(None, 0)  # replicas are the mesh's
        except XfflError as wrong:
            error = wrong
        check_consistent("federated sizes", repr(federated), error=error)
        return find_sizes(federated, state.node_rank), sources

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
        return model[replicas, shards] if self.dp_replicate_enabled else model[shards]


def _check_state(topology: Topology, sizes: tuple[int, ...], mesh: MeshSizes) -> None:
    if topology.sizes != sizes:
        raise ConfigError(
            f"the state has cells of {topology.sizes} ranks, but federated={sizes} was asked for; set the state up "
            "with it, or leave it out"
        )
    shape = None if mesh.cell_shape is None else tuple(mesh.cell_shape.items())
    if topology.replica_size != mesh.replica_size or topology.cell_shape != shape:
        raise ConfigError(
            f"the state has replicas of {topology.replica_size} ranks and cell shape {topology.cell_shape}, the device "
            f"parameters ask for {mesh.replica_size} and {shape}; set the state up with device_parameters"
        )


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Let cross-entropy work on logits that are cut by the vocabulary; the backward pass belongs inside, too.

    No rank gathers the logits: a few numbers for each token are all-reduced over the mesh. torch's context of the same
    name stays switched on where the block raises; this one does not.
    """
    context = parallel.loss_parallel()
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)
