"""How long a round takes and what share of the time is left for training, from sizes, rates and latencies alone.

A round is simulated bucket by bucket on what the rank with most to do has: a processor, a share of the slow link, a
card at home. Cells of one size are alike, so one of each size is simulated; a forecast for thousands of ranks takes
milliseconds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xffl.checks import integer
from xffl.costs import FORMS, IN_FLIGHT, STATUS_BYTES, form_of, pipeline_depth
from xffl.errors import ConfigError
from xffl.planning.pipeline import Link, Pace, Stages, follow
from xffl.topology import Topology

__all__ = ["ASSUMPTIONS", "RoundForecast", "StepForecast", "forecast_data_parallel", "forecast_round"]

BACKENDS = ("gloo", "nccl")
BUCKET_BYTES = 4 * 2**20
STREAMS = 4
"""Groups on which buckets take turns over NCCL, which works off those of a group one after the other."""
HOME_LAG = 2
"""Buckets after which a broadcast at home is waited for."""
CODING = 4
"""Passes over values that writing or reading a code is worth."""
ROUNDING = 1e-9
"""Share of the time in which the link is busy below which a pause is one of arithmetic."""
BACKWARD_SHARE = 2 / 3
"""Share of a step that its backward pass takes."""

ASSUMPTIONS = (
    "rates are what a payload gets; latencies are one way, half of what ping shows",
    "a cell's slow link is full-duplex and shared evenly by those who send, unless each has its own",
    "gloo: a bucket crosses once its receiver has said that it is ready, a word that queues behind the receiver's own "
    "data; it is sent some buckets ahead, in the second of two hops with the bucket while others cross; nccl: a bucket "
    "is pushed at once, four at a time",
    "at home one bucket after another is broadcast along a binomial tree, while the next two are combined",
    "values are looked over before the first vote and, with atomic, written after the second; to combine, every "
    "cell's value is read once; over gloo, with atomic, no codec and no delay, two cells without replicas look fp32 "
    "values over when they are sent, and combine them when they are written; all of it at the memory's rate, coding at "
    "a quarter of it",
    "in each of the two votes ballots go up a binary tree in each cell, from its first rank to all others' and down; "
    "gloo: the first step at home and the crossing begin with a word of the receiver, one latency more",
    "with a delay, local steps hide everything but looking over and writing, as far as they last",
    "data parallelism: gradients are summed at home, in a ring over the cells, and handed round, all at the same "
    "time, behind the backward pass (2/3 of a step) as far as it lasts",
)
"""What forecasts take for granted."""


@dataclass(frozen=True)
class RoundForecast:
    """What a round will cost.

    :param form: ``all_gather`` or ``two_hop``.
    :param seconds: From the call to the new weights.
    :param phases: What ``seconds`` consist of: ``vote`` (both), ``pack`` (the values are looked over), ``fill`` (until
        the slow link starts), ``across`` (it is busy), ``stall`` (it waits, between buckets), ``drain`` (the last
        buckets arrive, are combined and handed round at home), ``commit`` (the new values are written).
    :param busy: Seconds of work on buckets by a sender's ``processor`` (combining and coding), the slow link
        (``across``) and the sender's card at ``home``; they overlap.
    :param exposed: Seconds by which the round delays training: ``seconds`` less what local steps hide.
    :param utilization: Share of the time that is spent on local steps, 0 to 1.
    :param buckets: Buckets that a rank carries across; the last one may be a part.
    :param bytes_across_per_cell: Bytes that each cell sends to the others.
    :param bytes_across: The same over all cells.
    :param bytes_home: Bytes between replicas at home, over all cells.
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


@dataclass(frozen=True)
class _Way:
    """How buckets go, whatever the size of a cell."""

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
    is_late: bool

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
        if self.is_late:
            hops, combine = (sent,), (0.0,)
        elif self.form == "all_gather" and self.cells > 1:
            hops, combine = (sent,), (self.cells * (once + code),)
        elif self.cells > 1:
            # Each cell combines its part, and writes and reads the code of the result.
            hops, combine = (sent / 2, sent / 2), (once + code + 2 * code / self.cells, code)
        return Stages(
            # What was sent is what the sender goes on with: it reads its own code.
            pack=once if self.is_late else 2 * code,
            hops=hops,
            combine=combine,
            latency=self.link.latency_s,
            is_asked=self.is_asked,
            home=self.home.seconds(bucket * depth * (replicas if self.rails else 1)),
            home_latency=self.home.latency_s * depth,
        )

    def pace(self, replicas: int, bucket: float, buckets: float) -> Pace:
        """Return how many of a rank's own buckets are under way; home is counted in everybody's."""
        depth = pipeline_depth(bucket, buckets, self.cells, self.form)
        depth = depth if self.is_asked else min(depth, STREAMS)
        return Pace(
            depth,
            (depth if self.is_late else depth // 2) if self.is_asked else 0,
            HOME_LAG // (replicas if self.rails else 1),
        )


class _Walk(NamedTuple):
    """The exchange in a cell, without the votes."""

    seconds: float
    phases: dict[str, float]
    busy: dict[str, float]
    buckets: float


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
    memory_gbps: float = 800.0,
    backend: str = "gloo",
) -> RoundForecast:
    """Forecast a federated round and the utilization that it leaves.

    Local and pure; no process group is needed. What is taken for granted is listed in :data:`ASSUMPTIONS`. Utilization
    as in Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): time computing over time computing and waiting.

    :param topology: The federation.
    :param parameters: Number of parameters that are averaged, above 0.
    :param link: Each cell's link to the others.
    :param home: Each rank's card at home.
    :param step_s: Seconds of a local step.
    :param every: Local steps between two rounds, at least 1.
    :param bytes_per_parameter: Bytes of a parameter in the model: 4 for fp32, 2 for bf16.
    :param form: ``all_gather``, ``two_hop``, or ``auto``: as the aggregator chooses.
    :param rails: Whether every replica of a shard carries a part of its buckets, instead of one sender.
    :param own_links: Whether every rank that sends has a link of its own, instead of one for its cell.
    :param codec_ratio: Bytes that cross over bytes of the model, above 0; see :func:`~xffl.costs.codec_ratio`.
        ``None``: values cross as they are. A codec takes time even if its ratio is 1 (bf16 for a model in bf16).
    :param bucket_bytes: Bytes of the model in a bucket, at least 1.
    :param fragments: Parts of the model, of which a round exchanges one; at least 1.
    :param delay: Local steps after which the result is merged, below ``every``; 0 waits for it. Needs ``atomic``.
    :param atomic: Whether new values are collected beside the model.
    :param memory_gbps: Rate at which a rank passes over values in its memory, in Gbit/s.
    :param backend: ``gloo``, which the forecast has been compared with on an emulated link, or ``nccl``.
    :return: The forecast, by the size of cell that takes longest.
    :raises ConfigError: if an argument cannot be meant.
    """
    _above_zero(parameters=parameters, bytes_per_parameter=bytes_per_parameter, step_s=step_s)
    if codec_ratio is not None:
        _above_zero(codec_ratio=codec_ratio)
    every, bucket_bytes = integer("every", every), integer("bucket_bytes", bucket_bytes)
    fragments, delay = integer("fragments", fragments), integer("delay", delay, 0)
    for what, choice, choices in (("form", form, FORMS), ("backend", backend, BACKENDS)):
        if choice not in choices:
            raise ConfigError(f"{what} {choice!r} is unknown; choose one of {', '.join(choices)}")
    _check_delay(delay, every, atomic=atomic)
    cells, model = topology.cells, parameters * bytes_per_parameter / fragments
    kinds = {size: topology.sizes.index(size) for size in topology.sizes}.values()
    smallest = model / max(topology.shards(cell) for cell in kinds)
    memory, is_asked, most = Link(memory_gbps), backend == "gloo", max(topology.replica_counts)
    is_plain = atomic and not delay and not rails and codec_ratio is None and bytes_per_parameter == 4
    is_late = is_plain and is_asked and cells == 2 and most == 1 and form != "two_hop"
    form = "all_gather" if is_late else form_of(smallest, cells, form, is_exact=codec_ratio is None)
    way = _Way(form, cells, link, home, memory, rails, own_links, codec_ratio, bucket_bytes, atomic, is_asked, is_late)
    walks = [_walk(way, topology.shards(cell), topology.replicas(cell), model, most) for cell in kinds]
    longest = max(walks, key=lambda walk: walk.seconds)
    votes = 2 * _vote_seconds(topology, link, home, is_asked=is_asked)
    seconds, phases = votes + longest.seconds, {"vote": votes, **longest.phases}
    always = phases["pack"] + phases["commit"]
    exposed = always + max(0.0, seconds - always - delay * step_s)
    return RoundForecast(
        form=form,
        seconds=seconds,
        phases=phases,
        busy=longest.busy,
        exposed=exposed,
        utilization=every * step_s / (every * step_s + exposed),
        buckets=longest.buckets,
        bytes_across_per_cell=way.crossing(model),
        bytes_across=way.crossing(model) * cells,
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
    :param home: Each rank's card at home.
    :param step_s: Seconds of a step without this communication.
    :param bytes_per_parameter: Bytes of one parameter's gradient as it crosses.
    :param own_links: Whether every rank has a link of its own, instead of one for its cell.
    :return: The forecast, by the size of cell that takes longest.
    :raises ConfigError: if an argument cannot be meant.
    """
    _above_zero(parameters=parameters, bytes_per_parameter=bytes_per_parameter, step_s=step_s)
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


def _walk(way: _Way, shards: int, replicas: int, model: float, most: int) -> _Walk:
    """Forecast the exchange of ``model`` bytes in a cell of that shape, where a cell has ``most`` replicas at most."""
    bucket = float(way.bucket_bytes)
    if way.rails:
        bucket = min(bucket, model / shards / (IN_FLIGHT * most))  # so that all have some to carry
    stages = way.stages(shards, replicas, bucket)
    buckets = model / (shards * (replicas if way.rails else 1) * bucket)
    course = follow(stages, buckets, way.pace(replicas, bucket, buckets))
    across = buckets * sum(stages.hops)
    stall = course.last - course.first - across
    once = way.memory.seconds(model / shards)
    phases = {
        "pack": 0.0 if way.is_late else once,
        "fill": course.first,
        "across": across,
        "stall": stall if stall > ROUNDING * across else 0.0,
        "drain": course.end - course.last,
        "commit": (way.cells if way.is_late else 1) * once if way.atomic else 0.0,
    }
    busy = {
        "processor": buckets * (stages.pack + sum(stages.combine)),
        "across": across,
        "home": buckets * stages.home,
    }
    return _Walk(sum(phases.values()), phases, busy, buckets)


def _vote_seconds(topology: Topology, link: Link, home: Link, *, is_asked: bool) -> float:
    """Return the time of one vote: up a binary tree in each cell, from its root to the others', and down again."""
    ranks, largest, cells = topology.world_size, max(topology.sizes), topology.cells
    depth = largest.bit_length() - 1
    # Below the first step, words are there before their data.
    latencies = home.latency_s * (2 * depth + bool(is_asked and depth))
    ballots = 2 * depth * (largest + ranks)  # a parent has two children
    crossing = 0.0
    if cells > 1:
        crossing = link.latency_s * (2 if is_asked else 1)
        # As much as leaves the largest cell, or reaches the smallest.
        crossing += link.seconds(STATUS_BYTES * max((cells - 1) * largest, ranks - min(topology.sizes)))
    return latencies + home.seconds(STATUS_BYTES * ballots) + crossing


def _check_delay(delay: int, every: int, *, atomic: bool) -> None:
    if delay >= every:
        raise ConfigError(f"delay {delay} is not below the {every} steps between two rounds; give at most {every - 1}")
    if delay and not atomic:
        raise ConfigError(
            f"delay {delay} needs new values beside the model, which trains on meanwhile; leave atomic=False "
            "(--in-place) out"
        )


def _above_zero(**values: object) -> None:
    for what, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{what} {value!r} is no finite number above 0; give one")
