"""Read the names that the five reference documents promise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENTS = (
    "distributed_state.rst",
    "distributed_world.md",
    "data_parallel_guide.md",
    "strategy_patterns.md",
    "trainer_core_concepts.md",
)

PATTERNS = (
    r"^\s*class (\w+)",
    r"^\s*def (\w+)",
    r"^\s*- `(\w+)` -",
    r"^        - (\w+)$",
    r"^::: [\w.]+\.(\w+)$",
    r"\*\*(\w+Mixin)\*\*",
    r"^#+ (\w+Mixin)",
    r"\b(DreamTrainerConfig|CheckpointCallback|\w+Strategy)\b",
    r"\b(?:world|strategy|callbacks|trainer|dist|genesis|nn|DeviceParameters|ReduceOp)\.(\w+)",
    r"\bself\.(\w+)",
    r"\bcomm\.(\w+)",
)
"""Where a document of Markdown names something: definitions, lists of members, and what its examples call."""

CONFIGURED = "FaultToleranceParameters|CheckpointCallback|DeviceParameters|DistributedDataParallel|launch_distributed"
"""What the documents call with keywords, each of which is a promise, too."""


def find_shared() -> Path | None:
    """Return the folder of the reference documents, which only developers of xffl have."""
    folder = Path(os.environ.get("XFFL_SHARED", ROOT.parent / "shared")) / "reference"
    return folder if folder.is_dir() else None


def parse_markdown(text: str) -> set[str]:
    """Return all names that a document uses."""
    names: set[str] = set()
    for pattern in PATTERNS:
        names |= set(re.findall(pattern, text, flags=re.MULTILINE))
    for line in re.findall(r"^from (?:dream_trainer|genesis)[\w.]* import (\([^)]*\)|.*)$", text, flags=re.MULTILINE):
        names |= set(re.findall(r"\w+", line))
    for arguments in re.findall(rf"\b(?:{CONFIGURED})\(([^()]*)\)", text):
        names |= set(re.findall(r"^\s*(\w+)(?:: [^=]*)?\s*=", arguments, flags=re.MULTILINE))
    return {name for name in names if not name.startswith("__")}


def parse_rst(text: str) -> dict[str, Any]:
    """Return what ``distributed_state.rst`` says of the module: data, functions, and the class's fields and methods."""
    found: dict[str, Any] = {"data": [], "functions": {}, "fields": {}, "methods": {}}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"\s*\.\. py:(data|function|attribute|method):: (.*)", line)
        if match is None:
            continue
        kind, rest = match.groups()
        if kind == "data":
            found["data"].append(rest)
        elif kind == "attribute":
            options = dict(re.findall(r":(\w+): +(.*)", "\n".join(lines[number + 1 : number + 3])))
            found["fields"][rest] = {"type": options["type"], "value": options["value"]}
        else:
            name, _, signature = rest.partition("(")
            parameters, _, returns = signature.rpartition(")")
            found[f"{kind}s"][name] = {
                "parameters": [parse_parameter(part) for part in split_commas(parameters)],
                "returns": returns.removeprefix(" -> ") or None,
            }
    return found


def parse_parameter(text: str) -> dict[str, str | None]:
    """Return name, type and default of ``name: type = default``."""
    rest, _, default = text.partition(" = ")
    name, _, kind = rest.partition(": ")
    return {"name": name, "type": kind or None, "default": default or None}


def split_commas(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text + ","):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in parts if part]
