"""Interleaved pairs of two contenders: what their times say, and the record of it."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

import xffl


def summary(
    first: Sequence[float],
    second: Sequence[float],
    first_cpu: Sequence[float],
    second_cpu: Sequence[float],
    steps: int,
) -> dict[str, Any]:
    """Return the median ratio of pairs (first / second: 1 is as fast), and what the second adds to a step.

    Times are in seconds for ``steps`` steps, pair by pair. ``ratio_lower_95`` is the lower end of the median's 95 %
    confidence interval, by order statistics.
    """
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    added = [1e6 * (b - a) / steps for a, b in zip(first_cpu, second_cpu, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_lower_95": ratios[lower_rank(len(ratios))],
        "step_ms": 1e3 * statistics.median(second) / steps,
        "cpu_added_us_per_step": statistics.median(added),
        "ratios": ratios,
    }


def lower_rank(count: int) -> int:
    """Return the place of the ordered sample that the median lies above with a probability of 95 % at least.

    The number of samples below the median is binomial with one half.
    """
    below, place = 0.0, 0
    while (below := below + math.comb(count, place) / 2**count) <= 0.05:
        place += 1
    return max(place - 1, 0)


def write_record(benchmark: str, options: argparse.Namespace, found: dict[str, Any] | None) -> None:
    """Write what was found, and on which machine, to ``options.out``, if there is anything to write and to write to."""
    if found is None or options.out is None:
        return
    record = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "xffl": xffl.__version__},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        **found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
