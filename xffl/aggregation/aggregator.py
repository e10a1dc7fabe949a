"""The federated round, from the vote to the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from xffl.aggregation.codec import Codec
from xffl.aggregation.crossing import Crossing
from xffl.aggregation.exchange import Exchange
from xffl.aggregation.layout import Layout
from xffl.aggregation.manifest import Manifest, describe_difference, gather_axes, reshard
from xffl.aggregation.plan import FORMS, digest, plan_lanes
from xffl.aggregation.report import RoundReport
from xffl.aggregation.torn import Tear, find_tear
from xffl.aggregation.tracks import Routes, Turnout, make_tracks
from xffl.aggregation.vote import Ballot, cast, cell_weights, check_rounds, checked_weight
from xffl.distributed.agreement import agree
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, RoundError, StateError, XfflError

__all__ = ["Aggregator"]

NONFINITE = ("reject", "drop_cell")
DEFAULT_BUCKET_BYTES = 4 * 2**20


class Aggregator:
    """Average a model over the cells of a federation, shard by shard.

    Making one is collective over the world: the ranks compare the model's manifest and plan the exchange once. A round
    moves each shard once from its sender to each peer in the other cells, and from there to the replicas at home; the
    number of replicas does not change what crosses. Memory: ``2 C`` buckets for ``C`` cells, and with ``atomic`` one
    copy of this rank's shard.

    What happens to a tensor follows its policy. By default trainable parameters and floating-point buffers are averaged
    (buffers first over the ranks of a cell), integer and bool buffers are taken from cell 0, frozen parameters and
    non-persistent buffers stay local. The optimizer's state is left alone.

    :param model: The model that trains: plain, DDP, or FSDP2/HSDP over the state's meshes.
    :param state: The state that describes the federation; without one the world is a single cell.
    :param policies: ``average``, ``local`` or ``first`` for tensors by name pattern (:mod:`fnmatch`), the first match
        wins.
    :param bucket_bytes: Size of the pieces that cross at a time, in bytes.
    :param atomic: Collect the new weights beside the model, so that a failed round leaves the old ones. Without it, a
        failed exchange tears the model: it cannot be used until a checkpoint is loaded.
    :param nonfinite: ``reject`` the round where a cell holds NaN or infinity, or ``drop_cell``: leave that cell out.
    :param form: ``all_gather``: each sender sends its shard to every other cell, ``C - 1`` copies. ``two_hop``: of each
        bucket, every cell combines one part and sends the result round, ``2 (C - 1) / C`` copies and a second latency.
        ``auto``: two hops for three cells and more, except for what is tiny.
    :param rails: Let the replicas of a shard take turns in carrying its buckets, so that all their network cards work,
        instead of one sender. What crosses stays the same.
    :param codec: How trainable parameters are written on the slow link: ``none``, ``bf16``, ``fp16``, ``int8``,
        ``int4``, ``topk:0.01`` (see :mod:`xffl.aggregation.codec`), or a mapping of name patterns to codecs, the first
        match wins. Codecs write what a shard differs by from the last agreed state; what they leave out is sent later
        (error feedback). The first round is exact, and makes that state. Memory on a sender: one more copy of its
        shard, two in fp32 of what was left out, and ``C + 2`` buckets in fp32.
    :param fragments: Parts of the model that are exchanged in turn, one in each round.
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
    ) -> None:
        if not dist.is_initialized():
            raise StateError(
                "torch.distributed is not initialized; open xffl.session() or call init_process_group first"
            )
        self._model = model
        self._rank = dist.get_rank()
        self._drops_cells = nonfinite == "drop_cell"
        self._atomic = atomic
        self._fragments = fragments
        self._rounds = 0
        self._is_over = self._is_cut_off = False
        self._found: list[str] = []
        error: XfflError | None = None
        text = ""
        try:
            self._topology = state.topology
            at = self._topology.coordinates(self._rank)
            self._device = _communication_device(state)
            self.check()
            _check_options(bucket_bytes, atomic, nonfinite, form, rails, fragments)
            self._manifest = Manifest(model, policies, codec)
            axes = self._manifest.axes(self._topology, at)
            text = (
                f"(options)\t{bucket_bytes} bytes a bucket, atomic={atomic}, nonfinite={nonfinite}, form={form}, "
                f"rails={rails}, fragments={fragments}\n{self._manifest}"
            )
        except XfflError as wrong:
            error = wrong
        except Exception as wrong:  # noqa: BLE001 - told to all ranks
            error = ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
        agree("models", text, error=error, describe=describe_difference)
        every_axes = gather_axes(axes, self._topology)
        items = self._manifest.items(self._topology, every_axes, least_bytes=bucket_bytes, fragments=fragments)
        agree("exchange plans", digest(items, self._topology))
        routes = _routes(state, is_railed=rails)
        tracks = make_tracks(
            plan_lanes(items, self._topology, self._rank),
            topology=self._topology,
            rank=self._rank,
            routes=routes,
            bucket_bytes=bucket_bytes,
            form=form,
            codecs=self._manifest.codecs,
        )
        self._exchange = Exchange(
            Layout(self._manifest.moving, items, every_axes, at),
            tracks,
            Crossing(tracks, self._topology, self._rank, routes, self._device),
            device=self._device,
            atomic=atomic,
        )

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
        return not (self.is_torn or self._is_over or self._is_cut_off)

    @property
    def model(self) -> nn.Module:
        """The model that is averaged."""
        return self._model

    def aggregate(self, weight: float | None = None) -> RoundReport:
        """Run one round: afterwards every rank holds the weighted mean over the cells.

        Collective over the world. Moves each shard once to each other cell and once to each replica at home, after a
        vote of 56 bytes a rank and before another.

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
        self.check()
        ballots = self._open(weight, is_absent, is_finished)
        weights = cell_weights(ballots, self._topology)
        if self._is_over and not any(weights):
            return None
        turnout, dropped = self._turnout(weights, ballots)
        self._run(turnout)
        fragment = self._fragment
        self._rounds += 1
        journal = self._exchange.journal
        return RoundReport(
            round=self._rounds,
            weights=turnout.weights,
            bytes_across=journal.bytes_across,
            bytes_home=journal.bytes_home,
            seconds=time.perf_counter() - start,
            dropped=dropped,
            is_last=self._is_over,
            fragment=fragment,
            phases=journal.phases,
            hidden=journal.hidden,
            codec_error=self._exchange.codec_error,
        )

    def check(self) -> None:
        """Raise while the model is torn; local.

        :raises RoundError: if a failed round may have left different weights on different ranks, until a state dict has
            been loaded into the model.
        """
        if (tear := find_tear(self._model)) is not None:
            tear.check()

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs; the same on all ranks."""
        return {"rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what :meth:`state_dict` returned; call it on all ranks, after loading the model.

        :param state: The saved state.
        """
        self._rounds = int(state["rounds"])

    @property
    def _fragment(self) -> int:
        """The part of the model that the next round moves: all ranks agree on it with the round's number."""
        return self._rounds % self._fragments

    def _open(self, weight: float | Callable[[], float] | None, is_absent: bool, is_finished: bool) -> list[Ballot]:
        """Vote on whether there is a round, and with what weights."""
        error: XfflError | None = None
        count, self._found, is_moderate = 0.0, [], False
        try:
            reshard(self._model)
            self._manifest.check(self._model)
            if not is_absent:
                count = 1.0 if weight is None else checked_weight(weight() if callable(weight) else weight)
            self._found, is_moderate = self._exchange.look(self._fragment)
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
            is_moderate=is_moderate,
            is_encoding=self._exchange.is_encoding(self._fragment),
        )
        try:
            with self._exchange.journal.phase("vote"):
                ballots = cast(ballot, self._device)
        except RuntimeError as broken:
            self._is_cut_off = True
            raise RoundError(
                f"round {self._rounds + 1} could not be opened, this rank keeps its weights: {broken}; see the other "
                "ranks' output"
            ) from broken
        self._is_over = all(ballot.is_finished for ballot in ballots)
        check_rounds(ballots)
        if any(ballot.is_failed for ballot in ballots):
            agree(f"opening of round {self._rounds + 1}", "", error=error)
        return ballots

    def _turnout(self, weights: tuple[float, ...], ballots: list[Ballot]) -> tuple[Turnout, tuple[int, ...]]:
        """Conclude whose values count; the same on all ranks."""
        if not any(weights):
            raise ConfigError(f"the weights of all cells are 0 {weights}; a round needs at least one positive weight")
        bad = {self._topology.cell_of(rank) for rank, ballot in enumerate(ballots) if ballot.is_nonfinite}
        dropped = tuple(sorted(cell for cell in bad if weights[cell]))
        if dropped and not self._drops_cells:
            self._refuse_nonfinite(dropped)
        counted = tuple(0.0 if cell in dropped else weight for cell, weight in enumerate(weights))
        if not any(counted):
            raise RoundError(
                f"no cell with a positive weight is left after dropping cells {dropped}; all ranks keep their weights"
            )
        first = next(cell for cell in range(self._topology.cells) if cell not in dropped)
        is_moderate = all(ballot.is_moderate for ballot in ballots)
        return Turnout(counted, first, self._rounds + 1, is_moderate), dropped

    def _refuse_nonfinite(self, cells: tuple[int, ...]) -> None:
        """Raise on all ranks, with the cell and the tensors that a rank of it has found."""
        error: XfflError | None = None
        cell = self._topology.cell_of(self._rank)
        if cell in cells and self._found:
            error = RoundError(
                f"cell {cell} holds values that are not finite in {', '.join(map(repr, self._found[:3]))}; all ranks "
                "keep their weights; nonfinite='drop_cell' leaves the cell out, policy 'first' or 'local' the tensor"
            )
        agree("finite values", "", error=error)

    def _run(self, turnout: Turnout) -> None:
        """Exchange, vote on the outcome, and write the new weights or leave the old."""
        number = self._rounds + 1
        failure: Exception | None = None
        try:
            self._exchange.run(turnout, self._fragment)
            failure = self._exchange.journal.failure
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            failure = error
        except BaseException as stop:
            if not self._atomic:
                Tear(self._model, f"round {number} was interrupted by {type(stop).__name__}")
            raise
        try:
            with self._exchange.journal.phase("vote"):
                ballots = cast(Ballot(number, is_failed=failure is not None), self._device)
            check_rounds(ballots)
            is_agreed = not any(ballot.is_failed for ballot in ballots)
            reasons = [] if is_agreed else _gather_reasons(failure)
        except Exception as error:  # noqa: BLE001 - whatever it is, the outcome is unknown
            self._tear(f"the outcome of round {number} could not be learned ({failure or error})", failure or error)
        if not is_agreed:
            self._reject(number, failure, reasons)
        try:
            self._exchange.commit(self._fragment)
        except BaseException as error:
            why = f"round {number} was agreed, but this rank could not write it: {type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                Tear(self._model, why)
                raise
            self._tear(why, error)

    def _tear(self, why: str, cause: Exception | None) -> NoReturn:
        Tear(self._model, why)
        raise RoundError(f"{why}; the model is torn: load a checkpoint on all ranks") from cause

    def _reject(self, number: int, failure: Exception | None, reasons: list[str]) -> None:
        told = "; ".join(
            f"rank {rank} (cell {self._topology.cell_of(rank)}): {why}" for rank, why in enumerate(reasons) if why
        )
        if self._atomic:
            raise RoundError(
                f"round {number} was not taken, all ranks keep their weights of before: {told}"
            ) from failure
        self._tear(f"round {number} failed with atomic=False: {told}", failure)


def _check_options(
    bucket_bytes: object, atomic: object, nonfinite: object, form: object, rails: object, fragments: object
) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes {bucket_bytes!r} is no positive whole number; give bytes, such as {DEFAULT_BUCKET_BYTES}"
        )
    for what, switch in (("atomic", atomic), ("rails", rails)):
        if not isinstance(switch, bool):
            raise ConfigError(f"{what} {switch!r} is neither True nor False; give one of them")
    for what, choice, choices in (("nonfinite", nonfinite, NONFINITE), ("form", form, FORMS)):
        if choice not in choices:
            raise ConfigError(f"{what} {choice!r} is unknown; choose one of {', '.join(choices)}")
    if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
        raise ConfigError(f"fragments {fragments!r} is no positive whole number; give the parts to exchange in turn")


def _communication_device(state: DistributedState) -> torch.device:
    """Return where tensors must lie for the state's backend."""
    if "nccl" not in str(state.backend):
        return torch.device("cpu")
    device = state.current_device if state.current_device is not None else torch.cuda.current_device()
    return torch.device("cuda", device) if isinstance(device, int) else device


def _routes(state: DistributedState, *, is_railed: bool) -> Routes:
    """Pick the groups of a round from the state; groups of one rank are left out."""
    if state.is_federated_scaling_setup():
        across = state.federated_group[0] if state.federated_group else None
        replica = state.replica_group[0] if state.replica_group else None
        cell = state.federation
    else:
        across = None
        replica = state.hsdp_mesh.get_group(0) if state.hsdp_mesh is not None else None
        cell = dist.group.WORLD
    if is_railed:
        across = dist.group.WORLD  # any rank may meet any other
    replica, cell = (None if group is None or group.size() == 1 else group for group in (replica, cell))
    return Routes(across, replica, cell, is_railed)


def _gather_reasons(failure: Exception | None) -> list[str]:
    """Return each rank's reason for its no; collective over the world."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, "" if failure is None else f"{type(failure).__name__}: {failure}")
    return reasons
