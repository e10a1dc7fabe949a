"""Page about one run, or about several compared: its figures, and the HTML file that holds them and the texts."""

from __future__ import annotations

import base64
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.files import write_whole
from xffl.planning.figures import PALETTE
from xffl.run_report.catalogue import PageFigure, find_figures
from xffl.run_report.elastic import find_runs, read_runs
from xffl.run_report.figures import STYLES, run_style
from xffl.run_report.reader import Run
from xffl.run_report.summary import (
    SECTIONS,
    cell_table,
    environment_tables,
    printable,
    read_settings,
    stem_of,
    summary_rows,
    value_rows,
)

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Picture", "Report", "write_report"]

MAX_VALUE_ROWS = 400
"""Rows of the table of values; of others the page says how many there are."""
OWN = "experiment.output_dir"
"""What each cell of an elastic run is given for itself."""


# The files ------------------------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """A figure in a section of the page; the description is for readers who do not see it."""

    section: str
    title: str
    caption: str
    description: str
    file: str
    source: str


class Report(NamedTuple):
    """What was written.

    :param page: The HTML file.
    :param pictures: The figures; their PNG files stand beside the page.
    :param runs: The runs, with notes of what is missing in each.
    """

    page: Path
    pictures: list[Picture]
    runs: list[Run]


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Report:
    """Write a page about one run, or about several compared, and its figures as PNG files.

    Local; of a run that is still going on, the page shows what has been written. The cells of an elastic run, whose
    folders stand in one folder, are one run.

    :param runs: Run folders; of an elastic run those of its cells, or the one that holds them.
    :param out: Where to write; ``None`` takes ``pictures/`` in the folder of a single run.
    :return: What was written.
    :raises ConfigError: if a folder is not that of a run, or given twice, if there are several and no folder to write
        into, or more than figures can distinguish, or if matplotlib or jinja2 is missing.
    """
    most, count = len(PALETTE) * len(STYLES), len(find_runs(runs))
    if count > most:
        raise ConfigError(f"{count} runs cannot be told apart in one figure; give {most} at most")
    if out is None and count > 1:
        raise ConfigError(f"a page that compares {count} runs needs a folder of its own; give it with --out FOLDER")
    template = _load_template()
    read = read_runs(runs)
    folder = Path(out) if out is not None else read[0].folder / "pictures"
    if out is None and folder.is_symlink():  # somebody else who may write into the run's folder can have made it
        raise ConfigError(f"{str(folder)!r} is a link, which the page is not written through; give --out FOLDER")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; give one with --out FOLDER, it is made if it is missing")
    folder.mkdir(parents=True, exist_ok=True)
    pictures, notes = draw_pictures(read, folder)
    values, settings = value_rows(read), read_settings(read)
    # What cells of one run are given differently, but for where they write to.
    compared = [*read[0].parts.values()] if len(read) == 1 and read[0].parts else read
    different = [one for one in read_settings(compared) if one.differs and (compared is read or one.name != OWN)]
    value_heads = ["of", "last", "at step", "best", "at step", "smallest", "largest", "records", "not finite"]
    text = template.render(
        runs=read,
        title=f"Run {read[0].name}" if len(read) == 1 else f"{len(read)} runs compared",
        swatches=[(colour, STYLES[style]) for colour, style in map(run_style, range(len(read)))],
        summary=_merge_rows([dict(summary_rows(run)) for run in read]),
        compared=[run.name for run in compared],
        different=[[setting.name, *setting.texts] for setting in different],
        notes=[*notes, *(f"{run.name}: {note}" if len(read) > 1 else note for run in read for note in run.notes)],
        pictures=pictures,
        sections=list(dict.fromkeys(picture.section for picture in pictures)),
        value_heads=["value", *(["run"] if len(read) > 1 else []), *value_heads],
        values=values[:MAX_VALUE_ROWS],
        hidden_values=max(0, len(values) - MAX_VALUE_ROWS),
        settings=[setting.row for setting in settings],
        marked=[index for index, setting in enumerate(settings) if setting.differs],
        cells=[(run.name, *cell_table(run)) for run in read if run.history is not None],
        environments=[
            (part.name if part is run or len(read) == 1 else f"{run.name}, {part.name}", environment_tables(part))
            for run in read
            for part in (run.parts.values() or [run])
        ],
    )
    target = folder / "report.html"
    write_whole(target, text)
    return Report(target, pictures, read)


def _load_template() -> Template:
    with optional_import("report", "the page needs jinja2"):
        from jinja2 import Environment

    def finalize(value: object) -> object:
        # Whatever the page shows passes through here and is escaped afterwards, except what a macro has made.
        return value if hasattr(value, "__html__") else printable(value)

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=finalize)
    return environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))


def _merge_rows(summaries: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Merge rows of several runs; one that only some have stands behind the row that it follows there."""
    names: list[str] = []
    for summary in summaries:
        place = 0
        for name in summary:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return [[name, *(summary.get(name, "–") for summary in summaries)] for name in names]


# All figures ----------------------------------------------------------------------------------------------------------


def draw_pictures(runs: Sequence[Run], folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw what the runs have recorded, PNG files into a folder; return the figures, and notes of what is missing."""
    figures, notes = find_figures(runs)
    stems: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        pictures = [_draw(figure, stem_of(figure.title, stems), folder, Path(scratch)) for figure in figures]
    order = list(SECTIONS)
    return sorted(pictures, key=lambda picture: order.index(picture.section)), notes


def _draw(figure: PageFigure, stem: str, folder: Path, scratch: Path) -> Picture:
    """Draw a figure as PNG for the folder, and as SVG for the page."""
    paint, caption = figure.draw()
    vector = scratch / f"{stem}.svg"
    with warnings.catch_warnings():
        # Names in scripts that matplotlib's font lacks; a browser has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        paint(folder / f"{stem}.png")
        paint(vector)
    # Without the document type, and without who drew it when.
    svg = re.sub(r"<!DOCTYPE[^>]*>", "", vector.read_text(encoding="utf-8"), count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    return Picture(
        figure.section,
        title=figure.title,
        caption=caption,
        description=figure.description,
        file=f"{stem}.png",
        source="data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode(),
    )
