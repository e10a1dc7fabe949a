"""``xffl doctor``: look at the machines of a job before it waits in the queue."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.cluster.doctor.findings import Report
    from xffl.cluster.doctor.side import Request

__all__ = ["build_parser", "run", "tell_home"]

_NEEDS = ("mpi", "slurm", "gpu")
_PAIR = Path(__file__).with_name("doctor_pair.py")
_RANK = Path(__file__).with_name("doctor_rank.py")

_EXAMPLES = """\
examples:
  xffl doctor                                  this host
  xffl doctor --need mpi,gpu                   ... where a missing MPI or GPU is an error
  srun -N 2 -n 8 xffl doctor --federated auto  the hosts of a job step, and every pair of cells
  mpirun -n 8 xffl doctor --shared /scratch/me the hosts of an MPI job, and the folder for runs
  xffl doctor --hosts a:4,b:4                  hosts that ssh reaches

Each line is ok, warning or error with what to do. The exit code is 1 where there is an error, else 0.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Look at the machines of a job before it waits in the queue: packages, MPI, SLURM, GPUs, network, "
        "file system, clocks, limits, threads, and an all-reduce of every pair of cells.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--shared", type=str, metavar="DIR", help="folder for runs, which all hosts are to share")
    parser.add_argument("--need", type=str, default="", metavar="LIST", help="errors where missing: mpi,slurm,gpu")
    parser.add_argument(
        "--hosts", type=str, metavar="LIST", help="hosts for ssh and their processes: a:4,b:4, or @FILE"
    )
    parser.add_argument("--federated", type=str, metavar="SIZES|RULE", help="cells, as for xffl exec")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="one wait for another host")
    parser.add_argument("--skip-torch", action="store_true", help="leave out what loads torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: Namespace) -> int:
    """Look, and print what was found; under a launcher every rank runs it, and rank 0 prints.

    :param options: What :func:`build_parser` parses.
    :return: Exit code: 1 where there is an error.
    :raises ConfigError: if an option cannot be meant.
    """
    from xffl.cluster.doctor.by_ssh import examine_hosts
    from xffl.cluster.doctor.examine import examine
    from xffl.cluster.slurm.allocation import parse_hosts

    request = _request(options)
    tell = _print_json if options.json else _print
    if options.hosts is None:
        return examine(request, tell)
    told = {"--shared": options.shared, "--need": options.need or None, "--timeout": str(options.timeout)}
    told["--federated"] = options.federated or os.environ.get("XFFL_FEDERATED") or None
    words = [word for name, text in told.items() if text is not None for word in (name, text)]
    words += ["--skip-torch"] if options.skip_torch else []
    report = examine_hosts(parse_hosts(options.hosts), [str(_RANK), *words], os.environ, options.timeout)
    tell(report)
    return report.exit_code


def tell_home(options: Namespace) -> None:
    """Look as one rank of a job that the doctor has started, and print the report as one line.

    :param options: What :func:`build_parser` parses.
    """
    from xffl.cluster.doctor.by_ssh import MARK
    from xffl.cluster.doctor.examine import examine

    def tell(report: Report) -> None:
        sys.stdout.write(MARK + json.dumps(report.as_json()) + "\n")
        sys.stdout.flush()

    examine(_request(options), tell)


def _request(options: Namespace) -> Request:
    from xffl.cluster.cells import parse_federation
    from xffl.cluster.doctor.side import Request
    from xffl.cluster.environment import complete_federation

    needs = frozenset(word.strip() for word in options.need.split(",") if word.strip())
    if unknown := sorted(needs - set(_NEEDS)):
        raise ConfigError(f"--need {', '.join(unknown)} is not known; give some of {','.join(_NEEDS)}")
    if not 0 < options.timeout < 1e6:
        raise ConfigError(f"--timeout is {options.timeout}; give seconds above 0")
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    federated, _, variables = complete_federation(asked, 0)  # replicas are not looked at
    return Request(
        pair_program=_PAIR,
        shared=None if options.shared is None else Path(options.shared),
        needs=needs,
        federated=federated,
        federated_by="XFFL_FEDERATED" if variables else "--federated",
        with_torch=not options.skip_torch,
        timeout_s=options.timeout,
    )


def _print_json(report: Report) -> None:
    sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    sys.stdout.flush()


def _print(report: Report) -> None:
    """Print in one write, so that several hosts' reports do not mix."""
    from xffl.cluster.doctor.findings import ERROR, OK, WARNING

    several = len(report.hosts) > 1
    lines = []
    for finding in report.findings:
        where = f"{finding.host}: " if several and finding.host else ""
        lines.append(f"{finding.status:<8} {finding.check:<14} {where}{finding.text}")
        if finding.status != OK and finding.advice:
            lines.append(f"{'':<8} {'':<14} -> {finding.advice}")
    counts = ", ".join(f"{report.count(status)} {status}" for status in (OK, WARNING, ERROR))
    lines.append(f"{' and '.join(report.hosts) if len(report.hosts) < 5 else f'{len(report.hosts)} hosts'}: {counts}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
