"""The token of a run whose jobs meet over a network: who knows it may read and change the model."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xffl.compat.datasets import ENVIRON
from xffl.errors import LaunchError
from xffl.files import create, make_folders, naming_errors, open_regular, read_bytes, read_limited, sync

__all__ = [
    "LEAST_TOKEN",
    "NO_TOKEN",
    "PROOF_KEY",
    "has_token",
    "make_token_file",
    "prove_token",
    "run_token",
    "token_of",
    "warn_without_token",
]

NO_TOKEN = "none"
"""What ``XFFL_TOKEN`` says where a run is to do without a token."""

LEAST_TOKEN = 16
"""Characters of a token, at least."""

_TOKEN_BYTES = 2**16
"""The most bytes of a token's file"""

PROOF_KEY = "xffl/token"
"""Where a cell keeps in its store what :func:`prove_token` makes of its token."""


def token_of(environ: Mapping[str, str] = ENVIRON) -> bytes:
    """Return the run's token: the text of ``XFFL_TOKEN``, or of the file that ``XFFL_TOKEN_FILE`` names.

    It is empty where ``XFFL_TOKEN=none`` says that the run does without; LaunchError where nothing is said.
    """
    if token := environ.get("XFFL_TOKEN", "").strip():
        return b"" if token == NO_TOKEN else _check_token(token, "XFFL_TOKEN")
    if not (name := environ.get("XFFL_TOKEN_FILE", "").strip()):
        raise LaunchError(
            "cells and replica groups give their weights to those that know the run's token, and there is none; set "
            "XFFL_TOKEN, or XFFL_TOKEN_FILE to a file that xffl lighthouse --token-file has made (or, to give them to "
            "anybody, XFFL_TOKEN=none)"
        )
    try:
        with open_regular(Path(name)) as file:  # what is asked and what is read is one file, whoever renames another
            mode = os.fstat(file.fileno()).st_mode
            token = read_limited(file, Path(name), _TOKEN_BYTES).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} cannot be read ({error}); give the file of the token") from error
    if stat.S_IMODE(mode) & 0o077:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} may be read by others; make a new token, and chmod 600 its file")
    if not token:
        raise LaunchError(f"XFFL_TOKEN_FILE {name!r} is empty; remove it, and let xffl lighthouse make another")
    return _check_token(token, f"XFFL_TOKEN_FILE {name!r}")


def _check_token(token: str, source: str) -> bytes:
    """Return a token as bytes; who records one message of a run can try short ones without asking anybody."""
    if len(token) < LEAST_TOKEN:
        raise LaunchError(
            f"{source} has a token of {len(token)} characters, and fewer than {LEAST_TOKEN} can be guessed; make one "
            "with: openssl rand -hex 32"
        )
    try:
        return token.encode()
    except UnicodeEncodeError:  # its text, which the error quotes, is a secret
        raise LaunchError(f"{source} has a token that is not UTF-8 text; make one with: openssl rand -hex 32") from None


def has_token(environ: Mapping[str, str] = ENVIRON) -> bool:
    """Tell whether it is said what the run's token is, or that there is none."""
    return any(environ.get(name, "").strip() for name in ("XFFL_TOKEN", "XFFL_TOKEN_FILE"))


def run_token(environ: Mapping[str, str] = ENVIRON) -> bytes:
    """Return the run's token as :func:`token_of`; nothing where neither variable is set."""
    return token_of(environ) if has_token(environ) else b""


def warn_without_token(token: bytes) -> None:
    """Say on standard error what it means that a run does without a token."""
    if not token:
        print(
            f"xffl: XFFL_TOKEN={NO_TOKEN}: whoever reaches the lighthouse or a host of this run can read and change "
            "its model; see the page Security of the manual",
            file=sys.stderr,
            flush=True,
        )


def prove_token(token: bytes, life: str, nonce: str | None = None) -> str:
    """Return a nonce, by default a new one, and its digest with a cell's life, which takes the token to make."""
    nonce = secrets.token_hex(16) if nonce is None else nonce
    return f"{nonce} {hmac.new(token, f'doctor{nonce}{life}'.encode(), hashlib.sha256).hexdigest()}"


def make_token_file(path: Path) -> None:
    """Write a new token into a file that its owner alone may read; an existing one stays.

    An empty file, which a kill or a full disk may have left, is replaced.
    """
    if os.path.lexists(path) and not _is_empty(path):
        token_of({"XFFL_TOKEN_FILE": str(path)})
        return
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        make_folders(path.parent)
        with create(new, is_secret=True) as file, naming_errors(path):
            file.write(f"{os.urandom(32).hex()}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if not _take_name(new, path):  # another process was faster
            token_of({"XFFL_TOKEN_FILE": str(path)})
        sync(path.parent)
    except OSError as error:
        raise LaunchError(f"the token's file {path} cannot be written ({error}); give another") from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _is_empty(path: Path) -> bool:
    """Tell whether a file has nothing in it but white space."""
    try:
        return not read_bytes(path, _TOKEN_BYTES).strip()
    except OSError:  # token_of says what is wrong with it
        return False


def _take_name(new: Path, path: Path) -> bool:
    """Give a finished file its name, and tell whether that was free, or that of an empty file."""
    try:
        os.link(new, path)  # refused where there is one, in one step
    except FileExistsError:
        if not _is_empty(path):
            return False
        new.replace(path)
    except OSError:  # a file system without links
        new.replace(path)
    return True
