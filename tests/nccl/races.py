"""Races between a GPU's streams: two of them use the same bytes, one writes, and neither waits for the other.

Each stream has a clock that knows how far it has waited for others (as torch's CUDA sanitizer does). What torch's
allocator would hand out again counts, too: memory that another stream still uses, freed and given to the stream that
made it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Races", "leaves_of"]

FRESH = re.compile(r"aten::(new_.*|empty.*|zeros_like|ones_like|full_like|rand.*like)")
"""Operators that read nothing of the tensors that they are given."""
KEPT = 200
"""Uses of a tensor that are remembered."""


@dataclass(frozen=True)
class _Use:
    stream: Hashable
    moment: int
    first: int
    last: int
    writes: bool
    what: str


class Races:
    """The clocks of a GPU's streams, and who has used which bytes."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._now = 0
        self._clocks: dict[Hashable, dict[Hashable, int]] = {}
        self._host: dict[Hashable, int] = {}
        self._events: dict[int, dict[Hashable, int]] = {}
        self._calls: dict[int, dict[Hashable, int]] = {}
        self._uses: dict[int, list[_Use]] = {}
        self._owners: dict[int, tuple[StorageWeakRef, Hashable]] = {}
        self._copies: list[tuple[torch.UntypedStorage, _Use]] = []
        """Copies to or from the CPU that the host has not waited for; their memory is kept, so that its place stays."""
        self._loose: dict[Hashable, list[_Use]] = {}
        """Who has used what was freed, by the stream that made it, which the allocator gives it to again."""

    # What happens -----------------------------------------------------------------------------------------------------

    def run(self, stream: int, func: Any, args: Any, kwargs: Any, result: Any, line: Callable[[], str]) -> None:
        """Note an operator on a stream."""
        name, read, written = func._schema.name, [], []
        if name.startswith("prim::"):  # asks for a tensor's device or shape
            return
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        for argument, value in given:
            tensors = [leaf for leaf in leaves_of(value) if _is_on_gpu(leaf)]
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors
            elif argument.alias_info is None and not FRESH.fullmatch(name):
                read += tensors
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and not written:
            written = [leaf for leaf in leaves_of(result) if _is_on_gpu(leaf)]
        if read or written:
            self._begin(stream)
            self._use(stream, read, written, stream, f"{name} at {line()}")

    def copy_behind(self, stream: int, values: torch.Tensor, what: str, *, writes: bool) -> None:
        """Note that a copy on a stream writes or reads memory of the CPU after the host has gone on."""
        self._copies.append((values.untyped_storage(), _Use(stream, self._now, *_span(values), writes, what)))

    def host(self, func: Any, args: Any, kwargs: Any, line: Callable[[], str]) -> None:
        """Note that the host works on memory of the CPU, or gives it to gloo."""
        self._copies = [copy for copy in self._copies if copy[1].moment > self._host.get(copy[1].stream, 0)]
        if not self._copies or func.namespace == "prim" or FRESH.fullmatch(func._schema.name):
            return
        if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            return  # a view
        named = list(zip(func._schema.arguments, args, strict=False))
        named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        for argument, value in named:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            writes = writes or (func.namespace == "c10d" and not func._schema.name.endswith("send"))
            for leaf in leaves_of(value):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and leaf.numel():
                    self._touch_host(leaf, writes, f"{func._schema.name} at {line()}")

    def _touch_host(self, values: torch.Tensor, writes: bool, what: str) -> None:
        first, last = _span(values)
        for _, use in self._copies:
            if first < use.last and use.first < last and (writes or use.writes):
                self.found.append(f"{what} {_verb(writes)} what {use.what} still {_verb(use.writes)}")

    def call(self, place: int, stream: int, group: str, read: Sequence[Any], written: Sequence[Any], what: str) -> None:
        """Note a call on the stream of a group's communicator, which begins after the current one.

        :param place: Its place in the trace.
        """
        own = ("nccl", group)
        _merge(self._clock(own), self._clock(stream))
        self._begin(own)
        self._use(own, read, written, stream, what)
        self._calls[place] = dict(self._clock(own))

    def join(self, stream: int, place: int) -> None:
        """Note that a stream waits for a call."""
        _merge(self._clock(stream), self._calls.get(place, {}))

    def mark(self, stream: int, event: int) -> None:
        """Note that an event is recorded."""
        self._events[event] = dict(self._clock(stream))

    def wait(self, stream: int, event: int) -> None:
        """Note that a stream waits for an event."""
        _merge(self._clock(stream), self._events.get(event, {}))

    def host_wait(self, stream: int | None, event: int | None) -> None:
        """Note that the host waits; what it asks for afterwards comes after."""
        if event is not None:
            _merge(self._host, self._events.get(event, {}))
        elif stream is not None:
            _merge(self._host, self._clock(stream))
        else:
            for clock in list(self._clocks.values()):
                _merge(self._host, clock)

    # What follows -----------------------------------------------------------------------------------------------------

    def _clock(self, stream: Hashable) -> dict[Hashable, int]:
        clock = self._clocks.setdefault(stream, {})
        _merge(clock, self._host)
        return clock

    def _begin(self, stream: Hashable) -> None:
        self._now += 1
        self._clock(stream)[stream] = self._now

    def _use(self, stream: Hashable, read: Sequence[Any], written: Sequence[Any], current: Hashable, what: str) -> None:
        for key in [key for key, (storage, _) in self._owners.items() if storage.expired()]:
            _, owner = self._owners.pop(key)
            self._loose.setdefault(owner, []).extend(use for use in self._uses.pop(key) if use.stream != owner)
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self._touch(stream, tensor, writes, current, what)

    def _touch(self, stream: Hashable, tensor: torch.Tensor, writes: bool, current: Hashable, what: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owners:
            self._owners[key] = (StorageWeakRef(storage), current)
            self._uses[key] = []
            known = self._clock(current)
            for use in self._loose.pop(current, ()):
                if use.moment > known.get(use.stream, 0):
                    self.found.append(f"{what} may be given memory that {use.what} still uses, on another stream")
        if not tensor.numel():
            return
        first = tensor.storage_offset() * tensor.itemsize
        last, clock, kept = first + _reach(tensor), self._clock(stream), []
        for use in self._uses[key]:
            is_apart = use.stream == stream or use.moment <= clock.get(use.stream, 0)
            if first < use.last and use.first < last and (writes or use.writes) and not is_apart:
                self.found.append(f"{what} {_verb(writes)} what {use.what} {_verb(use.writes)}, on another stream")
            if not (writes and first <= use.first and use.last <= last):
                kept.append(use)
        self._uses[key] = [*kept[1 - KEPT :], _Use(stream, self._now, first, last, writes, what)]


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def _span(values: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor on the CPU begins and ends in memory."""
    return values.data_ptr(), values.data_ptr() + _reach(values)


def leaves_of(value: Any) -> list[Any]:
    """Return what lies in an operator's arguments or results, in lists, tuples and keywords."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves_of(part)]
    return leaves_of([*value.values()]) if isinstance(value, dict) else [value]


def _merge(into: dict[Hashable, int], other: dict[Hashable, int]) -> None:
    for stream, moment in other.items():
        into[stream] = max(into.get(stream, 0), moment)


def _is_on_gpu(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"
