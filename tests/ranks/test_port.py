"""The page on porting: its diff makes one script of the other, and what the two scripts train is what it says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.worlds import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/06_port"
PAGE = ROOT / "docs/port_fsdp2.rst"
ONE_EPOCH = ("--epochs", "1")


def apply_diff(text: str, diff: str) -> str:
    """Apply a unified diff of one file; every line that it keeps or removes must be there."""
    old = text.splitlines()
    new: list[str] = []
    done = 0
    for hunk in re.split(r"^(?=@@ )", diff, flags=re.MULTILINE)[1:]:
        head, *lines = hunk.splitlines()
        start = re.match(r"@@ -(\d+)", head)
        assert start is not None
        first = int(start[1]) - 1
        new += old[done:first]
        done = first
        for line in lines:
            mark, content = line[:1], line[1:]
            if mark == "+":
                new.append(content)
                continue
            assert old[done] == content, (head, line)
            done += 1
            if mark != "-":
                new.append(content)
    return "\n".join([*new, *old[done:]]) + "\n"


def losses(written: str) -> list[tuple[str, ...]]:
    return re.findall(r"epoch (\d+): loss (\S+), norm (\S+)", written)


def saved_model(folder: Path) -> dict[str, torch.Tensor]:
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    model: dict[str, torch.Tensor] = torch.load(file)["model"]
    return model


def test_the_diff_of_the_page_makes_one_script_of_the_other() -> None:
    shown = re.search(r"code-block:: diff\n\n((?:   .*\n|\n)+)", PAGE.read_text())
    assert shown is not None
    # An empty line of the diff is a kept empty line: its blank is stripped on the page.
    diff = textwrap.dedent(shown[1]).rstrip()
    assert apply_diff((EXAMPLE / "before.py").read_text(), diff) == (EXAMPLE / "after.py").read_text()


def test_the_ported_script_trains_the_same_in_one_cell_and_agrees_in_two(tmp_path: Path) -> None:
    words = [str(EXAMPLE / "before.py"), *ONE_EPOCH]
    before = run_script(4, words, tmp_path)
    words = [str(EXAMPLE / "after.py"), *ONE_EPOCH, "--checkpoint", "one"]
    one_cell = run_script(4, words, tmp_path)
    words = [str(EXAMPLE / "after.py"), *ONE_EPOCH, "--checkpoint", "two"]
    two_cells = run_script(4, words, tmp_path, XFFL_FEDERATED="2,2")
    for ran in (before, one_cell, two_cells):
        assert [code for code, _ in ran] == [0] * 4

    expected = losses(before[0][1])
    assert len(expected) == 8
    assert len(set(expected)) == 8
    assert losses(one_cell[0][1]) == expected
    original, ported = saved_model(tmp_path / "checkpoint"), saved_model(tmp_path / "one/cell_0")
    assert original.keys() == ported.keys()
    assert all(torch.equal(value, ported[name]) for name, value in original.items())

    # Two cells train on their own data between rounds, and hold one model after the last.
    first, second = (losses(two_cells[rank][1]) for rank in (0, 2))
    assert [len(first), len(second)] == [8, 8]
    assert first != second
    models = [saved_model(tmp_path / f"two/cell_{cell}") for cell in range(2)]
    assert models[0].keys() == original.keys()
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    assert any(not torch.equal(value, original[name]) for name, value in models[0].items())
