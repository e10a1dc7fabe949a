"""What users write against stays: exports, keywords with their defaults, fields of reports, options, exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.reference.public import FILE, read_public

KEPT: dict[str, Any] = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    return read_public()


@pytest.mark.parametrize("kind", KEPT)
def test_public_names_are_those_that_are_kept(kind: str, public: dict[str, Any]) -> None:
    assert public[kind] == KEPT[kind], f"if this is meant: python -m tests.reference.public --write ({kind})"


def test_all_kinds_are_kept(public: dict[str, Any]) -> None:
    assert list(public) == list(KEPT)
