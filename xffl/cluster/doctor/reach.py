"""Whether the hosts find each other: names, ports, clocks, versions."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, in_words
from xffl.cluster.network import SLURM_PORTS, ephemeral_ports, resolve

__all__ = ["Listeners", "compare_clocks", "compare_names", "compare_ports", "compare_versions", "peers_of", "try_hosts"]

CLOCK_WARNING_S = 0.1
"""From here on the order of events in different hosts' logs is in doubt."""
CLOCK_ERROR_S = 5.0
"""From here on the newest of several files is not the last one written, and soon munge and ssh refuse each other."""

_ALL_PAIRS = 64
"""Hosts up to which each one tries every other."""

_SEND_S = 5.0
_FATAL = ("python", "xffl", "xffl source", "torch")


class Listeners:
    """Listen on this host at ports like those that xffl uses, and answer who is there."""

    def __init__(self, token: str) -> None:
        """Take a free port of the range for SLURM, and one that Linux hands out.

        :param token: What to answer, so that nobody takes another host for this one.
        """
        self._token = token.encode()
        self._sockets = [found for found in (_listen_in(SLURM_PORTS), socket.create_server(("", 0))) if found]
        self.ports = [int(listener.getsockname()[1]) for listener in self._sockets]
        for listener in self._sockets:
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                return
            with connection, suppress(OSError):  # a peer that has gone again is no reason to stop
                connection.settimeout(_SEND_S)
                connection.sendall(self._token)

    def close(self) -> None:
        """Listen no more."""
        for listener in self._sockets:
            listener.close()


def _listen_in(ports: tuple[int, int]) -> socket.socket | None:
    first, last = ports
    start = time.monotonic_ns() % (last - first)  # another job's doctor shall not try the same ports
    for step in range(200):
        with suppress(OSError):  # taken, or not for this user
            return socket.create_server(("", first + (start + step) % (last - first + 1)))
    return None


def peers_of(node: int, nodes: Sequence[int]) -> list[int]:
    """Return the hosts that a host tries to reach: all others, in large jobs those at distances 1, 2, 4, ...

    :param node: Number of the host.
    :param nodes: Numbers of all hosts.
    :return: Their numbers.
    """
    if len(nodes) <= _ALL_PAIRS:
        return [other for other in nodes if other != node]
    at, distance, found = nodes.index(node), 1, []
    while distance < len(nodes):
        found.append(nodes[(at + distance) % len(nodes)])
        distance *= 2
    return found


def try_hosts(others: Mapping[str, Mapping[str, Any]], timeout_s: float) -> dict[str, Any]:
    """Resolve other hosts' names and connect to their ports.

    :param others: By number of the host: ``name``, ``address``, ``ports``, ``token``.
    :param timeout_s: How long one connection may take.
    :return: ``names``: number to addresses; ``failures``: lists of number, port and reason; ``tried``: connections.
    """
    attempts = [(number, host, port) for number, host in others.items() for port in host["ports"]]
    with ThreadPoolExecutor(16) as pool:
        names = dict(zip(others, pool.map(lambda host: resolve(host["name"]), others.values()), strict=True))
        reasons = list(
            pool.map(lambda item: _try_port(item[1]["address"], item[2], item[1]["token"], timeout_s), attempts)
        )
    failures = [
        [number, port, reason]
        for (number, _, port), reason in zip(attempts, reasons, strict=True)
        if reason is not None
    ]
    return {"names": names, "failures": failures, "tried": len(attempts)}


def _try_port(address: str | None, port: int, token: str, timeout_s: float) -> str | None:
    """Return why another host's listener is not reached, ``None`` where it is."""
    if address is None:
        return "it has no address"
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            heard = connection.recv(1024)
    except TimeoutError:
        return "no answer: packets are dropped"
    except OSError as error:
        return error.strerror or str(error)
    return None if heard == token.encode() else "another program answers"


def compare_ports(hosts: Mapping[int, Mapping[str, Any]], answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Tell which hosts do not reach which.

    :param hosts: By number: ``name``, ``address``, ``addresses``, ``ports``.
    :param answers: By number, what :func:`try_hosts` found there.
    :return: Findings on ports.
    """
    findings = []
    tried = sum(answer["tried"] for answer in answers.values())
    first, last = ephemeral_ports()
    ranges = f"ports {SLURM_PORTS[0]}-{SLURM_PORTS[1]} and {first}-{last}"
    for number, answer in answers.items():
        by_reason: dict[str, list[str]] = {}
        for other, port, reason in answer["failures"]:
            peer = hosts[int(other)]
            by_reason.setdefault(reason, []).append(f"{peer['name']} ({peer['address']}:{port})")
        for reason, peers in by_reason.items():
            text = f"cannot connect to {in_words(peers, 4)}: {reason}"
            advice = f"open {ranges} between the compute nodes, or name the interface that joins them with XFFL_IFNAME"
            findings.append(Finding("ports", ERROR, text, advice, hosts[number]["name"]))
    if not findings:
        findings.append(Finding("ports", OK, f"{tried} connections between {len(hosts)} hosts, in {ranges}"))
    return findings


def compare_names(hosts: Mapping[int, Mapping[str, Any]], answers: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Tell whose names do not resolve where.

    :param hosts: By number: ``name``, ``addresses``.
    :param answers: By number, what :func:`try_hosts` found there.
    :return: Findings on names.
    """
    if len({host["name"] for host in hosts.values()}) < len(hosts):
        text = "several nodes have the same name: they are one machine, or the names are not set"
        return [Finding("names", OK, text)]
    findings = []
    for number, answer in answers.items():
        unknown = [hosts[int(other)]["name"] for other, found in answer["names"].items() if not found]
        wrong = [
            f"{hosts[int(other)]['name']} is {found[0]}, none of its {', '.join(hosts[int(other)]['addresses'])}"
            for other, found in answer["names"].items()
            if found and not set(found) & set(hosts[int(other)]["addresses"])
        ]
        told = [f"{in_words(unknown)} not found"] if unknown else []
        told += [in_words(wrong, 3)] if wrong else []
        if told:
            advice = (
                "add the hosts to /etc/hosts or DNS; until then set XFFL_IFNAME, and MASTER_ADDR (or "
                "XFFL_CONTROL_IFNAME under mpirun) to an address"
            )
            findings.append(Finding("names", WARNING, "; ".join(told), advice, hosts[number]["name"]))
    return findings or [Finding("names", OK, f"the names of {len(hosts)} hosts resolve on each other")]


def compare_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Judge the clocks of hosts against that of rank 0's host.

    :param offsets: By host, seconds that its clock is ahead and by how many that may be wrong.
    :return: A finding for each clock that is off, else one for all.
    """
    findings = []
    for host, (ahead, doubt) in offsets.items():
        sure = abs(ahead) - doubt
        if sure <= CLOCK_WARNING_S:
            continue
        text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's host (give or take {doubt:.3f} s)"
        status = ERROR if sure > CLOCK_ERROR_S else WARNING
        findings.append(Finding("clock", status, text, "let chrony or ntpd set the clock of this host", host))
    if findings or not offsets:
        return findings
    most = max(abs(ahead) for ahead, _ in offsets.values())
    return [Finding("clock", OK, f"{len(offsets) + 1} hosts differ by {1000 * most:.1f} ms at most")]


def compare_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Tell in which packages the hosts differ.

    :param versions: By host, package to version.
    :return: A finding for each package that differs, else one for all.
    """
    names = dict.fromkeys(name for found in versions.values() for name in found)
    findings = []
    for name in names:
        where: dict[str, list[str]] = {}
        for host, found in versions.items():
            where.setdefault(found.get(name) or "not installed", []).append(host)
        if len(where) > 1:
            told = "; ".join(f"{version} on {in_words(hosts, 3)}" for version, hosts in where.items())
            status = ERROR if name in _FATAL else WARNING
            advice = "use the same environment on all hosts: a shared virtual environment, or one container image"
            findings.append(Finding("versions", status, f"{name} differs: {told}", advice))
    if not findings:
        findings = [Finding("versions", OK, f"{len(names)} packages are the same on {len(versions)} hosts")]
    return findings
