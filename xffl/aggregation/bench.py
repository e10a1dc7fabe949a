"""Measurements of a set of ranks: the paths between them, and rounds over these paths."""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xffl import __version__
from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.engine.transport import start_moves
from xffl.aggregation.report import RoundReport
from xffl.checks import integer_fields, number
from xffl.cluster.hardware import describe_host
from xffl.distributed.agreement.consistency import (
    barrier,
    compute_device,
    ranks_text,
    run_on_all_ranks,
    sends_from_gpu,
    transfer_device,
)
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError
from xffl.parallel.spread import shard
from xffl.topology import Topology

__all__ = ["Effort", "build_model", "measure", "round_variants"]

SMALL_BYTES = 8  # payload of the probes that measure latency
SMALL_CALLS = 20  # exchanges of such a payload in one sample: the time of one is near that of a barrier
CODECS = ("bf16", "fp16", "int8", "int4", "topk:0.01")
BLOCKS = 6  # blocks that the model has if its width comes out even
DRIFT = 1e-3
"""What ranks multiply their parameters by before a round, less 1, so that lossy codecs have something to write."""


@dataclass(frozen=True)
class Effort:
    """How much is measured, the same on all ranks."""

    megabytes: float = 64.0  # of the model, which comes out near that, and of large messages
    repeats: int = 7  # samples of each probe
    warmup: int = 2  # passes before the first sample, which make connections and buffers

    def __post_init__(self) -> None:
        number("--megabytes", self.megabytes, 0.01, hint="give MiB, such as 64")
        integer_fields(self, "repeats", "warmup", prefix="--")


@dataclass(frozen=True)
class _Probe:
    """A call that is timed, as this rank takes part in it."""

    kind: str
    name: str
    ranks: str
    payload: int
    call: Callable[[], object]
    calls: int = 1
    prepare: Callable[[], None] = lambda: None
    sent: tuple[int, int] | None = None
    options: Mapping[str, Any] | None = None


def measure(state: DistributedState, effort: Effort) -> dict[str, Any] | None:
    """Time a ring, all-reduces over each kind of group, and rounds, on the ranks as they are.

    Collective over the world. All probes are interleaved, so that what disturbs a shared machine meets all alike; each
    sample starts at a barrier and counts for the rank that took longest. The aggregators of all rounds live at the same
    time: a sender needs memory for about 16 copies of its shard, and every rank for two of the model.

    Rank 0 returns the measurements, as data for JSON: what they were made on and with, and ``rows``. A row has
    ``kind``, ``name``, ``ranks``, ``payload_bytes``, ``samples`` and their median ``seconds``, ``gbytes_per_s``
    (payload over time), ``ratio`` to the all-reduce of that payload over the world, and where they are known
    ``bytes_across`` and ``bytes_home``, each ``{"busiest": ..., "total": ...}`` over the ranks. A round has also
    ``options``, ``phases`` and ``hidden`` (seconds on the rank with most), and ``codec_error``.
    """
    with run_on_all_ranks("efforts") as tell:
        if dist.get_world_size() == 1:
            raise ConfigError("the world is this one process, which has nobody to talk to; start 2 or more")
        tell(effort)
    load = os.getloadavg()[0]
    # With a backend of its own between cells, what crosses lies in the host's memory, and NCCL sends inside cells.
    across = transfer_device(state)
    device = across if state.link_backend is None else compute_device(state)
    model = build_model(effort.megabytes)
    tensors, numel = len(list(model.parameters())), sum(parameter.numel() for parameter in model.parameters())
    model = shard(model, state, wrap=(_Block,))
    flat = torch.zeros(numel, dtype=torch.float32, device=across)
    at_home = flat if device == across else flat.to(device)
    messages = ((SMALL_BYTES // 4, SMALL_CALLS), (numel, 1))
    probes = [_ring(state.topology, flat[:count], calls) for count, calls in messages]
    for count, calls in messages:
        probes += _all_reduces(state, flat[:count], at_home[:count], calls)
    probes += _rounds(state, model, flat.nbytes)
    samples = _sample(probes, effort, device)
    own = {
        "host": describe_host() | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"},
        "probes": [_summarize(probe, *taken) for probe, taken in zip(probes, samples, strict=True)],
    }
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered, dst=0)
    if gathered is None:
        return None
    return {
        **_circumstances(state, gathered),
        "load_before": load,
        "effort": asdict(effort),
        "model": {"bytes": flat.nbytes, "parameters": numel, "tensors": tensors},
        "rows": _rows(probes, [rank["probes"] for rank in gathered]),
    }


def build_model(megabytes: float) -> nn.Module:
    """Return an fp32 model, near that many MiB, with a transformer's tensors: four large and eight small in a block."""
    numel = megabytes * 2**20 / 4
    step = 64 if numel > 2**20 else 8
    width = step * max(1, round(math.sqrt(numel / (12 * BLOCKS)) / step))
    blocks = max(1, round(numel / (12 * width * width + 13 * width)))
    return nn.Sequential(*(_Block(width) for _ in range(blocks)))


class _Block(nn.Sequential):
    """The tensors of a transformer block."""

    def __init__(self, width: int) -> None:
        attention = (nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width))
        feed_forward = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        super().__init__(*attention, *feed_forward)


def round_variants(topology: Topology) -> dict[str, dict[str, Any]]:
    """Name the rounds that are worth timing in a federation, with the options of their aggregators."""
    if topology.cells == 1:
        return {}
    variants: dict[str, dict[str, Any]] = {"all-gather": {"form": "all_gather"}, "two-hop": {"form": "two_hop"}}
    if max(topology.replica_counts) > 1:
        variants["rails"] = {"rails": True}
    variants["in place"] = {"atomic": False}
    variants |= {f"codec {codec}": {"codec": codec} for codec in CODECS}
    defaults = {"form": "auto", "rails": False, "codec": "none", "atomic": True}
    return {name: defaults | options for name, options in variants.items()}


def _ring(topology: Topology, values: torch.Tensor, calls: int) -> _Probe:
    """Let every rank send to the next one, and the last to the first."""
    rank, world = dist.get_rank(), topology.world_size
    right, left = (rank + 1) % world, (rank - 1) % world
    arrived = torch.empty_like(values)

    def exchange() -> None:
        for work in start_moves([(arrived, left)], [(values, right)], None, 0):
            work.wait()

    is_across = topology.cell_of(rank) != topology.cell_of(right)
    sent = (values.nbytes, 0) if is_across else (0, values.nbytes)
    return _Probe(
        "ring", name="to the next rank", ranks=f"{world}", payload=values.nbytes, call=exchange, calls=calls, sent=sent
    )


def _all_reduces(state: DistributedState, values: torch.Tensor, at_home: torch.Tensor, calls: int) -> list[_Probe]:
    """Reduce over the world, then over each kind of group; all groups of a kind work at the same time.

    ``at_home`` are the values where a group that has NCCL sends from.
    """
    topology = state.topology
    sizes: dict[str, list[int]] = {}
    for group in topology.groups():
        sizes.setdefault(group.kind, []).append(len(group.ranks))
    handles: dict[str, dist.ProcessGroup | None] = {
        "federation": state.federation,
        "shard": state.hsdp_mesh.get_group(1) if state.hsdp_mesh is not None else None,
        "replica": state.replica_group[0] if state.replica_group else None,
        "federated": state.federated_group[0] if state.federated_group else None,
    }
    probes = [_all_reduce("world", counts=[topology.world_size], values=values, calls=calls, group=dist.group.WORLD)]
    for kind, counts in sizes.items():
        # Without a federation the one cell is the world.
        if max(counts) > 1 and not (topology.cells == 1 and counts == [topology.world_size]):
            handle = handles[kind]
            own = at_home if handle is not None and sends_from_gpu(handle) else values
            probes.append(_all_reduce(kind, counts=counts, values=own, calls=calls, group=handle))
    return probes


def _all_reduce(
    kind: str, counts: Sequence[int], values: torch.Tensor, calls: int, group: dist.ProcessGroup | None
) -> _Probe:
    """Reduce over one group; a rank without a group of this kind takes no part."""

    def reduce() -> None:
        if group is not None:
            dist.all_reduce(values, group=group)

    alike = f"{len(counts)} x {counts[0]}" if len(counts) > 1 else f"{counts[0]}"
    ranks = alike if min(counts) == max(counts) else f"{len(counts)} x {min(counts)}-{max(counts)}"
    return _Probe("all-reduce", name=kind, ranks=ranks, payload=values.nbytes, call=reduce, calls=calls)


def _rounds(state: DistributedState, model: nn.Module, model_bytes: int) -> list[_Probe]:
    """Make an aggregator for each variant, all of one model."""
    # Replicas of a cell stay alike, as in training.
    factor = 1.0 + DRIFT * (1 + state.topology.cell_of(dist.get_rank()) % 8)
    factors = itertools.cycle((factor, 1.0 / factor))

    @torch.no_grad()
    def drift() -> None:
        """Change the cell's parameters a little, as training would: up, then down again."""
        scale = next(factors)
        for parameter in model.parameters():
            local_tensor(parameter).mul_(scale)

    probes = []
    for name, options in round_variants(state.topology).items():
        aggregator = Aggregator(model, state, **options)
        if options["codec"] != "none":
            aggregator.aggregate()  # the first round is exact, and makes the state that the codec's rounds start from
        ranks, call = f"{state.topology.world_size}", aggregator.aggregate
        probes.append(
            _Probe("round", name=name, ranks=ranks, payload=model_bytes, call=call, prepare=drift, options=options)
        )
    return probes


def _sample(
    probes: Sequence[_Probe], effort: Effort, device: torch.device
) -> list[tuple[list[float], list[RoundReport]]]:
    """Time all probes, in turn; return this rank's seconds and reports of each. Collective over the world."""
    samples: list[tuple[list[float], list[RoundReport]]] = [([], []) for _ in probes]
    for turn in range(effort.warmup + effort.repeats):
        for probe, (seconds, reports) in zip(probes, samples, strict=True):
            probe.prepare()
            _synchronize(device)
            barrier()
            start = time.perf_counter()
            for _ in range(probe.calls):
                result = probe.call()
            _synchronize(device)
            elapsed = (time.perf_counter() - start) / probe.calls
            if turn >= effort.warmup:
                seconds.append(elapsed)
                reports += [result] if isinstance(result, RoundReport) else []
    return samples


def _synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU; a CPU's collectives have waited already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summarize(probe: _Probe, seconds: Sequence[float], reports: Sequence[RoundReport]) -> dict[str, Any]:
    """Return a rank's measurements as plain data: samples, bytes sent, median seconds of each phase."""
    summary: dict[str, Any] = {"samples": seconds, "sent": probe.sent}
    if reports:
        last = reports[-1]
        names = dict.fromkeys(name for report in reports for name in report.phases)
        summary["sent"] = (last.bytes_across, last.bytes_home)
        summary["phases"] = {
            name: statistics.median(report.phases.get(name, 0.0) for report in reports) for name in names
        }
        summary["hidden"] = statistics.median(report.hidden for report in reports)
        summary["codec_error"] = last.codec_error
    return summary


def _rows(probes: Sequence[_Probe], summaries: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Put the ranks' summaries together, one row for each probe."""
    rows: list[dict[str, Any]] = []
    for index, probe in enumerate(probes):
        ranks = [rank[index] for rank in summaries]
        samples = [max(seconds) for seconds in zip(*(rank["samples"] for rank in ranks), strict=True)]
        row: dict[str, Any] = {
            "kind": probe.kind,
            "name": probe.name,
            "ranks": probe.ranks,
            "payload_bytes": probe.payload,
            "seconds": statistics.median(samples),
            "samples": samples,
        }
        row["gbytes_per_s"] = probe.payload / row["seconds"] / 1e9
        for at, name in enumerate(("bytes_across", "bytes_home")):
            sent = [rank["sent"][at] for rank in ranks if rank["sent"] is not None]
            row[name] = {"busiest": max(sent), "total": sum(sent)} if sent else None
        if probe.options is not None:
            errors = [rank["codec_error"] for rank in ranks if rank["codec_error"] is not None]
            names = dict.fromkeys(name for rank in ranks for name in rank["phases"])
            row["options"] = dict(probe.options)
            row["phases"] = {name: max(rank["phases"].get(name, 0.0) for rank in ranks) for name in names}
            row["hidden"] = max(rank["hidden"] for rank in ranks)
            row["codec_error"] = max(errors, default=None)
        rows.append(row)
    # All are compared with the all-reduce over the world.
    base = [row for row in rows if row["kind"] == "all-reduce" and row["name"] == "world"]
    worlds = {row["payload_bytes"]: row["seconds"] for row in base}
    for row in rows:
        row["ratio"] = row["seconds"] / worlds[row["payload_bytes"]]
    return rows


def _circumstances(state: DistributedState, gathered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the hosts, the versions and the layout of a measurement, and its date."""
    hosts: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for rank, one in enumerate(gathered):
        hosts.setdefault(tuple(one["host"].items()), []).append(rank)
    topology = state.topology
    versions = {"xffl": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available() and dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "benchmark": "xffl bench",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": [{**dict(host), "ranks": ranks_text(ranks)} for host, ranks in hosts.items()],
        "versions": versions,
        "layout": {
            "world_size": topology.world_size,
            "federated_sizes": list(topology.sizes),
            "replica_size": topology.replica_size,
            "backend": str(state.backend),
            **({} if state.link_backend is None else {"link_backend": str(state.link_backend)}),
        },
    }
