"""A world that is one of several replica groups, each a job of its own, which may be lost and come back.

torchft's manager agrees with the other groups, step by step, who takes part; it averages gradients over them, and lets
a group that has come back take the state of one that lives. What is sent for that is
:mod:`xffl.distributed.replicas.replica_transport`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule

from xffl.checks import one_of
from xffl.cluster.lighthouse.address import bind_address, lighthouse_of, replica_group_of
from xffl.cluster.network import list_interfaces, release_gloo
from xffl.cluster.run_token import token_of, warn_without_token
from xffl.compat.torchft import managers_at
from xffl.distributed.agreement.consistency import control_device, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState, set_data_place
from xffl.distributed.parameters import DeviceParameters, FaultToleranceParameters
from xffl.distributed.replicas.plain_values import to_plain
from xffl.distributed.replicas.replica_transport import ShardTransport, digest, give, local, prove_members, take
from xffl.distributed.startup.stores import serve_store
from xffl.distributed.values.gradients import mark_reduced
from xffl.distributed.values.sharding import bytes_of, from_bytes, reshard
from xffl.distributed.world import DistributedWorld, arguments_of
from xffl.errors import ConfigError, LaunchError, RoundError, StateError
from xffl.extras import optional_import
from xffl.topology import DataPlace, Topology

if TYPE_CHECKING:
    from torchft import Manager

__all__ = ["CommittedOptimizer", "FaultTolerantWorld"]

CONNECT_S = 10.0  # how long groups wait for each other to connect, once they have agreed on who lives
PLACES = 10_000  # numbers that a replica group may have; the last stands for a group without one
NOWHERE = PLACES - 1
OVER_GROUPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}


class FaultTolerantWorld(DistributedWorld):
    """The ranks of one replica group, and what it does together with the other groups that live.

    .. code-block:: python

       with FaultTolerantWorld(DeviceParameters.FSDP(), FaultToleranceParameters(min_replica_size=1)) as world:
           model = world.average_gradients(xffl.shard(build_model(), world.state))
           optimizer = world.optimizer(torch.optim.AdamW(model.parameters()))
           world.register("model", model)
           world.register("optimizer", optimizer)
           while steps_are_left():
               for inputs, target in loader:
                   if world.begin_step():       # who lives? a group that is behind takes the others' state over,
                       break                    # that of the loader, too, and begins anew where it stands now
                   optimizer.zero_grad()
                   loss_of(model(inputs), target).backward()
                   if optimizer.step():         # not taken where a group was lost on the way
                       schedule.step()

    Each group is a job of its own: ``XFFL_LIGHTHOUSE`` tells it where ``xffl lighthouse`` listens, ``XFFL_TOKEN`` or
    ``XFFL_TOKEN_FILE`` the run's token, and ``XFFL_ISLAND=1/4`` which group it is. All groups have the same number of
    ranks and cut the model alike. Replicas are other groups, so a group has none inside (``dp_replicate=1``).

    :param device_parameters: What is asked of the ranks of this group; or a world that is not set up, whose place this
        one takes.
    :param ft_params: What is asked of the groups; ``None`` means to be one, with the defaults.
    :param backend: As for :class:`DistributedWorld`.
    :param device: As for :class:`DistributedWorld`.
    :raises ConfigError: if an argument is invalid.
    :raises StateError: if the given world is set up.
    """

    def __init__(
        self,
        device_parameters: DeviceParameters | DistributedWorld,
        ft_params: FaultToleranceParameters | None = None,
        *,
        backend: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        asked: dict[str, Any] = {"federated": None, "backend": backend, "device": device}
        if isinstance(device_parameters, DistributedWorld):
            if device_parameters.is_set_up:
                raise StateError("the world is set up already; make it a FaultTolerantWorld before setup()")
            asked = arguments_of(device_parameters) | {
                name: value for name, value in asked.items() if value is not None
            }
            device_parameters = device_parameters.device_parameters
        super().__init__(device_parameters, **asked)
        ft_params = FaultToleranceParameters() if ft_params is None else ft_params
        if not isinstance(ft_params, FaultToleranceParameters):
            raise ConfigError(f"ft_params must be FaultToleranceParameters, got {ft_params!r}")
        self.ft_params = ft_params
        self._manager: Manager | None = None
        self._store: TCPStore | None = None
        self._pg: Any = None
        self._parts: dict[str, Any] = {}
        self._optimizer: CommittedOptimizer | None = None
        self._is_in_step = self._has_taken_over = self._is_checked = False
        self._is_torn = False
        """Whether some ranks of this group hold another group's state and others their own"""
        self._warned = ""
        """What was written last about a group that does not know the token"""
        self._spoiled: str | None = None
        """The part that could not be taken over"""

    # Life -------------------------------------------------------------------------------------------------------------

    def setup(self, state: DistributedState | None = None) -> DistributedState:
        """Join the other ranks of this group, and make the manager that talks to the other groups.

        Collective over the group, as :meth:`DistributedWorld.setup`. The other groups are not waited for: that is the
        first step's. Raises where torchft is missing, lighthouse or token are not set, or the group has cells inside.
        """
        made = super().setup(state)
        if not self.ft_params.enable:
            return made
        try:
            self._connect()
        except BaseException:
            self.teardown(synchronize=False)
            raise
        return made

    def teardown(self, *, synchronize: bool = True) -> None:
        """Leave the other groups, which go on, and the ranks of this one, as :meth:`DistributedWorld.teardown`."""
        manager = self._manager
        self._manager = None
        if manager is not None:
            manager.shutdown(wait=False)
        self._parts.clear()
        if self.is_set_up:
            set_data_place(self.state, None)
        self._optimizer = None
        self._pg = None
        self._is_in_step = False
        super().teardown(synchronize=synchronize)
        self._store = None  # other ranks of this group have left it

    def _place_in(self, group: int, groups: int) -> DataPlace:
        """Return this rank's place among the ranks of all groups, which are the replicas of one cell.

        There are as many as there may be: what a group that is lost would have trained on is trained on by none.
        """
        ranks = groups * self.world_size
        mesh = replace(self.device_parameters, dp_replicate=groups).resolve((ranks,))
        dealt = Topology(ranks, None, mesh.replica_size, mesh.cell_shape)
        job = DataPlace(self.state.topology, self.rank)
        return DataPlace(dealt, dealt.rank_of(0, group, self.rank), job)

    @property
    def ft_manager(self) -> Manager | None:
        """Torchft's manager; ``None`` where fault tolerance is not enabled."""
        if self._state is None:
            raise StateError("the world is not set up; call setup() first")
        return self._manager

    @property
    def dp_size(self) -> int:
        """Ranks with data of their own, of all groups that take part in this step."""
        return super().dp_size * (1 if self._manager is None else max(1, self._manager.num_participants()))

    def seed_for(self, seed: int, *axes: str) -> int:
        """Return a seed as :meth:`DistributedWorld.seed_for`; along ``dp`` and ``dp_replicate`` groups differ, too."""
        own = super().seed_for(seed, *axes)
        if self.replica_group is None or not {"dp", "dp_replicate"} & set(axes):
            return own
        seed_bytes = hashlib.blake2b(repr((own, self.replica_group[0])).encode(), digest_size=8).digest()
        return int.from_bytes(seed_bytes, "big") >> 1

    # Steps ------------------------------------------------------------------------------------------------------------

    def average_gradients(self, model: nn.Module) -> nn.Module:
        """Let a model's gradients be averaged over the groups that live, in its backward pass; nothing moves yet.

        :param model: What :func:`xffl.shard` has returned: FSDP2, or a whole model where the group is one rank.
        :return: The model to use: the same one, or torchft's DDP around a whole one.
        :raises ConfigError: if the model is spread in a way that the groups cannot average.
        """
        manager = self._manager
        if manager is None:
            return model
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_all_reduce_hook(lambda gradients: manager.allreduce(gradients).wait())
        if units:
            return model
        if self.world_size > 1 or isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"the model is whole on each of the {self.world_size} ranks of this group, which would be replicas; "
                "give dp_shard=auto, or start one rank in each group"
            )
        # torchft gives DDP a stand-in for a group, of which nobody can tell the ranks; this group is one rank.
        mark_reduced(model, (dist.get_rank(),), by="torchft")
        return _data_parallel(manager, model)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to use: ``zero_grad`` begins a step of all groups, ``step`` takes it or does not.

        :param optimizer: The only optimizer of the loop.
        :return: It, wrapped; the same object where fault tolerance is not enabled.
        """
        if self._manager is None:
            return optimizer
        if self._optimizer is not None:
            raise ConfigError("a step of all replica groups is one optimizer's; call it once, or use a strategy")
        self._optimizer = CommittedOptimizer(self, optimizer)
        return self._optimizer

    def register(self, name: str, part: Any) -> None:
        """Let a group that comes back take this part over from one that lives, and the other way round; local.

        :param name: What it is called, the same in all groups.
        :param part: A model, an optimizer, or what has ``state_dict`` and ``load_state_dict``: schedulers, loaders,
            callbacks. Of what is cut each rank takes what the rank at its place holds.
        :raises ConfigError: if the name is taken.
        """
        if self._manager is None:
            return
        if name in self._parts:
            raise ConfigError(f"part {name!r} is registered twice; give each a name of its own")
        part = part.wrapped if isinstance(part, CommittedOptimizer) else part

        def take_over(saved: Any) -> None:
            self._spoiled = name
            give(name, part, saved)
            self._spoiled = None
            self._has_taken_over = True

        self._parts[name] = part
        self._is_checked = False
        self._manager.register_state_dict_fn(name, take_over, lambda: take(part))

    def begin_step(self) -> bool:
        """Agree with the other groups who takes part in the next step; whoever is behind takes the others' state over.

        Collective over the group. It waits for all groups that live; where the lighthouse does not answer, until it
        does, up to ``comm.train_timeout_seconds``. A step that has begun and is not committed yet goes on.

        :return: Whether this group has taken another one's state over.
        :raises RoundError: if no agreement came about in time; the model is as after the last step.
        """
        manager = self._manager
        if manager is None or self._is_in_step:
            return False
        if not self._is_checked:
            for name, part in self._parts.items():  # what cannot be sent is refused now, not when a group asks for it
                to_plain(take(part), name, {})
            self._is_checked = True
        self._agree_on_step(manager)
        self._is_in_step = True
        has_taken_over = self._agree_in_group(manager)
        if self._pg.is_new and manager.num_participants() > 1 and manager.errored() is None:
            if manager.current_step() == 0:
                self._start_alike(manager)
            self._compare(manager)
        return has_taken_over

    def _agree_on_step(self, manager: Manager) -> None:
        """Ask the lighthouse who lives, until it answers; take over what a group that is ahead has."""
        self._has_taken_over = False
        self._spoiled = None
        self._pg.conflict = None
        deadline = time.monotonic() + self.device_parameters.comm.train_timeout_seconds
        while True:
            try:
                manager.start_quorum()
                break
            except Exception as error:
                if self._spoiled is not None:
                    raise RoundError(
                        f"part {self._spoiled!r} could not be taken over from another replica group ({error}), and "
                        "those before it were; start this group again"
                    ) from error
                if not isinstance(error, (RuntimeError, TimeoutError)):
                    raise
                if time.monotonic() > deadline:
                    raise RoundError(
                        f"the replica groups could not agree on a step after {manager.current_step()} ({error}); "
                        "look after the lighthouse; the model is as after that step"
                    ) from error
                manager._quorum_future = None  # else torchft raises this error again, and asks for nothing
                time.sleep(0.1)
        if self._pg.conflict is not None and manager.current_step() == 0:
            raise ConfigError(self._pg.conflict)

    def _agree_in_group(self, manager: Manager) -> bool:
        """Bring the ranks of this group to one step, and tell whether all have taken another group's state over."""
        failed = manager.errored()
        original = None if failed is None else failed.original_exception
        is_stranger = isinstance(original, LaunchError)
        mine = (manager.current_step(), failed is not None, self._has_taken_over, is_stranger)
        own = torch.tensor(mine, dtype=torch.int64, device=control_device())
        every = [own]
        if self.world_size > 1:
            every = [torch.empty_like(own) for _ in range(self.world_size)]
            dist.all_gather(every, own)
        table = torch.stack(every)
        (step, *_), (_, any_failed, any_taken, any_stranger) = table.amin(0).tolist(), table.amax(0).tolist()
        if any_stranger and manager.batches_committed() == 0:
            raise LaunchError(f"a rank of this replica group could not join another one: {original}")
        if is_stranger and str(original) != self._warned:  # those that have made steps go on once it has gone
            self._warned = str(original)
            print(f"xffl: {original}; steps fail while it is there", file=sys.stderr, flush=True)
        has_taken_over = bool(table[:, 2].all())
        if any_taken:
            self._is_torn = not has_taken_over
        elif self._is_torn and not any_failed:
            raise RoundError(
                "some ranks of this replica group have taken another one's state over and others have not, and no "
                "group is left that could give it; start this group again from a checkpoint"
            )
        if any_failed or self._is_torn:
            # Before anything else: the other groups must not wait for this group's gradients. Ranks that got ahead go
            # back to the lowest step, so that all ask the lighthouse for the same one.
            self._pg.abort()
            manager.load_state_dict({**manager.state_dict(), "step": step})
            if failed is None:
                manager.report_error(StateError("another rank of this replica group could not take part"))
        return has_taken_over

    def commit_step(self) -> bool:
        """Tell whether the optimizer is to step; collective over the group, which answers as one.

        :return: Whether gradients are those of all groups that take part; always where fault tolerance is not enabled.
        :raises RoundError: if more steps failed one after the other than ``max_consecutive_failures`` allows.
        """
        if self._manager is None:
            return True
        self._is_in_step = False
        try:
            return bool(self._manager.should_commit())
        except RuntimeError as error:
            allowed = self.ft_params.max_consecutive_failures
            if allowed is None or "consecutive" not in str(error):
                raise
            raise RoundError(
                f"{allowed + 1} steps failed one after the other, more than max_consecutive_failures={allowed}; the "
                f"model is as after step {self._manager.current_step()}; with fewer than "
                f"min_replica_size={self.ft_params.min_replica_size} groups no step is taken"
            ) from error

    def all_reduce(self, tensor: torch.Tensor | float, op: str = "sum", mesh: str = "world") -> torch.Tensor:
        """Combine a tensor of each rank, as :meth:`DistributedWorld.all_reduce`.

        With ``mesh="dp"`` of all groups that take part in this step, by ``sum`` or ``mean``. Where a group was lost
        meanwhile the values mean nothing, and :meth:`commit_step` says so.
        """
        if self._manager is None or mesh != "dp":
            return super().all_reduce(tensor, op, mesh)
        if not self._is_in_step:
            raise StateError("over replica groups there is a sum inside a step only; call it after begin_step()")
        result = super().all_reduce(tensor, op, mesh)
        one_of("op over replica groups", op, OVER_GROUPS)
        self._manager.allreduce(result, reduce_op=OVER_GROUPS[op]).wait()
        return result

    def _own_state(self) -> dict[str, Any]:
        """Return what this rank would give to another group now; nothing is copied."""
        return {name: take(part) for name, part in self._parts.items()}

    # Internals --------------------------------------------------------------------------------------------------------

    def _start_alike(self, manager: Manager) -> None:
        """Let all groups begin with the weights of one."""
        # torchft's own way (init_sync) gives ranks of one group the parts of different groups.
        is_source = manager.participating_rank() == 0
        pairs = []
        for model in self._parts.values():
            if not isinstance(model, nn.Module):
                continue
            reshard(model)
            for name, value in model.state_dict().items():
                if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state":
                    place = local(value)
                    data = bytes_of(place).to(self.device)
                    # Bytes of one group and zeros of the others: their sum is exact.
                    copy = data.clone() if is_source else torch.zeros_like(data)
                    manager.allreduce(copy, reduce_op=dist.ReduceOp.SUM).wait()
                    pairs.append((place, copy))
        if self._is_exchanged(manager) and not is_source:  # else the step is not taken either
            with torch.no_grad():
                for place, copy in pairs:
                    place.copy_(from_bytes(copy, place.dtype, place.shape))

    def _compare(self, manager: Manager) -> None:
        """Refuse to go on where groups are at the same step and hold something else; whenever one has come or gone."""
        compared = {
            name: part
            for name, part in self._parts.items()
            if isinstance(part, (nn.Module, torch.optim.Optimizer)) or getattr(part, "is_same_everywhere", False)
        }
        if not compared:
            return
        sums = [digest(part) for part in compared.values()]
        totals = torch.tensor(sums, dtype=torch.int64, device=self.device)
        groups = manager.num_participants()
        manager.allreduce(totals, reduce_op=dist.ReduceOp.SUM).wait()
        if not self._is_exchanged(manager):
            return
        self._pg.is_new = False
        # Only where all groups have the same digest, the total is so many times its own in each of them.
        unlike = [
            name for name, own, total in zip(compared, sums, totals.tolist(), strict=True) if total != groups * own
        ]
        if unlike:
            raise RoundError(
                f"the replica groups are all at step {manager.current_step()}, but hold different {unlike[0]!r}; "
                "were they started from other checkpoints, or with other configurations? Start one of them anew"
            )

    def _is_exchanged(self, manager: Manager) -> bool:
        """Tell whether all exchanges with the other groups so far worked; waits for a GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return manager.errored() is None and self._pg.errored() is None

    def _connect(self) -> None:
        """Make the manager, and with it this rank's servers: all of them listen at one address."""
        with run_on_all_ranks("lighthouses or numbers of the replica group") as share:
            replicas, cells = self.dims.size("dp_replicate"), self.state.topology.cells
            if replicas > 1:
                raise ConfigError(
                    f"dp_replicate is {replicas} inside this replica group, but replicas are groups of their own; give "
                    "dp_replicate=1, and start more jobs"
                )
            if cells > 1:
                raise ConfigError(
                    f"this job has {cells} federated groups, but it is one of several replica groups of one model; "
                    "leave federated and XFFL_FEDERATED out"
                )
            lighthouse = lighthouse_of()
            token = token_of()
            self.replica_group = replica_group_of()
            share(f"{lighthouse} {self.replica_group}")
            if self.replica_group is not None:
                set_data_place(self.state, self._place_in(*self.replica_group))
            address = bind_address(lighthouse)
            if self.rank == 0:
                warn_without_token(token)
            os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
            with optional_import("elastic", "fault tolerance needs torchft, which has wheels for x86-64 Linux"):
                import torchft.manager
        interface = next((one.name for one in list_interfaces() if one.address == address), "lo")
        release_gloo()  # the ranks of this group are on one host, those of others need not be
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        logging.getLogger("torchft").setLevel(logging.ERROR)
        timeout = timedelta(seconds=self.device_parameters.comm.train_timeout_seconds)
        host, port, life = self._meet(address)
        self._pg = _make_group(
            self.device, timeout=timeout, place=self.replica_group, ranks=self.world_size, token=token
        )
        with managers_at(address):  # not on all interfaces
            self._manager = torchft.Manager(
                pg=self._pg,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=self.ft_params.min_replica_size,
                max_retries=self.ft_params.max_consecutive_failures,
                # The state is taken over before the forward pass, which FSDP gathers weights in and buffers change in.
                use_async_quorum=False,
                init_sync=False,
                timeout=timeout,
                quorum_timeout=timeout,
                connect_timeout=timedelta(seconds=CONNECT_S),
                quorum_retries=1_000_000,
                rank=self.rank,
                world_size=self.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=lighthouse,
                # Of its last digits torchft makes the ranks that configure() of the groups gets, see _make_group.
                replica_id=f"island_{'x' if self.replica_group is None else self.replica_group[0]}_{life}",
                hostname=address,
                checkpoint_transport=ShardTransport(address, token, self._own_state),
            )

    def _meet(self, address: str) -> tuple[str, int, int]:
        """Make a store for ranks at one place of all groups, and draw a number for this group's life; collective."""
        place: list[tuple[str, int, int]] = [(address, 0, 0)]
        if self.rank == 0:
            self._store = serve_store(address, 0, None, timedelta(minutes=5), is_local=False)
            port = self._store.port
            # All that torchft tells other groups of this one is a number, so the group's own stands in its last digits.
            number, most = self.replica_group or (NOWHERE, NOWHERE)
            place = [(address, port, (secrets.randbelow(10**9) * PLACES + number) * PLACES + most)]
        if self.world_size > 1:
            dist.broadcast_object_list(place, src=0)
        return place[0]


class CommittedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only where all replica groups that take part have each other's gradients."""

    def __init__(self, world: FaultTolerantWorld, wrapped: torch.optim.Optimizer) -> None:
        self._world = world
        self.wrapped = wrapped  # all else, such as param_groups and state, is the wrapped one's
        for name in ("add_param_group", "state_dict", "load_state_dict"):  # which the base class has, too
            setattr(self, name, getattr(wrapped, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step of all groups; collective over the group."""
        self._world.begin_step()
        self.wrapped.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Step, or do nothing where a group was lost on the way; tell which. Collective over the group."""
        if closure is not None:
            raise ConfigError("an optimizer of several replica groups takes no closure; compute the gradients before")
        is_taken = self._world.commit_step()
        if is_taken:
            self.wrapped.step()
        return is_taken


def _data_parallel(manager: Manager, model: nn.Module) -> nn.Module:
    """Wrap a whole model with torchft's DDP, whose own hook raises where a group is lost in the middle of a bucket."""
    from torchft import DistributedDataParallel

    class Averaged(DistributedDataParallel):  # type: ignore[misc]
        # DDP reads annotations, which are texts in this file
        _comm_hook = staticmethod(lambda manager, bucket: _average_bucket(manager, bucket))

    averaged: nn.Module = Averaged(manager, model)
    return averaged


def _average_bucket(manager: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    manager.allreduce(gradients).wait()  # commit_step() raises what goes wrong here
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else None
    )
    done.set_result(gradients)
    return done


def _make_group(
    device: torch.device, timeout: timedelta, place: tuple[int, int] | None, ranks: int, token: bytes
) -> Any:
    """Make torchft's group over the ranks at one place of all replica groups, with four changes."""
    import torchft
    from torchft.process_group import create_store_client

    is_gloo = device.type == "cpu"
    base = torchft.ProcessGroupGloo if is_gloo else torchft.ProcessGroupNCCL
    # Who was lost before all have connected is not waited for as long as who computes.
    connect_timeout = min(timeout, timedelta(seconds=CONNECT_S))

    class Group(base):  # type: ignore[misc, valid-type]
        conflict: str | None = None
        is_new = True
        """Whether the groups that it joins are others than before"""

        def configure(self, store_addr: str, *rest: Any) -> None:
            # A lighthouse that was started again counts from 1 again, and the store keeps what was written for its
            # earlier numbers. The last argument has the lives of the groups, see _meet.
            self.is_new = True
            lives = [rank // ranks for rank in rest[-1]]
            others = [(life // PLACES % PLACES, life % PLACES) for life in lives]
            if place is not None and (others.count(place) > 1 or any(most != place[1] for _, most in others)):
                self.conflict = (
                    f"replica groups {['/'.join(map(str, other)) for other in sorted(others)]} (XFFL_ISLAND) do not go "
                    "together; give each group a number of its own, and all the same number of groups"
                )
                raise RuntimeError(self.conflict)
            self.set_timeout(connect_timeout)  # the store's, which is in a process of one of the groups
            address = f"{store_addr}/{hash(tuple(lives)) & (1 << 62) - 1}"
            try:
                _, rank, size, *_ = rest
                if size > 1:
                    # The lighthouse takes anybody for a group. No gradient goes to one that does not know the token.
                    store = create_store_client(f"{address}/proofs", connect_timeout)
                    prove_members(store, token=token, name=f"{lives}", rank=rank, size=size)
                super().configure(address, *rest)
            finally:
                self.set_timeout(timeout)

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            if not is_gloo:  # its ranks come here only when each has aborted what hung
                store.set_timeout(timeout)
            made = super()._create_pg(store, rank, world_size)
            if is_gloo:
                made._get_backend(device)._set_default_timeout(timeout)
            return made

    return Group(timeout=timeout)
