"""The folder of a workflow: facilities, CWL documents, their inputs, StreamFlow's file, and scripts of the steps.

Steps have the words of ``xffl exec``, and no request that was read here: they run on other machines, with another xffl
and other hosts, and the round's values are put behind them there.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from xffl.checks import decimal, shown
from xffl.errors import ConfigError
from xffl.files import read_given
from xffl.topology import MAX_RANKS

__all__ = ["Facility", "Workflow", "parse_facilities", "write_workflow"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PLACE = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9_][\w.-]*)(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII,
)
_VALUE = re.compile(r"[\w@%+=:./~-]*", re.ASCII)
"""Values that StreamFlow puts into command lines as they are, where a shell would take any other character for its own.
"""
_TAKEN = ("aggregate", "begin", "measure", "record")
_SLURM = {name: name for name in ("partition", "nodes", "gpus", "time", "account", "qos")} | {"gpus": "gpusPerNode"}
"""What a job may ask SLURM for, and what StreamFlow calls it."""
_OWN = ("processes", "home", "setup", "key", "workdir")
_FORM = "write NAME=local, NAME=ssh:HOST or NAME=ssh:HOST,slurm, and behind it options such as partition=gpu"


@dataclass(frozen=True)
class Facility:
    """One facility."""

    name: str
    host: str | None = None  # where ssh leads, with a port behind a colon if it is an own one; None for this machine
    user: str | None = None
    is_slurm: bool = False  # whether its steps are batch jobs, rather than processes on that machine
    processes: int | None = None  # ranks of its cell
    home: str | None = None  # folder of its cell there; below the home directory unless it is absolute
    setup: Path | None = None  # a shell script, here, that makes the environment there
    key: str | None = None  # the file of the ssh key
    workdir: str | None = None  # where StreamFlow works there, on a file system that its nodes share
    slurm: dict[str, str] = field(default_factory=dict)  # what a job asks for, by StreamFlow's names


def parse_facilities(texts: Sequence[str]) -> tuple[Facility, ...]:
    """Read facilities such as ``a=ssh:me@login.a.org,slurm,partition=gpu,processes=8``, one for each cell."""
    parsed = tuple(map(_parse, texts))
    for name, count in Counter(facility.name for facility in parsed).items():
        if count > 1:
            raise ConfigError(f"two facilities have the name {name!r}; give each its own")
    if len({facility.processes is None for facility in parsed}) > 1:
        missing = next(facility.name for facility in parsed if facility.processes is None)
        raise ConfigError(f"facility {missing!r} does not say its processes, and others do; give processes=N to all")
    return parsed


def _parse(text: str) -> Facility:
    name, equal, rest = text.partition("=")
    if not equal or not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(f"facility {text!r} has no name of letters and digits that is free; {_FORM}")
    way, *options = rest.split(",")
    kind, _, place = way.partition(":")
    if kind not in ("local", "ssh") or (kind == "local") != (not place):
        raise ConfigError(f"facility {text!r} is reached by {way!r}; {_FORM}")
    where = _PLACE.fullmatch(place) if place else None
    if place and where is None:
        raise ConfigError(f"facility {text!r} is on host {place!r}; write HOST, USER@HOST or HOST:PORT")
    is_slurm = "slurm" in options
    given: dict[str, str] = {}
    for option in (option for option in options if option != "slurm"):
        key, equal, value = option.partition("=")
        if not equal or not value or key not in (*_OWN, *_SLURM) or key in given:
            raise ConfigError(
                f"facility {text!r} has {option!r}; give slurm, or once each {', '.join((*_OWN, *_SLURM))}"
            )
        if (key in _SLURM or key == "workdir") and not (_VALUE.fullmatch(value) and value[0] != "-"):
            raise ConfigError(
                f"facility {text!r} has {option!r}, which becomes part of a command there; give letters, digits and "
                "@ % + = : . / ~ _ -"
            )
        if not value.isprintable():
            raise ConfigError(f"facility {text!r} has {option!r}; give printable characters in one line")
        if key in _SLURM and not is_slurm:
            raise ConfigError(f"facility {text!r} has {option!r}, which is for batch jobs; add slurm")
        given[key] = value
    processes = given.get("processes")
    if processes is not None and not 1 <= (decimal(processes) or 0) <= MAX_RANKS:
        raise ConfigError(f"facility {shown(text)} has processes={processes[:40]}; give how many ranks its cell has")
    if is_slurm and "workdir" not in given:
        hint = "give workdir=FOLDER on a file system that they share"
        raise ConfigError(f"facility {text!r} runs batch jobs, whose nodes have to see StreamFlow's files; {hint}")
    return Facility(
        name=name,
        host=None if where is None else where["host"] + (f":{where['port']}" if where["port"] else ""),
        user=None if where is None else where["user"],
        is_slurm=is_slurm,
        processes=None if processes is None else int(processes),
        home=given.get("home"),
        setup=Path(given["setup"]) if "setup" in given else None,
        key=given.get("key"),
        workdir=given.get("workdir"),
        slurm={_SLURM[key]: value for key, value in given.items() if key in _SLURM},
    )


_FIXED = ("begin.cwl", "train.cwl", "measure.cwl", "aggregate.cwl", "record.cwl", "steps.sh", "requirements.txt")


@dataclass(frozen=True)
class Workflow:
    """What is to be run, and where."""

    configuration: Path  # the file that each facility trains by; the Python files beside it go along
    name: str  # of the experiment, for the folders at the facilities
    facilities: tuple[Facility, ...]  # one for each cell
    sizes: tuple[int, ...] | None  # ranks of each cell; None where all have as many as the configuration says
    rounds: int
    has_server: bool  # whether there is a server optimizer, which needs the common start as round 0
    measured_by: str | None  # the facility that measures each global model; None for none
    own_options: tuple[str, ...]  # of ``xffl aggregate``, for what exports may not name: the user's own algorithms
    python: Path  # the folder of the programs of this environment, where the rounds are made

    def cell(self, number: int) -> str:
        """Return what ``--cell`` is to say: ``0/2``, or ``0/4,2`` where the ranks of all cells are known."""
        of = str(len(self.facilities)) if self.sizes is None else ",".join(map(str, self.sizes))
        return f"{number}/{of}"


def write_workflow(workflow: Workflow, folder: Path) -> None:
    """Write the folder, which must be new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; give the name of a new folder")
    setups = {site.name: _read_setup(site.setup) for site in workflow.facilities if site.setup is not None}
    try:
        (folder / "sites").mkdir(parents=True)
        templates = files("xffl.workflow") / "templates"
        for name in _FIXED:
            (folder / name).write_text((templates / name).read_text(encoding="utf-8"), encoding="utf-8")
        _copy_project(workflow.configuration, folder / "project")
        path = f"export PATH={shlex.quote(str(workflow.python))}:$PATH\n"
        for site in workflow.facilities:
            text = (
                f"# What facility {site.name} needs before xffl: its steps read this first. CHANGE what does not fit.\n"
            )
            text += path if site.host is None else '# module load ...\n. "$HOME/xffl/.venv/bin/activate"\n'
            text = setups.get(site.name, text)
            (folder / "sites" / f"{site.name}.sh").write_text(text, encoding="utf-8")
        here = f"# What this machine needs before xffl, to make the rounds.\n{path}"
        if workflow.own_options:
            here += "# Algorithms of your own, which no export may name; see that they can be imported here.\n"
            here += f"aggregate_options=({shlex.join(workflow.own_options)})\n"
        (folder / "sites" / "here.sh").write_text(here, encoding="utf-8")
        readme = (templates / "README.md").read_text(encoding="utf-8")
        (folder / "README.md").write_text(readme.replace("@NAME@", workflow.name), encoding="utf-8")
        for name, complete in _COMPLETED.items():
            text = (templates / name).read_text(encoding="utf-8")
            head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
            values: dict[str, Any] = yaml.safe_load(text)
            complete(values, workflow, folder.resolve())
            text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None)
            (folder / name).write_text(head + text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"{error.filename or folder} cannot be used: {error.strerror}; give another") from error


def _read_setup(path: Path) -> str:
    try:
        return read_given(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be used: {why}; give another") from error


def _copy_project(configuration: Path, target: Path) -> None:
    """Copy the configuration and the Python modules beside it: what a trainer is made of, but not its runs and data."""
    target.mkdir()
    shutil.copy(configuration, target / configuration.name)
    home = configuration.resolve().parent
    packages = {path.parent for path in home.glob("*/__init__.py")}
    for module in sorted({*home.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))}):
        place = target / module.relative_to(home)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, place)


class _Dumper(yaml.SafeDumper):
    """Writes lists and mappings that hold plain values alone in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# What is different for each facility, beside the templates ------------------------------------------------------------


def _of_site(name: str) -> dict[str, Any]:
    return {kind: f"{kind}_{name}" for kind in ("site", "home", "words")}


def _per_site(workflow: Workflow) -> dict[str, str]:
    kinds = {"site": "File", "home": "string", "words": "string[]"}
    return {f"{kind}_{facility.name}": type_ for facility in workflow.facilities for kind, type_ in kinds.items()}


def _measuring(workflow: Workflow, start: str | dict[str, Any]) -> dict[str, Any]:
    """Return the step that measures a model, if any."""
    name = workflow.measured_by
    if name is None:
        return {}
    given = {**_of_site(name), "project": "project", "configuration": "configuration", "start": start}
    given["cell"] = {"default": workflow.cell([facility.name for facility in workflow.facilities].index(name))}
    return {"measure": {"run": "measure.cwl", "in": given, "out": ["metrics"]}}


def _complete_round(values: dict[str, Any], workflow: Workflow, folder: Path) -> None:
    values["inputs"] |= _per_site(workflow)
    steps: dict[str, Any] = {}
    for number, facility in enumerate(workflow.facilities):
        given = _of_site(facility.name) | {name: name for name in ("project", "configuration", "round", "start")}
        given["cell"] = {"default": workflow.cell(number)}
        steps[f"train_{facility.name}"] = {"run": "train.cwl", "in": given, "out": ["export"]}
    made, measuring = values["steps"]["aggregate"]["in"], _measuring(workflow, "start")
    made["exports"] = {"source": [f"{step}/export" for step in steps], "linkMerge": "merge_flattened"}
    made |= {"metrics": "measure/metrics"} if measuring else {}
    values["steps"] = steps | measuring | values["steps"]


def _complete_main(values: dict[str, Any], workflow: Workflow, folder: Path) -> None:
    values["inputs"] |= _per_site(workflow)
    federation, model = values["steps"]["federation"], values["outputs"]["model"]
    federation["in"] = {name: name for name in values["inputs"] if name != "first"} | federation["in"]
    if measuring := _measuring(workflow, {"source": model["outputSource"], "pickValue": model["pickValue"]}):
        record = {"site": "site", "results": "results", "metrics": "measure/metrics"}
        values["steps"] |= measuring | {"record": {"run": "record.cwl", "in": record, "out": ["metrics"]}}
        values["outputs"]["metrics"] = {"type": "File", "outputSource": "record/metrics"}


def _complete_inputs(values: dict[str, Any], workflow: Workflow, folder: Path) -> None:
    values |= {"rounds": workflow.rounds, "first": 0 if workflow.has_server else 1}
    values |= {"results": str(folder / "results"), "configuration": workflow.configuration.name}
    for number, facility in enumerate(workflow.facilities):
        values[f"site_{facility.name}"] = {"class": "File", "path": f"sites/{facility.name}.sh"}
        values[f"home_{facility.name}"] = facility.home or f"xffl/{workflow.name}/cell_{number}"
        values[f"words_{facility.name}"] = []


def _complete_streamflow(values: dict[str, Any], workflow: Workflow, folder: Path) -> None:
    for number, facility in enumerate(workflow.facilities):
        steps = [f"/federation/train_{facility.name}"]
        if facility.name == workflow.measured_by:
            steps += ["/federation/measure", "/measure"]
        target = {"deployment": facility.name} | ({"service": "job"} if facility.is_slurm else {})
        values["workflows"]["federation"]["bindings"] += [{"step": step, "target": target} for step in steps]
        values["deployments"] |= _deployment(facility, None if workflow.sizes is None else workflow.sizes[number])


def _deployment(facility: Facility, ranks: int | None) -> dict[str, Any]:
    workdir = {} if facility.workdir is None else {"workdir": facility.workdir}
    if facility.host is None and not facility.is_slurm:
        return {facility.name: {"type": "local", "config": {}} | workdir}
    values: dict[str, Any] = {}
    login = f"{facility.name}-login"  # no facility has such a name
    if facility.host is not None:
        given = {"username": facility.user, "sshKey": facility.key}
        ssh = {"nodes": [{"hostname": facility.host}]} | {key: text for key, text in given.items() if text is not None}
        values[login if facility.is_slurm else facility.name] = {"type": "ssh", "config": ssh} | (
            {} if facility.is_slurm else workdir
        )
    if facility.is_slurm:
        asked: dict[str, Any] = {**facility.slurm} | ({} if ranks is None else {"ntasks": ranks})
        config = {"maxConcurrentJobs": 2, "services": {"job": asked}}
        values[facility.name] = (
            {"type": "slurm", "config": config} | workdir | ({} if facility.host is None else {"wraps": login})
        )
    return values


_COMPLETED = {
    "round.cwl": _complete_round,
    "main.cwl": _complete_main,
    "inputs.yml": _complete_inputs,
    "streamflow.yml": _complete_streamflow,
}
"""Templates to which something is added for each facility."""
