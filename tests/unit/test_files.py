"""Files that survive a power cut: what is flushed and in which order, what file systems refuse, and what is told."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from xffl.errors import ConfigError
from xffl.files import (
    create,
    find_os_error,
    make_folders,
    naming_errors,
    open_regular,
    read_bytes,
    read_sealed,
    remove_file,
    sync,
    write_sealed,
    write_whole,
    written_whole,
)

ROOT = Path(__file__).parents[2]


class Disk:
    """Records what is flushed, and refuses to flush folders with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: int | None = None) -> None:
        self.flushed: list[str] = []
        self.refused = refused
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        if self.refused is not None and stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(self.refused, os.strerror(self.refused))
        self.flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        self._fsync(handle)


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.EOPNOTSUPP, 524])
def test_folders_that_cannot_be_flushed_are_left_to_the_file_system(
    refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, refused)
    make_folders(tmp_path / "a" / "b")
    write_whole(tmp_path / "a" / "b" / "file", "text")
    sync(tmp_path)
    assert (tmp_path / "a" / "b" / "file").read_text() == "text"


def test_errors_of_the_disk_are_raised_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=rf"Errno {errno.EIO}\].*{tmp_path}") as told:
        write_whole(tmp_path / "file", "text")
    assert told.value.errno == errno.EIO
    with pytest.raises(OSError, match=str(tmp_path)):
        make_folders(tmp_path / "new")

    def refuse(handle: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # of a file it is no answer to live with

    monkeypatch.setattr(os, "fsync", refuse)
    (tmp_path / "data").write_text("1")
    with pytest.raises(OSError, match=r"data"):
        sync(tmp_path / "data")


def test_what_is_written_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    make_folders(tmp_path / "a" / "b")
    make_folders(tmp_path / "a" / "b")  # there is nothing to make
    assert disk.flushed == [str(tmp_path), str(tmp_path / "a")]
    disk.flushed.clear()
    write_whole(tmp_path / "a" / "file", "text")
    beside, folder = disk.flushed
    assert beside.startswith(str(tmp_path / "a" / ".file.")) and folder == str(tmp_path / "a")
    disk.flushed.clear()
    remove_file(tmp_path / "a" / "file")
    assert disk.flushed == [str(tmp_path / "a")] and not (tmp_path / "a" / "file").exists()
    remove_file(tmp_path / "a" / "file")
    (tmp_path / "plain").write_text("")
    for taken in (tmp_path / "plain", tmp_path / "plain" / "under"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            make_folders(taken)


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "before")

    def fail() -> None:
        with written_whole(tmp_path / "file") as file:
            file.write(b"half")
            raise ConfigError("wrong input") from OSError(errno.ENOSPC, "of something else")

    with pytest.raises(ConfigError, match="wrong input"):
        fail()
    assert (tmp_path / "file").read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_a_sealed_file_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "sealed"
    content = bytes(range(256)) * 3
    write_sealed(path, content)
    assert read_sealed(path) == content
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", whole[:-1] + b"\1", whole.replace(b" 768", b" 767"), whole[:25]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="it has|sha256 differs"):
            read_sealed(path)
    path.write_bytes(content)  # as an earlier version wrote it
    assert read_sealed(path) == content


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("fifo")
    for name, said in (("fifo", "a FIFO"), ("link", "a FIFO"), ("socket", "No such device"), (".", "a folder")):
        for read in (read_bytes, read_sealed, open_regular):
            with pytest.raises(OSError, match=said) as told:
                read(tmp_path / name)
            assert told.value.filename is not None
    with pytest.raises(OSError, match="a device"):
        read_bytes(Path("/dev/zero"))


def save_on_full_disk() -> None:
    with open("/dev/full", "wb") as file:
        torch.save(torch.zeros(1 << 16), file)  # a RuntimeError about positions


def write_on_full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def fail_otherwise() -> None:
    try:
        os.stat("/not there")
    except OSError:
        raise KeyError("of the caller's own")  # noqa: B904 - what the context holds is tested


def quota_in_a_text() -> None:
    raise RuntimeError("I/O error: Disk quota exceeded (os error 122)")


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (save_on_full_disk, OSError, rf"Errno {errno.ENOSPC}\] No space left on device: 'there'"),
        (write_on_full_disk, OSError, rf"Errno {errno.ENOSPC}\] No space left on device: 'there'"),
        (quota_in_a_text, OSError, "Disk quota exceeded: 'there'"),
        (fail_otherwise, KeyError, "of the caller's own"),
        (lambda: os.stat("/not there"), FileNotFoundError, "'/not there'"),
    ],
)
def test_a_full_disk_is_told_whatever_wrote(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    def write() -> None:
        with naming_errors(Path("there")):
            call()

    with pytest.raises(kind, match=said):
        write()


def test_errors_in_a_circle_hide_none() -> None:
    looped = RuntimeError("a")
    looped.__context__ = ValueError("b")
    looped.__context__.__context__ = looped
    assert find_os_error(looped) is None


FULL = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import xffl
from xffl.checkpoint import consolidate_checkpoint, load_checkpoint, save_checkpoint
from xffl.distributed.distributed_state import DistributedState
from xffl.training.loggers import CSVLogger, JSONLinesLogger
full, free = map(Path, sys.argv[1:])
alone = DistributedState(rank=0, world_size=1)
class Own:
    def state_dict(self): return {"x": torch.zeros(1 << 19)}
    def load_state_dict(self, state): pass
def tell(what, call):
    try:
        call()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}")
    else:
        print(f"{what}: nothing")
big, small = torch.nn.Linear(512, 1024), torch.nn.Linear(2, 2)
save_checkpoint(full / "one", {"model": small}, alone)
tell("tensors", lambda: save_checkpoint(full / "one", {"model": big}, alone))
tell("own", lambda: save_checkpoint(full / "one", {"model": small}, alone, own={"own": Own()}))
load_checkpoint(full / "one", {"model": small}, alone)
save_checkpoint(free / "big", {"model": big}, alone)
tell("export", lambda: consolidate_checkpoint(free / "big", full / "out"))
logger = JSONLinesLogger(full, "cell_0")
(full / "metrics").mkdir()
logger.log({"a": 1.0}, step=1, epoch=0, samples=1, time_s=1.0)
with open(full / "rest", "wb", buffering=0) as rest:
    try:
        while True:
            rest.write(b"x" * 4096)
    except OSError:
        pass
tell("record", lambda: logger.log({"a" * 70000: 2.0}, step=2, epoch=0, samples=1, time_s=1.0))
(full / "rest").unlink()
logger.log({"a": 3.0}, step=3, epoch=0, samples=1, time_s=1.0)
print("steps", [line.split('"step": ')[1][0] for line in (full / "metrics" / "cell_0.jsonl").read_text().splitlines()])
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, who mounts a small disk")
def test_all_that_is_saved_on_a_full_disk_says_so_with_the_path(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FULL))
    mounted = f"mount -t tmpfs -o size=1m none {full} && exec {sys.executable} {script} {full} {free}"
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    if "mount:" in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    told = dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    for what, file in (
        ("tensors", "cell_0"),
        ("own", "own_0.pt"),
        ("export", "model.safetensors"),
        ("record", ".jsonl"),
    ):
        assert "No space left on device" in told[what] and file in told[what], told[what]
    assert ran.stdout.splitlines()[-1] == "steps ['1', '3']"


# Who may read them, and links -----------------------------------------------------------------------------------------


@pytest.fixture
def masked() -> Iterator[Callable[[int], int]]:
    """Return what sets the umask, which is as before after the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_says_who_may_read_a_file(umask: int, tmp_path: Path, masked: Callable[[int], int]) -> None:
    masked(umask)
    for how in ("new", "replace", "append"):
        create(tmp_path / how, how).close()
    write_whole(tmp_path / "whole", "text")
    write_sealed(tmp_path / "sealed", b"text")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_a_secret_is_its_owners_from_the_first_moment(
    umask: int, tmp_path: Path, masked: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = os.open

    def noted(path: object, flags: int, mode: int = 0o777, **more: Any) -> int:
        asked.append(mode)
        return real(path, flags, mode, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", noted)
    masked(umask)
    with create(tmp_path / "secret", is_secret=True) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
        file.write(b"token")
    assert asked == [0o600]
    with pytest.raises(ValueError, match="a secret goes into a new file"):
        create(tmp_path / "secret", "append", is_secret=True)


@pytest.mark.parametrize("how", ["new", "replace", "append"])
@pytest.mark.parametrize("leads", ["to a file", "nowhere", "to a FIFO"])
def test_nothing_is_written_through_a_link(how: Any, leads: str, tmp_path: Path) -> None:
    aim = tmp_path / "aim"
    if leads == "to a file":
        aim.write_text("kept")
    elif leads == "to a FIFO":
        os.mkfifo(aim)
    (tmp_path / "link").symlink_to(aim)
    with pytest.raises(OSError, match="link") as caught:
        create(tmp_path / "link", how)
    assert caught.value.filename == str(tmp_path / "link")
    assert how == "new" or "it is a link, which xffl does not write through; remove it" in str(caught.value)
    assert aim.exists() is (leads != "nowhere") and (not aim.is_file() or aim.read_text() == "kept")


@pytest.mark.parametrize("how", ["replace", "append"])
def test_what_is_no_regular_file_is_not_written(how: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
            create(tmp_path / "fifo", how)
    finally:
        os.close(reader)
    with pytest.raises(OSError, match="it is a device, not a regular file"):
        create(Path("/dev/null"), how)


def test_a_file_that_is_there_is_replaced_or_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old text")
    with create(file, "append") as opened:
        opened.write(b" and more")
    assert file.read_text() == "old text and more"
    with create(file, "replace") as opened:
        opened.write(b"new")
    assert file.read_text() == "new"
    with pytest.raises(FileExistsError):
        create(file)


def test_a_file_that_is_written_whole_takes_the_place_of_a_link(tmp_path: Path) -> None:
    aim = tmp_path / "aim"
    aim.write_text("kept")
    (tmp_path / "page").symlink_to(aim)
    write_whole(tmp_path / "page", "mine")
    assert aim.read_text() == "kept" and (tmp_path / "page").read_text() == "mine"
    assert not (tmp_path / "page").is_symlink()
