"""The cases that are exact on every processor, with what they gave: ``python -m tests.golden.exact --write``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.golden.cases import by_size, run_cases
from tests.golden.table import EXACT
from tests.worlds import run_world

__all__ = ["FILE", "run_exact"]

FILE = Path(__file__).with_name("exact.json")
KEPT = (
    *("round", "weights", "bytes_across", "bytes_home", "dropped", "is_last", "fragment", "shares", "scale", "steps"),
    *("nonfinite", "is_skipped"),
)
"""Fields of a report that hold whole numbers, dyadic ones, and names."""


def world(rank: int, world_size: int, names: list[str], folder: str) -> dict[str, Any]:
    return dict(run_cases(names, Path(folder)))


def exact_part(told: Any) -> Any:
    """Return what is exact of a report, or of a case with reports."""
    if isinstance(told, dict) and "is_last" in told:
        return {name: told[name] for name in KEPT} | (
            {"levels": exact_part(told["levels"])} if "levels" in told else {}
        )
    if isinstance(told, dict):
        return {name: exact_part(value) for name, value in told.items()}
    return [exact_part(one) for one in told] if isinstance(told, list) else told


def run_exact(ranks: int, folder: Path) -> dict[str, Any]:
    """Run the cases of one size of world, and return what they gave."""
    names = by_size(EXACT)[ranks]
    found: dict[str, Any] = run_world(ranks, world, names, str(folder))[0]
    return {name: exact_part(told) for name, told in found.items()}


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.golden.exact --write")
    told = {name: one for ranks in by_size(EXACT) for name, one in run_exact(ranks, FILE.parent).items()}
    lines = [f" {json.dumps(name)}: {json.dumps(told[name])}" for name in EXACT]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
