"""Time rounds over a slow link between two cells against a raw TCP transfer of the same bytes over the same link.

    sudo python benchmarks/wan.py [--megabytes 50] [--rate-mbit 200] [--delay-ms 10] [--repeats 7] [--out FILE]

Two cells of two hosts, each a network namespace (tests/cluster/net), are joined by a link with a rate and a delay.
Eight ranks, two replicas of two shards in each cell, stay alive over all contenders, which are interleaved, so that the
noise of a shared machine meets all alike; a second world with one replica in each cell shares the link. The link's
interface counters are read before and after each, when it is quiet. What counts are the ratios to the raw transfer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "tests" / "cluster" / "net" / "cells.sh"
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
DEFAULT_CONTENDERS = ("tcp", "round", "one_replica", "every_replica", "all_reduce", "hsdp_step")
ONE_REPLICA = "one_replica"
"""The contender ``round`` in a world with one replica in each cell."""

DEADLINE_S = 180.0
"""Seconds after which a contender is given up."""


class Link:
    """The slow link, seen by the counters of its two ends."""

    def __init__(self, prefix: str, delay_ms: float) -> None:
        self._switches = (f"{prefix}-sa", f"{prefix}-sb")
        # Longer than TCP waits before it acknowledges or sends again.
        self._quiet_s = 0.25 + 4e-3 * delay_ms

    def counters(self) -> tuple[int, ...]:
        """Return the bytes sent at each end, then those received at each end."""
        ends = []
        for switch in self._switches:
            command = ["ip", "-s", "-j", "-n", switch, "link", "show", "wan"]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            ends.append(json.loads(told)[0]["stats64"])
        return tuple(end[way]["bytes"] for way in ("tx", "rx") for end in ends)

    def settled(self) -> tuple[int, ...]:
        """Return the counters once nothing has crossed for a while."""
        deadline = time.monotonic() + DEADLINE_S
        last, since = self.counters(), time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = self.counters()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._quiet_s:
                return now
        raise TimeoutError(f"the link has not been quiet for {self._quiet_s:g} s in {DEADLINE_S:g} s")


@contextmanager
def cells(options: argparse.Namespace) -> Iterator[str]:
    """Bring the two cells and their link up, yield the prefix of their names, and take them down whatever happens."""
    prefix = f"wan{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="xffl-wan-") as folder:
        environ = {
            **os.environ,
            "NET_DIR": str(Path(folder) / "net"),
            "NET_PREFIX": prefix,
            "NET_RATE_MBIT": str(options.rate_mbit),
            "NET_DELAY_MS": str(options.delay_ms),
            "NET_QUEUE_MS": str(options.queue_ms),
            "NET_CONGESTION": options.congestion or "",
            "NET_PYTHON": sys.executable,
        }
        try:
            subprocess.run([CELLS, "up"], env=environ, check=True)
            print(f"cells {prefix} are up", flush=True)
            yield prefix
        finally:
            # In a session of its own, so that a second Ctrl-C does not stop it.
            subprocess.run([CELLS, "down"], env=environ, check=True, start_new_session=True)


class World:
    """Ranks that do what they are told, all at once."""

    def __init__(self, prefix: str, nodes: Sequence[str], contenders: tuple[str, ...], layers: int) -> None:
        from wan_rank import Seat, be_rank

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        hosts = tuple(f"{prefix}-{node}" for node in nodes)
        addresses = tuple(f"10.77.{'ab'.index(node[0]) + 1}.{node[1:]}" for node in nodes)
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(len(nodes)):
            seat = Seat(rank, hosts, addresses, layers, contenders)
            ours, theirs = context.Pipe()
            process = context.Process(target=be_rank, args=(theirs, seat), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def size(self) -> int:
        return len(self._pipes)

    def answers(self) -> list[Any]:
        """Return what all ranks answer, by rank; raise the first failure."""
        deadline = time.monotonic() + DEADLINE_S
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(set(range(len(self._pipes))) - found.keys())
                raise TimeoutError(f"ranks {late} of {len(self._pipes)} have not answered in {DEADLINE_S:g} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    found[rank], failure = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join()
                    failure = f"it died with exit code {self._processes[rank].exitcode}"
                if failure is not None:
                    raise RuntimeError(f"rank {rank} of {len(self._pipes)} failed: {failure}")
        return [found[rank] for rank in range(len(self._pipes))]

    def ask(self, *told: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(told)
        return self.answers()

    def end(self) -> None:
        """Let all ranks leave together."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(DEADLINE_S)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@dataclass
class Sample:
    """One measurement of a contender.

    :param seconds: From the first rank's start to the last rank's end.
    :param sent: Bytes that the interfaces sent onto the link, a to b and b to a.
    :param lost: Bytes that the link's queues dropped of them.
    :param told: What each rank has to tell.
    """

    seconds: float
    sent: tuple[int, int]
    lost: tuple[int, int]
    told: list[dict[str, Any]]


def measure(world: World, link: Link, name: str, repeat: int) -> Sample:
    """Run a contender once, on a link that is quiet, and wait until it is quiet again."""
    world.ask("prepare", name, repeat)
    before = link.counters()
    spans = world.ask("run", name)
    after = link.settled()
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    a_out, b_out, a_in, b_in = (new - old for new, old in zip(after, before, strict=True))
    told: list[dict[str, Any]] = world.ask("tell", name)
    check_equal(name, told)
    return Sample(seconds, (a_out, b_out), (a_out - b_in, b_out - a_in), told)


def check_equal(name: str, told: Sequence[dict[str, Any]]) -> None:
    """Raise where a round has left ranks that hold the same shard with different values."""
    found: dict[int, set[int]] = {}
    for rank in told:
        if "checksum" in rank:
            found.setdefault(rank["shard"], set()).add(rank["checksum"])
    if any(len(checksums) > 1 for checksums in found.values()):
        raise RuntimeError(f"after {name} ranks hold different values of a shard: checksums {found}")


def run(options: argparse.Namespace, layers: int) -> dict[str, list[Sample]]:
    """Measure all contenders, one after the other, as often as asked."""
    names: tuple[str, ...] = options.contenders
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    worlds: dict[str, World] = {}
    with cells(options) as prefix:
        link = Link(prefix, options.delay_ms)
        try:
            large = World(prefix, ("a1", "a1", "a2", "a2", "b1", "b1", "b2", "b2"), own(names), layers)
            worlds |= dict.fromkeys(own(names), large)
            if ONE_REPLICA in names:
                worlds[ONE_REPLICA] = World(prefix, ("a1", "a2", "b1", "b2"), ("round",), layers)
            for world in dict.fromkeys(worlds.values()):
                world.answers()
            print(
                f"{', '.join(str(world.size) for world in dict.fromkeys(worlds.values()))} ranks are ready", flush=True
            )
            link.settled()
            for repeat in range(options.repeats + 1):
                for name in names:
                    sample = measure(worlds[name], link, "round" if name == ONE_REPLICA else name, repeat)
                    if repeat:  # the first pass warms connections and memory up
                        samples[name].append(sample)
            for world in dict.fromkeys(worlds.values()):
                world.end()
        finally:
            for world in dict.fromkeys(worlds.values()):
                world.kill()
    return samples


def own(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name != ONE_REPLICA)


def summarize(options: argparse.Namespace, samples: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """Reduce samples to medians and their ratios to the raw transfer; of the two directions the worse one counts.

    ``rate_ratio`` compares with the time that the link's rate and delay allow for the bytes that the contender sent.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in samples.items():
        seconds = statistics.median(sample.seconds for sample in runs)
        sent = [statistics.median(sample.sent[way] for sample in runs) for way in range(2)]
        rows[name] = {"seconds": seconds, "bytes": sent}
    raw = rows["tcp"]
    for row in rows.values():
        row["rate_ratio"] = row["seconds"] / (8e-6 * max(row["bytes"]) / options.rate_mbit + 1e-3 * options.delay_ms)
        row["time_ratio"] = row["seconds"] / raw["seconds"]
        row["bytes_ratio"] = max(mine / its for mine, its in zip(row["bytes"], raw["bytes"], strict=True))
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'':14s} {'seconds':>8s} {'x tcp':>6s} {'x rate':>6s} {'MB a>b':>8s} {'MB b>a':>8s} {'x tcp':>6s}")
    for name, row in rows.items():
        times = f"{row['seconds']:8.3f} {row['time_ratio']:6.3f} {row['rate_ratio']:6.3f}"
        there, back = (sent / 1e6 for sent in row["bytes"])
        print(f"{name:14s} {times} {there:8.2f} {back:8.2f} {row['bytes_ratio']:6.3f}")


def record(
    options: argparse.Namespace, layers: int, samples: dict[str, list[Sample]], rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return all that was measured, and on what."""
    import torch
    from wan_rank import LAYER_BYTES, REPLICA_SIZE

    import xffl

    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "benchmark": "wan",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "xffl": xffl.__version__,
        },
        "link": {
            "rate_mbit": options.rate_mbit,
            "delay_ms": options.delay_ms,
            "queue_ms": options.queue_ms,
            "congestion_control": options.congestion or congestion,
        },
        "cells": [4, 4],
        "hsdp": REPLICA_SIZE,
        "model_bytes": layers * LAYER_BYTES,
        "tensors": 2 * layers,
        "repeats": options.repeats,
        "rows": rows,
        "samples": {name: [vars(sample) for sample in runs] for name, runs in samples.items()},
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from emulated import above_zero, add_link_options
    from wan_rank import CONTENDERS

    known = (*CONTENDERS, ONE_REPLICA)

    def names(text: str) -> tuple[str, ...]:
        asked = tuple(dict.fromkeys(("tcp", *text.split(","))))
        if wrong := [name for name in asked if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)} unknown; choose from {', '.join(known)}")
        return asked

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=above_zero, default=50.0, help="the model's size at least, in 10^6 bytes")
    add_link_options(parser)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--contenders", type=names, default=DEFAULT_CONTENDERS, help=f"of {', '.join(known)}")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} is below 1; give 1 or more")
    return options


def stop(number: int, frame: object) -> NoReturn:
    """Leave by an exception, so that everything is taken down."""
    raise SystemExit(128 + number)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores with the link
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that hosts in namespaces have no names
    sys.path.append(str(ROOT))  # for tests.cluster.net, which is no part of the package
    from wan_rank import LAYER_BYTES

    options = parse()
    signal.signal(signal.SIGTERM, stop)
    layers = -int(-1e6 * options.megabytes // LAYER_BYTES)
    samples = run(options, layers)
    rows = summarize(options, samples)
    show(rows)
    if options.out:
        options.out.write_text(json.dumps(record(options, layers, samples, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
