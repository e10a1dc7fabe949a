"""What a rank has asked of its GPU and of NCCL, in the order in which its host has asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Abort", "Call", "Copy", "Group", "HostCall", "HostWait", "Join", "Mark", "Move", "Record", "Wait"]

Group: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of a process group, and its ranks."""


@dataclass(frozen=True)
class Move:
    """One message of a batch: ``send`` or ``recv``, the rank of the world at the other end, and the elements."""

    operation: str
    peer: int
    numel: int


@dataclass(frozen=True)
class Call:
    """A collective, or a batch of messages.

    :param stream: The stream that was current.
    :param group: Over which group.
    :param kind: torch's name of the operation; ``batch`` for messages that were given together, ``single`` for one that
        was given by itself.
    :param tensors: Elements and data type of each tensor.
    :param options: What all ranks must say alike: the reduction, the source.
    :param moves: The messages.
    :param at: Where in the package, or else in torch, it was made.
    """

    stream: int
    group: Group
    kind: str
    tensors: tuple[tuple[int, str], ...]
    options: str
    moves: tuple[Move, ...]
    at: str


@dataclass(frozen=True)
class Join:
    """A stream waits for a call: ``work.wait()``."""

    stream: int
    call: int
    """Its place in the trace."""


@dataclass(frozen=True)
class Mark:
    """An event is recorded on a stream."""

    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    """A stream waits for an event."""

    stream: int
    event: int


@dataclass(frozen=True)
class HostWait:
    """The host waits: for an event, for a stream, or with neither for all that its GPU was given.

    :param reads: Whether it reads a value, and so waits for the stream that makes it.
    """

    at: str
    stream: int | None = None
    event: int | None = None
    reads: bool = False


@dataclass(frozen=True)
class Abort:
    """What was given to a group is ended, whether the other ranks have given theirs or not."""

    group: Group


@dataclass(frozen=True)
class Copy:
    """A copy between the GPU and the host's memory.

    :param to_host: Whether it goes to the host.
    :param nbytes: Its bytes.
    :param at: As for :class:`Call`.
    """

    to_host: bool
    nbytes: int
    at: str


@dataclass(frozen=True)
class HostCall:
    """A collective or a message of the host's memory, over gloo.

    :param group: Over which group.
    :param kind: torch's name of the operation.
    :param peer: Of a message, the rank of the world at the other end.
    :param tag: Of a message, its tag.
    :param nbytes: Bytes of all tensors.
    :param at: As for :class:`Call`.
    """

    group: Group
    kind: str
    peer: int | None
    tag: int | None
    nbytes: int
    at: str


Record: TypeAlias = Abort | Call | Join | Mark | Wait | HostWait | Copy | HostCall
