"""Transport of the state of a replica group that lives to one that comes back: rank to rank, over own connections.

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
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.distributed import sharding
from xffl.errors import CheckpointError, ConfigError, LaunchError, XfflError

__all__ = ["ShardTransport", "digest", "give", "local", "take"]

NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST_TEXT = 1 << 30  # bytes of the text that says what follows; a longer one is refused
START_S = 5.0  # how long a group waits for one that it is to give its state to, and that may be lost meanwhile
TRANSFER_S = 60.0  # how long a connection that has proven itself may stand still
MOST_LINKS = 64  # connections at a time; more are closed
WHOLE = b"\1"  # sent when all was sent before anybody stepped on, and when all has arrived
SHAKE_S = 10.0  # how long a connection may take to prove that it knows the token
DTYPES = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


@dataclass(eq=False)
class _Offer:
    """One state that some ranks of other groups are to get."""

    step: int
    text: bytes
    tensors: list[torch.Tensor]
    left: int
    """Ranks that still have to get it"""
    moved: float = field(default_factory=time.monotonic)
    """When something was last sent"""


class ShardTransport:
    """Give this rank's part of the state to ranks at the same place of other groups, and take theirs.

    It has the methods of torchft's ``CheckpointTransport``. :meth:`send_checkpoint` returns when all have what they
    came for, so nothing is copied; nobody steps meanwhile. Over a connection go, in this order:

    .. code-block:: text

       giver > taker   32 random bytes
       taker > giver   32 random bytes, the step, HMAC(token, "taker", both, address and step)
       giver > taker   HMAC(token, "giver", both, address and step), length of the text, text, tensors' bytes, 1
       taker > giver   1
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
        """Let the ranks of other groups fetch this rank's state, and wait until they have it."""
        tensors: dict[str, torch.Tensor] = {}
        plain = sharding.to_plain(state_dict, "state", tensors)
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
        """Return: nothing is sent any more once :meth:`send_checkpoint` has returned."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of a rank at this rank's place in another group."""
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
                content = json.loads(_read(link, length))
                tensors = {name: _read_tensor(link, dtype, shape) for name, dtype, shape in content["tensors"]}
                state = sharding.from_plain(content["plain"], tensors)
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
        if content.get("step") != step:
            raise CheckpointError(f"{metadata} gave the state of step {content.get('step')} for that of step {step}")
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening."""
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
        with link, suppress(OSError, ValueError), ExitStack() as stack:
            stack.callback(self._free.release)
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
                # The other group may hear of this rank before this rank has begun to send.
                is_there = self._changed.wait_for(
                    lambda: self._is_closed or (self._offer is not None and self._offer.step == step), START_S
                )
                offer = self._offer
            if not is_there or offer is None or not self._give(link, offer):
                return
            _read(link, 1)  # the other side has all of it
            with self._changed:
                offer.left -= 1
                self._changed.notify_all()

    def _give(self, link: socket.socket, offer: _Offer) -> bool:
        """Send a state; tell whether all of it is what was offered."""
        link.sendall(struct.pack("!Q", len(offer.text)) + offer.text)
        for tensor in offer.tensors:
            data = sharding.bytes_of(tensor.cpu()).numpy().data
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


def _read_tensor(link: socket.socket, dtype: str, shape: list[int]) -> torch.Tensor:
    if dtype not in DTYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"a tensor of {dtype} and shape {shape}")
    data = torch.empty(math.prod(shape) * DTYPES[dtype].itemsize, dtype=torch.uint8)
    _fill(link, data.numpy().data)
    return data.view(DTYPES[dtype]).view(shape)


def take(part: Any) -> Any:
    """Return a part's state as tensors of this rank and plain values; nothing is copied."""
    if isinstance(part, nn.Module):
        sharding.reshard(part)
        return {name: local(value) for name, value in part.state_dict().items()}
    return _cut(part.state_dict())


def give(name: str, part: Any, saved: Any) -> None:
    """Give a part another group's state, in place; nothing moves between ranks."""
    if isinstance(part, nn.Module):
        _give_model(name, part, saved)
    elif isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        state = {
            number: {key: _spread(value, parameters[number]) for key, value in values.items()}
            for number, values in saved["state"].items()
        }
        sharding.load_optimizer(part, {"state": state, "param_groups": saved["param_groups"]})
    else:
        part.load_state_dict(_spread_like(saved, part.state_dict(), name))


def _give_model(name: str, model: nn.Module, saved: Mapping[str, Any]) -> None:
    sharding.reshard(model)
    own = model.state_dict()
    different = sorted(own.keys() ^ saved.keys())
    if different:
        raise ConfigError(f"model {name!r} differs between the replica groups: {different[0]!r} is in one of them only")
    others: dict[str, Any] = {}
    with torch.no_grad():
        for key, value in own.items():
            place, theirs = local(value), saved[key]
            if not isinstance(place, torch.Tensor) or key.rpartition(".")[2] == "_extra_state":
                others[key] = theirs
            elif place.shape != theirs.shape or place.dtype != theirs.dtype:
                raise ConfigError(
                    f"{key!r} of model {name!r} is {tuple(theirs.shape)} {theirs.dtype} on this rank of another "
                    f"replica group, but {tuple(place.shape)} {place.dtype} here; give all groups the same number of "
                    "ranks"
                )
            else:
                place.copy_(theirs)
    if others:
        model.load_state_dict(others, strict=False)


def local(value: Any) -> Any:
    """Return this rank's part of a tensor, without gradient; other values as they are."""
    return sharding.local_tensor(value).detach() if isinstance(value, torch.Tensor) else value


def _cut(value: Any) -> Any:
    """Return a state with this rank's part of what is spread, and its whole shape."""
    if isinstance(value, DTensor):
        return {"cut": local(value), "shape": list(value.shape)}
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: _cut(one) for key, one in value.items()}
    return type(value)(map(_cut, value)) if type(value) in (list, tuple) else value


def _is_cut(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"cut", "shape"}


def _spread_like(value: Any, like: Any, where: str) -> Any:
    """Make of what :func:`_cut` gave what is spread like a state of the same form here."""
    if _is_cut(value):
        if not isinstance(like, DTensor) or local(like).shape != value["cut"].shape:
            raise ConfigError(f"{where} is spread in another replica group and not alike here; start all alike")
        return sharding.spread_as(value["cut"].to(local(like).device), like)
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        return {key: _spread_like(one, known.get(key), f"{where}/{key}") for key, one in value.items()}
    if type(value) in (list, tuple):
        beside = like if type(like) is type(value) and len(like) == len(value) else [None] * len(value)
        return type(value)(
            _spread_like(*pair, f"{where}/{n}") for n, pair in enumerate(zip(value, beside, strict=True))
        )
    return value


def digest(part: Any) -> int:
    """Return a number of 40 bits of what must be the same in all groups of a part: buffers may differ."""
    whole = hashlib.blake2b(digest_size=5)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(part, nn.Module):
        tensors = {name: local(one) for name, one in sharding.sharded_parameters(part).items()}
    else:
        whole.update(json.dumps(sharding.to_plain(take(part), "", tensors), sort_keys=True).encode())
    sums = []
    for tensor in tensors.values():
        data = sharding.bytes_of(tensor)
        end = len(data) // 4 * 4
        words, rest = data[:end], data[end:]
        if data.storage_offset() % 4:  # only aligned memory can be viewed as int32
            words = words.clone()
        sums.append((words.view(torch.int32).sum(dtype=torch.int64) * 257 + rest.sum()).cpu())
    whole.update(repr(list(zip(tensors, torch.stack(sums).tolist() if sums else [], strict=True))).encode())
    return int.from_bytes(whole.digest(), "little")


def _spread(value: Any, parameter: torch.Tensor) -> Any:
    """Make of what :func:`_cut` gave a tensor that goes with a parameter."""
    if not _is_cut(value):
        return value
    assert isinstance(parameter, DTensor), "cut alike in all groups, or the model was refused"
    values = value["cut"].to(parameter.device)
    is_alike = tuple(value["shape"]) == tuple(parameter.shape)
    return sharding.spread_as(values, parameter) if is_alike else sharding.spread_whole(values, parameter)
