"""``xffl exec config.yaml``: what is checked before a process starts, what ranks get, and ranks of a launcher.

The trainer is a stand-in of a few lines; the last test trains the project that ``xffl init`` writes.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.filesize import decimal

from tests.ports import free_port
from tests.ranks.test_session import be_rank
from tests.worlds import run_script, run_world
from xffl.cli.main import main
from xffl.cluster.launch.job_layout import LaunchOptions
from xffl.jobs import cells, ranks
from xffl.jobs.cells import CellJob
from xffl.jobs.dispatch import carry_out
from xffl.jobs.lighthouse import LighthouseProcess
from xffl.jobs.programs import configured
from xffl.jobs.request import read_request, write_request
from xffl.run_report.reader import read_run
from xffl.training.config.configuration import print_text, read_job, read_resolved

ROOT = Path(__file__).parents[2]

TRAINER = """
import json, os, sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import plan  # a module beside the configuration that is called as one of xffl's own
import xffl


@dataclass(frozen=True)
class Training:
    epochs: int = 1


@dataclass
class Config:
    training: Training = field(default_factory=Training)
    title: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    breaks: bool = False


class Trainer:
    config: Config

    def __init__(self, config, *, callbacks=(), origins=None):
        self.config, self.origins = config, origins

    def fit(self):
        with xffl.session(backend="gloo", device="cpu") as state:
            total = torch.tensor([state.rank + 1])
            dist.all_reduce(total)
            told = {"rank": state.rank, "total": int(total), "title": self.config.title, "extra": self.config.extra}
            told |= {"epochs": self.config.training.epochs, "origins": self.origins, "plan": plan.here}
            told |= {"cells": state.federated_local_size, "hsdp": state.replica_local_size, "path": sys.path[0]}
            with open(f"told_{state.rank}.json", "w") as file:
                json.dump(told, file)
            dist.barrier()
            if self.config.breaks and state.rank == 1:
                raise xffl.ConfigError("this cannot be meant")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a trainer and its configuration, in which this process is."""
    (tmp_path / "fake_train.py").write_text(TRAINER)
    (tmp_path / "plan.py").write_text("here = 'mine'")
    text = "trainer: fake_train.Trainer\nlaunch: {processes: 2, federated: [1, 1]}\ntraining: {epochs: 2}\n"
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("fake_train", "plan"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def told_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"told_{rank}.json").read_text()) for rank in range(ranks)]


def start(folder: Path, *words: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "TORCHELASTIC"))}
    environ["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", "xffl", *words],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


# Before processes start -----------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note what would be started."""
    found: list[dict[str, Any]] = []

    def note(processes: int, command: Sequence[str], options: LaunchOptions) -> int:
        asked = {"environ": options.environ, "timeout_s": options.timeout_s}
        found.append({"processes": processes, "command": command, **asked})
        return 0

    monkeypatch.setattr(ranks, "launch_local", note)
    return found


def test_options_beat_the_section_launch(
    project: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = str(Path(configured.__file__).with_name("configured_rank.py"))
    cases: list[tuple[str, int, dict[str, str], float | None]] = [
        ("config.yaml", 2, {"XFFL_FEDERATED": "1,1"}, None),
        ("--processes 4 --federated 2,2 --hsdp 1 config.yaml", 4, {"XFFL_FEDERATED": "2,2", "XFFL_HSDP": "1"}, None),
        ("--processes=3 config.yaml --launch.federated [1,2]", 3, {"XFFL_FEDERATED": "1,2"}, None),
        ("config.yaml --launch.processes 4 --launch.federated 2 --launch.timeout_s 9", 4, {"XFFL_FEDERATED": "2"}, 9.0),
        ("--timeout 5 config.yaml --launch.timeout_s 9", 2, {"XFFL_FEDERATED": "1,1"}, 5.0),
        ("config.yaml --launch.processes null --launch.federated null", 1, {}, None),
    ]
    for words, processes, environ, timeout_s in cases:
        given = words.split()
        assert main(["exec", *given]) == 0, words
        found = launched.pop()
        assert found["command"] == (rank,)
        _, resolved = read_resolved(found["environ"].pop("XFFL_RESOLVED"))
        _, read = read_job("config.yaml", given[given.index("config.yaml") + 1 :])
        assert print_text(resolved) == print_text(read)
        cells = {"XFFL_LAUNCHED_CELLS": "2"} if environ else {}
        assert (found["processes"], found["environ"], found["timeout_s"]) == (processes, environ | cells, timeout_s), (
            words
        )
    monkeypatch.setenv("XFFL_LAUNCH__PROCESSES", "4")
    monkeypatch.setenv("XFFL_FEDERATED", "3,1")
    assert main(["exec", "config.yaml"]) == 0
    del launched[-1]["environ"]["XFFL_RESOLVED"]
    assert (launched[-1]["processes"], launched[-1]["environ"]) == (
        4,
        {"XFFL_FEDERATED": "3,1", "XFFL_LAUNCHED_CELLS": "2"},
    )


RUN = """
from dataclasses import dataclass, field

from xffl.training.config.dataclasses import ExperimentConfig


@dataclass
class Config:
    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)


class Trainer:
    config: Config

    def __init__(self, config, *, callbacks=(), origins=None):
        self.config = config

    def fit(self):
        raise NotImplementedError
"""


def test_a_configuration_of_all_cells_is_that_of_each_cell_of_an_elastic_run(
    project: Path, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "fake_run.py").write_text(RUN)
    (project / "run.yaml").write_text(
        "trainer: fake_run.Trainer\nlaunch: {processes: 3, federated: [1, 2]}\nexperiment: {output_dir: out}\n"
    )
    jobs: list[CellJob] = []
    monkeypatch.setattr(cells, "launch_cells", lambda cells, **more: jobs.extend(cells) or 0)
    monkeypatch.setattr(cells, "own_lighthouse", lambda: nullcontext(LighthouseProcess.__new__(LighthouseProcess)))
    monkeypatch.setattr(LighthouseProcess, "address", "127.0.0.1:1", raising=False)
    monkeypatch.setattr(LighthouseProcess, "journal", None)
    assert main(["exec", "--elastic", "run.yaml", "--experiment.seed", "3"]) == 0
    assert {job.environ["XFFL_JOURNAL"] for job in jobs} == {os.path.abspath("out/lighthouse.journal")}
    # One cell elsewhere has the ranks that the configuration gives it, unless it is told others.
    monkeypatch.setenv("XFFL_TOKEN", "none")
    for more in ([], ["--processes=4"]):
        words = ["--elastic=a:1", "--cell=1/2", *more, "run.yaml", "--experiment.seed", "3"]
        assert main(["exec", *words]) == 0
    for job, processes in zip(jobs, (1, 2, 2, 4), strict=True):
        (project / "request.json").write_text(write_request(job.request))
        assert carry_out(read_request(project / "request.json")) == 0
        found = launched.pop()
        _, resolved = read_resolved(found["environ"].pop("XFFL_RESOLVED"))
        assert resolved.config.experiment.output_dir == f"out/cell_{job.number}"
        assert resolved.config.experiment.seed == 3
        assert {**job.environ, **found["environ"]}["XFFL_CELL"] == f"{job.number}/2"
        assert found["processes"] == processes
    # A job that variables make such a cell is one, too.
    monkeypatch.setenv("XFFL_CELL", "1/2")
    monkeypatch.setenv("XFFL_LIGHTHOUSE", "http://a:1")
    assert main(["exec", "run.yaml"]) == 0
    found = launched.pop()
    del found["environ"]["XFFL_RESOLVED"]
    assert (found["processes"], found["environ"]) == (2, {"XFFL_CELL": "1/2"})
    monkeypatch.setenv("XFFL_CELL", "1/3")
    assert main(["exec", "run.yaml"]) == 2 and not launched


WRONG = [
    ("config.yaml --processes 3", "ConfigError: processes on the command line is unknown; did you mean launch.process"),
    ("--processes 3 config.yaml", "TopologyError: federated sizes (1, 1) sum to 2, but the world has 3"),
    ("--federated 2,2 config.yaml", "TopologyError: federated sizes (2, 2) sum to 4, but the world has 2"),
    ("--federated x config.yaml", "ConfigError: --federated is 'x'"),
    ("--hsdp 2 config.yaml", "TopologyError: "),
    ("--processes 0 config.yaml", "TopologyError: world size must be a positive integer, got 0"),
    ("nowhere.yml", "ConfigError: file nowhere.yml cannot be read: No such file"),
    ("config.yaml --config bad.yaml", "ConfigError: file bad.yaml is not valid YAML: line 1"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_mistake_costs_no_start(
    words: str, message: str, project: Path, launched: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "bad.yaml").write_text("a: [")
    assert main(["exec", *words.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"xffl: {message}") and told.err.count("\n") == 1, told.err
    assert launched == []


def test_showing_starts_nothing(
    project: Path, launched: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["exec", "config.yaml", "--title", "a b", "--print_config"]) == 0
    told = capsys.readouterr().out
    assert "training:\n  epochs: 2  # file config.yaml\ntitle: a b  # command line\n" in told
    (project / "again.yaml").write_text(told)
    assert main(["exec", "again.yaml", "--print_config"]) == 0
    values = [line.partition("  #")[0] for line in told.splitlines()]
    assert [line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()] == values
    (project / "config.yaml").write_text("trainer: fake_train.Trainer\nwrong: 3")  # help comes all the same
    assert main(["exec", "config.yaml", "--help"]) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("usage: xffl exec [options] config.yaml [--KEY VALUE ...]\n")
        and "--training.epochs int" in told
    )
    assert launched == []


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_two_ranks_get_what_was_typed_and_one_that_fails_is_told_once(project: Path) -> None:
    title = 'it\'s "q" = $HOME ${local_rank} é\n--'
    words = [f"--title={title}", "--extra.a b=-1e-3", "--extra.list", "[1, no]", "--training.epochs=3"]
    ran = start(project, "exec", "config.yaml", *words, "--breaks", "true")
    assert ran.returncode == 2, ran.stderr
    for rank, told in enumerate(told_by(project, 2)):
        assert (told["rank"], told["total"], told["title"], told["epochs"]) == (rank, 3, title, 3)
        assert told["extra"] == {"a b": -1e-3, "list": [1, "no"]}
        assert told["origins"]["training.epochs"] == told["origins"]["title"] == "command line"
        assert told["origins"]["launch.processes"] == "file config.yaml" and told["origins"]["breaks"] == "command line"
        assert (told["cells"], told["hsdp"], told["plan"], told["path"]) == ([1, 1], None, "mine", str(project))
    lines = [
        re.sub(r" \(at fake_train.py:\d+\)", "", line) for line in ran.stderr.splitlines() if "cannot be meant" in line
    ]
    assert lines == [
        "xffl: rank 1 (cell 1) failed with ConfigError: this cannot be meant; all other ranks were stopped"
    ]
    assert "Traceback" not in ran.stderr


def in_place(rank: int, world_size: int, port: int, folder: str) -> list[tuple[int, str]]:
    """Be a rank that torchrun has started, once rightly and in several wrong ways."""
    os.chdir(folder)
    be_rank(rank, world_size, port)
    told = []
    for words in (
        "config.yaml --title=x",
        "--federated 2 config.yaml",
        "--processes 2 config.yaml",
        "config.yaml --launch.processes 4",
        "config.yaml --launch.federated [2,2]",
        "config.yaml --training.epoch 4",
    ):
        err = io.StringIO()
        with redirect_stderr(err), redirect_stdout(io.StringIO()):
            code = main(["exec", *words.split()])
        told.append((code, err.getvalue()))
        for name in ("XFFL_FEDERATED", "XFFL_HSDP"):
            os.environ.pop(name, None)
        if words.startswith("config.yaml --title"):
            os.rename(f"told_{rank}.json", f"first_{rank}.json")
    return told


def test_ranks_that_a_launcher_started(project: Path) -> None:
    ends = run_world(2, in_place, free_port(), str(project), init=False)
    for rank, told in enumerate(ends):
        right, other, processes, launch, cells, unknown = told
        assert right == (0, "") and other[0] == 0
        assert ("federated 2 puts all 2 ranks into one cell" in other[1]) == (rank == 0)
        assert processes[0] == 2 and "--processes is 2, but torchrun has started 2 processes already" in processes[1]
        assert [launch[0], cells[0], unknown[0]] == [2, 2, 2]
    # All ranks have these errors behind a session of theirs, so one of them tells each.
    texts = ["".join(told[place][1] for told in ends) for place in range(6)]
    assert "launch.processes is 4 (command line), but torchrun has started 2; start 4, or give" in texts[3]
    assert "TopologyError: federated sizes (2, 2) sum to 4, but the world has 2" in texts[4]
    assert "did you mean training.epochs?" in texts[5]
    for rank, told in enumerate(told_by(project, 2)):
        first = json.loads((project / f"first_{rank}.json").read_text())
        assert (first["title"], first["cells"], told["title"], told["cells"]) == ("x", [1, 1], "", [2])
        assert first["total"] == told["total"] == 3


# A project ------------------------------------------------------------------------------------------------------------


def test_the_project_of_init_trains(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    made = start(tmp_path, "init", "demo")
    assert made.returncode == 0 and made.stderr == "wrote demo; next: cd demo && xffl exec config.yaml\n"
    command = ["-m", "xffl", "exec", "config.yaml"]
    two = ["--launch.processes", "2", "--launch.federated=[1,1]"]
    (code, first), (other_code, second) = run_script(2, [*command, *two], tmp_path / "demo")
    assert code == other_code == 0
    run = tmp_path / "demo" / "runs" / "demo"
    values = [json.loads(line)["values"] for line in (run / "metrics" / "federation.jsonl").read_text().splitlines()]
    accuracies = [record["val/accuracy"] for record in values if "val/accuracy" in record]
    assert accuracies[-1] > 0.9 and len(accuracies) > 2
    # What the page that init writes says of the last line.
    *_, one, last = first.splitlines()
    assert [line.split("  ")[0] for line in (one, second.splitlines()[-1])] == ["cell 0", "cell 1"]
    assert last.startswith("demo  finished  2 cells  ") and f"val/accuracy {accuracies[-1]:.4g}  " in last
    report = read_run(run)
    records = [record for of_cell in report.rounds.values() for record in of_cell]
    sent = decimal(int(sum(record.bytes_across for record in records)))
    assert f"{len({record.number for record in records})} rounds  sent {sent} between cells" in last
    assert last.endswith("records in runs/demo; xffl report runs/demo makes a page of them")
    origins = json.loads((run / "origins.json").read_text())
    assert origins["federation.every"] == "file config.yaml" and origins["training.max_steps"] == "default"
    assert json.loads((run / "partition.json").read_text())["labels"] == [str(digit) for digit in range(10)]
    # What the run has kept is a configuration, too.
    kept = yaml.safe_load((run / "config.yaml").read_text())
    [(_, told)] = run_script(1, [*command, "--config", "runs/demo/config.yaml", "--print_config"], tmp_path / "demo")
    assert {name: value for name, value in yaml.safe_load(told).items() if name in kept} == kept
    # Data are dealt out by label where that is asked for.
    short = ["--training.max_steps=4", "--data.partition", "dirichlet:alpha=0.3", "--experiment.output_dir=other"]
    assert [code for code, _ in run_script(2, [*command, *two, *short], tmp_path / "demo")] == [0, 0]
    counts = json.loads((tmp_path / "demo" / "other" / "partition.json").read_text())["counts"]
    assert sum(map(sum, counts)) == 1438 and max(abs(one - other) for one, other in zip(*counts, strict=True)) > 50
