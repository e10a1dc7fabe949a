"""Save and read checkpoints on storage that fails, and count what comes of it.

    python -m tests.chaos.storage                    # some hundred tries, a few seconds; CI runs it so
    python -m tests.chaos.storage --long             # some thousand, minutes
    python -m tests.chaos.storage killed read.load   # these kinds alone; --list names all

A try makes a checkpoint or several in a process of its own and lets something go wrong. Then it looks whether

- the newest checkpoint that a save had confirmed, or a newer one, is found and loads bit for bit,
- nothing else is taken for a checkpoint (an unfinished folder, files of two saves),
- the next save works, and what could not be deleted before is gone after it.

Printed is a table of tries and outcomes: ``ok``; ``named``, an error of xffl that says what is wrong, after which all
of the above holds; ``raw``, any other error; ``mixture``, values of two saves in one; ``lost``, a confirmed checkpoint
is gone or damaged. The exit code is 1 if there is one of the last three, or an error by name where all must go well (a
kill, a failed delete). Kinds that mount file systems need root, and
are skipped with the reason elsewhere.

A new kind is a function with the decorator ``@kind(short, long)`` that makes one try in an empty folder: it returns
normally for ``ok``, or raises what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.kept import ALONE, Own
from xffl.aggregation.exports import export_cell, load_global
from xffl.aggregation.offline import aggregate_exports
from xffl.checkpoint import (
    AsyncSaver,
    CheckpointManager,
    consolidate_checkpoint,
    find_latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from xffl.checkpoint.format import find_record
from xffl.checkpoint.manager import check_checkpoints
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import XfflError

OUTCOMES = ("ok", "named", "raw", "mixture", "lost")
CLONE_NEWNS = 0x00020000


class MixtureError(Exception):
    """Reports values of two saves in one checkpoint."""


class LostError(Exception):
    """Reports a confirmed checkpoint that is gone or damaged, or remains that are taken for one."""


class SkipError(Exception):
    """Reports why a kind cannot be tried here."""


@dataclass(frozen=True)
class Try:
    """One try: an empty folder, its number, and random numbers of its own."""

    folder: Path
    number: int
    rng: random.Random


@dataclass(frozen=True)
class Kind:
    """Something that goes wrong, and how often it is tried in the short and in the long form."""

    name: str
    run: Callable[[Try], None]
    short: int
    long: int
    allowed: tuple[str, ...] = ("ok", "named")
    """Outcomes that are right"""


KINDS: dict[str, Kind] = {}


def kind(
    name: str, short: int, long: int, *, allowed: tuple[str, ...] = ("ok", "named")
) -> Callable[[Callable[[Try], None]], Callable[[Try], None]]:
    """Register a function that makes one try."""

    def add(run: Callable[[Try], None]) -> Callable[[Try], None]:
        KINDS[name] = Kind(name, run, short, long, allowed)
        return run

    return add


# What is saved, and how it is checked ---------------------------------------------------------------------------------


def make_parts(value: int) -> tuple[dict[str, Any], dict[str, Own]]:
    """Return a model, an optimizer with a state, a schedule and own state, all of which follow from a number."""
    torch.manual_seed(value)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "schedule": Own([value, torch.full((3,), value)])}, {
        "own": Own(value)
    }


def flat(parts: dict[str, Any], own: dict[str, Own]) -> list[torch.Tensor]:
    """Return all numbers of the parts."""
    states = parts["optimizer"].state_dict()["state"]
    tensors = list(parts["model"].state_dict().values())
    tensors += [states[number][name] for number in sorted(states) for name in sorted(states[number])]
    number, tensor = parts["schedule"].value
    return [*tensors, tensor, torch.tensor([number, own["own"].value])]


def save(path: Path, value: int) -> None:
    """Save what follows from a number."""
    parts, own = make_parts(value)
    save_checkpoint(path, parts, ALONE, values={"value": value}, own=own)


def load(path: Path, state: DistributedState = ALONE) -> int:
    """Load a checkpoint, compare it to the bit with what follows from its number, and return that."""
    parts, own = make_parts(0)
    value: int = load_checkpoint(path, parts, state, own=own)["value"]
    found, right = flat(parts, own), flat(*make_parts(value))
    if not all(torch.equal(one, other) for one, other in zip(found, right, strict=True)):
        raise MixtureError(f"{path} says {value}, and has other values")
    return value


class Saver:
    """What a manager saves through."""

    def save_checkpoint(self, path: Path, value: int) -> None:
        save(path, value)


class LateSaver:
    """The same on a thread."""

    def __init__(self, saver: AsyncSaver) -> None:
        self.saver = saver

    def save_checkpoint(self, path: Path, value: int) -> Any:
        parts, own = make_parts(value)
        return self.saver.save(path, parts, values={"value": value}, own=own)


def check_run(run: Path, confirmed: int, names: dict[str, int] | None = None) -> None:
    """Raise if a run is not as it has to be after something went wrong; then save once more.

    ``confirmed`` is the last step whose save returned without an error, 0 without one; ``names`` are those of other
    checkpoints, with the last value of each.
    """
    folder = run / "checkpoints"
    latest = find_latest_checkpoint(run)
    found = 0 if latest is None else load(latest)
    if found < confirmed:
        raise LostError(f"{latest} is found, although {confirmed} was saved")
    for name, value in (names or {}).items():
        if (there := load(folder / name)) < value:
            raise LostError(f"{name} holds {there}, although {value} was saved")
    for path in [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]:
        if find_record(path) is None:
            raise LostError(f"{path} has a checkpoint's name and is none")
        load(path)
    following = max(found, confirmed) + 1
    CheckpointManager(run, keep_last=1).save(Saver(), following, value=following)
    for name in names or {}:
        save(folder / name, following)
        load(folder / name)
    if find_latest_checkpoint(run) != folder / f"step_{following}" or load(folder / f"step_{following}") != following:
        raise LostError(f"the next save, {following}, is not what is found")
    if left := sorted({path.name for path in folder.iterdir()} - {f"step_{following}", "latest", *(names or {})}):
        raise LostError(f"{left} are left after the next save")


# Processes ------------------------------------------------------------------------------------------------------------


class Child:
    """A process that is forked to do something, and tells values through a pipe."""

    def __init__(self, act: Callable[[Callable[[Any], None]], None]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            code = 1
            try:
                act(lambda value: _tell(write, value))
                code = 0
            except XfflError as error:
                _tell(write, {"named": str(error)})
            except MixtureError as error:
                _tell(write, {"mixture": str(error)})
            except LostError as error:
                _tell(write, {"lost": str(error)})
            except SkipError as error:
                _tell(write, {"skip": str(error)})
            except BaseException:  # noqa: BLE001 - the parent counts it
                _tell(write, {"raw": traceback.format_exc()})
            finally:
                os._exit(code)
        os.close(write)
        self._pipe = os.fdopen(read)
        self.status: int | None = None

    def first(self) -> Any:
        """Wait until it tells something, and return that."""
        line = self._pipe.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def told(self) -> list[Any]:
        """Wait for its end, and return what it has told; a line that a kill has cut does not count."""
        lines = self._pipe.read().splitlines(keepends=True)
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> list[Any]:
        """Return what it has told; what it has raised is raised here."""
        told = self.told()
        for one in told:
            if isinstance(one, dict):
                for name, error in (
                    ("named", XfflError),
                    ("mixture", MixtureError),
                    ("lost", LostError),
                    ("skip", SkipError),
                ):
                    if name in one:
                        raise error(one[name])
                raise RuntimeError(one["raw"])
        return told


def _tell(pipe: int, value: Any) -> None:
    os.write(pipe, (json.dumps(value) + "\n").encode())


def in_child(act: Callable[[], None]) -> None:
    """Do something in a process of its own, whose mounts and limits are its own."""
    Child(lambda tell: act()).end()


def mount_privately(*command: str) -> None:
    """Give this process, a child, mounts of its own, and mount something there."""
    if os.geteuid() != 0:
        raise SkipError("needs root, to mount")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise SkipError(f"mounts cannot be made private here: {os.strerror(ctypes.get_errno())}")
    mount("--make-rprivate", "/")
    mount(*command)


def mount(*command: str) -> None:
    """Call mount."""
    done = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SkipError(f"mount {' '.join(command)}: {done.stderr.strip()}")


# Faults at the n-th change of the file system -------------------------------------------------------------------------

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open")


class Fault:
    """Does something at the n-th change of a folder, in a child: an audit hook sees all of them and cannot be removed.

    A rename, a new or deleted file or folder, opening a file to write or a folder, and a flush are changes.
    """

    def __init__(self, folder: Path, at: int, act: Callable[[], None], *, stays: bool = False) -> None:
        self.folder, self.at, self.act, self.stays = str(folder), at, act, stays
        self.count = 0
        self.is_on = True
        sync = os.fsync

        def flush(handle: Any) -> None:
            self._see()
            sync(handle)

        os.fsync = flush
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES:
            return
        if event == "open":
            path, _, flags = args
            if not isinstance(path, str) or not path.startswith(self.folder):
                return
            if isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        self._see()

    def _see(self) -> None:
        if not self.is_on:
            return
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at):
            self.act()


def save_with_fault(one: Try, at: int, act: Callable[[], None], *, stays: bool) -> tuple[Child, list[Any]]:
    """Save step 1 and ``best``, then step 2 and ``best`` in a child, whose change number ``at`` goes wrong."""
    manager = CheckpointManager(one.folder, keep_last=1)
    manager.save(Saver(), 1, value=1)
    save(manager.output_dir / "best", 1)

    def go_on(tell: Callable[[Any], None]) -> None:
        fault = Fault(one.folder, at, act, stays=stays)
        manager.save(Saver(), 2, value=2)
        tell("step")
        save(manager.output_dir / "best", 2)
        tell("best")
        fault.is_on = False
        tell(fault.count)

    child = Child(go_on)
    told = child.told()
    return child, told


def check_after_fault(one: Try, told: list[Any]) -> None:
    """Check the run, and raise what the child has raised."""
    check_run(one.folder, 2 if "step" in told else 1, {"best": 2 if "best" in told else 1})
    for error in (entry for entry in told if isinstance(entry, dict)):
        raise XfflError(error["named"]) if "named" in error else RuntimeError(error.get("raw", str(error)))


def plant(code: int, *, stays: bool) -> Callable[[Try], None]:
    """Return a try in which a change of the file system fails with an error number: once, or from then on."""

    def run(one: Try) -> None:
        def fail() -> None:
            raise OSError(code, os.strerror(code))

        _, told = save_with_fault(one, 1 + one.number % CHANGES_OF_TWO_SAVES, fail, stays=stays)
        check_after_fault(one, told)

    return run


CHANGES_OF_TWO_SAVES = 60
"""A few more than there are in two saves, so that all moments come in turn"""

for _code in (errno.EIO, errno.EROFS, errno.ENOSPC, errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE):
    for _stays in (False, True):
        _name = f"planted.{errno.errorcode[_code]}.{'on' if _stays else 'once'}"
        kind(_name, 3, CHANGES_OF_TWO_SAVES)(plant(_code, stays=_stays))


# Kills ----------------------------------------------------------------------------------------------------------------


@kind("killed.each", short=6, long=CHANGES_OF_TWO_SAVES, allowed=("ok",))
def killed_at_each_change(one: Try) -> None:
    """Kill a save before each change of the file system in turn."""
    _, told = save_with_fault(
        one, 1 + one.number % CHANGES_OF_TWO_SAVES, lambda: os.kill(os.getpid(), signal.SIGKILL), stays=False
    )
    check_after_fault(one, told)


def keep_saving(one: Try, tell: Callable[[Any], None], strategy: Any, wait: Callable[[], None]) -> None:
    """Save step after step, and ``best`` between, until killed."""
    manager = CheckpointManager(one.folder, keep_last=1 + one.number % 2)
    for step in range(1, 10_000):
        manager.save(strategy, step, value=step)
        wait()
        tell(step)


def check_killed(one: Try, child: Child) -> None:
    """Kill a child at a random moment after its first save, and check the run."""
    child.first()
    time.sleep(one.rng.random() * 0.08)
    child.kill()
    told = child.told()
    if child.status != -signal.SIGKILL:
        child.end()
    check_run(one.folder, max([1, *(step for step in told if isinstance(step, int))]))


@kind("killed.random", short=4, long=500, allowed=("ok",))
def killed_at_random(one: Try) -> None:
    """Kill a process that saves at once."""
    check_killed(one, Child(lambda tell: keep_saving(one, tell, Saver(), lambda: None)))


@kind("killed.async", short=2, long=200, allowed=("ok",))
def killed_in_the_background(one: Try) -> None:
    """Kill a process whose thread saves."""

    def act(tell: Callable[[Any], None]) -> None:
        saver = AsyncSaver(ALONE)
        keep_saving(one, tell, LateSaver(saver), saver.wait)

    check_killed(one, Child(act))


# Real file systems ----------------------------------------------------------------------------------------------------


@kind("full.tmpfs", short=2, long=100)
def full(one: Try) -> None:
    """Save where a random number of bytes is free, too few of them; then free some."""

    def act() -> None:
        mount_privately("-t", "tmpfs", "-o", "size=512k", "tmpfs", str(one.folder))
        manager = CheckpointManager(one.folder, keep_last=1)
        manager.save(Saver(), 1, value=1)
        free = os.statvfs(one.folder).f_bavail * os.statvfs(one.folder).f_frsize
        filler = one.folder / "filler"
        filler.write_bytes(bytes(max(0, free - one.rng.randrange(64 * 1024))))
        error, confirmed = save_again(manager)
        filler.unlink()
        check_run(one.folder, confirmed)
        if error is not None:
            raise error

    in_child(act)


@kind("full.limit", short=2, long=60)
def too_large(one: Try) -> None:
    """Save where files may have a random number of bytes at most, as a quota on sizes does."""
    import resource

    def act() -> None:
        manager = CheckpointManager(one.folder, keep_last=1)
        manager.save(Saver(), 1, value=1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (one.rng.randrange(100, 40_000), hard))
        error, confirmed = save_again(manager)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        check_run(one.folder, confirmed)
        if error is not None:
            raise error

    in_child(act)


@kind("readonly.tmpfs", short=2, long=20)
def readonly(one: Try) -> None:
    """Save on a file system that became read-only."""

    def act() -> None:
        mount_privately("-t", "tmpfs", "tmpfs", str(one.folder))
        manager = CheckpointManager(one.folder, keep_last=1)
        manager.save(Saver(), 1, value=1)
        mount("-o", "remount,ro", str(one.folder))
        error, confirmed = save_again(manager)
        if load(manager.output_dir / f"step_{confirmed}") != confirmed:
            raise LostError(f"step {confirmed} does not load from a file system that became read-only")
        mount("-o", "remount,rw", str(one.folder))
        check_run(one.folder, confirmed)
        if error is not None:
            raise error

    in_child(act)


def save_again(manager: CheckpointManager) -> tuple[XfflError | None, int]:
    """Save step 2, and return the error, if any, and the last step that was saved."""
    try:
        manager.save(Saver(), 2, value=2)
    except XfflError as error:
        return error, 1
    return None, 2


@kind("delete.busy", short=2, long=40, allowed=("ok",))
def busy(one: Try) -> None:
    """Rotate and replace what holds a mount point, which stands for an open file on NFS; all goes on."""

    def act() -> None:
        manager = CheckpointManager(one.folder, keep_last=1)
        best = manager.output_dir / "best"
        manager.save(Saver(), 1, value=1)
        save(best, 1)
        empty = one.folder / "empty"
        empty.mkdir()
        points = [path / "cell_0" / ".nfs0001" for path in (manager.output_dir / "step_1", best)]
        for number, point in enumerate(points):
            point.mkdir()
            (mount if number else mount_privately)("--bind", str(empty), str(point))
        for step in (2, 3, 4):
            manager.save(Saver(), step, value=step)
            save(best, step)
        latest = find_latest_checkpoint(one.folder)
        if latest is None or load(latest) != 4 or load(best) != 4:
            raise LostError(f"{latest} is found, although 4 was saved")
        left = sorted(str(path / "cell_0" / ".nfs0001") for path in manager.output_dir.glob(".*.removed"))
        mounted = sorted(line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
        if len(left) != 2 or not set(left) <= set(mounted):
            raise LostError(f"{left} are left, and only two are in use")
        for point in left:
            subprocess.run(["umount", point], check=True)
        check_run(one.folder, 4, {"best": 4})

    in_child(act)


# Damaged, refused, and in the way -------------------------------------------------------------------------------------


def read_in_time(act: Callable[[], Any], seconds: int = 20) -> Any:
    """Do something, and raise if that takes too long, as where a FIFO waits for a writer."""

    def late(*unused: object) -> None:
        raise TimeoutError(f"this takes longer than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return act()
    finally:
        signal.alarm(0)


@kind("damage.record", short=4, long=100)
def lost_record(one: Try) -> None:
    """Lose the record or all files of some checkpoints; the run does not start, and nothing is deleted."""
    manager = CheckpointManager(one.folder, keep_last=3)
    for step in (1, 2, 3):
        manager.save(Saver(), step, value=step)
    for step in one.rng.sample((1, 2, 3), one.rng.randint(1, 3)):
        path = manager.output_dir / f"step_{step}"
        files = [file for file in path.rglob("*") if file.is_file()]
        for file in files if one.number % 2 else [path / "checkpoint.json"]:
            file.unlink()
    before = sorted(manager.output_dir.rglob("*"))
    try:
        check_checkpoints(one.folder)
    finally:
        if sorted(manager.output_dir.rglob("*")) != before:
            raise LostError("a look at the checkpoints has changed them")
    raise LostError("a checkpoint without its record is not named")


@kind("damage.fifo", short=3, long=100)
def fifo(one: Try) -> None:
    """Put a FIFO, a socket's or a device's name in the place of a file of a checkpoint."""

    def act() -> None:
        manager = CheckpointManager(one.folder, keep_last=2)
        for step in (1, 2):
            manager.save(Saver(), step, value=step)
        path = manager.output_dir / "step_2"
        file = one.rng.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        file.unlink()
        if one.number % 2:
            os.mkfifo(file)
        else:
            file.symlink_to("/dev/zero")
        if load(manager.output_dir / "step_1") != 1:
            raise LostError("the checkpoint before does not load")
        read_in_time(lambda: load(path))
        raise LostError(f"{path} loads without {file.name}")

    in_child(act)


@kind("refused.flush", short=3, long=30)
def refused_flush(one: Try) -> None:
    """Save where folders cannot be flushed, as on CIFS and some FUSE mounts."""

    def act() -> None:
        sync = os.fsync
        code = (errno.EINVAL, errno.EOPNOTSUPP, 524)[one.number % 3]

        def flush(handle: Any) -> None:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(code, os.strerror(code))
            sync(handle)

        os.fsync = flush
        for step in (1, 2):
            CheckpointManager(one.folder, keep_last=1).save(Saver(), step, value=step)
        check_run(one.folder, 2)

    in_child(act)


# Replaced while it is read --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writer(one: Try, *, rotates: bool) -> Iterator[Path]:
    """Let another process save all the time, the same name or step after step of which it keeps one; yield a folder."""
    manager = CheckpointManager(one.folder, keep_last=1)
    best = manager.output_dir / "best"

    def act(tell: Callable[[Any], None]) -> None:
        for value in range(1, 100_000):
            if rotates:
                manager.save(Saver(), value, value=value)
            else:
                save(best, value)
            if value == 1:
                tell(value)
            time.sleep(one.rng.random() * 0.004)

    child = Child(act)
    child.first()
    try:
        yield one.folder if rotates else best
    finally:
        child.kill()
        child.told()


READS = 10
"""How often a checkpoint is read in one try beside one writer"""


def read_beside(one: Try, read: Callable[[Path], None], *, rotates: bool) -> None:
    """Read beside a writer; an error by name is counted, after all others have been tried."""
    named: XfflError | None = None
    with writer(one, rotates=rotates) as path:
        for _ in range(READS):
            try:
                read(path)
            except XfflError as error:
                named = error
    if named is not None:
        raise named


@kind("read.load", short=2, long=150)
def read_load(one: Try) -> None:
    """Load a checkpoint of a fixed name ten times beside a process that replaces it."""
    read_beside(one, lambda path: _load_alone(path), rotates=False)


@kind("read.newest", short=1, long=100)
def read_newest(one: Try) -> None:
    """Find and load the newest checkpoint of a run ten times beside a process that saves and rotates."""

    def read(run: Path) -> None:
        latest = find_latest_checkpoint(run)
        if latest is None:
            raise LostError(f"{run} has no checkpoint, although another process saves into it")
        _load_alone(latest)

    read_beside(one, read, rotates=True)


def _load_alone(path: Path) -> None:
    load(path)


@kind("read.consolidate", short=2, long=100)
def read_consolidate(one: Try) -> None:
    """Consolidate ten times beside a writer, of a fixed name and of the newest of a run in turn."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise SkipError("needs safetensors") from error

    def read(path: Path) -> None:
        out = one.folder / "out"
        consolidate_checkpoint(path, out, max_shard_bytes=3000)
        found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
        shutil.rmtree(out)
        if not any(_is_equal(found, value) for value in _near(found)):
            raise MixtureError(f"the files made of {path} are of no save")

    read_beside(one, read, rotates=bool(one.number % 2))


MODELS: dict[float, int] = {}
"""Which save the first number of a model's first tensor is of"""


def _near(found: dict[str, torch.Tensor]) -> list[int]:
    """Return the save whose first tensor this is."""
    first = float(found["0.weight"].flatten()[0])
    while first not in MODELS and len(MODELS) < 100_000:
        value = len(MODELS) + 1
        MODELS[float(make_parts(value)[0]["model"].state_dict()["0.weight"].flatten()[0])] = value
    return [MODELS[first]] if first in MODELS else []


def _is_equal(found: dict[str, torch.Tensor], value: int) -> bool:
    right = make_parts(value)[0]["model"].state_dict()
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


@kind("read.aggregate", short=1, long=60)
def read_exports(one: Try) -> None:
    """Aggregate the exports of two cells ten times beside a process that writes one of them anew."""

    def export(cell: int, value: int) -> None:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        export_cell(one.folder / f"cell_{cell}", model, ALONE, cell=cell, cells=2, weight=1.0, round=1)

    def act(tell: Callable[[Any], None]) -> None:
        for value in range(1, 100_000):
            export(0, value)
            if value == 1:
                tell(value)

    export(1, 0)
    child = Child(act)
    child.first()
    named: XfflError | None = None
    try:
        for number in range(READS):
            out = one.folder / f"out_{number}"
            try:
                aggregate_exports([one.folder / "cell_0", one.folder / "cell_1"], out)
            except XfflError as error:
                named = error
                continue
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
            load_global(out, model, ALONE)
            if len(values := {float(x) for tensor in model.parameters() for x in tensor.flatten()}) > 1:
                raise MixtureError(f"the mean of two cells holds {sorted(values)} in place of one value")
    finally:
        child.kill()
        child.told()
    if named is not None:
        raise named


@kind("read.ranks", short=1, long=30)
def read_by_ranks(one: Try) -> None:
    """Load with two ranks ten times beside a writer: both load the same save."""

    def rank(number: int, tell: Callable[[Any], None]) -> None:
        dist.init_process_group("gloo", f"file://{one.folder}/meet", rank=number, world_size=2)
        state = DistributedState(rank=number, world_size=2)
        parts, own = make_parts(0)
        for _ in range(READS):
            try:
                value = load_checkpoint(path, parts, state, reset=["*"], own={})["value"]
            except XfflError as error:
                tell({"named": str(error)})
                continue
            right = flat(*make_parts(value))[:-1]
            if not all(torch.equal(one, other) for one, other in zip(flat(parts, own)[:-1], right, strict=True)):
                raise MixtureError(f"rank {number} says {value}, and has other values")
            tell(value)

    with writer(one, rotates=False) as path:
        ranks = [Child(lambda tell, number=number: rank(number, tell)) for number in range(2)]  # type: ignore[misc]
        told = [child.told() for child in ranks]
    if [entry for entry in told[0] if isinstance(entry, int)] != [entry for entry in told[1] if isinstance(entry, int)]:
        raise MixtureError(f"the ranks have loaded {told}")
    for child_told in told:
        for entry in child_told:
            if isinstance(entry, dict):
                _raise(entry)


def _raise(entry: dict[str, str]) -> None:
    kinds: dict[str, type[Exception]] = {
        "named": XfflError,
        "mixture": MixtureError,
        "lost": LostError,
        "skip": SkipError,
    }
    name, text = next(iter(entry.items()))
    raise kinds.get(name, RuntimeError)(text)


# The command ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Outcomes of the tries of a kind."""

    counts: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)  # an example of each outcome but ok
    skipped: str = ""

    def add(self, outcome: str, note: str = "") -> None:
        """Count a try."""
        self.counts[outcome] += 1
        if note:
            self.notes.setdefault(outcome, note)


def run_kind(one: Kind, tries: int, home: Path, seed: int) -> Tally:
    """Make the tries of a kind, each in a folder of its own."""
    tally = Tally()
    step = one.long // tries if tries < one.long else 1  # few tries at faults by number are spread over all moments
    for count in range(tries):
        number = count * step
        folder = Path(tempfile.mkdtemp(prefix=f"{one.name}-", dir=home))
        try:
            one.run(Try(folder, number, random.Random(seed * 1_000_003 + number)))
            tally.add("ok")
        except SkipError as error:
            tally.skipped = str(error)
            break
        except XfflError as error:
            tally.add("named", str(error))
        except MixtureError as error:
            tally.add("mixture", f"try {number}: {error}")
        except LostError as error:
            tally.add("lost", f"try {number}: {error}")
        except Exception as error:  # noqa: BLE001 - counted
            tally.add("raw", f"try {number}: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return tally


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        "python -m tests.chaos.storage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="begin of the names of kinds; all by default")
    parser.add_argument("--long", action="store_true", help="make thousands of tries")
    parser.add_argument("--seed", type=int, default=1, help="seed of random moments")
    parser.add_argument("--list", action="store_true", help="name the kinds and end")
    parser.add_argument("--notes", action="store_true", help="show an example of each outcome but ok")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Make the tries, print the table, and return the exit code."""
    options = parse(words)
    chosen = [one for name, one in KINDS.items() if not options.kinds or name.startswith(tuple(options.kinds))]
    if options.list:
        print("\n".join(one.name for one in chosen))
        return 0
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("xffl").addHandler(logging.NullHandler())
    shared = Path("/dev/shm")
    began = time.monotonic()
    is_wrong = False
    width = max(len(one.name) for one in chosen)
    print(f"{'kind':{width}} {'tries':>6}" + "".join(f" {name:>8}" for name in OUTCOMES))
    with tempfile.TemporaryDirectory(prefix="xffl-", dir=shared if os.access(shared, os.W_OK) else None) as home:
        for one in chosen:
            tally = run_kind(one, one.long if options.long else one.short, Path(home), options.seed)
            counts = "".join(f" {tally.counts[name]:8}" for name in OUTCOMES)
            skipped = f"  skipped: {tally.skipped}" if tally.skipped else ""
            print(f"{one.name:{width}} {tally.counts.total():6}{counts}{skipped}", flush=True)
            for outcome, note in tally.notes.items():
                if options.notes or outcome not in one.allowed:
                    print(f"    {outcome}: {note}", flush=True)
            is_wrong = is_wrong or not set(tally.counts) <= set(one.allowed)
    print(f"{time.monotonic() - began:.0f} s")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
