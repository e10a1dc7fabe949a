"""The hosts of a list, looked at over ssh: those that answer become the ranks of a small job of the doctor's own."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import xffl
from xffl.cluster.doctor.findings import ERROR, OK, Finding, Report, merge
from xffl.cluster.doctor.lead import patience_s
from xffl.cluster.launch.ssh import ssh_command
from xffl.cluster.slurm.allocation import Host

__all__ = ["MARK", "examine_hosts"]

MARK = "xffl-doctor "
"""What the line of a report begins with, among all that ranks print."""

_PROBE_S = 40.0
_PROBE = (
    "import json, os, platform, sys; told = json.loads(sys.stdin.readline()); sys.path.append(told['path']); "
    "import xffl; print(json.dumps({'xffl': xffl.__version__, 'python': platform.python_version(), "
    "'folder': os.path.isdir(told['folder'])}))"
)


def examine_hosts(
    hosts: Sequence[Host], rank_command: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> Report:
    """Reach every host, start one rank for each slot on those that answer, and collect their reports.

    :param hosts: The hosts.
    :param rank_command: Script of a rank, and its arguments.
    :param environ: Environment of this process, with ``XFFL_SSH`` for another command than ``ssh``.
    :param timeout_s: How long one wait for another host may take there.
    :return: What the hosts told, and which of them could not be asked.
    """
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        probed = list(pool.map(lambda host: _probe(host, environ), hosts))
    found = [finding for finding in probed if finding is not None]
    well = [host for host, finding in zip(hosts, probed, strict=True) if finding is None]
    names = tuple(host.name for host in hosts)
    if not well:
        return Report(merge(found, names), names, sum(host.slots for host in hosts))
    found.insert(0, Finding("ssh", OK, f"{len(well)} of {len(hosts)} hosts answer without a question"))
    reports, error = _run(well, rank_command, environ, _PROBE_S + patience_s(timeout_s))
    findings = [finding for report in reports for finding in report.findings]
    if not reports:
        findings.append(Finding("meeting", ERROR, f"the ranks told nothing: {error}", "try xffl exec --hosts"))
    seen = tuple(dict.fromkeys(name for report in reports for name in report.hosts))
    return Report((*merge(found, names), *dict.fromkeys(findings)), seen or names, sum(host.slots for host in well))


def _probe(host: Host, environ: Mapping[str, str]) -> Finding | None:
    """Return what keeps a host from taking ranks, ``None`` where nothing does."""
    python = environ.get("XFFL_PYTHON") or sys.executable
    command = [*ssh_command(host, environ)[:-1], f"exec {shlex.quote(python)} -c {shlex.quote(_PROBE)}"]
    told = {"path": str(Path(xffl.__file__).parents[1]), "folder": os.getcwd()}
    address = host.address or host.name
    advice = f"try ssh -o BatchMode=yes {address} {python} --version; XFFL_SSH and XFFL_PYTHON name others"
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(told) + "\n",
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = "no answer" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return Finding("ssh", ERROR, f"cannot be reached: {reason}", advice, host.name)
    answers = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode != 0 or not answers:
        said = [line.strip() for line in ran.stderr.splitlines() if line.strip()] or [f"exit code {ran.returncode}"]
        return Finding("ssh", ERROR, f"cannot be used: {said[-1][:200]}", advice, host.name)
    seen: dict[str, Any] = json.loads(answers[-1])
    own = {"xffl": xffl.__version__, "python": platform.python_version()}
    differing = [f"{name} {seen[name]} (here {version})" for name, version in own.items() if seen[name] != version]
    if differing:
        advice = "use the same environment on all hosts: a shared virtual environment, or one container image"
        return Finding("versions", ERROR, f"{', '.join(differing)}", advice, host.name)
    if not seen["folder"]:
        advice = "start from a folder that all hosts share"
        return Finding("shared folder", ERROR, f"{os.getcwd()}, the current one, is not there", advice, host.name)
    return None


def _run(
    hosts: Sequence[Host], command: Sequence[str], environ: Mapping[str, str], limit_s: float
) -> tuple[list[Report], str]:
    """Run the ranks by ``xffl exec``, and read their reports; with none, why."""
    lines = [f"{host.name} slots={host.slots}" + (f" address={host.address}" if host.address else "") for host in hosts]
    # The cells are for the pairs only: hosts that do not answer would not fit their sizes.
    full = {name: text for name, text in environ.items() if name not in ("XFFL_FEDERATED", "XFFL_HSDP")}
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        words = [sys.executable, "-m", "xffl", "exec", "--launcher", "ssh", "--hosts", f"@{file.name}", *command]
        try:
            ran = subprocess.run(
                words, env=full, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return [], f"nothing within {limit_s:g} s"
    reports = []
    for line in ran.stdout.splitlines():
        if line.startswith(MARK):
            told = json.loads(line.removeprefix(MARK))
            findings = tuple(Finding(**finding) for finding in told["findings"])
            alone = len(told["hosts"]) == 1
            placed = (replace(f, host=f.host or told["hosts"][0]) if alone else f for f in findings)
            reports.append(Report(tuple(placed), tuple(told["hosts"]), told["ranks"]))
    said = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    return sorted(reports, key=lambda report: -len(report.hosts)), said[-1] if said else f"exit code {ran.returncode}"
