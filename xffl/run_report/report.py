"""The report of one run, or of several compared: a page that needs nothing but itself, and its pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from xffl.errors import ConfigError
from xffl.planning.drawing import PALETTE
from xffl.run_report.curves import STYLES
from xffl.run_report.html import page
from xffl.run_report.pictures import Picture, draw_pictures
from xffl.run_report.reading import Run, read_runs

__all__ = ["Report", "write_report"]

PAGE = "report.html"
PICTURES = "pictures"


class Report(NamedTuple):
    """What was written.

    :param page: The HTML file.
    :param pictures: What was drawn; the PNG files stand beside the page.
    :param runs: The runs, with notes of what is missing in each.
    """

    page: Path
    pictures: list[Picture]
    runs: list[Run]


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Report:
    """Write a page about one run, or about several compared, and its pictures as PNG files.

    Local; a run that is still going on is told as far as it has been written.

    :param runs: Run folders.
    :param out: Where to write; ``None`` takes ``pictures/`` in the folder of a single run.
    :return: What was written.
    :raises ConfigError: if a folder is none of a run, or given twice, if there is more than one and no place to write,
        if there are too many to tell apart, or matplotlib is missing.
    """
    most = len(PALETTE) * len(STYLES)
    if len(runs) > most:
        raise ConfigError(f"{len(runs)} runs cannot be told apart in one picture; give {most} at most")
    if out is None and len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs have no folder in common; say with --out FOLDER where to write")
    found = read_runs(runs)
    folder = Path(out) if out is not None else found[0].folder / PICTURES
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{str(folder)!r} is no folder; give one with --out FOLDER, it is made where it does not exist"
        )
    folder.mkdir(parents=True, exist_ok=True)
    pictures, notes = draw_pictures(found, folder)
    target = folder / PAGE
    # Readers never see half a page.
    draft = folder / f".{PAGE}.{os.getpid()}"
    draft.write_text(page(found, pictures, notes), encoding="utf-8")
    draft.replace(target)
    return Report(target, pictures, found)
