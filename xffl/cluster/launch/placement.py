"""The order of a cell's hosts: replicas on as few hosts as possible, and hosts of one switch beside each other. Pure.

Ranks are laid over the hosts one host after the other, and cut into replicas of equal size. A replica shares a host
with the next one unless the hosts so far hold a whole number of replicas, so the fewest hosts are touched where the
hosts fall into as many groups as possible that each hold whole replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from xffl.cluster.slurm.allocation import Host

__all__ = ["order_hosts"]

_MAX_STATES = 100_000
"""Choices that are looked through for the best groups: about a second."""


def order_hosts(hosts: Sequence[Host], replica_size: int | None) -> tuple[Host, ...]:
    """Order the hosts of one cell.

    Replicas touch as few hosts as in the best of all orders, where the hosts differ in no more than a few ways (fewer
    than 100,000 choices); otherwise few. Of such orders one is taken that keeps replicas below the lowest switches.

    :param hosts: Hosts whose slots sum to a multiple of the replica size.
    :param replica_size: Ranks that hold one copy of the model; ``None`` means all.
    :return: The same hosts, those below one switch beside each other as far as the first rule allows.
    """
    places = _by_switch(hosts)
    if replica_size is None:
        return tuple(hosts[at] for at in places)
    rests = {at: hosts[at].slots % replica_size for at in places}
    order = {at: number for number, at in enumerate(places)}
    near = _group_by_switch(hosts, places, rests, replica_size)
    anywhere, _ = _most_groups(places, rests, replica_size)
    groups = near if len(near) >= len(anywhere) else anywhere
    # All hosts together hold whole replicas, and so do those that no group has taken, if choices were too many.
    taken = {at for group in groups for at in group}
    groups.append([at for at in places if at not in taken])
    groups = [group for group in groups if group]
    for group in groups:
        group.sort(key=order.__getitem__)
    return tuple(hosts[at] for group in sorted(groups, key=lambda group: order[group[0]]) for at in group)


def _by_switch(hosts: Sequence[Host]) -> list[int]:
    """Return the hosts' places, in their order, but with those below one switch beside each other."""
    seen: dict[tuple[str, ...], int] = {}

    def key(at: int) -> list[int]:
        path = hosts[at].switches
        return [seen[path[:depth]] for depth in range(1, len(path) + 1)]

    for host in hosts:
        for depth in range(1, len(host.switches) + 1):
            seen.setdefault(host.switches[:depth], len(seen))
    return sorted(range(len(hosts)), key=key)


def _group_by_switch(
    hosts: Sequence[Host], places: Sequence[int], rests: dict[int, int], replica_size: int
) -> list[list[int]]:
    """Form groups below the lowest switches first, and of what is left over below those above them."""
    groups: list[list[int]] = []
    left = list(places)
    for depth in range(max(len(host.switches) for host in hosts), -1, -1):
        pools: dict[tuple[str, ...], list[int]] = {}
        for at in left:
            pools.setdefault(hosts[at].switches[:depth], []).append(at)
        left = []
        for pool in pools.values():
            found, rest = _most_groups(pool, rests, replica_size)
            groups += found
            left += rest
    return groups


def _most_groups(places: Sequence[int], rests: dict[int, int], replica_size: int) -> tuple[list[list[int]], list[int]]:
    """Form as many groups as possible whose rests sum to whole replicas; also return the hosts that are left over."""
    waiting: dict[int, list[int]] = {}
    for at in reversed(places):  # taken from the end, so that those in front come first
        waiting.setdefault(rests[at], []).append(at)
    groups = [[at] for at in reversed(waiting.pop(0, []))]
    # Two rests that fill a replica are a group in one of the best solutions: what else they were grouped with is one.
    for rest in sorted(waiting):
        one, other = waiting[rest], waiting.get(replica_size - rest, [])
        while one and other and (one is not other or len(one) > 1):
            groups.append([one.pop(), other.pop()])
    kinds = sorted(rest for rest, members in waiting.items() if members)
    for counts in _best_groups(kinds, [len(waiting[rest]) for rest in kinds], replica_size):
        groups.append([waiting[rest].pop() for rest, count in zip(kinds, counts, strict=True) for _ in range(count)])
    return groups, sorted(at for members in waiting.values() for at in members)


def _best_groups(kinds: Sequence[int], counts: Sequence[int], replica_size: int) -> list[tuple[int, ...]]:
    """Return groups of whole replicas, each as the number of hosts of each kind; as many as possible.

    Every choice of hosts is looked through from the smallest on. The most groups in a choice are one more than in the
    best choice with one host less where the choice holds whole replicas, and else as many.

    :param kinds: Rests, all different.
    :param counts: Hosts that have each rest.
    :param replica_size: What a group's rests sum to a multiple of.
    :return: The groups.
    """
    tried = list(counts)
    while prod(count + 1 for count in tried) > _MAX_STATES:
        largest = tried.index(max(tried))
        tried[largest] //= 2
    groups = _groups_of(kinds, tried, replica_size)
    if groups and tried != list(counts):
        used = [sum(group[kind] for group in groups) for kind in range(len(kinds))]
        groups += _best_groups(kinds, [n - m for n, m in zip(counts, used, strict=True)], replica_size)
    return groups


def _groups_of(kinds: Sequence[int], counts: Sequence[int], replica_size: int) -> list[tuple[int, ...]]:
    # A choice of hosts is a number whose digits, each in a base of its own, count the hosts of each kind.
    weights = [prod(count + 1 for count in counts[:kind]) for kind in range(len(kinds))]
    states = prod(count + 1 for count in counts)
    most, totals, last = [0] * states, [0] * states, [-1] * states
    best = 0
    for state in range(1, states):
        for kind, weight in enumerate(weights):
            if state // weight % (counts[kind] + 1) and (last[state] < 0 or most[state - weight] > most[state]):
                most[state], last[state] = most[state - weight], kind
        totals[state] = totals[state - weights[last[state]]] + kinds[last[state]]
        if totals[state] % replica_size == 0:
            most[state] += 1
            best = state if most[state] > most[best] else best
    groups: list[Counter[int]] = []
    while best:
        if totals[best] % replica_size == 0:
            groups.append(Counter())
        groups[-1][last[best]] += 1
        best -= weights[last[best]]
    return [tuple(group[kind] for kind in range(len(kinds))) for group in groups]
