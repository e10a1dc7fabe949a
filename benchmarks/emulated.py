"""Options of the benchmarks that emulate a slow link, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

__all__ = ["above_zero", "add_link_options"]


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Add what the link is like, and where the record goes."""
    parser.add_argument("--rate-mbit", type=above_zero, default=200.0, help="the link's rate, each way")
    parser.add_argument("--delay-ms", type=_zero_or_more, default=10.0, help="the link's delay, one way")
    parser.add_argument(
        "--queue-ms", type=above_zero, default=100.0, help="what its queues hold before they drop packets"
    )
    parser.add_argument("--congestion", help="TCP's congestion control; by default the kernel's choice")
    parser.add_argument("--out", type=_file, help="where to write JSON")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return number


def above_zero(text: str) -> float:
    """Read an option that needs a number above 0."""
    if (number := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _zero_or_more(text: str) -> float:
    if (number := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _file(text: str) -> Path:
    """Make the folder before the work is done that it is for."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent} cannot be made: {error.strerror}") from error
    return path
