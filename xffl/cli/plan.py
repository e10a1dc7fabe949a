"""``xffl plan``: draw a federation and count the traffic of a round, for any world, without torch."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.cli.formatter import HelpFormatter
from xffl.cluster.environment import parse_sizes, requested_federation
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl plan --federated 4,4 --hsdp 2
  xffl plan --federated 512 --world 4096 --hsdp 8 --params 8e9 --bytes-per-param 2 --link-gbps 100
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Draw a federation and count the traffic of a round, for any world, without starting anything.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--federated", type=str, metavar="SIZES", help="ranks of each cell (4,4), or of all cells (4)")
    parser.add_argument("--world", type=int, metavar="N", help="all ranks; by default the sum of the sizes")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy of the model")
    parser.add_argument("--params", type=float, metavar="COUNT", help="parameters of the model (8e9): adds the traffic")
    parser.add_argument("--bytes-per-param", type=float, default=4.0, metavar="BYTES", help="as sent (default: 4)")
    parser.add_argument("--link-gbps", type=float, metavar="GBPS", help="rate of the slow link: adds the time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: Namespace) -> int:
    """Print the plan.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises XfflError: if sizes do not fit each other, or a number cannot be meant.
    """
    from xffl.report import round_traffic, topology_text

    for knob, value in (
        ("--params", options.params),
        ("--bytes-per-param", options.bytes_per_param),
        ("--link-gbps", options.link_gbps),
    ):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{knob} is {value}; give a number above 0")
    topology = _topology(options)
    traffic = None
    if options.params is not None:
        traffic = round_traffic(topology, options.params, options.bytes_per_param, options.link_gbps)
    elif options.link_gbps is not None:
        raise ConfigError(f"--link-gbps {options.link_gbps} needs the model's size; give --params, too")
    if options.json:
        print(json.dumps({**_shape(topology), "traffic": traffic}, indent=2))
        return 0
    print(topology_text(topology))
    if traffic is not None:
        print("\n".join(_traffic_lines(traffic)))
    return 0


def _topology(options: Namespace) -> Topology:
    sizes, replica_size = requested_federation()
    if options.federated is not None:
        sizes = parse_sizes(options.federated, "--federated")
    if options.hsdp is not None:
        replica_size = options.hsdp
    world = options.world
    if world is None:
        if not isinstance(sizes, tuple):
            raise ConfigError(f"--federated {sizes} does not say how many ranks there are; give --world, too")
        world = sum(sizes)
    return Topology(world, sizes, replica_size)


def _shape(topology: Topology) -> dict[str, object]:
    cells = range(topology.cells)
    return {
        "world_size": topology.world_size,
        "federated_sizes": topology.sizes,
        "replica_size": topology.replica_size,
        "replicas": topology.replica_counts,
        "shards": [topology.shards(cell) for cell in cells],
        "senders": [topology.senders(cell) for cell in cells],
    }


def _traffic_lines(traffic: dict[str, Any]) -> list[str]:
    lines = ["", f"Traffic of a round, for a model of {_bytes(traffic['model_bytes'])}:"]
    for name, form in (("all-gather", traffic["all_gather"]), ("two-hop*", traffic["two_hop"])):
        took = ""
        if form["seconds"] is not None:
            took = f"; {form['seconds']:.3g} s at {traffic['link_gbps']:g} Gbit/s"
        sent = f"each cell sends {_bytes(form['bytes_per_cell'])}, all cells {_bytes(form['bytes_total'])}"
        lines.append(f"  {name:<10}  {sent}{took}")
    lines.append("  * not in this version, which exchanges by all-gather")
    lines.append(f"  at home     all cells send {_bytes(traffic['home_bytes_total'])} between their replicas")
    for kind in traffic["cell_kinds"]:
        lines.append(
            f"  a sender in a cell of {kind['ranks']}: {_bytes(kind['all_gather_bytes_per_sender'])} with all-gather, "
            f"{_bytes(kind['two_hop_bytes_per_sender'])} with two-hop, {_bytes(kind['home_bytes_per_sender'])} at home"
        )
    width = shutil.get_terminal_size((100, 24)).columns
    lines.append("Assumed:")
    for assumption in traffic["assumptions"]:
        lines += textwrap.wrap(assumption, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _bytes(count: float) -> str:
    power = min(5, int(math.log10(count)) // 3) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
