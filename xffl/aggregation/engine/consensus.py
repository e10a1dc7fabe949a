"""How a round is agreed on: the vote that opens it, the exchange, and the vote on what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.aggregation.algorithms.combiners import total_of
from xffl.aggregation.engine.exchange import Exchange, FiniteReport
from xffl.aggregation.engine.groups import RoundGroups, RoundScope
from xffl.aggregation.engine.inconsistent import TornError
from xffl.aggregation.engine.plan import RoundContext
from xffl.aggregation.engine.status import (
    AT_ONCE,
    COMMIT_PHASE,
    NO_ALPHA,
    RoundStatus,
    all_gather_status,
    by_cell,
    cell_weights,
    check_rounds,
    checked_number,
    checked_weight,
    next_number,
)
from xffl.aggregation.engine.tensors import TensorInfo
from xffl.aggregation.options import Options
from xffl.aggregation.report import RoundReport
from xffl.distributed.consistency import check_consistent
from xffl.distributed.sharding import reshard
from xffl.errors import ConfigError, RoundError, XfflError
from xffl.parallel.zero_view import refresh_view
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.aggregation.aggregator import Assembly

__all__ = [
    "AFRESH",
    "Outcome",
    "PreparedRound",
    "RoundCoordinator",
    "RoundInput",
    "agree_start",
    "digest_of",
    "prepare_round",
    "report_of",
]


AFRESH = "start the processes anew, or end the process group on all ranks and join again"
"""What helps where messages may be under way that nobody waits for: another aggregator would get them."""


@dataclass(frozen=True)
class PreparedRound:
    """What a rank opens a round with.

    :param status: What it says.
    :param found: Names of its tensors that hold values which are not finite.
    :param error: Why it cannot take part.
    """

    status: RoundStatus
    found: list[str]
    error: XfflError | None = None


@dataclass(frozen=True)
class Outcome:
    """A round that all ranks have agreed to take.

    :param context: Whose values counted.
    :param dropped: Cells that were left out for values that are not finite.
    :param is_last: Whether all ranks had finished.
    :param is_empty: Whether no cell had anything for this part of the model, so that nothing moved.
    :param is_skipped: Whether the cells' models were so close that nothing moved.
    :param nonfinite: Of the cells that were left out, the tensors with such values.
    :param unfit: All cells with values that are not finite, those of weight 0, too.
    :param step_seconds: Seconds of a local step in each cell.
    """

    context: RoundContext
    dropped: tuple[int, ...]
    is_last: bool
    is_empty: bool = False
    is_skipped: bool = False
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    step_seconds: tuple[float, ...] = ()


class RoundCoordinator:
    """The votes around an exchange, over the group of all ranks; making one is collective over that group."""

    def __init__(
        self,
        exchange: Exchange,
        scope: RoundScope,
        *,
        device: torch.device,
        round_groups: RoundGroups,
        options: Options,
    ) -> None:
        self._exchange = exchange
        self._topology, self._rank = scope.topology, scope.rank
        self._device, self._number = device, next_number(round_groups.world)
        self._round_groups = round_groups
        self._atomic = options.atomic
        self._drops_cells = options.nonfinite == "drop_cell"
        limits = scope.state._timeouts
        self._opens_within_s, self._closes_within_s = limits.session_s, limits.across_s
        self.is_over = False
        self.is_cut_off = self.is_interrupted = False
        self.is_owed = False
        """Whether all ranks have agreed on new values that this one has not written yet."""

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._round_groups.world

    @property
    def is_out_of_step(self) -> bool:
        """Whether messages of this rank may be under way that nobody waits for, so that no round can follow."""
        return self.is_cut_off or self.is_interrupted

    def run(self, opening: PreparedRound, fragment: int, least_divergence: float | None = None) -> Outcome | None:
        """Vote, exchange, and vote on what came of it.

        Collective over the world. The new values then wait in the exchange to be committed.

        :param opening: What this rank says at the opening.
        :param fragment: The part of the model that takes part.
        :param least_divergence: Root mean square of the updates' norms below which nothing moves; the same on all
            ranks.
        :return: What was agreed; ``None`` where all ranks have finished and none had anything to give.
        :raises ConfigError: if a weight is negative or not finite, or all are zero; on all ranks.
        :raises RoundError: if the round does not take place; all ranks keep their weights.
        :raises TornError: if ranks may hold different weights now.
        """
        self.is_owed = False
        statuses = self._prepare(opening.status, opening.error)
        weights = cell_weights(statuses, self._topology)
        if self.is_over and not any(weights):
            return None
        if all(other.is_absent for other in statuses):
            return Outcome(RoundContext(weights, 0, int(opening.status.round)), (), False, is_empty=True)
        if not any(weights):
            raise ConfigError(f"the weights of all cells are 0 {weights}; a round needs at least one positive weight")
        bad = {self._topology.cell_of(rank) for rank, other in enumerate(statuses) if other.is_nonfinite}
        dropped = tuple(sorted(cell for cell in bad if weights[cell]))
        if dropped and not self._drops_cells:
            self._refuse_nonfinite(dropped, opening.found)
        context = self._count(statuses, weights, dropped)
        seconds = by_cell([other.seconds for other in statuses], self._topology, max)
        nonfinite = self._share_nonfinite(dropped, opening.found) if dropped else {}
        if least_divergence is not None and not self.is_over and _divergence(context) < least_divergence:
            return Outcome(context, dropped, False, is_skipped=True, nonfinite=nonfinite, step_seconds=seconds)
        self._check_turnout(context, statuses)
        bad |= self._commit(context, fragment)
        return Outcome(
            self._exchange.context,
            dropped,
            self.is_over,
            nonfinite=nonfinite,
            unfit=frozenset(bad),
            step_seconds=seconds,
        )

    @contextmanager
    def owing(self) -> Iterator[None]:
        """Run a round and write it; what ends the block in between tears the model, since others write their part.

        :raises TornError: if all ranks have agreed on new values, and this one has not written them.
        """
        try:
            yield
        except BaseException as stop:
            if self.is_owed:
                self.is_owed = False
                raise TornError(f"a round was agreed, but {type(stop).__name__} came before it was written") from stop
            raise

    @contextmanager
    def _exchange_reasons(self) -> Iterator[None]:
        """Let ranks tell each other what they have found; no round for one that is stopped then: it is out of step."""
        try:
            yield
        except XfflError:
            raise
        except Exception as broken:
            self.is_cut_off = True
            raise RoundError(
                f"a round did not take place, and this rank could not learn what others have found; it keeps its "
                f"weights: {broken}; see the other ranks' output"
            ) from broken
        except BaseException:
            self.is_interrupted = True
            raise

    def _count(self, statuses: list[RoundStatus], weights: tuple[float, ...], dropped: tuple[int, ...]) -> RoundContext:
        """Return whose values count, and what the combiner is told about them."""
        counted = tuple(0.0 if cell in dropped else weight for cell, weight in enumerate(weights))
        if not any(counted):
            raise RoundError(
                f"no cell with a positive weight is left after dropping cells {dropped}; all ranks keep their weights"
            )
        norms = by_cell([status.norm for status in statuses], self._topology, lambda parts: math.sqrt(total_of(parts)))
        return RoundContext(
            counted,
            first=next(cell for cell in range(self._topology.cells) if cell not in dropped),
            number=int(statuses[0].round),
            is_fused=all(status.is_moderate for status in statuses) and _has_one_arithmetic(statuses),
            steps=by_cell([status.steps for status in statuses], self._topology, lambda steps: steps[0]),
            norms=norms if self._exchange.has_norms else None,
            attempt=int(max(status.attempt for status in statuses)),
        )

    def _check_turnout(self, context: RoundContext, statuses: list[RoundStatus]) -> None:
        """Raise, on all ranks alike, where these cells or these ranks cannot do what was asked for."""
        try:
            self._exchange.check(context)
        except Exception as wrong:
            why = wrong if isinstance(wrong, XfflError) else f"{type(wrong).__name__}: {wrong}"
            raise RoundError(
                f"round {context.number} has values of cells {context.cells}: {why}; all ranks keep their weights"
            ) from wrong
        if self._exchange.needs_one_arithmetic and not _has_one_arithmetic(statuses):
            kinds: dict[float, list[int]] = {}
            for rank, status in enumerate(statuses):
                kinds.setdefault(status.arithmetic, []).append(rank)
            raise RoundError(
                f"ranks {list(kinds.values())} compute on different kinds of processors or versions of torch, so a "
                "server optimizer would take slightly different steps; run them on one kind, or leave the plain mean"
            )

    def _prepare(self, status: RoundStatus, error: XfflError | None) -> list[RoundStatus]:
        """Vote on whether there is a round, and with what weights."""
        number = int(status.round)
        if self.is_interrupted:  # what was posted then would take the next attempt's messages
            status = status._replace(is_failed=True)
            error = RoundError(f"an exchange was interrupted here, and its messages may still be under way; {AFRESH}")
        try:
            statuses = self._gather_status(status, self._opens_within_s)
        except RuntimeError as broken:
            self._abort()
            self.is_cut_off = True
            raise RoundError(
                f"round {number} could not be opened, this rank keeps its weights: {broken}; see the other ranks' "
                "output"
            ) from broken
        except BaseException:
            self.is_cut_off = True  # what is still to come would be taken for an answer to the next status
            raise
        self.is_over = all(other.is_finished for other in statuses)
        check_rounds(statuses, self._topology)
        if any(other.is_failed for other in statuses):
            with self._exchange_reasons():
                check_consistent(f"opening of round {number}", "", error=error, group=self._group)
        return statuses

    def _gather_status(self, status: RoundStatus, within_s: float) -> list[RoundStatus]:
        with self._exchange.profile.phase("vote"):
            status = status._replace(aggregator=self._number)
            return all_gather_status(status, self._topology, self._group, self._round_groups.first, within_s)

    def _refuse_nonfinite(self, cells: tuple[int, ...], found: list[str]) -> None:
        """Raise on all ranks, with the cell and the tensors that a rank of it has found."""
        error: XfflError | None = None
        cell = self._topology.cell_of(self._rank)
        if cell in cells and found:
            error = RoundError(
                f"cell {cell} holds values that are not finite in {', '.join(map(repr, found[:3]))}; all ranks keep "
                "their weights; nonfinite='drop_cell' leaves the cell out, policy 'first' or 'local' the tensor"
            )
        with self._exchange_reasons():
            check_consistent("finite values", "", error=error, group=self._group)

    def _share_nonfinite(self, cells: tuple[int, ...], found: list[str]) -> dict[int, tuple[str, ...]]:
        """Return the tensors for which cells were left out; collective over the world."""
        told: list[list[str]] = [[]] * self._topology.world_size
        with self._exchange_reasons():
            dist.all_gather_object(told, found[:3], group=self._group)
        return {
            cell: tuple(sorted({name for rank in self._topology.federation(cell) for name in told[rank]}))
            for cell in cells
        }

    def _commit(self, context: RoundContext, fragment: int) -> set[int]:
        """Exchange, and vote on the outcome; return the cells in which values that are not finite were sent."""
        number = context.number
        failure: Exception | None = None
        found = FiniteReport([], False)
        try:
            self._exchange.run(context, fragment)
            found = self._exchange.inspect_deferred()
            failure = self._exchange.profile.failure
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            failure = error
        except BaseException as stop:
            if not self._atomic:
                raise TornError(f"round {number} was interrupted by {type(stop).__name__}") from stop
            self.is_interrupted = True
            raise
        is_refused = failure is not None  # without this rank's yes nobody writes
        try:
            status = RoundStatus(
                number + COMMIT_PHASE,
                is_nonfinite=bool(found.nonfinite),
                is_failed=failure is not None,
                is_moderate=found.squares_fit_fp32,
            )
            statuses = self._gather_status(status, self._closes_within_s)
            is_agreed = not any(other.is_failed for other in statuses)
            is_refused = not is_agreed
            check_rounds(statuses, self._topology)
            self.is_owed = is_agreed
            reasons = [] if is_agreed else self._gather_reasons(failure)
        except BaseException as error:
            self._abort()
            why = failure or error
            if not isinstance(error, Exception):
                why = error
            if self._atomic and is_refused:
                self.is_cut_off = True
                if not isinstance(error, Exception):
                    raise
                raise RoundError(
                    f"round {number} was not taken, this rank keeps its weights: {type(why).__name__}: {why}; {AFRESH}"
                ) from why
            raise TornError(
                f"the outcome of round {number} could not be learned ({why or type(why).__name__})"
            ) from why
        if is_agreed:
            return self._accept_late(context, statuses, found.nonfinite)
        self._abort()
        told = "; ".join(
            f"rank {rank} (cell {self._topology.cell_of(rank)}): {why}" for rank, why in enumerate(reasons) if why
        )
        if not self._atomic:
            raise TornError(f"round {number} failed with atomic=False: {told}") from failure
        raise RoundError(f"round {number} was not taken, all ranks keep their weights of before: {told}") from failure

    def _abort(self) -> None:
        """Let what a GPU was given for the round come to an end, so that the model can be read; local.

        All ranks come here after a round that was refused, so that all can make new groups before the next one.
        """
        if self._device.type == "cuda":
            self._round_groups.abort()
            self.is_cut_off |= self._round_groups.make is None

    def reconnect(self) -> None:
        """Make new groups after a round that failed on GPUs; collective over the world then.

        :raises RoundError: if not all ranks come.
        """
        if not self._round_groups.is_aborted:
            return
        try:
            self._round_groups.renew()
        except Exception as broken:
            self.is_cut_off = True
            raise RoundError(
                f"the ranks could not make new process groups after a failed round, this rank keeps its weights: "
                f"{broken}; see the other ranks' output"
            ) from broken

    def _accept_late(self, context: RoundContext, statuses: list[RoundStatus], found: list[str]) -> set[int]:
        """Go on with what was found while values were sent, or refuse it; only where no weights have changed yet."""
        bad = {self._topology.cell_of(rank) for rank, status in enumerate(statuses) if status.is_nonfinite}
        if counted := tuple(sorted(cell for cell in bad if context.weights[cell])):
            self.is_owed = False
            self._refuse_nonfinite(counted, found)
        self._exchange.settle(squares_fit_fp32=all(status.is_moderate for status in statuses))
        return bad

    def _gather_reasons(self, failure: Exception | None) -> list[str]:
        """Return each rank's reason for its no; collective over the world."""
        reasons: list[str] = [""] * self._topology.world_size
        told = "" if failure is None else f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(reasons, told, group=self._group)
        return reasons


def report_of(outcome: Outcome, exchange: Exchange, number: int, fragment: int, seconds: float) -> RoundReport:
    """Tell what a round did; local.

    :param outcome: What was agreed.
    :param exchange: What moved.
    :param number: The round's number.
    :param fragment: The part of the model that took part.
    :param seconds: How long it took here.
    :return: The report.
    """
    context, profile = outcome.context, exchange.profile
    total = math.fsum(context.counts)
    return RoundReport(
        round=number,
        weights=context.weights,
        bytes_across=profile.bytes_across,
        bytes_home=profile.bytes_home,
        seconds=seconds,
        dropped=outcome.dropped,
        is_last=outcome.is_last,
        fragment=fragment,
        shares=tuple(count / total for count in context.counts),
        scale=context.scale,
        steps=context.steps,
        step_seconds=outcome.step_seconds,
        update_norms=context.norms,
        nonfinite=outcome.nonfinite,
        is_skipped=outcome.is_skipped,
        phases=profile.phases,
        hidden=profile.hidden,
        codec_error=exchange.memory.codec_error,
    )


def _has_one_arithmetic(statuses: list[RoundStatus]) -> bool:
    return len({status.arithmetic for status in statuses}) == 1


def _divergence(context: RoundContext) -> float:
    """Return the root mean square of the cells' updates, weighed as they are."""
    assert context.norms is not None, "checked by who asks for it"
    squares = [context.weights[cell] * context.norms[cell] * context.norms[cell] for cell in context.cells]
    return math.sqrt(total_of(squares) / math.fsum(context.weights))


@dataclass(frozen=True)
class RoundInput:
    """What a rank gives to a round, and what it says of itself.

    :param weight: Its own count since the last round (samples, tokens), or a function that returns it; not read where
        ``is_absent``. ``None`` on all ranks: every cell counts 1.
    :param is_absent: Count as 0: the round's result is taken over, nothing is contributed.
    :param is_finished: Say that this rank makes no further step; the report's ``is_last`` tells that all have.
    :param steps: Effective number of this cell's local steps since the last round, for combiners that ask for it.
    :param seconds: Seconds of a local step here, told to all in the report; 0 where nobody has measured.
    :param prepare: Called before the model is read; what it raises is told to all ranks.
    """

    weight: float | Callable[[], float] | None = None
    is_absent: bool = False
    is_finished: bool = False
    steps: float = 1.0
    seconds: float = 0.0
    prepare: Callable[[], None] | None = None


def prepare_round(
    made: Assembly, model: nn.Module, number: int, fragment: int, given: RoundInput, merging: float = AT_ONCE
) -> PreparedRound:
    """Read the model and fill in this rank's status; local. What goes wrong is told to all ranks by the vote.

    :param made: What the aggregator works with.
    :param model: The model.
    :param number: The round's number.
    :param fragment: The part of the model that takes part.
    :param given: What this rank gives.
    :param merging: As in :class:`~xffl.aggregation.engine.status.RoundStatus`; where training goes on meanwhile, all is
        copied now.
    :return: The status, and what belongs to it.
    """
    error: XfflError | None = None
    count = steps = seconds = 0.0
    findings = FiniteReport([], False)
    try:
        reshard(model)
        refresh_view(model)
        made.manifest.check()
        if made.exchange.global_model is not None:
            made.exchange.global_model.check(fragment)
        if given.prepare is not None:
            given.prepare()
        steps = checked_number("steps", given.steps, "give the effective number of local steps")
        seconds = checked_number("seconds", given.seconds, "give those of a local step, or 0")
        if made.options.privacy is not None and given.weight is not None:
            raise ConfigError("privacy counts all cells alike, since weights tell about the data; give no weight")
        if not given.is_absent:
            weight = given.weight
            count = 1.0 if weight is None else checked_weight(weight() if callable(weight) else weight)
        findings = made.exchange.inspect(fragment, is_snapshot=merging != AT_ONCE, keeps_snapshot=merging == NO_ALPHA)
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = RoundError(f"the round could not be opened: {type(wrong).__name__}: {wrong}")
    masker = made.exchange.masker
    status = RoundStatus(
        round=number,
        weight=count,
        is_uniform=given.weight is None,
        is_absent=given.is_absent,
        is_finished=given.is_finished,
        is_nonfinite=bool(findings.nonfinite),
        is_failed=error is not None,
        is_encoding=made.has_codecs and made.exchange.memory.is_encoding(fragment),
        is_moderate=findings.squares_fit_fp32,
        arithmetic=made.arithmetic,
        merging=merging if error is None else AT_ONCE,
        norm=findings.norm,
        steps=steps,
        seconds=seconds,
        attempt=0.0 if masker is None else masker.next_attempt,
    )
    return PreparedRound(status, findings.nonfinite, error)


PRIME = 1_000_003
"""Steps of the factors that elements are multiplied by, so that two that change places change the sum."""

RANGE = 2**40
"""What sums are kept below, so that those of thousands of ranks stay in 64 bits."""

CHUNK = 2**20
"""Elements of a tensor that are summed up at a time: each needs 24 bytes more."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def agree_start(
    entries: Sequence[TensorInfo],
    exchange: Exchange,
    topology: Topology,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise where the cells hold different parameters.

    Collective over the topology's ranks; moves one number for each tensor and cell. Each element is counted once in
    each cell, whatever its cut, by the bits of its value and its place.

    :param entries: The moving tensors, in the plan's order.
    :param exchange: What holds this rank's elements.
    :param topology: The federation.
    :param rank: This rank.
    :param device: Where the world's backend communicates from.
    :param group: A group of all ranks; by default the world.
    :raises ConfigError: if two cells differ; on all ranks, with the tensor and the cells.
    """
    sums = torch.zeros(topology.cells, len(entries), dtype=torch.int64, device=device)
    mine = sums[topology.cell_of(rank)]
    for item, start, values in exchange.carried_parts():
        mine[item] = (mine[item] + _sum_of_bits(values, start) % RANGE) % RANGE
    dist.all_reduce(sums, group=group)
    by_tensor = (sums % RANGE).t().tolist()
    for entry, column in zip(entries, by_tensor, strict=True):
        others = [cell for cell, value in enumerate(column) if value != column[0]]
        if others:
            raise ConfigError(
                f"cells {others} start from other values of tensor {entry.name!r} than cell 0, but a server optimizer, "
                "norms and privacy need one model to start from; use xffl.shard, or load the same checkpoint "
                "everywhere before making the Aggregator. To resume between two rounds, make it first, then load the "
                "model, then its own state"
            )


@torch.no_grad()
def digest_of(model: nn.Module) -> list[int]:
    """Return a number for this rank's elements of each trainable parameter, by their bits and places; local.

    Versions of tensors would be cheaper, and do not tell of what was changed through ``.data``.
    """
    reshard(model)
    sums = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
            parts = torch.split(values, CHUNK) if len(values) else ()
            sums.append(sum(_sum_of_bits(part, CHUNK * index) for index, part in enumerate(parts)))
    return [int(one) for one in sums]


def _sum_of_bits(values: torch.Tensor, start: int) -> torch.Tensor:
    """Return the sum over the elements of a row of what each one's bits and place come to, modulo 2^64."""
    bits = values.contiguous().view(BITS[values.itemsize]).to(torch.int64, copy=True)
    factors = torch.arange(start, start + len(bits), device=bits.device).mul_(2).add_(1).mul_(PRIME)
    bits.add_(PRIME).mul_(factors)
    # Without it a change of all elements from 1 to 0.5 would add up to a multiple of a high power of two, that is to 0.
    return bits.bitwise_xor_(bits >> 31).sum()
