"""The Python program that ranks run: a script by its path, a module by its name (``-m``), or a text read here.

Ranks are started with the words that would stand behind ``python``: ``train.py --lr 0.1``, ``-m package.train``, or
``-`` and the like. What can be read only once (standard input, a pipe) is read by the launcher, which hands the text to
the ranks; everything else is opened by the ranks themselves, as Python would do it.
"""

from __future__ import annotations

import base64
import importlib.util
import linecache
import os
import re
import runpy
import stat
import sys
import zipfile
import zlib
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from xffl.cluster.launch.failure import note_hint
from xffl.errors import LaunchError
from xffl.files import read_bytes

__all__ = [
    "CONFIGURATIONS",
    "OWN_FILES",
    "check_command",
    "check_script",
    "is_module",
    "is_stream",
    "name_of",
    "read_source",
    "run_command",
]

CONFIGURATIONS = (".yaml", ".yml")
"""Ends of names of files that are configurations, and no scripts."""
STANDARD_INPUT = "-"
OWN_FILES = (__file__, runpy.run_path.__code__.co_filename, "<frozen runpy>")
"""Files whose frames stand between Python's start and the script in a traceback."""
_MODULE = "-m"
_NO_SCRIPTS = (".json", ".toml", ".ipynb", *CONFIGURATIONS)
_LONGEST_BYTES = 90_000  # of a text that ranks are given: Linux takes 128 KiB in a variable
_MOST_BYTES = 2**24
"""Of a script, also of one that is a file"""
_HEAD_BYTES = 4096
_SHELL = re.compile(rb"#!\s*\S*?(?:/env\s+)?((?:ba|da|z|k|c|tc|fi)?sh|perl|ruby|Rscript)\b")
_NEED_A_FILE = ("popen_spawn_posix", "popen_forkserver")
"""Modules that Python imports when it starts the first process which has to import the script by itself"""
_SPAWN_HINT = (
    "the processes that this script has started (multiprocessing, or a DataLoader whose multiprocessing_context is "
    "spawn or forkserver) import it by its file, and what was read from a stream has none; write it to a file"
)
_RELATIVE = "attempted relative import with no known parent package"


# What the words mean --------------------------------------------------------------------------------------------------


def is_module(command: Sequence[str]) -> bool:
    """Tell whether a command names a module (``-m package.train``) in place of a script."""
    return list(command[:1]) == [_MODULE]


def name_of(command: Sequence[str]) -> str:
    """Return a name for what a command runs: a script's file without its end, or the name of a module."""
    if not is_module(command):
        return Path(command[0]).stem
    check_module(command)
    return command[1]


def is_stream(script: str) -> bool:
    """Tell whether a script can be read only once, or here alone: standard input, a pipe, a file of this process."""
    if script == STANDARD_INPUT:
        return True
    folder = os.path.realpath(os.path.dirname(os.path.abspath(script)))
    if folder == "/dev" or folder.startswith("/proc/"):  # /dev/stdin, /dev/fd/63 as bash writes it for <(...)
        return True
    try:
        mode = os.stat(script).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


# What the launcher does -----------------------------------------------------------------------------------------------


def read_source(script: str) -> str:
    """Read a script that is a stream, to its end; return the text as one word for :func:`run_command`."""
    what = "standard input" if script == STANDARD_INPUT else f"{script!r}"
    instead = "write it to a file, and give the path of that"
    if script == STANDARD_INPUT and sys.stdin.isatty():
        raise LaunchError(f"the script is to come from standard input, which is a terminal; {instead}")
    try:
        if script == STANDARD_INPUT:
            text = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open(script, "rb") as file:
                text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise LaunchError(f"script {what} cannot be read: {error.strerror}; {instead}") from error
    if len(text) > _MOST_BYTES:
        raise LaunchError(f"script {what} has more than {_MOST_BYTES} bytes, which is no script; {instead}")
    if not text.strip():
        raise LaunchError(
            f"script {what} is empty: nobody writes to it, or another process has read it; {instead}. HINT: mpirun "
            "gives standard input to rank 0 alone, and a batch job has none"
        )
    _check_head(what, text[:_HEAD_BYTES])
    word = base64.b64encode(zlib.compress(text)).decode()
    if len(word) > _LONGEST_BYTES:
        raise LaunchError(
            f"script {what} takes {len(word)} bytes compressed, and ranks can be given {_LONGEST_BYTES}; {instead}"
        )
    return word


def check_command(command: Sequence[str], advice: str = "give the path of a Python script") -> None:
    """Raise LaunchError if there is nothing that :func:`run_command` could run without a text; local."""
    if is_module(command):
        check_module(command)
    else:
        check_script(command[0], advice)


def check_script(script: str, advice: str = "give the path of a Python script") -> None:
    """Raise LaunchError if a path is no Python script, folder or zip file that could be run; local."""
    if not os.path.exists(script):
        why = f"does not exist in {os.getcwd()}"
        if os.path.islink(script):
            why = f"is a symbolic link to {os.readlink(script)!r}, which does not exist"
        raise LaunchError(f"script {script!r} {why}; {advice}")
    if os.path.isdir(script):
        if not any(os.path.exists(os.path.join(script, f"__main__.py{end}")) for end in ("", "c")):
            raise LaunchError(f"script {script!r} is a folder without __main__.py; {advice}")
        return
    if is_stream(script):
        raise LaunchError(f"script {script!r} can be read only once, and not by every rank; {advice}")
    try:
        with open(script, "rb") as file:
            head = file.read(_HEAD_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise LaunchError(f"script {script!r} cannot be read: {error.strerror}; {advice}") from error
    if zipfile.is_zipfile(script):
        with zipfile.ZipFile(script) as archive:
            if not {"__main__.py", "__main__.pyc"}.intersection(archive.namelist()):
                raise LaunchError(f"script {script!r} is a zip file without __main__.py; {advice}")
        return
    if not head:
        raise LaunchError(f"script {script!r} is empty (0 bytes), so ranks would run nothing; {advice}")
    end = os.path.splitext(script)[1].lower()
    if end == ".ipynb":
        hint = f"jupyter nbconvert --to script {script} writes one"
        raise LaunchError(f"script {script!r} is a notebook; {advice}. HINT: {hint}")
    if end in _NO_SCRIPTS:
        ends = " or ".join(CONFIGURATIONS)
        raise LaunchError(f"{script!r} is no Python script, and the name of a configuration ends in {ends}; {advice}")
    if size > _MOST_BYTES:
        raise LaunchError(f"script {script!r} has {size} bytes, and at most {_MOST_BYTES} are read; {advice}")
    if head[:4] != importlib.util.MAGIC_NUMBER:
        _check_head(repr(script), head, advice)


def _check_head(what: str, head: bytes, advice: str = "give the path of a Python script") -> None:
    """Raise where the first bytes show that a file is not Python's source."""
    if b"\0" in head:
        raise LaunchError(
            f"script {what} is a program or data, and no source of Python (it has zero bytes); {advice}. HINT: srun or "
            "mpirun start programs of other kinds"
        )
    if (match := _SHELL.match(head)) is not None:
        raise LaunchError(f"script {what} is one for {match[1].decode()}, as its first line says; {advice}")


def check_module(command: Sequence[str]) -> None:
    """Raise LaunchError if ``-m`` names no module, or one that is not found; nothing of the module is run."""
    name = command[1] if len(command) > 1 else ""
    if not all(part.isidentifier() for part in name.split(".")):
        raise LaunchError(f"-m {name!r} names no module; give its dotted name, such as -m package.train")
    spec, places = None, None
    for part in name.split("."):
        if (spec := _find(part, spec, places)) is None:
            break
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if spec is not None and places is not None and spec.name == name:
        spec = _find("__main__", spec, places)
        if spec is None:
            raise LaunchError(f"-m {name} names a package without __main__.py; name a module in it: -m {name}.train")
    if spec is not None and (spec.origin == "built-in" or isinstance(spec.loader, ExtensionFileLoader)):
        raise LaunchError(f"-m {name} cannot be run: it is a module of compiled code; name one that is Python's source")
    if spec is None and name.endswith(".py"):
        raise LaunchError(f"-m takes the dotted name of a module, but {name} looks like a path; leave -m out")
    if spec is None:
        raise LaunchError(
            f"-m {name} names a module that is neither in {os.getcwd()} nor installed; start it from the folder that "
            f"holds {name.partition('.')[0]!r}, or set PYTHONPATH to that folder"
        )


def _find(part: str, parent: ModuleSpec | None, places: list[str] | None) -> ModuleSpec | None:
    """Find a module without importing its package, whose code belongs to the ranks."""
    if parent is not None:
        return None if places is None else PathFinder.find_spec(f"{parent.name}.{part}", places)
    is_safe = getattr(sys.flags, "safe_path", False)
    here = None if is_safe else PathFinder.find_spec(part, [os.getcwd()])
    if here is not None and here.loader is not None:
        return here
    try:
        return importlib.util.find_spec(part) or here
    except ValueError:  # a module of this process that was not imported, such as __main__
        return here


# What a rank does -----------------------------------------------------------------------------------------------------


def run_command(command: Sequence[str], source: str | None = None) -> None:
    """Run the program in this process as Python itself would; what ends it is passed on.

    :param command: The words behind ``python``.
    :param source: What :func:`read_source` has returned, where the script was a stream.
    """
    # What Python has put first belongs to the program that it was started with, such as the command xffl.
    program_folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    if sys.path[:1] == [program_folder]:
        del sys.path[0]
    sys.argv[:] = command
    if is_module(command):
        del sys.argv[0]  # runpy writes the file of the module in the place of the next one
        _put_first(os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = command[0]
    if source is not None:
        _put_first("")
        text = zlib.decompress(base64.b64decode(source))
        try:
            _run_text(text, "<stdin>" if script == STANDARD_INPUT else script)
        except Exception as error:
            if any(f"multiprocessing.{way}" in sys.modules for way in _NEED_A_FILE):
                note_hint(error, _SPAWN_HINT)
            raise
        return
    whole = os.path.join(os.getcwd(), script)  # the script may leave this folder
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        runpy.run_path(whole, run_name="__main__")  # which puts the script itself first on the path
        return
    _put_first(os.path.dirname(os.path.realpath(script)))
    text = read_bytes(Path(script), _MOST_BYTES)
    try:
        if text[:4] == importlib.util.MAGIC_NUMBER:
            runpy.run_path(whole, run_name="__main__")
        else:
            _run_text(text, whole, is_file=True)
    except ImportError as error:
        if _RELATIVE in str(error):
            note_hint(error, _module_hint(script))
        raise


def _put_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later, with -P or PYTHONSAFEPATH
        sys.path.insert(0, folder)


def _run_text(text: bytes, name: str, *, is_file: bool = False) -> None:
    """Run a text as the module ``__main__``, with its lines in tracebacks.

    ``runpy`` would give a file's path as it is written, which means another one when the script has left the folder.
    """
    main = ModuleType("__main__")
    if is_file:
        main.__file__ = name
        main.__loader__ = SourceFileLoader("__main__", name)
        main.__dict__["__cached__"] = None
    else:
        lines = text.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[name] = (len(text), None, lines, name)
    code = compile(text, name, "exec", dont_inherit=True)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _module_hint(script: str) -> str:
    """Say how a script that is part of a package is to be started."""
    path = Path(os.path.realpath(script))
    folder, parts = path.parent, [path.stem]
    while not folder.samefile(folder.parent) and ((folder / "__init__.py").exists() or len(parts) == 1):
        parts.insert(0, folder.name)
        folder = folder.parent
    return f"start it as a module of its package: cd {folder}; xffl exec [options] -m {'.'.join(parts)} [arguments]"
