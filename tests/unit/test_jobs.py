"""What a job is asked for: options as words, requests as files, and who carries them out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from xffl.cli.execute import build_parser
from xffl.cluster.launch.job_layout import lay_out
from xffl.cluster.slurm.allocation import Host
from xffl.errors import ConfigError
from xffl.jobs.cells import step_variables
from xffl.jobs.dispatch import ROLES
from xffl.jobs.options import JobOptions
from xffl.jobs.request import JobRequest, Limits, Output, Place, Role, read_request, write_request
from xffl.jobs.resolve import resolve

ALL = JobOptions(
    federated="2,2",
    hsdp=1,
    require_cells=2,
    log_dir="logs of all",
    merge=True,
    isolate=True,
    elastic="http://a:1",
    cell="0/2",
    processes=4,
    hosts="a:4",
    launcher="ssh",
    timeout=9.5,
    grace=2.0,
    restarts=0,
    meeting_timeout=7.0,
    start_from="global",
    export="out",
    measure="values.json",
    traceback=True,
)


def test_options_are_those_of_the_command_and_read_back_from_their_words() -> None:
    parser = build_parser()
    typed = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    assert set(JobOptions.names()) == typed - {"--help"}
    for options in (ALL, JobOptions(), JobOptions(elastic="")):
        assert JobOptions.of(vars(parser.parse_args(options.words()))) == options
    assert JobOptions().words() == []


@pytest.mark.parametrize("sizes", [None, 2, (2, 2)])
def test_a_request_is_handed_to_another_process_whole(sizes: int | tuple[int, ...] | None, tmp_path: Path) -> None:
    hosts = (Host("n1", 2, switches=("s", "t"), gpus=4), Host("n2", 2, address="me@n2"))
    request = JobRequest(
        role=Role.RANKS,
        command=("train.py", "a b", ":", "\udcff"),
        source="text",
        variables={"XFFL_HSDP": "1"},
        place=Place(kind="slurm", launcher="srun", layout=replace(lay_out(hosts, sizes, 1), cell=1)),
        limits=Limits(timeout_s=9.0, timeout_by="launch.timeout_s", grace_s=1.0),
        output=Output(log_dir="logs", is_merged=True, with_traceback=True, failures="folder"),
    )
    (tmp_path / "request.json").write_text(write_request(request), encoding="utf-8")
    assert read_request(tmp_path / "request.json") == request


def test_every_role_has_its_function() -> None:
    assert set(ROLES) == set(Role)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a script in the batch job of three nodes."""
    (tmp_path / "train.py").write_text("pass")
    for name, text in (
        ("JOB_ID", "7"),
        ("JOB_NODELIST", "n[1-3]"),
        ("JOB_NUM_NODES", "3"),
        ("TASKS_PER_NODE", "2(x3)"),
    ):
        monkeypatch.setenv(f"SLURM_{name}", text)
    return str(tmp_path / "train.py")


def test_all_cells_of_a_batch_job_have_hosts_of_their_own(script: str) -> None:
    request = resolve(JobOptions(elastic="", federated="4,2", hsdp=1, timeout=9.0), [script, "--lr", "1"])
    assert (request.role, request.limits.timeout_s) == (Role.ALL_CELLS, 9.0)
    assert [cell.started.layout.cell for cell in request.cells] == [0, 1]
    assert [[host.name for host in cell.started.layout.hosts] for cell in request.cells] == [["n1", "n2"], ["n3"]]
    for cell in request.cells:
        assert (cell.role, cell.command, cell.limits.timeout_s) == (Role.RANKS, (script, "--lr", "1"), None)
        assert (cell.variables, cell.started.kind) == ({"XFFL_HSDP": "1"}, "slurm")
    assert step_variables(request.cells[0].started.layout) == {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n1,n2",
        "SLURM_TASKS_PER_NODE": "2,2",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cells 0 and 1 share host n2"):
        resolve(JobOptions(elastic="", federated="3,3"), [script])


def test_a_cell_that_is_kept_alive_has_the_request_to_start_its_ranks(script: str) -> None:
    request = resolve(JobOptions(elastic="a:1", cell="1/2", require_cells=2, timeout=9.0, log_dir="logs"), [script])
    (cell,) = request.cells
    where = {"XFFL_CELL": "1/2", "XFFL_LIGHTHOUSE": "http://a:1"}
    assert (request.role, request.variables, request.output.log_dir) == (Role.ONE_CELL, where, "logs")
    assert (cell.role, cell.variables, cell.output.log_dir, cell.limits.timeout_s) == (Role.RANKS, where, None, None)
    assert (cell.started.layout.cell, cell.started.layout.topology.world_size) == (1, 6)
