"""A lighthouse that only the loopback interface of its host reaches, brought to cells on other hosts by ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.jobs import LIGHTHOUSE, Jobs
from tests.chaos.storm import Job, wait_for_all, watch
from tests.cluster.conftest import require
from tests.cluster.hosts import Hosts, two_hosts_up
from tests.cluster.test_exec_ssh import MINISSH

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")

PORT = 29510
HERE, THERE = f"127.0.0.1:{PORT}", f"127.0.0.1:{PORT}:127.0.0.1:{PORT}"
JOURNAL = f"127.0.0.1:{PORT + 1}:127.0.0.1:{PORT + 1}"
PLACES = {LIGHTHOUSE: "a1", 0: "a1", 1: "b1", 2: "a2"}


@contextmanager
def sshd_on(hosts: Hosts, host: str, address: str, folder: Path) -> Iterator[Path]:
    """Run an sshd on a host, and give the configuration by which ssh reaches it from all of them."""
    environ = {**hosts.environ, "SS_DIR": str(folder), "SS_HOSTS": f"{address}:22022"}
    try:
        subprocess.run(hosts.command(host, str(MINISSH), "up"), env=environ, check=True, timeout=60)
        yield folder / "config"
    finally:
        subprocess.run([str(MINISSH), "down"], env=environ, check=False, timeout=60)


@contextmanager
def tunnel(hosts: Hosts, host: str, config: Path, *words: str) -> Iterator[None]:
    """Keep an ssh of a host open that forwards ports, and runs nothing."""
    command = hosts.command(host, "ssh", "-F", str(config), "-N", "-o", "ExitOnForwardFailure=yes", *words)
    process = subprocess.Popen(command, env=hosts.environ, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_a_lighthouse_at_loopback_is_brought_by_ssh(
    slow_link: None, base_environ: dict[str, str], tmp_path: Path
) -> None:
    """Cell 1 fetches it by ``ssh -L``, to cell 2 it is brought by ``ssh -R``; XFFL_IFNAME says where cells are."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    for program in ("sshd", "ssh", "ssh-keygen"):
        require(shutil.which(program, path=path), f"{program} (openssh-server)")
    with ExitStack() as stack:
        enter = stack.enter_context
        hosts = enter(two_hosts_up(base_environ, tmp_path / "net", nodes=2))
        ways = [("a1", "10.77.1.1", "b1", "-L"), ("a2", "10.77.1.2", "a1", "-R")]
        for host, address, client, way in ways:
            config = enter(sshd_on(hosts, host, address, tmp_path / f"ssh-{host}"))
            enter(tunnel(hosts, client, config, way, THERE, way, JOURNAL, address))
        federation = Jobs(
            Job(cells=3, ranks=1, every=4, step_s=0.05),
            tmp_path,
            address=HERE,
            wrap=lambda place, command: hosts.command(PLACES[place], *command),
            environ={**hosts.environ, "XFFL_IFNAME": "eth0"},
        )
        stack.callback(federation.stop)
        wait_for_all([federation], 60)
        watch([federation], time.time() + 1)
        told = federation.told()
    rounds = {one.number: one for one in told[0]}
    both = [one for lines in told.values() for one in lines if one.number in rounds]
    assert all((one.digest, one.cells) == (rounds[one.number].digest, rounds[one.number].cells) for one in both)
    assert max(one.number for one in told[2] if all(one.weights)) > 2, (tmp_path / "output.log").read_text()
