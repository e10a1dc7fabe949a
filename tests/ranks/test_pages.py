"""The scripts of the manual's pages run, and print what the pages say."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.worlds import run_script

DOCS = Path(__file__).resolve().parents[2] / "docs"
ELSEWHERE = ("text.py", "loop.py", "train.py")
"""Scripts with tests of their own, or parts of a project."""

IN_TURN = """
import runpy, sys
for name in sys.argv[1:]:
    print("###", name)
    runpy.run_path(name, run_name="__main__")
"""


@dataclass(frozen=True)
class Script:
    """A script of a page, the ranks it is for, and the last lines that rank 0 prints, if the page has them."""

    name: str
    ranks: int
    text: str
    said: str


def scripts_of(page: str) -> list[Script]:
    text = (DOCS / f"{page}.rst").read_text()
    found = []
    for shown in re.finditer(r":caption: (\w+\.py)([^\n]*)\n\n((?:   .*\n|\n)+)", text):
        name, note, body = shown.groups()
        called = re.search(r"--processes (\d)", note) or re.search(rf"--processes (\d) [^`\n]*{name}", text)
        after = re.match(r"prints(?:::\n\n((?:   .*\n)+)|[^`]*``([^`]+)``)", text[shown.end() :])
        beside = re.search(r"print\(.*\)  # ([(\d][^:\n]*)", body)
        said = (after[1] or after[2]) if after else beside[1] if beside else ""
        if name not in ELSEWHERE:
            found.append(Script(name, int(called[1]) if called else 2, textwrap.dedent(body), textwrap.dedent(said)))
    return found


def parts_of(line: str) -> list[float | str]:
    """Split a line into numbers and words."""
    return [
        float(part) if part[0].isdigit() else part for part in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?|[^\s\d]+", line)
    ]


def is_said(line: str, expected: str) -> bool:
    """Compare two lines; other processors round differently, so numbers may differ by a little."""
    both = zip(parts_of(line), parts_of(expected), strict=True)
    return all(
        one == pytest.approx(other, rel=0.02) if isinstance(other, float) else one == other for one, other in both
    )


@pytest.mark.parametrize(
    ("page", "count", "checked"),
    [
        ("round", 4, 2),
        ("round_cheaper", 3, 2),
        ("round_failures", 1, 1),
        ("experts", 1, 1),
        ("algorithms", 4, 4),
        ("privacy", 1, 1),
        ("data", 1, 0),
        ("port_fsdp2", 2, 2),
    ],
)
def test_scripts_print_what_the_page_says(page: str, count: int, checked: int, tmp_path: Path) -> None:
    scripts = scripts_of(page)
    assert len(scripts) == count and sum(bool(script.said) for script in scripts) == checked
    (tmp_path / "in_turn.py").write_text(IN_TURN)
    for script in scripts:
        (tmp_path / script.name).write_text(script.text)
    for ranks in sorted({script.ranks for script in scripts}):
        here = {script.name: script for script in scripts if script.ranks == ranks}
        ran = run_script(ranks, ["in_turn.py", *here], tmp_path, XFFL_FEDERATED=",".join("1" * ranks))
        assert [code for code, _ in ran] == [0] * ranks
        for part in ran[0][1].split("### ")[1:]:
            name, *lines = part.strip().splitlines()
            said = here[name].said.strip().splitlines()
            for line, expected in zip(lines[len(lines) - len(said) :], said, strict=True):
                assert is_said(line, expected), (name, line, expected)
