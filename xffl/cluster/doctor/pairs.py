"""torch, looked at in processes of their own with a deadline: its backends, and an all-reduce of two cells at a time.

What such a process runs is :mod:`xffl.cli.doctor_pair`; this side only starts it, talks with it by lines, and ends it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, in_words

__all__ = ["TorchProcess", "check_torch", "child_environ", "compare_pairs"]

_SLOW_IMPORT_S = 30.0
_SHARED_BY_NCCL = (2, 30)
"""The first NCCL that takes several ranks on one GPU."""


class TorchProcess:
    """One process with torch, on this host."""

    def __init__(self, program: Path, environ: Mapping[str, str], timeout_s: float) -> None:
        """Start it; importing torch goes on beside what this process does next.

        :param program: The script to run.
        :param environ: Its environment.
        :param timeout_s: How long one all-reduce may take there.
        """
        # Threads of two ranks on one core would only slow the import down.
        full = {**environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(timeout_s)],
            env=full,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())
            del self._errors[:-20]

    def hear(self, deadline: float) -> dict[str, Any]:
        """Return the next thing that it tells.

        :param deadline: Until when to wait, by ``time.monotonic``.
        :return: What it told, or ``error`` with what ended it.
        """
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            return {"error": "it did not answer in time"}
        if line is None:
            self._process.wait()
            told = [text for text in self._errors if text.strip()]
            code = self._process.returncode
            return {"error": told[-1].strip()[:200] if told else f"it ended with code {code}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send it a line, which is lost where it has ended.

        :param message: What to send.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            return

    def end(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self._process.wait()


def check_torch(told: Mapping[str, Any], gpus: int, environ: Mapping[str, str]) -> Finding:
    """Judge what a process said about its torch.

    :param told: What :meth:`TorchProcess.hear` gave first.
    :param gpus: How many GPUs the vendor's command lists.
    :param environ: Environment to read: ``CUDA_VISIBLE_DEVICES`` that is set to nothing asks for none.
    :return: The finding.
    """
    if "error" in told:
        advice = "run python -c 'import torch' there; reinstall torch for this machine (docs: Install)"
        return Finding("torch", ERROR, f"torch cannot be loaded: {told['error']}", advice)
    backends = ", ".join(told["backends"]) or "none"
    text = f"{told['torch']}, backends {backends}, {told['gpus']} GPUs"
    if "gloo" not in told["backends"]:
        return Finding("torch", ERROR, f"{text}: gloo is missing", "install a build of torch with gloo")
    if gpus and not told["gpus"] and environ.get("CUDA_VISIBLE_DEVICES") != "":
        advice = "install the build of torch for this driver (CUDA or ROCm), and look at CUDA_VISIBLE_DEVICES"
        return Finding("torch", ERROR, f"{text}, but the node has {gpus}", advice)
    if told["gpus"] and "nccl" not in told["backends"]:
        return Finding("torch", WARNING, f"{text}: nccl is missing", "install a build of torch with NCCL or RCCL")
    if told["gpus"]:
        text += f", NCCL {'.'.join(map(str, told['nccl']))}; ranks that share a GPU need backend='gloo'"
        if tuple(told["nccl"]) >= _SHARED_BY_NCCL:
            text += " or NCCL_MULTI_RANK_GPU_ENABLE=1"
        if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            advice = "leave CUDA_DEVICE_MAX_CONNECTIONS out, or set 8 or more (docs: Network)"
            text += "; CUDA_DEVICE_MAX_CONNECTIONS=1: rounds behind local steps are refused"
            return Finding("torch", WARNING, text, advice)
    if told["import_s"] > _SLOW_IMPORT_S:
        advice = "put the environment on a faster file system, or into a container image"
        return Finding("torch", WARNING, f"{text}; it took {told['import_s']:.0f} s to load", advice)
    return Finding("torch", OK, text)


def compare_pairs(
    units: Sequence[str],
    results: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]],
    untried: Sequence[tuple[int, int]] = (),
) -> list[Finding]:
    """Judge the all-reduces between pairs.

    :param units: Names of what was paired: cells, hosts, or two processes of one host.
    :param results: By pair of numbers, what each of the two told: ``error``, or ``seconds`` and ``mib``, or nothing.
    :param untried: Pairs for which there was no time.
    :return: Findings: pairs that failed, one line for all of a unit; those for which time did not suffice; the others.
    """
    findings, rates = [], []
    failed: dict[tuple[int, int], str] = {}
    for pair, halves in results.items():
        # Who told nothing at all explains what the other one tells.
        wrong = [str(half["error"]) for half in sorted(halves, key=lambda half: "turn" in half) if "error" in half]
        if wrong:
            failed[pair] = wrong[0]
        else:
            rates.append((max(half["mib"] / half["seconds"] for half in halves), units[pair[0]], units[pair[1]]))
    advice = (
        "set XFFL_IFNAME to the interface that joins the hosts (docs: Network); see the lines on interface, names and "
        "ports"
    )
    for text in _by_unit(units, failed):
        findings.append(Finding("all-reduce", ERROR, text, advice))
    if untried:
        text = f"no time for {len(untried)} of {len(untried) + len(results)} pairs: "
        text += in_words([f"{units[low]} and {units[high]}" for low, high in untried], 4)
        findings.append(Finding("all-reduce", WARNING, text, "mend the lines above and look again, or --timeout less"))
    if rates:
        slow, fast = min(rates), max(rates)
        text = f"{len(rates)} {'pair' if len(rates) == 1 else 'pairs'} of {len(units)} over gloo, {slow[0]:.0f} MiB/s"
        if len(rates) > 1:
            text += f" ({slow[1]} and {slow[2]}) to {fast[0]:.0f} MiB/s ({fast[1]} and {fast[2]})"
        findings.append(Finding("all-reduce", OK, text))
    return findings


def _by_unit(units: Sequence[str], failed: Mapping[tuple[int, int], str]) -> list[str]:
    """Write each failed pair once, under the unit with the most of them: most likely that one is at fault."""
    texts, left = [], dict(failed)
    while left:
        counts = Counter(number for pair in left for number in pair)
        worst = min(counts, key=lambda number: (-counts[number], number))
        mine = {pair: reason for pair, reason in left.items() if worst in pair}
        others = sorted(low + high - worst for low, high in mine)
        texts.append(
            f"{units[worst]} and {in_words([units[other] for other in others], 4)}: {next(iter(mine.values()))}"
        )
        left = {pair: reason for pair, reason in left.items() if pair not in mine}
    return texts


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that joins no other than its pair.

    :param environ: Environment of this process.
    :return: The same, with gloo bound to the interface that ``XFFL_IFNAME`` names.
    """
    chosen = environ.get("XFFL_IFNAME")
    full = {**os.environ, **environ}
    return {**full, "GLOO_SOCKET_IFNAME": chosen} if chosen else full
