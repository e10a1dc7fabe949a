"""The page of a report: built as a tree, so that nothing a run is called can become markup."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

from xffl.run_report.configuration import settings
from xffl.run_report.curves import run_style
from xffl.run_report.numbers import number_text, printable
from xffl.run_report.pictures import Picture
from xffl.run_report.reading import Run
from xffl.run_report.sections import SECTIONS, in_order
from xffl.run_report.style import STYLE
from xffl.run_report.summary import cell_name, is_better_high, standings, summary, value_text

__all__ = ["page"]

Element = ElementTree.Element
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show its own style and pictures, fetch and run nothing."""
BORDERS = {"-": "solid", "--": "dashed", "-.": "double", ":": "dotted"}
MAX_VALUE_ROWS = 400


def page(runs: Sequence[Run], pictures: Sequence[Picture], notes: Sequence[str]) -> str:
    """Write the page.

    Local and pure.

    :param runs: One run, or several to compare.
    :param pictures: What was drawn.
    :param notes: What of the whole report is missing.
    :return: HTML.
    """
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs compared"
    under = str(runs[0].folder) if len(runs) == 1 else ", ".join(run.name for run in runs)
    parts = [("Summary", _summary(runs, notes))]
    for section in SECTIONS:
        shown = [picture for picture in pictures if picture.section == section]
        if shown:
            parts.append((section, [_figure(picture) for picture in shown]))
    parts += [("Values", _values(runs)), ("Configuration", _configuration(runs)), ("Environment", _environment(runs))]
    places = {name: name.lower().replace(" ", "-") for name, _ in parts}
    body = _tag("body", _tag("h1", title), _tag("p", under, class_="under"))
    body.append(_tag("nav", *(_tag("a", name, href=f"#{place}") for name, place in places.items())))
    for name, content in parts:
        body.append(_tag("section", _tag("h2", name, id=places[name]), *content))
    return f"<!DOCTYPE html>\n{_text(_tag('html', _head(title), body, lang='en'))}\n"


def _head(title: str) -> Element:
    return _tag(
        "head",
        _tag("meta", charset="utf-8"),
        _tag("meta", **{"http-equiv": "Content-Security-Policy", "content": POLICY}),
        _tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Without one a browser would ask a server for it.
        _tag("link", rel="icon", href="data:,"),
        _tag("title", f"{title} – xffl report"),
        _tag("style", STYLE),
    )


def _summary(runs: Sequence[Run], notes: Sequence[str]) -> list[Element]:
    told = [dict(summary(run)) for run in runs]
    names = _merged([list(one) for one in told])
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    rows = [[name, *(one.get(name, "–") for one in told)] for name in names]
    parts = [_table(head, rows)]
    if len(runs) > 1:
        for index, cell in enumerate(list(parts[0].iter("th"))[1 : len(runs) + 1]):
            colour, style = run_style(index)
            _put_first(
                cell, _tag("span", class_="swatch", style=f"border-color:{colour};border-style:{BORDERS[style]}")
            )
        differing = [one for one in settings(runs) if one.differs]
        parts.append(_tag("h3", "What the configurations differ in"))
        parts.append(
            _table(head, [[one.name, *one.texts] for one in differing]) if differing else _tag("p", "Nothing.")
        )
    missing = [*notes, *(f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes)]
    if missing:
        parts += [_tag("h3", "What is missing"), _tag("ul", *(_tag("li", note) for note in missing), class_="notes")]
    return parts


def _values(runs: Sequence[Run]) -> list[Element]:
    head = ["value", "run", "of", "last", "at step", "best", "at step", "smallest", "largest", "records", "not finite"]
    rows = []
    for run in runs:
        for one in standings(run):
            arrow = {None: "", True: " ↑", False: " ↓"}[is_better_high(one.name)]
            best = "–" if one.best is None else value_text(one.name, one.best) + arrow
            at = "–" if one.best_step is None else f"{one.best_step:,}"
            ends = [value_text(one.name, value) for value in (one.low, one.high)]
            counts = [f"{one.records:,}", f"{one.nonfinite:,}" if one.nonfinite else ""]
            last = [value_text(one.name, one.last), f"{one.last_step:,}"]
            rows.append([one.name, run.name, cell_name(one.cell), *last, best, at, *ends, *counts])
    if not rows:
        return [_tag("p", "No value was recorded yet.")]
    order = {name: index for index, name in enumerate(in_order(row[0] for row in rows))}
    rows.sort(key=lambda row: order[row[0]])
    left_out = len(rows) - MAX_VALUE_ROWS
    rows = rows[:MAX_VALUE_ROWS]
    if len(runs) == 1:
        head, rows = [head[0], *head[2:]], [[row[0], *row[2:]] for row in rows]
    parts = [_table(head, rows, numbers_from=len(head) - 8)]
    if left_out > 0:
        parts.append(_tag("p", f"{left_out:,} more rows are left out; the run's metrics/ have all.", class_="under"))
    return parts


def _figure(picture: Picture) -> Element:
    source = "data:image/svg+xml;base64," + base64.b64encode(picture.svg.encode()).decode()
    image = _tag("img", src=source, alt=picture.description)
    return _tag("figure", image, _tag("figcaption", f"{picture.caption} File: {picture.file}"))


def _configuration(runs: Sequence[Run]) -> list[Element]:
    found = settings(runs)
    if not found:
        return [_tag("p", "No config.yaml was found.")]
    if len(runs) == 1:
        rows = [[one.name, one.texts[0], one.origins[0] or "–"] for one in found]
        return [_table(["name", "value", "comes from"], rows, code=(1,))]
    rows = []
    for one in found:
        cells = [
            f"{text} ({origin})" if origin else text or "–" for text, origin in zip(one.texts, one.origins, strict=True)
        ]
        rows.append([f"≠ {one.name}" if one.differs else one.name, *cells])
    table = _table(["name", *(run.name for run in runs)], rows, code=tuple(range(1, len(runs) + 1)))
    lines = list(table.iter("tr"))[1:]
    for line, one in zip(lines, found, strict=True):
        if one.differs:
            line.set("class", "differs")
    count = sum(one.differs for one in found)
    told = f"≠ marks the {count} value{'' if count == 1 else 's'} in which runs differ; in brackets: their origins."
    return [_tag("p", told, class_="under"), table]


def _environment(runs: Sequence[Run]) -> list[Element]:
    parts: list[Element] = []
    for run in runs:
        if len(runs) > 1:
            parts.append(_tag("h3", run.name))
        if not run.environment:
            parts.append(_tag("p", "No environment.json was found."))
            continue
        rows = [
            [str(name), _plain(name, value)]
            for name, value in run.environment.items()
            if name not in ("packages", "hosts") and value is not None
        ]
        parts.append(_table([], rows, code=(1,)))
        hosts = [host for host in _listed(run.environment.get("hosts")) if isinstance(host, dict)]
        if hosts:
            columns = list(dict.fromkeys(str(key) for host in hosts for key in host))
            parts.append(_table(columns, [[_plain(key, host.get(key, "–")) for key in columns] for host in hosts]))
        packages = run.environment.get("packages")
        if isinstance(packages, dict) and packages:
            shown = ", ".join(f"{name} {version}" for name, version in packages.items())
            parts.append(_tag("p", "Packages: ", _tag("code", shown)))
    return parts


def _plain(name: str, value: Any) -> str:
    if name == "command" and isinstance(value, list):
        return shlex.join(str(word) for word in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number_text(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _merged(lists: Sequence[list[str]]) -> list[str]:
    """Merge lists of names; one that only some have stands behind the name that it follows there."""
    merged: list[str] = []
    for names in lists:
        place = 0
        for name in names:
            if name in merged:
                place = merged.index(name) + 1
            else:
                merged.insert(place, name)
                place += 1
    return merged


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int | None = None, code: tuple[int, ...] = ()
) -> Element:
    """Build a table whose first column names the rows."""

    def is_number(column: int) -> bool:
        return numbers_from is not None and column >= numbers_from

    body = _tag("tbody")
    for row in rows:
        line = _tag("tr", _tag("th", row[0], scope="row"))
        for column, text in enumerate(row[1:], start=1):
            content = _tag("code", text) if column in code else text
            line.append(_tag("td", content, class_="number" if is_number(column) else None))
        body.append(line)
    titles = [_tag("th", text, scope="col", class_="number" if is_number(at) else None) for at, text in enumerate(head)]
    return _tag("div", _tag("table", *([_tag("thead", _tag("tr", *titles))] if head else []), body), class_="wide")


def _tag(name: str, /, *content: Element | str, class_: str | None = None, **attributes: str) -> Element:
    """Build an element; its texts and attributes are escaped when it is written."""
    element = Element(name, {key: printable(value) for key, value in attributes.items()})
    if class_ is not None:
        element.set("class", class_)
    for part in content:
        if isinstance(part, str):
            _append_text(element, printable(part))
        else:
            element.append(part)
    return element


def _append_text(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def _put_first(element: Element, child: Element) -> None:
    """Move an element's text behind a child that is put before it."""
    child.tail, element.text = element.text, None
    element.insert(0, child)


def _text(root: Element) -> str:
    return ElementTree.tostring(root, encoding="unicode", method="html")
