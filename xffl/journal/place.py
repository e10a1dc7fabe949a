"""Where the journal of a run is: a folder that its cells share, or the service of a host.

A place is the text that names it, the path of a folder or ``http://HOST:PORT``. A cell that is not told one finds it by
the address of its lighthouse: beside the file that names the lighthouse, or behind the port of the lighthouse.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from xffl.cluster.lighthouse.address import parse_lighthouse, read_address
from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError
from xffl.journal.folder import JournalFolder
from xffl.journal.records import PATIENCE_S, Journal
from xffl.journal.service import RemoteJournal

__all__ = [
    "JOURNAL_FOLDER_VARIABLE",
    "JOURNAL_VARIABLE",
    "cells_command",
    "derive_journal",
    "find_journal",
    "next_port",
    "open_journal",
    "parse_journal",
    "read_journal_variable",
]

JOURNAL_VARIABLE = "XFFL_JOURNAL"
"""The environment variable that says where a run's journal is"""
JOURNAL_FOLDER_VARIABLE = "XFFL_JOURNAL_FOLDER"
"""The one that says in which folder a service has it, for operators, who do not know the token of the run"""
_URL = "http://"
_BESIDE = ".journal"
_LARGEST_PORT = 65535


def parse_journal(what: str, text: str) -> str:
    """Return a place in its full form: ``http://HOST:PORT``, or the absolute path of a folder.

    :param what: Where the text comes from, for errors.
    :param text: The text.
    :return: The place.
    :raises LaunchError: if it is empty, or an address without a port.
    """
    text = text.strip()
    if not text:
        raise LaunchError(f"{what} is empty; give a folder that all cells share, or http://HOST:PORT of the service")
    if text.startswith(_URL):
        host, port = read_address(what, text)
        return f"{_URL}{host}:{port}"
    return os.path.abspath(os.path.expanduser(text))


def read_journal_variable(environ: Mapping[str, str] = ENVIRON) -> str | None:
    """Return the place that the environment names; ``None`` where it names none.

    :param environ: The environment.
    :return: The place in its full form.
    :raises LaunchError: if it is no place.
    """
    text = environ.get(JOURNAL_VARIABLE, "").strip()
    return parse_journal(JOURNAL_VARIABLE, text) if text else None


def derive_journal(lighthouse: str) -> str:
    """Return where the journal of a run is, unless its cells are told another place.

    :param lighthouse: Where the run's lighthouse is, ``file:PATH`` or ``http://HOST:PORT``.
    :return: The place: a folder beside the file, or the lighthouse's host at the port after that of the lighthouse.
    :raises LaunchError: if the lighthouse has the last port.
    """
    kind, _, path = parse_lighthouse("the lighthouse", lighthouse).partition(":")
    if kind == "file":
        return f"{path}{_BESIDE}"
    host, port = read_address("the lighthouse", lighthouse)
    return f"{_URL}{host}:{next_port(port)}"


def cells_command(lighthouse: str, journal: str | None, environ: Mapping[str, str] = ENVIRON) -> str:
    """Return the command that shows the cells of a run, as a line of a shell.

    :param lighthouse: Where the run's lighthouse is.
    :param journal: Where its journal is, if that is known.
    :param environ: The environment, which may name the folder of a journal behind a service.
    :return: The command, which names the journal where the lighthouse's address does not.
    """
    journal = environ.get(JOURNAL_FOLDER_VARIABLE) or journal
    words = ["xffl", "cells", lighthouse]
    try:
        is_derived = journal is None or journal == derive_journal(lighthouse)
    except LaunchError:
        is_derived = False
    if journal is not None and not is_derived:
        words += ["--journal", journal]
    return shlex.join(words)


def next_port(lighthouse_port: int) -> int:
    """Return the port at which the host of a lighthouse has its journal.

    :param lighthouse_port: The port of the lighthouse.
    :return: The port after it.
    :raises LaunchError: if there is none.
    """
    if lighthouse_port == _LARGEST_PORT:
        raise LaunchError(
            f"the lighthouse has port {lighthouse_port}, and its journal would have the next one; give the lighthouse "
            f"another port, or the journal a place by {JOURNAL_VARIABLE}"
        )
    return lighthouse_port + 1


def find_journal(place: str, token: bytes, patience_s: float | None = None) -> Journal:
    """Open the journal of a run that has begun: a folder that does not exist is none.

    :param place: The place in its full form.
    :param token: The run's token, which the service asks for; empty if the run has none.
    :param patience_s: How long to ask a service; by default a minute.
    :return: The journal.
    :raises LaunchError: if there is no such folder.
    :raises ConfigError: if the folder cannot be used.
    """
    if not place.startswith(_URL) and not Path(place).is_dir():
        raise LaunchError(f"there is no journal {place}")
    return open_journal(place, token, patience_s)


def open_journal(place: str, token: bytes, patience_s: float | None = None) -> Journal:
    """Open the journal at a place; a folder is made if it does not exist, and its file system is tried.

    :param place: The place in its full form.
    :param token: The run's token, which the service asks for; empty if the run has none.
    :param patience_s: How long to ask a service each time; by default a minute.
    :return: The journal. Whether a service answers shows when it is asked.
    :raises ConfigError: if the folder cannot be made or used.
    """
    if place.startswith(_URL):
        return RemoteJournal(place, token, PATIENCE_S if patience_s is None else patience_s)
    return JournalFolder(Path(place))
