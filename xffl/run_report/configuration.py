"""Configurations of runs side by side: each value, where it comes from, and whether the runs differ in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from xffl.run_report.reading import Run

__all__ = ["Setting", "find_origin", "setting_text", "settings"]

LONGEST = 2000


class Setting(NamedTuple):
    """One value of a configuration, in every run.

    :param name: Its dotted name.
    :param texts: The value in each run; empty where a run has none.
    :param origins: Where it comes from, in each run; empty where nobody knows.
    :param differs: Whether two runs have different ones.
    """

    name: str
    texts: tuple[str, ...]
    origins: tuple[str, ...]
    differs: bool


def settings(runs: Sequence[Run]) -> list[Setting]:
    """Lay configurations side by side; local.

    :param runs: One run, or several.
    :return: One for each value that a run has, in the order of the files.
    """
    names = dict.fromkeys(name for run in runs for name in run.configuration)
    # A run without any configuration differs in nothing: it is not known.
    known = [run for run in runs if run.configuration]
    found = []
    for name in names:
        values = [setting_text(run.configuration[name]) if name in run.configuration else None for run in known]
        found.append(
            Setting(
                name,
                tuple(setting_text(run.configuration[name]) if name in run.configuration else "" for run in runs),
                tuple(find_origin(run, name) if name in run.configuration else "" for run in runs),
                len(set(values)) > 1,
            )
        )
    return found


def find_origin(run: Run, name: str) -> str:
    """Tell where a value comes from: what is told of itself, or of the nearest thing that holds it.

    :param run: The run.
    :param name: The value's dotted name.
    :return: Such as ``command line``; empty where nothing is told.
    """
    while name:
        if name in run.origins:
            return run.origins[name]
        name = name.rpartition(".")[0]
    return ""


def setting_text(value: Any) -> str:
    """Write a value as it would stand in a file.

    :param value: What YAML has read.
    :return: The text; of very long ones the beginning.
    """
    if isinstance(value, str):
        text = value if value else '""'
    elif value is None or isinstance(value, (bool, int, float)):
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            # Keys of other types, or lists that hold themselves.
            text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} letters)"
