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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from xffl.checks import shown
from xffl.cluster.lighthouse.address import read_address
from xffl.distributed.replicas import plain_values
from xffl.distributed.values import sharding
from xffl.distributed.values.spread_like import load_optimizer, spread_as, spread_whole
from xffl.errors import CheckpointError, ConfigError, LaunchError, XfflError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = ["ShardTransport", "digest", "give", "local", "prove_members", "take"]

NONCE_BYTES = 32
PROOF_BYTES = 32
# A state may be as many times as large as what its taker holds, which may not have moments or a history yet.
MOST_GROWTH = 16
LEAST_BYTES = 64 << 20  # and as large as this in any case
MOST_TEXT_GROWTH = 64
LEAST_TEXT = 16 << 20
DEEPEST = 200  # levels of values inside of values
START_S = 5.0  # how long a group waits for one that it is to give its state to, and that may be lost meanwhile
TRANSFER_S = 60.0  # how long a connection that has proven itself may stand still
MOST_LINKS = 64  # connections that have proven themselves, at a time; more are closed
MOST_SILENT = 64  # connections that have not proven themselves yet; for another one the oldest of them is closed
WHOLE = b"\1"  # sent when all was sent before anybody stepped on, and when all has arrived
SHAKE_S = 10.0  # how long a connection may take to prove that it knows the token
PIECE_BYTES = 1 << 22
MOST_DIMENSIONS = 64
MOST_ELEMENTS = 1 << 62
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

    :param address: Where to listen.
    :param token: The run's.
    :param own_state: Returns what this rank would give now, by the names of its parts. What others give may have these
        parts, and a few times this size.
    """

    def __init__(self, address: str, token: bytes, own_state: Callable[[], Mapping[str, Any]]) -> None:
        self._token = token
        self._own_state = own_state
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._is_closed = False
        self._free = threading.Semaphore(MOST_LINKS)
        self._silent: dict[socket.socket, str] = {}
        """Connections that have not proven themselves yet, the oldest first, and the addresses of their hosts"""
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
        plain = plain_values.to_plain(state_dict, "state", tensors)
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
        """Fetch the state of a rank at this rank's place in another group, and take no longer than the timeout."""
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            with closing(self._connect(metadata, deadline)) as link:
                self._prove_taker(link, metadata, step, deadline)
                state = self._read_state(link, metadata, step, deadline)
                link.sendall(WHOLE)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            if isinstance(error, XfflError):
                raise
            raise CheckpointError(
                f"the state of replica group {src_rank} at {shown(metadata)} could not be read: "
                f"{type(error).__name__}: {error}; it is asked for again in the next step"
            ) from error
        return state

    def _connect(self, metadata: str, deadline: float) -> socket.socket:
        try:
            host, port = read_address("where the group gives its state", metadata)
        except LaunchError as error:
            raise ValueError(str(error)) from error
        return socket.create_connection((host.strip("[]"), port), max(0.001, deadline - time.monotonic()))

    def _prove_taker(self, link: socket.socket, metadata: str, step: int, deadline: float) -> None:
        """Prove to the giver that this rank knows the token, and see that the giver does."""
        theirs, mine = _read(link, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
        asked = metadata.encode() + struct.pack("!q", step)
        link.sendall(mine + struct.pack("!q", step) + self._proof(b"taker", theirs, mine, asked))
        told = _read(link, PROOF_BYTES, deadline)
        if not hmac.compare_digest(told, self._proof(b"giver", theirs, mine, asked)):
            raise LaunchError(
                f"{metadata} does not know the run's token, or knows another one; give all replica groups the same "
                "(XFFL_TOKEN, XFFL_TOKEN_FILE)"
            )

    def _read_state(self, link: socket.socket, metadata: str, step: int, deadline: float) -> dict[str, Any]:
        """Read a state; before memory is taken for it, its size and parts are compared with this rank's own."""
        own_tensors: dict[str, torch.Tensor] = {}
        own = self._own_state()
        own_text = json.dumps(plain_values.to_plain(own, "state", own_tensors))
        own_bytes = sum(tensor.nbytes for tensor in own_tensors.values())
        most_text = LEAST_TEXT + MOST_TEXT_GROWTH * len(own_text)
        (length,) = struct.unpack("!Q", _read(link, 8, deadline))
        if length > most_text:
            raise CheckpointError(
                f"{metadata} announces {length} bytes of text, and at most {most_text} go with the state of this rank; "
                "nothing was read"
            )
        content = parse_json(_read(link, length, deadline), limit=most_text, depth=DEEPEST)
        told = Fields(content, f"the state of {metadata}", error=CheckpointError)
        if (theirs := told.integer("step")) != step:
            raise CheckpointError(f"{metadata} gave the state of step {theirs} for that of step {step}")
        table = [_read_shape(told, row) for row in told.list_of("tensors", most_text, Fields.any)]
        most_bytes = LEAST_BYTES + MOST_GROWTH * own_bytes
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in table)
        if size > most_bytes:
            raise CheckpointError(
                f"{metadata} announces tensors of {size} bytes, and at most {most_bytes} go with the {own_bytes} bytes "
                "of this rank; no memory was taken"
            )
        tensors = {name: _read_tensor(link, dtype, shape, deadline) for name, dtype, shape in table}
        state = plain_values.from_plain(told.any("plain"), tensors)
        if _read(link, 1, deadline) != WHOLE:
            raise ValueError("it does not end as it should")
        return _checked_state(state, own, metadata)

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
                link, (host, *_) = self._listener.accept()
            except OSError:  # this was closed, or the system has no more files for the moment
                time.sleep(0.05)
                continue
            self._note_silent(link, host)
            threading.Thread(target=self._answer, args=(link,), name="xffl-state-link", daemon=True).start()

    def _note_silent(self, link: socket.socket, host: str) -> None:
        """Note a new connection, and close the oldest that is silent where there are too many.

        Of the host that has most of them, so that a crowd from one host does not keep others away.
        """
        with self._changed:
            self._silent[link] = host
            if len(self._silent) <= MOST_SILENT:
                return
            [(crowded, _)] = Counter(self._silent.values()).most_common(1)
            oldest = next(one for one, its_host in self._silent.items() if its_host == crowded)
            del self._silent[oldest]
        with suppress(OSError):  # it has just ended by itself
            oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _answer(self, link: socket.socket) -> None:
        """Give one connection what is offered, if it knows the token; whoever goes away or does not is left alone."""
        with link, suppress(OSError, ValueError), ExitStack() as stack:
            proven = self._prove_giver(link)
            if proven is None or not self._free.acquire(blocking=False):
                return
            stack.callback(self._free.release)
            step, proof = proven
            link.settimeout(TRANSFER_S)
            link.sendall(proof)
            with self._changed:
                # The other group may hear of this rank before this rank has begun to send.
                is_there = self._changed.wait_for(
                    lambda: self._is_closed or (self._offer is not None and self._offer.step == step), START_S
                )
                offer = self._offer
            if not is_there or offer is None or not self._give(link, offer):
                return
            _read(link, 1, time.monotonic() + TRANSFER_S)  # the other side has all of it
            with self._changed:
                offer.left -= 1
                self._changed.notify_all()

    def _prove_giver(self, link: socket.socket) -> tuple[int, bytes] | None:
        """Return for which step a taker asks that knows the token, and what proves to it that this rank does."""
        try:
            deadline = time.monotonic() + SHAKE_S
            mine = secrets.token_bytes(NONCE_BYTES)
            link.settimeout(SHAKE_S)
            link.sendall(mine)
            theirs, asked = _read(link, NONCE_BYTES, deadline), _read(link, 8, deadline)
            proof = _read(link, PROOF_BYTES, deadline)
            (step,) = struct.unpack("!q", asked)
            asked = self.metadata().encode() + asked
            if hmac.compare_digest(proof, self._proof(b"taker", mine, theirs, asked)):
                return step, self._proof(b"giver", mine, theirs, asked)
            link.sendall(bytes(PROOF_BYTES))
            return None
        finally:
            with self._changed:
                self._silent.pop(link, None)

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


def prove_members(store: Store, token: bytes, name: str, rank: int, size: int) -> None:
    """Prove to the ranks that meet at a store that this one knows the token, and see that all of them do.

    Collective over them. Each writes 32 random bytes, then an HMAC of those of all, of its number and of the name of
    what they form. Raises LaunchError that names who could not make it; what fails is torch's store where one does not
    come.
    """

    def proof(member: int, nonces: Sequence[bytes]) -> str:
        asked = f"member {member} of {size} in {name} ".encode() + b"".join(nonces)
        return hmac.new(token, asked, hashlib.sha256).hexdigest()

    mine = secrets.token_hex(NONCE_BYTES)
    store.set(f"nonce/{rank}", mine)
    nonces = [mine.encode() if member == rank else bytes(store.get(f"nonce/{member}")) for member in range(size)]
    # Of one length, or two lists of them could be one text.
    is_whole = all(len(nonce) == 2 * NONCE_BYTES for nonce in nonces)
    store.set(f"proof/{rank}", proof(rank, nonces))
    told = [bytes(store.get(f"proof/{member}")) for member in range(size)]
    unproven = [
        member
        for member in range(size)
        if member != rank and not (is_whole and hmac.compare_digest(told[member], proof(member, nonces).encode()))
    ]
    if unproven:
        raise LaunchError(
            f"replica groups {unproven} of the {size} that have met do not know this run's token; give all of them the "
            "same (XFFL_TOKEN, XFFL_TOKEN_FILE), and see that strangers do not reach the lighthouse"
        )


def _read(link: socket.socket, count: int, deadline: float) -> bytes:
    """Read so many bytes, or as many as come until the deadline; memory is taken as they come."""
    data = bytearray()
    while len(data) < count:
        piece = bytearray(min(PIECE_BYTES, count - len(data)))
        _fill(link, memoryview(piece), deadline)
        data += piece
    return bytes(data)


def _fill(link: socket.socket, place: memoryview, deadline: float) -> None:
    while place:
        link.settimeout(max(0.001, min(TRANSFER_S, deadline - time.monotonic())))
        count = link.recv_into(place)
        if not count:
            raise ConnectionError("the connection was closed")
        place = place[count:]


def _read_shape(told: Fields, row: Any) -> tuple[str, torch.dtype, list[int]]:
    """Return name, data type and shape of a tensor that is to come."""
    name, dtype, shape = row if isinstance(row, list) and len(row) == 3 else (None, None, None)
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES or not _is_shape(shape):
        told.fail(f"{told.place('tensors')} has no name, data type and shape of a tensor, but {shown(row)}")
    return name, DTYPES[dtype], shape


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    """Tell whether a value is the shape of a tensor whose elements can be counted."""
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        return False
    # A tensor of no bytes may have other sizes than 0, which torch multiplies, too.
    is_counted = all(type(size) is int and size >= 0 for size in shape)
    return is_counted and math.prod(max(1, size) for size in shape) < MOST_ELEMENTS


def _read_tensor(link: socket.socket, dtype: torch.dtype, shape: list[int], deadline: float) -> torch.Tensor:
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _fill(link, data.numpy().data, deadline)
    return data.view(dtype).view(shape)


def _checked_state(state: Any, own: Mapping[str, Any], metadata: str) -> dict[str, Any]:
    """Return a state that has the parts of this rank, and the two numbers that torchft's manager adds."""
    told = Fields(state, f"the state of {metadata}", error=CheckpointError)
    parts = told.mapping("user")
    different = sorted({*parts} ^ {*own})
    if different:
        where = "is missing there" if different[0] in own else "is not registered here"
        raise CheckpointError(
            f"{metadata} gave a state whose part {shown(different[0])} {where}; register the same parts in all replica "
            "groups"
        )
    manager = told.mapping("torchft")
    numbers = {name: manager.integer(name) for name in ("step", "batches_committed")}
    return {"user": {name: parts.any(name) for name in parts}, "torchft": numbers}


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
        load_optimizer(part, {"state": state, "param_groups": saved["param_groups"]})
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
        return spread_as(value["cut"].to(local(like).device), like)
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
        whole.update(json.dumps(plain_values.to_plain(take(part), "", tensors), sort_keys=True).encode())
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
    return spread_as(values, parameter) if is_alike else spread_whole(values, parameter)
