"""Pages and sections of the manual that messages, docstrings and other texts name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from xffl.cli.execute import split_command

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("xffl", "tests", "benchmarks", "examples", "workflows", "docs")


def texts() -> dict[str, str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "_build" not in path.parts]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile"]
    kinds = {".py", ".rst", ".md", ".j2", ".yaml", ".sh", ""}
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if path.is_file() and path.suffix in kinds}


def headings(page: Path) -> list[str]:
    return re.findall(r"^(\S.*)\n(?:=+|-+)$", page.read_text(), re.MULTILINE)


def test_files_of_the_manual_that_are_named_exist() -> None:
    named = {
        (where, page)
        for where, text in texts().items()
        if where not in ("CHANGELOG.md", "tests/unit/test_named_pages.py")
        for page in re.findall(r"docs/[\w/]+\.rst", text)
    }
    assert len(named) > 20
    assert [(where, page) for where, page in sorted(named) if not (ROOT / page).exists()] == []


def test_sections_that_messages_name_exist() -> None:
    pages = {titles[0]: titles[1:] for titles in map(headings, (ROOT / "docs").rglob("*.rst")) if titles}
    named = {
        tuple(part.strip() for part in words.split(", ", 1))
        for where, text in texts().items()
        if where.startswith("xffl/")
        for words in re.findall(r"\bdocs: ([^)\n\"]+)", text)
    }
    assert ("Versions and formats", "What may differ between cells") in named
    assert [words for words in named if words[0] not in pages or not {*words[1:]} <= {*pages[words[0]]}] == []


def test_the_manual_begins_with_two_lines_that_install_and_run_something() -> None:
    shown = re.search(r"code-block:: bash\n\n((?:   .*\n)+)", (ROOT / "docs/index.rst").read_text())
    assert shown is not None
    assert shown.start() < 100
    install, run = map(shlex.split, shown[1].splitlines())
    assert install[:3] == ["pip", "install", "-e"]
    extra = re.fullmatch(r"\.\[(\w+)\]", install[3])
    assert extra is not None
    assert f"\n{extra[1]} =\n" in (ROOT / "setup.cfg").read_text()
    assert (ROOT / install[-1]).is_file()
    assert run[:2] == ["xffl", "exec"]
    words, script = split_command(run[1:])
    assert words == ["exec", "--processes", "4", "--federated", "2,2"]
    assert script is not None
    assert (ROOT / script[0]).is_file()
