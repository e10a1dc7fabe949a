"""Rounds give the bits that they always gave; ``tests/golden/compare.py`` compares more, on one machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.cases import by_size
from tests.golden.exact import FILE, run_exact
from tests.golden.table import EXACT

KEPT: dict[str, Any] = json.loads(FILE.read_text())


def test_every_exact_case_is_kept() -> None:
    assert list(KEPT) == EXACT


@pytest.mark.parametrize("ranks", sorted(by_size(EXACT)))
def test_rounds_give_the_bits_that_they_always_gave(ranks: int, tmp_path: Path) -> None:
    found = run_exact(ranks, tmp_path)
    assert not [name for name, told in found.items() if "error" in told]
    for name, told in found.items():
        assert told == KEPT[name], name
