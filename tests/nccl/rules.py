"""NCCL's rules, played on the traces of all ranks: who hangs, and what does not fit together.

The host of a rank goes on until it waits. A call begins on the GPU once what its stream waits for has ended, and the
call before it in its group; it ends once the calls that it meets have begun on all their ranks. Calls of a group that a
rank aborts end by that, or by the time that the others wait for them at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.nccl.traces import Abort, Call, Group, HostWait, Join, Mark, Record, Wait

__all__ = ["faults_of"]

OWN_PAIRS = ("torch/distributed/pipelining/", "parallel/axes/pipeline")
"""Where single messages are meant: stages of a pipeline, which connect pair by pair, in one order on both sides."""


@dataclass(eq=False)
class _Work:
    """A call on the GPU of one rank."""

    rank: int
    call: Call
    after: list[_Work]
    """What it begins after."""
    partners: int
    """How many calls of other ranks it needs."""
    met: list[_Work] = field(default_factory=list)
    has_begun: bool = False
    has_ended: bool = False


class _Rank:
    """One rank while its trace is played."""

    def __init__(self, trace: Sequence[Record]) -> None:
        self.trace = trace
        self.place = 0
        self.streams: defaultdict[int, list[_Work]] = defaultdict(list)
        self.events: dict[int, list[_Work]] = {}
        self.groups: dict[Group, _Work] = {}
        self.works: dict[int, _Work] = {}

    def awaited(self, wait: HostWait) -> list[_Work]:
        """Return what a wait of the host is for."""
        if wait.event is not None:
            return self.events.get(wait.event, [])
        if wait.stream is not None:
            return self.streams[wait.stream]
        return [*self.works.values()]


class _Play:
    def __init__(self, traces: Sequence[Sequence[Record]]) -> None:
        self.ranks = [_Rank(trace) for trace in traces]
        self.faults: list[str] = []
        self.connecting: defaultdict[Group, dict[int, Call]] = defaultdict(dict)
        self.connected: set[Group] = set()
        self.aborted: set[Group] = set()
        self.under_way: list[_Work] = []
        self.rows: defaultdict[tuple[Group, int], list[_Work]] = defaultdict(list)
        """Calls of all ranks that meet each other: the first of a group, the second, ..."""
        self.counts: defaultdict[tuple[Group, int], int] = defaultdict(int)
        self.mail: defaultdict[tuple[Group, str, int, int], list[tuple[_Work, int]]] = defaultdict(list)
        """Messages that nobody has met, by operation, sender and receiver."""

    def run(self) -> list[str]:
        while sum(self._advance(number) for number in range(len(self.ranks))):
            self._settle()
        for number, rank in enumerate(self.ranks):
            if rank.place < len(rank.trace):
                self.faults.append(f"rank {number} hangs in {_text(rank.trace[rank.place])}")
        for group, calls in self.connecting.items():
            if group not in self.connected:
                first = min(calls)
                self.faults.append(
                    f"group {group[0]} of {[*group[1]]} is first used by ranks {sorted(calls)} only, at "
                    f"{calls[first].at}"
                )
        self.faults += [f"rank {work.rank}: {_text(work.call)} never ends" for work in self.under_way]
        return self.faults

    def _advance(self, number: int) -> bool:
        """Let a rank's host go on until it waits; whether it did."""
        rank, start = self.ranks[number], self.ranks[number].place
        while rank.place < len(rank.trace) and self._does(number, rank, rank.trace[rank.place]):
            rank.place += 1
        return rank.place > start

    def _does(self, number: int, rank: _Rank, record: Record) -> bool:
        """Let the host do one thing, unless it has to wait."""
        if isinstance(record, Call):
            return self._call(number, rank, record)
        if isinstance(record, Abort):
            self._abort(record.group)
        elif isinstance(record, Join):
            rank.streams[record.stream].append(rank.works[record.call])
        elif isinstance(record, Mark):
            still = [work for work in rank.streams[record.stream] if not work.has_ended]
            rank.streams[record.stream], rank.events[record.event] = still, [*still]
        elif isinstance(record, Wait):
            rank.streams[record.stream] += rank.events.get(record.event, [])
        elif isinstance(record, HostWait):
            self._settle()
            return all(work.has_ended for work in rank.awaited(record))
        return True

    def _call(self, number: int, rank: _Rank, call: Call) -> bool:
        group = call.group
        if call.kind == "single":  # NCCL connects these two by themselves, beside the group
            if not call.at.startswith(OWN_PAIRS):
                self._say(number, call, "is no batch: NCCL connects the two by themselves, which takes memory and time")
            pair = tuple(sorted((number, call.moves[0].peer)))
            group = (f"{group[0]} {pair}", pair)
        if group not in self.connected:
            self.connecting[group][number] = call
            if len(self.connecting[group]) < len(group[1]):
                return False
            self.connected.add(group)
        before = [rank.groups[group]] if group in rank.groups else []
        partners = len(call.moves) if call.moves else len(group[1]) - 1
        work = _Work(number, call, [*rank.streams[call.stream], *before], partners)
        rank.groups[group] = rank.works[rank.place] = work
        if group in self.aborted:
            work.has_begun = work.has_ended = True
            return True
        self.under_way.append(work)
        if call.moves:
            self._post(number, group, work)
        else:
            row = self.rows[group, self.counts[group, number]]
            self.counts[group, number] += 1
            for other in row:
                theirs = other.call
                if (theirs.kind, theirs.tensors, theirs.options) != (call.kind, call.tensors, call.options):
                    self._say(number, call, f"meets {_text(theirs)} of rank {other.rank}")
                _meet(work, other)
            row.append(work)
        return True

    def _abort(self, group: Group) -> None:
        """End what was given to a group, and what other ranks still give to it."""
        self.aborted.add(group)
        for work in [work for work in self.under_way if work.call.group == group]:
            work.has_begun = work.has_ended = True
            self.under_way.remove(work)

    def _post(self, number: int, group: Group, work: _Work) -> None:
        """Match messages between two ranks by their order, as NCCL does."""
        for move in work.call.moves:
            ends = (number, move.peer) if move.operation == "send" else (move.peer, number)
            waiting = self.mail[(group, "recv" if move.operation == "send" else "send", *ends)]
            if not waiting:
                self.mail[(group, move.operation, *ends)].append((work, move.numel))
                continue
            other, numel = waiting.pop(0)
            if numel != move.numel:
                self._say(number, work.call, f"{move.operation}s {move.numel} where rank {other.rank} has {numel}")
            _meet(work, other)

    def _settle(self) -> None:
        """Let the GPUs do what they can."""
        while sum(self._step(work) for work in list(self.under_way)):
            """Until nothing more begins or ends."""

    def _step(self, work: _Work) -> bool:
        before = work.has_begun, work.has_ended
        work.has_begun = work.has_begun or all(other.has_ended for other in work.after)
        is_met = len(work.met) == work.partners and all(other.has_begun for other in work.met)
        if work.has_begun and is_met:
            work.has_ended = True
            self.under_way.remove(work)
        return before != (work.has_begun, work.has_ended)

    def _say(self, number: int, call: Call, what: str) -> None:
        self.faults.append(f"rank {number}: {_text(call)} {what}")


def faults_of(traces: Sequence[Sequence[Record]]) -> list[str]:
    """Play the ranks' traces by NCCL's rules.

    :param traces: What each rank has asked for, by rank.
    :return: What hangs or does not fit, as text; nothing where all is well.
    """
    return _Play(traces).run()


def _meet(one: _Work, other: _Work) -> None:
    one.met.append(other)
    other.met.append(one)


def _text(record: Record) -> str:
    return "".join(_parts(record))


def _parts(record: Record) -> Iterator[str]:
    if isinstance(record, Call):
        yield f"{record.kind} at {record.at} over {record.group[0]}"
        yield f" ({record.options})" if record.options else ""
        yield f" of {', '.join(f'{numel} {dtype}' for numel, dtype in record.tensors[:4])}" if record.tensors else ""
    elif isinstance(record, HostWait):
        yield f"a wait of the host at {record.at}"
    else:
        yield repr(record)
