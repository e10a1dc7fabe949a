"""Which processes add with each other, and when: in rounds that all begin together, so that nobody comes late.

Who waits for a silent partner in one round is free again in the next one, and a silent one is waited for only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xffl.cluster.doctor.findings import Finding
from xffl.cluster.doctor.meeting import Message
from xffl.cluster.doctor.pairs import compare_pairs
from xffl.cluster.doctor.reach import peers_of

__all__ = ["ROUNDS_S", "Unit", "add_in_rounds", "pair_up", "round_limit_s"]

ROUNDS_S = 240.0
"""After this no round begins."""
_SLACK_S = 5.0


@dataclass(frozen=True)
class Unit:
    """One of those that are paired: a cell, a host, or a process of a host."""

    name: str
    node: int
    process: int
    """Number of its process with torch on the node."""
    store: tuple[str, int]
    """Address and port of the process's store."""


def pair_up(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round; nobody is in two pairs of a round.

    Everybody meets everybody; of many, those at distances 1, 2, 4, ... meet, as :func:`peers_of` says.

    :param count: How many there are.
    :return: Rounds of pairs, the lower number of each pair first.
    """
    numbers = range(count)
    rounds: list[list[tuple[int, int]]] = []
    if len(peers_of(0, numbers)) == count - 1:
        # The tournament of the circle method: an odd number gets a round off.
        circle = list(range(count + count % 2))
        for _ in circle[1:]:
            met = [(circle[at], circle[-1 - at]) for at in range(len(circle) // 2)]
            rounds.append([(min(pair), max(pair)) for pair in met if max(pair) < count])
            circle[1:] = [circle[-1], *circle[1:-1]]
        return rounds
    pairs = dict.fromkeys((min(one, other), max(one, other)) for one in numbers for other in peers_of(one, numbers))
    busy: list[set[int]] = []
    for pair in pairs:
        at = next((at for at, taken in enumerate(busy) if not taken & set(pair)), len(busy))
        if at == len(busy):
            busy.append(set())
            rounds.append([])
        busy[at] |= set(pair)
        rounds[at].append(pair)
    return rounds


def round_limit_s(timeout_s: float) -> float:
    """Return how long a host waits for its processes in one round, each of which gives up after ``timeout_s``."""
    return timeout_s + _SLACK_S


def add_in_rounds(
    units: Sequence[Unit],
    ask: Callable[[Mapping[int, Message], float], Mapping[int, Mapping[str, Any]]],
    timeout_s: float,
) -> list[Finding]:
    """Let all pairs add, round by round, and judge how it went.

    :param units: What is paired.
    :param ask: Asks nodes, each its own question, with a time limit, and returns their answers by node.
    :param timeout_s: How long an addition may take.
    :return: Findings on all-reduce.
    """
    results: dict[tuple[int, int], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    gone: dict[int, Mapping[str, Any]] = {}
    untried: list[tuple[int, int]] = []
    limit_s = round_limit_s(timeout_s)
    deadline = time.monotonic() + ROUNDS_S
    for turn, pairs in enumerate(pair_up(len(units))):
        for pair in pairs:
            if gone.keys() & set(pair):
                results[pair] = (gone.get(pair[0], {}), gone.get(pair[1], {}))
        now = [pair for pair in pairs if pair not in results]
        if time.monotonic() > deadline:
            untried += now
            continue
        questions: dict[int, Message] = {}
        for low, high in now:
            for rank, unit in enumerate((units[low], units[high])):
                message = {"turn": turn, "pair": f"{low}-{high}", "rank": rank, "store": units[low].store}
                question = {"do": "pairs", "turn": turn, "limit_s": limit_s, "processes": {}}
                questions.setdefault(unit.node, question)["processes"][str(unit.process)] = message
        answers = ask(questions, limit_s) if questions else {}
        for pair in now:
            told = (_told(units[pair[0]], answers), _told(units[pair[1]], answers))
            results[pair] = told
            # Who says nothing is asked no more; who tells of an error goes on with the others.
            gone.update({number: half for number, half in zip(pair, told, strict=True) if "turn" not in half})
    return compare_pairs([unit.name for unit in units], results, untried)


def _told(unit: Unit, answers: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what a unit's process told in a round."""
    results = answers.get(unit.node, {"results": {}})["results"]
    found: Mapping[str, Any] = results.get(str(unit.process), {"error": f"no answer from {unit.name}"})
    return found if "turn" in found else {"error": f"{unit.name}: {found['error']}"}
