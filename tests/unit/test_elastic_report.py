"""The page about an elastic run: its cells' folders are one run, and what they have recorded tells who took part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_run_report import START, Page, line, write
from xffl.cli.main import main
from xffl.errors import ConfigError
from xffl.run_report import write_report
from xffl.run_report.elastic import History, Presence, read_runs
from xffl.run_report.figures import participation_figure, rounds_figure, value_figure
from xffl.run_report.reader import read_rounds, read_run
from xffl.run_report.summary import cell_table, summary_rows

CONTRIBUTED, IDLE, MISSED, LEFT = Presence
EPOCHS = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2), "d": (0, 2)}
ROUNDS = {**dict.fromkeys(range(2, 6), "a"), **dict.fromkeys(range(6, 10), "b"), **dict.fromkeys(range(10, 13), "c")}
ROUNDS |= {13: "d", 14: "d"}
"""The epoch of each round: the first, which only begins the run, is not recorded. Cell 2 is killed in round 6, and
takes the model over in round 10; cell 1 leaves after round 12."""


def round_of(number: int, **more: Any) -> dict[str, Any]:
    """What a cell records of a round, which takes place every 5 s and counts 4 steps of 8 samples of each cell."""
    epoch = ROUNDS[number]
    counts = [0 if cell not in EPOCHS[epoch] or (cell, number) == (2, 10) else 4 for cell in range(3)]
    return {
        "time": START + 5.0 * number,
        "step": 4 * (number - 1),
        "round": number,
        "seconds": 0.5,
        "weights": [8 * count for count in counts],
        "steps": counts,
        "cells": EPOCHS[epoch],
        "membership": f"{number}.{epoch}",
        "update_norms": [1.0 * count for count in counts],
        "tries": 1 + (number == 6),
        "restarts": [int(cell == 2 and number > 5) for cell in EPOCHS[epoch]],
        "left": [1] if epoch == "d" else [],
        **more,
    }


def run_files(cell: int, *, is_old: bool = False) -> dict[str, Any]:
    """The folder of a cell. Cell 2 had no checkpoint, so its records begin behind the round that it came back in."""
    numbers = [number for number, epoch in ROUNDS.items() if cell in EPOCHS[epoch] and (cell < 2 or number > 10)]
    records = [round_of(number, time=START + 5.0 * number + 0.01 * cell) for number in numbers]
    if is_old:
        records = [{name: one[name] for name in one if name not in ("restarts", "left")} for one in records]
    last = 4 * (numbers[-1] - 1)
    metrics = [line(step, 5.0 * (1 + step / 4), {"train/loss": 3.0 - 0.1 * step + cell}) for step in range(4, last)]
    metrics.append(line(last, 5.0 * numbers[-1] + 1, {"train/loss": 1.0 + cell, "val/accuracy": 0.9}))
    shape = {"world_size": 2, "cells": [2], "replica_size": 2, "cell_shape": None, "federated": False}
    config = {
        "experiment": {"output_dir": f"runs/demo/cell_{cell}"},
        "federation": {"every": 4, "weight": "samples"},
        "training": {"lr": 0.1 * (cell + 1) if cell < 2 else 0.1},
    }
    return {
        "metrics/cell_0.jsonl": "".join(metrics[32 * (cell == 2) :]),
        "metrics/federation.jsonl": line(40, 42.0, {"val/loss": 0.25, "train/loss": 7.0}),
        "rounds/cell_0.jsonl": "".join(f"{json.dumps(one)}\n" for one in records),
        "topology.json": shape | ({} if is_old else {"elastic": {"cell": cell, "cells": [2, 2, 2]}}),
        "config.yaml": json.dumps(config),
        "environment.json": {"torch": f"2.1{cell}"},
        f"checkpoints/step_{8 * cell}/x": "",
        "checkpoints/latest": f"step_{8 * cell}",
    }


def write_cells(folder: Path, cells: tuple[int, ...] = (0, 1, 2), **how: Any) -> list[Path]:
    return [write(folder / f"cell_{cell}", run_files(cell, **how)) for cell in cells]


def test_who_took_part_is_what_all_cells_have_recorded(tmp_path: Path) -> None:
    write_cells(tmp_path / "demo")
    (run,) = read_runs([tmp_path / "demo"])
    history = run.history
    assert history is not None and run.name == "demo" and history.cells == 3 and history.apart == 0
    assert [one.number for one in history.rounds] == [*range(2, 15)]
    assert history.epochs == [(0, 3), (4, 7), (8, 10), (11, 12)] and history.repeated == 1
    # The rounds that cell 2 has made before it was killed are known from the others.
    assert history.states(0) == 13 * [CONTRIBUTED]
    assert history.states(1) == 11 * [CONTRIBUTED] + 2 * [LEFT]
    assert history.states(2) == 4 * [CONTRIBUTED] + 4 * [MISSED] + [IDLE] + 4 * [CONTRIBUTED]
    assert [history.restarts(cell) for cell in range(3)] == [[], [], [8]]
    told = [tuple(history.totals(cell)) for cell in range(3)]
    assert told == [(13, 0, 0, 14, 0, 52.0, 416.0), (11, 0, 0, 12, 0, 44.0, 352.0), (8, 1, 4, 14, 1, 32.0, 256.0)]
    assert history.spans(2, START, START + 99) == [(START + 10 - 10, START + 25), (START + 49.5, START + 99)]


def test_rounds_that_cells_made_apart_count_where_the_others_went_on_from_them(tmp_path: Path) -> None:
    def told(number: int, at: float, membership: str, *cells: int, **more: Any) -> str:
        weights = [8.0 * (cell in cells) for cell in range(2)]
        record = {"time": START + at, "step": number, "round": number, "seconds": 0.1, "weights": weights}
        return json.dumps({**record, "cells": cells, "membership": membership, **more}) + "\n"

    # Cell 0 makes rounds 2 and 3 alone, later than cell 1, whose run is longer, and then takes its model over.
    files = {
        "a": told(1, 1, "ab", 0, 1) + told(2, 8, "a2", 0) + told(3, 9, "a3", 0) + told(5, 20, "again", 0, 1, tries=3),
        "b": told(1, 1, "ab", 0, 1) + told(2, 4, "b2", 1) + told(3, 5, "b3", 1) + told(4, 6, "b4", 1),
    }
    files["b"] += told(5, 20.1, "again", 0, 1, fragment=1) + told(6, 21, "again", 0, 1, is_skipped=True)
    records = []
    for name, rows in files.items():
        path = write(tmp_path, {name: rows}) / name
        records += read_rounds(path, [])
    history = History.of(records)
    meetings = [one.attendance.membership for one in history.rounds if one.attendance is not None]
    assert meetings == ["ab", "b2", "b3", "b4", "again"] and history.apart == 2
    assert history.states(0) == [CONTRIBUTED, MISSED, MISSED, MISSED, CONTRIBUTED]
    # Older records tell no restarts. Each fragment takes in the same steps: those of the one with the most count.
    assert history.restarts(0) == [] and history.totals(0).restarts is None and history.repeated == 2
    assert (history.totals(0).weight, history.totals(1).weight) == (16.0, 40.0)
    np.testing.assert_allclose(history.place(START + np.array([0, 1, 2.5, 4, 99]), START), [0, 1, 1.5, 2, 5])


def test_lives_are_counted_over_starts_of_the_whole_run(tmp_path: Path) -> None:
    rows = [round_of(number, restarts=[0, 0, life]) for number, life in ((2, 1), (3, 1), (4, 3), (5, 1))]
    file = write(tmp_path, {"x": "".join(f"{json.dumps(one)}\n" for one in rows)}) / "x"
    history = History.of(read_rounds(file, []))
    # It was started again before it came to its first round; the run was started again as a whole before the last.
    assert history.totals(2).restarts == 1 + 2 + 1 and history.restarts(2) == [0, 2, 3]


def test_one_page_tells_of_all_cells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = write_cells(tmp_path / "demo")
    report = write_report([tmp_path / "demo"])
    page = Page(report.page)
    assert report.page == tmp_path / "demo" / "pictures" / "report.html"
    assert page.row("ranks and cells") == ["6 in 3 cells (2, 2, 2); replicas of 2"]
    assert page.row("rounds") == ["13"] and page.row("epochs, each of rounds by the same cells") == ["4"]
    assert page.row("tries of rounds that were repeated") == ["1"]
    assert page.row("restarts") == ["1 (cell 2)"]
    assert page.row("cells that contribute to a round") == ["2.462 of 3 in the mean"]
    assert page.row("steps that count in rounds") == ["128"] and page.row("samples that count in rounds") == ["1,024"]
    assert page.row("checkpoints") == ["3; latest step_0 (cell 0), step_8 (cell 1), step_16 (cell 2)"]
    heads, rows = cell_table(report.runs[0])
    assert heads[:6] == ["", "contributed", "weight 0", "missed", "last round", "restarts"]
    assert heads[6:10] == ["steps counted", "samples counted", "steps", "samples"]
    assert heads[10:] == ["train/loss", "train/loss at rounds", "val/loss", "val/accuracy"]
    assert rows[2] == ["cell 2", "8", "1", "4", "14", "1", "32", "256", "52", "416", "3", "7", "0.25", "0.9"]
    assert heads in page.rows and all(row in page.rows for row in rows)
    # A setting that cells have differently is told; where each writes to is its own.
    assert page.row("training.lr")[:3] == ["0.1", "0.2", "0.1"]
    assert ["", "cell 0", "cell 1", "cell 2"] in page.rows
    assert sum(row[0] == "experiment.output_dir" for row in page.rows if row) == 1
    assert page.text.count("no checkpoint 'final'") == 1 and "2.11" in page.text and "2.12" in page.text
    assert "a federation was asked for" not in page.text and "no federation" not in page.text
    figure = next(svg for svg, one in zip(page.pictures, report.pictures, strict=True) if one.title == "cells")
    for text in ("who took part", "cell 2", "epoch 1", "first round after a restart", "not there"):
        assert text in figure
    # The same folders one by one are the same run, one of them alone is a run as it was.
    (again,) = read_runs(cells[::-1])
    assert (again.folder, again.name, again.history) == (tmp_path / "demo", "demo", report.runs[0].history)
    (alone,) = read_runs(cells[2:])
    assert (alone.folder, alone.name, alone.history) == (cells[2], "cell_2", None)
    assert alone.series["rounds/cells_averaged"][0].values.tolist() == [3, 3, 2, 2]


def test_the_timeline_has_blocks_epochs_and_restarts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_cells(tmp_path / "demo")
    (run,) = read_runs([tmp_path / "demo"])
    assert run.history is not None
    figure, _ = participation_figure(run.history, "who")
    (axes,) = figure.axes
    boxes = [bars.get_paths()[0].get_extents() for bars in axes.collections]
    drawn = [(round(box.y0 + 0.3), box.x0, box.x1) for box in boxes]
    assert drawn == [(0, 1.5, 14.5), (1, 1.5, 12.5), (2, 1.5, 5.5), (2, 5.5, 9.5), (2, 9.5, 10.5), (2, 10.5, 14.5)]
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches] == [(5.5, 9.5), (12.5, 14.5)]
    assert [np.asarray(marks.get_xydata())[:, 0].tolist() for marks in axes.lines] == [[], [], [9.5]]
    assert [text.get_text() for text in axes.texts] == [*(f"epoch {index}" for index in range(1, 5)), "has left"]


def test_curves_are_drawn_over_rounds_and_time_with_the_epochs_behind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_cells(tmp_path / "demo")
    (run,) = read_runs([tmp_path / "demo"])
    figure, caption = value_figure([run], "train/loss")
    by_round = figure.axes[0]
    assert by_round.get_xlabel() == "round" and "against rounds" in caption and "Bands: epochs" in caption
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cell 0", "cell 1", "cell 2"]
    # Round n takes place after 4 (n - 1) steps; the last record is made after the last round.
    x, y = np.asarray(by_round.lines[0].get_xydata()).T
    np.testing.assert_allclose(x[1:-1], 1 + np.arange(5, 52) / 4)
    np.testing.assert_allclose(y[1:-1], 3.0 - 0.1 * np.arange(5, 52))
    assert x[-1] == 14
    # Cell 2 has records of its first life, up to just behind round 5; none of the time when it was away.
    early = "".join(line(step, 25.1 + step / 100, {"train/loss": 9.0}) for step in range(3))
    metrics = tmp_path / "demo" / "cell_2" / "metrics" / "cell_0.jsonl"
    metrics.write_text(early + metrics.read_text())
    figure, _ = value_figure(read_runs([tmp_path / "demo"]), "train/loss")
    for axes in figure.axes:
        values = np.asarray(axes.lines[2].get_xydata())[:, 1]
        assert np.isnan(values).tolist() == [False] * 3 + [True] + [False] * (len(values) - 4)
    # What a cell has measured over all cells of its world, at rounds, is its own.
    assert set(run.series["train/loss"]) == set(run.series["val/loss"]) == {0, 1, 2}
    assert run.series["train/loss at rounds"][1].values.tolist() == [7.0]
    assert run.series["rounds/update_norm"][2].values.tolist() == 4 * [4.0] + [0.0] + 4 * [4.0]
    bands = [[(one.get_x(), one.get_x() + one.get_width()) for one in axes.patches] for axes in figure.axes]
    assert run.started is not None
    start = run.started - START
    assert bands[0] == [(5, 9), (12, 14)]
    np.testing.assert_allclose(bands[1], [(25 - start, 45 - start), (60 - start, 71 - start)])
    # On the wall clock a cell is only drawn where it was at work.
    figure, caption = rounds_figure([run])
    work = [[box.get_extents() for box in figure.axes[0].collections[3 * row].get_paths()] for row in range(3)]
    spans = [[(round(box.x0, 3), round(box.x1, 3)) for box in boxes] for boxes in work]
    assert spans[0] == [(0.0, round(71 - start, 3))] and len(spans[2]) == 2
    assert spans[2][0] == (0.0, round(25 - start, 3)) and "in no round" in caption


def test_older_runs_and_cells_that_are_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    write_cells(tmp_path / "old", (0, 1), is_old=True)
    assert main(["report", str(tmp_path / "old")]) == 0
    assert "old: no folder of cell 2" in capsys.readouterr().out
    page = Page(tmp_path / "old" / "pictures" / "report.html")
    assert page.row("restarts") == ["not recorded"] and page.row("ranks and cells") == [
        "4 in 2 cells (2, 2); replicas of 2"
    ]
    assert "no folder of cell 2" in page.text
    assert page.row("cell 2")[:5] == ["8", "1", "4", "14", "–"] and page.row("cell 2")[7:] == 6 * ["–"]
    # A run that has just begun has no rounds.
    files = {name: content for name, content in run_files(0).items() if not name.startswith("rounds")}
    write(tmp_path / "new" / "cell_0", files)
    page = Page(write_report([tmp_path / "new"]).page)
    assert page.row("rounds") == ["none"] and "no rounds were recorded" in page.text and "cell 1, 2" in page.text


def test_a_cell_whose_job_is_queued_is_absent(tmp_path: Path) -> None:
    """Its folder has the files of its job, and is given with those of the others, as by ``runs/demo/cell_*``."""
    pytest.importorskip("matplotlib")
    cells = write_cells(tmp_path / "demo", (1, 2))
    queued = write(tmp_path / "demo" / "cell_0", {"slurm/7.sbatch": ""})
    (whole,) = read_runs([tmp_path / "demo"])
    (run,) = read_runs([queued, *cells])
    assert (run.folder, run.name, [*run.parts]) == (tmp_path / "demo", "demo", [1, 2])
    assert run.notes == whole.notes and "no folder of cell 0" in run.notes
    assert write_report([queued, *cells]).page == tmp_path / "demo" / "pictures" / "report.html"
    # Of two cells that were asked for one is there: that is still the run, not the cell.
    (run,) = read_runs([queued, cells[0]])
    assert (run.folder, [*run.parts]) == (tmp_path / "demo", [1])
    # By itself, or beside another run, it is no run; nor is any other folder without a record.
    elsewhere = write_cells(tmp_path / "other", (0, 1))
    other = write(tmp_path / "demo" / "notes", {"slurm/7.sbatch": ""})
    for folders in ([queued], [queued, *elsewhere], [*cells, other], [*cells, tmp_path / "demo" / "cell_7"]):
        with pytest.raises(ConfigError, match="is not a "):
            read_runs(folders)


def test_elastic_runs_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_cells(tmp_path / "one")
    two = write_cells(tmp_path / "two", (0, 1))
    alone = write(tmp_path / "plain", {"metrics/cell_0.jsonl": line(1, 1, {"train/loss": 1.0})})
    report = write_report([tmp_path / "one", *two, alone], tmp_path / "out")
    page = Page(report.page)
    assert [run.name for run in report.runs] == ["one", "two", "plain"]
    assert page.row("restarts") == ["1 (cell 2)", "1 (cell 2)", "–"]
    titles = [picture.title for picture in report.pictures if picture.section == "Cells"]
    assert titles == ["cells of one", "cells of two"]
    assert dict(summary_rows(report.runs[1]))["tries of rounds that were repeated"] == "1"


def test_cells_over_files_are_runs_of_their_own(tmp_path: Path) -> None:
    """Their folders are called alike, and nothing connects them but files."""
    for cell in range(2):
        record = {name: one for name, one in round_of(2).items() if name not in ("cells", "membership", "tries")}
        files = {"metrics/cell_0.jsonl": line(1, 1, {"x/y": 1.0}), "rounds/cell_0.jsonl": json.dumps(record) + "\n"}
        write(tmp_path / "demo" / f"cell_{cell}", files)
    with pytest.raises(ConfigError, match="is not a run, but holds runs; give some of these: "):
        read_runs([tmp_path / "demo"])
    runs = read_runs([tmp_path / "demo" / "cell_0", tmp_path / "demo" / "cell_1"])
    assert [run.name for run in runs] == ["cell_0", "cell_1"] and not any(run.history for run in runs)


def test_folders_that_are_no_cells_of_one_run(tmp_path: Path) -> None:
    cells = write_cells(tmp_path / "demo", (0, 1))
    copied = write(tmp_path / "demo" / "copied", run_files(1))
    for folders, message in (
        ([tmp_path / "demo"], f"{cells[1]} and {copied} are both of cell 1 of one run; give one"),
        ([*cells, copied], "are both of cell 1"),
        ([cells[0], cells[0]], f"run {cells[0]} is given twice"),
        ([cells[0], tmp_path / "demo" / ".." / "demo" / "cell_0"], "is given twice"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            write_report(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert read_run(cells[1]).is_elastic and len(read_runs(cells)) == 1
