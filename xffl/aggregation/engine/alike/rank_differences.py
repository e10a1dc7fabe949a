"""What is told where ranks have unequal models, or compute unequal values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xffl.checks import group as group_pairs
from xffl.distributed.agreement.consistency import ranks_text
from xffl.errors import ConfigError

__all__ = ["FORMAT_LINE", "describe_arithmetic", "describe_models"]

FORMAT_LINE = "(exchange format)"
"""First line of the texts that ranks compare: if it differs, no other line is compared."""


def describe_models(manifests: Mapping[int, str]) -> ConfigError:
    """Return an error that names the first tensor on which the ranks' manifests differ, and the ranks."""
    tables = {rank: dict(line.split("\t", 1) for line in text.splitlines()) for rank, text in manifests.items()}
    for name in sorted({name for table in tables.values() for name in table}):
        by_text: dict[str, list[int]] = {}
        for rank in sorted(tables):
            by_text.setdefault(tables[rank].get(name, "missing"), []).append(rank)
        if len(by_text) > 1:
            shown = "; ".join(f"{text} on ranks {', '.join(map(str, ranks))}" for text, ranks in by_text.items())
            advice = "give every rank the same model, policies and options"
            if name == FORMAT_LINE:
                advice = "run versions of xffl that have one exchange format in all cells"
            return ConfigError(f"{name!r} differs: {shown}; {advice}")
    return ConfigError("the ranks' models differ only in the order of their tensors; build them in the same way")


def describe_arithmetic(told: Mapping[int, Mapping[str, Any]], processors: Sequence[str], patterns: int) -> ConfigError:
    """Return an error that says which ranks compute what otherwise of fixed patterns, and what may be the cause."""
    names = list(dict.fromkeys(name for one in told.values() for name in one["digests"]))
    by_digests = group_pairs((tuple(one["digests"].get(name) for name in names), rank) for rank, one in told.items())
    kinds = group_pairs((processors[rank], rank) for rank in told)
    shown = "; ".join(f"{ranks_text(ranks)}: {kind}" for kind, ranks in kinds.items())
    if len(by_digests) == 1:
        foreign = {name: why for one in told.values() for name, why in one["foreign"].items()}
        return ConfigError(f"the ranks have unlike processors ({shown}), and {'; '.join(foreign.values())}")
    most = max(by_digests.values(), key=len)
    others = sorted(rank for ranks in by_digests.values() if ranks is not most for rank in ranks)
    unlike = [name for name in names if len({one["digests"].get(name) for one in told.values()}) > 1]
    flushing = sorted(rank for rank, one in told.items() if one["is_flushing"])
    if flushing and len(flushing) < len(told):
        cause = (
            f"subnormal numbers are flushed to zero on {ranks_text(flushing)} and nowhere else; call "
            "torch.set_flush_denormal with the same value on all ranks, or nowhere"
        )
    else:
        cause = (
            f"a processor or version of torch does not keep to IEEE 754 ({shown}), or a library has changed how a "
            "thread rounds; run all ranks on one kind, without such a library"
        )
    return ConfigError(
        f"{ranks_text(most)} and {ranks_text(others)} compute different bits of {patterns} fixed patterns "
        f"({', '.join(unlike[:6])}{', ...' if len(unlike) > 6 else ''}), so their models would drift apart: {cause}"
    )
