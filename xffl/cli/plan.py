"""``xffl plan``: draw a federation, count a round's traffic and forecast its time, for any world, without torch."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import number
from xffl.cli import plan_cell, plan_hosts
from xffl.cli.formatter import HelpFormatter
from xffl.cluster.cells import Arrangement, Federation, lone_cell
from xffl.cluster.environment import sources_named
from xffl.errors import ConfigError
from xffl.planning.text import bytes_text
from xffl.topology import Topology

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl plan --federated 4,4 --hsdp 2
  xffl plan --federated 512 --world 4096 --hsdp 8 --params 8e9 --bytes-per-param 2 --link-gbps 100
  xffl plan --federated 4,4 --hsdp 2 --params 8e9 --simulate --link-gbps 10 --link-ms 10 --step-s 1 --every 100
  xffl plan --federated auto --hsdp 4
  xffl plan --federated 'hosts:rack[0-9]+' --hosts rack1n[1-3]:4,rack2n1:4 --hsdp 2
  xffl plan --world 32 --params 8e9 --mesh pp=2,dp_shard=auto,tp=2 --layers 32 --width 4096 --batch 8 --sequence 4096
"""

_NUMBERS = (
    ("link_ms", "MS", "latency of the slow link, one way: half of what ping shows"),
    ("home_gbps", "GBPS", "rate of each rank's card inside its cell (default: 200)"),
    ("home_us", "US", "latency inside a cell, one way, in microseconds (default: 5)"),
    ("memory_gbps", "GBPS", "rate at which a rank reads values in its memory (default: 800)"),
    ("step_s", "SECONDS", "time of a local step"),
    ("bucket_mib", "MIB", "size of a bucket (default: 4)"),
)
_COUNTS = (
    ("every", "local steps between two rounds"),
    ("fragments", "parts of the model, exchanged in turn (default: 1)"),
    ("delay", "local steps that go on while a round is under way (default: 0)"),
)
_FLAGS = (
    ("rails", "every replica of a shard sends a part of it"),
    ("own_links", "every rank that sends has a slow link of its own, not one for its cell"),
    ("in_place", "write new values bucket by bucket (atomic=False)"),
)
_PHASES = (
    ("vote", "both votes, over all ranks"),
    ("pack", "values are checked"),
    ("fill", "until the slow link starts"),
    ("across", "the slow link is busy"),
    ("stall", "it waits, between buckets"),
    ("drain", "the last buckets arrive and are broadcast inside the cells"),
    ("commit", "new values are written"),
)
_NEEDED = ("params", "link_gbps", "link_ms", "step_s", "every")
"""Options that --simulate needs."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Draw a federation, count the traffic of a round and forecast its time, for any world, without "
        "starting anything.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--federated",
        type=str,
        metavar="SIZES",
        help="ranks of each cell (4,4), or of all cells (4); or a rule that finds cells by hosts: auto (SLURM's "
        "network), auto:LEVEL, hosts:REGEX, file:PATH",
    )
    parser.add_argument("--world", type=int, metavar="N", help="all ranks; by default the sum of the sizes")
    parser.add_argument("--hsdp", type=int, metavar="RANKS", help="ranks that hold one copy of the model")
    parser.add_argument("--params", type=float, metavar="COUNT", help="parameters of the model (8e9): adds the traffic")
    parser.add_argument("--bytes-per-param", type=float, metavar="BYTES", help="as sent (default: 4, or --dtype's)")
    parser.add_argument("--link-gbps", type=float, metavar="GBPS", help="rate of the slow link: adds the time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--simulate", action="store_true", help="forecast a round's time, and what is left for training"
    )
    group = parser.add_argument_group("with --simulate")
    for name, metavar, told in _NUMBERS:
        group.add_argument(_option(name), type=float, metavar=metavar, help=told)
    for name, told in _COUNTS:
        group.add_argument(_option(name), type=int, metavar="N", help=told)
    group.add_argument(
        "--form", choices=("auto", "all_gather", "two_hop"), help="how shards reach all cells (default: auto)"
    )
    group.add_argument("--backend", choices=("gloo", "nccl"), help="communication library (default: gloo)")
    group.add_argument("--codec", type=str, metavar="NAME", help="how values cross: bf16, int8, ... (default: none)")
    for name, told in _FLAGS:
        group.add_argument(_option(name), action="store_true", help=told)
    plan_hosts.add_options(parser)
    plan_cell.add_options(parser)
    return parser


def run(options: Namespace) -> int:
    """Print the plan."""
    from xffl.planning import round_traffic, topology_text

    for name in ("params", "bytes_per_param", "link_gbps", *(name for name, *_ in _NUMBERS)):
        if options[name] is not None:
            minimum, above = (0.0, -math.inf) if name in ("link_ms", "home_us") else (-math.inf, 0.0)
            number(_option(name), options[name], minimum, above=above)
    if options.bytes_per_param is None:
        options.bytes_per_param = plan_cell.bytes_of_dtype(options)
    topology, hosts = _lay_out(options)
    federated, *_ = plan_hosts.asked_federation(options)
    if federated is not None and topology.cells == 1:
        print(lone_cell(federated, topology.world_size), file=sys.stderr)
    inside = plan_cell.describe(options, topology)
    forecast = _simulate(options, topology) if _is_simulated(options) else None
    traffic = None
    if options.params is not None:
        traffic = round_traffic(topology, options.params, options.bytes_per_param, options.link_gbps)
    elif options.link_gbps is not None:
        raise ConfigError(f"--link-gbps {options.link_gbps} needs the model's size; give --params, too")
    if options.json:
        told = {**_shape(topology), "traffic": traffic}
        parts = (("forecast", forecast), ("inside", inside), ("placement", hosts))
        told |= {name: part for name, part in parts if part is not None}
        print(json.dumps(told, indent=2))
        return 0
    print(topology_text(topology))
    if hosts is not None:
        print("\n".join(plan_hosts.lines(hosts)))
    if inside is not None:
        print("\n".join(plan_cell.mesh_lines(inside)))
    if traffic is not None:
        print("\n".join(_traffic_lines(traffic)))
    if forecast is not None:
        print("\n".join(_forecast_lines(forecast)))
    if inside is not None and inside["memory"] is not None:
        print("\n".join([*plan_cell.lines(inside), *_assumption_lines(inside["assumptions"])]))
    return 0


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_simulated(options: Namespace) -> bool:
    """Return whether a forecast is asked for; raise if it lacks options, or if options need it."""
    if options.simulate:
        if missing := [_option(name) for name in _NEEDED if options[name] is None]:
            raise ConfigError(f"--simulate lacks {', '.join(missing)}; give all of {', '.join(map(_option, _NEEDED))}")
        return True
    names = [name for name, *_ in (*_NUMBERS, *_COUNTS, *_FLAGS)]
    given = [_option(name) for name in (*names, "form", "codec", "backend") if options[name] not in (None, False)]
    if given:
        raise ConfigError(f"no effect without --simulate: {', '.join(given)}")
    return False


def _simulate(options: Namespace, topology: Topology) -> dict[str, Any]:
    """Forecast rounds and plain data parallelism with the options' numbers."""
    from xffl.planning import Link, codec_ratio, forecast_data_parallel, forecast_round
    from xffl.planning.forecast import ASSUMPTIONS

    asked = {name: options[name] for name in ("fragments", "delay", "form", "backend", "memory_gbps")}
    asked["bucket_bytes"] = None if options.bucket_mib is None else round(options.bucket_mib * 2**20)
    codec = "none" if options.codec is None else options.codec
    common = {
        "parameters": options.params,
        "bytes_per_parameter": options.bytes_per_param,
        "link": Link(options.link_gbps, options.link_ms / 1e3),
        "home": Link(
            200.0 if options.home_gbps is None else options.home_gbps,
            (5.0 if options.home_us is None else options.home_us) / 1e6,
        ),
        "step_s": options.step_s,
        "own_links": options.own_links,
    }
    round_ = forecast_round(
        topology,
        **common,
        every=options.every,
        rails=options.rails,
        atomic=not options.in_place,
        codec_ratio=None if codec == "none" else codec_ratio(codec, options.bytes_per_param),
        **{name: value for name, value in asked.items() if value is not None},
    )
    return {
        "every": options.every,
        "step_s": options.step_s,
        "codec": codec,
        "round": asdict(round_),
        "data_parallel": asdict(forecast_data_parallel(topology, **common)),
        "assumptions": list(ASSUMPTIONS),
    }


def _lay_out(options: Namespace) -> tuple[Topology, dict[str, Any] | None]:
    """Return the federation, and the placement of its ranks where hosts are known."""
    federated, replica_size, sources = plan_hosts.asked_federation(options)
    with sources_named(sources):
        return _fit(options, federated, replica_size)


def _fit(
    options: Namespace, federated: Federation | None, replica_size: int | None
) -> tuple[Topology, dict[str, Any] | None]:
    """Fit the federation that is asked for to the world or the hosts."""
    hosts = plan_hosts.find_hosts(options, federated)
    arrangement: Arrangement | None = None
    sizes = None if isinstance(federated, str) else federated
    world = options.world
    if hosts is not None:
        arrangement = plan_hosts.order(hosts, federated, replica_size)
        sizes = arrangement.sizes or sizes
        slots = sum(host.slots for host in hosts)
        if world not in (None, slots):
            raise ConfigError(f"--world is {world}, but the hosts take {slots} ranks; leave --world out")
        world = slots
    if world is None:
        if not isinstance(sizes, tuple):
            if sizes is None:
                raise ConfigError("the number of ranks is missing; give --federated 4,4, or --world")
            raise ConfigError(
                f"{plan_hosts.knob(options)} {sizes} does not say how many ranks there are; give --world, too"
            )
        world = max(sum(sizes), 1)  # Topology refuses a size below 1
    topology = plan_cell.lay_out(options, Topology(world, sizes), replica_size)
    if hosts is None or arrangement is None:
        return topology, None
    if replica_size != topology.replica_size:  # the mesh inside the cells has set it
        arrangement = plan_hosts.order(hosts, federated, topology.replica_size)
    return topology, plan_hosts.describe(arrangement, topology, federated)


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
    lines = ["", f"Traffic of a round, for a model of {bytes_text(traffic['model_bytes'])}:"]
    for name, form in (("all-gather", traffic["all_gather"]), ("two-hop", traffic["two_hop"])):
        took = ""
        if form["seconds"] is not None:
            took = f"; {form['seconds']:.3g} s at {traffic['link_gbps']:g} Gbit/s"
        sent = f"each cell sends {bytes_text(form['bytes_per_cell'])}, all cells {bytes_text(form['bytes_total'])}"
        lines.append(f"  {name:<10}  {sent}{took}")
    lines.append(f"  intra-cell  all cells send {bytes_text(traffic['home_bytes_total'])} between their replicas")
    for kind in traffic["cell_kinds"]:
        names = ("all_gather_bytes_per_sender", "two_hop_bytes_per_sender", "home_bytes_per_sender")
        gathered, hopped, home = (bytes_text(kind[name]) for name in names)
        told = f"{gathered} with all-gather, {hopped} with two-hop, {home} inside the cell"
        lines.append(f"  a sender in a cell of {kind['ranks']}: {told}")
    return lines + _assumption_lines(traffic["assumptions"])


def _forecast_lines(forecast: dict[str, Any]) -> list[str]:
    round_, plain = forecast["round"], forecast["data_parallel"]
    form = round_["form"].replace("_", "-")
    lines = ["", f"Forecast of a round every {forecast['every']} steps of {forecast['step_s']:g} s:"]
    lines.append(f"  takes       {_seconds(round_['seconds'])} ({form}, codec {forecast['codec']}), of which")
    lines += [f"    {phase:<7}   {_seconds(round_['phases'][phase]):<8}  {told}" for phase, told in _PHASES]
    sent = bytes_text(round_["bytes_across_per_cell"])
    lines.append(f"  exposes     {_seconds(round_['exposed'])}; each cell sends {sent}")
    lines.append(f"  training    {100 * round_['utilization']:.1f} % of the time")
    if round_["phases"]["stall"] > 0.05 * round_["phases"]["across"]:
        lines.append(
            "  The slow link waits for buckets: larger ones would fill it (--bucket-mib, Aggregator's bucket_bytes)."
        )
    lines.append("Data parallelism over all ranks instead, gradients in every step:")
    sent = bytes_text(plain["bytes_across_per_cell"])
    lines.append(f"  exposes     {_seconds(plain['exposed'])} of {_seconds(plain['seconds'])}; each cell sends {sent}")
    lines.append(f"  training    {100 * plain['utilization']:.1f} % of the time")
    return lines + _assumption_lines(forecast["assumptions"])


def _assumption_lines(assumptions: Sequence[str]) -> list[str]:
    """Lay assumptions out as a list that fills the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    lines = ["Assumed:"]
    for assumption in assumptions:
        lines += textwrap.wrap(assumption, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _seconds(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
    return f"{seconds:.4g} s"
