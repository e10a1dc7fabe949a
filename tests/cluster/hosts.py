"""Two hosts with a slow link between them, and a third where users log in: network namespaces of this machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ADDRESSES", "RSH", "Hosts", "slurm_over", "spread", "two_hosts_up"]

HERE = Path(__file__).parent
CELLS = HERE / "net" / "cells.sh"
MINISLURM = HERE / "slurm" / "minislurm.sh"
RSH = HERE / "net" / "rsh"
ADDRESSES = {"a1": "10.77.1.1", "b1": "10.77.2.1", "head": "10.77.1.253"}
NETS = {"a": "10.77.1.0/24", "b": "10.77.2.0/24"}
ENDS = {"a": "10.77.0.1", "b": "10.77.0.2"}
"""The net of each side, and the address of its end of the link."""
DEADLINE_S = 60


@dataclass(frozen=True)
class Hosts:
    """The hosts, while they are up."""

    prefix: str
    environ: Mapping[str, str]
    """What ``cells.sh`` and ``rsh`` need; commands on the hosts inherit it from the caller's environment."""

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command that runs another one on a host, under its name."""
        return [str(CELLS), "exec", host, *command]

    def crossed(self) -> tuple[int, int]:
        """Return the bytes that each end has sent onto the link between the hosts."""
        sent = []
        for switch in (f"{self.prefix}-sa", f"{self.prefix}-sb"):
            command = ["ip", "-s", "-j", "-n", switch, "link", "show", "wan"]
            told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
            sent.append(int(json.loads(told)[0]["stats64"]["tx"]["bytes"]))
        return sent[0], sent[1]

    def join_sides(self, is_up: bool) -> None:
        """Take the link between the sides down, or up again; who sends to the other side is told so meanwhile."""
        self._ip("sa", "link", "set", "wan", "up" if is_up else "down")
        if is_up:  # the routes of a link that is down are gone
            self._ip("sa", "route", "replace", NETS["b"], "via", ENDS["b"])

    def pass_on(self, side: str, is_passed: bool) -> None:
        """Drop without a word what a side sends to the other one, or pass it on again."""
        other = "a" if side == "b" else "b"
        where = ["via", ENDS[other]] if is_passed else []
        self._ip(f"s{side}", "route", "replace", *([] if is_passed else ["blackhole"]), NETS[other], *where)

    def plug(self, host: str, is_in: bool) -> None:
        """Take a host off its switch, or put it back."""
        port = f"port{host[1:]}" if host != "head" else host
        self._ip("sa" if host == "head" else f"s{host[0]}", "link", "set", port, "up" if is_in else "down")

    def limit_rate(self, mbit: float | None) -> None:
        """Let the link between the sides have a lower rate than its own, or its own again."""
        limit = ["del", "dev", "wan", "root"]
        if mbit is not None:
            limit = ["replace", "dev", "wan", "root", "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "400ms"]
        for switch in ("sa", "sb"):
            command = ["ip", "netns", "exec", f"{self.prefix}-{switch}", "tc", "qdisc", *limit]
            subprocess.run(command, env=self.environ, check=True, timeout=DEADLINE_S)

    def _ip(self, switch: str, *words: str) -> None:
        command = ["ip", "-n", f"{self.prefix}-{switch}", *words]
        subprocess.run(command, env=self.environ, check=True, timeout=DEADLINE_S)

    def processes(self, *hosts: str) -> list[int]:
        """Return the ids of the processes that run on hosts."""
        found: list[int] = []
        for host in hosts:
            command = ["ip", "netns", "pids", f"{self.prefix}-{host}"]
            told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
            found.extend(map(int, told.split()))
        return found


@contextmanager
def two_hosts_up(environ: Mapping[str, str], folder: Path, nodes: int = 1, **more: str) -> Iterator[Hosts]:
    """Bring up the hosts a1, b1 and head, and take them down, with all that runs there, whatever happens.

    :param environ: Environment for the commands that do so.
    :param folder: Where their state may lie; it must not exist.
    :param nodes: Hosts on each side: a1, a2 and so on.
    :param more: What else ``cells.sh`` is to know, such as ``NET_RATE_MBIT``.
    """
    prefix = f"two{secrets.token_hex(3)}"
    path = os.pathsep.join((environ["PATH"], "/usr/sbin"))
    own = {"PATH": path, "NET_DIR": str(folder), "NET_PREFIX": prefix, "NET_NODES": str(nodes), "NET_HEAD": "1", **more}
    try:
        subprocess.run([str(CELLS), "up"], env={**environ, **own}, check=True, timeout=DEADLINE_S)
        yield Hosts(prefix, {**environ, **own})
    finally:
        subprocess.run([str(CELLS), "down"], env={**environ, **own}, check=False, timeout=DEADLINE_S)


@contextmanager
def slurm_over(hosts: Hosts, folder: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Bring up a SLURM of the nodes a1 and b1 whose controller is on the head, and give the environment there.

    :param hosts: The hosts.
    :param folder: Where its state may lie, a short path: munge's socket has a limit of 108 characters.
    :param nodes: Its nodes on each side: a1, a2 and so on.
    """
    path = os.pathsep.join((hosts.environ["PATH"], "/usr/sbin"))
    environ = {**hosts.environ, "PATH": path, "MS_DIR": str(folder), "MS_CELLS": f"a:{nodes} b:{nodes}", "MS_NET": "1"}
    try:
        subprocess.run([str(MINISLURM), "up"], env=environ, check=True, timeout=DEADLINE_S)
        yield {**hosts.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([str(MINISLURM), "down"], env=environ, check=False, timeout=DEADLINE_S)


def spread(ranks: Sequence[int]) -> str:
    """Return ranks by host as ``mpirun`` takes them: ``a1:4,b1:2``."""
    return ",".join(f"{host}:{count}" for host, count in zip(("a1", "b1"), ranks, strict=True))
