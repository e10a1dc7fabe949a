"""The page about runs shows what their files hold, whatever is missing in them and whatever they are called."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
import time
import tracemalloc
import xml.etree.ElementTree as ET
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xffl.cli.main import main
from xffl.errors import ConfigError
from xffl.planning.text import bytes_text
from xffl.run_report import Report, catalogue, reader, write_report
from xffl.run_report.figures import bars_figure, rounds_figure, thin, traffic_figure, value_figure
from xffl.run_report.reader import read_run
from xffl.run_report.summary import (
    is_better_high,
    label_text,
    number_text,
    printable,
    read_settings,
    seconds_text,
    stem_of,
    sum_up_values,
    summary_rows,
    value_text,
)

START = 1_790_000_000.0
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """What a reader finds in a page: its texts, tables and pictures; it fails where tags do not close each other."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(self.source)
        self.close()
        assert self.open == [], "all tags are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def pictures(self) -> list[str]:
        """The SVG documents, each parsed once."""
        found = []
        for tag, attributes in self.tags:
            if tag == "img":
                assert attributes["alt"]
                kind, _, content = str(attributes["src"]).partition(",")
                assert kind == "data:image/svg+xml;base64"
                svg = base64.b64decode(content).decode()
                ET.fromstring(svg)
                found.append(svg)
        return found

    def row(self, name: str) -> list[str]:
        """Return the first row of a name, without the name."""
        return next(row[1:] for row in self.rows if row and row[0] == name)


def line(step: int, seconds: float, values: dict[str, Any], **more: Any) -> str:
    record = {"time": START + seconds, "step": step, "epoch": step // 10, "samples": 8 * step, "values": values}
    return json.dumps({**record, **more}) + "\n"


def round_line(number: int, step: int, seconds: float, took: float, **more: Any) -> str:
    record = {"time": START + seconds, "step": step, "round": number, "seconds": took, "weights": [1, 1]}
    return json.dumps({**record, "bytes_across": 1000, "bytes_home": 500, "dropped": [], **more}) + "\n"


def test_rounds_of_an_elastic_run_tell_how_many_cells_took_part(tmp_path: Path) -> None:
    rows = round_line(1, 5, 1.0, 0.1, cells=[0, 1, 3], weights=[5.0, 5.0, 0.0, 0.0])
    rows += round_line(2, 9, 2.0, 0.1, cells=[0, 1, 2, 3], weights=[4.0, 4.0, 4.0, 4.0])
    series = read_run(write(tmp_path, {"rounds/cell_1.jsonl": rows})).series
    told = {name: by_cell[1].values.tolist() for name, by_cell in series.items() if name.startswith("rounds/cells_")}
    assert told == {"rounds/cells_there": [3.0, 4.0], "rounds/cells_averaged": [2.0, 4.0]}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def run_files(scale: float = 1.0, **settings_: Any) -> dict[str, Any]:
    """A run of two cells of 20 and 16 steps, with three rounds, the last of them delayed."""
    files: dict[str, Any] = {}
    for cell, steps in enumerate((20, 16)):
        rows = []
        for step in range(1, steps + 1):
            values: dict[str, Any] = {"train/loss": scale * (3.0 - 0.1 * step + cell), "train/learning_rate": 0.01}
            values |= {"throughput/samples_per_s": 100.0 + step + cell, "throughput/steps_per_s": 2.0 + cell}
            values |= {"memory/resident_bytes": 10**9 + 10**6 * step + cell}
            rows.append(line(step, step + 0.25 * cell, values))
        files[f"metrics/cell_{cell}.jsonl"] = "".join(rows)
        delayed = {"phases": {"vote": 0.1, "pack": 0.2, "across": 1.0, "commit": 0.1, "wait": 0.3}, "hidden": 0.25}
        plain = {"phases": {"vote": 0.1, "across": 0.3}, "hidden": 0.125, "dropped": [1]}
        files[f"rounds/cell_{cell}.jsonl"] = (
            round_line(1, 5, 6.0, 0.5, **plain, update_norms=[1.0, 2.0])
            + round_line(2, 10, 12.0, 0.75, **plain, update_norms=[0.5, "NaN"])
            + round_line(3, 15, 18.0, 4.0, **delayed, codec_error=0.01, divergence={"rms": 0.5})
        )
    files["metrics/federation.jsonl"] = "".join(
        line(5 * at, 6.0 * at, {"train/loss": scale * loss, "val/accuracy": accuracy})
        for at, loss, accuracy in ((1, 2.5, 0.5), (2, 1.5, 0.75), (3, 1.75, 0.7))
    )
    files["topology.json"] = {"world_size": 6, "cells": [4, 2], "replica_size": 2, "cell_shape": None}
    files["partition.json"] = {"labels": ["cat", "dog"], "counts": [[30, 4], [6, 60]]}
    training = {"epochs": 2, "lr": 0.1, "callbacks": ["a", "b"], **settings_}
    files["config.yaml"] = json.dumps({"experiment": {"name": "mine", "seed": None}, "training": training})
    files["origins.json"] = {"training.epochs": "command line", "training": "default"}
    files["environment.json"] = {"torch": "2.13", "packages": {"numpy": "2.4"}, "command": ["xffl", "exec", "a b.yaml"]}
    files["environment.json"]["runtimes"] = [{"cells": "cell 1", "torch": "2.11.0", "nccl": "2.27.5"}]
    files["checkpoints/latest"] = "step_10"
    files["checkpoints/step_10/x"] = files["checkpoints/.step_20.partial/x"] = ""
    return files


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Page]:
    pytest.importorskip("matplotlib")
    report = write_report([write(tmp_path_factory.mktemp("runs") / "mine", run_files())])
    return report, Page(report.page)


def test_totals_are_those_of_the_files(one: tuple[Report, Page]) -> None:
    run = one[0].runs[0]
    # Computed from the files again, by other means.
    rounds = [json.loads(text) for cell in (0, 1) for text in run_files()[f"rounds/cell_{cell}.jsonl"].splitlines()]
    assert sum(row["bytes_across"] for row in rounds) == 6000 and sum(row["bytes_home"] for row in rounds) == 3000
    # The first record stands at second 1, the last at second 20.
    assert run.seconds == pytest.approx(19.0)
    # Both blocking rounds, and of the delayed one its pack, commit and wait.
    exposed = 0.5 + 0.75 + 0.2 + 0.1 + 0.3
    expected = {
        "steps": "20 (cell 0), 16 (cell 1)",
        "epoch, from 0": "2 (cell 0), 1 (cell 1)",
        "samples, all cells": "288",
        "rounds": "3, 2 times a cell was left out",
        "sent between cells": bytes_text(6000),
        "sent within cells": bytes_text(3000),
        "exposed: training stood still for rounds": f"1.85 s ({100 * exposed / 19:.1f} % of the time)",
        "hidden behind local steps": "3.4 s",
        "hidden behind a round's own work": "500 ms",
        "samples per s": f"{np.median(range(101, 121)) + np.median(range(102, 118)):g}",
        "steps per s": "2.5",
        "most resident bytes": bytes_text(10**9 + 20 * 10**6),
    }
    assert expected.items() <= dict(summary_rows(run)).items()


def test_values_are_those_of_the_files(one: tuple[Report, Page]) -> None:
    found = {(row.name, row.cell): row for row in sum_up_values(one[0].runs[0])}
    loss = found["train/loss", None]
    assert (loss.last, loss.last_step, loss.best, loss.best_step, loss.low, loss.high) == (1.75, 15, 1.5, 10, 1.5, 2.5)
    accuracy = found["val/accuracy", None]
    assert (accuracy.last, accuracy.best, accuracy.best_step) == (0.7, 0.75, 10)
    cell = found["train/loss", 1]
    assert cell.last == pytest.approx(4.0 - 1.6) and cell.records == 16 and cell.nonfinite == 0
    rate = found["train/learning_rate", 0]
    assert rate.best is None and rate.low == rate.high == 0.01
    norm = found["rounds/update_norm", 1]
    assert (norm.records, norm.nonfinite, norm.best) == (2, 1, None) and math.isnan(norm.last)
    divergence = found["rounds/divergence/rms", None]
    assert (divergence.records, divergence.last) == (1, 0.5) and found["rounds/codec_error", 1].last == 0.01


def test_the_page_tells_them(one: tuple[Report, Page]) -> None:
    report, page = one
    assert page.row("samples, all cells") == ["288"] and page.row("time") == ["19 s"]
    assert page.row("steps") == ["20 (cell 0), 16 (cell 1)"]
    assert page.row("last train/loss") == ["all cells 1.75 (best 1.5 at step 10)"]
    assert page.row("last val/accuracy") == ["0.7 (best 0.75 at step 10)"]
    assert page.row("rounds") == ["3, 2 times a cell was left out"]
    assert page.row("sent between cells") == ["6 kB"] and page.row("sent within cells") == ["3 kB"]
    assert page.row("exposed: training stood still for rounds") == ["1.85 s (9.7 % of the time)"]
    assert page.row("samples per s") == ["220"] and page.row("most resident bytes") == ["1.02 GB"]
    assert page.row("ranks and cells") == ["6 in 2 cells (4, 2); replicas of 2"]
    assert page.row("checkpoints") == ["1; latest step_10"]
    assert page.row("val/accuracy") == ["all cells", "0.7", "15", "0.75 ↑", "10", "0.5", "0.75", "3", ""]
    assert page.row("training.epochs") == ["2", "command line"]
    assert page.row("training.callbacks") == ['["a", "b"]', "default"]
    assert page.row("experiment.seed") == ["null", "–"]
    assert ["cell 1", "2.11.0", "2.27.5"] in page.rows
    assert page.row("command") == ["xffl exec 'a b.yaml'"] and "numpy 2.4" in page.text
    assert "no checkpoint 'final'" in page.text
    expected = {"train/loss", "train/learning_rate", "val/accuracy", "rounds", "phases", "traffic", "partition"}
    expected |= {"seconds by phase"}
    expected |= {"throughput/samples_per_s", "throughput/steps_per_s", "memory/resident_bytes", "topology"}
    expected |= {"rounds/update_norm", "rounds/codec_error", "rounds/divergence/rms"}
    assert {picture.title for picture in report.pictures} == expected
    assert len(page.pictures) == len(expected)
    for picture in report.pictures:
        assert (report.page.parent / picture.file).read_bytes().startswith(b"\x89PNG")
    assert "1 value not finite" in page.text


def test_the_page_needs_nothing_but_itself(one: tuple[Report, Page]) -> None:
    _, page = one
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "iframe", "object", "embed", "form", "base"}
    assert not re.search(r"https?:|@import|url\(", page.source.split("<img")[0])
    addresses = {
        key: value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")
    }
    assert all(str(value).startswith(("data:", "#")) for value in addresses.values())
    for svg in page.pictures:
        # Namespaces name things; nobody fetches them.
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert "<script" not in svg and "<!DOCTYPE" not in svg


def test_pictures_hold_names_and_units(one: tuple[Report, Page]) -> None:
    _, page = one
    loss = page.pictures[0]
    for expected in ("train/loss", "cell 0", "cell 1", "all cells", "optimizer step", "time since the start (s)"):
        assert expected in loss
    assert any("1.01 GB" in svg for svg in page.pictures)
    assert any("training stands still" in svg for svg in page.pictures)


def test_runs_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = write(tmp_path / "a" / "run", run_files())
    second = write(tmp_path / "b" / "run", run_files(0.5, epochs=3, extra=True))
    just_started = write(tmp_path / "c", {"origins.json": {}, "topology.json": {"world_size": 2, "cells": [2]}})
    report = write_report([first, second, just_started], tmp_path / "out")
    page = Page(report.page)
    assert [run.name for run in report.runs] == ["a/run", "b/run", "c"]
    assert page.row("last train/loss") == [
        "all cells 1.75 (best 1.5 at step 10)",
        "all cells 0.875 (best 0.75 at step 10)",
        "–",
    ]
    assert page.row("rounds") == ["3, 2 times a cell was left out"] * 2 + ["none"]
    # What a run has no configuration of is unknown, not different.
    assert [(one.name, one.texts) for one in read_settings(report.runs) if one.differs] == [
        ("training.epochs", ("2", "3", "")),
        ("training.extra", ("", "true", "")),
    ]
    assert page.row("training.epochs") == ["2", "3", ""]
    assert page.row("≠ training.epochs") == ["2 (command line)", "3 (command line)", "–"]
    assert page.row("training.lr") == ["0.1 (default)", "0.1 (default)", "–"]
    assert "c has not recorded it." in page.text and "c has no rounds." in page.text
    assert "c: no metrics yet" in page.text
    loss = page.pictures[0]
    assert "a/run" in loss and "b/run" in loss and "#0072b2" in loss and "#e69f00" in loss
    # Both have the same data and cells, which are drawn once; the third has cells of its own.
    titles = [picture.title for picture in report.pictures]
    assert sum(title.startswith("partition") for title in titles) == 1
    assert sum(title.startswith("topology") for title in titles) == 2


def test_blocks_stand_where_rounds_were(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, caption = rounds_figure([read_run(write(tmp_path, run_files()))])
    # The run begins at second 1. Each row has its local steps, what is hidden, and what is exposed.
    drawn = [[path.get_extents() for path in bars.get_paths()] for bars in figure.axes[0].collections]
    spans = [[(round(box.x0, 6), round(box.x1, 6)) for box in boxes] for boxes in drawn]
    hidden, exposed = [(13.2, 16.6)], [(4.5, 5.0), (10.25, 11.0), (13.0, 13.2), (16.6, 17.0)]
    assert spans == 2 * [[(0.0, 19.0)], hidden, exposed]
    assert len(figure.axes) == 1 and "hidden" in caption


def test_shares_of_time_add_up(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    took = [0.5 + (number % 7) / 4 for number in range(1000)]
    delayed = {"phases": {"pack": 0.25, "wait": 0.125, "across": 0.1}}
    rows = [round_line(at, 9 * at, 3.0 * at + 3, one, **delayed) for at, one in enumerate(took)]
    figure, _ = rounds_figure([read_run(write(tmp_path, {"rounds/cell_0.jsonl": "".join(rows)}))])
    areas = []
    for stairs in figure.axes[0].patches:
        low, edges, high = stairs.get_data()[2], stairs.get_data()[1], stairs.get_data()[0]
        areas.append(float((np.abs(np.asarray(low) - np.asarray(high)) * np.diff(edges)).sum()) / 0.72)
    exposed = sum(min(one, 0.375) for one in took)
    # In minutes, as the axis.
    assert areas == pytest.approx([(sum(took) - exposed) / 60, exposed / 60], rel=1e-6)
    # The close-up beside it has single rounds again.
    assert len(figure.axes) == 2 and any(text.get_text() == "9 steps" for text in figure.axes[1].texts)


def test_lines_go_through_the_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = read_run(write(tmp_path, run_files()))
    figure, _ = value_figure([run], "train/loss")
    expected = {"cell 0": (np.arange(1, 21), 0.0), "cell 1": (np.arange(1, 17), 0.25)}
    for axes, is_time in zip(figure.axes, (False, True), strict=True):
        assert len(axes.lines) == 3
        for (name, (steps, late)), drawn in zip(expected.items(), axes.lines, strict=False):
            x, y = np.asarray(drawn.get_xydata()).T
            np.testing.assert_allclose(x, steps - 1 + late if is_time else steps)
            np.testing.assert_allclose(y, 3.0 - 0.1 * steps + (name == "cell 1"))
    figure, _ = traffic_figure([run])
    for axes, each in zip(figure.axes, (1000, 500), strict=True):
        for drawn, factor in zip(axes.lines, (1, 1, 2), strict=True):
            x, y = np.asarray(drawn.get_xydata()).T
            assert x.tolist() == ([0, 5, 11, 17] if factor == 1 else [0, 5, 5, 11, 11, 17, 17])
            assert y[-1] == 3 * each * factor and y[0] == 0


HOSTILE = "<script>alert(1)<∕script> \"quoted\" 'single' &amp; $x_{ \\ _-"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = HOSTILE
    files = run_files(**{name: f"</td>{name}"})
    values = {f"train/{name}\x00\x1b\ud800": 0.5, "_hidden": 1.0, "$": 2.0, "": 3.0}
    files["metrics/cell_0.jsonl"] = files["metrics/cell_1.jsonl"] = line(1, 1.0, values)
    del files["metrics/federation.jsonl"], files["rounds/cell_1.jsonl"]
    files["partition.json"] = {"labels": [name, "$b$"], "counts": [[1, 2], [3, 4]]}
    files["environment.json"] = {name: name, "hosts": [{name: name}], "packages": {name: name}, "command": [name]}
    files["origins.json"] = {f"training.{name}": name}
    runs = [write(tmp_path / f"{at}{name}", files) for at in "ab"]
    for report in (write_report(runs[:1]), write_report(runs, tmp_path / name)):
        page = Page(report.page)
        assert not {tag for tag, _ in page.tags} & {"script"}
        assert f"a{name}" in page.text and page.text.count(name) > 8
        assert all(attribute in {"src", "alt"} for tag, found in page.tags if tag == "img" for attribute in found)
        assert len(page.pictures) == len(report.pictures) == len(list(report.page.parent.glob("*.png")))
        assert "\x00" not in page.source and "\x1b" not in page.source


def test_names_become_labels_and_files() -> None:
    taken: set[str] = set()
    assert [stem_of(name, taken) for name in ("train/loss", "train\\loss", "../..", "Train/Loss", "ä")] == [
        "train_loss",
        "train_loss_2",
        "picture",
        "Train_Loss_3",
        "picture_2",
    ]
    assert label_text("a$b$") == r"a\$b\$" and label_text("_a") == " _a" and label_text(" ") == "(no name)"
    assert len(label_text("x" * 1000)) < 50 and label_text("a\nb") == "a b"
    assert printable("a\x00b\udc80c\td\n") == "a\ufffdb\ufffdc\td\n"


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (0.12344, "0.1234"),
        (3.2e-5, "3.2e-05"),
        (12345.6, "12,346"),
        (math.nan, "NaN"),
        (-math.inf, "-infinity"),
        (1e20, "1e+20"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 s"),
        (2e-5, "20 µs"),
        (0.35, "350 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min"),
        (320, "5 min 20 s"),
        (3599.7, "1 h"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
        (math.nan, "NaN"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (999.6, "1 kB"), (1536, "1.54 kB"), (999_600_000, "1 GB"), (3.2e9, "3.2 GB")]
)
def test_bytes_are_short(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_directions_follow_from_names() -> None:
    assert [is_better_high(name) for name in ("val/accuracy", "val/top1_acc", "val/F1", "val/map")] == [True] * 4
    assert [is_better_high(name) for name in ("train/loss", "val/perplexity", "val/mse", "x/loss_acc")] == [False] * 4
    assert [is_better_high(name) for name in ("train/grad_norm", "loss/rate", "val/accumulated")] == [None] * 3


def test_a_cut_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = [line(step, step, {"train/loss": 1.0 / step}) for step in range(1, 6)]
    files = {"metrics/cell_0.jsonl": "".join(whole) + whole[0][:-9], "rounds/cell_0.jsonl": '{"time": 1, "step"'}
    run = read_run(write(tmp_path / "cut", files))
    assert run.series["train/loss"][0].values.tolist() == [1.0, 0.5, 1 / 3, 0.25, 0.2]
    assert run.rounds == {} and sum("last line is cut off" in note for note in run.notes) == 2
    # Resumed behind a cut line, and other rubbish in the middle.
    rubbish = (
        "\n\n[1]\n{}\n\xff\xfe\n"
        + '{"time": "x", "step": 1, "values": {}}\n'
        + '{"time": 1, "step": true, "values": {}}\n'
    )
    files = {"metrics/cell_0.jsonl": whole[0] + whole[1][:20] + "\n" + rubbish + whole[2]}
    run = read_run(write(tmp_path / "resumed", files))
    assert run.series["train/loss"][0].steps.tolist() == [1.0, 3.0]
    assert [note for note in run.notes if "cannot be read" in note] == [
        "metrics/cell_0.jsonl: 6 lines cannot be read and are left out"
    ]


def test_endless_files_and_lines_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "cell_0", {"rounds/cell_0.jsonl": "", "metrics/cell_0.jsonl": ""})
    for kind in ("rounds", "metrics"):
        os.truncate(folder / kind / "cell_0.jsonl", 2**40)
    monkeypatch.setattr(reader, "FILE_LIMIT", 2**24)
    tracemalloc.start()
    begun = time.thread_time()
    run = read_run(folder)
    assert time.thread_time() - begun < 5 and tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert sum("bytes are left out; the first 16777216 are read" in note for note in run.notes) == 2
    assert run.rounds == run.metrics == {} and not run.is_elastic

    long = line(2, 2, {"train/loss": 2.0}, more="x" * 2**21)
    write(folder, {"metrics/cell_0.jsonl": line(1, 1, {"a": 1.0}) + long + line(3, 3, {"a": 3.0}) + long[:-9]})
    run = read_run(folder)
    assert run.series["a"][0].steps.tolist() == [1.0, 3.0] and "train/loss" not in run.series
    assert "metrics/cell_0.jsonl: 1 line cannot be read and is left out" in run.notes


def test_names_of_values_are_limited(tmp_path: Path) -> None:
    many = {f"v/{number}": 1.0 for number in range(5000)}
    text = line(1, 1, {"x" * 1000: 1.0, "a/b": 1.0}) + line(2, 2, many) + line(3, 3, {"a/b": 2.0, **many})
    rounds = round_line(1, 5, 1.0, 0.1, divergence=many, phases=many)
    run = read_run(write(tmp_path, {"metrics/cell_0.jsonl": text, "rounds/cell_0.jsonl": rounds}))
    assert len(run.metrics[0].series) == 1000 and run.series["a/b"][0].values.tolist() == [1.0, 2.0]
    [only] = run.rounds[0]
    assert len(only.extras) == 1000 and set(only.phases) == set(list(many)[:1000])
    assert sum("values of others are left out" in note for note in run.notes) == 2


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    values = ["NaN", "Infinity", "-Infinity", 10**400, True, None, "text", [1], {"a": 1}, 2]
    text = "".join(line(step, step, {"x/y": value}) for step, value in enumerate(values))
    # Python's own writer knows these words, too.
    text += '{"time": 1790000020, "step": 99, "values": {"x/y": NaN}}\n'
    run = read_run(write(tmp_path, {"metrics/cell_3.jsonl": text}))
    series = run.series["x/y"][3]
    assert series.steps.tolist() == [0, 1, 2, 9, 99]
    np.testing.assert_array_equal(series.values, [math.nan, math.inf, -math.inf, 2.0, math.nan])
    only = sum_up_values(run)[0]
    assert (only.records, only.nonfinite, only.low, only.high, only.last_step) == (5, 4, 2.0, 2.0, 99)
    # An integer that is no float is nothing that a run writes.
    assert any("1 line cannot be read" in note for note in run.notes)


@pytest.mark.parametrize(
    "files, told",
    [
        ({"environment.json": {}}, "no metrics yet"),
        ({"metrics/cell_0.jsonl": "", "metrics/cell_0.csv": "time,step"}, "no metrics yet"),
        ({"metrics/cell_0.jsonl": line(1, 1, {"train/loss": 2.0})}, "no validation"),
        ({"metrics/cell_0.jsonl": line(1, 1, {})}, "no rounds were recorded"),
        ({"metrics/cell_0.jsonl": "".join(line(s, s, {"train/loss": "NaN"}) for s in (1, 2))}, "2 values not finite"),
        ({"metrics/federation.jsonl": line(0, 0, {"val/accuracy": 0.0})}, "no topology.json"),
        ({"rounds/cell_1.jsonl": round_line(1, 1, 1.0, 0.0)}, "no metrics yet"),
        (
            {"rounds/cell_0.jsonl": '{"time": 5, "step": 1, "round": 1, "seconds": 1, "phases": 3, "steps": "x"}'},
            "no metrics",
        ),
        ({"topology.json": {"world_size": 1, "cells": [1]}}, "no rounds: there is one cell"),
        ({"topology.json": {"world_size": 1, "cells": [1], "federated": True}}, "no federation, though one was asked"),
        (
            {"topology.json": {"world_size": 1, "cells": [1]}, "config.yaml": "federation: {every: 2}"},
            "1 in 1 cell (1); a federation was asked for, and there is none",
        ),
        ({"topology.json": {"world_size": 3, "cells": [1]}}, "does not describe a federation"),
        ({"topology.json": "{"}, "topology.json cannot be read"),
        ({"topology.json": [1]}, "topology.json holds no object"),
        ({"topology.json": {"world_size": 1, "cells": 5}}, "does not describe a federation"),
        ({"topology.json": {"world_size": 4, "cells": [2, 2], "cell_shape": "ab"}}, "does not describe a federation"),
        ({"partition.json": '{"counts": [[Infinity, 1]]}'}, "does not describe a partition"),
        ({"partition.json": {"labels": ["a"], "counts": [[1, 2]]}}, "does not describe a partition"),
        ({"partition.json": {"counts": []}}, "does not describe a partition"),
        ({"partition.json": {"counts": [[-1, 2]]}}, "does not describe a partition"),
        ({"metrics/x": "", "config.yaml": "a: [1"}, "config.yaml cannot be read"),
        ({"metrics/x": "", "config.yaml": "just text"}, "config.yaml holds no object"),
        ({"metrics/x": "", "config.yaml": "a: &a {b: *a, c: 2020-01-01, 3: {}}"}, "no origins.json"),
        (
            {"environment.json": {"started_at": "soon", "hosts": "one", "packages": [1], "command": "xffl"}},
            "no topology",
        ),
        (
            {
                "topology.json": {"world_size": 3, "cells": [1, 1, 1]},
                "metrics/cell_1.jsonl": line(1, 1, {"train/loss": 1.0}) + line(2, 5000, {"train/loss": 1.0}),
            },
            "no metrics of cell 0, 2",
        ),
    ],
)
def test_a_report_says_what_is_missing(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = write_report([write(tmp_path / "run", files)])
    page = Page(report.page)
    assert told in page.text
    assert len(page.pictures) == len(report.pictures)
    assert page.row("rounds") is not None and page.row("time") is not None
    assert all(text for _, text in summary_rows(report.runs[0]))


def test_what_is_there_is_not_missed(tmp_path: Path) -> None:
    files: dict[str, Any] = {"metrics/cell_0.jsonl": "".join(line(s, s, {"val/loss": 1.0}) for s in range(1, 99))}
    files["metrics/federation.jsonl"] = line(1, 1, {"val/loss": 1.0}) + line(9, 90, {"val/loss": 1.0})
    files |= {"partition.json": {"counts": [[1, 2]]}, "config.yaml": "a: {b: {}, c: []}", "checkpoints/final/x": ""}
    run = read_run(write(tmp_path, files))
    assert not any(word in note for note in run.notes for word in ("validation", "final", "pause"))
    assert run.partition is not None and run.partition.labels == ("0", "1")
    assert run.configuration == {"a.b": {}, "a.c": []}


def test_a_pause_and_an_earlier_start_count(tmp_path: Path) -> None:
    rows = "".join(line(step, step + (1000 if step > 5 else 0), {"train/loss": 1.0}) for step in range(1, 11))
    # 1,790,000,000 s are 2026-09-21 14:13:20 UTC.
    started = {"started_at": "2026-09-21T16:13:10+02:00"}
    run = read_run(write(tmp_path, {"metrics/cell_0.jsonl": rows, "environment.json": started}))
    assert run.seconds == 1020.0
    assert any("pause of 1001 s" in note for note in run.notes)
    # A resumed run tells its latest start, and a time without a zone may mean any.
    for later in ("2026-09-21T16:20:00Z", "1999-01-01T00:00:00", 5):
        write(tmp_path, {"environment.json": {"started_at": later}})
        assert read_run(tmp_path).seconds == 1009.0


def test_the_largest_and_the_best_need_not_be_the_last(tmp_path: Path) -> None:
    rows = [{"memory/peak_bytes": most, "val/top1": best} for most, best in ((7.0, 0.5), (9.0, 0.75), (8.0, 0.75))]
    text = "".join(line(10 * at, at, values) for at, values in enumerate(rows, 1))
    run = read_run(write(tmp_path, {"metrics/cell_0.jsonl": text}))
    assert dict(summary_rows(run))["most peak bytes"] == bytes_text(9)
    (found,) = sum_up_values(run, "val/top1")
    assert (found.best, found.best_step, found.last_step) == (0.75, 20, 30)


def test_what_is_shared_out_adds_up_over_cells_alone(tmp_path: Path) -> None:
    names = {"metrics/cell_0.jsonl": 10.0, "metrics/cell_1.jsonl": 20.0, "metrics/federation.jsonl": 30.0}
    files = {name: line(1, 1, {"throughput/tokens_per_s": rate}) for name, rate in names.items()}
    assert dict(summary_rows(read_run(write(tmp_path, files))))["tokens per s"] == "30"


def test_rounds_are_a_table(tmp_path: Path) -> None:
    table = read_run(write(tmp_path, run_files())).round_table
    assert len(table) == 6 and table["number"].tolist() == [1, 2, 3, 1, 2, 3]
    cell = table.where("cell", 0)
    means = {name.removeprefix("phase/"): float(cell[name].mean()) for name in table.names("phase/*")}
    assert means == pytest.approx({"vote": 0.1, "across": 1.6 / 3, "pack": 0.2 / 3, "commit": 0.1 / 3, "wait": 0.1})
    # Training stood still in all phases of both blocking rounds, and in three of the delayed one.
    still = {name.removeprefix("exposed/"): float(cell[name].sum()) for name in table.names("exposed/*")}
    assert still == pytest.approx({"vote": 0.2, "across": 0.6, "pack": 0.2, "commit": 0.1, "wait": 0.3})
    # The run began at second 1; the rest of the time up to second 18 was between rounds.
    assert cell["between rounds"].tolist() == pytest.approx([4.5, 5.25, 5.4])
    assert cell["between rounds"].sum() + cell["exposed"].sum() == pytest.approx(17.0)
    assert not table["phase/none"].any() and table.sorted_by("time")["cell"].tolist() == [0, 1] * 3


def test_a_figure_is_an_entry_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    median = catalogue.RoundFigure(
        title="usual phases",
        description="Stacked bars.",
        columns=("phase/*",),
        draw=partial(bars_figure, reduce=np.median, title="usual phases", x_label="median", caption="Medians."),
    )
    monkeypatch.setattr(catalogue, "ROUND_FIGURES", (*catalogue.ROUND_FIGURES, median))
    monkeypatch.setattr(catalogue, "ROUND_FIGURES", catalogue.ROUND_FIGURES[-2:])
    report = write_report([write(tmp_path, {"rounds/cell_0.jsonl": run_files()["rounds/cell_0.jsonl"]})])
    shown = [picture for picture in report.pictures if picture.section == "Rounds and traffic"]
    assert [picture.file for picture in shown] == ["traffic.png", "usual_phases.png"]
    assert shown[-1].caption == "Medians." and (report.page.parent / "usual_phases.png").is_file()


def test_seconds_of_each_cell_by_phase(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = next(figure for figure in catalogue.ROUND_FIGURES if figure.title == "seconds by phase")
    run = read_run(write(tmp_path, run_files()))
    drawn, caption = figure.draw([run], figure.columns)
    (axes,) = drawn.axes
    widths = {str(bars.get_label()): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert list(widths) == ["between rounds", "vote", "pack", "across", "commit", "wait"]
    assert widths["between rounds"] == pytest.approx([15.15, 15.15]) and widths["across"] == pytest.approx([0.6, 0.6])
    assert axes.get_xlabel() == "time up to the last round (s)" and "validations" in caption


def cells_of(*steps: int) -> dict[str, Any]:
    return {f"metrics/cell_{cell}.jsonl": line(step, 1, {"train/loss": 1.0}) for cell, step in enumerate(steps)}


@pytest.mark.parametrize(
    ("files", "name", "text"),
    [
        (cells_of(5, 5), "steps", "5"),
        (cells_of(*range(9, 0, -1)), "steps", "1 to 9"),
        (cells_of(1), "ranks and cells", "1 cell with metrics"),
        (cells_of(1, 1), "last train/loss", "cell 0 1 (best 1 at step 1); cell 1 1 (best 1 at step 1)"),
        (
            cells_of(*[1] * 9),
            "last train/loss",
            "; ".join([f"cell {cell} 1 (best 1 at step 1)" for cell in range(8)] + ["..."]),
        ),
        (
            {**cells_of(1), "checkpoints/final/x": "", "checkpoints/latest": "final"},
            "checkpoints",
            "1, with final; latest final",
        ),
    ],
)
def test_a_run_in_words(files: dict[str, Any], name: str, text: str, tmp_path: Path) -> None:
    assert dict(summary_rows(read_run(write(tmp_path, files))))[name] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory/used_bytes", "90 B"), ("bytes/ratio", "90"), ("round_seconds", "1 min 30 s"), ("steps", "90")],
)
def test_names_tell_units(name: str, text: str) -> None:
    assert value_text(name, 90.0) == text


def test_long_lines_keep_their_outline() -> None:
    draw = np.random.default_rng(0)
    x, values = np.arange(10_007.0), draw.normal(size=10_007)
    values[[10, 5000]] = [50.0, -70.0]
    values[2000:2100] = math.nan
    found = thin(x, values, 200)
    assert len(found.x) == 200 and found.length == 51
    assert np.nanmax(found.high) == 50.0 and np.nanmin(found.low) == -70.0
    assert np.isnan(found.mean).sum() == np.isnan(found.low).sum() >= 1
    # Each stretch against plain Python.
    edges = [int(edge) for edge in np.linspace(0, 10_007, 201)]
    for at, (first, last) in enumerate(pairwise(edges)):
        part = [value for value in values[first:last].tolist() if math.isfinite(value)]
        if part:
            assert found.mean[at] == pytest.approx(sum(part) / len(part)) and found.low[at] == min(part)
    stairs = thin(x, x, 100, stairs=True)
    assert stairs.x[0] == 0 and stairs.x[-1] == 10_006 and len(stairs.x) <= 101
    vast = thin(x[:3], np.array([1.0, 1e308, -1e308]), 5)  # matplotlib would make infinite limits of it
    assert np.isnan(vast.mean).tolist() == [False, True, True]
    short = thin(x[:5], np.array([1.0, math.inf, 3.0, 4.0, 5.0]), 5)
    assert short.length == 1 and np.isnan(short.mean[1]) and short.mean[4] == 5.0


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = "".join(line(step, step, {"train/loss": 2.0 + math.sin(step)}) for step in range(20_000))
    rounds = "".join(round_line(number, 9 * number, 9.0 * number, 3.0) for number in range(1, 2001))
    report = write_report([write(tmp_path, {"metrics/cell_0.jsonl": rows, "rounds/cell_0.jsonl": rounds})])
    page = Page(report.page)
    assert "the mean of up to 80 records" in page.text and "more than 200 rounds" in page.text
    assert report.page.stat().st_size < 400_000
    rows = dict(summary_rows(report.runs[0]))
    assert rows["exposed: training stood still for rounds"].startswith("1 h 40 min")


def test_many_cells_are_drawn_in_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files: dict[str, Any] = {f"metrics/cell_{cell}.jsonl": line(1, 1, {"train/loss": 1.0 * cell}) for cell in range(70)}
    files |= {f"rounds/cell_{cell}.jsonl": round_line(1, 1, 2.0, 0.5) for cell in range(70)}
    page = Page(write_report([write(tmp_path, files)]).page)
    assert "Every 3th of the 70 cells is drawn." in page.text
    assert "The first 16 of the 70 cells" in page.text and dict(summary_rows(read_run(tmp_path)))["rounds"] == "1"


def test_rounds_in_which_nothing_moved_do_not_count(tmp_path: Path) -> None:
    skipped = round_line(2, 4, 3.0, 0.01, is_skipped=True)  # the next one, which takes place, has its number
    told = (
        round_line(1, 2, 2.0, 0.5) + skipped + round_line(2, 6, 4.0, 0.5) + round_line(3, 8, 5.0, 0.01, is_skipped=True)
    )
    assert dict(summary_rows(read_run(write(tmp_path, {"rounds/cell_0.jsonl": told}))))["rounds"] == "2"


def test_folders_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "runs" / "demo", {"metrics/x": ""})
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("trainer: x")
    file = tmp_path / "file"
    file.write_text("")
    for folders, out, message in (
        ([tmp_path / "none"], None, "is not a folder"),
        ([tmp_path / "project"], None, "is not a run; a run folder has"),
        ([tmp_path / "runs"], None, f"is not a run, but holds runs; give some of these: {run}"),
        ([run, run], tmp_path, "given twice"),
        ([run, tmp_path / "runs" / ".." / "runs" / "demo"], tmp_path, "given twice"),
        ([run, tmp_path / "other"], None, "--out FOLDER"),
        ([run] * 33, tmp_path, "give 32 at most"),
        ([], None, "no run folder is given"),
        ([run], file, "is not a folder; give one with --out"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            write_report(folders, out)
    assert main(["report", str(tmp_path / "project")]) == 2
    assert "ConfigError: folder" in capsys.readouterr().err


def test_the_command_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {name: content for name, content in run_files().items() if name != "metrics/cell_0.jsonl"}
    run = write(tmp_path / "demo", {**files, "metrics/cell_1.jsonl": line(1, 1, {"train/loss": 1.0})})
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    assert str(run / "pictures" / "report.html") in told and "demo: no checkpoint 'final'" in told
    assert main(["report", str(run), "--out", str(tmp_path / "new" / "place")]) == 0
    assert (tmp_path / "new" / "place" / "report.html").is_file()
    one, two = ((folder / "report.html").read_bytes() for folder in (run / "pictures", tmp_path / "new" / "place"))
    assert one == two, "the same run gives the same page"


def test_reading_needs_no_torch() -> None:
    code = "import sys, xffl.run_report.page; assert not {'torch', 'matplotlib', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Links ----------------------------------------------------------------------------------------------------------------


def test_a_report_is_not_written_through_links(tmp_path: Path) -> None:
    """Another user who may write into the folder has put links where the page and the pictures go."""
    run, aim = write(tmp_path / "mine", run_files()), tmp_path / "aim"
    names = [file.name for file in write_report([run], tmp_path / "first").page.parent.iterdir()]
    assert "report.html" in names and len(names) > 3
    aim.write_text("kept")
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).symlink_to(aim)
    written = write_report([run], tmp_path / "out")
    assert aim.read_text() == "kept" and not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert written.page.read_bytes() == (tmp_path / "first" / "report.html").read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "pictures").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="pictures' is a link, which the page is not written through; give --out"):
        write_report([run])
    assert not [*elsewhere.iterdir()]
