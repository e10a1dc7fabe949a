"""``xffl lighthouse``: the place where replica groups say that they live, and learn which others do."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from xffl.checks import integer
from xffl.cli.formatter import HelpFormatter
from xffl.cluster.replica_groups import make_token_file, read_address
from xffl.errors import ConfigError
from xffl.extras import optional_import

__all__ = ["build_parser", "run"]

_EPILOG = """\
Start it once, inside the job or the allocation, before the replica groups:

  xffl lighthouse --bind 127.0.0.1:29510 --token-file ~/.xffl-token &
  export XFFL_LIGHTHOUSE=127.0.0.1:29510 XFFL_TOKEN_FILE=~/.xffl-token
  XFFL_ISLAND=0/2 xffl exec --processes 2 train.py &
  XFFL_ISLAND=1/2 xffl exec --processes 2 train.py

It has no login, and its page (http://HOST:PORT) can end a group: bind it to the loopback, or to a network that only the
job's hosts reach.
"""


def build_parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        description="Let replica groups find each other (torchft's lighthouse), until it is stopped.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--bind", type=str, default="127.0.0.1:29510", metavar="HOST:PORT", help="where to listen")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N", help="groups without which none goes on")
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=5.0, metavar="S", help="silence after which a group counts as lost"
    )
    parser.add_argument(
        "--join-timeout", type=float, default=10.0, metavar="S", help="how long groups that live are waited for"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH", help="make the run's token there, if it has none yet"
    )
    return parser


def run(options: Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    :param options: What :func:`build_parser` parses.
    :return: Exit code 0.
    :raises XfflError: if an option cannot be meant, the address is taken, or torchft is missing.
    """
    replicas = integer("--min-replicas", options.min_replicas)
    times = {}
    for name in ("heartbeat_timeout", "join_timeout"):
        seconds = getattr(options, name)
        if not 0.1 <= seconds < 1e6:
            raise ConfigError(f"--{name.replace('_', '-')} {seconds} is no time to wait; give seconds, 0.1 or more")
        times[f"{name}_ms"] = round(1000 * seconds)
    if options.token_file is not None:
        make_token_file(options.token_file)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server = start(options.bind, min_replicas=replicas, quorum_tick_ms=100, **times)
    print(f"lighthouse at {options.bind}", flush=True)
    stopped.wait()
    server.shutdown()
    return 0


def start(bind: str, **options: Any) -> Any:
    r"""Start torchft's lighthouse in this process.

    :param bind: Where to listen, ``HOST:PORT``.
    :param \**options: Of torchft's ``LighthouseServer``.
    :return: What stops it.
    """
    host, port = read_address("--bind", bind)
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    with optional_import("elastic", "a lighthouse needs torchft, which has wheels for x86-64 Linux"):
        from torchft.coordination import LighthouseServer
    try:
        return LighthouseServer(bind=f"{host}:{port}", **options)
    except RuntimeError as error:
        raise ConfigError(f"--bind {bind!r} cannot be listened at ({error}); give another HOST:PORT") from error
