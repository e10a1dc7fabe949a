"""gloo in groups that reach beyond this host, in a world whose own ranks are all on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from xffl.cluster.network import GLOO_VARIABLE, LOCAL_VARIABLE, is_loopback, release_gloo

__all__ = ["gloo_beyond_this_host"]


@contextmanager
def gloo_beyond_this_host(store: str, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let gloo listen while the block runs where ranks at other hosts reach it, unless their store is on loopback."""
    kept = {name: environ[name] for name in (GLOO_VARIABLE, LOCAL_VARIABLE) if name in environ}
    try:
        if not is_loopback(store):
            release_gloo(environ)
        yield
    finally:
        environ.update(kept)
