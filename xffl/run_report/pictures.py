"""All pictures of a report: as PNG files in a folder, and as SVG for the page."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from xffl.planning.drawing import save
from xffl.planning.figure import topology_figure
from xffl.planning.partition_figure import partition_figure
from xffl.planning.text import describe_world
from xffl.run_report.curves import Panel, curves_caption, curves_of, draw_panels
from xffl.run_report.numbers import label_text, stem_of
from xffl.run_report.reading import FEDERATION, Run
from xffl.run_report.rounds import phases_figure, rounds_figure, traffic_figure
from xffl.run_report.sections import SECTIONS, in_order, section_of
from xffl.run_report.summary import cell_name, standings, value_text

__all__ = ["Picture", "draw_pictures"]

MAX_VALUES = 40
"""Values that get a picture."""
T = TypeVar("T")
TOLD = 6
"""Curves whose last values a picture's description tells."""


@dataclass(frozen=True)
class Picture:
    """One picture.

    :param section: The part of the report, one of :data:`~xffl.run_report.sections.SECTIONS`.
    :param title: What it shows.
    :param caption: What is to be seen in it, and what is left out.
    :param description: The same for readers who do not see it.
    :param file: Name of its PNG file.
    :param svg: The picture, as text.
    """

    section: str
    title: str
    caption: str
    description: str
    file: str
    svg: str


@dataclass
class _Album:
    """Collects pictures, and writes their files."""

    folder: Path
    scratch: Path
    pictures: list[Picture] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def add(self, section: str, title: str, texts: tuple[str, str], paint: Callable[[Path], None]) -> None:
        """Paint a picture twice.

        :param section: The part of the report.
        :param title: What it shows.
        :param texts: Caption and description.
        :param paint: Writes it into a file whose suffix says the format.
        """
        stem = stem_of(title, self.taken)
        vector = self.scratch / f"{stem}.svg"
        with warnings.catch_warnings():
            # Names in scripts that matplotlib's font lacks; a browser has them.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            paint(self.folder / f"{stem}.png")
            paint(vector)
        self.pictures.append(Picture(section, title, *texts, f"{stem}.png", _bare(vector.read_text(encoding="utf-8"))))


def draw_pictures(runs: Sequence[Run], folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw all that the runs have recorded.

    Local.

    :param runs: One run, or several to compare.
    :param folder: Where the PNG files go; it is made.
    :return: The pictures, in the order of the report, and notes of what is not drawn.
    :raises ConfigError: if matplotlib is missing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        album = _Album(folder, Path(scratch))
        notes = _draw_values(album, runs)
        _draw_rounds(album, runs)
        _draw_data(album, runs)
        _draw_topologies(album, runs)
    order = list(SECTIONS)
    return sorted(album.pictures, key=lambda picture: order.index(picture.section)), notes


def _draw_values(album: _Album, runs: Sequence[Run]) -> list[str]:
    names = in_order(name for run in runs for name in run.series)
    for name in names[:MAX_VALUES]:
        lines = curves_of(runs, name)
        is_bytes = name.endswith("bytes")
        panels = [Panel(lines, x, name.rpartition("/")[2].replace("_", " "), is_bytes) for x in ("step", "time")]
        figure, thinning = draw_panels(name, panels, share_y=True)
        texts = (curves_caption(name, runs, thinning), _description(name, runs))
        album.add(section_of(name), name, texts, partial(save, figure))
    if left_out := names[MAX_VALUES:]:
        return [f"{len(left_out)} more values have no picture: {', '.join(left_out[:20])}"]
    return []


def _description(name: str, runs: Sequence[Run]) -> str:
    ends = []
    for run in runs:
        of_run = standings(run, name)
        together = [one for one in of_run if one.cell == FEDERATION] or of_run
        at = f"{run.name}, " if len(runs) > 1 else ""
        ends += [f"{at}{cell_name(one.cell)}: {value_text(name, one.last)}" for one in together]
    more = f"; and {len(ends) - TOLD} more" if len(ends) > TOLD else ""
    return f"Line charts of {name} against steps and against time. Last values: {'; '.join(ends[:TOLD])}{more}."


def _draw_rounds(album: _Album, runs: Sequence[Run]) -> None:
    if not any(run.rounds for run in runs):
        return
    section = "Rounds and traffic"
    figure, caption = rounds_figure(runs)
    told = "Bars on a time axis: when each cell trained and when it stood still for a round. The summary has the sums."
    album.add(section, "rounds", (caption, told), partial(save, figure))
    if any(one.phases for run in runs for lines in run.rounds.values() for one in lines):
        figure, caption = phases_figure(runs)
        album.add(section, "phases", (caption, "Stacked bars of the mean time of each phase."), partial(save, figure))
    figure, caption = traffic_figure(runs)
    told = "Line charts of the bytes sent so far across cells and at home. The summary has the sums."
    album.add(section, "traffic", (caption, told), partial(save, figure))


def _draw_data(album: _Album, runs: Sequence[Run]) -> None:
    for shared, several in _alike([run for run in runs if run.partition is not None], lambda run: run.partition):
        assert shared is not None
        names = "" if len(runs) == 1 else f" of {', '.join(run.name for run in several)}"
        samples = sum(map(sum, shared.counts))
        caption = f"Samples of each class in each cell{names}; a field is as dark as it has samples."
        told = f"Heat map of {samples:,} samples of {len(shared.labels)} classes in {len(shared.counts)} cells."
        classes = [label_text(label) for label in shared.labels]
        title = label_text("Who has what" + names.replace(" of ", ": ", 1))
        paint = partial(partition_figure, shared.counts, classes=classes, title=title)
        album.add("Data", f"partition{names}", (caption, told), paint)


def _draw_topologies(album: _Album, runs: Sequence[Run]) -> None:
    for shared, several in _alike([run for run in runs if run.topology is not None], lambda run: run.topology):
        assert shared is not None
        names = "" if len(runs) == 1 else f" of {', '.join(run.name for run in several)}"
        caption = f"Cells, replicas and shards{names}; outlined ranks send over the slow link."
        paint = partial(topology_figure, shared)
        album.add("Topology", f"topology{names}", (caption, f"{describe_world(shared)}"), paint)


def _alike(runs: Sequence[Run], of: Callable[[Run], T]) -> list[tuple[T, list[Run]]]:
    """Gather the runs that have the same of something."""
    found: list[tuple[T, list[Run]]] = []
    for run in runs:
        own = of(run)
        for other, several in found:
            if other == own:
                several.append(run)
                break
        else:
            found.append((own, [run]))
    return found


def _bare(svg: str) -> str:
    """Drop what no reader of the page needs from a picture: the document type, and who drew it when."""
    svg = re.sub(r"<!DOCTYPE[^>]*>", "", svg, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
