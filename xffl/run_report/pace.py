"""The slowest cell of a run: which cell the others wait for in its rounds, and for how long.

Clocks of different hosts are not compared. All cells leave a blocking round together, with its second vote, so the cell
that was in it for the shortest time came last. In a delayed round the first vote is where a cell waits for the others.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from xffl.run_report.reader import RoundRecord, Run

__all__ = ["SlowestCells", "find_slowest_cells", "measure_waits"]

MIN_ROUNDS = 5
"""Rounds of the same cells below which nothing is concluded."""
CHANCE = 1e-3
"""Probability that a run of equal cells, with normally distributed noise, has a cell named."""
USUALLY = 0.75
"""Share of the rounds in which the slower of two cells must come later."""
MATERIAL = 0.01
"""Share of the time between rounds below which a wait does not matter."""


class SlowestCells(NamedTuple):
    """Cells that others wait for: usually one, several if these come equally late.

    ``waited`` are the seconds that another cell waits for them in a round, in the mean; ``share`` is that over the time
    from round to round.
    """

    cells: tuple[int, ...]
    waited: float
    share: float


def measure_waits(run: Run) -> list[dict[int, float]]:
    """Return for each round how long each cell waited for the one that came last; rounds of one cell are left out.

    :param run: The run.
    :return: Seconds by cell, for each round in order; at least one of them is 0.
    """
    rounds: dict[tuple[int, str], dict[int, RoundRecord]] = defaultdict(dict)
    for cell, records in sorted(run.rounds.items()):
        for record in records:
            meeting = "" if record.attendance is None else record.attendance.membership
            rounds[record.number, meeting][cell] = record  # a run that was resumed repeats a round: the last counts
    return [_waits(by_cell) for _, by_cell in sorted(rounds.items()) if len(by_cell) > 1]


def find_slowest_cells(run: Run) -> SlowestCells | None:
    """Find the cells that others wait for; ``None`` where the records show no difference beyond their noise.

    Two cells differ if one comes later in three of four rounds at least, if the mean difference is significant (a
    t-test over rounds, corrected for the number of pairs of cells), and if it is more than a hundredth of the time from
    round to round. Cells that do not differ from the slowest are named with it. At least five rounds are needed.

    :param run: The run.
    :return: The slowest cells, some but not all of the run's, or ``None``.
    """
    waits = measure_waits(run)
    cells = sorted({cell for by_cell in waits for cell in by_cell})
    period = _period(run)
    if len(cells) < 2 or period <= 0:
        return None
    means = {cell: statistics.fmean(of_round[cell] for of_round in waits if cell in of_round) for cell in cells}
    last = min(cells, key=means.__getitem__)
    lead = {cell: _differences(waits, last, cell) for cell in cells if cell != last}
    chance = CHANCE / (len(cells) * (len(cells) - 1))
    faster = {
        cell: lead_over for cell, lead_over in lead.items() if _is_beyond_noise(lead_over, MATERIAL * period, chance)
    }
    if not faster:
        return None
    slowest = tuple(cell for cell in cells if cell not in faster)
    waited = statistics.fmean(statistics.fmean(lead_over) for lead_over in faster.values())
    return SlowestCells(slowest, waited, waited / period)


def _waits(by_cell: Mapping[int, RoundRecord]) -> dict[int, float]:
    if all(record.is_delayed for record in by_cell.values()):
        votes = {cell: record.phases.get("vote", 0.0) for cell, record in by_cell.items()}
        first = min(votes.values())
        # What local steps have hidden was no wait.
        return {cell: min(vote - first, by_cell[cell].phases["wait"]) for cell, vote in votes.items()}
    # Writing the new values follows the second vote, and takes as long as the cell's own hardware needs.
    inside = {cell: record.seconds - record.phases.get("commit", 0.0) for cell, record in by_cell.items()}
    shortest = min(inside.values())
    return {cell: seconds - shortest for cell, seconds in inside.items()}


def _differences(waits: Sequence[Mapping[int, float]], later: int, sooner: int) -> list[float]:
    """Return by how much one cell came later than another in each round of both."""
    return [of_round[sooner] - of_round[later] for of_round in waits if later in of_round and sooner in of_round]


def _is_beyond_noise(differences: Sequence[float], material: float, chance: float) -> bool:
    if len(differences) < MIN_ROUNDS:
        return False
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    usually = sum(difference > 0 for difference in differences) / len(differences)
    needed = _t_quantile(chance, len(differences) - 1)
    return mean > material and mean > needed * error and usually >= USUALLY


def _t_quantile(chance: float, freedom: int) -> float:
    """Return what Student's t exceeds with a small probability (Abramowitz and Stegun, 26.7.5, to the second order)."""
    z = statistics.NormalDist().inv_cdf(1 - chance)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _period(run: Run) -> float:
    """Return the seconds from one round to the next, in the median, so that a pause of the run does not count."""
    gaps = [
        after.time - before.time
        for records in run.rounds.values()
        for before, after in pairwise(records)
        if after.number > before.number
    ]
    return statistics.median(gaps) if gaps else 0.0
