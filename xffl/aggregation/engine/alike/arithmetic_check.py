"""The check that ranks compute alike: what a round computes on each of them, run on fixed patterns and compared.

Ranks are to hold the same bits after a round though each of them takes means and steps by itself, on whatever processor
it has. :mod:`xffl.aggregation.arithmetic` says what makes that so; this makes sure of it when an aggregator is made, in
about a millisecond: a thread that flushes subnormal numbers, another rounding mode, a processor or a version of torch
that does not keep to IEEE 754 are found here, before they can drive models apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import torch

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.algorithms.server_rules import ServerRule
from xffl.aggregation.arithmetic import divide, flushes_subnormals, is_built_in, square_root, weighted_mean
from xffl.aggregation.compression import Codec
from xffl.aggregation.engine.alike.feature_arithmetic import run_features
from xffl.aggregation.engine.alike.rank_differences import describe_arithmetic
from xffl.distributed.agreement.consistency import check_consistent, control_device, processor_of
from xffl.distributed.collectives import Group, all_gather_json
from xffl.errors import ConfigError, XfflError

__all__ = [
    "PATTERNS",
    "Arithmetic",
    "compare_arithmetic",
    "digest_arithmetic",
    "processor_number",
    "read_arithmetic",
]

PATTERNS = 8**4
"""Fixed values that each operation is run on: all pairs and triples of 8 kinds of numbers."""

GRAIN = 2**15
"""Elements from which on torch gives a part to another thread."""

NUMBER_BITS = 48
"""Of a hash that a float holds exactly."""


def processor_number(*devices: torch.device) -> float:
    """Return a number that is the same on ranks whose training steps on these devices give the same bits; local.

    All vector units of a CPU with fused multiply-add agree, whatever their width.
    """
    kinds = [processor_of(device) for device in devices]
    for place, (device, kind) in enumerate(zip(devices, kinds, strict=True)):
        if device.type != "cuda" and kind.endswith((" AVX2", " AVX512")):
            kinds[place] = "fused"
    text = " ".join([torch.__version__, *kinds])
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[: NUMBER_BITS // 8], "little"))


@dataclass(frozen=True)
class ArithmeticDigest:
    """What a rank computes on the patterns, as text that ranks compare."""

    digests: dict[str, str]
    """A digest of the results, by the name of the operation"""
    is_flushing: bool
    foreign: dict[str, str] = field(default_factory=dict)
    """Why combiners, codecs and rules of the user's own may compute otherwise on other processors, by their name"""
    processor: float = 0.0
    """See :func:`processor_number`; compared only where something may compute otherwise"""


@dataclass(frozen=True)
class Arithmetic:
    """What a round computes on a rank."""

    devices: Collection[torch.device]
    """Where this rank takes means and steps; all must give the same bits"""
    combiner: Combiner
    """What makes one value of the cells'"""
    rule: ServerRule | None
    """What the server steps with; ``None`` without a server"""
    codecs: Collection[Codec]
    """What values cross in"""
    cells: int
    """How many cells there are"""
    has_fp64: bool
    """Whether the model has parameters in fp64"""


def read_arithmetic(arithmetic: Arithmetic) -> str:
    """Return as text what this rank computes on the patterns; local.

    Raises ConfigError if two threads or two devices of this rank compute otherwise.
    """
    own = digest_arithmetic(
        arithmetic.devices,
        combiner=arithmetic.combiner,
        rule=arithmetic.rule,
        codecs=arithmetic.codecs,
        cells=arithmetic.cells,
        has_fp64=arithmetic.has_fp64,
    )
    return json.dumps(asdict(own))


def compare_arithmetic(arithmetic: Arithmetic, *, group: Group | None) -> None:
    """Raise ConfigError, on all ranks alike, unless all compute the same bits of the same values.

    Collective over ``group``: 16 bytes, and what each rank computes only where they differ.

    :param arithmetic: What this rank computes.
    :param group: The ranks to compare.
    :raises ConfigError: if two ranks, or two threads or devices of a rank, compute otherwise; if a combiner, rule or
        codec of the user's own is not made of elementary operations, and ranks have unlike processors.
    """
    error: XfflError | None = None
    text = ""
    try:
        text = read_arithmetic(arithmetic)
    except XfflError as wrong:
        error = wrong
    kinds = dict.fromkeys(map(processor_of, arithmetic.devices))
    places = f"{', '.join(kinds)}, torch {torch.__version__}"

    def describe(told: dict[int, str]) -> XfflError:
        processors: list[str] = all_gather_json(places, control_device(group), group)
        return describe_arithmetic({rank: json.loads(one) for rank, one in told.items()}, processors, PATTERNS)

    check_consistent("arithmetic", text, error=error, describe=describe, group=group)


@torch.no_grad()
def digest_arithmetic(
    devices: Collection[torch.device],
    *,
    combiner: Combiner,
    rule: ServerRule | None = None,
    codecs: Collection[Codec] = (),
    cells: int = 2,
    has_fp64: bool = False,
) -> ArithmeticDigest:
    """Run what a round computes on the patterns, on these devices; local, about a millisecond.

    Raises ConfigError if two threads or two devices of this rank compute otherwise.
    """
    digests: dict[str, str] = {}
    foreign: dict[str, str] = {}
    for device in dict.fromkeys(devices):
        if device.type == "cpu":
            _check_threads()
        results = _elementary(device, has_fp64=has_fp64) | _means(device, has_fp64=has_fp64)
        if isinstance(combiner, Coordinatewise) or rule is not None or not all(map(is_built_in, codecs)):
            made, reasons = run_features(
                _patterns(device), combiner=combiner, rule=rule, codecs=codecs, cells=cells, has_fp64=has_fp64
            )
            results |= made
            foreign |= reasons
        found = _digests_of(results)
        if others := [name for name in digests.keys() & found.keys() if found[name] != digests[name]]:
            raise ConfigError(
                f"the devices {', '.join(map(str, devices))} of a rank compute other bits of {PATTERNS} fixed patterns "
                f"({', '.join(sorted(others))}), so models would drift apart; give the server no device of its own"
            )
        digests |= found
    processor = processor_number(*dict.fromkeys(devices)) if foreign else 0.0
    return ArithmeticDigest(digests, flushes_subnormals(), foreign, processor)


def _elementary(device: torch.device, *, has_fp64: bool) -> dict[str, torch.Tensor]:
    """Run each operation that server rules and combiners are made of."""
    a, b, _ = _patterns(device)
    found = {
        "add": a + b,
        "sub": a - b,
        "mul": a * b,
        "mul by a number": a * 0.1,
        "div": a / b,
        "div by a number": divide(a, 3.0),
        "root": square_root(a.abs()),
        "fp64 mul": a.double() * b.double() * 0.1,
        "fp64 sub": a.double() * 0.3 - b.double(),
        "fp64 div": divide(a.double(), 3.0),
        "cast": (a.double() * b.double()).float(),
        "cast to bf16": a.bfloat16().float(),
        "cast to fp16": a.half().float(),
    }
    if has_fp64:
        found["fp64 root"] = square_root(a.double().abs())
    return found


def _means(device: torch.device, *, has_fp64: bool) -> dict[str, torch.Tensor]:
    a, b, c = _patterns(device)
    types = [torch.float32, torch.bfloat16, *([torch.float64] if has_fp64 else [])]
    found = {}
    for dtype in types:
        values = [one.to(dtype) for one in (a, b, c)]
        for count in (2, 3):
            out = torch.empty_like(values[0])
            weighted_mean(values[:count], [1.0, 2.7, 0.3][:count], out)
            found[f"mean of {count} cells in {dtype}"] = out
    return found


def _check_threads() -> None:
    """Raise where threads that share an operation's elements compute otherwise; local.

    How subnormals and roundings go is set for each thread, and torch's own are made when they are first needed.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return
    a, b, _ = _patterns(torch.device("cpu"))
    each = GRAIN // PATTERNS  # copies for one thread; one operation, since each waits for all threads
    products = torch.mul(a.expand(threads * each, PATTERNS), b)[::each].numpy().view("int32")
    if (products != products[0]).any():
        raise ConfigError(
            f"the {threads} threads of a rank compute other bits of products of {PATTERNS} fixed patterns, since some "
            "flush subnormal numbers to zero and others do not; call torch.set_flush_denormal before any tensor is "
            "computed, so that all threads inherit it, or not at all"
        )


def _canonical(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of results, of which each NaN has the same: IEEE 754 leaves their signs and payloads open."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    return torch.where(values.isnan(), 0, values.view(integers))


def _digests_of(results: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each result's bits; what lies on a GPU is read at once."""
    rows = [_canonical(values).contiguous().view(torch.uint8) for values in results.values()]
    parts = torch.split(torch.cat(rows).cpu(), [len(row) for row in rows])
    return {
        name: hashlib.blake2b(bytes(part.numpy()), digest_size=6).hexdigest()
        for name, part in zip(results, parts, strict=True)
    }


@lru_cache(maxsize=4)
def _patterns(device: torch.device) -> torch.Tensor:
    """Return three rows of fp32 values, in which all triples of 8 kinds of numbers meet, 8 times each."""
    index = torch.arange(PATTERNS, dtype=torch.int64)
    rows = []
    for row in range(3):
        random = _hashed(index + PATTERNS * row)
        sign, mantissa = random & 0x80000000, random & 0x7FFFFF
        exponent = (random >> 23) & 0xFF
        low = random & 3
        kinds = torch.stack(
            [
                (97 + exponent % 34) << 23 | mantissa,  # as in models and their updates: 1e-9 to 8
                (120 + exponent % 8) << 23 | mantissa,
                (exponent % 255) << 23 | mantissa,  # any finite number
                mantissa,  # subnormal
                127 << 23 | low,  # one and a few units, and
                (103 + exponent % 2) << 23 | (random & 1) << 22,  # half a unit of it: sums on or beside a midpoint
                torch.where(low == 0, 0x7F7FFFFF, torch.where(low == 1, 0x00800000, torch.where(low == 2, 1, 0))),
                torch.where(low == 0, 0x7F800000, 254 << 23 | mantissa),  # infinite, or so large that sums are
            ]
        )
        bits = sign | kinds[(index // 8**row) % 8, index]
        rows.append(torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32))
    return torch.stack(rows).to(device)


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 32 bits for each number, by integer products alone: torch's generators may differ between versions."""
    for factor in (0x45D9F3B, 0x2C1B3C6D, 0x297A2D39):
        numbers = ((numbers >> 15) ^ numbers) * factor & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)
