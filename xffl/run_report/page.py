"""Page about one run, or about several compared: its figures, and the HTML file that holds them and the texts."""

from __future__ import annotations

import base64
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from xffl.checks import group
from xffl.errors import ConfigError
from xffl.extras import optional_import
from xffl.files import write_whole
from xffl.planning.figures import PALETTE, save, topology_figure
from xffl.planning.partition import partition_figure
from xffl.planning.text import describe_world
from xffl.run_report.elastic import find_runs, read_runs
from xffl.run_report.figures import (
    STYLES,
    participation_figure,
    phases_figure,
    rounds_figure,
    run_style,
    traffic_figure,
    value_figure,
)
from xffl.run_report.pace import find_slowest_cells
from xffl.run_report.reader import Run
from xffl.run_report.summary import (
    SECTIONS,
    cell_name,
    cell_table,
    environment_tables,
    label_text,
    printable,
    read_settings,
    section_of,
    slowest_text,
    sort_names,
    stem_of,
    sum_up_values,
    summary_rows,
    value_rows,
    value_text,
)

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Picture", "Report", "write_report"]

T = TypeVar("T")

# What is shown, and what is left out with a note.
MAX_VALUES, MAX_VALUE_ROWS = 40, 400
MAX_LISTED, MAX_DESCRIBED = 20, 6
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
    found = read_runs(runs)
    folder = Path(out) if out is not None else found[0].folder / "pictures"
    if out is None and folder.is_symlink():  # somebody else who may write into the run's folder can have made it
        raise ConfigError(f"{str(folder)!r} is a link, which the page is not written through; give --out FOLDER")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; give one with --out FOLDER, it is made if it is missing")
    folder.mkdir(parents=True, exist_ok=True)
    pictures, notes = draw_pictures(found, folder)
    values, settings = value_rows(found), read_settings(found)
    # What cells of one run are given differently, but for where they write to.
    compared = [*found[0].parts.values()] if len(found) == 1 and found[0].parts else found
    different = [one for one in read_settings(compared) if one.differs and (compared is found or one.name != OWN)]
    value_heads = ["of", "last", "at step", "best", "at step", "smallest", "largest", "records", "not finite"]
    text = template.render(
        runs=found,
        title=f"Run {found[0].name}" if len(found) == 1 else f"{len(found)} runs compared",
        swatches=[(colour, STYLES[style]) for colour, style in map(run_style, range(len(found)))],
        summary=_merge_rows([dict(summary_rows(run)) for run in found]),
        compared=[run.name for run in compared],
        different=[[setting.name, *setting.texts] for setting in different],
        notes=[*notes, *(f"{run.name}: {note}" if len(found) > 1 else note for run in found for note in run.notes)],
        pictures=pictures,
        sections=list(dict.fromkeys(picture.section for picture in pictures)),
        value_heads=["value", *(["run"] if len(found) > 1 else []), *value_heads],
        values=values[:MAX_VALUE_ROWS],
        hidden_values=max(0, len(values) - MAX_VALUE_ROWS),
        settings=[setting.row for setting in settings],
        marked=[index for index, setting in enumerate(settings) if setting.differs],
        cells=[(run.name, *cell_table(run)) for run in found if run.history is not None],
        environments=[
            (part.name if part is run or len(found) == 1 else f"{run.name}, {part.name}", environment_tables(part))
            for run in found
            for part in (run.parts.values() or [run])
        ],
    )
    target = folder / "report.html"
    write_whole(target, text)
    return Report(target, pictures, found)


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


@dataclass
class _Album:
    """The figures so far, with the names of their files."""

    folder: Path
    scratch: Path
    pictures: list[Picture] = field(default_factory=list)
    stems: set[str] = field(default_factory=set)

    def add(self, section: str, title: str, caption: str, description: str, paint: Callable[[Path], None]) -> None:
        """Add a figure; ``paint`` writes it as PNG and as SVG."""
        stem = stem_of(title, self.stems)
        vector = self.scratch / f"{stem}.svg"
        with warnings.catch_warnings():
            # Names in scripts that matplotlib's font lacks; a browser has them.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            paint(self.folder / f"{stem}.png")
            paint(vector)
        # Without the document type, and without who drew it when.
        svg = re.sub(r"<!DOCTYPE[^>]*>", "", vector.read_text(encoding="utf-8"), count=1)
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
        source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        self.pictures.append(
            Picture(section, title=title, caption=caption, description=description, file=f"{stem}.png", source=source)
        )


def draw_pictures(runs: Sequence[Run], folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw what the runs have recorded, PNG files into a folder; return the figures, and notes of what is missing."""
    notes = []
    with tempfile.TemporaryDirectory() as scratch:
        album = _Album(folder, Path(scratch))
        names = sort_names(name for run in runs for name in run.series)
        for name in names[:MAX_VALUES]:
            figure, caption = value_figure(runs, name)
            album.add(
                section_of(name),
                title=name,
                caption=caption,
                description=_describe(name, runs),
                paint=partial(save, figure),
            )
        if left_out := names[MAX_VALUES:]:
            notes.append(f"{len(left_out)} more values have no figure: {', '.join(left_out[:MAX_LISTED])}")
        for run in runs:
            if run.history is not None:
                of_run = f" of {run.name}" if len(runs) > 1 else ""
                figure, caption = participation_figure(run.history, f"who took part in the rounds{of_run}")
                described = "A row for each cell, with a block where it contributed to a round. The table has the sums."
                album.add(
                    "Cells", title=f"cells{of_run}", caption=caption, description=described, paint=partial(save, figure)
                )
        if any(run.rounds for run in runs):
            described = "Bars on a time axis: when each cell trained and when it stood still for a round."
            figure, caption = rounds_figure(runs)
            late = [
                f"Slowest{f' in {run.name}' if len(runs) > 1 else ''}: {slowest_text(run)}."
                for run in runs
                if find_slowest_cells(run) is not None
            ]
            caption = " ".join([caption, *late])
            figures = [("rounds", f"{described} The summary has the sums.", (figure, caption))]
            if any(record.phases for run in runs for records in run.rounds.values() for record in records):
                figures.append(("phases", "Stacked bars of the mean time of each phase.", phases_figure(runs)))
            described = "Line charts of the bytes sent so far between and within cells. The summary has the sums."
            figures.append(("traffic", described, traffic_figure(runs)))
            for title, described, (figure, caption) in figures:
                album.add(
                    "Rounds and traffic",
                    title=title,
                    caption=caption,
                    description=described,
                    paint=partial(save, figure),
                )
        for partition, of in _group(runs, lambda run: run.partition):
            caption = f"Samples of each class in each cell{of}; the darker a field, the more samples."
            samples, classes, cells = sum(map(sum, partition.counts)), len(partition.labels), len(partition.counts)
            described = f"Heat map of {samples:,} samples of {classes} classes in {cells} cells."
            paint = partial(
                partition_figure,
                partition.counts,
                classes=[label_text(label) for label in partition.labels],
                title=label_text("Samples of each class" + of.replace(" of ", ": ", 1)),
            )
            album.add("Data", title=f"partition{of}", caption=caption, description=described, paint=paint)
        for topology, of in _group(runs, lambda run: run.topology):
            caption = f"Cells, replicas and shards{of}; outlined ranks send over the slow link."
            paint = partial(topology_figure, topology)
            album.add(
                "Topology", title=f"topology{of}", caption=caption, description=describe_world(topology), paint=paint
            )
    order = list(SECTIONS)
    return sorted(album.pictures, key=lambda picture: order.index(picture.section)), notes


def _group(runs: Sequence[Run], value_of: Callable[[Run], T | None]) -> list[tuple[T, str]]:
    """Return the different values that runs have, each with the words that name its runs where there are several."""
    groups = group((value, run.name) for run in runs if (value := value_of(run)) is not None)
    return [(value, f" of {', '.join(names)}" if len(runs) > 1 else "") for value, names in groups.items()]


def _describe(name: str, runs: Sequence[Run]) -> str:
    """Describe the figure of a value by the last values of its lines."""
    ends = []
    for run in runs:
        values = sum_up_values(run, name)
        together = [value for value in values if value.cell is None] or values
        at = f"{run.name}, " if len(runs) > 1 else ""
        ends += [f"{at}{cell_name(value.cell)}: {value_text(name, value.last)}" for value in together]
    more = f"; and {len(ends) - MAX_DESCRIBED} more" if len(ends) > MAX_DESCRIBED else ""
    listed = "; ".join(ends[:MAX_DESCRIBED])
    return f"Line charts of {name} against steps and against time. Last values: {listed}{more}."
