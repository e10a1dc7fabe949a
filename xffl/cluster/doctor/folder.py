"""Whether a folder is fit for a run: seen by all hosts, atomic renames, space. No locks are tried, as none are used."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding

__all__ = ["Folder", "compare_folders", "find_file_system", "visit"]

_LEAST_FREE = 2**30
_SLOW_S = 2.0
_TURNS = 40
_PAGE = 4096
_MOUNTS = Path("/proc/self/mounts")


class Folder:
    """The side of rank 0's host: it makes a folder of its own inside, and removes it again."""

    def __init__(self, path: Path, token: str) -> None:
        """Only note the names; nothing is written yet.

        :param path: The folder that is to be fit.
        :param token: What makes the folder inside it this job's own.
        """
        self.path, self.token = path, token
        self.own = path / f".xffl-doctor-{token}"

    def open(self) -> str | None:
        """Make the folder and a file that others are to see; return what went wrong, ``None`` where nothing did."""
        try:
            self.own.mkdir()
            _replace(self.own / "seen", self.token)
            _replace(self.own / "turning", "a" * _PAGE)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def turn(self) -> dict[str, Any]:
        """Replace a file many times while others read it, and look at this host's own file."""
        letters = "ab" * (_TURNS // 2)
        for letter in letters:
            _replace(self.own / "turning", letter * _PAGE)
            time.sleep(0.002)
        return visit({"folder": str(self.path), "token": self.token, "node": 0, "patience_s": 1.0})

    def close(self, nodes: Mapping[int, str], patience_s: float) -> list[str]:
        """Look for the files of the other hosts and remove everything.

        :param nodes: Names of the hosts that wrote a file, by number.
        :param patience_s: How long to wait for a file, since a file system may show it late.
        :return: Names of the hosts whose files are not seen here.
        """
        deadline = time.monotonic() + patience_s
        absent = dict(nodes)
        while absent:
            for number in list(absent):
                if _read(self.own / f"node-{number}") == self.token:
                    del absent[number]
            if time.monotonic() > deadline:
                break
            if absent:
                time.sleep(0.05)
        shutil.rmtree(self.own, ignore_errors=True)
        return list(absent.values())


def visit(question: Mapping[str, Any]) -> dict[str, Any]:
    """Look from one host at what rank 0 has written, and write something.

    :param question: ``folder``, ``token``, ``node`` (number of this host), ``patience_s``.
    :return: ``seen_s`` (``None`` where it is not seen), ``torn`` (reads that saw half a file), ``error``, ``free``
        bytes, ``kind`` of file system.
    """
    folder = Path(question["folder"])
    own = folder / f".xffl-doctor-{question['token']}"
    started = time.monotonic()
    while _read(own / "seen") != question["token"]:
        if time.monotonic() - started > question["patience_s"]:
            missing = f"{folder} is not there" if not folder.is_dir() else "what rank 0's host writes is not seen"
            return {"seen_s": None, "torn": 0, "error": missing, "free": 0, "kind": find_file_system(folder)}
        time.sleep(0.02)
    seen_s, torn, error = time.monotonic() - started, 0, None
    for _ in range(_TURNS):
        text = _read(own / "turning")
        torn += text is not None and (len(text) != _PAGE or len(set(text)) != 1)
        time.sleep(0.001)
    try:
        _replace(own / f"node-{question['node']}", question["token"])
    except OSError as wrong:
        error = f"cannot write there: {wrong.strerror}"
    free = shutil.disk_usage(folder).free
    return {"seen_s": seen_s, "torn": torn, "error": error, "free": free, "kind": find_file_system(folder)}


def compare_folders(
    path: Path, names: Mapping[int, str], answers: Mapping[int, Mapping[str, Any]], unseen: list[str]
) -> list[Finding]:
    """Judge what the hosts saw.

    :param path: The folder.
    :param names: Names of the hosts, by number.
    :param answers: By number, what :func:`visit` told there.
    :param unseen: Hosts whose files rank 0's host does not see.
    :return: A finding for each host where something is wrong, else one for all.
    """
    findings = []
    advice = "give a folder of a file system that all nodes mount (--shared DIR), and keep runs there"
    for number, answer in answers.items():
        name = names[number]
        if answer["seen_s"] is None:
            text = f"{path}: {answer['error']} ({answer['kind']})"
            findings.append(Finding("shared folder", ERROR, text, advice, name))
        elif answer["error"] is not None:
            findings.append(Finding("shared folder", ERROR, f"{path}: {answer['error']}", advice, name))
        elif answer["torn"]:
            text = f"{path}: {answer['torn']} of {_TURNS} reads saw half a file while it was replaced"
            hint = "renames are not atomic there: keep checkpoints on another file system"
            findings.append(Finding("shared folder", ERROR, text, hint, name))
        elif answer["seen_s"] > _SLOW_S:
            text = f"{path}: a new file is seen after {answer['seen_s']:.1f} s"
            hint = "the file system caches names for long: expect checkpoints to be found late"
            findings.append(Finding("shared folder", WARNING, text, hint, name))
        elif answer["free"] < _LEAST_FREE:
            text = f"{path}: {answer['free'] / 2**20:.0f} MiB free"
            findings.append(Finding("shared folder", WARNING, text, "make room; a checkpoint may not fit", name))
    if unseen and not findings:
        text = f"{path}: rank 0's host does not see what {', '.join(unseen)} wrote"
        findings.append(Finding("shared folder", ERROR, text, advice))
    if findings or not answers:
        return findings
    free = min(answer["free"] for answer in answers.values()) / 2**30
    kinds = "/".join(sorted({answer["kind"] for answer in answers.values()}))
    where = "" if len(answers) == 1 else f", seen by {len(answers)} hosts"
    return [Finding("shared folder", OK, f"{path} ({kinds}){where}, renames are atomic, {free:.1f} GiB free")]


def find_file_system(path: Path) -> str:
    """Return the kind of file system that a path lies on, as Linux calls it; ``unknown`` where it does not tell."""
    try:
        rows = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return "unknown"
    full = os.path.realpath(path)
    kinds = [(len(mount), kind) for mount, kind in rows if full == mount or full.startswith(mount.rstrip("/") + "/")]
    return max(kinds)[1] if kinds else "unknown"


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
