"""Buckets on their way through a rank's processor, the slow link and the network at home: a small simulation."""

from __future__ import annotations

import heapq
import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

from xffl.errors import ConfigError

__all__ = ["Course", "Link", "Pace", "Stages", "follow", "simulate"]

SIMULATED = 1024
"""Buckets, for each one in flight, that are simulated before the rest is extrapolated."""


@dataclass(frozen=True)
class Link:
    """A link, full-duplex.

    :param rate_gbps: What a payload gets in one direction, in Gbit/s (10^9 bits/s); infinity is allowed.
    :param latency_s: Seconds until the first byte is there, one way.
    :raises ConfigError: if a number cannot be meant.
    """

    rate_gbps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for what, value in (("rate_gbps", self.rate_gbps), ("latency_s", self.latency_s)):
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ConfigError(f"{what} {value!r} is no number; give the link's rate in Gbit/s, latency in seconds")
        if not self.rate_gbps > 0:
            raise ConfigError(f"rate_gbps {self.rate_gbps} is not above 0; give the link's rate in Gbit/s, such as 10")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s {self.latency_s} is not 0 or more; give one way's seconds, such as 0.01")

    def seconds(self, size: float) -> float:
        """Return how long ``size`` bytes keep one direction of the link busy.

        :param size: In bytes.
        :return: In seconds.
        """
        return size * 8e-9 / self.rate_gbps


class Stages(NamedTuple):
    """Seconds that a full bucket needs of each resource of a rank, and the latencies between them.

    :param pack: Of the processor, before the bucket crosses.
    :param hops: Of the slow link, for each hop.
    :param combine: Of the processor, after each hop.
    :param latency: From one end of the slow link to the other.
    :param is_asked: Whether a bucket waits for its receiver's word that it is ready (gloo).
    :param home: Of the network at home; 0 where there is nobody to hand it to.
    :param home_latency: Until the last replica has the last byte.
    """

    pack: float
    hops: tuple[float, ...]
    combine: tuple[float, ...]
    latency: float
    is_asked: bool
    home: float
    home_latency: float


class Pace(NamedTuple):
    """How many buckets a rank has under way.

    :param in_flight: In each hop, at least 1: so many start before the oldest one is waited for.
    :param ahead: Between the moment when a bucket is asked for and the moment when it is sent, on the first hop.
    :param home_lag: Between the moment when a bucket is handed round at home and the moment when it is waited for.
    """

    in_flight: int
    ahead: int = 0
    home_lag: int = 0


class Course(NamedTuple):
    """When the slow link starts and when it stops, and when the last bucket has been handed round; in seconds."""

    first: float
    last: float
    end: float


class _Wire:
    """One direction of the slow link: what has been allowed to go leaves in the order in which it was.

    What still waits for its receiver's word holds up nothing else. A rank waits for its buckets one after the other, so
    whatever it posts later is allowed later than all that it has waited for.
    """

    def __init__(self, latency: float, is_asked: bool) -> None:
        self._latency = latency
        self._is_asked = is_asked
        self._waiting: list[tuple[float, int, float]] = []
        self._ends: list[float] = []
        self.first = math.inf
        self.free = 0.0

    def ask(self, now: float) -> float:
        """Return when the sender hears that its receiver is ready.

        That word shares a connection with the receiver's own data: it waits behind all that has been allowed by then.
        """
        self._move(now)
        return max(now, self.free) + self._latency

    def post(self, now: float, heard: float, seconds: float) -> int:
        """Send a bucket as soon as its receiver has been heard; return its number."""
        heapq.heappush(self._waiting, (max(now, heard) if self._is_asked else now, len(self._ends), seconds))
        self._ends.append(math.nan)
        return len(self._ends) - 1

    def arrival(self, number: int) -> float:
        """Return when a bucket has arrived that is waited for."""
        while math.isnan(self._ends[number]):
            self._move(self._waiting[0][0])
        return self._ends[number] + self._latency

    def _move(self, until: float) -> None:
        """Let go what has been allowed to by then."""
        while self._waiting and self._waiting[0][0] <= until:
            allowed, number, seconds = heapq.heappop(self._waiting)
            start = max(self.free, allowed)
            self.first = min(self.first, start)
            self.free = self._ends[number] = start + seconds


def simulate(stages: Stages, buckets: int, last: float, pace: Pace) -> Course:
    """Walk buckets through a rank's resources, in the order in which the exchange does.

    :param stages: What a full bucket needs.
    :param buckets: Number of buckets, at least 1.
    :param last: Size of the last one, as a share of a full one.
    :param pace: Buckets under way.
    :return: The course.
    """
    hops = len(stages.hops)
    processor = home = 0.0
    wire = _Wire(stages.latency, stages.is_asked)
    heard, handed, sent = [0.0] * buckets, [0.0] * buckets, [0] * buckets
    # The steps of a bucket: it is packed and asked for, is sent, arrives once for each hop, and has been handed round.
    turns = [0, *(pace.ahead + hop * pace.in_flight for hop in range(hops + 1))]
    turns.append(turns[-1] + pace.home_lag)
    # The oldest bucket first: what has arrived goes on before another one starts.
    steps = sorted(range(len(turns)), key=lambda step: -turns[step])
    for turn in range(buckets + turns[-1]):
        for step in steps:
            bucket, hop = turn - turns[step], step - 1
            if not 0 <= bucket < buckets:
                continue
            size = last if bucket == buckets - 1 else 1.0
            if hop < 0:
                processor += stages.pack * size
            elif hop > hops:
                processor = max(processor, handed[bucket])
                continue
            elif hop:
                processor = max(processor, wire.arrival(sent[bucket])) + stages.combine[hop - 1] * size
            if hop and hop < hops:  # a first hop was asked for when its bucket was packed
                heard[bucket] = wire.ask(processor)
            if 0 <= hop < hops:
                sent[bucket] = wire.post(processor, heard[bucket], stages.hops[hop] * size)
            elif hop == hops and (stages.home or stages.home_latency):
                home = max(home, processor) + stages.home * size
                handed[bucket] = home + stages.home_latency
    return Course(wire.first, wire.free, processor) if hops else Course(0.0, 0.0, processor)


def follow(stages: Stages, buckets: float, pace: Pace) -> Course:
    """Simulate a walk of any length: a long one is extrapolated from where it runs steadily.

    :param stages: What a full bucket needs.
    :param buckets: Number of buckets, above 0; a fraction is the last one's size.
    :param pace: Buckets under way.
    :return: The course.
    """
    limit = SIMULATED * pace.in_flight
    if buckets <= limit:
        count = math.ceil(buckets)
        return simulate(stages, count, buckets - (count - 1), pace)
    half, full = simulate(stages, limit // 2, 1.0, pace), simulate(stages, limit, 1.0, pace)
    more = (buckets - limit) / (limit - limit // 2)
    start, last, end = (later + more * (later - sooner) for sooner, later in zip(half, full, strict=True))
    return Course(start, last, end)
