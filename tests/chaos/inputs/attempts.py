"""Attempts to read mutated inputs, and what came of them."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.chaos.inputs.mutations import mutate
from tests.chaos.inputs.parser import Parser
from xffl.errors import XfflError

LIMIT_S = 10.0
"""In which every input must be read or refused"""


class _SlowError(BaseException):
    """Interrupt an attempt; no handler of the package takes it for an error of its own."""


@dataclass
class Tally:
    """Outcomes of one parser: how often each came, the slowest attempt, and what is to be mended."""

    counts: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    faults: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the cases by the error that they raised"""


def input_of(parser: Parser, examples: list[bytes], seed: int, case: int) -> bytes:
    """Return the mutated input of a case; the same for the same seed."""
    chance = random.Random(f"{parser.name} {seed} {case}")
    return mutate(chance.choice(examples), parser.form, chance)


def try_parser(parser: Parser, cases: int, seed: int, keep: Path | None = None) -> Tally:
    """Read the valid inputs and so many mutated ones; keep those that fail in a folder."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with _silence():
            examples = list(parser.examples(folder))
        for example in examples:
            outcome, told, _ = attempt(parser, example, folder)
            if outcome != "ok":
                tally.faults[f"a valid input is not read: {told}"] = [0]
        for case in range(cases):
            content = input_of(parser, examples, seed, case)
            outcome, told, seconds = attempt(parser, content, folder)
            tally.counts[outcome] += 1
            tally.longest = max(tally.longest, seconds)
            if outcome in ("raw", "slow"):
                tally.faults.setdefault(f"{outcome}: {told}", []).append(case)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{parser.name.replace(' ', '_').replace('/', '_')}.{case}").write_bytes(content)
    return tally


def attempt(parser: Parser, content: bytes, folder: Path) -> tuple[str, str, float]:
    """Read one input; return what came of it, the error if there was one, and the seconds."""
    since = time.perf_counter()
    outcome, told = "ok", ""
    try:
        with _silence(), _deadline():
            parser.read(content, folder)
    except XfflError as error:
        outcome, told = "named", str(error)
    except _SlowError as error:
        outcome, told = "slow", _place_of(error)
    except Exception as error:  # noqa: BLE001 - every other one is what is looked for
        outcome, told = "raw", f"{type(error).__name__}: {str(error)[:150]} ({_place_of(error)})"
    seconds = time.perf_counter() - since
    return ("slow" if seconds > LIMIT_S else outcome), told, seconds


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout, sys.stderr = out, err


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _SlowError

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of a test's own deadline


def _place_of(error: BaseException) -> str:
    """Return the innermost place of the package that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if "/xffl/" in frame.filename and "/tests/" not in frame.filename] or frames[-1:]
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in inner[-1:])
