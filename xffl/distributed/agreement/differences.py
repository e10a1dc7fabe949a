"""What is told where ranks were given different things, some of them failed, or they run different software."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from xffl import errors
from xffl.checks import group
from xffl.cluster.runtimes import Runtime, runtime_table
from xffl.errors import ConfigError, XfflError
from xffl.topology import ranks_text

__all__ = ["Describe", "describe_difference", "difference_of", "holders_text", "rebuild_error", "tell_runtimes"]

Describe = Callable[[dict[int, str]], XfflError] | None
"""What makes the error of different values, by rank"""

SHOWN = 4  # different errors or values that a message writes out


def describe_difference(gathered: list[tuple[str, str, tuple[str, str] | None]], describe: Describe) -> XfflError:
    """Make the one error that all ranks raise of what they have gathered."""
    failures = group((failure, rank) for rank, (_, _, failure) in enumerate(gathered) if failure is not None)
    if failures:
        ((name, text), ranks), *others = failures.items()
        texts = [f"{text} ({ranks_text(ranks)} of {len(gathered)})"]
        texts += [f"{ranks_text(where)}: {other}" for (_, other), where in others[: SHOWN - 1]]
        more = [f"and {len(others) + 1 - SHOWN} other errors"] if len(others) >= SHOWN else []
        return rebuild_error(name, "; ".join(texts + more))
    calls = {what for what, _, _ in gathered}
    values = {rank: value if len(calls) == 1 else f"{what}: {value}" for rank, (what, value, _) in enumerate(gathered)}
    if describe is not None and len(calls) == 1:
        return describe(values)
    return difference_of(calls.pop() if len(calls) == 1 else "calls", values)


def difference_of(what: str, values: Mapping[int, str], advice: str = "give all ranks the same") -> XfflError:
    """Make the error that names what each rank was given; pure."""
    by_value = group((value, rank) for rank, value in values.items())
    shown = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in list(by_value.items())[:SHOWN])
    if len(by_value) > SHOWN:
        shown += f"; and {len(by_value) - SHOWN} other values"
    return ConfigError(f"ranks were given different {what}: {shown}; {advice}")


def rebuild_error(name: str, text: str) -> XfflError:
    """Make an error of xffl from its class's name; a class from elsewhere becomes its base."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, XfflError)):
        return XfflError(f"{name}: {text}")
    return kind(text)


def tell_runtimes(rows: Sequence[tuple[str, Runtime]]) -> None:
    """Write the table of what the cells run, where something differs; local."""
    if lines := runtime_table(rows):
        where = "docs: Versions and formats, What may differ between cells"
        title = f"what the cells run differs, which is allowed ({where}):"
        text = "\n".join(f"xffl: {line}" for line in (title, *(f"  {line}" for line in lines)))
        print(text, file=sys.stderr, flush=True)


def holders_text(ranks: Iterable[int], sizes: Sequence[int], first: int = 0) -> str:
    """Write which ranks these are: ``cells 0, 2`` where they are whole cells, ``cell 0, rank 5`` with others.

    Cells are numbered from ``first``.
    """
    left, whole = {*ranks}, []
    for cell, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if left.issuperset(range(start, stop)):
            whole.append(first + cell)
            left -= {*range(start, stop)}
    cells = [ranks_text(whole).replace("rank", "cell")] if whole else []
    return ", ".join(cells + ([ranks_text(left)] if left else []))
