"""``xffl env``: show who started this process, and how that was found out."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.cluster.environment import ProcessEnvironment, detect_environment, requested_federation, use_interface
from xffl.cluster.launch.launchers import LAUNCHERS

__all__ = ["build_parser", "run"]


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Show who started this process, and how that was found out. Start it like a script: "
        "mpirun -n 4 xffl env, srun -n 4 xffl env, or plainly xffl env.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: Namespace) -> int:
    """Print what was detected. Under an MPI launcher it is collective, like the detection itself.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises XfflError: if the environment contradicts itself.
    """
    interface = use_interface(None)
    found = detect_environment()
    federated, hsdp = requested_federation()
    missing = {row.name: row.missing(os.environ) for row in LAUNCHERS}
    if options.json:
        told = {**asdict(found), "federated": federated, "hsdp": hsdp, "interface": interface, "missing": missing}
        print(json.dumps(told, indent=2))
        return 0
    print(_describe(found))
    print(f"federation  XFFL_FEDERATED {_shown(federated)}, XFFL_HSDP {_shown(hsdp)}")
    print(f"interface   XFFL_IFNAME {_shown(interface)}")
    print("launchers   in the order in which they were looked for:")
    for row in LAUNCHERS:
        if row.name == found.launcher:
            verdict = "yes"
        elif missing[row.name]:
            verdict = f"no, without {', '.join(missing[row.name])}"
        else:
            verdict = "no, " + ("it comes later" if row.matches(os.environ) else "its variables are another step's")
        print(f"  {row.name:<9} {verdict}")
    return 0


def _describe(found: ProcessEnvironment) -> str:
    rendezvous = "none is needed" if found.master_addr is None else f"{found.master_addr}:{found.master_port}"
    return "\n".join(
        (
            f"launcher    {found.launcher}",
            f"why         {found.reason}",
            f"rank        {found.rank} of {found.world_size}",
            f"on its node {found.node_local_rank} of {found.node_local_size}",
            f"node        {found.node_rank} of {found.node_world_size}",
            f"rendezvous  {rendezvous}",
        )
    )


def _shown(value: object) -> str:
    return "is not set" if value is None else f"is {value}"
