"""Hostile inputs for every reader of ``tests.chaos.inputs``, under an audit hook: nothing runs, nothing is written.

    python -m tests.hostile [--long] [PARSER ...]    # all inputs of each reader, or a few

Run as a process of its own, since an audit hook stays. Each reader first takes its valid inputs, so that what it
imports and executes by itself is known; then inputs in which somebody has put names of callables, classes and modules,
tags of YAML, pickles that call, and paths out of the folder. What the interpreter tells of is compared: imports,
executed code, processes, connections, files opened for writing, removed or renamed outside the reader's own folder.

Each kind of input is also given to a reader that is meant to be unsafe. Its line counts only if the hook caught that.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.chaos.inputs.__main__ import find_parsers
from tests.chaos.inputs.attempts import attempt
from tests.chaos.inputs.parser import Parser

MODULE = "hostile_module"
PATHS = 14
"""Places of a JSON text that get something hostile"""
ALWAYS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.sendto",
    "ctypes.dlopen",
    "webbrowser.open",
)
"""What no reader does, whatever it reads"""
FEW, MORE = 4, 20
"""Inputs of a reader in the short form, and of the readers of what is combined and loaded"""
OWN_WORDS = (
    "configuration: file",
    "configuration: words",
    "configuration: submit",
    "algorithm",
    "codec",
    "submit: words",
)
"""Readers of what the user wrote, where a dotted path may be imported, but a tag of YAML may not make anything"""
OVER_LINKS = ("states of replica groups",)
"""Readers that are handed their input through a connection, which they open themselves"""
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


class Watch:
    """What the interpreter tells of, while something is read."""

    def __init__(self, outside: Path) -> None:
        self.is_on = False
        self.root = ""
        self.outside = str(outside)
        self.found: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in ALWAYS:
            self.found.add(f"{event} {str(arguments)[:100]}")
        elif event == "import":
            self.found.add(f"import {arguments[0]}")
        elif event == "exec":
            self.found.add(f"exec {getattr(arguments[0], 'co_filename', '')}")
        elif event == "open":
            path, mode, flags = arguments
            is_written = any(one in (mode or "") for one in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if is_written:
                self._note_path(event, path)
        elif event in CHANGES:
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._note_path(event, path)

    def _note_path(self, event: str, path: Any) -> None:
        # What is given by descriptor, or by a name within a folder that is open, was opened by a path before.
        if isinstance(path, str | bytes | os.PathLike):
            full = os.path.abspath(os.fsdecode(path))
            if not full.startswith((self.root, tempfile.gettempdir(), "/dev/null")) or full.startswith(self.outside):
                self.found.add(f"{event} {full}")

    def hear(self, call: Callable[[], object]) -> set[str]:
        """Return what is told of while something is called."""
        self.found = set()
        self.is_on = True
        try:
            call()
        finally:
            self.is_on = False
        return self.found


# Hostile inputs -------------------------------------------------------------------------------------------------------


class Calls:
    """An object whose pickle calls a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def payloads(mark: str) -> list[Any]:
    """Return values that some reader may take for a name of something to make or to run."""
    return [
        {"name": "os.system", "command": f"touch {mark}"},
        f"os.system:command=touch {mark}",
        f"{MODULE}.Thing",
        {"class_path": f"{MODULE}.Thing", "init_args": {}},
        {"name": f"{MODULE}.Thing", "combine": f"{MODULE}.Thing", "server": {"schedule": f"{MODULE}.Thing"}},
        {"options": {"combine": f"{MODULE}.Thing"}, "algorithm": {"name": "fedavg", "combine": f"{MODULE}.Thing"}},
        MODULE,
        f"$(touch {mark})",
        f"!!python/object/apply:os.system ['touch {mark}']",
        f"../../{MODULE}",
        mark,
        f"__import__('os').system('touch {mark}')",
    ]


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of a tree."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from paths_of(item, (*at, key))


def in_json(example: bytes, mark: str) -> list[bytes]:
    """Return a JSON text with something hostile in some places, and in those of names in all."""
    tree = json.loads(example)
    places = list(paths_of(tree))
    named = [
        place
        for place in places
        if place[-1] in ("plan", "combine", "server", "algorithm", "class", "dtype", "options")
    ]
    chosen = [*named, *places[:: max(1, len(places) // PATHS)]]
    found = []
    for number, place in enumerate(chosen):
        for payload in payloads(mark) if place in named else [payloads(mark)[number % len(payloads(mark))]]:
            changed = json.loads(example)
            home = changed
            for key in place[:-1]:
                home = home[key]
            home[place[-1]] = payload
            found.append(json.dumps(changed).encode())
    return found


def in_lines(example: bytes, mark: str) -> list[bytes]:
    first, _, rest = example.partition(b"\n")
    return [one + b"\n" + rest for one in in_json(first, mark)]


def in_yaml(example: bytes, mark: str) -> list[bytes]:
    """Return a YAML text in which tags ask for objects."""
    tags = (f"!!python/object/apply:os.system ['touch {mark}']", f"!!python/name:{MODULE}.Thing")
    lines = example.decode().splitlines()
    found = []
    for number, line in enumerate(lines):
        if match := re.match(r"(\s*(?:- )?[\w.]+: )\S", line):
            changed = [*lines[:number], match[1] + tags[number % len(tags)], *lines[number + 1 :]]
            found.append("\n".join(changed).encode())
    return [*found, f"a: {tags[0]}\n".encode()]


def in_text(example: bytes, mark: str) -> list[bytes]:
    words = example.split(b" ")
    texts = [one.encode() for one in payloads(mark) if isinstance(one, str)]
    return [b" ".join([*words[:at], texts[at % len(texts)], *words[at + 1 :]]) for at in range(len(words))]


def archive(command: str, length: int | None = None) -> bytes:
    """Return what ``torch.save`` would write of an object that calls a command, of a certain length if one is given."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps(Calls(command), protocol=2))
        made.writestr("archive/version", b"3\n")
        made.writestr("archive/byteorder", b"little")
        if length is not None:
            made.comment = bytes(max(0, length - len_without(command)))
    return stream.getvalue()


def len_without(command: str) -> int:
    return len(archive(command))


def in_bytes(parser: Parser, example: bytes, mark: str, folder: Path) -> list[bytes]:
    """Return pickles, archives and arrays of objects in the place of bytes."""
    command = f"touch {mark}"
    objects = np.array([Calls(command)], dtype=object)
    array, several = io.BytesIO(), io.BytesIO()
    np.save(array, objects, allow_pickle=True)
    np.savez(several, samples=objects, sizes=objects, indices=objects, method=objects, digest=objects)
    found = [archive(command), pickle.dumps(Calls(command), protocol=2), array.getvalue(), several.getvalue()]
    homes = {"checkpoint: tensors": "good", "export: tensors": "e2_0", "global model: tensors": "g1"}
    home = homes.get(parser.name, "good" if parser.name == "server state: tensors" else None)
    if home is not None:  # in the place of each tensor of a file, with its length
        index = json.loads((folder / home / "cell_0" / "index.json").read_bytes())
        changed = bytearray(example)
        for tensor in index["tensors"].values():
            for _, _, _, offset, length in tensor["chunks"]:
                piece = archive(command, length)
                if len(piece) == length:
                    changed[offset : offset + length] = piece
        found.append(bytes(changed))
    return found


def hostile(parser: Parser, example: bytes, mark: str, folder: Path) -> list[bytes]:
    """Return hostile inputs of a parser's form."""
    if parser.form == "bytes":
        return in_bytes(parser, example, mark, folder)
    makers = {"json": in_json, "lines": in_lines, "yaml": in_yaml, "text": in_text}
    return makers[parser.form](example, mark)


# Readers that are meant to be unsafe ----------------------------------------------------------------------------------


def unsafe_names(content: bytes) -> None:
    """Import and call each name with a dot, and each name of a mapping with a command."""
    for text in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", content.decode("utf-8", errors="replace")):
        module, _, name = text.rpartition(".")
        if module in ("os", MODULE):
            target = getattr(importlib.import_module(module), name)
            target("true") if name == "system" else target()


def unsafe_yaml(content: bytes) -> None:
    yaml.load(content, yaml.UnsafeLoader)


def unsafe_bytes(content: bytes) -> None:
    """Read a pickle, an archive or an array as whoever wrote it asks for."""
    for read in (pickle.loads, unsafe_archive, unsafe_array):
        with suppress(Exception):
            read(content)


def unsafe_archive(content: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as made:
        pickle.loads(made.read("archive/data.pkl"))


def unsafe_array(content: bytes) -> None:
    np.load(io.BytesIO(content), allow_pickle=True)


UNSAFE: dict[str, Callable[[bytes], None]] = {
    "json": unsafe_names,
    "lines": unsafe_names,
    "text": unsafe_names,
    "yaml": unsafe_yaml,
    "bytes": unsafe_bytes,
}


# The table ------------------------------------------------------------------------------------------------------------


def inputs_of(parser: Parser, examples: Sequence[bytes], mark: str, folder: Path, is_long: bool) -> list[bytes]:
    """Return hostile inputs of a reader, spread over all of them in the short form."""
    found = [one for example in examples[:2] for one in hostile(parser, example, mark, folder)]
    if parser.name in OWN_WORDS and parser.form != "yaml":
        found = [one for one in found if MODULE.encode() not in one]
    most = MORE if parser.name in ("export: record", "checkpoint: index") else FEW
    # From the first to the last, which is what is hostile in most places.
    step = max(1, -(-len(found) // most))
    return found if is_long else [*found[:-1:step], *found[-1:]]


def try_one(watch: Watch, parser: Parser, folder: Path, mark: Path, is_long: bool) -> dict[str, Any]:
    """Return how many hostile inputs a reader was given, what the hook told of, and if it catches an unsafe reader."""
    folder.mkdir()
    examples = [bytes(one) for one in parser.examples(folder)]
    inputs = inputs_of(parser, examples, str(mark), folder, is_long)
    watch.root = str(folder)
    own: set[str] = set()
    for _ in range(2):  # the first time it imports what it needs
        for example in examples[:2]:
            own |= watch.hear(lambda example=example: attempt(parser, example, folder))  # type: ignore[misc]
    told: set[str] = set()
    for content in inputs:
        told |= watch.hear(lambda content=content: attempt(parser, content, folder)) - own  # type: ignore[misc]
    told = {one for one in told if not is_own(one)}
    if parser.name in OVER_LINKS:
        told = {one for one in told if not one.startswith("socket.connect")}
    is_marked = mark.exists()
    caught: set[str] = set()
    for content in inputs:
        caught |= watch.hear(lambda content=content: attempt_unsafe(parser, content))  # type: ignore[misc]
    mark.unlink(missing_ok=True)
    sys.modules.pop(MODULE, None)
    is_caught = any(one.startswith(("os.system", f"import {MODULE}")) for one in caught)
    return {"inputs": len(inputs), "told": sorted(told), "is_marked": is_marked, "is_caught": is_caught}


def is_own(told: str) -> bool:
    """Tell whether an event is of xffl's or torch's own code, which a refusal needs for the first time."""
    if told.startswith("import "):
        # A module that lies in an installed package or the standard library and that no payload names.
        name = told.removeprefix("import ").partition(".")[0]
        return name != MODULE and name not in NAMED_MODULES
    if told.startswith("exec "):
        return told.removeprefix("exec ").startswith(
            (sys.prefix, sys.base_prefix, os.path.dirname(__file__) + "/../xffl")
        )
    return False


NAMED_MODULES = ("os", "subprocess", "builtins", "pty")


def attempt_unsafe(parser: Parser, content: bytes) -> None:
    with suppress(Exception):
        UNSAFE[parser.form](content)


def main(words: Sequence[str]) -> int:
    known = find_parsers()
    is_long = "--long" in words
    names = [word for word in words if word != "--long"]
    # Figures of a page take seconds each, and are made of what the readers of the report have read.
    chosen = [known[name] for name in names or known if names or is_long or not name.startswith("page: ")]
    with tempfile.TemporaryDirectory() as place:
        outside = Path(place) / "outside"
        outside.mkdir()
        tempfile.tempdir = str(Path(place) / "scratch")
        os.mkdir(tempfile.tempdir)
        mark = outside / "CODE_HAS_RUN"
        (outside / f"{MODULE}.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Thing:\n    pass\n")
        sys.path.insert(0, str(outside))
        sys.dont_write_bytecode = True
        os.chdir(place)
        watch = Watch(outside)
        table = {one.name: try_one(watch, one, Path(place) / str(at), mark, is_long) for at, one in enumerate(chosen)}
        os.chdir("/")
        tempfile.tempdir = None
    print(json.dumps(table, indent=1))
    return int(any(one["told"] or one["is_marked"] or not one["is_caught"] for one in table.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
