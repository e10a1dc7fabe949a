"""How a rank joins the store of another process, and finds out soon if it is not there."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeAlias

from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from xffl.cluster.network import LOOPBACK
from xffl.cluster.reaching import await_listener
from xffl.compat.sockets import cut_connection, open_sockets, sockets_opened_since
from xffl.distributed.startup.stores import arrive
from xffl.errors import LaunchError

__all__ = ["agents_store", "join_store"]

_ANSWER_S = 20.0
"""How long what takes connections may take to answer as a store does; a store's own thread answers at once."""
_CUT_S = 5.0
"""How long a connection that was cut may take to end its thread, which writes torch's warnings first."""


def agents_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the part of the store of torchrun's agent that is for this world alone; collective over its ranks."""
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # The agent's store outlives a world and serves the next one, too: each takes a name of its own.
    return PrefixStore(f"xffl_{arrive(store, world_size)}", store)


_Answer: TypeAlias = "SimpleQueue[TCPStore | RuntimeError]"


def join_store(
    host: str,
    port: int,
    world_size: int | None,
    timeout_s: float,
    *,
    is_local: bool,
    is_patient: bool = False,
    waiting: str = "",
) -> TCPStore:
    """Connect to the store of rank 0, which may be started later; see :func:`~xffl.cluster.reaching.await_listener`.

    Raises LaunchError if it does not come, or something else is at its port.
    """
    host = LOOPBACK if is_local else host
    begun = time.monotonic()
    taken_since: float | None = None
    while True:
        left_s = max(1.0, begun + timeout_s - time.monotonic())
        await_listener(host, port, left_s, is_patient=is_patient, waiting=waiting)
        taken_since = taken_since or time.monotonic()
        answer_s = min(left_s, _ANSWER_S)
        answers: _Answer = SimpleQueue()
        others = open_sockets()
        # In a thread: torch waits without end for what takes a connection and says nothing.
        words = (answers, host, port, world_size, answer_s)
        connecting = threading.Thread(target=_connect, args=words, name="xffl-store", daemon=True)
        connecting.start()
        try:
            answer = answers.get(timeout=answer_s)
        except Empty:
            answer = RuntimeError("it takes connections, and says nothing")
            for descriptor in sockets_opened_since(others):
                cut_connection(descriptor, port)  # so that the thread ends
            # A thread that is still in torch's code when the interpreter ends aborts the process.
            connecting.join(_CUT_S)
        if isinstance(answer, TCPStore):
            answer.set_timeout(timedelta(seconds=timeout_s))
            return answer
        if time.monotonic() - taken_since > min(_ANSWER_S, timeout_s) - 0.5:
            raise LaunchError(
                f"what listens at {host}:{port} is not the store of rank 0 ({answer}); another program has the port: "
                "set MASTER_PORT to a port that is free on rank 0's host, the same on all ranks"
            )


def _connect(answers: _Answer, host: str, port: int, world_size: int | None, answer_s: float) -> None:
    timeout = timedelta(seconds=answer_s)
    try:
        answers.put(TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False))
    except (RuntimeError, ValueError) as error:
        answers.put(RuntimeError(" ".join(str(error).split())[:200]))
