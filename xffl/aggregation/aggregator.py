"""The federated round, from the vote to the new weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from xffl.aggregation.algorithms.combiners import Combiner
from xffl.aggregation.algorithms.server import ServerOptimizer
from xffl.aggregation.background import Background, PendingRound, apart, overtake
from xffl.aggregation.compression.codecs import Codec
from xffl.aggregation.compression.error_feedback import ErrorFeedback
from xffl.aggregation.engine.buffers import Layout
from xffl.aggregation.engine.consensus import (
    AFRESH,
    Outcome,
    RoundCoordinator,
    RoundInput,
    agree_start,
    prepare_round,
    report_of,
)
from xffl.aggregation.engine.exchange import Exchange
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.groups import Progress, RoundGroups, RoundScope, select_groups
from xffl.aggregation.engine.inconsistent import TornError, count_inconsistent, find_inconsistent, mark_inconsistent
from xffl.aggregation.engine.plan import GroupTransfer, Item, digest, plan_groups, plan_transfers
from xffl.aggregation.engine.status import NO_ALPHA
from xffl.aggregation.engine.tensors import (
    Manifest,
    ModelTensor,
    Pattern,
    RankTensors,
    ReplicaTensors,
    TensorInfo,
    describe_difference,
    describe_rank_tensors,
    gather_axes,
    gather_replica_tensors,
)
from xffl.aggregation.engine.transport import CrossCellTransport
from xffl.aggregation.mean import arithmetic_of
from xffl.aggregation.options import DEFAULT_BUCKET_BYTES, Options, check_merge
from xffl.aggregation.privacy.differential import Accountant, Privacy
from xffl.aggregation.privacy.secure_sum import Masker, SecureSum, make_masker
from xffl.aggregation.report import RoundReport
from xffl.distributed.consistency import barrier, check_consistent, run_on_all_ranks, transfer_device
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group
from xffl.distributed.sharding import reshard
from xffl.errors import CheckpointError, ConfigError, StateError
from xffl.parallel.zero_view import refresh_view, round_view, write_view

__all__ = ["Aggregator", "Assembly", "PendingRound", "assemble", "check_given"]


class Aggregator:
    """Average a model over the cells of a federation, shard by shard.

    Making one is collective over the world: the ranks compare the model's manifest and plan the exchange once. A round
    moves each shard once from its sender to each peer in the other cells, and from there to the replicas at home; the
    number of replicas does not change what crosses. Memory: on a sender 52 MiB for what arrives, or six buckets of each
    other cell if that is more, a few for what has to be packed, and with ``atomic`` one copy of this rank's shard.

    What happens to a tensor follows its policy. By default trainable parameters and floating-point buffers are averaged
    (buffers first over the ranks of a cell), integer and bool buffers are taken from cell 0, frozen parameters and
    non-persistent buffers stay local. The optimizer's state is left alone. The attributes ``fragments`` and
    ``overlaps`` say what it was made with.

    With a mesh inside the cells (tensor, context and pipeline parallelism), a rank gives what it really holds: any part
    of a DTensor, or the tensors of its stage of a pipeline. The state must know the ``cell_shape`` then, all cells must
    spread the model alike, and a stage's tensors must have the names that they have in the whole model. What several
    ranks of a replica hold alike (a norm beside tensor-parallel layers, a weight tied over two stages) counts and
    crosses once, and is handed round to all of them; buffers become the mean over the ranks that hold them.

    :param model: The model that trains: plain, DDP, FSDP2/HSDP over the state's meshes, or spread over a mesh.
    :param state: The state that describes the federation; without one the world is a single cell.
    :param policies: ``average``, ``local`` or ``first`` for tensors by name pattern (:mod:`fnmatch`) or by the type of
        a module that they lie in (``{nn.BatchNorm2d: "local"}`` is FedBN), the first match wins.
    :param bucket_bytes: Size of the pieces that cross at a time, in bytes of values, before a codec.
    :param atomic: Collect the new weights beside the model, so that a failed round leaves the old ones. Without it, a
        failed exchange tears the model: it cannot be used until a checkpoint is loaded.
    :param nonfinite: ``reject`` the round where a cell holds NaN or infinity, or ``drop_cell``: leave that cell out.
    :param form: ``all_gather``: each sender sends its shard to every other cell, ``C - 1`` copies. ``two_hop``: of each
        bucket, every cell combines one part and sends the result round, ``2 (C - 1) / C`` copies and a second latency;
        over gloo and without rails, two cells combine whole buckets in turn.
        ``auto``: two hops for three cells and more, except for what is tiny, and for two cells above 32 MiB; two cells
        without replicas swap fp32 values over gloo, and each rank takes the mean when it writes it.
    :param rails: Let the replicas of a shard take turns in carrying its buckets, so that all their network cards work,
        instead of one sender. What crosses stays the same.
    :param codec: How averaged parameters are written on the slow link: ``none``, ``bf16``, ``fp16``, ``int8``,
        ``int4``, ``topk:0.01`` (see :mod:`xffl.aggregation.compression.codecs`), or a mapping of name patterns to
        codecs, the first match wins. Codecs write what a shard differs by from the last agreed state; what they leave
        out is sent later (error feedback). The first round is exact, and makes that state. Memory on a sender: one more
        copy of its shard, two in fp32 of what was left out, and ``C + 2`` buckets in fp32.
    :param fragments: Parts of the model that are exchanged in turn, one in each round.
    :param overlap: Make process groups of its own, for :meth:`aggregate_async`.
    :param combine: What makes one value of the cells' values: ``mean``, or another entry of ``xffl list algorithms
        --kind combine`` with its options (``krum:faulty=1``, or a mapping), a dotted path, or a
        :class:`~xffl.aggregation.algorithms.combiners.Combiner`. One that compares whole models (Krum, geometric
        median) keeps all cells' shards on each sender, ``C`` copies.
    :param server: The server (outer) optimizer, which sees the way from the mean back to the last agreed model as a
        gradient: a name (``fedadam:lr=0.03``, ``torch.optim.AdamW:lr=0.1``), a mapping, or a
        :class:`~xffl.aggregation.algorithms.server.ServerOptimizer`. With it, each rank keeps the last agreed values of
        what it holds in fp32, and the optimizer's state. The model must be the same in all cells when the Aggregator is
        made.
    :param privacy: Clip each cell's update and add noise to it before it leaves (DP-FedAvg): a
        :class:`~xffl.aggregation.privacy.differential.Privacy`, or a mapping of its options with ``name: dp_fedavg``.
    :param secure: Let cells see only the sum of what they send, by pairwise masks: True, or a
        :class:`~xffl.aggregation.privacy.secure_sum.SecureSum`. Twice the bytes of fp32; at least three cells.
    :param norms: Measure the norm of each cell's update, for the reports and for rounds that depend on it.
    :param extra: Tensors that are averaged beside the model's, such as control variates.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if an argument or a tensor cannot be meant, or the ranks' models differ; on all ranks alike.
    """

    def __init__(
        self,
        model: nn.Module,
        state: DistributedState,
        *,
        policies: Mapping[Pattern, str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        atomic: bool = True,
        nonfinite: str = "reject",
        form: str = "auto",
        rails: bool = False,
        codec: str | Codec | Mapping[str, str | Codec] = "none",
        fragments: int = 1,
        overlap: bool = False,
        combine: str | Mapping[str, Any] | Combiner = "mean",
        server: str | Mapping[str, Any] | ServerOptimizer | None = None,
        privacy: Privacy | Mapping[str, Any] | None = None,
        secure: bool | SecureSum = False,
        norms: bool = False,
        extra: nn.Module | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed is not initialized; open xffl.session(), or call init_process_group")
        self._model = model
        self.fragments = fragments
        self.overlaps = overlap
        self._rounds, self._is_closed = 0, False
        self._pending: PendingRound | None = None
        self._inconsistent_count = count_inconsistent(model)

        def read() -> tuple[Options, Manifest]:
            options = Options.of(
                combine=combine,
                server=server,
                privacy=privacy,
                secure=secure,
                bucket_bytes=bucket_bytes,
                atomic=atomic,
                nonfinite=nonfinite,
                form=form,
                rails=rails,
                fragments=fragments,
                overlap=overlap,
                norms=norms,
            )
            if extra is not None and fragments > 1:
                raise ConfigError("extra tensors go with every round, so they need fragments=1")
            refresh_view(model)
            return options, Manifest(round_view(model), policies, codec, extra)

        self._made = assemble(model, state, read, self.check)
        self._exchange, self._coordinator = self._made.exchange, self._made.coordinator

    @property
    def rounds(self) -> int:
        """Number of rounds that have taken place."""
        return self._rounds

    @property
    def is_torn(self) -> bool:
        """Whether a failed round may have left different weights on different ranks."""
        return find_inconsistent(self._model) is not None

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is whole, and the others are still there."""
        return not (self.is_torn or self._coordinator.is_over or self._coordinator.is_out_of_step)

    @property
    def under_way(self) -> PendingRound | None:
        """The round that :meth:`aggregate_async` has started and nobody has merged yet."""
        return self._pending

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves: all ranks agree on it with the round's number."""
        return self._rounds % self.fragments

    @property
    def accountant(self) -> Accountant | None:
        """What privacy the rounds have cost so far; ``None`` without ``privacy``."""
        return self._exchange.accountant

    @property
    def model(self) -> nn.Module:
        """The model that is averaged."""
        return self._model

    def aggregate(self, weight: float | None = None, *, steps: float = 1.0) -> RoundReport:
        """Run one round: afterwards every rank holds the weighted mean over the cells.

        Collective over the world. Moves each shard to the other cells (see ``form``) and once to each replica at home,
        after a vote of 128 bytes a rank and before another.

        :param weight: This rank's own count since the last round (samples, tokens); a cell's weight is the sum over its
            ranks. ``None`` on all ranks: every cell counts 1.
        :param steps: Effective number of this cell's local steps since the last round, for combiners that ask for it.
        :return: What the round did.
        :raises ConfigError: if a weight is negative or not finite, or all are zero; on all ranks, the model unchanged.
        :raises RoundError: if the round did not take place; the message says whether the old weights stand.
        """
        report = self.participate(RoundInput(weight, steps=steps))
        assert report is not None, "a rank that has not finished always gets a round"
        return report

    def participate(self, given: RoundInput, *, least_divergence: float | None = None) -> RoundReport | None:
        """Run one round like :meth:`aggregate`, possibly as a rank that has nothing more to give.

        Collective over the world, together with the other ranks' :meth:`aggregate`. Below ``least_divergence``, the
        root mean square of the cells' update norms, nothing moves and the round does not count. Returns ``None`` where
        all ranks have finished and none had anything to give.
        """
        start = time.perf_counter()
        self._check_free()
        if least_divergence is not None and not self._made.options.has_norms:
            raise StateError("the aggregator was made without norms=True, which measures how far the cells have gone")
        self._coordinator.reconnect()
        opening = prepare_round(self._made, self._model, self._rounds + 1, self.next_fragment, given)
        with self._mark_inconsistent(), self._coordinator.owing():
            run = partial(self._coordinator.run, opening, self.next_fragment, least_divergence)
            outcome = apart(run, self._made.stream)
            return None if outcome is None else self._conclude(outcome, start)

    def aggregate_async(
        self,
        weight: float | Callable[[], float] | None = None,
        *,
        alpha: float | None = None,
        steps: float = 1.0,
        seconds: float = 0.0,
    ) -> PendingRound:
        """Start a round like :meth:`aggregate` and return at once; :meth:`PendingRound.merge` writes its result.

        Collective over the world. Takes a copy of this rank's shard, which is what the round averages; local steps may
        go on. Needs ``overlap=True`` and ``atomic=True``; one round at a time.

        :param weight: As in :meth:`aggregate`.
        :param alpha: The part of a local value that stays when the mean is merged, 0 to 1: ``alpha * local +
            (1 - alpha) * mean`` (Streaming DiLoCo, arXiv 2501.18512). ``None``: the steps made meanwhile stay as they
            are, ``mean + (local - copy)`` (delayed averaging), which takes one more copy of the shard. Buffers are
            replaced. The same on all ranks.
        :param steps: As in :meth:`aggregate`.
        :param seconds: Seconds of a local step here; 0 where nobody has measured.
        :return: The round under way. An argument that cannot be meant raises when it is merged, on all ranks.
        :raises StateError: if the aggregator was made without ``overlap``, or a round of it is under way.
        """
        if not self.overlaps:
            raise StateError("the aggregator was made without overlap=True, which makes the groups that this needs")
        self._check_free()
        self._coordinator.reconnect()
        start = time.perf_counter()
        fragment = self.next_fragment
        given = RoundInput(weight, steps=steps, seconds=seconds, prepare=lambda: check_merge(alpha))
        merging = NO_ALPHA if alpha is None else alpha
        inconsistent_count = count_inconsistent(self._model)
        opening = prepare_round(self._made, self._model, self._rounds + 1, fragment, given, merging)
        background = Background(lambda: self._coordinator.run(opening, fragment), self._made.stream)

        def conclude(pending: PendingRound, keeps_steps: bool) -> RoundReport:
            if self._pending is not pending:
                raise StateError("this round has ended already: merge() has written or refused it")
            asked = time.perf_counter()
            with self._mark_inconsistent(), record_function("xffl.wait"):
                try:
                    outcome = background.result()
                except BaseException as error:
                    if background.has_raised(error):  # else this was interrupted, and the round is still to be merged
                        self._pending = None
                    raise
            self.check()
            if pending.is_overtaken or count_inconsistent(self._model) != inconsistent_count:
                self._pending, self._coordinator.is_owed = None, False
                pending.refuse()
            assert outcome is not None, "a rank that has not finished always gets a round"
            self._exchange.profile.add("wait", time.perf_counter() - asked)
            return self._conclude(outcome, start, is_merged=keeps_steps, alpha=alpha)

        self._pending = PendingRound(background, conclude, self._made.layout.moving(fragment))
        return self._pending

    def discard(self) -> None:
        """Drop the round under way, if any: the model stays as it is, and the round does not count.

        Collective over the world, instead of merging it; waits for the round. Loading a state does so by itself.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._coordinator.is_owed = None, False

    def close(self) -> None:
        """Give the process groups back that were made for this aggregator; it cannot be used afterwards.

        Collective over the world, with no round under way. Between CPUs there is nothing to give back without
        ``overlap``, and without parts of the model that several but not all ranks of a replica hold.
        """
        self._check_free()
        if not self._made.round_groups.own:
            return
        self._is_closed = True
        barrier()  # nobody still listens to a group that another one destroys
        for group in self._made.round_groups.own:
            destroy_group(group)
        barrier()  # a slow rank would take the keys of a group of the same ranks that others make next

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has given process groups back."""
        return self._is_closed

    def _check_free(self) -> None:
        self.check()
        self._forget_torn()
        if self._is_closed:
            raise StateError("this aggregator is closed; make another one")
        if self._pending is not None:
            raise StateError("a round of this aggregator is under way; merge or discard it first")
        if self._coordinator.is_cut_off:
            raise StateError(f"a vote of this aggregator was cut off, so the ranks are out of step; {AFRESH}")

    def check(self) -> None:
        """Raise while the model is torn; local.

        :raises RoundError: if a failed round may have left different weights on different ranks, until a state dict has
            been loaded into the model.
        """
        if (tear := find_inconsistent(self._model)) is not None:
            tear.check()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the number of rounds, what lossy codecs remember, and the server's state.

        Local; each rank saves its own, but without codecs, server, norms and privacy it is the same on all ranks.

        :return: Numbers, texts and copies of tensors.
        :raises StateError: while a round is under way.
        """
        if self._pending is not None:
            raise StateError("a round of this aggregator is under way; merge it before saving")
        self._forget_torn()
        return {"rounds": self._rounds, "fragments": self.fragments, **self._made.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model.

        A round under way is dropped (:meth:`discard`): it would be merged into weights that it knows nothing of.

        :param state: The saved state, of this rank.
        :raises CheckpointError: if it is that of another set-up.
        """
        self._made.check_saved(state)
        self.discard()
        self._made.load_state_dict(state)
        self._rounds = int(state["rounds"])
        self._inconsistent_count = count_inconsistent(self._model)

    @contextmanager
    def _mark_inconsistent(self) -> Iterator[None]:
        """Mark the model where the ranks may hold different weights."""
        try:
            with mark_inconsistent(self._model):
                yield
        finally:
            self._forget_torn()

    def _forget_torn(self) -> None:
        """Forget what codecs and servers start from where the model was torn since, by whichever aggregator."""
        if (inconsistent_count := count_inconsistent(self._model)) != self._inconsistent_count:
            self._inconsistent_count = inconsistent_count
            self._exchange.memory.forget()
            if self._exchange.global_model is not None:
                self._exchange.global_model.forget()

    def _conclude(
        self, outcome: Outcome, start: float, *, is_merged: bool = False, alpha: float | None = None
    ) -> RoundReport:
        """Write what was agreed into the model."""
        fragment, number = self.next_fragment, self._rounds + 1
        if not outcome.is_skipped:
            with self._mark_inconsistent():
                try:
                    self._pending = None  # an interrupt from here on leaves an inconsistent model
                    # A cell with values that are not finite has nothing that could stay.
                    is_merged = is_merged and self._made.cell not in outcome.unfit
                    reshard(self._model)
                    if not outcome.is_empty:
                        refresh_view(self._model, is_new=False)
                        self._exchange.commit(fragment, is_merged=is_merged, alpha=alpha)
                        write_view(self._model)
                        overtake(lambda: self._made.layout.moving(fragment))
                except BaseException as error:
                    self._coordinator.is_owed = False
                    raise TornError(
                        f"round {number} was agreed, but this rank could not write it: {type(error).__name__}: {error}"
                    ) from error
            self._rounds += 1
            self._coordinator.is_owed = False
        return report_of(outcome, self._exchange, number, fragment, time.perf_counter() - start)


@dataclass(frozen=True)
class Assembly:
    """Everything that an aggregator works with on this rank."""

    device: torch.device  # the groups' backend communicates from there
    options: Options
    manifest: Manifest
    round_groups: RoundGroups
    exchange: Exchange
    coordinator: RoundCoordinator
    plan: str  # what bucket groups and buckets follow from
    cell: int
    arithmetic: float  # xffl.aggregation.mean.arithmetic_of
    has_codecs: bool
    layout: Layout
    transfers: tuple[GroupTransfer, ...]
    feedback: Mapping[int, ErrorFeedback]  # by the number of the transfer
    stream: torch.cuda.Stream | None  # what a round under way works on

    def state_dict(self) -> dict[str, Any]:
        """Return what rounds remember: of lossy codecs, of privacy, and of the last agreed model; local."""
        state: dict[str, Any] = {}
        if self.has_codecs:
            state["codecs"] = self.exchange.memory.state_dict(self.plan)
        if self.exchange.accountant is not None:
            state["privacy"] = self.exchange.accountant.state_dict()
        if self.exchange.global_model is not None:
            state["agreed"] = self.exchange.global_model.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned and :meth:`check_saved` accepted; local."""
        if self.has_codecs:
            self.exchange.memory.load_state_dict(state["codecs"], self.plan)
        if self.exchange.accountant is not None:
            self.exchange.accountant.load_state_dict(state["privacy"])
        if self.exchange.global_model is not None:
            self.exchange.global_model.load_state_dict(state["agreed"])

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """Raise where an aggregator's state has parts that this one would lose without a word, or lacks some; local."""
        if not isinstance(state, Mapping) or "rounds" not in state:
            raise CheckpointError(f"{type(state).__name__} is no aggregator's state; give what state_dict returned")
        fragments = state.get("fragments", self.options.fragments)
        if fragments != self.options.fragments:
            raise CheckpointError(
                f"the state is that of {fragments} fragments, and this aggregator has {self.options.fragments}; resume "
                "with the same"
            )
        for part, what, is_here in (
            ("codecs", "what lossy codecs remember", self.has_codecs),
            ("privacy", "what privacy has cost", self.exchange.accountant is not None),
            ("agreed", "the last agreed model of server, norms or privacy", self.exchange.global_model is not None),
            ("above", "levels above the lowest", False),
        ):
            if part in state and not is_here:
                raise CheckpointError(
                    f"the state holds {what}, which this aggregator was made without; resume with the same options"
                )
            if is_here and part not in state:
                raise CheckpointError(
                    f"the state has not {what}; it was saved without, so resume with the same options"
                )

    @torch.no_grad()
    def restart(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self.layout.look_up()
        for transfer in self.transfers:
            if (feedback := self.feedback.get(transfer.number)) is not None:
                for bucket in transfer.buckets:
                    self.layout.pack(bucket, feedback.reference[bucket.start : bucket.stop])
        if self.exchange.global_model is not None:
            self.exchange.global_model.take()


def check_given(model: object, state: object) -> None:
    """Raise where the model is no module, or the state neither a state nor a part of the world."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(model).__name__} is no model; give a torch.nn.Module")
    if not isinstance(state, DistributedState | RoundScope):
        raise ConfigError(
            f"{type(state).__name__} is no state; give the DistributedState of xffl.session() or a set-up"
        )


def assemble(
    model: nn.Module,
    state: DistributedState | RoundScope,
    read: Callable[[], tuple[Options, Manifest]],
    check: Callable[[], None],
) -> Assembly:
    """Compare the ranks' models and options, and prepare rounds.

    Collective over the world: a few bytes a rank, with a mesh inside the cells some hundred for each of its tensors;
    and groups of its own where rounds overlap training, or where several shards but not all hold the same elements.
    What ``check`` and ``read`` raise is raised on all ranks.
    """
    rank_tensors = None
    axes: tuple[int, ...] = ()
    with run_on_all_ranks(
        "models",
        convert=lambda wrong: ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}"),
        describe=describe_difference,
    ) as share:
        check_given(model, state)
        scope = state if isinstance(state, RoundScope) else RoundScope(state, state.topology)
        topology, rank = scope.topology, scope.rank
        device = transfer_device(scope.state)
        check()
        options, manifest = read()
        options.combiner.check(topology.cells)
        at = topology.coordinates(rank)
        text = f"(options)\t{options}\n"
        if topology.cell_shape is None:
            manifest.check_patterns()
            axes = manifest.axes(topology, at)
            text += str(manifest)
        else:
            rank_tensors = describe_rank_tensors(manifest.entries, manifest.is_used, topology, at, scope.first)
        _check_protected(options, manifest)
        _check_overlap(options, device)
        share(text)
    world, replica_tensors = scope.world, None
    if rank_tensors is None:
        axes_of_cells = gather_axes(axes, topology, world)
    else:
        replica_tensors = _agreed_spread(rank_tensors, manifest, scope)
        axes_of_cells = (replica_tensors.axes,) * topology.cells
    least, fragments = options.bucket_bytes, options.fragments
    items = manifest.items(
        topology, axes_of_cells, least_bytes=least, fragments=fragments, replica_tensors=replica_tensors
    )
    plan = (
        f"{digest(items, topology)}, {options.bucket_bytes} bytes a bucket, form={options.form_of_lanes}, "
        f"rails={options.rails}"
    )
    check_consistent("exchange plans", plan, group=world)
    secure = options.secure
    masker = None if secure is None else make_masker(secure, rank, topology, context=plan, group=world)
    return _assemble(
        manifest, items, axes_of_cells, options, scope=scope, masker=masker, plan=plan, replica_tensors=replica_tensors
    )


def _agreed_spread(rank_tensors: RankTensors, manifest: Manifest, scope: RoundScope) -> ReplicaTensors:
    """Put together what the shards hold, and compare it over all replicas and cells; collective over the world."""
    mesh = scope.state.hsdp_mesh
    assert mesh is not None, "a state with a cell shape has replicas"
    with run_on_all_ranks("models", describe=describe_difference) as share:
        replica_tensors = gather_replica_tensors(rank_tensors, mesh.get_group(1))
        manifest.check_patterns(replica_tensors)
        share(replica_tensors.text)
    return replica_tensors


def _check_protected(options: Options, manifest: Manifest) -> None:
    """Raise where something would leave a cell without the protection that was asked for."""
    if options.privacy is not None:
        bare = [entry.name for entry in manifest.moving if not entry.is_stepped]
        if bare:
            raise ConfigError(
                f"privacy is for trainable parameters, but {bare[:5]} would cross as they are; give them policy 'local'"
            )
    if options.secure is not None:
        bare = [entry.name for entry in manifest.moving if entry.policy == "first"]
        if bare:
            raise ConfigError(
                f"secure=True hides means, but {bare[:5]} are taken from cell 0; give them policy 'local'"
            )
        coded = sorted(name for name, codec in manifest.codecs.items() if codec is not None)
        if coded:
            raise ConfigError(f"secure=True adds up fixed-point numbers and goes with no codec such as {coded[0]!r}")


def _check_overlap(options: Options, device: torch.device) -> None:
    if options.overlap and device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a GPU begin one thing at a time, so that rounds behind local steps "
            "(overlap=True) and the steps would wait for each other; leave it out, or set 8 or more"
        )


def _assemble(
    manifest: Manifest,
    items: Sequence[Item],
    axes: Sequence[Sequence[int]],
    options: Options,
    *,
    scope: RoundScope,
    masker: Masker | None,
    plan: str,
    replica_tensors: ReplicaTensors | None,
) -> Assembly:
    """Plan what a rank transfers and prepare the exchange; collective over the world."""
    topology, rank, device = scope.topology, scope.rank, transfer_device(scope.state)
    holders = () if replica_tensors is None else replica_tensors.holders
    round_groups = select_groups(scope, multi_rail=options.rails, is_own=options.overlap, holders=holders)
    transfers = _plan(items, options, scope, round_groups, manifest.codecs, device)
    progress = Progress(device, scope.state._timeouts.across_s)
    transport = CrossCellTransport(
        transfers, topology, rank, round_groups, device, combiner=options.combiner, progress=progress, masker=masker
    )
    at = topology.coordinates(rank)
    reads_late = options.overlap or not options.atomic
    layout = Layout(_entries(manifest, replica_tensors), items, axes, at, needs_memory_of_its_own=reads_late)
    exchange = Exchange(
        layout,
        transfers,
        transport,
        topology=topology,
        rank=rank,
        round_groups=round_groups,
        device=device,
        options=options,
        global_model=GlobalModel(transfers, layout, options.server, device) if options.needs_agreed else None,
        progress=progress,
        masker=masker,
    )
    if exchange.global_model is not None:
        exchange.global_model.take()
        moving = manifest.moving if replica_tensors is None else replica_tensors.moving
        agree_start(moving, exchange, topology, rank, device, round_groups.world)
    return Assembly(
        device,
        options,
        manifest,
        round_groups,
        exchange,
        RoundCoordinator(exchange, scope, device=device, round_groups=round_groups, options=options),
        plan,
        cell=at.cell,
        arithmetic=arithmetic_of(device),
        has_codecs=any(manifest.codecs.values()) and topology.cells > 1,
        layout=layout,
        transfers=transfers,
        feedback=transport.feedback,
        stream=_stream(scope.state, device),
    )


def _plan(
    items: Sequence[Item],
    options: Options,
    scope: RoundScope,
    round_groups: RoundGroups,
    codecs: Mapping[str, Codec | None],
    device: torch.device,
) -> tuple[GroupTransfer, ...]:
    return plan_transfers(
        plan_groups(items, scope.topology, scope.rank),
        topology=scope.topology,
        rank=scope.rank,
        round_groups=round_groups,
        bucket_bytes=options.bucket_bytes,
        form=options.form_of_lanes,
        codecs=codecs,
        device=device,
        allow_deferred_mean=options.combines_late,
    )


def _stream(state: DistributedState, device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return state.streams[0] if state.streams else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _entries(manifest: Manifest, replica_tensors: ReplicaTensors | None) -> list[ModelTensor | None]:
    """Return the moving tensors of all shards in the plan's order; ``None`` for one that this rank has not."""
    here = {entry.name: entry for entry in manifest.moving}
    tensors: Sequence[TensorInfo] = manifest.moving if replica_tensors is None else replica_tensors.moving
    return [here.get(tensor.name) for tensor in tensors]
