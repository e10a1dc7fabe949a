"""``xffl bench``: time the paths between ranks, and rounds over them: the first thing to run on a new machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.main import command_parser
from xffl.cli.numbers import size_in
from xffl.cluster.environment import detect_environment
from xffl.cluster.recognition.find import launcher_of
from xffl.cluster.sizes_text import parse_sizes
from xffl.errors import ConfigError
from xffl.files import write_whole
from xffl.jobs.dispatch import carry_out
from xffl.jobs.options import JobOptions
from xffl.jobs.resolve import resolve

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl bench --processes 4 --federated 2,2 --hsdp 1
  srun --kill-on-bad-exit -N 2 --ntasks-per-node 4 xffl bench --federated 4,4 --hsdp 2 --out runs/bench
  torchrun --nproc-per-node 4 .venv/bin/xffl bench --federated 2,2

With --processes it starts them here, as xffl exec does; otherwise start it with srun, mpirun or torchrun. Rank 0
prints; --out writes bench.json and, if matplotlib is installed, bench.svg and bench.png.
"""

_PASSED_ON = ("megabytes", "repeats", "warmup", "device", "backend", "link_backend", "out", "json")
"""Options that processes started here get, too; the federation stands in their environment."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = command_parser(
        "Time a ring, all-reduces over each kind of group, and a round with each form and codec, on these ranks; all "
        "relative to one flat all-reduce over the world.",
        _EXAMPLES,
    )
    parser.add_argument("--processes", type=int, metavar="N", help="processes to start on this machine")
    parser.add_argument("--federated", type=str, metavar="SIZES", help="ranks of each cell (2,2), or of all cells (2)")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy of the model")
    parser.add_argument(
        "--megabytes", type=size_in(2**20), default=64.0, metavar="MIB", help="size of the model and of large messages"
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="number of samples for each median")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="number of passes before the samples")
    parser.add_argument("--device", type=str, metavar="KIND", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--backend", type=str, metavar="NAME", help="gloo or nccl (default: that of the device)")
    parser.add_argument(
        "--link-backend", type=str, metavar="NAME", help="gloo or nccl between cells (default: that inside them)"
    )
    parser.add_argument("--out", type=str, metavar="FOLDER", help="write bench.json, bench.svg and bench.png there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def run(options: Namespace) -> int:
    """Measure on the ranks that exist, or start some and measure on them."""
    from xffl.aggregation.bench import Effort, measure
    from xffl.distributed.session import session

    effort = Effort(options.megabytes, options.repeats, options.warmup)
    if options.processes is not None:
        return _start(options)
    if launcher_of(os.environ) is None:
        raise ConfigError(
            "no launcher has started this process; give --processes N to start N here, or use srun, mpirun or torchrun"
        )
    sizes = None if options.federated is None else parse_sizes(options.federated, "--federated")
    asked = {name: options[name] for name in ("hsdp", "device", "backend", "link_backend")}
    with session(federated=sizes, **asked) as state:
        folder = None if options.out is None else _made(options.out)
        record = measure(state, effort)
    if record is not None:
        _show(record, folder, as_json=options.json)
    return 0


def _start(options: Namespace) -> int:
    """Start the processes as ``xffl exec`` does, and measure there."""
    place = detect_environment()
    if place.world_size > 1:
        raise ConfigError(
            f"--processes is {options.processes}, but {place.launcher} has started {place.world_size} processes "
            "already; leave it out"
        )
    if options.processes < 2:
        raise ConfigError(f"--processes is {options.processes}; give 2 or more, since a single process has no partner")
    if options.out is not None:
        _made(options.out)
    given = {name.replace("_", "-"): options[name] for name in _PASSED_ON if options[name] not in (None, False)}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    job = JobOptions(processes=options.processes, federated=options.federated, hsdp=options.hsdp)
    return carry_out(resolve(job, [__file__, *words]))


def _made(out: str) -> Path:
    """Make the folder before the work is done that it is for."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}; give a folder that may be written") from error
    return folder


def _show(record: Mapping[str, Any], folder: Path | None, *, as_json: bool) -> None:
    """Print what was measured, and write it where it was asked for."""
    from xffl.planning import bench_figure, bench_table

    text = json.dumps(record, indent=2) + "\n"
    if as_json:
        sys.stdout.write(text)
    else:
        bench_table(record, sys.stdout)
    sys.stdout.flush()
    if folder is None:
        return
    write_whole(folder / "bench.json", text)
    written = ["bench.json"]
    try:
        for name in ("bench.svg", "bench.png"):
            bench_figure(record, folder / name)
            written.append(name)
    except ConfigError as error:  # the numbers stand; a picture can be drawn from them elsewhere
        print(f"xffl: no picture: {error}", file=sys.stderr)
    print(f"wrote {', '.join(written)} in {folder}", file=sys.stderr)


if __name__ == "__main__":  # one of the processes that the command starts; its launcher tells once what goes wrong
    sys.exit(run(build_parser().parse_args(sys.argv[1:])))
