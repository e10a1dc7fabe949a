"""The table and the figure of a partition show the samples of each class in each cell."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xffl.errors import ConfigError
from xffl.planning.partition import cell_shares, partition_figure, partition_table


def test_cell_shares_add_up() -> None:
    first, second, third = cell_shares([[30, 0], [0, 10], [0, 0]])
    assert first == (30, 0.75, 1, 0.25) and second == (10, 0.25, 1, 0.75) and third == (0, 0.0, 0, 0.0)


def test_the_table_says_who_has_what() -> None:
    file = io.StringIO()
    partition_table([[3, 0], [1, 6]], file, classes=["cat", "dog"])
    rows = [[field.strip() for field in line.strip("|").split("|")] for line in file.getvalue().splitlines()]
    assert rows[0] == ["cell", "samples", "share", "classes", "skew", "cat", "dog"]
    assert rows[2:5] == [
        ["0", "3", "30.0 %", "1", "0.60", "3", ""],
        ["1", "7", "70.0 %", "2", "0.26", "1", "6"],
        ["all", "10", "", "2", "", "4", "6"],
    ]


def test_a_large_table_says_what_is_left_out() -> None:
    file = io.StringIO()
    partition_table(np.ones((40, 100), dtype=int), file)  # type: ignore[arg-type]
    text = file.getvalue()
    assert "... 8 more cells" in text and "more classes: " in text and "to 99" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "4000" in text


@pytest.mark.parametrize("shape", [(1, 1), (4, 10), (3, 200), (300, 2)])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_is_drawn_alike(shape: tuple[int, int], suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    counts = np.arange(shape[0] * shape[1]).reshape(shape)
    for name in ("one", "two"):
        partition_figure(counts, tmp_path / f"{name}.{suffix}", title="what & who")  # type: ignore[arg-type]
    one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert one == two and len(one) > 1000


def test_the_figure_shows_counts_sizes_and_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    partition_figure([[1234, 0], [77, 655]], tmp_path / "a.svg", classes=["cat", "dog"], title="mine")
    texts = [node.text for node in ET.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")]
    told = " / ".join(text or "" for text in texts)
    for expected in (
        "1234",
        "77",
        "655",
        "1,234 (63 %)",
        "732 (37 %)",
        "cat",
        "dog",
        "cell 1",
        "mine",
        "1,966 samples",
    ):
        assert expected in told
    assert "0" not in texts


@pytest.mark.parametrize(
    "counts, classes, message",
    [
        ([], None, "counts are empty"),
        ([[]], None, "counts are empty"),
        ([1, 2], None, "must be a table of integers"),
        ([[float("nan"), 2]], None, "must be a table of integers"),
        ([[1, 2], [3]], None, "counts of cell 1 have 1 classes, those of cell 0 2"),
        ([[-1]], None, "counts of cell 0 must be 0 or more, got -1"),
        ([[1, 2]], ["a"], "1 names for 2 classes"),
    ],
)
def test_what_is_no_table_is_refused(counts: Any, classes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        partition_table(counts, io.StringIO(), classes=classes)
    with pytest.raises(ConfigError, match=message):
        partition_figure(counts, tmp_path / "a.svg", classes=classes)


def test_the_figure_needs_a_known_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no known format"):
        partition_figure([[1]], tmp_path / "a.pdf")
