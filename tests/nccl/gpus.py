"""A rank with a pretended GPU: tensors without values, streams and events that are written down, NCCL likewise.

Only what lies on the GPU is pretended. The CPU's tensors are real, and so is gloo, which carries votes, agreements and
objects. What reaches NCCL is seen where torch hands it to a backend, whoever has asked: torch.distributed, FSDP, DDP.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from tests.nccl.races import Races, leaves_of
from tests.nccl.traces import Abort, Call, Copy, Group, HostCall, HostWait, Join, Mark, Move, Record, Wait

__all__ = ["BACKEND", "Broken", "guard", "pretended_gpu"]

BACKEND = "cpu:gloo,cuda:pretended_nccl"
KNOWN_TYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""What NCCL can send and reduce."""
SHOWN = ("/xffl/", "/tests/", "/torch/")
"""Whose line a record names, the first that there is."""


class Broken(AssertionError):
    """A tensor was given to NCCL that it cannot take."""


class Stream:
    """A stream; it is also the context in which it is the current one."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream.made += 1
        self.stream_id = Stream.made - 1
        self.device = torch.device("cuda", _index(device))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        _gpu.add(Wait(self.stream_id, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _gpu.add(HostWait(_line(), stream=self.stream_id))

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        _gpu.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _gpu.current.pop()


class Event:
    """An event; the host that asks for it is taken to ask until it has come, unless it is there for a time."""

    made = 0

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        Event.made += 1
        self.number, self._is_timing = Event.made, enable_timing

    def record(self, stream: Stream | None = None) -> None:
        _gpu.add(Mark((stream or _gpu.current[-1]).stream_id, self.number))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _gpu.current[-1]).wait_event(self)

    def query(self) -> bool:
        if not self._is_timing:
            self.synchronize()
        return True

    def synchronize(self) -> None:
        _gpu.add(HostWait(_line(), event=self.number))

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class _Work(dist.Work):
    """What NCCL gives back for a call."""

    def __init__(self, tensors: Sequence[torch.Tensor], result: Any, *, is_noted: bool) -> None:
        super().__init__()
        self._call, self._held = len(_gpu.trace) - 1 if is_noted else None, (tensors, result)

    def wait(self, timeout: Any = None) -> bool:
        if self._call is not None:
            _gpu.add(Join(_gpu.current[-1].stream_id, self._call))
        self._held = ((), None)  # NCCL keeps tensors until they are waited for
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        _, result = self._held
        self.wait()
        future.set_result(result)
        return future


class _Gpu:
    """The one GPU of this process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.trace: list[Record] = []
        self.current = [Stream(index)] if index >= 0 else []
        self.batch: list[tuple[torch.Tensor, Move]] | None = None
        self.works: list[dist.Work] = []
        """Kept, since torch holds only what lies below them."""
        self.races = Races()

    def add(self, record: Record) -> None:
        """Write down what was asked for."""
        if isinstance(record, Join):
            self.races.join(record.stream, record.call)
        elif isinstance(record, Mark):
            self.races.mark(record.stream, record.event)
        elif isinstance(record, Wait):
            self.races.wait(record.stream, record.event)
        elif isinstance(record, HostWait):
            self.races.host_wait(record.stream, record.event)
        self.trace.append(record)


_gpu = _Gpu(-1)


class _Mode(FakeTensorMode):
    """Tensors on a GPU have no values; those on the CPU are left as they are."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in VIEWS and not kwargs and isinstance(args[0], FakeTensor) and not isinstance(args[0], DTensor):
            return self._view(func, args)
        leaves = leaves_of((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented  # it comes again, for its parts
        if not any(
            isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda") for leaf in leaves
        ):
            with fake_tensor.unset_fake_temporarily():
                _gpu.races.host(func, args, kwargs, _line)
                if func.namespace == "c10d":
                    _note_on_host(func, args, kwargs)
                return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        if func.namespace in ("_c10d_functional", "_dtensor"):
            _functional(func, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_behind = func in COPIES and _is_behind(func, args, kwargs)
        is_to_host = func in COPIES and not _is_on_gpu(result) and any(map(_is_on_gpu, leaves))
        if is_to_host:
            if not is_behind:
                _gpu.add(HostWait(f"a copy to the CPU at {_line()}", stream=_gpu.current[-1].stream_id, reads=True))
            with fake_tensor.unset_fake_temporarily():  # nothing was copied: all values of a GPU are 1
                if func is torch.ops.aten.copy_.default and args[0].is_floating_point():
                    result = args[0]  # what is counted stays as it is: ranks of which a cell has several add it up
                elif isinstance(result, FakeTensor):
                    result = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
                result.fill_(1)
        stream = _gpu.current[-1].stream_id
        _gpu.races.run(stream, func, args, kwargs, result, _line)
        if func in COPIES:
            is_into = func is torch.ops.aten.copy_.default
            target, source = (args[0], args[1]) if is_into else (result, args[0])
            if is_to_host or not _is_on_gpu(source):
                line, host = _line(), target if is_to_host else source
                _gpu.add(Copy(is_to_host, host.nbytes, line))
                if is_behind:
                    _gpu.races.copy_behind(stream, host, f"{func._schema.name} at {line}", writes=is_to_host)
        return result

    def _view(self, func: Any, args: Sequence[Any]) -> Any:
        """Return what shares a tensor's memory, in a fifth of torch's time; a view is no use of it."""
        with fake_tensor.in_kernel_invocation_manager(self):
            made = func(*args)
        device = args[0].fake_device
        if isinstance(made, torch.Tensor):
            return FakeTensor(self, made, device)
        return type(made)(FakeTensor(self, one, device) for one in made)


VIEWS = {
    *(torch.ops.aten.slice.Tensor, torch.ops.aten.select.int, torch.ops.aten.as_strided.default),
    *(torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unbind.int),
    *(torch.ops.aten.view.default, torch.ops.aten.view.dtype, torch.ops.aten.detach.default),
}
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _is_behind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether a copy does not hold the host up."""
    return bool(kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]))


def _is_on_gpu(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"


def _collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Write a collective down, and give back what the backend would."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    group = dist.ProcessGroup.unbox(named["process_group"])
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kind = func._schema.name.partition("::")[2].strip("_")
    if kind in ("send", "recv"):
        ranks = dist.get_process_group_ranks(group)
        move = Move(kind, ranks[named["dst" if kind == "send" else "src"]], tensors[0].numel())
        if _gpu.batch is not None:
            _gpu.batch.append((tensors[0], move))
            return dist.Work.boxed(_note("pending", group, []))
        return dist.Work.boxed(_note("single", group, tensors, moves=(move,), written=tensors * (kind == "recv")))
    reduce_op = named.get("reduce_op")
    options = (
        "" if reduce_op is None else str(dist.ReduceOp.unbox(reduce_op)) if hasattr(dist.ReduceOp, "unbox") else ""
    )
    if "root_rank" in named:
        options += f" from {named['root_rank']}"
    outs = args[0]
    is_source = named.get("root_rank") == group.rank()
    written = leaves_of(outs) if not (kind == "broadcast" and is_source) else []
    work = dist.Work.boxed(_note(kind, group, tensors, options=options, result=outs, written=written))
    return work if len(func._schema.returns) == 1 else (outs, work)


def _note_on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Write down what gloo is given."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    group = dist.ProcessGroup.unbox(named["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    peer = named.get("dst", named.get("src"))
    nbytes = sum(leaf.nbytes for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor))
    kind, place = func._schema.name.partition("::")[2].strip("_"), (group.group_desc or group.group_name, ranks)
    _gpu.add(HostCall(place, kind, None if peer is None else ranks[peer], named.get("tag"), nbytes, _line()))


def _functional(func: Any, args: Sequence[Any]) -> None:
    """Write a collective down that DTensor or a compiled step has asked for; the tensor's stream waits for it later."""
    name = func._schema.name.partition("::")[2]
    if name == "wait_tensor":
        _gpu.add(Join(_gpu.current[-1].stream_id, max(_calls())))
        return
    groups = [arg for arg in args if isinstance(arg, str) and arg in c10d._world.pg_names.values()]
    if groups:
        tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor)]
        _note(name, c10d._resolve_process_group(groups[-1]), tensors)


def _calls() -> Iterator[int]:
    return (place for place, record in enumerate(_gpu.trace) if isinstance(record, Call))


def _note(
    kind: str,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    *,
    options: str = "",
    moves: tuple[Move, ...] = (),
    result: Any = None,
    written: Sequence[torch.Tensor] = (),
) -> dist.Work:
    at = _line()
    config = dist.get_backend_config(group)
    for tensor in tensors:
        _check(tensor, f"{kind} at {at}", config)
    sizes = tuple((tensor.numel(), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
    place = _place(group)
    is_noted = kind != "pending" and all(tensor.device.type == "cuda" for tensor in tensors)
    if is_noted:
        stream, is_written = _gpu.current[-1].stream_id, {id(tensor) for tensor in written}
        read = [tensor for tensor in tensors if id(tensor) not in is_written]
        _gpu.races.call(len(_gpu.trace), stream, place[0], read, written, f"{kind} at {at}")
        _gpu.add(Call(stream, place, kind, sizes, options, moves, at))
    work = _Work(tensors, result, is_noted=is_noted)
    _gpu.works.append(work)
    return work


def _place(group: dist.ProcessGroup) -> Group:
    """Return what a group is called, and its ranks."""
    name = group.group_desc or group.group_name
    return f"{name} {group.group_name}", tuple(dist.get_process_group_ranks(group))


def _abort(group: dist.ProcessGroup) -> None:
    """Write down that a group is aborted."""
    _gpu.add(Abort(_place(group)))
    _real_abort(group)


_real_abort = dist.ProcessGroup.abort


def _check(tensor: torch.Tensor, call: str, config: str) -> None:
    """Refuse what a backend cannot take."""
    if tensor.device.type != "cuda" and "cpu:" in config:
        return  # gloo takes it, if it has values or not
    if tensor.device.type != "cuda" or "cuda:pretended" not in config:
        raise Broken(f"{call}: a tensor on {tensor.device} over {config}")
    if tensor.device.index != _gpu.index:
        raise Broken(f"{call}: a tensor on {tensor.device}, but this rank works on GPU {_gpu.index}")
    if tensor.dtype not in KNOWN_TYPES:
        raise Broken(f"{call}: NCCL does not know {tensor.dtype}")
    if not tensor.is_contiguous():
        raise Broken(f"{call}: a tensor of strides {tensor.stride()} is not contiguous")


def _batch(ops: list[Any]) -> list[dist.Work]:
    """Stand for ``batch_isend_irecv``, which asks a group for more than a pretended one has."""
    if ops[0].tensor.device.type != "cuda":
        return _real_batch(ops)
    groups = {id(op.group) for op in ops}
    if len(groups) > 1:
        raise Broken(f"a batch at {_line()} over {len(groups)} groups")
    _gpu.batch = []
    try:
        for op in ops:
            peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
            op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        batch = _gpu.batch
    finally:
        _gpu.batch = None
    tensors, moves = [tensor for tensor, _ in batch], tuple(move for _, move in batch)
    arriving = [tensor for tensor, move in batch if move.operation == "recv"]
    return [_note("batch", ops[0].group or dist.group.WORLD, tensors, moves=moves, written=arriving)]


_real_batch = c10d.batch_isend_irecv


def _read(tensor: torch.Tensor, what: str) -> Any:
    """Let the host read a value, which is a likely one: finite, close, and not 0."""
    _gpu.add(HostWait(f"{what}() at {_line()}", stream=_gpu.current[-1].stream_id, reads=True))
    value: object = True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def filled(shape: Sequence[int]) -> object:
        return [filled(shape[1:]) for _ in range(shape[0])] if shape else value

    return filled(tensor.shape) if what == "tolist" else value


def _line() -> str:
    """Return the innermost line of the package, or else of a test, or of torch."""
    lines = []
    frame = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    for part in SHOWN:
        for name, line in lines:
            if (
                part in name
                and "/tests/nccl/" not in name
                and "distributed_c10d" not in name
                and "c10d_log" not in name
            ):
                return (
                    f"{name.rpartition(part)[2]}:{line}"
                    if part == "/xffl/"
                    else f"{part[1:]}{name.rpartition(part)[2]}:{line}"
                )
    return "?"


class _Inline(threading.Thread):
    """A thread that runs where it is started: what it asks of the GPU has a place among what its caller asks."""

    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        """It has ended."""

    @property
    def ident(self) -> int:
        return 1


def _index(device: Any) -> int:
    index = torch.device(device).index if device is not None and not isinstance(device, int) else device
    return _gpu.index if index is None else index


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    with stream if stream is not None else ExitStack():
        yield


def _nothing(*args: object) -> None: ...


def _create(common: Any, options: Any) -> Any:
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return make(common.group_rank, common.group_size, options)


@contextmanager
def pretended_gpu(index: int, gpus: int = 8) -> Iterator[tuple[list[Record], list[str]]]:
    """Give this process a GPU that has no values, and NCCL for it: :data:`BACKEND` names both sides.

    :param index: Which of the node's.
    :param gpus: How many the node has.
    :yield: The trace, and the races between streams; both grow.
    """
    global _gpu
    if "pretended_nccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("pretended_nccl", _create, extended_api=True, devices=["cuda"])
    library = guard()
    if library is not None:
        ctypes.CDLL(str(library))
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # FakeTensors cannot be put into a parameter
    Stream.made = Event.made = 0
    _gpu = _Gpu(index)
    patches = [
        mock.patch.multiple(torch.cuda, **_cuda(gpus)),
        mock.patch.multiple(
            torch.Tensor, **{name: _reader(name) for name in READS}, data_ptr=_address(torch.Tensor.data_ptr)
        ),
        mock.patch.object(FakeTensor, "tolist", _reader("tolist", FakeTensor)),
        mock.patch.object(fake_tensor, "init_gpu_context", _nothing),
        mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        mock.patch.object(threading, "Thread", _Inline),
        mock.patch.object(dist.ProcessGroup, "abort", _abort),
        *(mock.patch.object(place, "batch_isend_irecv", _batch) for place in (dist, c10d)),
        *(
            mock.patch.object(place, name, _plain(getattr(place, name)))
            for place, name in ((c10d, "_object_to_tensor"), (c10d, "_tensor_to_object"), (torch, "load"))
        ),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(_Mode())
        yield _gpu.trace, _gpu.races.found


@cache
def guard() -> Path | None:
    """Return what a build of torch for CPUs lacks, compiled once for each version; it takes some seconds."""
    if torch.version.cuda is not None:
        return None
    source, home = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    made_of = f"{torch.__version__} {home}\n{source.read_text()}"
    library = Path(tempfile.gettempdir()) / f"xffl-guard-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        half = library.with_suffix(f".{os.getpid()}")
        include = home / "include"
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{include}"]
        command += [f"-I{include / 'torch/csrc/api/include'}", str(source), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run([*command, f"-Wl,-rpath,{home / 'lib'}", "-o", str(half)], check=True)
        half.rename(library)
    return library


READS = {"tolist": list, "item": lambda value: value, "__bool__": bool, "__float__": float, "__int__": int}
"""How the host reads a tensor's values."""


def _reader(name: str, kind: type[torch.Tensor] = torch.Tensor) -> Callable[..., Any]:
    real, convert = getattr(kind, name), READS[name]

    def read(self: torch.Tensor, *args: Any) -> Any:
        return convert(_read(self, name)) if isinstance(self, FakeTensor) else real(self, *args)  # type: ignore[operator]

    return read


def _address(real: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    def address(self: torch.Tensor) -> int:
        if not isinstance(self, FakeTensor):
            return real(self)
        return int(self.untyped_storage()._cdata) * 2**24 + self.storage_offset() * self.itemsize

    return address


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes real tensors: of bytes, on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with fake_tensor.unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _cuda(gpus: int) -> dict[str, Any]:
    """Return what stands for ``torch.cuda``."""

    def set_device(device: Any) -> None:
        _gpu.index = _index(device)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        with _Mode():  # torch asks for it where none is on
            return torch.zeros(16, dtype=torch.uint8, device=torch.device("cuda", _gpu.index))

    def synchronize(device: Any = None) -> None:
        _gpu.add(HostWait(_line()))

    def nothing(*_: Any, **__: Any) -> None:
        """Nothing is to be done without a GPU."""

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: _gpu.index,
        "set_device": set_device,
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "current_stream": lambda device=None: _gpu.current[-1],
        "default_stream": lambda device=None: _gpu.current[0],
        "synchronize": synchronize,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: SimpleNamespace(uuid=f"GPU-{_index(device)}"),
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": get_rng_state,
        "mem_get_info": lambda device=None: (60 * 2**30, 80 * 2**30),
        **dict.fromkeys(
            ("empty_cache", "init", "_lazy_init", "set_rng_state", "manual_seed", "manual_seed_all"), nothing
        ),
    }
