"""The run's folder in one process: what stands in its files, and when it is refused."""

from __future__ import annotations

import csv
import enum
import errno
import fcntl
import json
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from xffl.cluster.network import host_identity
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError
from xffl.topology import Topology
from xffl.training import run_lock as run_lock_module
from xffl.training.loggers import CSVLogger, JSONLinesLogger, LineFile
from xffl.training.run_directory import RunDirectory, flattened, plain_config, run_lock


class Color(enum.Enum):
    RED = 1


class Level(int, enum.Enum):
    HIGH = 3


class Thing:
    def __init__(self, size: int, name: str = "x", *more: int) -> None:
        self._size, self.name = size, name


@dataclass(frozen=True)
class Leaf:
    rate: float = 1e-3
    yes: str = "yes"
    color: Color = Color.RED
    level: Level = Level.HIGH
    kind: type = Thing
    where: Path = Path("a/b")
    dtype: torch.dtype = torch.bfloat16
    table: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    leaf: Leaf = field(default_factory=Leaf)
    sizes: tuple[int, ...] = (2, 2)
    nothing: int | None = None
    things: list[Thing] = field(default_factory=lambda: [Thing(3)])
    endless: float = float("inf")


PLAIN = {
    "leaf": {
        "rate": 1e-3,
        "yes": "yes",
        "color": "RED",
        "level": "HIGH",
        "kind": f"{__name__}.Thing",
        "where": "a/b",
        "dtype": "bfloat16",
        "table": {},
    },
    "sizes": [2, 2],
    "nothing": None,
    "things": [{"class_path": f"{__name__}.Thing", "init_args": {"size": 3, "name": "x"}}],
    "endless": float("inf"),
}


@pytest.fixture
def state() -> DistributedState:
    made = DistributedState()
    made.set_global("gloo", "cpu", None, None, 0, 1)
    return made


def test_a_configuration_becomes_plain_values() -> None:
    assert plain_config(Config()) == PLAIN and plain_config(PLAIN) == PLAIN
    assert flattened(PLAIN) == {
        **{f"leaf.{name}": value for name, value in PLAIN["leaf"].items()},  # type: ignore[attr-defined]
        **{name: value for name, value in PLAIN.items() if name != "leaf"},
    }
    assert plain_config({"call": torch.relu, "kinds": {int}})["kinds"] == ["builtins.int"]
    for wrong in (3, Thing(1), Config):
        with pytest.raises(ConfigError, match="dataclass"):
            plain_config(wrong)


def test_what_a_new_folder_holds(tmp_path: Path, state: DistributedState) -> None:
    path = tmp_path / "runs" / "demo"
    with_origins = {"leaf.rate": "command line", "things.0.init_args.size": "file config.yaml"}
    folder = RunDirectory.open(path, state, Config(), origins=with_origins)
    folder.close()
    assert {one.name for one in path.iterdir()} == {
        *("config.yaml", "origins.json", "environment.json", "topology.json", ".lock"),
        *("metrics", "rounds", "logs", "traces", "checkpoints", "pictures"),
    }
    assert yaml.safe_load((path / "config.yaml").read_text()) == PLAIN
    origins = json.loads((path / "origins.json").read_text())
    assert origins == {**dict.fromkeys(set(flattened(PLAIN)) - {"things"}, "default"), **with_origins}
    environment = json.loads((path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["packages"]["numpy"]
    assert len(environment["hosts"]) == 1 and environment["hosts"][0]["cores"] >= 1
    assert environment["command"] and environment["started_at"].endswith("+00:00")
    assert json.loads((path / "topology.json").read_text()) == {
        "world_size": 1,
        "cells": [1],
        "replica_size": None,
        "cell_shape": None,
        "federated": False,
    }
    again = RunDirectory.open(path, state, Config(), is_resumed=True)
    again.confirm()
    again.close()
    later = json.loads((path / "environment.json").read_text())
    assert later["started_at"] == environment["started_at"] and len(later["resumed_at"]) == 1
    folder.write_partition([0, "b"], [[3, 4]])
    assert json.loads((path / "partition.json").read_text()) == {"labels": ["0", "b"], "counts": [[3, 4]]}


def test_the_log_of_a_rank_and_what_is_left_of_it(tmp_path: Path, state: DistributedState) -> None:
    logger = logging.getLogger("xffl")
    before = (logger.level, list(logger.handlers), warnings.showwarning)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shown = warnings.showwarning
        folder = RunDirectory.open(tmp_path, state, Config())
        logger.info("a round took %d s", 3)
        logging.getLogger("xffl.part").warning("slow")
        warnings.warn("careful", stacklevel=1)
        folder.close()
        logger.warning("not kept")
        warnings.warn("not kept", stacklevel=1)
        assert warnings.showwarning is shown
    assert (logger.level, list(logger.handlers), warnings.showwarning) == before
    assert [str(one.message) for one in seen] == ["careful", "not kept"]
    first, second, third = (tmp_path / "logs/rank_0.log").read_text().splitlines()
    assert first.endswith("INFO xffl: a round took 3 s") and second.endswith("WARNING xffl.part: slow")
    assert third.endswith("UserWarning: careful") and "test_run_directory.py" in third
    folder.close()


def test_another_run_is_not_written_over(tmp_path: Path, state: DistributedState) -> None:
    def put(step: int) -> None:
        logger = JSONLinesLogger(tmp_path, "cell_0")
        logger.log({"x": 1.0}, step=step, epoch=0, samples=0, time_s=0.0)
        logger.close()

    RunDirectory.open(tmp_path, state, Config()).close()
    RunDirectory.open(tmp_path, state, Config(nothing=1)).close()  # nothing was recorded yet
    put(1)
    kept = (tmp_path / "metrics/cell_0.jsonl").read_bytes()
    for options in ({}, {"may_restart": True}):
        with pytest.raises(ConfigError, match="experiment.output_dir .* experiment.resume=true"):
            RunDirectory.open(tmp_path, state, Config(), **options)  # type: ignore[arg-type]
    assert (tmp_path / "metrics/cell_0.jsonl").read_bytes() == kept
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["nothing"] == 1
    resumed = RunDirectory.open(tmp_path, state, Config(), is_resumed=True)
    assert (tmp_path / "metrics/cell_0.jsonl").read_bytes() == kept
    resumed.confirm()
    resumed.close()
    RunDirectory.open(tmp_path, state, Config(), may_restart=True).close()  # the same configuration
    assert not (tmp_path / "metrics/cell_0.jsonl").exists()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        RunDirectory.open(file, state, Config())
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory.open(file / "below", state, Config())
    with pytest.raises(ConfigError, match="dataclass"):
        RunDirectory.open(tmp_path / "other", state, 3)
    assert not (tmp_path / "other").exists()


def test_what_is_asked_for_is_written_once_the_run_has_gone_on(
    tmp_path: Path, state: DistributedState, caplog: pytest.LogCaptureFixture
) -> None:
    RunDirectory.open(tmp_path, state, Config()).close()
    about = {name: (tmp_path / name).read_bytes() for name in ("config.yaml", "origins.json", "environment.json")}
    asked = Config(nothing=1, things=[])
    refused = RunDirectory.open(tmp_path, state, asked, {"nothing": "command line"}, is_resumed=True)
    refused.close()  # its checkpoint did not fit
    assert {name: (tmp_path / name).read_bytes() for name in about} == about and not caplog.records
    resumed = RunDirectory.open(tmp_path, state, asked, {"nothing": "command line"}, is_resumed=True)
    resumed.confirm()
    resumed.close()
    assert "is resumed with other values: nothing None -> 1, things; options" in caplog.text
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["nothing"] == 1
    assert json.loads((tmp_path / "origins.json").read_text())["nothing"] == "command line"
    assert len(json.loads((tmp_path / "environment.json").read_text())["resumed_at"]) == 1
    caplog.clear()
    resumed = RunDirectory.open(tmp_path, state, asked, is_resumed=True)
    resumed.confirm()
    resumed.close()
    assert not caplog.records


def test_an_option_that_is_new_since_the_run_began_is_no_change(
    tmp_path: Path, state: DistributedState, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(config: dict[str, Any], origins: dict[str, str]) -> str:
        RunDirectory.open(tmp_path, state, {"a": 1}).close()  # by a version without the others
        caplog.clear()
        folder = RunDirectory.open(tmp_path, state, config, origins, is_resumed=True)
        folder.confirm()
        folder.close()
        return caplog.text

    asked = {"a": 1, "new": {"whole": [], "text": "x"}}
    assert "other values" not in resume(asked, {"a": "command line"})
    assert "other values: new.text None -> x;" in resume(asked, {"a": "command line", "new.text": "command line"})
    assert "other values: new.text None -> x, new.whole;" in resume(asked, {"new": "configuration file"})
    assert "other values: new.text None -> x;" in resume(asked, {})  # who has given it nobody says


def test_each_start_is_noted(tmp_path: Path, state: DistributedState) -> None:
    def start(*, is_resumed: bool) -> Any:
        folder = RunDirectory.open(tmp_path, state, Config(), is_resumed=is_resumed)
        if is_resumed:
            folder.confirm()
        folder.close()
        return json.loads((tmp_path / "environment.json").read_text())

    first = start(is_resumed=False)
    assert "resumed_at" not in first
    start(is_resumed=True)
    again = start(is_resumed=True)
    assert len(again["resumed_at"]) == 2 and again["started_at"] == first["started_at"]
    (tmp_path / "environment.json").write_text('{"started_at": "2')  # of a kill
    later = start(is_resumed=True)
    assert "resumed_at" not in later and later["started_at"] > first["started_at"]
    start(is_resumed=True)
    assert "resumed_at" not in start(is_resumed=False)


def test_the_layout_of_a_run_is_noted(tmp_path: Path) -> None:
    shape = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
    layout: Any = SimpleNamespace(
        topology=Topology(8, (4, 4), 2, shape), rank=0, is_federated_scaling_setup=lambda: True, elastic=None
    )
    RunDirectory(tmp_path, layout)._write_about(None)
    told = json.loads((tmp_path / "topology.json").read_text())
    assert (told["replica_size"], told["cell_shape"], told["federated"]) == (2, shape, True) and "elastic" not in told
    layout = SimpleNamespace(
        topology=Topology(2), rank=0, is_federated_scaling_setup=lambda: False, elastic=object(), lone_cell=(1, (4, 2))
    )
    RunDirectory(tmp_path, layout)._write_about(None)
    told = json.loads((tmp_path / "topology.json").read_text())
    assert told["cells"] == [2] and told["elastic"] == {"cell": 1, "cells": [4, 2]}


def hold(folder: Path, end: Connection) -> None:
    """Take the lock, say so, and keep it until this process is killed."""
    try:
        with run_lock(folder):
            end.send("held")
            end.poll(60)
    except ConfigError as error:
        end.send(str(error))


def test_one_job_at_a_time_writes_into_a_folder(
    tmp_path: Path, state: DistributedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock_module, "LOCK_WAIT_S", 0.3)
    forking = multiprocessing.get_context("fork")  # a process that need not import torch anew

    def other_job() -> tuple[Any, str]:
        here, there = forking.Pipe()
        job = forking.Process(target=hold, args=(tmp_path, there))
        job.start()
        assert here.poll(60)
        return job, here.recv()

    holder, said = other_job()
    assert said == "held"
    with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on .*; wait until that has ended"):
        RunDirectory.open(tmp_path, state, Config())
    assert {one.name for one in tmp_path.iterdir()} == {".lock"}
    holder.kill()
    holder.join()
    folder = RunDirectory.open(tmp_path, state, Config())  # it went with its process
    refused, said = other_job()
    assert f"is in use by process {os.getpid()} on" in said
    folder.close()
    holder, free = other_job()
    assert free == "held"
    for job in (refused, holder):
        job.kill()
        job.join()


def test_where_a_file_system_has_no_locks_a_file_takes_their_place(
    tmp_path: Path, state: DistributedState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    numbers = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 524, errno.EBADF, errno.EINVAL)
    for number in numbers:
        folder = tmp_path / str(number)
        opened = RunDirectory.open(folder, state, Config())
        owner = json.loads((folder / ".lock.owner").read_text())
        assert owner["process"] == os.getpid() and owner["host"] == host_identity() and owner["started"] > 0
        opened.close()
        assert (folder / "config.yaml").exists() and not list(folder.glob(".lock.owner*"))
    assert caplog.text.count("on a file system without locks") == len(numbers)
    number = errno.EIO  # no answer about locks at all
    with pytest.raises(ConfigError, match="cannot be written: .*Input/output error"):
        RunDirectory.open(tmp_path / "broken", state, Config())


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all locks be refused, and nobody wait long."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(run_lock_module, "LOCK_WAIT_S", 0.3)


@pytest.mark.usefixtures("no_locks")
def test_the_file_in_place_of_a_lock_keeps_out_who_lives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forking = multiprocessing.get_context("fork")
    here, there = forking.Pipe()
    holder = forking.Process(target=hold, args=(tmp_path, there))
    holder.start()
    assert here.poll(60) and here.recv() == "held"
    file = tmp_path / ".lock.owner"
    text = file.read_text()
    with (
        pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on .*; wait .*, delete {file}"),
        run_lock(tmp_path),
    ):
        pass
    assert file.read_text() == text
    holder.kill()
    holder.join()
    with run_lock(tmp_path):
        assert json.loads(file.read_text())["process"] == os.getpid()
    assert not list(tmp_path.glob(".lock.owner*"))
    assert f"was held by process {holder.pid} on" in caplog.text and "which has ended: it is taken over" in caplog.text

    # A number that has come again is another process; of another host nobody can tell, and of half a file neither.
    owner = json.loads(text)
    file.write_text(json.dumps(owner | {"process": os.getpid()}))
    with run_lock(tmp_path):
        assert json.loads(file.read_text())["started"] != owner["started"]
    for left in (json.dumps(owner | {"host": "elsewhere/boot"}), json.dumps(owner | {"namespace": 1}), "", "{"):
        file.write_text(left)
        with pytest.raises(ConfigError, match=rf"delete {file}"), run_lock(tmp_path):
            pass
        assert file.read_text() == left
    file.unlink()
    with run_lock(tmp_path):
        file.write_text(left)  # of who has deleted the file, as the message says, and made his own
    assert file.read_text() == left


def outcome(act: Callable[[], object]) -> None:
    """Run something in a process that ends with it."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join()


def lock_once(folder: Path) -> None:
    with run_lock(folder):
        pass


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("has_links", [True, False])
def test_the_file_in_place_of_a_lock_is_whole_or_not_there(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: .*/\.lock\.owner"), run_lock(tmp_path):
            pass
    assert {one.name for one in tmp_path.iterdir()} <= {".lock"}
    with run_lock(tmp_path):
        assert json.loads((tmp_path / ".lock.owner").read_text())["process"] == os.getpid()
    if has_links:

        def die_before_it_is_whole() -> None:
            monkeypatch.setattr(os, "fsync", lambda handle: os._exit(1))
            lock_once(tmp_path)

        outcome(die_before_it_is_whole)
        assert not (tmp_path / ".lock.owner").exists()
        lock_once(tmp_path)
    assert not list(tmp_path.glob(".lock.owner*"))


@pytest.mark.usefixtures("no_locks")
def test_one_process_at_a_time_takes_over_what_another_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".lock.owner"

    def die_as_holder() -> None:
        with run_lock(tmp_path):
            os._exit(1)

    def die_while_taking_over() -> None:
        monkeypatch.setattr(run_lock_module, "remove_file", lambda path: os._exit(1))
        lock_once(tmp_path)

    outcome(die_as_holder)
    stale = file.read_text()
    for _ in range(2):  # who takes over is killed, and who takes over from that, too
        outcome(die_while_taking_over)
    lock_once(tmp_path)
    assert not list(tmp_path.glob(".lock.owner*"))

    # Another one has taken it over since this one has read whose it was: its file stays where it is all the time.
    file.write_text(stale)
    read = run_lock_module._read
    living = json.dumps(json.loads(stale) | {"process": os.getpid(), "started": run_lock_module._Owner.here().started})
    seen = []

    def read_and_lose(path: Path) -> str | None:
        assert file.exists()
        text = read(path)
        if path == file and not seen:
            file.write_text(living)
        seen.append(path)
        return text

    monkeypatch.setattr(run_lock_module, "_read", read_and_lose)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), run_lock(tmp_path):
        pass
    assert file.read_text() == living and [one.name for one in tmp_path.glob(".lock.owner*")] == [file.name]


@pytest.mark.usefixtures("no_locks")
def test_who_held_a_folder_before_a_boot_or_a_requeue_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".lock.owner"
    monkeypatch.setattr(run_lock_module, "_machine", lambda: "this-machine")
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "2"), ("SLURM_CLUSTER_NAME", "c")):
        monkeypatch.setenv(name, value)
    here = asdict(run_lock_module._Owner.here())
    host = here["host"].partition("/")[0]
    long_ago = "2001-01-01T00:00:00+00:00"
    elsewhere = here | {"host": "other/boot", "machine": "", "job": ""}
    booted = here | {"host": f"{host}/before", "since": long_ago, "job": ""}
    for changes, has_ended in (
        (elsewhere | {"job": "c/7", "restarts": 1}, True),
        (elsewhere | {"job": "c/7", "restarts": 2}, False),  # another node of the same start
        (elsewhere | {"job": "c/8", "restarts": 1}, False),
        (elsewhere | {"job": "/7", "restarts": 1}, False),
        (elsewhere | {"restarts": 1}, False),
        (booted, True),
        (booted | {"since": here["since"]}, False),  # later than the boot: it is another machine's
        (booted | {"machine": "another"}, False),
        (booted | {"machine": ""}, False),
        (booted | {"host": "other/before"}, False),
        (booted | {"host": f"{host}/"}, False),
    ):
        text = json.dumps(changes)
        file.write_text(text)
        if has_ended:
            with run_lock(tmp_path):
                assert file.read_text() != text
            assert not file.exists()
        else:
            with pytest.raises(ConfigError, match=rf"delete {file}"):
                lock_once(tmp_path)
            assert file.read_text() == text


@pytest.mark.usefixtures("no_locks")
def test_what_names_no_process_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / ".lock.owner"
    for wrong in ("1e400", "-1", "1" + "0" * 30, "null", "[]"):
        file.write_text(
            f'{{"host": {json.dumps(host_identity())}, "namespace": {run_lock_module._namespace()}, '
            f'"process": {wrong}, "started": 1, "since": ""}}'
        )
        with pytest.raises(ConfigError, match=rf"in use by another job; .*delete {file}"):
            lock_once(tmp_path)
    file.unlink()
    file.symlink_to("gone")
    with pytest.raises(ConfigError, match=rf"in use by another job; .*delete {file}"):
        lock_once(tmp_path)


def test_torn_records_and_names_of_several_lines_do_not_stop_a_resume(
    tmp_path: Path, state: DistributedState, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunDirectory.open(tmp_path, state, Config())
    written = []
    for kind in (JSONLinesLogger, CSVLogger):
        logger = kind(tmp_path, "cell_0")
        for step in (1, 2, 3):
            logger.log({"two\nlines": float(step), "y": 0.5}, step=step, epoch=0, samples=0, time_s=0.5)
        logger.close()
    names = ("metrics/cell_0.jsonl", "metrics/cell_0.csv")
    for name in names:
        lines = (tmp_path / name).read_bytes().split(b"\n")
        # As a power cut leaves it: blocks that were not written, and half of a line, in the middle and at the end.
        (tmp_path / name).write_bytes(
            b"\n".join([*lines[:2], b"\0" * 30, b"", b'0.5,1,"to', *lines[2:-1], b'{"time": 0.5, "st'])
        )
        written.append(lines)
    # Of an xffl that wrote a name with a line break in quotes.
    old = tmp_path / "metrics" / "federation.csv"
    old.write_text('time,step,epoch,samples,name,value\n0.5,1,0,0,"a\nb",1.0\n0.5,3,0,0,"a\n1,2,b",3.0\n')
    folder.cut_after(2, None)
    json_lines, csv_lines = ((tmp_path / name).read_bytes().split(b"\n") for name in names)
    assert json_lines == [*written[0][:2], b""] and csv_lines == [*written[1][:5], b""]
    assert [row["name"] for row in csv.DictReader((tmp_path / names[1]).open())] == ["two\\nlines", "y"] * 2
    assert old.read_text() == 'time,step,epoch,samples,name,value\n0.5,1,0,0,"a\nb",1.0\n'
    assert (
        "cell_0.jsonl: lines 3, 4, 5 are no record and left out" in caplog.text and "cell_0.csv: lines" in caplog.text
    )
    # What a logger of one's own wrote is not touched.
    own = tmp_path / "metrics" / "notes.csv"
    own.write_text("a,b\nnothing of ours\n")
    with pytest.raises(ConfigError, match=r"notes.csv, line 2 is not a record"):
        folder.cut_after(2, None)
    assert own.read_text() == "a,b\nnothing of ours\n"
    folder.close()


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, state: DistributedState) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"no regular file; remove .*/\.lock"):
        RunDirectory.open(tmp_path, state, Config())


def test_a_checkpoint_that_cannot_be_read_is_not_passed_over(tmp_path: Path, state: DistributedState) -> None:
    RunDirectory.open(tmp_path, state, Config()).close()
    records = tmp_path / "metrics/cell_0.jsonl"
    records.write_text('{"step": 1}\n')
    damaged = tmp_path / "checkpoints/step_7"
    damaged.mkdir()
    (damaged / "checkpoint.json").write_text("{")
    for options in ({"is_resumed": True}, {"may_restart": True}):
        with pytest.raises(CheckpointError, match=r"cannot be read.*move .*/step_7 away, and the run begins anew"):
            RunDirectory.open(tmp_path, state, Config(), **options)  # type: ignore[arg-type]
    assert records.exists()
    damaged.rename(tmp_path / "elsewhere")
    RunDirectory.open(tmp_path, state, Config(), may_restart=True).close()
    assert not records.exists()


def test_records_of_later_steps_are_cut(tmp_path: Path, state: DistributedState) -> None:
    folder = RunDirectory.open(tmp_path, state, Config())
    for scope in ("cell_0", "federation", "cell_7"):  # the last one of a run with more cells
        for logger in (JSONLinesLogger(tmp_path, scope), CSVLogger(tmp_path, scope)):
            for step in (1, 2, 2, 3):
                values = {'odd, "name"': float(step), "y": 0.0}
                logger.log(values, step=step, epoch=0, samples=0, time_s=0.5)
            logger.close()
    rounds = LineFile(tmp_path / "rounds/cell_0.jsonl")
    for step in (1, 2, 3):
        rounds.append(json.dumps({"round": step, "step": step}) + "\n")
    rounds.close()
    with (tmp_path / "metrics/cell_0.jsonl").open("a") as stream:
        stream.write('{"time": 1, "st')

    def steps(name: str) -> list[int]:
        text = (tmp_path / name).read_text()
        assert text == "" or text.endswith("\n")
        if name.endswith(".csv"):
            assert text.startswith("time,step,epoch,samples,name,value\n")
            return [int(line.split(",")[1]) for line in text.splitlines()[1:]]
        return [json.loads(line)["step"] for line in text.splitlines()]

    folder.cut_after(2, {"metrics/cell_0.jsonl": 2, "metrics/federation.jsonl": 99, "metrics/cell_0.csv": 5})
    assert steps("metrics/cell_0.jsonl") == [1, 2]  # the second record of step 2 came after the checkpoint
    assert steps("metrics/cell_0.csv") == [1, 1, 2, 2]
    assert steps("metrics/federation.jsonl") == steps("metrics/cell_7.jsonl") == [1, 2, 2]
    assert steps("metrics/federation.csv") == [1, 1, 2, 2, 2, 2]
    assert steps("rounds/cell_0.jsonl") == [1, 2]
    folder.cut_after(None)
    assert steps("metrics/cell_0.csv") == steps("metrics/cell_0.jsonl") == steps("rounds/cell_0.jsonl") == []
    folder.close()
    assert not list(tmp_path.rglob("*.partial"))
