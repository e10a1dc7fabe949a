"""Variables of a job that is one of several replica groups: its number, the lighthouse, and the run's token."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from xffl.cluster.network import control_address
from xffl.errors import LaunchError

__all__ = ["bind_address", "lighthouse_of", "make_token_file", "read_address", "replica_group_of", "token_of"]

_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):(\d{1,5})/?")
_GROUP = re.compile(r"(\d+)/(\d+)")


def lighthouse_of(environ: Mapping[str, str] | None = None) -> str:
    """Return the lighthouse's address, ``http://HOST:PORT``, as ``XFFL_LIGHTHOUSE`` or torchft's own variable says."""
    environ = os.environ if environ is None else environ
    for name in ("XFFL_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        text = environ.get(name, "").strip()
        if text:
            host, port = read_address(name, text)
            return f"http://{host}:{port}"
    raise LaunchError(
        "fault tolerance is asked for, but XFFL_LIGHTHOUSE is not set; start xffl lighthouse once for all replica "
        "groups, and give each job the address that it prints"
    )


def read_address(what: str, text: str) -> tuple[str, int]:
    """Return the host and port of an address."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found[2]) > 65535:
        raise LaunchError(f"{what} is {text!r}; give HOST:PORT, such as 127.0.0.1:29510")
    return found[1], int(found[2])


def replica_group_of(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return which replica group this job is, and how many there are at most, as ``XFFL_ISLAND=1/4`` says.

    Returns its number from 0, and the most groups; ``None`` where nothing is said.
    """
    environ = os.environ if environ is None else environ
    text = environ.get("XFFL_ISLAND", "").strip()
    if not text:
        return None
    found = _GROUP.fullmatch(text)
    if found is None or not int(found[1]) < int(found[2]):
        raise LaunchError(
            f"XFFL_ISLAND is {text!r}; give this replica group's number, from 0, and the most groups, such as 0/2"
        )
    return int(found[1]), int(found[2])


def token_of(environ: Mapping[str, str] | None = None) -> bytes:
    """Return the run's token: the text of ``XFFL_TOKEN``, or of the file that ``XFFL_TOKEN_FILE`` names."""
    environ = os.environ if environ is None else environ
    token = environ.get("XFFL_TOKEN", "").strip()
    if token:
        return token.encode()
    name = environ.get("XFFL_TOKEN_FILE", "").strip()
    if not name:
        raise LaunchError(
            "replica groups give their weights to those that know the run's token, and there is none; set XFFL_TOKEN, "
            "or XFFL_TOKEN_FILE to a file that xffl lighthouse --token-file has made"
        )
    try:
        mode = os.stat(name).st_mode
        token = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} cannot be read ({error}); give the file of the token") from error
    if stat.S_IMODE(mode) & 0o077:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} may be read by others; make a new token, and chmod 600 its file")
    if not token:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} is empty; remove it, and let xffl lighthouse make another")
    return token.encode()


def make_token_file(path: Path) -> None:
    """Write a new token into a file that its owner alone may read; one that is there already stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        token_of({"XFFL_TOKEN_FILE": str(path)})
    except OSError as error:
        raise LaunchError(f"the token's file {path} cannot be written ({error}); give another") from error


def bind_address(lighthouse: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the address of this host at which other replica groups may reach it, and nobody on other interfaces."""
    named = control_address(environ)
    if named is not None:
        return named
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(read_address("the lighthouse", lighthouse))  # nothing is sent: the kernel chooses the way
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(
            f"there is no way from {socket.gethostname()} to the lighthouse {lighthouse} ({error}); set "
            "XFFL_LIGHTHOUSE to an address that this host reaches"
        ) from error
    return address
