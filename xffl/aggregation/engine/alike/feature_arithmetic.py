"""What a combiner, a server rule and codecs compute of fixed patterns, and why they may compute otherwise elsewhere.

Those of xffl are made of elementary operations, which processors do alike. One of the user's own is run where no other
operation is let through; one that needs others is told of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise
from xffl.aggregation.algorithms.server_rules import ServerRule
from xffl.aggregation.arithmetic import combined, is_built_in
from xffl.aggregation.compression import Codec
from xffl.aggregation.elementary import ElementaryOnly
from xffl.errors import ConfigError

__all__ = ["run_features"]


def run_features(
    patterns: torch.Tensor,
    *,
    combiner: Combiner,
    rule: ServerRule | None,
    codecs: Collection[Codec],
    cells: int,
    has_fp64: bool,
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what they compute of three rows of patterns, and why some may compute otherwise, by their names; local."""
    results: dict[str, torch.Tensor] = {}
    foreign: dict[str, str] = {}
    if isinstance(combiner, Coordinatewise):
        name = f"combine {type(combiner).__name__}"
        out = torch.zeros(patterns.shape[1], dtype=torch.float32, device=patterns.device)
        if why := _run(name, combiner, _prepare_combiner(combiner, patterns, cells, out)):
            foreign[name] = why
        else:
            results[name] = out
    types = [torch.float32, *([torch.float64] if has_fp64 else [])]
    for dtype in types if rule is not None else ():
        assert rule is not None, "there is one"
        name = f"server {type(rule).__name__} in {dtype}"
        stepped: list[torch.Tensor] = []
        if why := _run(name, rule, _prepare_rule(rule, patterns, dtype, stepped)):
            foreign[f"server {type(rule).__name__}"] = why
        else:
            results[name] = torch.cat(stepped)
    for codec in codecs:
        if not is_built_in(codec) and (why := _run(f"codec {codec}", codec, _prepare_codec(codec, patterns))):
            foreign[f"codec {codec}"] = why
    return results, foreign


def _run(name: str, part: object, prepare: Callable[[], Callable[[], None]]) -> str:
    """Run a combiner, codec or rule on patterns; return why one of the user's own may compute otherwise elsewhere."""
    if is_built_in(part):
        prepare()()
        return ""
    try:
        call = prepare()
        with ElementaryOnly(name):
            call()
    except ConfigError as wrong:
        return str(wrong)
    except Exception as wrong:  # noqa: BLE001 - patterns are no values that it was written for
        return f"{name} cannot be checked: on fixed patterns it raises {type(wrong).__name__}: {wrong}"
    return ""


def _prepare_combiner(
    combiner: Coordinatewise, patterns: torch.Tensor, cells: int, out: torch.Tensor
) -> Callable[[], Callable[[], None]]:
    rows = [patterns[row % 3].roll(row) for row in range(cells)]
    return lambda: lambda: combined(combiner.combine, rows, out)


def _prepare_rule(
    rule: ServerRule, patterns: torch.Tensor, dtype: torch.dtype, stepped: list[torch.Tensor]
) -> Callable[[], Callable[[], None]]:
    """Return what makes two steps, and leaves the values and the state after them in ``stepped``."""

    def prepare() -> Callable[[], None]:
        values, *gradients = (row.to(dtype, copy=True) for row in patterns)
        state = rule.init(values)
        # Their own come from functions that differ between systems, and are told by one rank.
        numbers = {name: 0.3 + 0.07 * place for place, name in enumerate(rule.numbers(0))}

        def step() -> None:
            for gradient in gradients:
                rule.step(values, gradient, state, numbers)
            stepped.extend([values, *(state[name] for name in sorted(state))])

        return step

    return prepare


def _prepare_codec(codec: Codec, patterns: torch.Tensor) -> Callable[[], Callable[[], None]]:
    """Return what encodes patterns, as one rank does for all, and then what decodes them, as each rank does."""

    def prepare() -> Callable[[], None]:
        values = patterns[0].nan_to_num(0.0, 1.0, -1.0)
        code = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8, device=patterns.device)
        codec.encode(values, code)
        return lambda: codec.decode(code, torch.empty_like(values))

    return prepare
