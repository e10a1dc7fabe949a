"""``xffl plan``: draw a federation, count a round's traffic and forecast its time, for any world, without torch."""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import decimal, number, shown
from xffl.cli.main import command_parser
from xffl.cli.numbers import count, real, size_in
from xffl.cluster.batch import find_job
from xffl.cluster.cells import Arrangement, arrange
from xffl.cluster.environment import complete_federation, sources_named
from xffl.cluster.sizes import Federation, lone_cell
from xffl.cluster.sizes_text import parse_federation
from xffl.cluster.slurm.allocation import (
    Host,
    parse_hosts,
    read_topology,
    show_topology,
    with_switches,
)
from xffl.errors import ConfigError, LaunchError
from xffl.files import read_given
from xffl.planning.text import counted
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.distributed.parameters import DeviceParameters
    from xffl.planning.forecast import RoundForecast, StepForecast
    from xffl.planning.memory import ModelSize, TrainingSize
    from xffl.planning.summary import CellMemory, PlanSummary

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
examples:
  xffl plan --federated 4,4 --hsdp 2
  xffl plan --federated 512 --world 4096 --hsdp 8 --params 8e9 --bytes-per-param 2 --link-gbps 100
  xffl plan --federated 4,4 --hsdp 2 --params 8e9 --simulate --link-gbps 10 --link-ms 10 --step-s 1 --every 100
  xffl plan --federated 512 --world 4096 --hsdp 8 --startup
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
    ("delay", "local steps between the start of a round and its merge (default: 0)"),
)
_FLAGS = (
    ("rails", "all replicas of a shard send, each a part of it"),
    ("own_links", "each sender has its own slow link, instead of one per cell"),
    ("in_place", "write new values bucket by bucket (atomic=False)"),
)
_TYPES = (
    ("mesh", "AXES", "sizes of pp, cp, dp_replicate, dp_shard and tp: pp=2,dp_shard=auto,tp=2"),
    ("dtype", "DTYPE", "data type of weights and optimizer state (default: float32)"),
    ("param_dtype", "DTYPE", "data type of computation (default: the same)"),
    ("optimizer", "NAME", "sgd, momentum, adamw or adafactor (default: adamw)"),
)
_SIZES = (
    ("layers", "layers of the model, wrapped one by one (default: nothing is wrapped)"),
    ("width", "features between layers"),
    ("kv_width", "features of keys, and of values (default: the width)"),
    ("vocabulary", "rows of the embedding and of the head"),
    ("batch", "sequences of a forward and backward pass, on each rank with data of its own"),
    ("sequence", "tokens of a sequence"),
    ("micro_batches", "micro-batches of a pipeline (default: one for each stage)"),
    ("zero_stage", "stage of DeepSpeed's ZeRO: 1, 2 or 3 (default: 2)"),
)
_STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "deepspeed")
_LARGEST = 1e15
"""The largest number that an option takes: products of several are finite"""
_MAX_LAYERS = 100_000
_MAX_HOSTS = 16
_MAX_CELLS = 8
_NEEDED = ("params", "link_gbps", "link_ms", "step_s", "every")
"""Options that --simulate needs."""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = command_parser(
        "Draw a federation, count the traffic of a round and forecast its time, for any world, without starting "
        "anything.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--federated",
        type=str,
        metavar="SIZES",
        help="ranks of each cell (4,4), or of all cells (4); or a rule that finds cells by hosts: auto (SLURM's "
        "network), auto:LEVEL, hosts:REGEX, file:PATH",
    )
    parser.add_argument("--world", type=count, metavar="N", help="number of ranks (default: the sum of the sizes)")
    parser.add_argument("--hsdp", type=count, metavar="RANKS", help="ranks that hold one copy of the model")
    parser.add_argument(
        "--params", type=count, metavar="COUNT", help="parameters of the model (8e9, 8b); adds the traffic"
    )
    parser.add_argument("--bytes-per-param", type=real, metavar="BYTES", help="as sent (default: 4, or --dtype's)")
    parser.add_argument("--link-gbps", type=real, metavar="GBPS", help="rate of the slow link; adds the time")
    parser.add_argument(
        "--link-backend",
        choices=("gloo", "nccl"),
        help="communication library between cells of GPUs; with gloo, copies to and from the hosts' memory count",
    )
    parser.add_argument(
        "--pcie-gbps", type=real, metavar="GBPS", help="rate between a GPU and its host, with gloo (default: 200)"
    )
    parser.add_argument(
        "--moments",
        type=str,
        metavar="WORDS",
        help="count means of --optimizer's moments, too: average:exp_avg=3,exp_avg_sq=6, or reset",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--assumptions", action="store_true", help="also list what the numbers rest on, as JSON does")
    parser.add_argument(
        "--simulate", action="store_true", help="forecast the time of a round and the share of time left for training"
    )
    parser.add_argument(
        "--startup", action="store_true", help="forecast what ranks ask of rank 0's store, their connections and votes"
    )
    group = parser.add_argument_group("with --simulate")
    for name, metavar, text in _NUMBERS:
        read = size_in(2**20) if metavar == "MIB" else real
        group.add_argument(_option(name), type=read, metavar=metavar, help=text)
    for name, text in _COUNTS:
        group.add_argument(_option(name), type=count, metavar="N", help=text)
    group.add_argument(
        "--form", choices=("auto", "all_gather", "two_hop"), help="how shards reach all cells (default: auto)"
    )
    group.add_argument("--backend", choices=("gloo", "nccl"), help="communication library (default: gloo)")
    group.add_argument("--codec", type=str, metavar="NAME", help="how values cross: bf16, int8, ... (default: none)")
    for name, text in _FLAGS:
        group.add_argument(_option(name), action="store_true", help=text)
    group = parser.add_argument_group("hosts; by default those of the SLURM job of this shell")
    group.add_argument(
        "--hosts", type=str, metavar="LIST", help="a:4,b[1-3]:8 (host:ranks), or @FILE with one host per line"
    )
    group.add_argument(
        "--topology", type=str, metavar="FILE", help="output of scontrol show topology, or a topology.conf"
    )
    group = parser.add_argument_group("inside a cell; with --params the memory of a rank and the traffic of a step")
    group.add_argument("--strategy", choices=_STRATEGIES, help="how the model is spread (default: as --mesh or --hsdp)")
    for name, metavar, text in _TYPES:
        group.add_argument(_option(name), type=str, metavar=metavar, help=text)
    for name, text in _SIZES:
        group.add_argument(_option(name), type=count, metavar="N", help=text)
    group.add_argument("--keep-gathered", action="store_true", help="FSDP keeps layers whole for the backward pass")
    group.add_argument("--loss-parallel", action="store_true", help="tensor-parallel logits stay sharded")
    return parser


def run(options: Namespace) -> int:
    """Print the plan."""
    from xffl.planning import TrainingSize, round_traffic, topology_text
    from xffl.planning.mesh import MOVES, mesh_text
    from xffl.planning.plan_text import assumption_lines, forecast_lines, memory_lines, startup_lines, traffic_lines
    from xffl.planning.summary import summary_lines

    if options.params is not None:
        options.params = float(options.params)
    for name in ("params", "bytes_per_param", "link_gbps", "pcie_gbps", *(name for name, *_ in _NUMBERS)):
        if options[name] is not None:
            minimum, above = (0.0, -math.inf) if name in ("link_ms", "home_us") else (-math.inf, 0.0)
            number(_option(name), options[name], minimum, above=above)
            _check_largest(name, options[name], _LARGEST)
    for name, *_ in (*_COUNTS, *_SIZES):
        if options[name] is not None:
            _check_largest(name, options[name], _MAX_LAYERS if name == "layers" else _LARGEST)
    if options.bytes_per_param is None:
        # A round sends a weight as it is kept.
        options.bytes_per_param = float(TrainingSize(dtype=options.dtype or "float32").kept_bytes)
    asked = None if options.federated is None else parse_federation(options.federated, "--federated")
    federated, replica_size, sources = complete_federation(asked, options.hsdp)
    with sources_named(sources):
        topology, hosts = _fit(options, federated, replica_size)
    if federated is not None and topology.cells == 1:
        print(lone_cell(federated, topology.world_size), file=sys.stderr)
    pcie_gbps = _pcie(options)
    moments = _moments(options)
    inside = _describe_cell(options, topology)
    forecaster = _Forecaster(options, topology, pcie_gbps, moments) if _is_simulated(options) else None
    forecast = None if forecaster is None else _simulate(options, forecaster)
    traffic = None
    if options.params is not None:
        traffic = round_traffic(
            topology, options.params, options.bytes_per_param, options.link_gbps, pcie_gbps=pcie_gbps, moments=moments
        )
    elif options.link_gbps is not None:
        raise ConfigError(f"--link-gbps {options.link_gbps} needs the model's size; give --params, too")
    startup = _forecast_startup(topology) if options.startup else None
    if options.json:
        plan = {**_shape(topology), "traffic": traffic}
        parts = (("forecast", forecast), ("inside", inside), ("placement", hosts), ("startup", startup))
        plan |= {name: part for name, part in parts if part is not None}
        print(json.dumps(plan, indent=2))
        return 0
    print(topology_text(topology))
    if hosts is not None:
        print("\n".join(_host_lines(hosts)))
    if inside is not None:
        axes = inside["axes"]
        print(f"\n{mesh_text(axes, first_rank=inside['first_rank'], cell=inside['cell'])}")
        print("".join(f"  {axis:<12}  {moved}\n" for axis, moved in MOVES.items() if axes[axis] > 1), end="")
    sections = []
    if traffic is not None:
        sections.append((traffic_lines(traffic), traffic["assumptions"]))
    if startup is not None:
        sections.append((startup_lines(startup), startup["assumptions"]))
    if forecast is not None:
        sections.append((forecast_lines(forecast), forecast["assumptions"]))
    if inside is not None and inside["memory"] is not None:
        sections.append((memory_lines(inside), inside["assumptions"]))
    for lines, assumptions in sections:
        print("\n".join([*lines, *(assumption_lines(assumptions) if options.assumptions else ())]))
    memory = None if options.params is None else _cell_memory(options, topology, inside)
    summary = _summarize(options, topology=topology, traffic=traffic, memory=memory, forecaster=forecaster)
    print("\n".join(["", *summary_lines(summary)]))
    return 0


def _forecast_startup(topology: Topology) -> dict[str, Any]:
    """Forecast start-up and votes of a world over gloo."""
    from xffl.planning.startup import forecast_startup

    return asdict(forecast_startup(topology))


def _check_largest(name: str, value: float, largest: float) -> None:
    if value > largest:
        raise ConfigError(f"{_option(name)} must be at most {largest:g}, got {shown(value)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pcie(options: Namespace) -> float | None:
    """Return the rate between a GPU and its host, where what crosses goes through the host's memory."""
    from xffl.planning.traffic import PCIE_GBPS

    if options.link_backend == "gloo":
        if options.params is None:
            raise ConfigError("--link-backend gloo needs the model's size; give --params, too")
        if options.backend == "nccl":
            raise ConfigError(
                "--backend nccl is what crosses cells, which --link-backend gloo changes; give one of them"
            )
        return PCIE_GBPS if options.pcie_gbps is None else float(options.pcie_gbps)
    if options.pcie_gbps is not None:
        raise ConfigError(f"no effect without --link-backend gloo: --pcie-gbps {options.pcie_gbps:g}")
    return None


def _moments(options: Namespace) -> dict[str, int]:
    """Return the periods of the moments that rounds move, by name."""
    from xffl.aggregation.algorithms.moments import moments_of
    from xffl.planning.memory import MOMENTS

    asked = moments_of(options.moments)
    if asked is None or asked.mode != "average":
        return {}
    if options.params is None:
        raise ConfigError(f"--moments {options.moments} needs the model's size; give --params, too")
    names = MOMENTS.get(options.optimizer or "adamw", ())
    if not names:
        raise ConfigError(
            f"--moments {options.moments} has nothing to average: --optimizer {options.optimizer} keeps nothing of a "
            f"parameter's shape; give {' or '.join(MOMENTS)}, or leave --moments out"
        )
    if unknown := sorted(set(asked.periods) - set(names)):
        raise ConfigError(
            f"--moments {options.moments} names {', '.join(unknown)}, and --optimizer {options.optimizer or 'adamw'} "
            f"keeps {', '.join(names)}; give names of those"
        )
    return {name: asked.period(name) for name in names}


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


class _Forecaster:
    """Forecasts of rounds, and of plain data parallelism, with the options' numbers."""

    def __init__(
        self, options: Namespace, topology: Topology, pcie_gbps: float | None, moments: Mapping[str, int]
    ) -> None:
        from xffl.planning import Link, codec_ratio

        self._topology = topology
        self.codec: str = "none" if options.codec is None else options.codec
        self._common: dict[str, Any] = {
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
        asked = {name: options[name] for name in ("fragments", "delay", "form", "backend", "memory_gbps")}
        if options.link_backend == "nccl":
            asked["backend"] = "nccl"
        asked["bucket_bytes"] = None if options.bucket_mib is None else round(options.bucket_mib * 2**20)
        self._of_rounds: dict[str, Any] = {
            # A round in the mean: moments move beside the parameters in some of them.
            "parameters": None
            if options.params is None
            else options.params * (1 + sum(1 / n for n in moments.values())),
            "every": options.every,
            "rails": options.rails,
            "atomic": not options.in_place,
            "pcie_gbps": pcie_gbps,
            "codec_ratio": None if self.codec == "none" else codec_ratio(self.codec, options.bytes_per_param),
            **{name: value for name, value in asked.items() if value is not None},
        }

    def round(self, **changes: Any) -> RoundForecast:
        """Forecast a round, with changed keywords of ``forecast_round``."""
        from xffl.planning import forecast_round

        return forecast_round(self._topology, **{**self._common, **self._of_rounds, **changes})

    def codec_limits(self) -> dict[str, float]:
        """Return below which rate of the slow link each codec pays, in Gbit/s."""
        from xffl.planning import codec_limits
        from xffl.planning.forecast import MEMORY_GBPS

        memory_gbps = self._of_rounds.get("memory_gbps", MEMORY_GBPS)
        links = {"rails": self._of_rounds["rails"], "own_links": self._common["own_links"]}
        return codec_limits(self._topology, memory_gbps=memory_gbps, **links)

    def data_parallel(self) -> StepForecast:
        """Forecast a data-parallel step."""
        from xffl.planning import forecast_data_parallel

        return forecast_data_parallel(self._topology, **self._common)


def _simulate(options: Namespace, forecaster: _Forecaster) -> dict[str, Any]:
    """Forecast rounds and plain data parallelism, for people and for JSON."""
    from xffl.planning.forecast import ASSUMPTIONS

    return {
        "every": options.every,
        "step_s": options.step_s,
        "codec": forecaster.codec,
        "round": asdict(forecaster.round()),
        "data_parallel": asdict(forecaster.data_parallel()),
        "codecs": forecaster.codec_limits(),
        "assumptions": list(ASSUMPTIONS),
    }


def _summarize(
    options: Namespace,
    topology: Topology,
    traffic: dict[str, Any] | None,
    memory: CellMemory | None,
    forecaster: _Forecaster | None,
) -> PlanSummary:
    """Gather what the end of the plan tells."""
    from xffl.planning.summary import PlanSummary, RoundOptions

    if forecaster is None:
        return PlanSummary(topology=topology, traffic=traffic, memory=memory)
    round_options = RoundOptions(
        every=options.every,
        step_s=options.step_s,
        delay=options.delay or 0,
        bytes_per_parameter=options.bytes_per_param,
        bucket_bytes=None if options.bucket_mib is None else round(options.bucket_mib * 2**20),
        has_codec=forecaster.codec != "none",
        can_use_rails=options.own_links and not options.rails and max(topology.replica_counts) > 1,
        atomic=not options.in_place,
        forecast=forecaster.round,
    )
    return PlanSummary(
        topology=topology,
        traffic=traffic,
        round=forecaster.round(),
        options=round_options,
        data_parallel=forecaster.data_parallel().utilization,
        memory=memory,
    )


def _cell_memory(options: Namespace, topology: Topology, inside: dict[str, Any] | None) -> CellMemory:
    """Count what a rank of the smallest cell holds, and what it would hold with FSDP over all of the cell."""
    from xffl.distributed.parameters import DeviceParameters
    from xffl.planning.memory import rank_memory, total_bytes
    from xffl.planning.summary import CellMemory
    from xffl.planning.traffic import step_traffic

    axes = _axes(options, topology, topology.sizes.index(min(topology.sizes)))
    zero = _zero(options)
    model, training, rounds = _training_sizes(options, topology)
    totals = []
    for codec in (rounds["codec"], True):
        parts = rank_memory(axes, model, training, zero=zero, **{**rounds, "codec": codec})
        if inside is None:  # nothing has said which layers there are, and so how much is gathered at a time
            parts = tuple(part for part in parts if part.what != "gathered")
        totals.append(total_bytes(parts))
    ranks = prod(axes.values())
    with_fsdp = None
    if ranks > 1 and training.optimizer != "adafactor":
        with_fsdp = total_bytes(rank_memory({"dp_shard": ranks}, model, training, **rounds))
    return CellMemory(
        strategy=options.strategy or DeviceParameters(**axes).strategy,
        dtype=training.dtype,
        optimizer=training.optimizer,
        total=totals[0],
        with_codec=totals[1],
        with_fsdp=with_fsdp,
        sent=None if inside is None else total_bytes(step_traffic(axes, model, training, zero=zero)),
        is_wrapped=options.layers is not None,
        is_requested=inside is not None,
    )


def _fit(
    options: Namespace, federated: Federation | None, replica_size: int | None
) -> tuple[Topology, dict[str, Any] | None]:
    """Fit the federation that is asked for to the world or the hosts."""
    hosts = _find_hosts(options, federated)
    arrangement: Arrangement | None = None
    sizes = None if isinstance(federated, str) else federated
    world = options.world
    if hosts is not None:
        arrangement = _order(hosts, federated, replica_size)
        sizes = arrangement.sizes or sizes
        slots = sum(host.slots for host in hosts)
        if world not in (None, slots):
            raise ConfigError(f"--world is {world}, but the hosts take {slots} ranks; leave --world out")
        world = slots
    if world is None:
        if not isinstance(sizes, tuple):
            if sizes is None:
                raise ConfigError("the number of ranks is missing; give --federated 4,4, or --world")
            raise ConfigError(f"{_knob(options)} {sizes} does not say how many ranks there are; give --world, too")
        world = max(sum(sizes), 1)  # Topology refuses a size below 1
    topology = _lay_out_mesh(options, Topology(world, sizes), replica_size)
    if hosts is None or arrangement is None:
        return topology, None
    if replica_size != topology.replica_size:  # the mesh inside the cells has set it
        arrangement = _order(hosts, federated, topology.replica_size)
    return topology, _describe_hosts(arrangement, topology, federated)


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


# Hosts: which cell each is in, the order of their ranks, and where replicas stand -------------------------------------


def _knob(options: Namespace) -> str:
    """Return what gives the federation: the option, else the variable."""
    return "XFFL_FEDERATED" if options.federated is None else "--federated"


def _find_hosts(options: Namespace, federated: Federation | None) -> tuple[Host, ...] | None:
    """Return the hosts that are described, or that the job has; ``None`` where only sizes are asked for."""
    if not isinstance(federated, str):
        if options.topology is not None:
            raise ConfigError(f"--topology {options.topology} would not be read; give --federated auto, too")
        return None if options.hosts is None else parse_hosts(options.hosts)
    is_auto = federated.startswith("auto")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    else:
        is_silent = options.topology is None  # else the file tells
        job = find_job(wants_switches=is_silent, needs_switches=is_silent and is_auto)
        if job is None:
            raise ConfigError(
                f"{_knob(options)} {federated} finds cells by hosts, but this is no job; call it in the batch script "
                "or in the shell of salloc, or describe hosts with --hosts a[1-4]:4,b[1-4]:4"
            )
        hosts = job.hosts
    if options.topology is not None:
        return with_switches(hosts, _read_topology(options.topology))
    if is_auto and not all(host.switches for host in hosts):
        return with_switches(hosts, read_topology(show_topology()))
    return hosts


def _read_topology(file: str) -> dict[str, tuple[str, ...]]:
    try:
        recorded = read_topology(read_given(Path(file)))
    except (OSError, ValueError, LaunchError) as error:
        raise ConfigError(f"--topology {file}: {error}; give what scontrol show topology prints") from error
    if not recorded:
        raise ConfigError(f"--topology {file} names no switch with nodes; give what scontrol show topology prints")
    return recorded


def _order(hosts: tuple[Host, ...], federated: Federation | None, replica_size: int | None) -> Arrangement:
    """Return hosts in the order of their ranks, as ``xffl exec`` orders them by a rule, and the cells that it finds."""
    if isinstance(federated, str):
        return arrange(hosts, federated, replica_size)
    return Arrangement(hosts, (), ())


def _describe_hosts(arrangement: Arrangement, topology: Topology, federated: Federation | None) -> dict[str, Any]:
    """Describe where ranks and replicas stand, for people and for JSON."""
    starts = (0, *accumulate(host.slots for host in arrangement.hosts))
    cells = []
    for cell in range(topology.cells):
        first, end = topology.offsets[cell], topology.offsets[cell + 1]
        on: dict[int, set[int]] = {}  # host to the cell's replicas on it
        spread = []
        for replica in range(topology.replicas(cell)):
            below = {bisect_right(starts, rank) - 1 for rank in topology.shard_group(cell, replica)}
            spread.append(len(below))
            for host in below:
                on.setdefault(host, set()).add(replica)
        hosts = [
            {
                "name": arrangement.hosts[host].name,
                "switches": arrangement.hosts[host].switches,
                "ranks": (max(starts[host], first), min(starts[host + 1], end) - 1),
                "replicas": sorted(on[host]),
            }
            for host in sorted(on)
        ]
        name = arrangement.names[cell] if arrangement.names else None
        cells.append({"name": name, "ranks": (first, end - 1), "hosts": hosts, "hosts_of_replicas": spread})
    return {"rule": federated if isinstance(federated, str) else None, "cells": cells}


def _host_lines(placed: dict[str, Any]) -> list[str]:
    """Write for people what :func:`_describe_hosts` returns."""
    by = "" if placed["rule"] is None else f", with cells by {placed['rule']}"
    lines = ["", f"Hosts in the order of their ranks{by}:"]
    for place, cell in enumerate(placed["cells"][:_MAX_CELLS]):
        hosts, name = cell["hosts"], "" if cell["name"] is None else f" ({cell['name']})"
        lines.append(f"  cell {place}{name}: {_span('rank', *cell['ranks'])} on {counted(len(hosts), 'host')}")
        width = max(len(host["name"]) for host in hosts[:_MAX_HOSTS])
        for host in hosts[:_MAX_HOSTS]:
            ranks = _span("rank", *host["ranks"])
            replicas = _span("replica", host["replicas"][0], host["replicas"][-1])
            below = f"  below {'.'.join(host['switches'])}" if host["switches"] else ""
            lines.append(f"    {host['name']:<{width}}  {ranks:<14}  {replicas:<14}{below}".rstrip())
        if len(hosts) > _MAX_HOSTS:
            lines.append(f"    and {len(hosts) - _MAX_HOSTS} more hosts")
        counts = sorted(Counter(cell["hosts_of_replicas"]).items())
        each = [f"{counted(n, 'replica')} on {counted(k, 'host')}{' each' if n > 1 else ''}" for k, n in counts]
        lines.append(f"    {', '.join(each)}")
    if len(placed["cells"]) > _MAX_CELLS:
        lines.append(f"  and {len(placed['cells']) - _MAX_CELLS} more cells")
    return lines


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


# The inside of a cell: its mesh, the memory of a rank and the traffic of a step ---------------------------------------


def _lay_out_mesh(options: Namespace, plain: Topology, replica_size: int | None) -> Topology:
    """Return the federation with the mesh that is asked for in each cell."""
    parameters = _asked_mesh(options, replica_size)
    if parameters is None:
        return Topology(plain.world_size, plain.sizes, replica_size)
    mesh = parameters.resolve(plain.sizes)
    if replica_size not in (None, mesh.replica_size):
        knob = f"--mesh {options.mesh}" if options.mesh is not None else f"--strategy {options.strategy}"
        others = "which are whole cells" if mesh.replica_size is None else f"of {mesh.replica_size}"
        raise ConfigError(
            f"replicas of {replica_size} ranks (--hsdp) differ from those of {knob}, {others}; leave --hsdp out"
        )
    return Topology(plain.world_size, plain.sizes, mesh.replica_size, mesh.cell_shape)


def _describe_cell(options: Namespace, topology: Topology) -> dict[str, Any] | None:
    """Describe the smallest cell's mesh and what its ranks hold and send; ``None`` where no option asks for it.

    ``memory`` and ``traffic`` are lists of parts (``what``, ``bytes``, ``formula``); they and ``strategies``, the bytes
    of others for comparison, are ``None`` without ``--params``.
    """
    asked = [name for name, *_ in (*_TYPES, *_SIZES) if options[name] is not None]
    asked += [name for name in ("strategy", "keep_gathered", "loss_parallel") if options[name]]
    if not asked:
        return None
    from xffl.distributed.parameters import DeviceParameters

    cell = topology.sizes.index(min(topology.sizes))
    axes = _axes(options, topology, cell)
    result = {"cell": cell, "ranks": topology.sizes[cell], "axes": axes, "first_rank": topology.offsets[cell]}
    result |= {"strategy": options.strategy or DeviceParameters(**axes).strategy, "zero_stage": _zero(options)}
    result |= dict.fromkeys(("memory", "total_bytes", "traffic", "strategies", "assumptions"))
    if options.params is not None:
        return result | _counted(options, topology, axes)
    if unread := [_option(name) for name in asked if name not in ("strategy", "mesh", "dtype", "zero_stage")]:
        raise ConfigError(f"no effect without --params: {', '.join(unread)}")
    return result


class _TrainingSizes(NamedTuple):
    """What the options say of the model, the training and its rounds, as far as memory depends on it."""

    model: ModelSize
    training: TrainingSize
    rounds: dict[str, bool]


def _training_sizes(options: Namespace, topology: Topology) -> _TrainingSizes:
    from xffl.planning.memory import ModelSize, TrainingSize

    sizes = ("layers", "width", "kv_width", "vocabulary")
    model = ModelSize(parameters=options.params, **{name: options[name] for name in sizes})
    names = ("dtype", "param_dtype", "optimizer", "batch", "sequence", "micro_batches")
    training = TrainingSize(
        reshard_after_forward=not options.keep_gathered,
        loss_parallel=options.loss_parallel,
        **{name: options[name] for name in names if options[name] is not None},
    )
    rounds = {
        "is_federated": topology.cells > 1,
        "atomic": not options.in_place,
        "codec": options.codec not in (None, "none"),
    }
    return _TrainingSizes(model, training, rounds)


def _counted(options: Namespace, topology: Topology, axes: dict[str, int]) -> dict[str, Any]:
    """Count bytes, with what the options say of the model and the training."""
    from xffl.planning.memory import MEMORY_ASSUMPTIONS, rank_memory, total_bytes
    from xffl.planning.traffic import TRAFFIC_ASSUMPTIONS, step_traffic

    model, training, rounds = _training_sizes(options, topology)
    zero = _zero(options)
    memory = rank_memory(axes, model, training, zero=zero, **rounds)
    return {
        "memory": [part._asdict() for part in memory],
        "total_bytes": total_bytes(memory),
        "traffic": [part._asdict() for part in step_traffic(axes, model, training, zero=zero)],
        "strategies": _compare(axes, zero=zero, model=model, training=training, rounds=rounds),
        "assumptions": [*MEMORY_ASSUMPTIONS, *TRAFFIC_ASSUMPTIONS],
    }


def _compare(
    axes: dict[str, int], zero: int, model: ModelSize, training: TrainingSize, rounds: dict[str, bool]
) -> dict[str, dict[str, float | None]]:
    """Count bytes of the plain strategies over as many ranks, and of the one that is asked for."""
    from xffl.planning.memory import rank_memory, total_bytes
    from xffl.planning.mesh import describe_mesh
    from xffl.planning.traffic import step_traffic

    ranks = prod(axes.values())
    choices: dict[str, tuple[dict[str, int], int]] = {"single": ({}, 0)}
    if ranks > 1:
        choices |= {"ddp": ({"dp_replicate": ranks}, 0), "fsdp": ({"dp_shard": ranks}, 0)}
    if ranks % 2 == 0 and ranks > 2:
        half = {"dp_replicate": 2, "dp_shard": ranks // 2}
        choices[f"hsdp, {describe_mesh(half)}"] = (half, 0)
    if ranks > 1:
        choices |= {f"deepspeed, ZeRO {stage}": ({"dp_shard": ranks}, stage) for stage in (1, 2, 3)}
    asked_for = ({axis: size for axis, size in axes.items() if size > 1}, zero)
    if asked_for not in choices.values():
        choices[f"this, {describe_mesh(axes)}"] = asked_for
    if training.optimizer == "adafactor":  # which cannot take parameters that are cut
        choices = {name: choice for name, choice in choices.items() if name in ("single", "ddp") or choice == asked_for}
    forecasts = {}
    for name, (mesh, stage) in choices.items():
        memory = rank_memory(mesh, model, training, zero=stage, **rounds)
        sent = step_traffic(mesh, model, training, zero=stage)
        row = {part.what: part.bytes for part in memory}
        forecasts[name] = {**row, "total": total_bytes(memory), "sends": total_bytes(sent)}
    return forecasts


def _asked_mesh(options: Namespace, replica_size: int | None) -> DeviceParameters | None:
    """Return what the options ask for inside a cell; ``None`` where that is no more than ``--hsdp``."""
    from xffl.distributed.parameters import AXES, DeviceParameters

    strategy = options.strategy
    if options.zero_stage is not None and (strategy != "deepspeed" or options.zero_stage not in (1, 2, 3)):
        raise ConfigError(f"--zero-stage {options.zero_stage} is 1, 2 or 3, and DeepSpeed's; give --strategy deepspeed")
    others: dict[str, Any] = {} if options.param_dtype is None else {"param_dtype": options.param_dtype}
    if options.mesh is not None:
        sizes = _parse_mesh(options.mesh, AXES)
        parameters = DeviceParameters(**sizes, **others)
        if strategy not in (None, "hsdp", parameters.strategy):
            raise ConfigError(
                f"--strategy {strategy} does not do what --mesh {options.mesh} asks for; give --strategy "
                f"{parameters.strategy}, or leave it out"
            )
        return parameters
    if strategy is None:
        return None
    if strategy == "hsdp":
        if replica_size is None:
            raise ConfigError("--strategy hsdp needs to know the ranks of a replica; give --hsdp, or --mesh dp_shard=n")
        return DeviceParameters.HSDP(dp_shard=replica_size, **others)
    if strategy == "single":
        return DeviceParameters.SINGLE_DEVICE(**others)
    return DeviceParameters.DDP(**others) if strategy == "ddp" else DeviceParameters.FSDP(**others)


def _parse_mesh(text: str, axes: tuple[str, ...]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for word in text.split(","):
        axis, _, size = (part.strip() for part in word.partition("="))
        if axis not in axes or axis in sizes or not (size == "auto" or decimal(size)):
            raise ConfigError(
                f"--mesh {shown(text)} has {shown(word)}; give each of {', '.join(axes)} at most once with its ranks "
                "or auto, such as pp=2,dp_shard=auto"
            )
        sizes[axis] = size if size == "auto" else int(size)
    return sizes


def _axes(options: Namespace, topology: Topology, cell: int) -> dict[str, Any]:
    """Return the ranks along each axis in a cell."""
    from xffl.distributed.parameters import AXES

    axes = dict.fromkeys(AXES, 1)
    if topology.cell_shape is not None:
        axes |= dict(topology.cell_shape)
    else:
        axes["dp_shard"] = topology.shards(cell)
    return axes | {"dp_replicate": topology.replicas(cell)}


def _zero(options: Namespace) -> int:
    return (options.zero_stage or 2) if options.strategy == "deepspeed" else 0
