"""Forecast of a round's time and of the share of time left for training, from sizes, rates and latencies alone.

A round is simulated bucket by bucket on the resources of the rank with most work: a processor, a share of the slow
link, a card inside the cell. Cells of one size are alike, so one of each size is simulated; a forecast for thousands of
ranks takes milliseconds.

Where buckets in flight hide the latency, a round takes what its busiest resource is busy for, which a sum says within
2 % (``test_simulation_says_more_where_latency_is_not_hidden``). Where they do not, the link is idle between buckets and
a round may take many times as long: that is what the simulation is for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xffl.checks import integer, number, one_of
from xffl.costs import FORMS, IN_FLIGHT, MOST_IN_TABLES, form_of, pipeline_depth
from xffl.errors import ConfigError
from xffl.message_sizes.ballots import vote_message_bytes
from xffl.topology import Topology

__all__ = ["ASSUMPTIONS", "Link", "RoundForecast", "StepForecast", "forecast_data_parallel", "forecast_round"]

BACKENDS = ("gloo", "nccl")
SIMULATED = 1024
"""Buckets, for each one in flight, that are simulated before the rest is extrapolated."""
BUCKET_BYTES = 4 * 2**20
MEMORY_GBPS = 800.0
"""Rate at which a rank reads values in its memory, unless another is given."""
STREAMS = 4
"""Groups on which buckets take turns over NCCL, which processes those of one group one after the other."""
HOME_LAG = 2
"""Buckets after which a broadcast inside a cell is waited for."""
CODING = 4
"""Passes over values that take as long as encoding or decoding them."""
LATE = 4
"""Times of a bucket on the link by which a rank may be later than the one that is simulated."""
ROUNDING = 1e-9
"""A pause that is a smaller share of the link's busy time is a rounding error."""
BACKWARD_SHARE = 2 / 3
"""Share of a step that its backward pass takes."""

ASSUMPTIONS = (
    "rates are what a payload gets; latencies are one way, half of what ping shows",
    "the slow link of a cell is full-duplex and shared evenly by its senders, unless each of them has its own",
    "gloo: a bucket crosses once its receiver has said that it is ready, and that message queues behind the receiver's "
    "own data, of which what is allowed up to four bucket times later is in front of it by chance; it is sent some "
    "buckets ahead, in the second of two hops with the bucket while others cross; nccl: a bucket is sent at once, four "
    "at a time",
    "inside a cell one bucket after another is broadcast along a binomial tree, while the next two are combined",
    "values are checked before the first vote and, with atomic, written after the second; combining reads the values "
    "of each cell once; all of it at the memory's rate, coding at a quarter of it",
    "in each of the two votes the status of ranks goes up a binary tree in each cell, from its first rank to those of "
    "all others, and down; gloo: the first step inside a cell and the crossing begin with a message of the receiver, "
    "one latency more",
    "through the host's memory (pcie_gbps): a bucket is copied to the host before it is sent, and the new values to "
    "the GPU when they are written, at that rate in place of the memory's; with a delay values are copied to the host "
    "when a round starts and when it is merged; with replicas a sender copies each bucket back before it is broadcast, "
    "and all is written and merged on the GPU",
    "with a delay, local steps hide everything except checking and writing, as far as they last",
    "data parallelism: gradients are reduced in each cell, summed in a ring over the cells, and broadcast, all at the "
    "same time, behind the backward pass (2/3 of a step) as far as it lasts",
)
"""Assumptions of the forecasts."""


@dataclass(frozen=True)
class Link:
    """A link, full-duplex.

    :param rate_gbps: What a payload gets in one direction, in Gbit/s (10^9 bits/s); infinity is allowed.
    :param latency_s: Seconds until the first byte arrives, one way.
    :raises ConfigError: if a number is invalid.
    """

    rate_gbps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_gbps != math.inf:
            number("rate_gbps", self.rate_gbps, above=0, hint="give the link's rate in Gbit/s, such as 10")
        number("latency_s", self.latency_s, 0, hint="give the seconds of one way, such as 0.01")

    def seconds(self, size: float) -> float:
        """Return how long ``size`` bytes keep one direction of the link busy."""
        return size * 8e-9 / self.rate_gbps


@dataclass(frozen=True)
class RoundForecast:
    """What a round will cost.

    :param form: ``all_gather`` or ``two_hop``.
    :param seconds: From the call to the new weights.
    :param phases: Parts of ``seconds``: ``vote`` (both), ``pack`` (values are checked), ``fill`` (until the slow link
        starts), ``across`` (it is busy), ``stall`` (it waits, between buckets), ``drain`` (the last buckets arrive, are
        combined and broadcast inside the cell), ``commit`` (the new values are written).
    :param busy: Seconds of work on buckets by a sender's ``processor`` (combining and coding, and the wait for copies
        to the host), the slow link (``across``) and the sender's card inside the cell (``home``); they overlap.
    :param exposed: Seconds by which the round delays training: ``seconds`` less what local steps hide.
    :param utilization: Share of the time that is spent on local steps, 0 to 1.
    :param buckets: Buckets that a rank sends to other cells; the last one may be a part.
    :param bytes_across_per_cell: Bytes that each cell sends to the others.
    :param bytes_across: The same over all cells.
    :param bytes_home: Bytes between replicas inside their cells, over all cells.
    """

    form: str
    seconds: float
    phases: Mapping[str, float]
    busy: Mapping[str, float]
    exposed: float
    utilization: float
    buckets: float
    bytes_across_per_cell: float
    bytes_across: float
    bytes_home: float


@dataclass(frozen=True)
class StepForecast:
    """What the communication of a data-parallel step over all ranks will cost.

    :param seconds: Seconds of communication in each step.
    :param exposed: Seconds by which it delays training in each step.
    :param utilization: Share of the time that is spent on computing, 0 to 1.
    :param bytes_across_per_cell: Bytes that each cell sends to the others in each step.
    """

    seconds: float
    exposed: float
    utilization: float
    bytes_across_per_cell: float


def forecast_round(
    topology: Topology,
    *,
    parameters: float,
    link: Link,
    home: Link,
    step_s: float,
    every: int = 1,
    bytes_per_parameter: float = 4.0,
    form: str = "auto",
    rails: bool = False,
    own_links: bool = False,
    codec_ratio: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    fragments: int = 1,
    delay: int = 0,
    atomic: bool = True,
    memory_gbps: float = MEMORY_GBPS,
    backend: str = "gloo",
    pcie_gbps: float | None = None,
) -> RoundForecast:
    """Forecast a federated round and the utilization that it leaves.

    Local and pure; no process group is needed. It rests on :data:`ASSUMPTIONS`. Utilization
    as in Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): time computing over time computing and waiting.

    :param topology: The federation.
    :param parameters: Number of parameters that are averaged, above 0.
    :param link: Each cell's link to the others.
    :param home: Each rank's card inside the cell.
    :param step_s: Seconds of a local step.
    :param every: Local steps between two rounds, at least 1.
    :param bytes_per_parameter: Bytes of a parameter in the model: 4 for fp32, 2 for bf16.
    :param form: ``all_gather``, ``two_hop``, or ``auto``: as the aggregator chooses.
    :param rails: Whether every replica of a shard sends a part of its buckets, instead of one sender.
    :param own_links: Whether every rank that sends has a link of its own, instead of one for its cell.
    :param codec_ratio: Bytes that cross over bytes of the model, above 0; see
        :func:`~xffl.message_sizes.codecs.codec_ratio`. ``None``: values cross as they are. A codec takes time even if
        its ratio is 1 (bf16 for a model in bf16).
    :param bucket_bytes: Bytes of the model in a bucket, at least 1.
    :param fragments: Parts of the model, of which a round exchanges one; at least 1.
    :param delay: Local steps after which the result is merged, below ``every``; 0 waits for it. Needs ``atomic``.
    :param atomic: Whether new values are collected beside the model.
    :param memory_gbps: Rate at which a rank reads values in its memory, in Gbit/s.
    :param backend: ``gloo``, which the forecast has been compared with on an emulated link, or ``nccl``.
    :param pcie_gbps: Rate between each GPU and its host, in Gbit/s, where what crosses goes through the host's memory
        over gloo (``link_backend="gloo"`` on GPUs); ``None``: nothing is copied.
    :return: The forecast, by the size of cell that takes longest.
    :raises ConfigError: if an argument is invalid.
    """
    _check_positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter, step_s=step_s)
    _check_positive(codec_ratio=1.0 if codec_ratio is None else codec_ratio)
    every, bucket_bytes = integer("every", every), integer("bucket_bytes", bucket_bytes)
    fragments, delay = integer("fragments", fragments), integer("delay", delay, 0)
    one_of("form", form, FORMS)
    one_of("backend", backend, BACKENDS)
    pcie = None if pcie_gbps is None else Link(pcie_gbps)
    if pcie is not None and backend != "gloo":
        raise ConfigError(f"pcie_gbps {pcie_gbps} is for gloo between cells, but backend is {backend!r}; give one")
    _check_delay(delay, every, atomic=atomic)
    cells, model = topology.cells, parameters * bytes_per_parameter / fragments
    kinds = {size: topology.sizes.index(size) for size in topology.sizes}.values()
    smallest = model / max(topology.shards(cell) for cell in kinds)
    memory, is_asked = Link(memory_gbps), backend == "gloo"
    form = form_of(smallest, cells, form, is_exact=codec_ratio is None)
    route = _Route(
        form,
        cells=cells,
        link=link,
        home=home,
        memory=memory,
        rails=rails,
        own_links=own_links,
        codec_ratio=codec_ratio,
        bucket_bytes=bucket_bytes,
        atomic=atomic,
        is_asked=is_asked,
        pcie=pcie,
        is_copied=delay > 0,
    )
    return _forecast(route, topology, model, hidden_s=delay * step_s, computing_s=every * step_s)


def _forecast(route: _Route, topology: Topology, model: float, *, hidden_s: float, computing_s: float) -> RoundForecast:
    """Forecast a round of so many bytes of the model, of which local steps hide some seconds."""
    most, kinds = max(topology.replica_counts), [topology.sizes.index(size) for size in {*topology.sizes}]
    exchanges = [
        _exchange(route, shards=topology.shards(cell), replicas=topology.replicas(cell), model=model, most=most)
        for cell in sorted(kinds)
    ]
    longest = max(exchanges, key=lambda exchange: exchange.seconds)
    votes = 2 * _vote_seconds(topology, route.link, route.home, is_asked=route.is_asked)
    seconds, phases = votes + longest.seconds, {"vote": votes, **longest.phases}
    always = phases["pack"] + phases["commit"]
    exposed = always + max(0.0, seconds - always - hidden_s)
    return RoundForecast(
        form=route.form,
        seconds=seconds,
        phases=phases,
        busy=longest.busy,
        exposed=exposed,
        utilization=computing_s / (computing_s + exposed),
        buckets=longest.buckets,
        bytes_across_per_cell=route.crossing(model),
        bytes_across=route.crossing(model) * route.cells,
        bytes_home=sum(count - 1 for count in topology.replica_counts) * model,
    )


def forecast_data_parallel(
    topology: Topology,
    *,
    parameters: float,
    link: Link,
    home: Link,
    step_s: float,
    bytes_per_parameter: float = 4.0,
    own_links: bool = False,
) -> StepForecast:
    """Forecast plain data parallelism over the same ranks: all replicas' gradients are summed in every step.

    Local and pure. A favourable account of it: the gradients leave each of ``C`` cells ``2 (C-1)/C`` times in a step,
    while the backward pass runs. What happens inside a replica belongs to the step.

    :param topology: The federation.
    :param parameters: Number of parameters that train, above 0.
    :param link: Each cell's link to the others.
    :param home: Each rank's card inside the cell.
    :param step_s: Seconds of a step without this communication.
    :param bytes_per_parameter: Bytes of one parameter's gradient as it crosses.
    :param own_links: Whether every rank has a link of its own, instead of one for its cell.
    :return: The forecast, by the size of cell that takes longest.
    :raises ConfigError: if an argument is invalid.
    """
    _check_positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter, step_s=step_s)
    cells, model = topology.cells, parameters * bytes_per_parameter
    copies = 2 * (cells - 1) / cells
    seconds = 0.0
    for cell in {size: topology.sizes.index(size) for size in topology.sizes}.values():
        shards, replicas = topology.shards(cell), topology.replicas(cell)
        across = link.seconds(copies * model / (shards * replicas if own_links else 1))
        at_home = home.seconds(2 * (replicas - 1) / replicas * model / shards)
        latencies = 2 * (cells - 1) * link.latency_s + 2 * (replicas - 1) * home.latency_s
        seconds = max(seconds, max(across, at_home) + latencies)
    exposed = max(0.0, seconds - BACKWARD_SHARE * step_s)
    return StepForecast(seconds, exposed, step_s / (step_s + exposed), copies * model)


@dataclass(frozen=True)
class _Route:
    """The route of buckets, whatever the size of a cell."""

    form: str
    cells: int
    link: Link
    home: Link
    memory: Link
    rails: bool
    own_links: bool
    codec_ratio: float | None
    bucket_bytes: int
    atomic: bool
    is_asked: bool
    pcie: Link | None = None
    is_copied: bool = False
    """Whether values are copied beside the model when a round starts, and merged with it."""

    def copying(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes cross between a GPU and its host, once."""
        return 0.0 if self.pcie is None else self.pcie.seconds(nbytes)

    @property
    def copies(self) -> float:
        """How often a shard leaves its cell."""
        return self.cells - 1 if self.form == "all_gather" else 2 * (self.cells - 1) / self.cells

    def crossing(self, nbytes: float) -> float:
        """Return the bytes that leave a cell for that many of the model's."""
        return self.copies * nbytes * (1.0 if self.codec_ratio is None else self.codec_ratio)

    def stages(self, shards: int, replicas: int, bucket: float) -> Stages:
        """Return what a bucket of that many bytes needs in a cell of that shape."""
        once = self.memory.seconds(bucket)
        lanes = 1 if self.own_links else shards * (replicas if self.rails else 1)
        sent = self.link.seconds(self.crossing(bucket) * lanes)
        code = 0.0 if self.codec_ratio is None else CODING * once
        depth = math.ceil(math.log2(replicas))
        hops: tuple[float, ...] = ()
        combine: tuple[float, ...] = ()
        if self.form == "all_gather" and self.cells > 1:
            hops, combine = (sent,), (self.cells * (once + code),)
        elif self.cells > 1:
            # Each cell combines its part, and writes and reads the code of the result.
            hops, combine = (sent / 2, sent / 2), (once + code + 2 * code / self.cells, code)
        return Stages(
            # What was sent is what the sender goes on with: it reads its own code.
            pack=2 * code + self._copied_on_the_way(bucket, replicas),
            hops=hops,
            combine=combine,
            latency=self.link.latency_s,
            late=LATE * max(hops, default=0.0),
            is_asked=self.is_asked,
            home=self.home.seconds(bucket * depth * (replicas if self.rails else 1)),
            home_latency=self.home.latency_s * depth,
        )

    def _copied_on_the_way(self, bucket: float, replicas: int) -> float:
        """Return the seconds of a bucket's copies while the round exchanges: out, and where others wait for it, back.

        Back also where nothing is kept.
        """
        out, back = not self.is_copied, replicas > 1 or not self.atomic
        return self.copying(bucket) * (out + back)

    def pace(self, replicas: int, bucket: float, buckets: float) -> Pace:
        """Return how many of a rank's own buckets are under way; broadcasts are counted over all replicas."""
        depth = pipeline_depth(bucket, buckets, self.cells, self.form)
        depth = depth if self.is_asked else min(depth, STREAMS)
        return Pace(
            depth,
            depth // 2 if self.is_asked else 0,
            HOME_LAG // (replicas if self.rails else 1),
        )


class _Exchange(NamedTuple):
    """The exchange in a cell, without the votes."""

    seconds: float
    phases: dict[str, float]
    busy: dict[str, float]
    buckets: float


def _exchange(route: _Route, shards: int, replicas: int, model: float, most: int) -> _Exchange:
    """Forecast the exchange of ``model`` bytes in a cell of that shape, where a cell has ``most`` replicas at most."""
    bucket = float(route.bucket_bytes)
    if route.rails:
        bucket = min(bucket, model / shards / (IN_FLIGHT * most))  # so that all have some to send
    stages = route.stages(shards, replicas, bucket)
    buckets = model / (shards * (replicas if route.rails else 1) * bucket)
    course = follow(stages, buckets, route.pace(replicas, bucket, buckets))
    across = buckets * sum(stages.hops)
    stall = course.last - course.first - across
    once = route.memory.seconds(model / shards)
    copied = route.copying(model / shards)
    written = once if route.pcie is None or replicas > 1 else copied * (2 if route.is_copied else 1)
    phases = {
        "pack": once + (copied if route.is_copied else 0.0),
        "fill": course.first,
        "across": across,
        "stall": stall if stall > ROUNDING * across else 0.0,
        "drain": course.end - course.last,
        "commit": written if route.atomic else 0.0,
    }
    busy = {"processor": buckets * (stages.pack + sum(stages.combine)), "across": across, "home": buckets * stages.home}
    return _Exchange(sum(phases.values()), phases, busy, buckets)


def _vote_seconds(topology: Topology, link: Link, home: Link, *, is_asked: bool) -> float:
    """Return the time of one vote: up a binary tree in each cell, from its root to all others, and down again."""
    ranks, largest, cells = topology.world_size, max(topology.sizes), topology.cells
    depth = largest.bit_length() - 1
    # Only the first step waits for its receiver: further down, the receivers were ready before the data came.
    latencies = home.latency_s * (2 * depth + bool(is_asked and depth))
    # A parent has two children.
    up = largest if ranks <= MOST_IN_TABLES else (largest - 1) / 2
    ballots = 2 * depth * (vote_message_bytes(math.ceil(up), ranks) + vote_message_bytes(ranks, ranks))
    crossing = 0.0
    if cells > 1:
        crossing = link.latency_s * (2 if is_asked else 1)
        # As much as leaves the largest cell, or reaches the smallest.
        sent = [vote_message_bytes(size, ranks) for size in topology.sizes]
        crossing += link.seconds(max((cells - 1) * max(sent), sum(sent) - min(sent)))
    return latencies + home.seconds(ballots) + crossing


def _check_delay(delay: int, every: int, *, atomic: bool) -> None:
    if delay >= every:
        raise ConfigError(f"delay must be below the {every} steps between two rounds, got {delay}")
    if delay and not atomic:
        raise ConfigError(
            f"delay {delay} needs atomic rounds, since training goes on with the old values; leave "
            "atomic=False (--in-place) out"
        )


def _check_positive(**values: object) -> None:
    for what, value in values.items():
        number(what, value, above=0)


class Stages(NamedTuple):
    """Seconds that a full bucket needs of each resource of a rank, and the latencies between them."""

    pack: float
    """Of the processor, before the bucket crosses."""
    hops: tuple[float, ...]
    """Of the slow link, for each hop."""
    combine: tuple[float, ...]
    """Of the processor, after each hop."""
    latency: float
    """From one end of the slow link to the other."""
    is_asked: bool
    """Whether a bucket waits for its receiver's message that it is ready (gloo)."""
    home: float
    """Of the network inside the cell; 0 where there is no other replica."""
    home_latency: float
    """Until the last replica has the last byte."""
    late: float = 0.0
    """By which ranks may be later than the one that is simulated, when they say that they are ready."""


class Pace(NamedTuple):
    """How many buckets a rank has under way."""

    in_flight: int
    """In each hop, at least 1: so many start before the oldest one is waited for."""
    ahead: int = 0
    """From when a bucket is asked for until it is sent, on the first hop."""
    home_lag: int = 0
    """From the start of a bucket's broadcast inside the cell until it is waited for."""


class Course(NamedTuple):
    """When the slow link starts and when it stops, and when the last bucket has been broadcast; in seconds."""

    first: float
    last: float
    end: float


class _Wire:
    """One direction of the slow link: what has been allowed to go leaves in the order in which it was.

    What still waits for its receiver's message blocks nothing else. A rank waits for its buckets one after the other,
    so whatever it posts later is allowed later than all that it has waited for.
    """

    def __init__(self, stages: Stages) -> None:
        self._latency = stages.latency
        self._is_asked = stages.is_asked
        self._late = stages.late
        self._waiting: list[tuple[float, int, float]] = []
        self._ends: list[float] = []
        self.first = math.inf
        self.free = 0.0

    def ask(self, now: float) -> float:
        """Return when the sender hears that its receiver is ready.

        That message shares a connection with the receiver's own data: it waits behind all that was allowed before.
        Ranks do not keep in step, so buckets that are allowed shortly afterwards may be in front of it, too: the mean
        is taken over its coming later by up to ``Stages.late``. By the exact time all messages of a long round
        could be just ahead of a bucket, or just behind, and a longer way could make a round 9 % shorter.
        """
        if not self._is_asked:
            return now
        self._move(now)
        if not self._late:
            return max(now, self.free) + self._latency
        end = now + self._late
        start, free = now, self.free
        total = 0.0
        for allowed, free_after in self._next_until(end):
            total += (allowed - start) * max(now, free)
            start, free = allowed, free_after
        total += (end - start) * max(now, free)
        return total / self._late + self._latency

    def _next_until(self, until: float) -> Iterator[tuple[float, float]]:
        """Yield of each bucket that will be allowed by then: when, and when the link will be free after it."""
        free = self.free
        for allowed, _, seconds in sorted(self._waiting):
            if allowed > until:
                return
            free = max(free, allowed) + seconds
            yield allowed, free

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
    """Move buckets through a rank's resources in the order of the exchange; ``last`` is the size of the last one."""
    hops = len(stages.hops)
    processor = home = 0.0
    wire = _Wire(stages)
    heard, broadcast, sent = [0.0] * buckets, [0.0] * buckets, [0] * buckets
    # The steps of a bucket: it is packed and asked for, is sent, arrives once for each hop, and has been broadcast.
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
                processor = max(processor, broadcast[bucket])
                continue
            elif hop:
                processor = max(processor, wire.arrival(sent[bucket])) + stages.combine[hop - 1] * size
            if hop and hop < hops:  # a first hop was asked for when its bucket was packed
                heard[bucket] = wire.ask(processor)
            if 0 <= hop < hops:
                sent[bucket] = wire.post(processor, heard[bucket], stages.hops[hop] * size)
            elif hop == hops and (stages.home or stages.home_latency):
                home = max(home, processor) + stages.home * size
                broadcast[bucket] = home + stages.home_latency
    return Course(wire.first, wire.free, processor) if hops else Course(0.0, 0.0, processor)


def follow(stages: Stages, buckets: float, pace: Pace) -> Course:
    """Simulate any number of buckets, a fraction being the last one's size; long courses are extrapolated."""
    limit = SIMULATED * pace.in_flight
    if buckets <= limit:
        count = math.ceil(buckets)
        return simulate(stages, count, buckets - (count - 1), pace)
    half, full = simulate(stages, limit // 2, 1.0, pace), simulate(stages, limit, 1.0, pace)
    more = (buckets - limit) / (limit - limit // 2)
    start, last, end = (later + more * (later - sooner) for sooner, later in zip(half, full, strict=True))
    return Course(start, last, end)
