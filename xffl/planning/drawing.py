"""What all figures share: matplotlib on demand, colours, and saving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from xffl.errors import ConfigError
from xffl.extras import optional_import

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "MUTED", "PALETTE", "SUFFIXES", "checked_path", "new_figure", "save", "tint", "write"]

SUFFIXES = (".png", ".svg")
"""Formats that are written."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D00", "#999999")
"""Colours that colour-blind readers can tell apart (Okabe and Ito 2008, their yellow and black exchanged)."""
INK = "#1B1F24"
"""Colour of text and outlines."""
MUTED = "#626B75"
"""Colour of what stands back."""


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a figure's path.

    :param path: Where to write.
    :return: The same as a :class:`~pathlib.Path`.
    :raises ConfigError: if its suffix names no format that is written here.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"figure {str(path)!r} has no known format; give a name that ends in {' or '.join(SUFFIXES)}")
    return target


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that belongs to no window and no global state.

    :param width: In inches.
    :param height: In inches.
    :return: The figure.
    :raises ConfigError: if matplotlib is not installed.
    """
    with optional_import("report", "figures need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), facecolor="white")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same bytes, and text in an SVG stays text.

    :param figure: The figure.
    :param path: Where to write; folders are made.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix.lower() == ".svg"
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "xffl"}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if is_svg else None)


def tint(colour: str, strength: float) -> str:
    """Mix a colour with white.

    :param colour: As ``#RRGGBB``.
    :param strength: 0 gives white, 1 the colour.
    :return: The mixture, as ``#RRGGBB``.
    """
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02X}" for part in parts)


def write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 9,
    colour: str = INK,
    weight: str = "normal",
    align: str = "left",
) -> None:
    """Write a text into axes, centred on its height.

    :param axes: Where to write.
    :param x: Place of its left end, its middle or its right end, as ``align`` says.
    :param y: Place of its middle.
    :param text: The text.
    :param size: Size of its letters, in points.
    :param colour: Their colour.
    :param weight: ``normal`` or ``bold``.
    :param align: ``left``, ``center`` or ``right``.
    """
    axes.text(x, y, text, fontsize=size, color=colour, fontweight=weight, ha=align, va="center", zorder=6)
