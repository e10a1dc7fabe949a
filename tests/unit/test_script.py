"""What ranks run: scripts, modules and streams as Python runs them, what is refused, and whose errors end a rank."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import xffl
from xffl.cluster.launch import script
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import (
    FailureRecord,
    RankFailure,
    describe_failure,
    find_place,
    is_only_lost_peer,
    note_alike,
)
from xffl.cluster.launch.script import check_command, is_stream, name_of, read_source, run_command
from xffl.errors import CheckpointError, ConfigError, LaunchError, RoundError
from xffl.jobs.asked_cells import AskedCells
from xffl.jobs.options import JobOptions

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, str(ROOT / "xffl" / "__main__.py")]
SHOW = (
    "import sys\nprint(__name__, sys.argv, repr(sys.path[0]), globals().get('__file__'), __spec__ and __spec__.name)\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder, from which nothing is left in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["xffl"])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("pkg", "helper"):
            del sys.modules[name]


def python(*words: str, folder: Path, text: str | None = None) -> str:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, input=text, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.parametrize("words", ["train.py", "link/train.py", "./sub/../train.py", "app", "app.zip", "-m pkg.train"])
def test_a_program_sees_what_python_shows_it(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("link", "sub", "app", "pkg"):
        (here / folder).mkdir()
    for name in ("train.py", "app/__main__.py", "pkg/train.py"):
        (here / name).write_text(SHOW)
    (here / "link" / "train.py").symlink_to("../train.py")
    with zipfile.ZipFile(here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    command = [*words.split(), "--lr", "0.1", "-"]
    check_command(command)
    run_command(command)
    shown = capsys.readouterr().out
    expected = python(*command, folder=here)
    if words.startswith("app"):  # runpy writes the whole path into sys.argv
        expected, shown = (text.replace(f"{here}/", "") for text in (expected, shown))
    assert shown == expected


def test_a_program_from_a_stream_is_read_once(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(here / "pipe")
    for name in ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "pipe"):
        assert is_stream(name), name
    (here / "train.py").write_text("pass")
    assert not any(map(is_stream, ("train.py", ".", "missing.py", "/dev/shm/train.py")))
    text = SHOW + "def fail():\n    raise KeyError('é')\nfail()\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    source = read_source("-")
    for _ in range(2):  # as each rank does
        with pytest.raises(KeyError) as failed:
            run_command(["-", "x"], source)
        told = describe_failure(failed.value, skip=(__file__, script.__file__))
        assert told.traceback.count("raise KeyError('é')") == 1 and 'File "<stdin>", line 4, in fail' in told.traceback
        assert capsys.readouterr().out == "__main__ ['-', 'x'] '' None None\n"


@pytest.mark.parametrize("way", ["popen_spawn_posix", "popen_forkserver"])
def test_processes_that_need_the_file_of_a_stream_are_hinted_at(
    way: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("popen_spawn_posix", "popen_forkserver"):  # what this process has started itself
        monkeypatch.delitem(sys.modules, f"multiprocessing.{other}", raising=False)
    for started, is_told in (("", False), (f"import multiprocessing.{way}\n", True)):
        text = f"{started}raise RuntimeError('DataLoader worker (pid 7) exited unexpectedly')"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(RuntimeError) as failed:
            run_command(["-"], read_source("-"))
        assert ("has none; write it to a file" in describe_failure(failed.value).headline) is is_told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "standard input is empty"),
        (b" \n", "standard input is empty"),
        (b"\x7fELF\0", "zero bytes"),
        (os.urandom(120_000).hex().encode(), "ranks can be given 90000"),
        (b"#" * (2**24 + 1), "more than 16777216 bytes"),
    ],
    ids=["empty", "blank", "binary", "long", "endless"],
)
def test_what_cannot_be_handed_to_ranks_is_refused(text: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    with pytest.raises(LaunchError, match=message):
        read_source("-")


def make_files(folder: Path) -> None:
    (folder / "empty.py").touch()
    (folder / "notebook.ipynb").write_text('{"cells": []}')
    (folder / "values.json").write_text("{}")
    (folder / "run.sh").write_text("#!/usr/bin/env bash\necho\n")
    (folder / "program").write_bytes(b"\x7fELF\2\1\1\0")
    (folder / "wide.py").write_text("print(1)", encoding="utf-16")
    (folder / "folder").mkdir()
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("train.py", "")
    (folder / "dangling.py").symlink_to("gone.py")
    os.mkfifo(folder / "pipe")
    (folder / "sparse.py").write_text("pass\n")
    os.truncate(folder / "sparse.py", 2**40)
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("raise AssertionError('the launcher runs nothing of it')")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("missing.py", "'missing.py' does not exist in "),
        ("dangling.py", "symbolic link to 'gone.py', which does not exist"),
        ("empty.py", "is empty"),
        ("notebook.ipynb", "is a notebook.*nbconvert"),
        ("values.json", "no Python script"),
        ("run.sh", "is one for bash"),
        ("program", "zero bytes"),
        ("wide.py", "zero bytes"),
        ("folder", "a folder without __main__.py"),
        ("other.zip", "a zip file without __main__.py"),
        ("pipe", "only once"),
        ("sparse.py", "has 1099511627776 bytes, and at most 16777216 are read"),
        ("-m", "-m '' names no module"),
        ("-m a/b.py", "-m 'a/b.py' names no module"),
        ("-m train.py", "train.py looks like a path; leave -m out"),
        ("-m no_such_module.train", "neither in .* nor installed"),
        ("-m pkg", "-m pkg names a package without __main__.py"),
        ("-m pkg.missing", "-m pkg.missing names a module that is neither"),
        ("-m math", "-m math cannot be run"),
    ],
)
def test_what_is_no_program_is_refused(words: str, message: str, here: Path) -> None:
    make_files(here)
    with pytest.raises(LaunchError, match=message):
        check_command(words.split())


def test_modules_are_found_without_being_run(here: Path) -> None:
    make_files(here)
    (here / "pkg" / "train.py").write_text("raise AssertionError")
    check_command(["-m", "pkg.train"])
    check_command(["-m", "json.tool"])
    assert "pkg" not in sys.modules and name_of(["-m", "pkg.train", "x"]) == "pkg.train"
    assert name_of(["a/train.py"]) == "train"


def test_relative_imports_of_a_script_are_answered(here: Path) -> None:
    (here / "pkg" / "inner").mkdir(parents=True)
    for name in ("pkg", "pkg/inner"):
        (here / name / "__init__.py").touch()
    (here / "pkg" / "inner" / "train.py").write_text("from ..model import Model\n")
    with pytest.raises(ImportError) as failed:
        run_command(["pkg/inner/train.py"])
    told = describe_failure(failed.value).text
    assert told.endswith(
        f"HINT: start it as a module of its package: cd {here}; xffl exec [options] -m pkg.inner.train [arguments]"
    )
    (here / "train.py").write_text("import xffl.no_such_module\n")
    with pytest.raises(ImportError) as failed:
        run_command(["train.py"])
    assert "HINT" not in describe_failure(failed.value).text


SHADOWS = ("random", "types", "logging", "json", "site", "select", "re", "ast", "shlex", "dataclasses", "subprocess")


def test_modules_of_the_working_folder_do_not_stand_in_for_pythons(tmp_path: Path) -> None:
    """Of the launcher, of its ranks, and of the programs that it starts beside them."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the working folder was looked into')")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import random, logging, json, helper\nprint('ran', helper.VALUE)\n")
    (tmp_path / "scripts" / "helper.py").write_text("VALUE = 7\n")
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ran = [
        subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
        for words in (
            [*MAIN, "exec", "--processes", "1", "scripts/train.py"],
            [*child_command("xffl.cli.main"), "env"],
            [sys.executable, "-c", "import sys; sys.path[0] or sys.path.pop(0); import json, select; print('ran')"],
        )
    ]
    assert [one.returncode for one in ran] == [0, 0, 0], ran
    assert ran[0].stdout == "ran 7\n"


# Whose errors they are ------------------------------------------------------------------------------------------------


def refused_connection() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        socket.create_connection(probe.getsockname(), 2)


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def in_torch(error: BaseException) -> Callable[[], None]:
    """Raise an error in code of torch.distributed."""

    def fail() -> None:
        exec(compile("raise error", dist.__file__, "exec"), {"error": error})

    return fail


def after(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def fail() -> None:
        try:
            first()
        except (RuntimeError, OSError):
            then()

    return fail


GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
CAUSED = RoundError("round 3 was not taken: connection closed by peer")


@pytest.mark.parametrize(
    ("fail", "is_lost", "is_only"),
    [
        (refused_connection, False, False),
        (raising(ConnectionResetError("Connection reset by peer")), False, False),
        (raising(BrokenPipeError(32, "Broken pipe")), False, False),
        (raising(TimeoutError("timed out waiting for the server")), False, False),
        (raising(subprocess.TimeoutExpired("x", 1)), False, False),
        (raising(RuntimeError("connection refused by the tracking server")), False, False),
        (raising(ConfigError("the server says: connection refused")), False, False),
        (raising(GLOO), True, True),
        (raising(dist.DistBackendError("NCCL communicator: remote process exited")), True, True),
        (raising(dist.DistNetworkError("failed to recv, got 0 bytes")), True, True),
        (in_torch(ValueError("connection reset by peer")), True, True),
        (in_torch(ValueError("no such rank")), False, False),
        (raising(CAUSED), True, True),
        (after(raising(GLOO), raising(CAUSED)), True, True),
        (after(raising(GLOO), refused_connection), True, False),
        (after(refused_connection, raising(CheckpointError("cannot be read"))), False, False),
    ],
)
def test_only_what_torch_raises_tells_of_a_lost_rank(fail: Callable[[], None], is_lost: bool, is_only: bool) -> None:
    with pytest.raises(BaseException) as failed:  # noqa: PT011 - any
        fail()
    assert (describe_failure(failed.value).lost_peer, is_only_lost_peer(failed.value)) == (is_lost, is_only)


def test_an_error_of_xffl_has_the_line_of_the_script(here: Path) -> None:
    (here / "train.py").write_text("import xffl\n\ndef check():\n    xffl.Topology(2, (2, 1))\n\ncheck()\n")
    with pytest.raises(xffl.TopologyError) as failed:
        run_command(["train.py"])
    # pytest's own frames, and this file, come before the script.
    record = describe_failure(failed.value)
    assert record.place == "train.py:4" and record.text.endswith("(at train.py:4)")
    assert RankFailure(0, 2, record).describe() == f"failed with {record.headline} (at train.py:4)"
    assert describe_failure(ValueError("x")).place == ""
    assert find_place(None) is None


@pytest.mark.parametrize(("is_speaker", "lines"), [(True, 1), (False, 0), (None, 1)])
def test_an_error_of_all_ranks_is_told_by_one(
    is_speaker: bool | None, lines: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xffl.cluster.launch import failure, runner

    monkeypatch.setattr(failure, "QUIET_S", 0.0)
    error = ConfigError("no")
    if is_speaker is not None:
        note_alike(error, is_speaker=is_speaker)
    assert runner.be_rank(raising(error)) == 2
    told = capfd.readouterr().err
    assert told.count("ConfigError: no") == lines == told.count("\n")


def test_options_behind_the_script_are_hinted_at(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xffl.jobs.programs.script import hint_at_options

    for words, hint in (
        ("train.py --federated 2,2 --lr 1 --processes=3", "--federated, --processes after train.py goes"),
        ("-m pkg.train --federated 2,2", "--federated after -m pkg.train goes to the script"),
        ("train.py --lr 1 -- --federated", ""),
        ("train.py --help --lr", ""),
        ("--federated.py", ""),
    ):
        hint_at_options(words.split())
        told = capsys.readouterr().err
        assert (told.startswith(f"xffl: {hint}") and told.count("\n") == 1) if hint else told == "", told


def test_a_stream_under_a_launcher_is_refused_on_every_rank() -> None:
    from xffl.jobs.programs import script

    with mock.patch.object(script, "read_source") as read, pytest.raises(LaunchError, match="started 2 processes"):
        script.read_script(JobOptions(), ["/dev/stdin"], AskedCells(), started=2)
    assert not read.called
    with mock.patch.object(script, "read_source", return_value="text"):
        assert script.read_script(JobOptions(), ["-"], AskedCells(), started=1).source == "text"


def test_a_record_of_an_older_rank_is_read() -> None:
    record = FailureRecord(1.0, 2, "ConfigError: x", "", is_xffl=True, lost_peer=False)
    assert record.text == "ConfigError: x"
