"""The HTML page about a run, or about several compared.

``reader`` reads what exists of a run folder, rounds into a ``table``; ``elastic`` makes one run of the folders of an
elastic run's cells; ``summary`` turns it into numbers and texts. ``catalogue`` lists the figures, which ``figures``
draws, and ``page`` writes figures and texts into one HTML file, by the template ``page.html.j2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.run_report.page import Report, write_report

__all__ = ["Report", "write_report"]

__getattr__, __dir__ = lazy_names(__name__)
