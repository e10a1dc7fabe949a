"""Workarounds of PyTorch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "call_at_end_of_backward",
    "close_gloo_connections",
    "is_in_backward",
    "is_out_of_memory",
    "is_profiling",
    "lasting_memory",
    "memory_of",
]

_PYBUF_WRITE = 0x200
_view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
"""Of Python's C interface: make a view of so many bytes at an address."""


_UNSENT_TAG = 7_900
"""Of messages over gloo that nobody sends."""

_HUGE_PAGE = 2**21
"""Bytes of a huge page on x86, and on ARM with pages of 4 KiB."""

_LEAST_HUGE = 4 * _HUGE_PAGE
"""Bytes from which on memory is asked to be of huge pages: what rounding up adds is an eighth at most."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See, and replace, every operator of torch that runs while it is entered.

    torch 2.13 has its only form in a module with a private name: https://pytorch.org/docs/2.13/torch.html.
    """


def is_in_backward() -> bool:
    """Tell whether this thread runs a backward pass.

    torch 2.13 has no public call for it: https://github.com/pytorch/pytorch/pull/141276.
    """
    return torch._C._current_graph_task_id() != -1


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that this process has no memory left, on a GPU or on the host.

    Where the host has none, torch 2.13 raises a plain RuntimeError, as where a peer is lost:
    https://github.com/pytorch/pytorch/blob/v2.11.0/c10/core/impl/alloc_cpu.cpp.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function where the backward pass that runs now ends, as FSDP2 does with its own.

    torch 2.13 has no public call for it: https://github.com/pytorch/pytorch/issues/66199.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_profiling() -> bool:
    """Tell whether a profiler of torch records.

    torch 2.13 has no public call for it, and ``record_function`` costs 10 us and more also where nobody records:
    https://github.com/pytorch/pytorch/blob/v2.11.0/torch/autograd/profiler.py.
    """
    return profiler._is_profiler_enabled


def memory_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor on the CPU, to be read and written while somebody keeps the tensor.

    torch 2.13 has no buffer protocol (https://github.com/pytorch/pytorch/issues/19143), and after ``numpy()`` nobody
    can resize the tensor's storage any more, which FSDP does.
    """
    # An array of ctypes would do, too, but each length makes a type that stays until the garbage collector runs.
    view: memoryview = _view_memory(values.data_ptr(), values.nbytes, _PYBUF_WRITE)
    return view


def lasting_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros on the CPU, for values that rounds walk over again and again.

    A large one lies on huge pages where Linux has them to give: a core then reads and writes values that are not in its
    cache at up to one and a half times the rate, since it looks up a place in the page table once for 2 MiB and reads
    ahead beyond 4 KiB. The memory goes back to the system with the tensor.

    torch 2.13 asks for huge pages for all tensors or for none (``THP_MEM_ALLOC_ENABLE``), also for those of a training:
    https://github.com/pytorch/pytorch/blob/v2.11.0/c10/core/impl/alloc_cpu.cpp.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _LEAST_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(numel, dtype=dtype, device="cpu")
    try:
        pages = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes on the CPU: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def close_gloo_connections(gloo: dist.ProcessGroup, rank: int, size: int) -> None:
    """Close a rank's connections in a group over gloo: all waits in it end at once, and it is of no more use; local.

    gloo's ``abort`` and ``shutdown`` end no wait: that of another rank lasts until its timeout, 20.0 s of 20 s (torch
    2.11, 2.13, 2.15). A receive that runs out of time closes all connections of its group (``UnboundBuffer::waitRecv``,
    https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/unbound_buffer.cc).

    :param gloo: The group.
    :param rank: The number of this rank in it.
    :param size: How many ranks it has.
    """
    for nobody in {*range(size)} - {rank}:
        values = torch.zeros(1, dtype=torch.float32)
        try:
            gloo.recv([values], nobody, _UNSENT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # as it should
        raise AssertionError("a receive that nobody sends to has ended well")
