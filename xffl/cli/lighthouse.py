"""``xffl lighthouse``: the server where jobs find each other, and beside it the journal of an elastic run."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer, number
from xffl.cli.main import command_parser
from xffl.cluster import run_token
from xffl.cluster.lighthouse import address as lighthouse_address
from xffl.errors import ConfigError
from xffl.extras import optional_import

if TYPE_CHECKING:
    from xffl.journal.folder import JournalFolder

__all__ = ["build_parser", "run"]

_EXAMPLES = """\
Start it once, inside the job or the allocation, before the replica groups:

  xffl lighthouse --bind 127.0.0.1:29510 --token-file ~/.xffl-token &
  export XFFL_LIGHTHOUSE=127.0.0.1:29510 XFFL_TOKEN_FILE=~/.xffl-token
  XFFL_ISLAND=0/2 xffl exec --processes 2 train.py &
  XFFL_ISLAND=1/2 xffl exec --processes 2 train.py

For the cells of an elastic run that share no folder, with the run's journal:

  xffl lighthouse --bind 10.0.0.1:29510 --token-file ~/.xffl-token --journal

It has no authentication, and its page (http://HOST:PORT) can kill a group: bind it to the loopback interface, or to a
network that only the job's hosts reach. The journal answers only those that know the token.
"""
_JOURNALS = "~/.xffl/journal"
_TICK_MS = 20
"""How often the lighthouse looks whether a cell is lost for which others wait; a look takes some microseconds."""


def build_parser() -> ArgumentParser:
    """Return the parser of the options."""
    parser = command_parser(
        "Run the server where cells and replica groups find each other (torchft's lighthouse), until it is stopped.",
        _EXAMPLES,
    )
    parser.add_argument("--bind", type=str, default="127.0.0.1:29510", metavar="HOST:PORT", help="address to listen at")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N", help="number of groups that must be there")
    silence = "seconds without a heartbeat after which a group counts as lost"
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0, metavar="S", help=silence)
    join = "seconds to wait for groups that are alive but have not joined"
    parser.add_argument("--join-timeout", type=float, default=10.0, metavar="S", help=join)
    token = "write a new token of the run there, unless the file has one"
    parser.add_argument("--token-file", type=str, metavar="PATH", help=token)
    journal = f"serve the journal of an elastic run, too, from this folder; by default one of the token in {_JOURNALS}"
    parser.add_argument("--journal", type=str, nargs="?", const="", metavar="DIR", help=journal)
    port = "port of the journal; by default the one after that of the lighthouse, where cells look for it"
    parser.add_argument("--journal-port", type=int, metavar="PORT", help=port)
    recover = "begin the journal anew after it was lost: cells go on from the newest model that one of them holds"
    parser.add_argument("--recover", action="store_true", help=recover)
    return parser


def run(options: Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    replicas, times = integer("--min-replicas", options.min_replicas), {}
    for name in ("heartbeat_timeout", "join_timeout"):
        seconds = number(f"--{name.replace('_', '-')}", options[name], 0.1, below=1e6, hint="in seconds")
        times[f"{name}_ms"] = round(1000 * seconds)
    if options.journal_port is not None and options.journal is None:
        raise ConfigError(f"--journal-port {options.journal_port} is for --journal; give that as well, or leave it out")
    if options.recover and options.journal is None:
        raise ConfigError("--recover is for --journal; give that as well, or leave it out")
    if options.token_file is not None:
        run_token.make_token_file(Path(options.token_file))
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    host, port = lighthouse_address.read_address("--bind", options.bind)
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    with optional_import("elastic", "a lighthouse needs torchft, which has wheels for x86-64 Linux"):
        from torchft.coordination import LighthouseServer
    with ExitStack() as served:
        journal = None if options.journal is None else _serve_journal(options, served, host=host, port=port)
        try:
            server = LighthouseServer(bind=f"{host}:{port}", min_replicas=replicas, quorum_tick_ms=_TICK_MS, **times)
        except RuntimeError as error:
            raise ConfigError(f"--bind {options.bind!r} cannot be bound ({error}); give another HOST:PORT") from error
        served.callback(server.shutdown)
        print(f"lighthouse at {options.bind}", flush=True)
        if journal is not None:
            print(f"journal at {journal}", flush=True)
        stopped.wait()
    return 0


def _serve_journal(options: Namespace, served: ExitStack, *, host: str, port: int) -> str:
    """Serve the journal of the run whose token is known here, and tell where it is."""
    from xffl.journal.folder import JournalFolder, hold_folder
    from xffl.journal.place import next_port, parse_journal
    from xffl.journal.service import JournalService

    token = run_token.token_of({"XFFL_TOKEN_FILE": options.token_file} if options.token_file else os.environ)
    run_token.warn_without_token(token)
    at = next_port(port) if options.journal_port is None else integer("--journal-port", options.journal_port, 1, 65535)
    folder = parse_journal("--journal", options.journal or f"{_JOURNALS}/{_name_journal(token, port)}")
    if folder.startswith("http"):
        raise ConfigError(f"--journal is {options.journal!r}; give the folder that this host is to keep it in")
    journal = JournalFolder(Path(folder))
    if options.recover:
        # Before it is served: a cell that has a model and reads an empty journal ends, as with a wrong folder.
        with hold_folder(journal.path):
            _recover(journal)
    service = JournalService(journal, token, host.strip("[]"), at)
    served.callback(service.close)
    return f"{service.url}, in {folder}"


def _recover(journal: JournalFolder) -> None:
    """Begin a journal that takes the place of a lost one; it may have begun so before."""
    from xffl.journal.records import RecoverRecord
    from xffl.journal.who_continues import recover_record

    standing = journal.put(recover_record())
    if not isinstance(standing, RecoverRecord):
        raise ConfigError(
            f"the journal in {journal.path} has records of run {standing.run}, and --recover is for one that is lost; "
            "leave it out to go on with these, or give an empty folder"
        )


def _name_journal(token: bytes, port: int) -> str:
    """Return the name of a run's folder: a run is known by its token, without one by the port of its lighthouse."""
    if not token:
        return f"port_{port}"
    return hmac.new(token, b"the name of the run's journal", hashlib.sha256).hexdigest()[:16]
