"""``xffl workflow init``: what it writes, and what it refuses; tests/cluster/test_facilities.py runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from xffl.aggregation.exports import RoundPlan
from xffl.cli.main import main
from xffl.errors import ConfigError
from xffl.workflow.documents import parse_facilities

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "03_language_model"
WRITTEN = ROOT / "workflows" / "cwl"
SLURM = (
    "ssh:login.{0}.example,slurm,partition=gpu,nodes=1,gpus=4,time=2:00:00,processes=4,workdir=/scratch/me/streamflow"
)
PLACES = {
    "slurm": (SLURM, SLURM.replace("ssh:", "ssh:me@").replace("example,", "example:2222,")),
    "ssh": ("ssh:gpu1.{0}.example,processes=4", "ssh:me@gpu1.{0}.example:2222,processes=4"),
    "local": ("local,processes=4", "local,processes=4"),
}


@pytest.fixture(autouse=True)
def no_trainer_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``train`` be the module beside the configuration, and leave none behind."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    yield
    sys.modules.pop("train", None)


def write(folder: Path, way: str) -> Path:
    words = [
        word
        for name, place in zip("ab", PLACES[way], strict=True)
        for word in ("--facility", f"{name}={place.format(name)}")
    ]
    assert main(["workflow", "init", str(EXAMPLE / "config.yaml"), *words, "--out", str(folder / way)]) == 0
    inputs = (folder / way / "inputs.yml").read_text().replace(f"{(folder / way).resolve()}/", "/path/to/")
    (folder / way / "inputs.yml").write_text(inputs)
    for site in (folder / way / "sites").iterdir():
        site.write_text(re.sub(r"export PATH=\S+:\$PATH", "export PATH=/path/to/.venv/bin:$PATH", site.read_text()))
    return folder / way


def test_the_workflows_to_copy_are_those_that_are_written(tmp_path: Path) -> None:
    made = {way: write(tmp_path, way) for way in PLACES}
    files = {str(file.relative_to(made["slurm"])) for file in made["slurm"].rglob("*") if file.is_file()}
    files -= {"streamflow.yml", "project/config.yaml", "project/train.py"}
    for name in sorted(files - {"README.md"}):
        text = (made["slurm"] / name).read_text().replace("path: project", "path: ../../examples/03_language_model")
        assert (WRITTEN / name).read_text() == text, name
    for way, folder in made.items():
        assert (WRITTEN / f"streamflow-{way}.yml").read_text() == (folder / "streamflow.yml").read_text(), way
    there = {str(file.relative_to(WRITTEN)) for file in WRITTEN.rglob("*") if file.is_file()}
    assert there == files | {f"streamflow-{way}.yml" for way in PLACES}


def test_what_is_written_follows_the_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path, "slurm")
    inputs = yaml.safe_load((folder / "inputs.yml").read_text())
    # DiLoCo needs the common start as round 0; 600 steps, 50 a round.
    assert (inputs["rounds"], inputs["first"], inputs["home_b"]) == (12, 0, "xffl/language_model/cell_1")
    steps = yaml.safe_load((folder / "round.cwl").read_text())["steps"]
    assert [steps[f"train_{name}"]["in"]["cell"]["default"] for name in "ab"] == ["0/4,4", "1/4,4"]
    flow = yaml.safe_load((folder / "streamflow.yml").read_text())["deployments"]
    assert flow["b"]["wraps"] == "b-login" and flow["b-login"]["config"]["username"] == "me"
    assert flow["b-login"]["config"]["nodes"] == [{"hostname": "login.b.example:2222"}]
    job = flow["a"]["config"]["services"]["job"]
    assert job == {"partition": "gpu", "nodes": "1", "gpusPerNode": "4", "time": "2:00:00", "ntasks": 4}
    assert {file.name for file in (folder / "project").iterdir()} == {"config.yaml", "train.py"}


def test_a_project_goes_along_without_its_runs(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("parts/__init__.py", "parts/deep/layer.py", "runs/x/model.py", "notes.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / "train.py").write_text((EXAMPLE / "train.py").read_text())
    text = (EXAMPLE / "config.yaml").read_text().replace("algorithm: diloco, ", "")
    (project / "own.yaml").write_text(text)
    setup = tmp_path / "site.sh"
    setup.write_text("module load python\n")
    words = ["--facility", f"a=local,setup={setup}", "--facility", "b=local", "--rounds", "7", "--measure", "none"]
    ran = subprocess.run(
        [sys.executable, "-m", "xffl", "workflow", "init", str(project / "own.yaml"), *words, "--out", "w"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and "read w/README.md" in ran.stderr, ran.stderr
    made = tmp_path / "w"
    copied = {str(file.relative_to(made / "project")) for file in (made / "project").rglob("*") if file.is_file()}
    assert copied == {"own.yaml", "train.py", "parts/__init__.py", "parts/deep/layer.py"}
    assert (made / "sites" / "a.sh").read_text() == "module load python\n"
    inputs = yaml.safe_load((made / "inputs.yml").read_text())
    assert (inputs["rounds"], inputs["first"], inputs["configuration"]) == (7, 1, "own.yaml")
    assert "measure" not in (made / "round.cwl").read_text().replace("measured", "")


@pytest.mark.parametrize(("spec", "told"), [
    ("a", "has no name of letters and digits that is free"), ("measure=local", "that is free"),
    ("a=slurm", "is reached by 'slurm'; write NAME=local"), ("a=ssh", "is reached by 'ssh'"),
    ("a=local:x", "is reached by 'local:x'"), ("a=ssh:me@", "is on host 'me@'; write HOST"),
    ("a=local,partition=x", "is for batch jobs; add slurm"), ("a=local,color=red", "has 'color=red'; give slurm, or"),
    ("a=ssh:x,slurm", "runs batch jobs, whose nodes have to see StreamFlow's files; give workdir=FOLDER"),
    ("a=local,home=x,home=y", "has 'home=y'"), ("a=local,processes=0", "give how many ranks its cell has"),
])  # fmt: skip
def test_facilities_that_cannot_be_meant(spec: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_facilities([spec])


def test_facilities_go_together() -> None:
    for specs, told in (
        (["a=local", "a=local"], "two facilities have the name 'a'"),
        (["a=local,processes=2", "b=local"], "facility 'b' does not say its processes, and others do"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_facilities(specs)
    (found,) = parse_facilities(["a=ssh:[::1]:22,slurm,qos=long,workdir=/w"])
    assert (found.host, found.user, found.slurm) == ("[::1]:22", None, {"qos": "long"})


def test_what_cannot_go_over_files_is_refused_before_any_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text((EXAMPLE / "train.py").read_text())
    text = (EXAMPLE / "config.yaml").read_text()
    places = ["--facility", "a=local", "--facility", "b=local"]
    for old, new, words, told in (
        (
            "every: 50",
            "every: 50, delay: 5, aggregator: {overlap: true}",
            places,
            "federation.delay 5 is for rounds over",
        ),
        (
            "every: 50",
            "every: 50, aggregator: {codec: int8}",
            places,
            "codec 'int8' is not supported in rounds over files",
        ),
        ("diloco", "krum", places, "combine Krum needs more than the exports hold"),
        ("every: 50", "every: 'epochs:epochs=1,steps_per_epoch=5'", places, "has no federation.every of local steps"),
        ("max_steps: 600, ", "", places, "so it does not say how many rounds; give --rounds"),
        ("", "", ["--facility", "a=local"], "has 2 cells, and there are 1 facilities"),
        ("", "", [], "no facility is given; give --facility"),
        ("", "", [*places, "--measure", "c"], "--measure is 'c'; give none or one of the facilities"),
    ):
        (tmp_path / "config.yaml").write_text(text.replace(old, new) if old else text)
        assert main(["workflow", "init", str(tmp_path / "config.yaml"), *words, "--out", str(tmp_path / "w")]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error
        assert not (tmp_path / "w").exists()
    (tmp_path / "config.yaml").write_text(
        text.replace("CheckpointCallback", "ProgressCallback").split("    init_args")[0]
    )
    assert main(["workflow", "init", str(tmp_path / "config.yaml"), *places, "--out", str(tmp_path / "w")]) == 2
    assert "give callbacks a CheckpointCallback" in capsys.readouterr().err
    wrong = ["--facility", f"a=local,setup={tmp_path / 'none'}", "--facility", "b=local"]
    assert main(["workflow", "init", str(EXAMPLE / "config.yaml"), *wrong, "--out", str(tmp_path / "w")]) == 2
    assert "none cannot be used: No such file" in capsys.readouterr().err and not (tmp_path / "w").exists()
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "file").touch()
    assert main(["workflow", "init", str(EXAMPLE / "config.yaml"), *places, "--out", str(tmp_path / "w")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_what_was_measured_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"round": 3, "start": "abc", "metrics": {"val/loss": 1.5}}
    (tmp_path / "metrics.json").write_text(json.dumps(told))
    assert main(["workflow", "record", str(tmp_path / "results"), str(tmp_path / "metrics.json")]) == 0
    assert json.loads((tmp_path / "results" / "metrics" / "round_3.json").read_text()) == told
    assert capsys.readouterr().out == "round 3: val/loss 1.5\n"


@pytest.mark.parametrize("site", ["project=mine home=/wrong start=x", "set -- $#; [ $1 = 0 ] && false", "false"])
def test_a_site_changes_nothing_of_a_step(site: str, tmp_path: Path) -> None:
    """Names, words and the end of a site's script are its own."""
    (tmp_path / "site.sh").write_text(f"{site}\nxffl() {{ printf '<%s>' \"$@\"; }}\n{site.split(';')[-1]}\n")
    (tmp_path / "a home" / "export").mkdir(parents=True)
    words = ["--site", str(tmp_path / "site.sh"), "--home", str(tmp_path / "a home"), "--cell", "0/2", "--round", "1"]
    words += ["--project", "/the project", "--configuration", "c.yaml", "--", "--data.path", "/x y"]
    command = ["bash", str(WRITTEN / "steps.sh"), "train", *words]
    environ = {**os.environ, "start": "other", "metrics": "other"}
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.replace(str(tmp_path), "")
    assert told == (
        "<exec><--cell><0/2><--export></a home/export></the project/c.yaml><--federation.round><1>"
        "<--experiment.output_dir></a home/run><--data.path></x y>"
    )
    assert (tmp_path / "export").is_dir()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("ssh:-oProxyCommand=id", "is on host '-oProxyCommand=id'"),
        ("ssh:$(id)@h", r"is on host '\$\(id\)@h'"),
        ("ssh:h`id`", "is on host 'h`id`'"),
        ("ssh:h;id", "is on host 'h;id'"),
        ("ssh:h,slurm,workdir=/a b", "'workdir=/a b', which becomes part of a command there"),
        ("ssh:h,workdir=/$(id)", r"'workdir=/\$\(id\)', which becomes part of a command there"),
        ("ssh:h,slurm,workdir=/w,partition=gpu;id", "'partition=gpu;id', which becomes part of a command there"),
        ("ssh:h,slurm,workdir=/w,account=-x", "'account=-x', which becomes part of a command there"),
        ("ssh:h,key=/a\nb", r"'key=/a\\nb'; give printable characters in one line"),
        ("local,home=/a\x1b[2J", r"'home=/a\\x1b\[2J'; give printable characters in one line"),
    ],
)
def test_no_option_of_a_facility_becomes_a_command(place: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_facilities([f"a={place}"])


@pytest.mark.parametrize("name", ["round", "rounds", "first"])
def test_a_number_of_a_step_is_not_computed(name: str, tmp_path: Path) -> None:
    """What stands in brackets in a number would be run by bash's arithmetic."""
    (tmp_path / "site.sh").write_text("xffl() { :; }\n")
    given = {"round": "1", "rounds": "2", "first": "1"} | {name: "a[$(touch ran)]"}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    command = ["bash", str(WRITTEN / "steps.sh"), "aggregate", "--site", str(tmp_path / "site.sh"), "--results", "r"]
    ran = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2 and f"--{name} is 'a[$(touch ran)]'; give a number" in ran.stderr
    assert not (tmp_path / "ran").exists()


def test_algorithms_of_ones_own_are_given_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundPlan, "own_words", lambda plan: ("--combine", "mylab.Mine:k=3 4"))
    here = (write(tmp_path, "ssh") / "sites" / "here.sh").read_text()
    assert here.endswith("\naggregate_options=(--combine 'mylab.Mine:k=3 4')\n")
