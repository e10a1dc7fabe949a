"""Whatever a program sets as torch's default data type, xffl's own tensors have the one that is written down."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import xffl
from xffl.aggregation.algorithms.server_rules import Adaptive

PACKAGE = Path(xffl.__file__).parent
FLOATS = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn", "zeros"}
"""Functions of torch that make floats of the default data type, unless they are told otherwise."""
TYPED = {"tensor", "scalar_tensor"}
"""Functions that take the type of what they are given: the default one for Python's floats, whose type is not seen."""


def untyped(path: Path) -> list[str]:
    """Return the calls of a file that leave the data type to torch."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, words = node.func.attr, {keyword.arg for keyword in node.keywords}
        is_float = any(isinstance(one, ast.Constant) and isinstance(one.value, float) for one in ast.walk(node))
        if "dtype" not in words and (name in FLOATS | TYPED or (name == "arange" and is_float)):
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_has_a_data_type_of_its_own() -> None:
    assert [call for path in sorted(PACKAGE.rglob("*.py")) for call in untyped(path)] == []


def test_the_rule_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    lines = ["torch.tensor(0.0)", "torch.zeros(3, device='cpu')", "torch.arange(0.0, 3)"]
    (tmp_path / "it.py").write_text(
        "\n".join([*lines, "torch.arange(3)", "torch.zeros(3, dtype=torch.int64)", "zeros(3)"])
    )
    assert untyped(tmp_path / "it.py") == [f"it.py:{number}: {line}" for number, line in enumerate(lines, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_a_server_steps_in_the_type_of_its_values(dtype: torch.dtype, rule: str) -> None:
    def stepped() -> list[float]:
        values = torch.zeros(1, dtype=torch.float32)
        server = Adaptive(rule=rule, is_bias_corrected=True)
        state = server.init(values)
        for step in range(300):
            server.step(values, torch.ones(1, dtype=torch.float32), state, server.numbers(step))
        assert {one.dtype for one in (values, *state.values())} == {torch.float32}
        return values.tolist()

    usual = stepped()
    torch.set_default_dtype(dtype)
    try:
        assert stepped() == usual
    finally:
        torch.set_default_dtype(torch.float32)
