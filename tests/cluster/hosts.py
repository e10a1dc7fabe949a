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

    def processes(self, *hosts: str) -> list[int]:
        """Return the ids of the processes that run on hosts."""
        found: list[int] = []
        for host in hosts:
            command = ["ip", "netns", "pids", f"{self.prefix}-{host}"]
            told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
            found.extend(map(int, told.split()))
        return found


@contextmanager
def two_hosts_up(environ: Mapping[str, str], folder: Path) -> Iterator[Hosts]:
    """Bring up the hosts a1, b1 and head, and take them down, with all that runs there, whatever happens.

    :param environ: Environment for the commands that do so.
    :param folder: Where their state may lie; it must not exist.
    """
    prefix = f"two{secrets.token_hex(3)}"
    own = {"NET_DIR": str(folder), "NET_PREFIX": prefix, "NET_NODES": "1", "NET_HEAD": "1"}
    try:
        subprocess.run([str(CELLS), "up"], env={**environ, **own}, check=True, timeout=DEADLINE_S)
        yield Hosts(prefix, {**environ, **own})
    finally:
        subprocess.run([str(CELLS), "down"], env={**environ, **own}, check=False, timeout=DEADLINE_S)


@contextmanager
def slurm_over(hosts: Hosts, folder: Path) -> Iterator[dict[str, str]]:
    """Bring up a SLURM of the nodes a1 and b1 whose controller is on the head, and give the environment there.

    :param hosts: The hosts.
    :param folder: Where its state may lie, a short path: munge's socket has a limit of 108 characters.
    """
    path = os.pathsep.join((hosts.environ["PATH"], "/usr/sbin"))
    environ = {**hosts.environ, "PATH": path, "MS_DIR": str(folder), "MS_CELLS": "a:1 b:1", "MS_NET": "1"}
    try:
        subprocess.run([str(MINISLURM), "up"], env=environ, check=True, timeout=DEADLINE_S)
        yield {**hosts.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([str(MINISLURM), "down"], env=environ, check=False, timeout=DEADLINE_S)


def spread(ranks: Sequence[int]) -> str:
    """Return ranks by host as ``mpirun`` takes them: ``a1:4,b1:2``."""
    return ",".join(f"{host}:{count}" for host, count in zip(("a1", "b1"), ranks, strict=True))
