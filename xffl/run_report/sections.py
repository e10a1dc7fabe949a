"""The parts of a report, and which values belong to which."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SECTIONS", "in_order", "section_of"]

SECTIONS = {
    "Training": ("train/",),
    "Validation": ("val/", "test/"),
    "Rounds and traffic": (),
    "Throughput": ("throughput/",),
    "Memory": ("memory/",),
    "Drift and norms": ("drift/", "norms/", "rounds/"),
    "Other values": ("",),
    "Data": (),
    "Topology": (),
}
"""Parts of the report in order, with the beginnings of the names of the values that belong there."""
FIRST = ("train/loss", "val/loss", "val/accuracy", "val/perplexity", "train/learning_rate")
"""Values that stand before others of their part."""


def section_of(name: str) -> str:
    """Return the part of the report that a value belongs to.

    :param name: The value's name.
    :return: One of :data:`SECTIONS`.
    """
    return next(section for section, starts in SECTIONS.items() if starts and name.startswith(starts))


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of values as the report shows them.

    :param names: The names.
    :return: Each once: by part, the usual ones first, then by name.
    """
    sections = {section: index for index, section in enumerate(SECTIONS)}
    places = {name: index for index, name in enumerate(FIRST)}
    return sorted(set(names), key=lambda name: (sections[section_of(name)], places.get(name, len(FIRST)), name))
