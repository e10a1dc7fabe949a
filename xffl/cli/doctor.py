"""``xffl doctor``: checks of the machines of a job before it waits in the queue."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import number, one_of
from xffl.cli.main import command_parser

if TYPE_CHECKING:
    from xffl.cluster.doctor.messages import Report

__all__ = ["build_parser", "run"]

_NEEDS = ("gpu",)

_EXAMPLES = """\
examples:
  xffl doctor                                  this host
  xffl doctor --need gpu                       the same; a missing GPU is an error
  srun -N 2 -n 8 xffl doctor --federated auto  the hosts of a job step, and every pair of cells
  mpirun -n 8 xffl doctor --shared /scratch/me the hosts of an MPI job, and the folder for runs
  xffl doctor --hosts a:4,b:4                  hosts that ssh reaches
  xffl doctor --elastic http://10.0.0.1:29510  this host, and from here an elastic run: lighthouse, cells, token

Each line is ok, warning or error, with advice. The exit code is 1 if there is an error, else 0.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = command_parser(
        "Check the machines of a job before it waits in the queue: packages, GPUs, network, "
        "file system, clocks, limits, threads, and an all-reduce of every pair of cells.",
        _EXAMPLES,
    )
    parser.add_argument("--shared", type=str, metavar="DIR", help="folder for runs, which all hosts should share")
    need = "report as errors if missing: gpu"
    parser.add_argument("--need", type=str, default="", metavar="LIST", help=need)
    hosts = "hosts for ssh and their processes: a:4,b:4, or @FILE"
    parser.add_argument("--hosts", type=str, metavar="LIST", help=hosts)
    parser.add_argument("--federated", type=str, metavar="SIZES|RULE", help="cells, as for xffl exec")
    elastic = "check an elastic run, too: address of its lighthouse, http://HOST:PORT, or file:PATH with it"
    parser.add_argument("--elastic", type=str, metavar="URL", help=elastic)
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="longest wait for another host")
    parser.add_argument("--skip-torch", action="store_true", help="check each host alone, without torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: Namespace) -> int:
    """Check, and print what was found; under a launcher every rank runs it, and rank 0 prints."""
    from xffl.cluster.doctor.examine import examine, examine_hosts
    from xffl.cluster.doctor.probe import Request
    from xffl.cluster.environment import complete_federation
    from xffl.cluster.lighthouse.address import resolve_lighthouse
    from xffl.cluster.sizes_text import parse_federation
    from xffl.cluster.slurm.allocation import parse_hosts

    needs = tuple(word.strip() for word in options.need.split(",") if word.strip())
    for need in needs:
        one_of("--need", need, _NEEDS, hint="srun and mpirun report by themselves what they lack")
    number("--timeout", options.timeout, above=0, below=1e6)
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    federated, _, variables = complete_federation(asked, 0)  # replicas are not checked
    request = Request(
        shared=options.shared,
        needs=needs,
        federated=federated,
        federated_by="XFFL_FEDERATED" if variables else "--federated",
        with_torch=not options.skip_torch,
        timeout_s=options.timeout,
        elastic=None if options.elastic is None else resolve_lighthouse(options.elastic, "--elastic"),
    )

    def tell(report: Report) -> int:
        text = json.dumps(report.as_json(), indent=2) if options.json else _text(report)
        sys.stdout.write(text + "\n")  # in one write, so that several hosts' reports do not mix
        sys.stdout.flush()
        return report.exit_code

    if options.hosts is None:
        return examine(request, tell)
    return tell(examine_hosts(parse_hosts(options.hosts), request, os.environ))


def _text(report: Report) -> str:
    from xffl.cluster.doctor.messages import ERROR, OK, WARNING

    lines = []
    for finding in report.findings:
        where = "" if not finding.host or (finding.host,) == report.hosts else f"{finding.host}: "
        first, *table = finding.text.splitlines() or [""]
        lines.append(f"{finding.status:<8} {finding.check:<14} {where}{first}")
        lines += [f"{'':<8} {'':<14}   {line}" for line in table]
        if finding.advice:
            lines.append(f"{'':<8} {'':<14} -> {finding.advice}")
    counts = ", ".join(f"{report.count(status)} {status}" for status in (OK, WARNING, ERROR))
    lines.append(f"{' and '.join(report.hosts) if len(report.hosts) < 5 else f'{len(report.hosts)} hosts'}: {counts}")
    return "\n".join(lines)
