"""``xffl workflow``: rounds across facilities that no network joins."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer, shown
from xffl.cli.main import command_parser
from xffl.errors import ConfigError
from xffl.files import make_folders, read_fields, write_whole
from xffl.reading import COUNT_LIMIT, Fields
from xffl.workflow.documents import Facility, Workflow, parse_facilities, write_workflow

__all__ = ["build_parser", "run"]

_ROUND = re.compile(r"\.?round_([0-9]{1,18})(?:\..*)?")
"""A round's folder, also one that a kill has left aside (:func:`xffl.checkpoint.format.locate_checkpoint`)"""
_MAX_BYTES = 2**24
_MAX_VALUES = 10_000

_EXAMPLES = """\
examples:
  xffl workflow init config.yaml --facility a=local --facility b=local --out federation
  xffl workflow init config.yaml --facility a=ssh:login.a.org,slurm,workdir=/scratch/me --facility b=ssh:me@b.org

A facility is NAME=local or NAME=ssh:[USER@]HOST[:PORT], the latter optionally with ,slurm. More settings may follow:
processes=N (ranks of its cell), home=FOLDER, setup=FILE (a script that sets up the environment there), key=FILE (of
ssh), workdir=FOLDER (where StreamFlow works there), and for batch jobs partition, nodes, gpus (per node), time, account
and qos.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = command_parser(
        "Write CWL documents that train each cell in its own facility and make the rounds here; StreamFlow runs them.",
        _EXAMPLES,
        prog="xffl workflow",
    )
    commands = parser.add_subcommands(required=True)
    init = command_parser(examples=_EXAMPLES)
    init.add_argument("configuration", metavar="CONFIG", help="configuration of one job of all cells, as for xffl exec")
    init.add_argument("--facility", action="append", default=[], metavar="SPEC", help="one for each cell")
    init.add_argument("--out", type=str, default="federation", metavar="DIR", help="folder to create")
    rounds = "number of rounds (default: training.max_steps divided by federation.every)"
    init.add_argument("--rounds", type=int, metavar="N", help=rounds)
    measure = "facility that evaluates each round's model on its validation data, or none (default: the first)"
    init.add_argument("--measure", type=str, metavar="NAME", help=measure)
    commands.add_subcommand("init", init, help="write the workflow of a configuration")
    begin = command_parser()
    begin.add_argument("results", metavar="DIR", help="folder of the rounds")
    begin.add_argument("--first", type=int, default=1, metavar="N", help="number of the first round: 0 or 1")
    begin.add_argument("--rounds", type=int, required=True, metavar="N", help="number of the last round")
    commands.add_subcommand("begin", begin, help="a step of the workflow: find the last complete round")
    record = command_parser()
    record.add_argument("results", metavar="DIR", help="folder of the rounds")
    record.add_argument("metrics", metavar="FILE", help="file written by xffl exec --measure")
    commands.add_subcommand("record", record, help="a step of the workflow: record the values of an evaluation")
    return parser


def run(options: Namespace) -> int:
    """Do what is asked for."""
    {"init": _init, "begin": _begin, "record": _record}[options.subcommand](options[options.subcommand])
    return 0


def _init(options: Namespace) -> None:
    from xffl.training.callbacks import CheckpointCallback
    from xffl.training.config.configuration import read_job

    facilities = parse_facilities(options.facility)
    if not facilities:
        raise ConfigError("no facility is given; give --facility NAME=local or NAME=ssh:HOST once for each cell")
    _, resolved = read_job(options.configuration)
    config = resolved.config
    asked: Any = getattr(config, "federation", None)
    if asked is None or not isinstance(asked.every, int):
        raise ConfigError(f"{options.configuration} has no federation.every of local steps; give it a number")
    # Refused now, not at the first round of jobs that have waited in queues.
    replace(asked, cell=f"0/{len(facilities)}")
    if not any(isinstance(item, CheckpointCallback) for item in config.callbacks) or not config.experiment.resume:
        raise ConfigError(
            "each round is a job that goes on from the one before, but the configuration keeps nothing for it; give "
            "callbacks a CheckpointCallback, and leave experiment.resume true"
        )
    measured_by = facilities[0].name if options.measure is None else options.measure
    if measured_by not in ("none", *(item.name for item in facilities)):
        raise ConfigError(f"--measure is {measured_by!r}; give none or one of the facilities")
    workflow = Workflow(
        configuration=Path(options.configuration),
        name=config.experiment.name,
        facilities=facilities,
        sizes=_sizes(facilities, resolved),
        rounds=_rounds(options.rounds, config, asked.every),
        has_server=asked.plan.read()[1] is not None,
        measured_by=None if measured_by == "none" else measured_by,
        own_options=asked.plan.own_words(),
        python=Path(sys.executable).parent,
    )
    write_workflow(workflow, Path(options.out))
    print(f"wrote {options.out}; read {options.out}/README.md before the first run", file=sys.stderr)


def _rounds(given: int | None, config: Any, every: int) -> int:
    if given is not None:
        return integer("--rounds", given, 1, COUNT_LIMIT)
    if (steps := config.training.max_steps) is None:
        why = "the configuration has no training.max_steps, so it does not say how many rounds"
        raise ConfigError(f"{why}; give --rounds")
    return -(-int(steps) // every)


def _sizes(facilities: tuple[Facility, ...], resolved: Any) -> tuple[int, ...] | None:
    """Return the ranks of each cell, where facilities or the configuration say them."""
    if facilities[0].processes is not None:
        return tuple(facility.processes or 0 for facility in facilities)
    for federated in (resolved.launch.federated, getattr(resolved.config.distributed, "federated", None)):
        if isinstance(federated, int):
            return (federated,) * len(facilities)
        if isinstance(federated, tuple):
            if len(federated) != len(facilities):
                raise ConfigError(
                    f"the configuration has {len(federated)} cells, and there are {len(facilities)} facilities; give "
                    "one for each, or processes=N to all"
                )
            return federated
    return None


def _begin(options: Namespace) -> None:
    """Write the step's results for CWL into this folder, and print the folder that it is to give as ``start``."""
    from xffl.aggregation.exports import is_written
    from xffl.checkpoint.format import locate_checkpoint

    first = integer("--first", options.first, 0, 1)
    results, last = Path(options.results), None
    _make(results)
    rounds = integer("--rounds", options.rounds, 1, COUNT_LIMIT)
    made = {int(match[1]) for path in results.iterdir() if (match := _ROUND.fullmatch(path.name)) is not None}
    for number in sorted((one for one in made if first <= one <= rounds), reverse=True):
        if is_written(results / f"round_{number}", "global", {"round": number}):
            last = number
            break
    state: dict[str, Any] = {"round": first if last is None else last + 1, "start": None}
    if last is not None:
        print(locate_checkpoint(results / f"round_{last}"))
        state["start"] = {"class": "Directory", "location": "start"}
    state["more"] = state["round"] <= options.rounds
    write_whole(Path("cwl.output.json"), json.dumps(state) + "\n")
    where = f"round {state['round']} is the next of {options.rounds}" if state["more"] else "all rounds are made"
    print(where, file=sys.stderr)


def _record(options: Namespace) -> None:
    hint = "give what xffl exec --measure has written"
    record = read_fields(Path(options.metrics), hint=hint, limit=_MAX_BYTES)
    number = record.integer("round")
    values = record.mapping_of("metrics", _MAX_VALUES, _read_value)
    folder = Path(options.results) / "metrics"
    _make(folder)
    written = {name: record.any(name) for name in record}
    write_whole(folder / f"round_{number}.json", json.dumps(written, indent=1) + "\n")
    print(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))


def _make(folder: Path) -> None:
    try:
        make_folders(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown(str(folder))} cannot be made: {reason}; give another folder") from error


def _read_value(fields: Fields, name: str) -> float:
    """Return a measured value, which JSON holds as a text where it is not finite."""
    if fields.any(name) in ("NaN", "Infinity", "-Infinity"):
        return float(fields.any(name))
    return fields.real(name)
