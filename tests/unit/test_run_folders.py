"""Folders of launchers: those that killed ones have left are removed by the next one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from xffl.cluster.network import host_identity
from xffl.jobs import cells

HOLD = """
import sys, time
from xffl.cluster.network import host_identity
from xffl.jobs import cells
with cells.run_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""
TURNS = """
from xffl.jobs import cells
for _ in range(1000):
    with cells.run_folder():
        pass
"""


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / name for name in ("xffl-cells-file", "else")]
    others[0].write_text("somebody's file")
    others[1].mkdir()
    words = [sys.executable, "-c", HOLD]
    folders = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}) as held:
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
        ) as killed:
            for process in (held, killed):
                assert process.stdout is not None
                folders.append(Path(process.stdout.readline().strip()))
            killed.kill()
        for path in (*folders, *others):
            os.utime(path, (0, 0))  # the runs have lasted for long
        for _ in range(2):
            with cells.run_folder():
                assert all(folder.is_dir() for folder in folders)  # its ranks may still be ending
        for path in (folders[1] / "abandoned", *others):
            os.utime(path, (0, 0))
        with cells.run_folder() as folder:
            assert sorted(tmp_path.iterdir()) == sorted([Path(folder), folders[0], *others])
            assert not (folders[0] / "abandoned").exists()
        assert sorted(tmp_path.iterdir()) == sorted([folders[0], *others])
        held.kill()


def test_launchers_that_end_and_start_at_the_same_time_leave_each_other_alone(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", TURNS]
    launchers = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ) for _ in range(2)]
    errors = [launcher.communicate()[1] for launcher in launchers]
    assert [(launcher.returncode, error) for launcher, error in zip(launchers, errors, strict=True)] == [(0, "")] * 2
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_removed_while_a_file_in_it_is_open_is_removed_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which gives such a file another name in its folder when it is deleted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remove = os.rmdir

    def remove_as_nfs(*path: object, **options: object) -> None:
        opened = [os.path.realpath(descriptor) for descriptor in Path("/proc/self/fd").iterdir()]
        if any(name.startswith(f"{tmp_path}{os.sep}") and "launcher" in name for name in opened):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(*path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rmdir", remove_as_nfs)
    with cells.run_folder():
        assert any(tmp_path.iterdir())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("launcher", [None, "", "another-host/boot\n1", "{here}\n{process}"])
def test_folders_whose_launcher_is_not_known_to_be_lost_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "xffl-cells-old"
    folder.mkdir()
    if launcher is not None:
        (folder / "launcher").write_text(launcher.format(here=host_identity(), process=os.getpid()))
    (folder / "abandoned").touch()
    for path in (folder / "abandoned", folder):
        os.utime(path, (0, 0))
    with cells.run_folder():
        pass
    assert folder.is_dir()


def test_a_run_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with cells.run_folder() as folder:
        assert Path(folder, "launcher").read_text() == ""
