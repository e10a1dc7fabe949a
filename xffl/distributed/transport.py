"""How a replica group that comes back gets the state of one that lives: rank to rank, over a connection of its own.

What is sent are tensors and plain values: a JSON text, then the tensors' bytes, so reading them runs no code. Both
sides prove that they know the run's token, which itself is not sent. The bytes are neither encrypted nor signed:
whoever can change what travels between the hosts can change the weights.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from xffl.distributed.collectives import bytes_of
from xffl.distributed.plain import from_plain, to_plain
from xffl.errors import CheckpointError, LaunchError, XfflError

__all__ = ["ShardTransport"]

NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST_TEXT = 1 << 30
"""Bytes of the text that says what follows; a longer one is none."""
START_S = 5.0
"""How long a group waits for another one that it is to give its state to. One that was lost meanwhile never comes."""
TRANSFER_S = 60.0
"""How long a connection that has proven itself may stand still."""
MOST_LINKS = 64
"""Connections at a time; more are closed."""
WHOLE = b"\1"
"""Sent when all was sent before anybody stepped on, and when all has arrived."""
SHAKE_S = 10.0
"""How long a stranger may take to prove that it is none."""
DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


class _Offer:
    """One state that some ranks of other groups are to get."""

    def __init__(self, step: int, text: bytes, tensors: list[torch.Tensor], takers: int) -> None:
        self.step, self.text, self.tensors, self.left = step, text, tensors, takers
        self.moved = time.monotonic()
        """When something was last sent"""


class ShardTransport:
    """Give this rank's part of the state to ranks at the same place of other groups, and take theirs.

    It has the methods of torchft's ``CheckpointTransport``. :meth:`send_checkpoint` returns when all have what they
    came for, so nothing is copied; nobody steps meanwhile.

    :param address: The address of this host to listen at; the kernel chooses the port.
    :param token: The run's token.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._is_closed = False
        self._free = threading.Semaphore(MOST_LINKS)
        self._listener = socket.create_server((address, 0), backlog=128)
        self._thread = threading.Thread(target=self._listen, name="xffl-state", daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return where this rank listens, ``HOST:PORT``."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Let the ranks of other groups fetch this rank's state, and wait until they have it.

        :param dst_ranks: Groups that are behind.
        :param step: The step that the state is of.
        :param state_dict: Tensors and plain values, nested.
        :param timeout: How long to wait at most; only :data:`START_S` while nobody fetches anything.
        """
        tensors: dict[str, torch.Tensor] = {}
        plain = to_plain(state_dict, "state", tensors)
        table = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
        text = json.dumps({"step": step, "plain": plain, "tensors": table}).encode()
        offer = _Offer(step, text, list(tensors.values()), len(dst_ranks))
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            self._offer = offer
            self._changed.notify_all()
            while offer.left and not self._is_closed:
                limit = min(deadline, offer.moved + START_S) - time.monotonic()
                if limit <= 0:
                    break
                self._changed.wait(limit)
            self._offer = None

    def disallow_checkpoint(self) -> None:
        """Return; nothing is given any more once :meth:`send_checkpoint` has returned."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of a rank at this rank's place in another group.

        :param src_rank: The group.
        :param metadata: Where its rank listens.
        :param step: The step that the state must be of.
        :param timeout: How long to wait at most.
        :return: The state; its tensors lie on the CPU.
        :raises LaunchError: if the other side does not know the token.
        :raises CheckpointError: if what it gives cannot be read.
        """
        host, _, port = metadata.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout.total_seconds()) as link:
                theirs, mine = _read(link, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
                asked = metadata.encode() + struct.pack("!q", step)
                link.sendall(mine + struct.pack("!q", step) + self._proof(b"taker", theirs, mine, asked))
                if not hmac.compare_digest(_read(link, PROOF_BYTES), self._proof(b"giver", theirs, mine, asked)):
                    raise LaunchError(
                        f"{metadata} does not know the run's token, or knows another one; give all replica groups the "
                        "same (XFFL_TOKEN, XFFL_TOKEN_FILE)"
                    )
                (length,) = struct.unpack("!Q", _read(link, 8))
                if length > LONGEST_TEXT:
                    raise CheckpointError(f"{metadata} announces {length} bytes of text; nothing was read")
                told = json.loads(_read(link, length))
                tensors = {name: _read_tensor(link, dtype, shape) for name, dtype, shape in told["tensors"]}
                state = from_plain(told["plain"], tensors)
                if _read(link, 1) != WHOLE:
                    raise ValueError("it does not end as it should")
                link.sendall(WHOLE)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, XfflError):
                raise
            raise CheckpointError(
                f"the state of replica group {src_rank} at {metadata} could not be read: {type(error).__name__}: "
                f"{error}; it is asked for again in the next step"
            ) from error
        if told.get("step") != step:
            raise CheckpointError(f"{metadata} gave the state of step {told.get('step')} for that of step {step}")
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening.

        :param wait: Whether to wait for the thread.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        if wait:
            self._thread.join()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                link, _ = self._listener.accept()
            except OSError:  # this was closed, or the system has no more files for the moment
                time.sleep(0.05)
                continue
            if not self._free.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(target=self._answer, args=(link,), name="xffl-state-link", daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        """Give one connection what is offered, if it knows the token; whoever goes away or does not is left alone."""
        with link, suppress(OSError, ValueError), _released(self._free):
            deadline = time.monotonic() + SHAKE_S
            mine = secrets.token_bytes(NONCE_BYTES)
            link.settimeout(SHAKE_S)
            link.sendall(mine)
            theirs, asked = _read(link, NONCE_BYTES, deadline), _read(link, 8, deadline)
            proof = _read(link, PROOF_BYTES, deadline)
            (step,) = struct.unpack("!q", asked)
            asked = self.metadata().encode() + asked
            if not hmac.compare_digest(proof, self._proof(b"taker", mine, theirs, asked)):
                link.sendall(bytes(PROOF_BYTES))
                return
            link.settimeout(TRANSFER_S)
            link.sendall(self._proof(b"giver", mine, theirs, asked))
            with self._changed:
                # Who takes may be told of this rank before this rank is told of it.
                is_there = self._changed.wait_for(
                    lambda: self._is_closed or (self._offer is not None and self._offer.step == step), START_S
                )
                offer = self._offer
            if not is_there or offer is None:
                return
            if not self._give(link, offer):
                return
            _read(link, 1)
            with self._changed:
                offer.left -= 1
                self._changed.notify_all()

    def _give(self, link: socket.socket, offer: _Offer) -> bool:
        """Send a state; tell whether all of it is what was offered."""
        link.sendall(struct.pack("!Q", len(offer.text)) + offer.text)
        for tensor in offer.tensors:
            data = _bytes(bytes_of(tensor.cpu()))
            for start in range(0, len(data), 1 << 22):
                link.sendall(data[start : start + (1 << 22)])
                with self._changed:
                    if self._offer is not offer:
                        return False  # nobody waits any more: what the tensors hold may change now
                    offer.moved = time.monotonic()
        with self._changed:
            is_whole = self._offer is offer
        if is_whole:
            link.sendall(WHOLE)
        return is_whole

    def _proof(self, side: bytes, giver: bytes, taker: bytes, asked: bytes) -> bytes:
        """Return what only those who know the token can make of both sides' random bytes, and of what is asked for."""
        return hmac.new(self._token, side + giver + taker + asked, hashlib.sha256).digest()


@contextmanager
def _released(free: threading.Semaphore) -> Iterator[None]:
    try:
        yield
    finally:
        free.release()


def _read(link: socket.socket, count: int, deadline: float | None = None) -> bytes:
    data = bytearray(count)
    _fill(link, memoryview(data), deadline)
    return bytes(data)


def _fill(link: socket.socket, place: memoryview, deadline: float | None = None) -> None:
    while place:
        if deadline is not None:
            link.settimeout(max(0.001, deadline - time.monotonic()))
        count = link.recv_into(place)
        if not count:
            raise ConnectionError("the connection was closed")
        place = place[count:]


def _bytes(row: torch.Tensor) -> memoryview:
    """Return a row of bytes as what a socket takes; the same memory."""
    array: Any = row.numpy()
    return memoryview(array)


def _read_tensor(link: socket.socket, dtype: str, shape: list[int]) -> torch.Tensor:
    if dtype not in DTYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"a tensor of {dtype} and shape {shape}")
    data = torch.empty(math.prod(shape) * DTYPES[dtype].itemsize, dtype=torch.uint8)
    _fill(link, _bytes(data))
    return data.view(DTYPES[dtype]).view(shape)
