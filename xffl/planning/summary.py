"""The end of a plan: its result in three lines, and one suggestion with the effect that it would have."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from xffl.message_sizes.codecs import codec_ratio
from xffl.planning.forecast import BUCKET_BYTES, RoundForecast
from xffl.planning.text import bytes_text, seconds_text
from xffl.topology import Topology

__all__ = ["CellMemory", "PlanSummary", "RoundOptions", "find_suggestion", "summary_lines"]

FEW = 0.02
"""Share of the time in rounds below which nothing is suggested."""
WORTHWHILE = 0.8
"""A suggestion leaves at most this part of the time by which a round delays training."""
DEVICE_BYTES = 80e9
"""Memory of a device, above which another way to spread the model is suggested."""
SUGGESTED_CODEC = "int8"


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Options of a forecast of rounds, and how to forecast with others.

    :param every: Local steps between two rounds.
    :param step_s: Seconds of a local step.
    :param delay: Local steps that hide a round.
    :param bytes_per_parameter: Bytes of a parameter in the model.
    :param bucket_bytes: Bytes of a bucket.
    :param has_codec: Whether values cross in a codec.
    :param can_use_rails: Whether each replica has a link of its own that no round uses.
    :param atomic: Whether new values are collected beside the model.
    :param forecast: Forecasts with changed keywords of :func:`~xffl.planning.forecast.forecast_round`.
    """

    every: int
    step_s: float
    delay: int
    bytes_per_parameter: float
    bucket_bytes: int | None
    has_codec: bool
    can_use_rails: bool
    atomic: bool
    forecast: Callable[..., RoundForecast]


@dataclass(frozen=True, kw_only=True)
class CellMemory:
    """What a rank of the smallest cell holds beside activations.

    :param strategy: How the model is spread over the cell.
    :param dtype: Type of the weights.
    :param optimizer: Name of the optimizer.
    :param total: Bytes; ``None`` where the optimizer's depend on a width that is not given.
    :param with_codec: Bytes if rounds use a lossy codec; ``None`` where the optimizer's are not known.
    :param with_fsdp: Bytes with FSDP over the whole cell; ``None`` where that is impossible.
    :param sent: Bytes that the rank sends in a forward and backward pass; ``None`` where they are not known.
    :param is_wrapped: Whether the model's layers, which FSDP gathers one by one, are known.
    :param is_requested: Whether the plan is about the inside of a cell, and ``total`` counts gathered layers.
    """

    strategy: str
    dtype: str
    optimizer: str
    total: float | None
    with_codec: float | None
    with_fsdp: float | None
    sent: float | None
    is_wrapped: bool
    is_requested: bool


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What a plan has calculated; ``None`` where an option that it needs is missing.

    :param topology: The federation.
    :param traffic: What :func:`~xffl.planning.traffic.round_traffic` has returned.
    :param round: The forecast of a round.
    :param options: The options of that forecast.
    :param data_parallel: Share of the time for computing with data parallelism over all ranks.
    :param memory: The memory of a rank.
    """

    topology: Topology
    traffic: Mapping[str, Any] | None = None
    round: RoundForecast | None = None
    options: RoundOptions | None = None
    data_parallel: float | None = None
    memory: CellMemory | None = None


class _Remedy(NamedTuple):
    """A changed option, as the command line and as a script give it, and keywords of the forecast."""

    option: str
    argument: str
    changes: Mapping[str, Any]


def summary_lines(summary: PlanSummary) -> list[str]:
    """Write the result in three lines, and one suggestion; local and pure.

    :param summary: What the plan has calculated.
    :return: Lines for ``Round``, ``Training``, ``Memory`` and ``Try``, broken where the terminal is narrower.
    """
    parts = {
        "Round": _describe_round(summary),
        "Training": _describe_training(summary),
        "Memory": _describe_memory(summary.memory),
        "Try": find_suggestion(summary),
    }
    width = shutil.get_terminal_size((100, 24)).columns
    lines = []
    for name, text in parts.items():
        start = f"{name:<10}"
        lines += textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def find_suggestion(summary: PlanSummary) -> str:
    """Return the change to try first, with its effect, or the options that the plan lacks; local and pure."""
    if (smaller := _smaller_memory(summary.memory)) is not None:
        return smaller
    if summary.topology.cells == 1:
        if summary.memory is None:
            return "--params 8e9: the memory of a rank"
        return "nothing: one cell makes no rounds"
    if summary.traffic is None:
        return "--params 8e9 --link-gbps 10: bytes, seconds and memory"
    if summary.round is None or summary.options is None:
        missing = "" if summary.traffic["link_gbps"] is not None else "--link-gbps 10 "
        return f"--simulate {missing}--link-ms 10 --step-s 1 --every 100: the time that rounds take"
    base = summary.round
    lost = 1 - base.utilization
    if lost <= FEW:
        return f"nothing: rounds take {_percent(lost)} of the time"
    if summary.data_parallel is not None and summary.data_parallel >= 1 - FEW:
        return f"no cells: data parallelism over all ranks, training {_percent(summary.data_parallel)}"
    for remedy in _remedies(base, summary.options):
        better = summary.options.forecast(**remedy.changes)
        if better.exposed <= WORTHWHILE * base.exposed or better.utilization >= 1 - FEW:
            costs = _more_memory(summary.memory, remedy)
            return f"{remedy.option} ({remedy.argument}): {_effect(base, better)}{costs}"
    return "a faster link: no other option shortens these rounds by a fifth"


def _remedies(base: RoundForecast, options: RoundOptions) -> Iterator[_Remedy]:
    """Yield changes to try, those first that change no bit of the result."""
    if base.phases["stall"] > 0.05 * base.phases["across"]:
        mib = 4 * math.ceil((options.bucket_bytes or BUCKET_BYTES) / 2**20)
        yield _Remedy(f"--bucket-mib {mib}", f"bucket_bytes={mib} * 2**20", {"bucket_bytes": mib * 2**20})
    if options.can_use_rails:
        yield _Remedy("--rails", "rails=True", {"rails": True})
    if not options.has_codec:
        ratio = codec_ratio(SUGGESTED_CODEC, options.bytes_per_parameter)
        yield _Remedy(f"--codec {SUGGESTED_CODEC}", f'codec="{SUGGESTED_CODEC}"', {"codec_ratio": ratio})
    if options.delay == 0 and options.atomic:
        delay = math.ceil(base.seconds / options.step_s)
        if delay < options.every:
            yield _Remedy(f"--delay {delay}", f"delay={delay}", {"delay": delay})
    every = _rounded_up(base.exposed * (1 - FEW) / FEW / options.step_s)
    if every > options.every:
        yield _Remedy(f"--every {every}", f"every={every}", {"every": every})


def _effect(base: RoundForecast, better: RoundForecast) -> str:
    training = f"training {_percent(better.utilization)}"
    if better.seconds < WORTHWHILE * base.seconds:
        return f"a round of {seconds_text(better.seconds)} instead of {seconds_text(base.seconds)}, {training}"
    if better.exposed < WORTHWHILE * base.exposed:
        return f"training waits {seconds_text(better.exposed)} for a round, {training}"
    return training


def _more_memory(memory: CellMemory | None, remedy: _Remedy) -> str:
    """Write what a rank holds with a changed option, where that is more."""
    if memory is None or memory.total is None or memory.with_codec is None or "codec_ratio" not in remedy.changes:
        return ""
    if memory.with_codec <= memory.total:
        return ""
    return f"; memory {bytes_text(memory.with_codec)} instead of {bytes_text(memory.total)}"


def _describe_round(summary: PlanSummary) -> str:
    cells = summary.topology.cells
    if cells == 1:
        return "none: there is one cell, and nothing crosses between cells"
    if summary.traffic is None:
        copies = 2 * (cells - 1) / cells
        sent = "as many bytes as the model has" if cells == 2 else f"{copies:.3g} times the bytes of the model"
        return f"each cell sends {sent}, whatever its replicas"
    if summary.round is not None:
        sent = bytes_text(summary.round.bytes_across_per_cell)
        seconds, waited = seconds_text(summary.round.seconds), seconds_text(summary.round.exposed)
        return f"takes {seconds}, of which training waits {waited}; each cell sends {sent}"
    form = summary.traffic["two_hop"]
    took = "" if form["seconds"] is None else f", in {seconds_text(form['seconds'])} at least"
    return f"each cell sends {bytes_text(form['bytes_per_cell'])}{took}"


def _describe_training(summary: PlanSummary) -> str:
    if summary.topology.cells == 1:
        if summary.memory is not None and summary.memory.sent is not None:
            return f"a rank sends {bytes_text(summary.memory.sent)} in each forward and backward pass"
        return "no time goes into rounds"
    if summary.round is not None and summary.options is not None:
        period = f"a round every {summary.options.every} steps of {summary.options.step_s:g} s"
        plain = "" if summary.data_parallel is None else f"; data parallelism leaves {_percent(summary.data_parallel)}"
        return f"{_percent(summary.round.utilization)} of the time ({period}){plain}"
    seconds = None if summary.traffic is None else summary.traffic["two_hop"]["seconds"]
    if seconds is None:
        missing = "the model's size and the link's rate" if summary.traffic is None else "the link's rate"
        return f"not forecast: it needs {missing}"
    return f"99 % of the time needs {_duration(99 * seconds)} of local steps between two rounds, at least"


def _describe_memory(memory: CellMemory | None) -> str:
    if memory is None:
        return "not counted: it needs the model's size"
    if memory.total is None:
        return f"not counted: {memory.optimizer} needs the model's --width"
    is_gathered = memory.strategy in ("fsdp", "hsdp") and not memory.is_requested
    beside = "activations and gathered layers" if is_gathered else "activations"
    how = f"{memory.strategy}, {memory.dtype}, {memory.optimizer}"
    return f"{bytes_text(memory.total)} on a rank, beside {beside} ({how})"


def _smaller_memory(memory: CellMemory | None) -> str | None:
    """Return how a rank that holds more than a device has would hold less, if it can."""
    if memory is None or not memory.is_requested or memory.total is None or memory.total <= DEVICE_BYTES:
        return None
    total = bytes_text(memory.total)
    if memory.strategy in ("fsdp", "hsdp") and not memory.is_wrapped:
        return f"--layers N, the model's: FSDP then gathers one after the other; {total} is all of them at once"
    if memory.with_fsdp is not None and memory.with_fsdp <= WORTHWHILE * memory.total:
        return f"--strategy fsdp: {bytes_text(memory.with_fsdp)} on a rank instead of {total}"
    return None


def _rounded_up(number: float) -> int:
    """Round up to two digits."""
    step = int(10 ** max(0, math.floor(math.log10(max(number, 1))) - 1))
    return math.ceil(number / step) * step


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return seconds_text(seconds)
