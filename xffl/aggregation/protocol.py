"""How a round is agreed on: the vote that opens it, the exchange, and the vote on what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from xffl.aggregation.exchange import Exchange
from xffl.aggregation.torn import TornError
from xffl.aggregation.tracks import Turnout
from xffl.aggregation.vote import CLOSING, Ballot, cast, cell_weights, check_rounds
from xffl.distributed.agreement import agree
from xffl.errors import ConfigError, RoundError, XfflError
from xffl.topology import Topology

__all__ = ["Outcome", "Protocol"]


@dataclass(frozen=True)
class Outcome:
    """A round that all ranks have agreed to take.

    :param turnout: Whose values counted.
    :param dropped: Cells that were left out for values that are not finite.
    :param is_last: Whether all ranks had finished.
    :param is_empty: Whether no cell had anything for this part of the model, so that nothing moved.
    """

    turnout: Turnout
    dropped: tuple[int, ...]
    is_last: bool
    is_empty: bool = False


class Protocol:
    """The votes around an exchange.

    :param exchange: What moves.
    :param topology: The federation.
    :param rank: This rank.
    :param device: Where the groups' backend communicates from.
    :param group: A group of all ranks for the votes; ``None`` for the world.
    :param atomic: Whether the exchange leaves the model as it is.
    :param drops_cells: Whether a cell with values that are not finite is left out, instead of rejecting the round.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        topology: Topology,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        atomic: bool,
        drops_cells: bool,
    ) -> None:
        self._exchange = exchange
        self._topology = topology
        self._rank = rank
        self._device = device
        self._group = group
        self._atomic = atomic
        self._drops_cells = drops_cells
        self.is_over = False
        self.is_cut_off = False

    def confer(self, ballot: Ballot, fragment: int, found: list[str], error: XfflError | None) -> Outcome | None:
        """Vote, exchange, and vote on what came of it.

        Collective over the world. The new values then wait in the exchange to be committed.

        :param ballot: What this rank says at the opening.
        :param fragment: The part of the model that takes part.
        :param found: Names of this rank's tensors that hold values which are not finite.
        :param error: Why this rank cannot take part.
        :return: What was agreed; ``None`` where all ranks have finished and none had anything to give.
        :raises ConfigError: if a weight is negative or not finite, or all are zero; on all ranks.
        :raises RoundError: if the round does not take place; all ranks keep their weights.
        :raises TornError: if ranks may hold different weights now.
        """
        ballots = self._open(ballot, error)
        weights = cell_weights(ballots, self._topology)
        if self.is_over and not any(weights):
            return None
        if all(other.is_absent for other in ballots):
            return Outcome(Turnout(weights, 0, int(ballot.round)), (), False, is_empty=True)
        if not any(weights):
            raise ConfigError(f"the weights of all cells are 0 {weights}; a round needs at least one positive weight")
        bad = {self._topology.cell_of(rank) for rank, other in enumerate(ballots) if other.is_nonfinite}
        dropped = tuple(sorted(cell for cell in bad if weights[cell]))
        if dropped and not self._drops_cells:
            self._refuse_nonfinite(dropped, found)
        counted = tuple(0.0 if cell in dropped else weight for cell, weight in enumerate(weights))
        if not any(counted):
            raise RoundError(
                f"no cell with a positive weight is left after dropping cells {dropped}; all ranks keep their weights"
            )
        first = next(cell for cell in range(self._topology.cells) if cell not in dropped)
        is_fused = all(other.is_moderate for other in ballots) and len({other.arithmetic for other in ballots}) == 1
        turnout = Turnout(counted, first, int(ballot.round), is_fused)
        self._close(turnout, fragment)
        return Outcome(turnout, dropped, self.is_over)

    def _open(self, ballot: Ballot, error: XfflError | None) -> list[Ballot]:
        """Vote on whether there is a round, and with what weights."""
        number = int(ballot.round)
        try:
            with self._exchange.journal.phase("vote"):
                ballots = cast(ballot, self._device, self._topology, self._group)
        except RuntimeError as broken:
            self.is_cut_off = True
            raise RoundError(
                f"round {number} could not be opened, this rank keeps its weights: {broken}; see the other ranks' "
                "output"
            ) from broken
        self.is_over = all(other.is_finished for other in ballots)
        check_rounds(ballots, self._topology)
        if any(other.is_failed for other in ballots):
            agree(f"opening of round {number}", "", error=error, group=self._group)
        return ballots

    def _refuse_nonfinite(self, cells: tuple[int, ...], found: list[str]) -> None:
        """Raise on all ranks, with the cell and the tensors that a rank of it has found."""
        error: XfflError | None = None
        cell = self._topology.cell_of(self._rank)
        if cell in cells and found:
            error = RoundError(
                f"cell {cell} holds values that are not finite in {', '.join(map(repr, found[:3]))}; all ranks keep "
                "their weights; nonfinite='drop_cell' leaves the cell out, policy 'first' or 'local' the tensor"
            )
        agree("finite values", "", error=error, group=self._group)

    def _close(self, turnout: Turnout, fragment: int) -> None:
        """Exchange, and vote on the outcome."""
        number = turnout.number
        failure: Exception | None = None
        try:
            self._exchange.run(turnout, fragment)
            failure = self._exchange.journal.failure
        except Exception as error:  # noqa: BLE001 - told to all ranks by the vote
            failure = error
        except BaseException as stop:
            if not self._atomic:
                raise TornError(f"round {number} was interrupted by {type(stop).__name__}") from stop
            raise
        try:
            with self._exchange.journal.phase("vote"):
                ballots = cast(
                    Ballot(number + CLOSING, is_failed=failure is not None), self._device, self._topology, self._group
                )
            check_rounds(ballots, self._topology)
            is_agreed = not any(other.is_failed for other in ballots)
            reasons = [] if is_agreed else self._gather_reasons(failure)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the outcome is unknown
            why = failure or error
            if not isinstance(error, Exception):
                why = error
            raise TornError(
                f"the outcome of round {number} could not be learned ({why or type(why).__name__})"
            ) from why
        if is_agreed:
            return
        told = "; ".join(
            f"rank {rank} (cell {self._topology.cell_of(rank)}): {why}" for rank, why in enumerate(reasons) if why
        )
        if not self._atomic:
            raise TornError(f"round {number} failed with atomic=False: {told}") from failure
        raise RoundError(f"round {number} was not taken, all ranks keep their weights of before: {told}") from failure

    def _gather_reasons(self, failure: Exception | None) -> list[str]:
        """Return each rank's reason for its no; collective over the world."""
        reasons: list[str] = [""] * self._topology.world_size
        told = "" if failure is None else f"{type(failure).__name__}: {failure}"
        dist.all_gather_object(reasons, told, group=self._group)
        return reasons
