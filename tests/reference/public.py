"""The public names, keywords, defaults and options, as ``public_names.json`` keeps them.

``python -m tests.reference.public --write`` writes the file anew, after a change that is meant.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tests.golden.launch import options_of
from xffl.cli.main import COMMANDS, main
from xffl.cluster.launch.failure import ExitCode

__all__ = ["FILE", "read_public"]

FILE = Path(__file__).with_name("public_names.json")
ROOMS = ("xffl", *(f"xffl.{room}" for room in ("aggregation", "distributed", "parallel", "checkpoint", "training")))
CALLED = {
    "xffl": "session shard Aggregator FederatedScaling RoundReport",
    "xffl.aggregation": "Level Levels",
    "xffl.checkpoint": "save_checkpoint load_checkpoint consolidate_checkpoint CheckpointManager auto_resume",
    "xffl.training": "BaseTrainer",
}
METHODS = {
    "Aggregator": "aggregate aggregate_async close discard state_dict load_state_dict",
    "FederatedScaling": "step settle discard state_dict load_state_dict",
}


def keywords(called: Any) -> list[str]:
    """Return the parameters of a call in order; a star stands before those that need their names."""
    found = []
    for one in inspect.signature(called).parameters.values():
        if one.name == "self":
            continue
        default = "" if one.default is one.empty else f" = {default_of(one.default)}"
        if one.kind is one.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append({one.VAR_KEYWORD: "**", one.VAR_POSITIONAL: "*"}.get(one.kind, "") + one.name + default)
    return found


def default_of(value: Any) -> str:
    return "<factory>" if repr(value) == "<factory>" or type(value).__repr__ is object.__repr__ else repr(value)


def options(*words: str) -> dict[str, str]:
    """Return the options and arguments of a command, each with its default."""
    told = io.StringIO()
    with redirect_stdout(told), suppress(SystemExit), mock.patch.dict(os.environ, COLUMNS="200"):
        main([*words, "--help"])
    found: dict[str, str] = {}
    for header, default in options_of(told.getvalue()).items():
        for name in re.findall(r"--[\w-]+", header) or [header]:
            found[name] = default
    return dict(sorted(found.items()))


def read_public() -> dict[str, Any]:
    """Return what is public now; local."""
    named = {room: import_module(room) for room in ROOMS}
    called: dict[str, Any] = {}
    for room, names in CALLED.items():
        for name in names.split():
            value = getattr(named[room], name)
            called[name] = keywords(value)
            for method in METHODS.get(name, "").split():
                called[f"{name}.{method}"] = keywords(getattr(value, method))
    report = named["xffl"].RoundReport
    return {
        "exports": {room: sorted(module.__all__) for room, module in named.items()},
        "keywords": called,
        "fields of a report": {field.name: str(field.type) for field in dataclasses.fields(report)},
        "commands": {name: options(name) for name in sorted(COMMANDS)}
        | {f"workflow {name}": options("workflow", name) for name in ("begin", "init", "record")},
        "exit codes": {code.name: int(code) for code in ExitCode},
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.reference.public --write")
    kinds = []
    for kind, told in read_public().items():
        rows = [json.dumps(name) + ": " + json.dumps(value) for name, value in told.items()]
        kinds.append(json.dumps(kind) + ": {\n " + ",\n ".join(rows) + "\n}")
    FILE.write_text("{" + ",\n".join(kinds) + "}\n")
