"""``xffl submit`` without a SLURM: scripts are run by bash, and SLURM's commands are stand-ins on the PATH."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xffl.cli import submit as command
from xffl.cli.main import main
from xffl.cluster.launch.failure import code_of_signal
from xffl.cluster.slurm.job_monitor import (
    Ending,
    Follower,
    exit_code_of,
    expand_pattern,
    find_endings,
    log_pattern,
    read_queue,
)
from xffl.cluster.slurm.submit import (
    Job,
    SlurmConfig,
    find_busy,
    find_template,
    render_script,
    run_slurm,
    shape_cell,
    submit_job,
    tasks_of_node,
    tasks_of_sweep,
    word_of,
)
from xffl.errors import ConfigError, LaunchError

HOSTILE = ["a'; echo foo", 'say "hi" $HOME `id`', "two  words # no comment", "%j \u00e9 ${x:-1}", "-n", ""]


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {"name": "demo", "folder": "/tmp", "run_folder": "/tmp/runs/demo", "log": "/tmp/%j.log"}
    return Job(**{**given, "command": ("true",), "tasks_per_node": 2, **changes})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that puts a shell script onto the PATH, under the name of one of SLURM's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def put(name: str, text: str) -> Path:
        file = folder / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
        return file

    return put


# The script -----------------------------------------------------------------------------------------------------------


def told(
    slurm: SlurmConfig,
    tmp_path: Path,
    number: int | None = None,
    code: int = 0,
    cell: int | None = None,
    **environ: str,
) -> Any:
    """Run a script whose command writes down its words, and return them, its output and the calls of scontrol."""
    words = tmp_path / "words.json"
    program = (
        f"import json, os, sys; json.dump([os.getcwd(), *sys.argv[1:]], open({str(words)!r}, 'w')); sys.exit({code})"
    )
    folder = tmp_path / "a'; echo foo"
    folder.mkdir(exist_ok=True)
    tasks = tuple(tuple(word_of(k, v) for k, v in one.items()) for one in tasks_of_sweep(slurm.array))
    mine = job(folder=str(folder), command=(sys.executable, "-c", program, *HOSTILE), tasks=tasks, cell=cell)
    script = render_script(slurm, mine, find_template())
    given = {**os.environ, "SLURM_JOB_ID": "12", **environ}
    if number is not None:
        given |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": str(number)}
    ran = subprocess.run(["bash"], input=script, env=given, cwd="/", capture_output=True, text=True, check=False)
    return ran, json.loads(words.read_text()), folder


def test_words_and_folders_survive(tmp_path: Path) -> None:
    ran, words, folder = told(SlurmConfig(), tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "") and words == [str(folder), *HOSTILE]


def test_tasks_of_an_array_get_their_own_words(tmp_path: Path) -> None:
    slurm = SlurmConfig(array={"experiment": {"seed": [0, 1]}, "title": HOSTILE[:2], "some.list": [[1, "a b"], None]})
    expected = [
        [f"--experiment.seed={seed}", f"--title={title}", f"--some.list={rest}"]
        for seed in (0, 1) for title in HOSTILE[:2] for rest in ('[1, "a b"]', "null")
    ]  # fmt: skip
    found = [told(slurm, tmp_path, number)[1][1 + len(HOSTILE) :] for number in range(8)]
    assert found == expected
    assert "--array=0-7\n" in render_script(slurm, job(tasks=(("a",),) * 8), find_template())
    ran = subprocess.run(
        ["bash"], input=render_script(slurm, job(tasks=(("a",),) * 8), find_template()),
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "8"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and "no task 8" in ran.stderr


@pytest.mark.parametrize(
    ("slurm", "number", "restarts", "code", "asked"),
    [
        (SlurmConfig(), None, "", 75, ["requeue 12"]),
        (SlurmConfig(max_restarts=3), None, "2", 75, ["requeue 12"]),
        (SlurmConfig(max_restarts=3), None, "3", 75, []),
        (SlurmConfig(requeue=False), None, "", 75, []),
        (SlurmConfig(), None, "", 1, []),
        (SlurmConfig(), None, "", 0, []),
        # The first task's number may be that of the array, which would put all tasks back.
        (SlurmConfig(array={"x": [0, 1]}), 1, "", 75, ["requeue 12_1"]),
    ],
)
def test_a_preempted_job_goes_back_into_the_queue(
    slurm: SlurmConfig, number: int | None, restarts: str, code: int, asked: list[str],
    tmp_path: Path, program: Callable[[str, str], Path],
) -> None:  # fmt: skip
    program("scontrol", f'echo "$@" >>{shlex.quote(str(tmp_path))}/asked')
    environ = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    ran, _, _ = told(slurm, tmp_path, number, code, **environ)
    assert ran.returncode == code, ran.stderr
    calls = tmp_path / "asked"
    assert (calls.read_text().splitlines() if calls.exists() else []) == asked


@pytest.mark.parametrize(
    ("code", "seconds", "restarts", "goes_back"),
    [
        *((code, 700, 0, code in (1, 2, 75, 137)) for code in (0, 1, 2, 75, 124, 130, 137, 143)),
        (1, 500, 0, False),  # a script that fails at once would do so again
        (2, 500, 0, False),
        (75, 0, 0, True),
        (1, 700, 3, False),
    ],
)
def test_a_cell_that_fails_goes_back_into_the_queue(
    code: int, seconds: int, restarts: int, goes_back: bool, tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    program("scontrol", f'echo "$@" >>{shlex.quote(str(tmp_path))}/asked')
    environ = {"SLURM_RESTART_COUNT": str(restarts), "SECONDS": str(seconds)}  # bash counts on from there
    ran, _, _ = told(SlurmConfig(max_restarts=3), tmp_path, code=code, cell=1, **environ)
    assert ran.returncode == code, ran.stderr
    assert (tmp_path / "asked").exists() is goes_back


def test_setup_may_use_what_is_not_set_and_may_be_a_file(tmp_path: Path) -> None:
    ran, _, _ = told(SlurmConfig(setup=("echo $IS_NOT_SET here", "export SITE='a b'")), tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "here\n")
    file = tmp_path / "a'; echo foo.sh"
    file.write_text("echo from $UNSET_TOO a file")
    ran, _, _ = told(SlurmConfig(setup=str(file)), tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "from a file\n")
    script = render_script(SlurmConfig(setup=("false",)), job(command=("echo", "started")), find_template())
    ran = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")  # what fails there ends the job
    with pytest.raises(ConfigError, match=r"slurm.setup is 'nowhere.sh', and there is no such file"):
        render_script(SlurmConfig(setup="nowhere.sh"), job(), find_template())


def test_options_of_sbatch() -> None:
    slurm = SlurmConfig(
        partition="gpu", nodes=4, cpus_per_task=8, gpus_per_node="a100:4", memory=0, time="1-12:30", account="a b",
        qos="high", constraint="a100&nvme", nodelist="a[1-2],b1", switches="1@12:00:00",
        dependency="afterany:7", signal="TERM", signal_s=300,
        array={"experiment.seed": [0, 1]}, array_limit=2, extra=("--exclusive", "--mail-user=me@site.org"),
    )  # fmt: skip
    script = render_script(slurm, job(tasks_per_node=4, tasks=(("a",), ("b",))), find_template())
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=demo", "--output=/tmp/%j.log", "--open-mode=append", "--partition=gpu", "--account='a b'",
        "--qos=high", "--constraint='a100&nvme'", "--nodelist='a[1-2],b1'", "--nodes=4", "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gpus-per-node=a100:4", "--mem=0", "--time=1-12:30", "--switches=1@12:00:00", "--dependency=afterany:7",
        "--array=0-1%2", "--signal=TERM@300", "--requeue", "--exclusive", "--mail-user=me@site.org",
    ]  # fmt: skip
    # What stands in a comment before a command is an option only before the first command.
    assert script.index("#SBATCH --mail-user") < script.index("\nset -euo pipefail\n")
    assert "--signal" not in render_script(SlurmConfig(signal_s=None), job(), find_template())


@pytest.mark.parametrize("name", ["a\nb", "", "a\tb", "a\x00b", "a\\nb", "\\", "a\\' --wrap=id '", "a\u202eb"])
def test_what_cannot_stand_in_a_script_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--job-name of the batch script would be"):
        render_script(SlurmConfig(), job(name=name), find_template())


@pytest.mark.parametrize(
    "key", ["partition", "account", "qos", "constraint", "nodelist", "switches", "dependency", "memory"]
)
@pytest.mark.parametrize("value", ["a\\' --wrap=id '", "a\n#SBATCH --wrap=id", ""])
def test_no_value_adds_an_option_of_sbatch(key: str, value: str) -> None:
    told = {"memory": "mem"}.get(key, key)
    with pytest.raises(ConfigError, match=f"--{told} of the batch script would be .* without a backslash"):
        render_script(SlurmConfig(**{key: value}), job(), find_template())


def test_a_path_of_the_output_has_no_backslash() -> None:
    with pytest.raises(ConfigError, match=r"--output of the batch script would be '/tmp/a\\\\b.log'"):
        render_script(SlurmConfig(), job(log="/tmp/a\\b.log"), find_template())
    with pytest.raises(ConfigError, match=r"slurm.extra has '--x\\n#SBATCH --wrap=id'"):
        render_script(SlurmConfig(extra=("--x\n#SBATCH --wrap=id",)), job(), find_template())


def test_what_a_template_puts_into_a_line_of_sbatch_is_checked_alike() -> None:
    template = "#!/bin/bash\n# @NAME@\n#SBATCH --chdir=@FOLDER@\n@DIRECTIVES@\ncd @FOLDER@; @COMMAND@\n"
    assert "#SBATCH --chdir='/tmp/a b'\n" in render_script(SlurmConfig(), job(folder="/tmp/a b"), template)
    for folder in ("/tmp/a\n#SBATCH --wrap=id", "/tmp/a\\b"):
        with pytest.raises(ConfigError, match="@FOLDER@ of the batch script would be"):
            render_script(SlurmConfig(), job(folder=folder), template)
        assert shlex.quote(folder) in render_script(SlurmConfig(), job(folder=folder), find_template())


@pytest.mark.parametrize("word", ["a\x00b", "a\udcffb"])
def test_what_no_script_can_hold_is_told_with_its_line(word: str) -> None:
    with pytest.raises(ConfigError, match=r"line \d+ of the batch script would have the character '\\(x00|udcff)'"):
        render_script(SlurmConfig(), job(command=("echo", word)), find_template())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "slurm.nodes must be a positive integer, got 0"),
        ({"array_limit": 2}, "slurm.array_limit 2 is for the tasks of slurm.array, which has none"),
        ({"max_restarts": -1}, "slurm.max_restarts must be an integer of 0 or more, got -1"),
        ({"signal": "usr2; x"}, "slurm.signal"),
        ({"gpus_per_node": 0}, "slurm.gpus_per_node 0"),
        ({"gpus_per_node": "a:b"}, "slurm.gpus_per_node 'a:b'"),
        ({"gpus_per_node": "7" * 5000}, "slurm.gpus_per_node '777"),
        ({"time": "7" * 5000}, "slurm.time '777"),
        ({"time": "tomorrow"}, "slurm.time 'tomorrow' is no time"),
        ({"time": 1}, "slurm.time 1 is 60 s, and slurm.signal_s 90"),
        ({"time": "1:30"}, "slurm.time 1:30 is 90 s"),
        ({"extra": ("exclusive",)}, "slurm.extra has 'exclusive'"),
    ],
)
def test_wrong_sections_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlurmConfig(**given)


def test_times_are_sbatchs() -> None:
    for time_limit in (2, "1:31", "0:1:31", "1-0", "0-0:2", "0-0:0:91", "UNLIMITED", None):
        SlurmConfig(time=time_limit)
    for time_limit in ("0:1:30", "0-0:1", "0-0:0:90"):
        with pytest.raises(ConfigError, match="the signal would come at once"):
            SlurmConfig(time=time_limit)


def test_tasks_of_a_node() -> None:
    assert tasks_of_node(SlurmConfig(), None) == 1
    assert tasks_of_node(SlurmConfig(), 4) == 4
    assert tasks_of_node(SlurmConfig(nodes=2), 4) == 2
    assert tasks_of_node(SlurmConfig(nodes=2, gpus_per_node="a100:4"), None) == 4
    assert tasks_of_node(SlurmConfig(nodes=2, gpus_per_node=4, tasks_per_node=1), 2) == 1
    for slurm, processes in ((SlurmConfig(nodes=3), 4), (SlurmConfig(nodes=2, gpus_per_node=4), 4)):
        with pytest.raises(ConfigError, match=r"launch.processes is 4, but slurm asks for . nodes of"):
            tasks_of_node(slurm, processes)


def test_cells_of_different_sizes_have_jobs_of_different_shapes() -> None:
    def shapes(slurm: SlurmConfig, *sizes: int) -> list[tuple[int, int]]:
        found = (shape_cell(slurm, sizes, cell) for cell in range(len(sizes)))
        return [(own.nodes, tasks) for own, tasks in found]

    assert shapes(SlurmConfig(nodes=2), 4, 4, 2, 1) == [(2, 2), (2, 2), (1, 2), (1, 1)]
    assert shapes(SlurmConfig(gpus_per_node=4), 2, 4) == [(1, 2), (1, 4)]
    assert shapes(SlurmConfig(nodes=3, tasks_per_node=2), 2, 4, 6) == [(1, 2), (2, 2), (3, 2)]
    with pytest.raises(
        ConfigError, match="the size of cell 1 is 4, but slurm asks for 1 nodes of 8 tasks; give another"
    ):
        shapes(SlurmConfig(gpus_per_node=8), 2, 4)
    with pytest.raises(ConfigError, match="cell 1 has 3 ranks, which do not fill nodes of 2"):
        shapes(SlurmConfig(nodes=2), 4, 3)


def test_sweeps() -> None:
    assert tasks_of_sweep({}) == ()
    assert tasks_of_sweep({"a.b": [1, 2]}) == ({"a.b": 1}, {"a.b": 2}) == tasks_of_sweep({"a": {"b": [1, 2]}})
    assert [tuple(one.values()) for one in tasks_of_sweep({"a": [1, 2], "b": ["x", "y"]})] == [
        (1, "x"), (1, "y"), (2, "x"), (2, "y"),
    ]  # fmt: skip
    for wrong in (3, "abc", [], None):
        with pytest.raises(ConfigError, match="slurm.array.seed is"):
            tasks_of_sweep({"seed": wrong})
    with pytest.raises(ConfigError, match="slurm.array has 1000000000000 tasks"):
        tasks_of_sweep(dict.fromkeys("abcd", [0] * 1000))


# From a configuration -------------------------------------------------------------------------------------------------

TRAINER = """
from dataclasses import dataclass, field
from typing import Any

@dataclass(frozen=True)
class Experiment:
    name: str = "demo"
    output_dir: str = "runs/demo"
    seed: int = 0
    preempt_signals: tuple[str, ...] = ("USR2", "SIGTERM")

@dataclass
class Config:
    experiment: Experiment = field(default_factory=Experiment)
    title: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

class Trainer:
    config: Config

    def fit(self): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a configuration, in which this process is."""
    folder = tmp_path / HOSTILE[0]
    folder.mkdir()
    (folder / "submit_train.py").write_text(TRAINER)
    (folder / "config.yaml").write_text(
        "trainer: submit_train.Trainer\nlaunch: {processes: 4}\nslurm: {nodes: 2, time: '1:00:00', partition: cpu}\n"
    )
    (folder / "more.yaml").write_text("slurm: {partition: long}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "submit_train", raising=False)
    return folder


def dry(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return what the command prints: a script, or what is wrong."""
    assert main(["submit", "--dry-run", *words]) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def test_the_command_line_of_a_configuration(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--title", HOSTILE[0], "--slurm.time=2:00:00", "--merge", "--config", "more.yaml", "--tags+=a  b"]
    script = dry(
        capsys, "--federated", "auto", "--slurm.nodes", "1", "config.yaml", *words, "--hsdp=2", "--require-cells=2"
    )
    for line in ("--nodes=1", "--ntasks-per-node=4", "--time=2:00:00", "--partition=long", "--job-name=demo"):
        assert f"#SBATCH {line}\n" in script
    assert f"cd -- {shlex.quote(str(project))}\n" in script
    (line,) = (line for line in script.splitlines() if "__main__.py exec" in line and not line.startswith("#"))
    command_line = shlex.split(line.partition(' "$@" ||')[0])
    assert command_line[1:] == [
        command._PROGRAM, "exec", "--federated=auto", "--hsdp=2", "--require-cells=2", "--merge", "config.yaml",
        "--config=more.yaml", f"--title={HOSTILE[0]}", "--tags+=a  b",
    ]  # fmt: skip


def test_tasks_have_folders_of_their_own(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = dry(capsys, "config.yaml", "--slurm.array.experiment.seed", "[3, 4]")
    assert "1) set -- --experiment.seed=4 --experiment.output_dir=runs/demo/task_1 ;;" in script
    script = dry(capsys, "config.yaml", "--slurm.array", "{experiment.output_dir: [x, y]}")
    assert "1) set -- --experiment.output_dir=y ;;" in script
    wrong = dry(capsys, "config.yaml", "--slurm.array", "{experiment.output_dir: [x, x]}", code=2)
    assert "several tasks of slurm.array write to x" in wrong
    wrong = dry(capsys, "config.yaml", "--slurm.array", "{launch.processes: [4, 8]}", code=2)
    assert "all tasks of an array are of one shape" in wrong
    wrong = dry(capsys, "config.yaml", "--slurm.array", "{experiment.sed: [1, 2]}", code=2)
    assert "did you mean experiment.seed?" in wrong
    for words in (["config.yaml", "--slurm.array.experiment.seed=[3, 4]"], ["submit_train.py"]):
        wrong = dry(capsys, "--log-dir=logs", "--slurm.array={experiment.seed: [3, 4]}", *words, code=2)
        assert "--log-dir 'logs' is one folder, and each task of slurm.array has a rank 0" in wrong


def test_mistakes_are_told_before_the_queue(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["config.yaml", "--require-cells", "0"], "--require-cells must be a positive integer, got 0"),
        (["config.yaml", "--slurm.node", "2"], "slurm.node on the command line is unknown; did you mean slurm.nodes?"),
        (["config.yaml", "--slurm.nodes", "3"], "launch.processes is 4, but slurm asks for 3 nodes of 1 tasks"),
        (["config.yaml", "--slurm.signal", "USR1"], "slurm.signal is USR1, but the run listens to USR2, TERM"),
        (["config.yaml", "--follow", "--no-follow"], "--follow and --no-follow are both given"),
        (["config.yaml", "--title"], "--title on the command line has no value"),
        (["nowhere.py"], "script 'nowhere.py' does not exist"),
        (["--isolate", "config.yaml"], "--isolate is for scripts whose cells are one job"),
        ([], "no file is given"),
    ):
        assert message in dry(capsys, *words, code=2)
    assert "--signal" not in dry(capsys, "config.yaml", "--slurm.signal_s", "null")


def test_isolated_cells_are_those_of_the_script(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slurm.nodes=1", "--slurm.tasks_per_node=4", "submit_train.py", "--isolate"]
    (command_line,) = commands(dry(capsys, "--isolate", "--federated=2,2", *words))
    assert command_line[-4:] == ["--federated=2,2", "--isolate", "submit_train.py", "--isolate"]


# A job for each cell --------------------------------------------------------------------------------------------------


def commands(scripts: str) -> list[list[str]]:
    """Return the words of the commands of some scripts."""
    lines = [line for line in scripts.splitlines() if "__main__.py exec" in line and not line.startswith("#")]
    return [shlex.split(line.partition(' "$@" ||')[0]) for line in lines]


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XFFL_TOKEN", "XFFL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_token")
def test_each_cell_of_an_elastic_run_is_a_job(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"{project}/runs/demo"
    for words in (
        ["--elastic", "--cells", "3", "config.yaml", "--title", HOSTILE[0], "--merge", "--slurm.time=2:00:00"],
        ["config.yaml", "--title", HOSTILE[0], "--merge", "--slurm.time=2:00:00", "--elastic", "--cells", "3"],
    ):
        scripts = dry(capsys, *words)
        assert (
            scripts.count("#!/bin/bash\n") == 3 and scripts.count("#SBATCH --signal=USR2@90\n#SBATCH --requeue\n") == 3
        )
        assert scripts.count("--nodes=2\n") == scripts.count("--ntasks-per-node=2\n") == 3
        for cell, command_line in enumerate(commands(scripts)):
            assert command_line == [
                "env", f"XFFL_TOKEN_FILE={run}/token", sys.executable, command._PROGRAM, "exec", "--merge",
                f"--elastic=file:{run}/lighthouse", f"--cell={cell}/3", "config.yaml", f"--title={HOSTILE[0]}",
            ]  # fmt: skip
            assert f"#SBATCH --job-name=demo_cell_{cell}\n" in scripts
            log = log_pattern(f"{run}/cell_{cell}/slurm", False)
            assert f"#SBATCH --output={shlex.quote(log)}\n" in scripts
    assert not (project / "runs").exists()
    scripts = dry(capsys, "--elastic", "http://a:1", "--cells=2", "--cell=1", "config.yaml")
    assert (
        commands(scripts)[0][5:] == ["--elastic=http://a:1", "--cell=1/2", "config.yaml"]
        and len(commands(scripts)) == 1
    )


@pytest.mark.usefixtures("no_token")
def test_sizes_of_cells(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "sizes.yaml").write_text(
        "trainer: submit_train.Trainer\nlaunch: {processes: 10, federated: [4, 4, 2]}\nslurm: {nodes: 2}\n"
    )
    for words, sizes in (
        (["sizes.yaml"], [4, 4, 2]),
        (["sizes.yaml", "--cells", "3"], [4, 4, 2]),
        (["sizes.yaml", "--federated", "2,6"], [2, 6]),
        (["sizes.yaml", "--federated", "2", "--cells", "2"], [2, 2]),
        (["sizes.yaml", "--launch.federated", "2", "--cells", "2"], [2, 2]),
    ):
        scripts = dry(capsys, "--elastic", *words)
        found = [[word for word in one if word.startswith("--processes")] for one in commands(scripts)]
        assert found == [[f"--processes={size}"] for size in sizes]
        nodes, tasks = (
            [int(line.rpartition("=")[2]) for line in scripts.splitlines() if line.startswith(f"#SBATCH --{name}=")]
            for name in ("nodes", "ntasks-per-node")
        )
        assert [one * other for one, other in zip(nodes, tasks, strict=True)] == sizes
    wrong = dry(capsys, "--elastic", "--cells", "2", "sizes.yaml", code=2)
    assert "--cells is 2, but federated 4,4,2 has 3 cells" in wrong


@pytest.mark.usefixtures("no_token")
def test_a_script_is_that_of_each_cell(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slurm.nodes=1", "--slurm.tasks_per_node=2", "submit_train.py", "--elastic", "x"]
    scripts = dry(capsys, "--elastic", "--cells", "3", *words)
    for cell, command_line in enumerate(commands(scripts)):
        run = f"{project}/runs/submit_train"
        assert command_line[5:] == [
            f"--elastic=file:{run}/lighthouse", f"--cell={cell}/3", "submit_train.py", "--elastic", "x",
        ]  # fmt: skip
    assert "--signal" not in scripts
    assert len(commands(dry(capsys, "--elastic", "--federated=1", "--cells", "2", "submit_train.py"))) == 2
    assert commands(dry(capsys, "--cells", "2", "--elastic", "submit_train.py"))[1][6] == "--cell=1/2"


def test_the_token_is_in_a_file_of_its_owner(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    program: Callable[[str, str], Path], no_token: None, tmp_path: Path,
) -> None:  # fmt: skip
    program("sbatch", f"cat >>{tmp_path}/scripts; echo >>{tmp_path}/count; echo $((10 + $(wc -l <{tmp_path}/count)))")
    program("squeue", "true")
    words = ["submit", "--no-follow", "--elastic", "--cells", "2", "config.yaml"]
    assert main(words) == 0
    assert capsys.readouterr().out == "11\n12\n"
    file = project / "runs" / "demo" / "token"
    token = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600 and len(token) == 64
    assert token not in (tmp_path / "scripts").read_text()
    assert (project / "runs/demo/cell_1/slurm/jobs").read_text() == "12\n"
    assert main(words) == 0 and file.read_text().strip() == token  # what is there stays
    monkeypatch.setenv("XFFL_TOKEN", "mine, for this run")
    assert not any("TOKEN" in word for one in commands(dry(capsys, *words[2:])) for word in one)
    monkeypatch.delenv("XFFL_TOKEN")
    (project / "own").write_text("mine, for this run")
    monkeypatch.setenv("XFFL_TOKEN_FILE", "own")
    assert "may be read by others" in dry(capsys, *words[2:], code=2)
    (project / "own").chmod(0o600)
    assert [one[1] for one in commands(dry(capsys, *words[2:]))] == [f"XFFL_TOKEN_FILE={project}/own"] * 2


def test_a_cell_alone_is_submitted_again_while_the_others_run(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    program: Callable[[str, str], Path],
    no_token: None,
    tmp_path: Path,
) -> None:
    program("sbatch", f"cat >/dev/null; echo >>{tmp_path}/count; echo $((10 + $(wc -l <{tmp_path}/count)))")
    program("squeue", "printf '11\\n13\\n'")
    words = ["submit", "--no-follow", "--elastic", "--cells", "3", "config.yaml"]
    assert main(words) == 0 and capsys.readouterr().out == "11\n12\n13\n"
    assert main(words) == 2
    assert f"job 11, which has not ended, writes to {project}/runs/demo/cell_0; give" in capsys.readouterr().err
    assert len((tmp_path / "count").read_text()) == 3
    assert "XFFL_EARLIER_JOBS" not in str(commands(dry(capsys, *words[2:])))
    # It may have lost the model that it had, as after a restart.
    assert commands(dry(capsys, *words[2:], "--cell", "1"))[0][2] == "XFFL_EARLIER_JOBS=1"
    assert main([*words, "--cell", "1"]) == 0 and capsys.readouterr().out == "14\n"
    assert main([*words, "--cell", "2"]) == 2


def test_where_a_cell_cannot_be_submitted_none_is(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    program: Callable[[str, str], Path],
    no_token: None,
    tmp_path: Path,
) -> None:
    program("sbatch", "grep -q cell_2$ && { echo 'error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }; echo 1$RANDOM")
    program("squeue", "true")
    program("scancel", f'echo "$@" >{tmp_path}/cancelled')
    assert main(["submit", "--no-follow", "--elastic", "--cells", "3", "config.yaml"]) == 2
    told = capsys.readouterr()
    first, second = (tmp_path / "cancelled").read_text().split()
    assert told.out == "" and f"xffl: cancelled jobs {first}, {second}, since" in told.err and "QOSMax" in told.err


@pytest.mark.usefixtures("no_token")
def test_what_does_not_go_with_cells_as_jobs_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--cells", "3"], "--cells 3 is for the jobs of an elastic run; give --elastic"),
        (["--cell", "1"], "--cell 1 is for the jobs of an elastic run"),
        (["--elastic"], "--elastic needs the number of cells; give --cells"),
        (["--elastic", "--cells", "0"], "--cells must be an integer from 1 to 10000, got 0; each is a job"),
        (["--elastic", "--cells", "99999999"], "--cells must be an integer from 1 to 10000, got 99999999; each is"),
        (["--elastic", "--cells", "3", "--cell", "3"], "--cell is 3, but there are 3 cells, from 0; give 0 to 2"),
        (["--elastic", "--cells", "3", "--cell=-1"], "--cell must be an integer of 0 or more, got -1"),
        (["--elastic", "--federated", "auto"], "--federated auto finds cells in one job, but each is a job of its own"),
        (["--elastic", "file:", "--cells", "3"], "--elastic is 'file:'; give"),
        (["--elastic=a", "--cells", "3"], "--elastic is 'a'; give HOST:PORT"),
        (["--elastic", "--cells=2", "--slurm.array={title: [a, b]}"], "slurm.array makes one job of many runs, but"),
        (["--elastic", "--cells=2", "--slurm.output=x.log"], "slurm.output 'x.log' is one file for all cells; put %j"),
    ):
        wrong = dry(capsys, *words, "config.yaml", code=2)
        assert message in wrong and wrong.count("\n") == 1, wrong
    assert len(commands(dry(capsys, "--elastic", "--cells=2", "--slurm.output=%x.log", "config.yaml"))) == 2


def test_a_script_gets_a_signal_only_where_it_is_asked_for(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = dry(capsys, "--slurm.nodes=2", "--slurm.tasks_per_node=3", "submit_train.py", "--dry-run", "--s", "a  b")
    assert "#SBATCH --ntasks-per-node=3\n" in script and "#SBATCH --signal" not in script
    assert "exec submit_train.py --dry-run --s 'a  b' \"$@\"" in script
    assert main(["submit", "--dry-run", "--slurm.signal_s=30", "submit_train.py"]) == 0
    told = capsys.readouterr()
    assert "#SBATCH --signal=USR2@30\n" in told.out
    assert "slurm sends USR2 to the script 30 s before the time limit, which ends a script that does not" in told.err


def test_a_dry_run_that_is_none_is_told(
    project: Path, program: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", "echo 12")
    assert main(["submit", "--no-follow", "submit_train.py", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert told.out == "12\n" and "--dry-run after submit_train.py is passed to the script" in told.err
    assert main(["submit", "--no-follow", "submit_train.py", "--dry"]) == 0
    assert capsys.readouterr().err == ""


# Templates ------------------------------------------------------------------------------------------------------------


def test_a_sites_template_beats_xffls(tmp_path: Path) -> None:
    for name in ("option", "folder", "home/xffl/templates"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "job.sbatch").write_text(name)
    environ: dict[str, str] = {"HOME": str(tmp_path / "nobody")}
    assert "scontrol requeue" in find_template(None, environ)
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "home")
    assert find_template(None, environ) == "home/xffl/templates"
    environ["XFFL_TEMPLATES"] = str(tmp_path / "folder")
    assert find_template(None, environ) == "folder"
    assert find_template(str(tmp_path / "option" / "job.sbatch"), environ) == "option"
    with pytest.raises(ConfigError, match=r"XFFL_TEMPLATES: .*missing/job.sbatch cannot be read"):
        find_template(None, {"XFFL_TEMPLATES": str(tmp_path / "missing")})
    with pytest.raises(ConfigError, match="--template: nowhere cannot be read"):
        find_template("nowhere", environ)


def test_templates_lack_no_place_and_have_no_unknown_one() -> None:
    own = "#!/bin/sh\n@DIRECTIVES@\n#SBATCH --mail-user=me@site.org\n@COMMAND@ >out_@NAME@ # @MAX_RESTARTS@\n"
    script = render_script(SlurmConfig(), job(name="a b", command=("echo", "@FOLDER@", "\\1")), own)
    # What is filled in is not looked at again.
    assert script.endswith("me@site.org\necho @FOLDER@ '\\1' >out_'a b' # 100\n")
    with pytest.raises(ConfigError, match="has @COMMANDS@, which nothing fills; there are @COMMAND@"):
        render_script(SlurmConfig(), job(), own + "@COMMANDS@")
    with pytest.raises(ConfigError, match="lacks @COMMAND@ or @DIRECTIVES@"):
        render_script(SlurmConfig(), job(), "#!/bin/sh\n")
    with pytest.raises(ConfigError, match="lacks @TASK@"):
        render_script(SlurmConfig(), job(tasks=(("a",),)), own)


# Submission -----------------------------------------------------------------------------------------------------------


def test_submission_keeps_the_script_and_refuses_a_second_job(
    tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    program("sbatch", f"cat >{tmp_path}/script; env | grep ^SLURM >{tmp_path}/environ; echo '12;mini'")
    mine = job(run_folder=str(tmp_path / "a'; echo foo"), log=str(tmp_path / "logs" / "%j.log"), is_exclusive=True)
    assert submit_job("echo hi\n", mine) == "12"
    assert (tmp_path / "script").read_text() == "echo hi\n" and (tmp_path / "logs").is_dir()
    kept = tmp_path / "a'; echo foo" / "slurm" / "12.sbatch"
    assert (
        kept.read_text() == "echo hi\n" and kept.stat().st_mode == (kept.parent / "jobs").stat().st_mode
    )  # the umask's
    assert kept.with_name("jobs").read_text() == "12\n"
    program("squeue", "printf '11\\n12\\n'")
    with pytest.raises(LaunchError, match=r"job 12, which has not ended, writes to .*afterany:12"):
        submit_job("echo hi\n", mine)
    assert submit_job("echo hi\n", mine, is_chained=True) == "12"
    program("squeue", "printf '112\\n'")
    assert submit_job("echo hi\n", mine) == "12"
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    with pytest.raises(LaunchError, match="squeue failed: slurm_load_jobs error"):
        find_busy(["12"])


def test_a_job_whose_script_cannot_be_kept_is_named(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    (tmp_path / "slurm" / "12.sbatch").mkdir(parents=True)
    program("sbatch", "echo 12")
    with pytest.raises(LaunchError, match="job 12 is submitted, but .* cannot be written: Is a dir.*; squeue -j 12"):
        submit_job("echo hi\n", job(run_folder=str(tmp_path)))


def test_a_job_inside_a_job_inherits_nothing(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("sbatch", "env | grep ^SLURM_")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    assert "SLURM_NTASKS_PER_NODE=7" in run_slurm(["sbatch"]).stdout
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert run_slurm(["sbatch"]).stdout == "SLURM_CONF=/etc/mine\n"


def test_what_sbatch_says_is_passed_on(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(LaunchError, match="sbatch refused the job: invalid partition specified: x; change"):
        submit_job("", job(run_folder=str(tmp_path)))


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not there; HINT: submit from a login node"):
        submit_job("", job(run_folder=str(tmp_path)))


# Following ------------------------------------------------------------------------------------------------------------


def test_names_of_output() -> None:
    names = {"j": "12", "x": "a b"}
    assert expand_pattern("/a/%x-%j.log", names) == "/a/a b-12.log"
    assert expand_pattern("/a/%5j%%j.log", names) == "/a/00012%j.log"
    assert expand_pattern("/a/%N.log", names) is None and expand_pattern("/a\\b/%j.log", names) is None
    for folder in ("/runs/100%j", "/runs/a'; echo foo", "/%%"):
        assert expand_pattern(log_pattern(folder, False), names) == f"{folder}/12.log"
    with pytest.raises(ConfigError, match="SLURM drops backslashes"):
        log_pattern("/a\\b", False)


SACCT = {  # as "sacct --noheader -X -P --format=JobID,State,ExitCode" prints it
    "12|COMPLETED|0:0": {"12": Ending("COMPLETED", 0)},
    "12|FAILED|2:0": {"12": Ending("FAILED", 2)},
    "12|OUT_OF_MEMORY|0:125": {"12": Ending("OUT_OF_MEMORY", 253)},
    "12|CANCELLED by 1000|0:0": {"12": Ending("CANCELLED", 130)},
    "12|TIMEOUT|0:0": {"12": Ending("TIMEOUT", 124)},
    "12|TIMEOUT|0:15": {"12": Ending("TIMEOUT", 124)},
    "12|CANCELLED+|0:0": {"12": Ending("CANCELLED", 130)},
    "12|NODE_FAIL|0:0": {"12": Ending("NODE_FAIL", 1)},
    "12_0|COMPLETED|0:0\n12_1|FAILED|0:9": {"12_0": Ending("COMPLETED", 0), "12_1": Ending("FAILED", 137)},
}


@pytest.mark.parametrize("printed", SACCT)
def test_the_accounting_tells_how_a_job_ended(
    printed: str, tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    # It is a few seconds late: at first it knows nothing, then that the job runs.
    program(
        "sacct",
        f"""
        echo "$@" >>{tmp_path}/asked
        case $(wc -l <{tmp_path}/asked) in
            1) ;;
            2) echo '12|RUNNING|0:0' ;;
            3) printf '12_0|COMPLETED|0:0\\n12_1|RUNNING|0:0\\n' ;;
            *) printf '{printed.replace(chr(10), "%sn")}' '\\' | sed 's/\\\\n/\\n/g'; echo ;;
        esac
        """,
    )
    program("scontrol", "echo never; exit 1")
    assert find_endings("12", look_s=0.01) == SACCT[printed]
    assert set((tmp_path / "asked").read_text().splitlines()) == {
        "--noheader -X -P -j 12 --format=JobID,State,ExitCode"
    }


# Recorded from a SLURM 22.05 (the first two), shortened.
SHOWN = """\
JobId=2 JobName=x UserId=1 GroupId= JobState=COMPLETED UserId=root(0) GroupId=root(0) Priority=42 JobState=FAILED \
Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=3:0 RunTime=00:00:01 \
WorkDir=/tmp/w JobState=COMPLETED ExitCode=0:0 StdOut=/tmp/w/x'; # "y %2 2.log Power=
JobId=14 ArrayJobId=13 ArrayTaskId=1 JobName=demo UserId=root(0) GroupId=root(0) JobState=COMPLETED ExitCode=0:0
JobId=15 ArrayJobId=13 ArrayTaskId=2-4 JobName=demo UserId=root(0) GroupId=root(0) JobState=PENDING ExitCode=0:0
"""


def test_without_accounting_the_controller_is_asked(
    tmp_path: Path, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shown").write_text(SHOWN)
    program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    program("scontrol", f"cat {tmp_path}/shown")
    found = find_endings("2")
    assert found == {"2": Ending("FAILED", 3), "13_1": Ending("COMPLETED", 0)} and exit_code_of(found) == 3
    (tmp_path / "bin" / "sacct").unlink()
    program("scontrol", f"exec /bin/cat {tmp_path}/shown")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "bin"))  # where sacct is not installed
        assert find_endings("2") == found
    program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert find_endings("2") == {}


def test_the_queue(program: Callable[[str, str], Path]) -> None:
    program("squeue", "printf '12_0|RUNNING|None\\n12_1|PENDING|(JobHeldUser|x)\\n'")
    assert read_queue("12") == {"12_0": ("RUNNING", "None"), "12_1": ("PENDING", "(JobHeldUser|x)")}
    program("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert read_queue("12") == {}
    program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert read_queue("12") is None


def follower(pattern: str, pieces: list[str], lines: list[str]) -> Follower:
    return Follower({"12": job(log=pattern)}, "me", pieces.append, lines.append, longest_s=0.02, look_s=0.01)


def test_a_job_is_followed_through_the_queue_and_a_restart(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    log = tmp_path / "a'; echo foo" / "12.log"
    log.parent.mkdir()
    # Each question to the queue is a step further; the second finds no controller, the fourth a job put back.
    program(
        "squeue",
        f"""
        cd {shlex.quote(str(tmp_path))}; echo >>asked
        case $(wc -l <asked) in
            1) echo '12|PENDING|Resources' ;;
            2) echo 'Unable to contact slurm controller' >&2; exit 1 ;;
            3) printf 'first\\nhal' >>{shlex.quote(str(log))}; echo '12|RUNNING|None' ;;
            4) printf 'f\\n' >>{shlex.quote(str(log))}; echo '12|PENDING|BeginTime' ;;
            5) printf '\\303' >>{shlex.quote(str(log))}; echo '12|RUNNING|None' ;;
            *) printf '\\251 end' >>{shlex.quote(str(log))}; echo '12|COMPLETED|None' ;;
        esac
        """,
    )
    program("sacct", "echo '12|COMPLETED|0:0'")
    pieces: list[str] = []
    lines: list[str] = []
    assert follower(log_pattern(str(log.parent), False), pieces, lines).follow() == {"12": Ending("COMPLETED", 0)}
    assert "".join(pieces) == "first\nhalf\n\u00e9 end" and pieces[0] == "first\n"
    assert lines == [
        "job 12 is PENDING (Resources)",
        "the controller does not answer; job 12 goes on, and is asked for again",
        "job 12 is RUNNING",
        "job 12 is PENDING (BeginTime)",
        "job 12 is RUNNING",
        "job 12 is COMPLETED",
    ]


def test_an_array_is_followed_to_its_last_task(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    (tmp_path / "12_1.log").write_text("task 1\n")  # the other one has not begun to write, and never does
    program(
        "squeue",
        f"""
        echo >>{tmp_path}/asked
        case $(wc -l <{tmp_path}/asked) in
            1) printf '12_0|RUNNING|None\\n12_1|RUNNING|\\n' ;;
            2|3) echo 'Unable to contact slurm controller' >&2; exit 1 ;;
            4) printf '12_0|FAILED|NonZeroExitCode\\n12_1|RUNNING|\\n' ;;
            *) echo 'last words' >>{tmp_path}/12_1.log; printf '12_0|FAILED|None\\n12_1|COMPLETED|None\\n' ;;
        esac
        """,
    )
    program("sacct", "printf '12_1|COMPLETED|0:0\\n12_0|FAILED|7:0\\n'")
    pieces: list[str] = []
    lines: list[str] = []
    follower(log_pattern(str(tmp_path), True), pieces, lines).follow()
    assert "".join(pieces) == "[12_1] task 1\n[12_1] last words\n"
    assert lines[:3] == [
        "job 12_0 is RUNNING",
        "job 12_1 is RUNNING",
        "the controller does not answer; job 12 goes on, and is asked for again",
    ]
    assert lines[3:] == [
        "job 12_0 is FAILED (NonZeroExitCode)",
        "job 12_0 is FAILED",
        "job 12_1 is COMPLETED",
    ]


def test_of_several_tasks_the_first_that_failed_gives_the_exit_code() -> None:
    assert exit_code_of({"12_2": Ending("FAILED", 9), "12_1": Ending("FAILED", 7), "12_0": Ending("COMPLETED", 0)}) == 7


def test_output_of_an_array_is_told_apart(tmp_path: Path, program: Callable[[str, str], Path]) -> None:
    for task in range(2):
        (tmp_path / f"12_{task}.log").write_text(f"task {task}\nsecond line")
    program("squeue", "printf '12_0|COMPLETED|None\\n12_1|FAILED|NonZeroExitCode\\n12_[2-3]|CANCELLED|None\\n'")
    program("sacct", "printf '12_0|COMPLETED|0:0\\n12_1|FAILED|7:0\\n'")
    pieces: list[str] = []
    found = follower(log_pattern(str(tmp_path), True), pieces, []).follow()
    assert exit_code_of(found) == 7
    assert "".join(pieces) == "[12_0] task 0\n[12_1] task 1\n[12_0] second line[12_1] second line"


def test_jobs_of_cells_are_followed_until_all_have_ended(
    tmp_path: Path, program: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {}
    for cell, number in enumerate(("12", "13")):
        (tmp_path / f"{number}.log").write_text("first\nlast")
        jobs[number] = job(log=log_pattern(str(tmp_path), False), cell=cell)
    # The controller forgets the first, which has failed, before the second has ended, and knows no single lost job.
    program(
        "squeue",
        f"""
        echo "$@" >>{tmp_path}/asked
        case $(wc -l <{tmp_path}/asked) in
            1) printf '12|RUNNING|None\\n13|PENDING|Priority\\n' ;;
            2) printf '12|FAILED|NonZeroExitCode\\n13|RUNNING|None\\n' ;;
            3) printf '13|RUNNING|None\\n' ;;
            *) printf '13|COMPLETED|None\\n' ;;
        esac
        """,
    )
    program("sacct", "exit 1")
    program(
        "scontrol",
        f"""
        n=${{@: -1}}; [ "$n" = 12 ] && [ $(wc -l <{tmp_path}/asked) -gt 2 ] && exit 1
        end="COMPLETED ExitCode=0:0"; [ "$n" = 12 ] && end="FAILED ExitCode=7:0"
        echo "JobId=$n JobName=x UserId=root(0) GroupId=root(0) JobState=$end"
        """,
    )
    pieces: list[str] = []
    lines: list[str] = []
    one = Follower(jobs, "me", pieces.append, lines.append, longest_s=0.02, look_s=0.01)
    endings = one.follow()
    assert endings == {"12": Ending("FAILED", 7), "13": Ending("COMPLETED", 0)} and exit_code_of(endings) == 7
    assert sorted("".join(pieces).replace("last", "last\n").splitlines()) == sorted(
        f"[cell {cell}] {word}" for cell in range(2) for word in ("first", "last")
    )
    assert [line for line in lines if "FAILED" in line] == ["job 12 (cell 0) is FAILED (NonZeroExitCode)"]
    assert lines[-1] == "job 13 (cell 1) is COMPLETED"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "--jobs=12,13 " in asked[0] and "--jobs=13 " in asked[-1]


INTERRUPTED = """
import sys
from xffl.cli import submit
from xffl.cluster.slurm.submit import Job
job = Job(name="x", folder=".", run_folder=".", log="/nowhere/%j.log", command=("x",), tasks_per_node=1)
sys.exit(submit._follow({"12": job}, cancels=sys.argv[1] == "cancels"))
"""


@pytest.mark.parametrize(
    ("mode", "number", "cancelled"),
    [
        ("cancels", signal.SIGINT, True),
        ("cancels", signal.SIGTERM, True),
        ("asks", signal.SIGINT, False),
        ("asks", signal.SIGTERM, False),
    ],
)
def test_an_interrupt_cancels_only_where_that_is_asked_for(
    mode: str, number: signal.Signals, cancelled: bool, tmp_path: Path, program: Callable[[str, str], Path]
) -> None:
    program("squeue", "echo '12|RUNNING|None'")
    program("scancel", f'echo "$@" >{tmp_path}/cancelled')
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, mode], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "RUNNING" in process.stderr.readline()
        process.send_signal(number)
        try:
            rest = process.communicate(timeout=50)[1]
        finally:
            process.kill()
    assert process.returncode == code_of_signal(number) and ("cancelled job 12" in rest) is cancelled, rest
    assert ("job 12 continues" in rest) is not cancelled, rest
    assert ((tmp_path / "cancelled").exists() and (tmp_path / "cancelled").read_text() == "12\n") is cancelled


@pytest.mark.parametrize(("answer", "cancelled"), [("y\n", True), ("\n", False)])
def test_at_a_terminal_it_asks(
    answer: str, cancelled: bool, tmp_path: Path, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("scancel", f'echo "$@" >{tmp_path}/cancelled')
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)

    def interrupted(self: Follower) -> dict[str, Ending]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "follow", interrupted)
    assert command._follow({"12": job()}, cancels=False) == 130
    assert asked == ["\nxffl: cancel job 12? [y/N] "] and (tmp_path / "cancelled").exists() is cancelled
