"""Programs that run a line on another host, with their own standard input and output: what the ranks there start by.

ssh does so anywhere; in a job of LSF ``blaunch`` does, and in one of Flux ``flux run``, which need no login there.
``pbsdsh`` of PBS is none of these programs: it passes no standard input on. A new batch system needs a row here, and
one in :mod:`xffl.cluster.batch` for its hosts.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xffl.cluster.slurm.allocation import Host

__all__ = ["SSH", "HostShell", "shell_of"]


@dataclass(frozen=True, kw_only=True)
class HostShell:
    """A program that runs a line on a host."""

    name: str  # in messages
    variable: str  # environment variable with another program, or other options
    default: str  # the program and its options
    place: Callable[[Host], list[str]]  # the words that name the host, behind the program; the line comes last
    trial: str  # a command that shows whether it works, with the host in place of {}
    logs_in: bool = False  # whether it needs a login on the host, with keys

    def command(self, host: Host, line: str, environ: Mapping[str, str]) -> list[str]:
        """Return the words that run a line of the shell on a host."""
        return [*self._program(environ), *self.place(host), line]

    def is_there(self, environ: Mapping[str, str]) -> bool:
        """Tell whether the program is on the path."""
        return shutil.which(self._program(environ)[0], path=environ.get("PATH")) is not None

    def _program(self, environ: Mapping[str, str]) -> list[str]:
        return shlex.split(environ.get(self.variable) or self.default)


SSH = HostShell(
    name="ssh",
    variable="XFFL_SSH",
    # A shared connection would stay in the background, and end all of a host's jobs together.
    default="ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 "
    "-o ServerAliveCountMax=4 -o ControlMaster=no -o ControlPath=none",
    place=lambda host: ["--", host.address or host.name],
    trial="ssh {} true",
    logs_in=True,
)
"""What reaches hosts that are given, and those of batch systems that have nothing of their own."""

_OF_BATCH_SYSTEMS = {
    "lsf": HostShell(
        name="blaunch",
        variable="XFFL_BLAUNCH",
        default="blaunch",
        place=lambda host: [host.name],
        trial="blaunch {} true",
    ),
    # Ranks share the cores and GPUs of the host among themselves, as after ssh.
    "flux": HostShell(
        name="flux run",
        variable="XFFL_FLUX_RUN",
        default="flux run --nodes=1 --ntasks=1 --exclusive --unbuffered -o cpu-affinity=off -o gpu-affinity=off",
        place=lambda host: [f"--requires=host:{host.name}", "sh", "-c"],
        trial="flux run --nodes=1 --requires=host:{} true",
    ),
}


def shell_of(kind: str, way: str, environ: Mapping[str, str]) -> HostShell:
    """Return what reaches the hosts of a job: what its batch system has, unless there is none, or ssh is asked for.

    :param kind: The kind of the allocation (:class:`~xffl.cluster.slurm.allocation.Allocation`).
    :param way: The option ``--launcher``.
    :param environ: Environment variables; one with another program for ssh asks for that, too.
    :return: The program.
    """
    shell = _OF_BATCH_SYSTEMS.get(kind)
    if shell is None or way == "ssh" or environ.get(SSH.variable) or not shell.is_there(environ):
        return SSH
    return shell
