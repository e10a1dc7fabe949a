"""The federated round, from the vote to the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from xffl.aggregation.algorithms.combiners import Combiner
from xffl.aggregation.algorithms.server_optimizer import ServerOptimizer
from xffl.aggregation.algorithms.server_rules import ServerRule
from xffl.aggregation.arithmetic import flushes_subnormals
from xffl.aggregation.compression import Codec
from xffl.aggregation.engine.alike.equal_cells import find_unequal
from xffl.aggregation.engine.buffers import ModelCopy, TensorWatch
from xffl.aggregation.engine.decision.consensus import (
    AgreedRound,
    PreparedRound,
    RoundCoordinator,
    RoundInput,
    RoundNumbers,
)
from xffl.aggregation.engine.decision.inconsistent import (
    INCONSISTENT_COUNT,
    INCONSISTENT_MARK,
    find_inconsistent,
    refuse_inconsistent,
)
from xffl.aggregation.engine.decision.inconsistent_model import mark_inconsistent
from xffl.aggregation.engine.exchange import Exchange, RoundRun
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.global_state import load_memory, save_memory, share_global_model
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.tensors import Manifest, Pattern, TensorsBeside
from xffl.aggregation.engine.setup import (
    ComparedModels,
    agree_on_number,
    compare_models,
    compare_processors,
    make_exchange,
)
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.codecs import Codecs
from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.engine.stages.order import in_order
from xffl.aggregation.engine.stages.privacy import Protection
from xffl.aggregation.engine.streams import GpuProfile, StreamWork, stream_of
from xffl.aggregation.engine.voting.votes import MergeMode, RoundStatus
from xffl.aggregation.engine.weights.weight_keepers import read_weights
from xffl.aggregation.options import DEFAULT_BUCKET_BYTES, Options, check_merge, refuse_removed
from xffl.aggregation.pending import Background, PendingRound
from xffl.aggregation.privacy import Accountant, Privacy, SecureSum
from xffl.aggregation.report import RoundProfile, RoundReport
from xffl.distributed.agreement.consistency import barrier
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group
from xffl.distributed.values.sharding import without_wrappers
from xffl.errors import ConfigError, RoundError, StateError, TornError, XfflError

__all__ = ["Aggregator", "PendingRound"]


class Aggregator:
    r"""Average a model over the cells of a federation, shard by shard.

    Making one is collective over the world: the ranks compare the model's manifest and plan the exchange once. A round
    moves each shard once from its sender to each peer in the other cells, and from there to the replicas of its cell;
    the number of replicas does not change what crosses. Memory: on a sender 52 MiB for what arrives, or six buckets of
    each other cell if that is more, a few for what has to be packed, and with ``atomic`` a copy of this rank's shard.

    What happens to a tensor follows its policy. By default trainable parameters and floating-point buffers are averaged
    (buffers first over the ranks of a cell), integer and bool buffers are taken from cell 0, frozen parameters and
    non-persistent buffers stay local. The optimizer's state is left alone. The attributes ``model``, ``fragments`` and
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
        failed exchange tears the model, which cannot be used until a checkpoint is loaded.
    :param nonfinite: ``reject`` the round where a cell holds NaN or infinity, or ``drop_cell``: leave that cell out.
    :param form: ``all_gather``: each sender sends its shard to every other cell, ``C - 1`` copies. ``two_hop``: of each
        bucket, every cell combines one part and sends the result round, ``2 (C - 1) / C`` copies and a second latency;
        over gloo and without rails, two cells combine whole buckets in turn.
        ``auto``: two hops for three cells and more, except for what is tiny, and for two cells above 32 MiB.
    :param rails: Let the replicas of a shard take turns in sending its buckets, so that all their network cards work,
        instead of one sender. What crosses stays the same.
    :param codec: How averaged parameters are written on the slow link: ``none``, ``bf16``, ``fp16``, ``int8``,
        ``int4``, ``int2``, ``sparseloco``, ``topk:0.01`` (see :mod:`xffl.aggregation.compression` and
        :mod:`xffl.aggregation.two_bits`), or a mapping of name patterns to codecs, the first match wins. Codecs write
        what a shard differs by from the last agreed state; what they leave out is sent later (error feedback). The
        first round is exact, and makes that state. Memory on a sender: one more copy of its shard, two in fp32 of what
        was left out, and ``C + 2`` buckets in fp32.
    :param fragments: Parts of the model that are exchanged in turn, one in each round.
    :param overlap: Make process groups of its own, for :meth:`aggregate_async`.
    :param combine: What makes one value of the cells' values: ``mean``, or another entry of ``xffl list algorithms
        --kind combine`` with its options (``krum:faulty=1``, or a mapping), a dotted path, or a
        :class:`~xffl.aggregation.algorithms.combiners.Combiner`. One that compares whole models (Krum, geometric
        median) keeps all cells' shards on each sender, ``C`` copies.
    :param server: The server (outer) optimizer, which gets ``global - mean`` (the pseudo-gradient) as its gradient: a
        name (``fedadam:lr=0.03``, ``adamw:lr=0.1``), a mapping, a
        :class:`~xffl.aggregation.algorithms.server_optimizer.ServerOptimizer`, or a
        :class:`~xffl.aggregation.algorithms.server_rules.ServerRule` of your own. With it, each rank keeps the last
        agreed values of what it holds in fp32, and the rule's state. The model must be the same in all cells when the
        Aggregator is made.
    :param privacy: Clip each cell's update and add noise to it before it leaves (DP-FedAvg): a
        :class:`~xffl.aggregation.privacy.Privacy`, or a mapping of its options with ``name: dp_fedavg``.
    :param secure: Let cells see only the sum of what they send, by pairwise masks: True, or a
        :class:`~xffl.aggregation.privacy.SecureSum`. Twice the bytes of fp32; at least three cells.
    :param norms: Measure the norm of each cell's update, for reports and for rounds that depend on it.
    :param extra: Tensors that are averaged beside the model's, such as control variates.
    :param moments: Average what optimizers keep beside the parameters, or start it anew: an
        :class:`~xffl.aggregation.optimizer_moments.OptimizerMoments`.
    :param tensor_weights: Called on each rank before a round: what it has counted since the last call for some
        trainable parameters, or for the entries of their first dimension, by name pattern (the first match wins), such
        as the tokens that each expert has seen (:doc:`/experts`). Their means are weighed by these counts, summed over
        the cell's ranks. What no cell has counted anything for stays what it was after the last round. All ranks return
        the same patterns. It goes with the weighted mean, without privacy, secure sums and levels, in cells of one job;
        memory: a copy of this rank's shard in fp32.
    :param gradients_reduced_by_caller: Take a model of which nothing tells that its gradients are reduced over the
        ranks of a cell, since the training loop does so itself. Without it each parameter that trains is refused that
        neither FSDP2 nor DistributedDataParallel over the cell, nor a strategy, has (:doc:`/strategies`).
    :param \**removed: Options of earlier versions, which are refused by name.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if an argument or a tensor is invalid, or the ranks' models differ; on all ranks alike.
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
        server: str | Mapping[str, Any] | ServerOptimizer | ServerRule | None = None,
        privacy: Privacy | Mapping[str, Any] | None = None,
        secure: bool | SecureSum = False,
        norms: bool = False,
        extra: nn.Module | None = None,
        moments: TensorsBeside | None = None,
        tensor_weights: Callable[[], Mapping[str, Any]] | None = None,
        gradients_reduced_by_caller: bool = False,
        **removed: object,
    ) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed is not initialized; open xffl.session(), or call init_process_group")
        self.model = model
        self.fragments = fragments
        self.overlaps = overlap
        self.rounds = 0
        """Number of rounds that have taken place."""
        self.under_way: PendingRound | None = None
        """The round that :meth:`aggregate_async` has started and nobody has merged yet."""
        self.is_closed = False
        """Whether :meth:`close` has given process groups back."""
        self._bare_model = without_wrappers(model)  # which has the mark of an inconsistent model
        self._inconsistent_count: int = getattr(self._bare_model, INCONSISTENT_COUNT, 0)

        def read() -> tuple[Options, Manifest]:
            self.check()
            refuse_removed(removed)
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
                tensor_weights=tensor_weights,
            )
            if extra is not None and fragments > 1:
                raise ConfigError("extra tensors go with every round, so they need fragments=1")
            weights, self._keepers = read_weights(model)
            return options, Manifest(weights, policies, codec, extra=extra, moments=moments)

        ranks: DistributedState | RoundScope = state
        if isinstance(state, DistributedState) and state.isolated is not None:
            from xffl.aggregation.engine.several_worlds.isolated_scope import open_scope

            ranks = open_scope(state, state.isolated, overlaps=bool(overlap))
        compared = compare_models(model, ranks, read, is_reduced_by_caller=gradients_reduced_by_caller)
        scope = compared.scope
        self._device = scope.device
        self._options = compared.options
        self._manifest = compared.manifest
        self._moving = compared.moving
        self._scope = scope
        self._exchange, self._coordinator = self._set_up(compared)
        self._watch = TensorWatch(self._manifest.roots, self._manifest.check)
        self._is_reduced_by_caller = gradients_reduced_by_caller
        self._activity = scope.state.activity
        # The profiles of all rounds have one list of marks, which they use again.
        self._make_profile = partial(GpuProfile, []) if self._device.type == "cuda" else RoundProfile
        self._stream = None if scope.gpu is None else stream_of(scope, scope.gpu)  # that rounds work on
        self._stream_work: AbstractContextManager[None] = (
            nullcontext() if self._stream is None else StreamWork(self._stream)
        )

    def _set_up(self, compared: ComparedModels) -> tuple[Exchange, RoundCoordinator]:
        """Plan the rounds of ranks whose models were compared, with their groups and votes; collective over them."""
        scope = compared.scope
        options = compared.options
        processor = compare_processors(compared)
        # The global model, what servers keep and buffers outlive this call: a later round writes them outside of an
        # inference mode in which this is called.
        with torch.inference_mode(False):
            exchange = make_exchange(compared, lambda: self.rounds)
        number = agree_on_number(compared, exchange.round_groups.world)
        coordinate = scope.coordinate or RoundCoordinator
        coordinator = coordinate(exchange, scope, options, number)
        coordinator.connect()
        make_first_round = scope.make_first_round or FirstRound
        first_round = make_first_round(
            manifest=compared.manifest,
            scope=scope,
            round_groups=exchange.round_groups,
            axes=compared.axes[scope.topology.cell_of(scope.rank)],
            replica_tensors=compared.replica_tensors,
            processor=processor,
            is_private=options.privacy is not None or options.secure is not None,
        )
        exchange.stages = in_order([first_round, *exchange.stages])
        return exchange, coordinator

    @property
    def is_torn(self) -> bool:
        """Whether a failed round may have left different weights on different ranks."""
        return find_inconsistent(self._bare_model) is not None

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: it is open, the model is whole, and the others are there."""
        coordinator = self._coordinator
        return not (self.is_closed or self.is_torn or coordinator.all_finished or coordinator.is_out_of_step)

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves: all ranks agree on it with the round's number."""
        return self.rounds % self.fragments

    @property
    def accountant(self) -> Accountant | None:
        """What privacy the rounds have cost so far; ``None`` without ``privacy``."""
        protection = self._exchange.find(Protection)
        return None if protection is None else protection.accountant

    def aggregate(self, weight: float | None = None, *, steps: float = 1.0) -> RoundReport:
        """Run one round: afterwards every rank holds the weighted mean over the cells.

        Collective over the world. Moves each shard to the other cells (see ``form``) and once to each replica of the
        cell, after a vote of 192 bytes a rank and before another.

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
        self.check_free()
        if least_divergence is not None and not self._options.has_norms:
            raise StateError("the aggregator was made without norms=True, which measures how far the cells have gone")
        self._coordinator.reconnect()
        prepared = self._prepare(given)
        try:
            with self._stream_work:
                outcome = self._coordinator.run(prepared, least_divergence)
            return None if outcome is None else self._conclude(outcome, start)
        except BaseException as stop:
            self._mark_if_torn(stop)
            raise

    def resolve(self, outcome: AgreedRound, *, is_merged: bool = False, alpha: float | None = None) -> RoundReport:
        """Write the round that was in doubt, now that it is known to be taken, before :meth:`regroup`; local.

        ``is_merged`` says that steps made since it started stay, as for :meth:`PendingRound.merge`.
        """
        try:
            return self._conclude(outcome, time.perf_counter(), is_merged=is_merged, alpha=alpha)
        except BaseException as stop:
            self._mark_if_torn(stop)
            raise

    def _prepare(
        self, given: RoundInput, merge: MergeMode = MergeMode.REPLACE, alpha: float | None = None
    ) -> PreparedRound:
        """Read the model and fill in this rank's status; local. What goes wrong is told to all ranks by the vote."""
        fragment = self.next_fragment
        copy = {MergeMode.BLEND: ModelCopy.STAGED, MergeMode.KEEP_STEPS: ModelCopy.KEPT}.get(merge, ModelCopy.NONE)
        profile = self._make_profile()
        numbers = RoundNumbers()
        run: RoundRun | None = None
        error: XfflError | None = None
        try:
            numbers = self._read(given, fragment, alpha)
            run = RoundRun(self._exchange, fragment, profile, copy)
        except XfflError as wrong:
            error = wrong
        except Exception as wrong:  # noqa: BLE001 - told to all ranks
            error = RoundError(f"the round could not be opened: {type(wrong).__name__}: {wrong}")
        told: dict[str, Any] = {}
        for stage in self._exchange.stages:
            told |= stage.status(fragment)
        status = RoundStatus(
            round=self.rounds + 1,
            weight=numbers.weight,
            is_flushing=self._device.type == "cpu" and flushes_subnormals(),
            is_uniform=given.weight is None,
            is_absent=given.is_absent,
            is_finished=given.is_finished,
            is_nonfinite=run is not None and bool(run.nonfinite),
            is_failed=error is not None,
            merge=merge,
            alpha=alpha if error is None and alpha is not None else 0.0,
            steps=numbers.steps,
            seconds=numbers.seconds,
            **told,
        )
        return PreparedRound(
            status=status,
            profile=profile,
            run=run,
            error=error,
            source=given.source,
        )

    def _read(self, given: RoundInput, fragment: int, alpha: float | None) -> RoundNumbers:
        """Bring the model and all that has a part in the round up to date, and read what this rank says of itself."""
        for keeper in self._keepers:
            keeper.before_read()
        self._watch.check()
        for stage in self._exchange.stages:
            stage.open(fragment, is_weighed=given.weight is not None)
        if given.prepare is not None:
            given.prepare()
        if alpha is not None:
            check_merge(alpha)
        numbers = given.numbers()
        for stage in self._exchange.stages:
            stage.read(has_steps=not given.is_absent and numbers.steps > 0)
        return numbers

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
        :return: The round under way. An invalid argument raises when it is merged, on all ranks.
        :raises StateError: if the aggregator was made without ``overlap``, or a round of it is under way.
        """
        self.check_free()
        if not self.overlaps:
            raise StateError("the aggregator was made without overlap=True, which makes the groups that this needs")
        self._coordinator.reconnect()
        start = time.perf_counter()
        fragment = self.next_fragment
        inconsistent_count = self._inconsistent_count
        merge = MergeMode.KEEP_STEPS if alpha is None else MergeMode.BLEND
        prepared = self._prepare(RoundInput(weight, steps=steps, seconds=seconds), merge, alpha)
        background = Background(lambda: self._coordinator.run(prepared), self._stream)

        def conclude(pending: PendingRound, keeps_steps: bool) -> RoundReport:
            if self.under_way is not pending:
                raise StateError("this round has ended already: merge() has written or refused it")
            asked = time.perf_counter()
            try:
                with record_function("xffl.wait"):
                    outcome = background.result()
            except BaseException as error:
                if background.has_raised(error):  # else this was interrupted, and the round is still to be merged
                    self.under_way = None
                if isinstance(error, TornError):
                    self._mark_inconsistent(error)
                raise
            self.check()
            was_inconsistent = getattr(self._bare_model, INCONSISTENT_COUNT, 0) != inconsistent_count
            if pending.is_overtaken or was_inconsistent:
                self.under_way = None
                self._coordinator.release()
                pending.refuse()
            assert outcome is not None, "a rank that has not finished always gets a round"
            prepared.profile.add("wait", time.perf_counter() - asked)
            try:
                return self._conclude(outcome, start, is_merged=keeps_steps, alpha=alpha)
            except TornError as torn:
                self._mark_inconsistent(torn)

        self.under_way = PendingRound(background, conclude, self._exchange.layout.moving(fragment))
        self._activity.add_round_under_way(self.under_way)
        return self.under_way

    def discard(self) -> None:
        """Drop the round under way, if any: the model stays as it is, and the round does not count.

        Collective over the world, instead of merging it; waits for the round. Loading a state does so by itself.
        """
        if self.under_way is not None:
            self.under_way.wait()
            self.under_way = None
            self._coordinator.release()

    def close(self) -> None:
        """Give the process groups back that were made for this aggregator; it cannot be used afterwards.

        Collective over the world, with no round under way. Nothing moves where there is nothing to give back: between
        CPUs without ``overlap``, and without parts of the model that several but not all ranks of a replica hold, where
        cells share one world. A second call does nothing.
        """
        if self.is_closed:
            return
        self.check_free()
        self.retire()
        self.give_back_groups()
        if self._scope.leave is not None:
            self._scope.leave()

    def retire(self) -> None:
        """Make no further round; local."""
        self.is_closed = True

    def give_back_groups(self) -> None:
        """Give the process groups back, whatever state the rounds are in; collective over this rank's world."""
        if not self.own_groups:
            return
        barrier()  # nobody still listens to a group that another one destroys
        for group in self.own_groups:
            destroy_group(group)

    def check_free(self) -> None:
        """Raise unless a round may start here; local."""
        self.check()
        self._forget_if_inconsistent()
        if self.is_closed:
            raise StateError("this aggregator is closed; make another one")
        if self.under_way is not None:
            raise StateError("a round of this aggregator is under way; merge or discard it first")
        self._coordinator.check()

    def check(self) -> None:
        """Raise while the model is inconsistent; local.

        :raises RoundError: if a failed round may have left different weights on different ranks, until a state dict has
            been loaded into the model.
        """
        if hasattr(self._bare_model, INCONSISTENT_MARK):
            refuse_inconsistent(self._bare_model)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the number of rounds, what lossy codecs remember, and the server's state.

        Local; each rank saves its own, but without codecs, server, norms and privacy it is the same on all ranks.

        :return: Numbers, texts and copies of tensors.
        :raises StateError: while a round is under way.
        """
        if self.under_way is not None:
            raise StateError("a round of this aggregator is under way; merge it before saving")
        self._forget_if_inconsistent()
        return {"rounds": self.rounds, "fragments": self.fragments, **save_memory(self._exchange)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, after the model was loaded; collective over the world.

        A round under way is dropped (:meth:`discard`): it would be merged into weights that it knows nothing of.

        :param state: The saved state, of this rank.
        :raises CheckpointError: if it is that of another set-up; on all ranks where the state of a server is among it.
        """
        self.discard()
        self._coordinator.reconnect()
        load_memory(self._exchange, state, fragments=self.fragments)
        self.rounds = int(state["rounds"])
        self._inconsistent_count = getattr(self._bare_model, INCONSISTENT_COUNT, 0)
        first_round = self._exchange.find(FirstRound)
        if first_round is not None:
            first_round.note_start()

    @property
    def global_model(self) -> GlobalModel | None:
        """The last agreed model; ``None`` where no option needs it."""
        agreed = self._exchange.find(AgreedModel)
        return None if agreed is None else agreed.global_model

    def find_unequal(self) -> list[str]:
        """Return the names of the moving tensors that cells hold otherwise than cell 0; collective over all cells."""
        self._exchange.layout.look_up()
        return find_unequal(self._moving, self._exchange.own_values(with_buffers=True), self._scope)

    def share_global_model(self, state: Mapping[str, Any], source: int, targets: Collection[int]) -> None:
        """Bring the global model of a cell, of which all know the plain state, to others; collective over all cells."""
        share_global_model(self._exchange, state, source, targets)

    def _mark_if_torn(self, stop: BaseException) -> None:
        """Mark the model, and raise in the place of ``stop``, where ranks may hold different weights since."""
        torn = self._coordinator.torn_by(stop)
        if torn is not None:
            self._mark_inconsistent(torn)

    def _mark_inconsistent(self, torn: TornError) -> NoReturn:
        """Mark the model whose ranks may hold different weights, and raise in the error's place."""
        try:
            mark_inconsistent(self.model, torn)
        finally:
            self._forget_if_inconsistent()

    def _forget_if_inconsistent(self) -> None:
        """Forget what codecs and servers start from if the model became inconsistent since, by any aggregator."""
        inconsistent_count = getattr(self._bare_model, INCONSISTENT_COUNT, 0)
        if inconsistent_count != self._inconsistent_count:
            self._inconsistent_count = inconsistent_count
            for stage in self._exchange.stages:
                stage.forget()

    def _conclude(
        self, outcome: AgreedRound, start: float, *, is_merged: bool = False, alpha: float | None = None
    ) -> RoundReport:
        """Write what was agreed into the model; the caller marks it where this raises TornError."""
        if not outcome.is_skipped:
            try:
                self.under_way = None  # an interrupt from here on leaves an inconsistent model
                # A cell with values that are not finite has nothing that could stay.
                is_merged = is_merged and self._exchange.link.cell not in outcome.unfit
                if not outcome.is_empty:
                    self._write(outcome, is_merged=is_merged, alpha=alpha)
            except BaseException as error:
                self._coordinator.release()
                raise TornError(
                    f"round {self.rounds + 1} was agreed, but this rank could not write it: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self.rounds += 1
            self._coordinator.release()
        self._exchange.end_round()
        return outcome.report(time.perf_counter() - start)

    def _write(self, outcome: AgreedRound, *, is_merged: bool, alpha: float | None) -> None:
        """Write the new values into the model, and tell rounds under way that have read the old ones."""
        for keeper in self._keepers:
            keeper.before_write()
        outcome.run.commit(outcome.context, is_merged=is_merged, alpha=alpha)
        for keeper in self._keepers:
            keeper.after_write()
        for pending in self._activity.rounds_under_way:
            pending.note_written(self._exchange.layout.moving(outcome.run.fragment))

    def regroup(self, scope: RoundScope) -> None:
        """Make further rounds with the ranks of another scope; collective over them.

        Their models are compared, and what each exchanges is planned anew. What rounds remember, such as the global
        model and what codecs have left out, stays. After an error all is as before, and this can be called again.
        """

        def read() -> tuple[Options, Manifest]:
            self._watch.check()
            return self._options, self._manifest

        compared = compare_models(self.model, scope, read, is_reduced_by_caller=self._is_reduced_by_caller)
        exchange, coordinator = self._set_up(compared)
        with torch.inference_mode(False):
            exchange.take_over(self._exchange)
        self._scope = scope
        self._exchange = exchange
        self._coordinator = coordinator

    def take_over(self, last: Aggregator) -> None:
        """Go on from what rounds of another aggregator of the same ranks remember; local."""
        with torch.inference_mode(False):
            self._exchange.take_over(last._exchange)

    def residuals(self) -> dict[str, torch.Tensor] | None:
        """Return what lossy codecs have left out here, by names of tensors; ``None`` where no codec is used; local."""
        codecs = self._exchange.find(Codecs)
        return None if codecs is None else codecs.residuals()

    def load_residuals(self, residuals: Mapping[str, torch.Tensor], given: Collection[int]) -> None:
        """Let the next round add what :meth:`residuals` returned; local.

        :param residuals: What codecs have left out.
        :param given: Fragments of which a later round has it already.
        """
        codecs = self._exchange.find(Codecs)
        if codecs is not None:
            with torch.inference_mode(False):
                codecs.leftovers.load(residuals, given)

    def resume_at(self, rounds: int, *, brings_up: bool = False) -> None:
        """Count on behind so many rounds, the same on all ranks that make the next one; local.

        ``brings_up`` says that the next one brings cells up to date that are behind.
        """
        self.rounds = rounds
        for stage in self._exchange.stages:
            stage.note_cells_behind(brings_up)

    @property
    def all_finished(self) -> bool:
        """Whether all ranks had finished when they last opened a round."""
        return self._coordinator.all_finished

    @property
    def is_out_of_step(self) -> bool:
        """Whether a round or a vote was cut off, so that no round can follow."""
        return self._coordinator.is_out_of_step

    @property
    def own_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups that were made for this aggregator."""
        return self._exchange.round_groups.own

    def restart(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self._exchange.start_from_model()
