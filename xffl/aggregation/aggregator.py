"""The federated round, from the vote to the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from xffl.aggregation.codec import Codec
from xffl.aggregation.exchange import make_exchange
from xffl.aggregation.manifest import Manifest, describe_difference, gather_axes, reshard
from xffl.aggregation.mean import arithmetic_of
from xffl.aggregation.options import DEFAULT_BUCKET_BYTES, check_merge, check_options
from xffl.aggregation.pending import Background, PendingRound
from xffl.aggregation.plan import digest
from xffl.aggregation.protocol import Outcome, Protocol
from xffl.aggregation.report import RoundReport
from xffl.aggregation.routes import communication_device, routes_of
from xffl.aggregation.torn import TornError, find_tear, tearing
from xffl.aggregation.vote import AT_ONCE, NO_ALPHA, Ballot, checked_weight
from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError, XfflError

__all__ = ["Aggregator", "PendingRound"]


class Aggregator:
    """Average a model over the cells of a federation, shard by shard.

    Making one is collective over the world: the ranks compare the model's manifest and plan the exchange once. A round
    moves each shard once from its sender to each peer in the other cells, and from there to the replicas at home; the
    number of replicas does not change what crosses. Memory: on a sender six buckets for each other cell (with two hops
    six in all), a few for what has to be packed, and with ``atomic`` one copy of this rank's shard.

    What happens to a tensor follows its policy. By default trainable parameters and floating-point buffers are averaged
    (buffers first over the ranks of a cell), integer and bool buffers are taken from cell 0, frozen parameters and
    non-persistent buffers stay local. The optimizer's state is left alone. The attributes ``fragments`` and
    ``overlaps`` say what it was made with.

    :param model: The model that trains: plain, DDP, or FSDP2/HSDP over the state's meshes.
    :param state: The state that describes the federation; without one the world is a single cell.
    :param policies: ``average``, ``local`` or ``first`` for tensors by name pattern (:mod:`fnmatch`), the first match
        wins.
    :param bucket_bytes: Size of the pieces that cross at a time, in bytes of values, before a codec.
    :param atomic: Collect the new weights beside the model, so that a failed round leaves the old ones. Without it, a
        failed exchange tears the model: it cannot be used until a checkpoint is loaded.
    :param nonfinite: ``reject`` the round where a cell holds NaN or infinity, or ``drop_cell``: leave that cell out.
    :param form: ``all_gather``: each sender sends its shard to every other cell, ``C - 1`` copies. ``two_hop``: of each
        bucket, every cell combines one part and sends the result round, ``2 (C - 1) / C`` copies and a second latency.
        ``auto``: two hops for three cells and more, except for what is tiny.
    :param rails: Let the replicas of a shard take turns in carrying its buckets, so that all their network cards work,
        instead of one sender. What crosses stays the same.
    :param codec: How averaged parameters are written on the slow link: ``none``, ``bf16``, ``fp16``, ``int8``,
        ``int4``, ``topk:0.01`` (see :mod:`xffl.aggregation.codec`), or a mapping of name patterns to codecs, the first
        match wins. Codecs write what a shard differs by from the last agreed state; what they leave out is sent later
        (error feedback). The first round is exact, and makes that state. Memory on a sender: one more copy of its
        shard, two in fp32 of what was left out, and ``C + 2`` buckets in fp32.
    :param fragments: Parts of the model that are exchanged in turn, one in each round.
    :param overlap: Make process groups of its own, for :meth:`aggregate_async`.
    :raises StateError: if torch.distributed is not initialized.
    :raises ConfigError: if an argument or a tensor cannot be meant, or the ranks' models differ; on all ranks alike.
    """

    def __init__(
        self,
        model: nn.Module,
        state: DistributedState,
        *,
        policies: Mapping[str, str] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        atomic: bool = True,
        nonfinite: str = "reject",
        form: str = "auto",
        rails: bool = False,
        codec: str | Codec | Mapping[str, str | Codec] = "none",
        fragments: int = 1,
        overlap: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed is not initialized; open xffl.session(), or call init_process_group")
        self._model = model
        self._rank = dist.get_rank()
        self.fragments = fragments
        self._rounds = 0
        self._pending: PendingRound | None = None
        self._is_closed = False
        error: XfflError | None = None
        text = ""
        try:
            self._topology = state.topology
            at = self._topology.coordinates(self._rank)
            self._device = communication_device(state)
            self._arithmetic = arithmetic_of(self._device)
            self.check()
            options = check_options(bucket_bytes, atomic, nonfinite, form, rails, fragments, overlap)
            self._manifest = Manifest(model, policies, codec)
            axes = self._manifest.axes(self._topology, at)
            text = f"(options)\t{options}\n{self._manifest}"
        except XfflError as wrong:
            error = wrong
        except Exception as wrong:  # noqa: BLE001 - told to all ranks
            error = ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
        agree("models", text, error=error, describe=describe_difference)
        axes_of_cells = gather_axes(axes, self._topology)
        items = self._manifest.items(self._topology, axes_of_cells, least_bytes=bucket_bytes, fragments=fragments)
        self._plan = f"{digest(items, self._topology)}, {bucket_bytes} bytes a bucket, form={form}, rails={rails}"
        agree("exchange plans", self._plan)
        self._has_codecs = any(self._manifest.codecs.values()) and self._topology.cells > 1
        self._routes = routes_of(state, is_railed=rails, is_own=overlap)
        self._exchange = make_exchange(
            self._manifest,
            items,
            axes_of_cells,
            topology=self._topology,
            rank=self._rank,
            routes=self._routes,
            device=self._device,
            bucket_bytes=bucket_bytes,
            form=form,
            atomic=atomic,
        )
        self._protocol = Protocol(
            self._exchange,
            topology=self._topology,
            rank=self._rank,
            device=self._device,
            group=self._routes.world,
            atomic=atomic,
            drops_cells=nonfinite == "drop_cell",
        )
        self.overlaps = overlap

    @property
    def rounds(self) -> int:
        """Number of rounds that have taken place."""
        return self._rounds

    @property
    def is_torn(self) -> bool:
        """Whether a failed round may have left different weights on different ranks."""
        return find_tear(self._model) is not None

    @property
    def can_go_on(self) -> bool:
        """Whether another round may follow a rejected one: the model is whole, and the others are still there."""
        return not (self.is_torn or self._protocol.is_over or self._protocol.is_cut_off)

    @property
    def under_way(self) -> PendingRound | None:
        """The round that :meth:`aggregate_async` has started and nobody has merged yet."""
        return self._pending

    @property
    def next_fragment(self) -> int:
        """The part of the model that the next round moves: all ranks agree on it with the round's number."""
        return self._rounds % self.fragments

    @property
    def model(self) -> nn.Module:
        """The model that is averaged."""
        return self._model

    def aggregate(self, weight: float | None = None) -> RoundReport:
        """Run one round: afterwards every rank holds the weighted mean over the cells.

        Collective over the world. Moves each shard to the other cells (see ``form``) and once to each replica at home,
        after a vote of 88 bytes a rank and before another.

        :param weight: This rank's own count since the last round (samples, tokens); a cell's weight is the sum over its
            ranks. ``None`` on all ranks: every cell counts 1.
        :return: What the round did.
        :raises ConfigError: if a weight is negative or not finite, or all are zero; on all ranks, the model unchanged.
        :raises RoundError: if the round did not take place; the message says whether the old weights stand.
        """
        report = self.take_part(weight)
        assert report is not None, "a rank that has not finished always gets a round"
        return report

    def take_part(
        self, weight: float | Callable[[], float] | None = None, *, is_absent: bool = False, is_finished: bool = False
    ) -> RoundReport | None:
        """Run one round like :meth:`aggregate`, possibly as a rank that has nothing more to give.

        Collective over the world, together with the other ranks' :meth:`aggregate`.

        :param weight: As in :meth:`aggregate`, or a function that returns it; not read where ``is_absent``.
        :param is_absent: Count as 0: the round's result is taken over, nothing is contributed.
        :param is_finished: Say that this rank makes no further step; the report's ``is_last`` tells that all have.
        :return: What the round did; ``None`` where all ranks have finished and none had anything to give.
        :raises ConfigError: as :meth:`aggregate`.
        :raises RoundError: as :meth:`aggregate`.
        """
        start = time.perf_counter()
        self._check_free()
        ballot, error = self._look(weight, is_absent=is_absent, is_finished=is_finished)
        with self._tearing():
            outcome = self._protocol.confer(ballot, self.next_fragment, self._found, error)
        return None if outcome is None else self._conclude(outcome, start)

    def aggregate_async(
        self, weight: float | Callable[[], float] | None = None, *, alpha: float | None = None
    ) -> PendingRound:
        """Start a round like :meth:`aggregate` and return at once; :meth:`PendingRound.merge` writes its result.

        Collective over the world. Takes a copy of this rank's shard, which is what the round averages; local steps may
        go on. Needs ``overlap=True`` and ``atomic=True``; one round at a time.

        :param weight: As in :meth:`aggregate`.
        :param alpha: The part of a local value that stays when the mean is merged, 0 to 1: ``alpha * local +
            (1 - alpha) * mean`` (Streaming DiLoCo, arXiv 2501.18512). ``None``: the steps made meanwhile stay as they
            are, ``mean + (local - copy)`` (delayed averaging), which takes one more copy of the shard. Buffers are
            replaced. The same on all ranks.
        :return: The round under way.
        :raises StateError: if the aggregator was made without ``overlap``, or a round is under way.
        :raises ConfigError: if ``alpha`` is outside its range.
        """
        check_merge(alpha)
        if not self.overlaps:
            raise StateError("the aggregator was made without overlap=True, which makes the groups that this needs")
        self._check_free()
        start = time.perf_counter()
        ballot, error = self._look(weight, is_snapshot=True, alpha=alpha)
        fragment, found = self.next_fragment, self._found
        background = Background(lambda: self._protocol.confer(ballot, fragment, found, error), self._device)

        def conclude(pending: PendingRound, keeps_steps: bool) -> RoundReport:
            if self._pending is not pending:
                raise StateError("this round was merged already")
            asked = time.perf_counter()
            try:
                with self._tearing():
                    outcome = background.result()
            finally:
                if background.is_done():  # else this was interrupted, and the round is still under way
                    self._pending = None
            self.check()
            assert outcome is not None, "a rank that has not finished always gets a round"
            self._exchange.journal.phases["wait"] = time.perf_counter() - asked
            return self._conclude(outcome, start, is_merged=keeps_steps, alpha=alpha)

        self._pending = PendingRound(background, conclude)
        return self._pending

    def close(self) -> None:
        """Give the process groups of ``overlap`` back; the aggregator cannot be used afterwards.

        Collective over the world, with no round under way. Without ``overlap`` there is nothing to give back.
        """
        self._check_free()
        if not self._routes.own:
            return
        self._is_closed = True
        dist.barrier()  # nobody still listens to a group that another one destroys
        for group in self._routes.own:
            destroy_group(group)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has given process groups back."""
        return self._is_closed

    def _check_free(self) -> None:
        self.check()
        if self._is_closed:
            raise StateError("this aggregator is closed; make another one")
        if self._pending is not None:
            raise StateError("a round of this aggregator is under way; merge it first")
        if self._protocol.is_cut_off:
            raise StateError("a vote of this aggregator was cut off, so the ranks are out of step; make another one")

    def check(self) -> None:
        """Raise while the model is torn; local.

        :raises RoundError: if a failed round may have left different weights on different ranks, until a state dict has
            been loaded into the model.
        """
        if (tear := find_tear(self._model)) is not None:
            tear.check()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the number of rounds, and what lossy codecs remember on this rank.

        Local; without lossy codecs the same on all ranks, else each rank saves its own.

        :return: Numbers, texts and copies of tensors.
        :raises StateError: while a round is under way.
        """
        if self._pending is not None:
            raise StateError("a round of this aggregator is under way; merge it before saving")
        state: dict[str, Any] = {"rounds": self._rounds}
        if self._has_codecs:
            state["codecs"] = self._exchange.state_dict(self._plan)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model.

        :param state: The saved state, of this rank where lossy codecs are used.
        :raises CheckpointError: if it is that of another set-up.
        """
        if self._pending is not None:
            raise StateError("a round of this aggregator is under way; merge it before loading")
        if self._has_codecs:
            if "codecs" not in state:
                raise CheckpointError("the state has no memory of codecs; it was saved without them")
            self._exchange.load_state_dict(state["codecs"], self._plan)
        self._rounds = int(state["rounds"])

    def _look(
        self,
        weight: float | Callable[[], float] | None,
        *,
        is_absent: bool = False,
        is_finished: bool = False,
        is_snapshot: bool = False,
        alpha: float | None = None,
    ) -> tuple[Ballot, XfflError | None]:
        """Read the model and fill in this rank's ballot; local."""
        error: XfflError | None = None
        count, is_moderate = 0.0, False
        self._found: list[str] = []
        try:
            reshard(self._model)
            self._manifest.check(self._model)
            if not is_absent:
                count = 1.0 if weight is None else checked_weight(weight() if callable(weight) else weight)
            self._found, is_moderate = self._exchange.look(
                self.next_fragment, is_snapshot=is_snapshot, keeps_snapshot=is_snapshot and alpha is None
            )
        except XfflError as wrong:
            error = wrong
        except Exception as wrong:  # noqa: BLE001 - told to all ranks
            error = RoundError(f"the round could not be opened: {type(wrong).__name__}: {wrong}")
        ballot = Ballot(
            round=self._rounds + 1,
            weight=count,
            is_uniform=weight is None,
            is_absent=is_absent,
            is_finished=is_finished,
            is_nonfinite=bool(self._found),
            is_failed=error is not None,
            is_encoding=self._has_codecs and self._exchange.is_encoding(self.next_fragment),
            is_moderate=is_moderate,
            arithmetic=self._arithmetic,
            merging=(NO_ALPHA if alpha is None else alpha) if is_snapshot else AT_ONCE,
        )
        return ballot, error

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """Mark the model where the ranks may hold different weights, and forget what lossy codecs start from."""
        try:
            with tearing(self._model):
                yield
        finally:
            if self.is_torn:
                self._exchange.forget()

    def _conclude(
        self, outcome: Outcome, start: float, *, is_merged: bool = False, alpha: float | None = None
    ) -> RoundReport:
        """Write what was agreed into the model."""
        with self._tearing():
            try:
                # A cell that was left out has nothing that could stay.
                is_merged = is_merged and self._topology.cell_of(self._rank) not in outcome.dropped
                reshard(self._model)
                if not outcome.is_empty:
                    self._exchange.commit(self.next_fragment, is_merged=is_merged, alpha=alpha)
            except BaseException as error:
                raise TornError(
                    f"round {self._rounds + 1} was agreed, but this rank could not write it: {type(error).__name__}: "
                    f"{error}"
                ) from error
        fragment = self.next_fragment
        self._rounds += 1
        journal = self._exchange.journal
        return RoundReport(
            round=self._rounds,
            weights=outcome.turnout.weights,
            bytes_across=journal.bytes_across,
            bytes_home=journal.bytes_home,
            seconds=time.perf_counter() - start,
            dropped=outcome.dropped,
            is_last=outcome.is_last,
            fragment=fragment,
            phases=journal.phases,
            hidden=journal.hidden,
            codec_error=self._exchange.codec_error,
        )
