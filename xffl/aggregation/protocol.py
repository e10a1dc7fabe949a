"""How a round is agreed on: the vote that opens it, the exchange, and the vote on what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from xffl.aggregation.combine import total_of
from xffl.aggregation.exchange import Exchange
from xffl.aggregation.looks import Findings
from xffl.aggregation.options import Options
from xffl.aggregation.report import RoundReport
from xffl.aggregation.routes import Place, Routes
from xffl.aggregation.torn import TornError
from xffl.aggregation.tracks import Turnout
from xffl.aggregation.vote import CLOSING, Ballot, by_cell, cast, cell_weights, check_rounds
from xffl.distributed.agreement import agree
from xffl.errors import ConfigError, RoundError, XfflError

__all__ = ["AFRESH", "Opening", "Outcome", "Protocol", "report_of"]

AFRESH = "start the processes anew, or end the process group on all ranks and join again"
"""What helps where messages may be under way that nobody waits for: another aggregator would get them."""


@dataclass(frozen=True)
class Opening:
    """What a rank opens a round with.

    :param ballot: What it says.
    :param found: Names of its tensors that hold values which are not finite.
    :param error: Why it cannot take part.
    """

    ballot: Ballot
    found: list[str]
    error: XfflError | None = None


@dataclass(frozen=True)
class Outcome:
    """A round that all ranks have agreed to take.

    :param turnout: Whose values counted.
    :param dropped: Cells that were left out for values that are not finite.
    :param is_last: Whether all ranks had finished.
    :param is_empty: Whether no cell had anything for this part of the model, so that nothing moved.
    :param is_skipped: Whether the cells' models were so close that nothing moved.
    :param nonfinite: Of the cells that were left out, the tensors with such values.
    :param unfit: All cells with values that are not finite, those of weight 0, too.
    :param step_seconds: Seconds of a local step in each cell.
    """

    turnout: Turnout
    dropped: tuple[int, ...]
    is_last: bool
    is_empty: bool = False
    is_skipped: bool = False
    nonfinite: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    step_seconds: tuple[float, ...] = ()


class Protocol:
    """The votes around an exchange.

    :param exchange: What moves.
    :param place: Where the round takes place.
    :param device: Where the groups' backend communicates from.
    :param routes: The process groups; votes go over the group of all ranks.
    :param options: What the aggregator was asked for.
    :param number: What tells it from others, see :func:`xffl.aggregation.vote.next_number`.
    """

    def __init__(
        self, exchange: Exchange, place: Place, *, device: torch.device, routes: Routes, options: Options, number: int
    ) -> None:
        self._exchange = exchange
        self._topology, self._rank = place.topology, place.rank
        self._device, self._number = device, number
        self._routes = routes
        self._atomic = options.atomic
        self._drops_cells = options.nonfinite == "drop_cell"
        limits = place.state._timeouts
        self._opens_within_s, self._closes_within_s = limits.session_s, limits.across_s
        self.is_over = False
        self.is_cut_off = self.is_interrupted = False
        self.is_owed = False
        """Whether all ranks have agreed on new values that this one has not written yet."""

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._routes.world

    @property
    def is_out_of_step(self) -> bool:
        """Whether messages of this rank may be under way that nobody waits for, so that no round can follow."""
        return self.is_cut_off or self.is_interrupted

    def confer(self, opening: Opening, fragment: int, least_divergence: float | None = None) -> Outcome | None:
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
        ballots = self._open(opening.ballot, opening.error)
        weights = cell_weights(ballots, self._topology)
        if self.is_over and not any(weights):
            return None
        if all(other.is_absent for other in ballots):
            return Outcome(Turnout(weights, 0, int(opening.ballot.round)), (), False, is_empty=True)
        if not any(weights):
            raise ConfigError(f"the weights of all cells are 0 {weights}; a round needs at least one positive weight")
        bad = {self._topology.cell_of(rank) for rank, other in enumerate(ballots) if other.is_nonfinite}
        dropped = tuple(sorted(cell for cell in bad if weights[cell]))
        if dropped and not self._drops_cells:
            self._refuse_nonfinite(dropped, opening.found)
        turnout = self._count(ballots, weights, dropped)
        seconds = by_cell([other.seconds for other in ballots], self._topology, max)
        nonfinite = self._tell_nonfinite(dropped, opening.found) if dropped else {}
        if least_divergence is not None and not self.is_over and _divergence(turnout) < least_divergence:
            return Outcome(turnout, dropped, False, is_skipped=True, nonfinite=nonfinite, step_seconds=seconds)
        self._check_turnout(turnout, ballots)
        bad |= self._close(turnout, fragment)
        return Outcome(
            self._exchange.turnout,
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
    def _telling(self) -> Iterator[None]:
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

    def _count(self, ballots: list[Ballot], weights: tuple[float, ...], dropped: tuple[int, ...]) -> Turnout:
        """Return whose values count, and what the combiner is told about them."""
        counted = tuple(0.0 if cell in dropped else weight for cell, weight in enumerate(weights))
        if not any(counted):
            raise RoundError(
                f"no cell with a positive weight is left after dropping cells {dropped}; all ranks keep their weights"
            )
        norms = by_cell([ballot.norm for ballot in ballots], self._topology, lambda parts: math.sqrt(total_of(parts)))
        return Turnout(
            counted,
            first=next(cell for cell in range(self._topology.cells) if cell not in dropped),
            number=int(ballots[0].round),
            is_fused=all(ballot.is_moderate for ballot in ballots) and _has_one_arithmetic(ballots),
            steps=by_cell([ballot.steps for ballot in ballots], self._topology, lambda steps: steps[0]),
            norms=norms if self._exchange.has_norms else None,
            attempt=int(max(ballot.attempt for ballot in ballots)),
        )

    def _check_turnout(self, turnout: Turnout, ballots: list[Ballot]) -> None:
        """Raise, on all ranks alike, where these cells or these ranks cannot do what was asked for."""
        try:
            self._exchange.check(turnout)
        except Exception as wrong:
            why = wrong if isinstance(wrong, XfflError) else f"{type(wrong).__name__}: {wrong}"
            raise RoundError(
                f"round {turnout.number} has values of cells {turnout.cells}: {why}; all ranks keep their weights"
            ) from wrong
        if self._exchange.needs_one_arithmetic and not _has_one_arithmetic(ballots):
            kinds: dict[float, list[int]] = {}
            for rank, ballot in enumerate(ballots):
                kinds.setdefault(ballot.arithmetic, []).append(rank)
            raise RoundError(
                f"ranks {list(kinds.values())} compute on different kinds of processors or versions of torch, so a "
                "server optimizer would take slightly different steps; run them on one kind, or leave the plain mean"
            )

    def _open(self, ballot: Ballot, error: XfflError | None) -> list[Ballot]:
        """Vote on whether there is a round, and with what weights."""
        number = int(ballot.round)
        if self.is_interrupted:  # what was posted then would take the next attempt's messages
            ballot = ballot._replace(is_failed=True)
            error = RoundError(f"an exchange was interrupted here, and its messages may still be under way; {AFRESH}")
        try:
            ballots = self._cast(ballot, self._opens_within_s)
        except RuntimeError as broken:
            self._abort()
            self.is_cut_off = True
            raise RoundError(
                f"round {number} could not be opened, this rank keeps its weights: {broken}; see the other ranks' "
                "output"
            ) from broken
        except BaseException:
            self.is_cut_off = True  # what is still to come would be taken for an answer to the next ballot
            raise
        self.is_over = all(other.is_finished for other in ballots)
        check_rounds(ballots, self._topology)
        if any(other.is_failed for other in ballots):
            with self._telling():
                agree(f"opening of round {number}", "", error=error, group=self._group)
        return ballots

    def _cast(self, ballot: Ballot, within_s: float) -> list[Ballot]:
        with self._exchange.journal.phase("vote"):
            ballot = ballot._replace(aggregator=self._number)
            return cast(ballot, self._topology, self._group, self._routes.first, within_s)

    def _refuse_nonfinite(self, cells: tuple[int, ...], found: list[str]) -> None:
        """Raise on all ranks, with the cell and the tensors that a rank of it has found."""
        error: XfflError | None = None
        cell = self._topology.cell_of(self._rank)
        if cell in cells and found:
            error = RoundError(
                f"cell {cell} holds values that are not finite in {', '.join(map(repr, found[:3]))}; all ranks keep "
                "their weights; nonfinite='drop_cell' leaves the cell out, policy 'first' or 'local' the tensor"
            )
        with self._telling():
            agree("finite values", "", error=error, group=self._group)

    def _tell_nonfinite(self, cells: tuple[int, ...], found: list[str]) -> dict[int, tuple[str, ...]]:
        """Return the tensors for which cells were left out; collective over the world."""
        told: list[list[str]] = [[]] * self._topology.world_size
        with self._telling():
            dist.all_gather_object(told, found[:3], group=self._group)
        return {
            cell: tuple(sorted({name for rank in self._topology.federation(cell) for name in told[rank]}))
            for cell in cells
        }

    def _close(self, turnout: Turnout, fragment: int) -> set[int]:
        """Exchange, and vote on the outcome; return the cells in which values that are not finite were sent."""
        number = turnout.number
        failure: Exception | None = None
        found = Findings([], False)
        try:
            self._exchange.run(turnout, fragment)
            found = self._exchange.looked_late()
            failure = self._exchange.journal.failure
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            failure = error
        except BaseException as stop:
            if not self._atomic:
                raise TornError(f"round {number} was interrupted by {type(stop).__name__}") from stop
            self.is_interrupted = True
            raise
        is_refused = failure is not None  # without this rank's yes nobody writes
        try:
            ballot = Ballot(
                number + CLOSING,
                is_nonfinite=bool(found.nonfinite),
                is_failed=failure is not None,
                is_moderate=found.is_moderate,
            )
            ballots = self._cast(ballot, self._closes_within_s)
            is_agreed = not any(other.is_failed for other in ballots)
            is_refused = not is_agreed
            check_rounds(ballots, self._topology)
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
            return self._settle(turnout, ballots, found.nonfinite)
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
            self._routes.abort()
            self.is_cut_off |= self._routes.make is None

    def reconnect(self) -> None:
        """Make new groups after a round that failed on GPUs; collective over the world then.

        :raises RoundError: if not all ranks come.
        """
        if not self._routes.is_aborted:
            return
        try:
            self._routes.renew()
        except Exception as broken:
            self.is_cut_off = True
            raise RoundError(
                f"the ranks could not make new process groups after a failed round, this rank keeps its weights: "
                f"{broken}; see the other ranks' output"
            ) from broken

    def _settle(self, turnout: Turnout, ballots: list[Ballot], found: list[str]) -> set[int]:
        """Go on with what was found while values were sent, or refuse it; only where no weights have changed yet."""
        bad = {self._topology.cell_of(rank) for rank, ballot in enumerate(ballots) if ballot.is_nonfinite}
        if counted := tuple(sorted(cell for cell in bad if turnout.weights[cell])):
            self.is_owed = False
            self._refuse_nonfinite(counted, found)
        self._exchange.settle(is_moderate=all(ballot.is_moderate for ballot in ballots))
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
    turnout, journal = outcome.turnout, exchange.journal
    total = math.fsum(turnout.counts)
    return RoundReport(
        round=number,
        weights=turnout.weights,
        bytes_across=journal.bytes_across,
        bytes_home=journal.bytes_home,
        seconds=seconds,
        dropped=outcome.dropped,
        is_last=outcome.is_last,
        fragment=fragment,
        shares=tuple(count / total for count in turnout.counts),
        scale=turnout.scale,
        steps=turnout.steps,
        step_seconds=outcome.step_seconds,
        update_norms=turnout.norms,
        nonfinite=outcome.nonfinite,
        is_skipped=outcome.is_skipped,
        phases=journal.phases,
        hidden=journal.hidden,
        codec_error=exchange.memory.codec_error,
    )


def _has_one_arithmetic(ballots: list[Ballot]) -> bool:
    return len({ballot.arithmetic for ballot in ballots}) == 1


def _divergence(turnout: Turnout) -> float:
    """Return the root mean square of the cells' updates, weighed as they are."""
    assert turnout.norms is not None, "checked by who asks for it"
    squares = [turnout.weights[cell] * turnout.norms[cell] * turnout.norms[cell] for cell in turnout.cells]
    return math.sqrt(total_of(squares) / math.fsum(turnout.weights))
