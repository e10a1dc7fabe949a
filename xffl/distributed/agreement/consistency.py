"""Checks that all ranks were given the same, errors that all of them raise, and where a backend needs its tensors."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from xffl import __version__
from xffl.cluster.launch.failure import note_alike
from xffl.cluster.runtimes import Runtime, group_by_runtime
from xffl.distributed.agreement.differences import Describe, describe_difference
from xffl.distributed.collectives import Group, all_gather_json, all_reduce, own_rank
from xffl.distributed.failures.waits import NamedWait
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.values.sharding import bytes_of
from xffl.errors import XfflError, class_name
from xffl.topology import ranks_text

if TYPE_CHECKING:
    from xffl.distributed.distributed_state import DistributedState

__all__ = [
    "barrier",
    "cell_gpu",
    "check_consistent",
    "compare_hashes",
    "compute_device",
    "connect",
    "control_device",
    "gather_objects",
    "gather_runtimes",
    "hash_of",
    "home_device",
    "keep_error",
    "message_device",
    "own_runtime",
    "processor_of",
    "ranks_text",
    "sends_from_gpu",
    "sum_of_bits",
    "transfer_device",
]


def control_device(group: Group | None = None) -> torch.device:
    """Return where small messages lie (votes, agreements): on the CPU, unless the group has NCCL alone."""
    if isinstance(group, CrossWorldGroup) or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def message_device(device: torch.device, group: Group | None = None) -> torch.device:
    """Return where a tensor of a device lies while it is sent over a group: on the CPU where gloo would copy it."""
    is_gloo = isinstance(group, CrossWorldGroup) or f"{device.type}:gloo" in dist.get_backend_config(group)
    return torch.device("cpu") if is_gloo else device


def sends_from_gpu(group: Group) -> bool:
    """Tell whether a group has a backend that sends from GPUs: gloo would copy their tensors to the host first."""
    if isinstance(group, CrossWorldGroup):
        return False
    return any(part.startswith("cuda:") and part != "cuda:gloo" for part in dist.get_backend_config(group).split(","))


def transfer_device(state: DistributedState) -> torch.device:
    """Return where weights lie while they move: on the GPU over NCCL, else on the CPU, since gloo sends from there."""
    if "nccl" not in str(state.link_backend or state.backend):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if state.current_device is None else compute_device(state)


def home_device(state: DistributedState) -> torch.device | None:
    """Return the GPU that weights lie on while they move inside a cell, where they cross in the host's memory."""
    return None if state.link_backend is None else cell_gpu(state)


def cell_gpu(state: DistributedState) -> torch.device | None:
    """Return the GPU from which NCCL sends to this rank's cell; ``None`` where it does not."""
    device = compute_device(state)
    if device.type != "cuda" or "nccl" not in str(state.backend):
        return None
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def compute_device(state: DistributedState) -> torch.device:
    """Return the device that this process computes on."""
    device = state.current_device if state.current_device is not None else state.device_type
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")


def barrier(group: Group | None = None) -> None:
    """Wait until all ranks of a group have come here; collective over it."""
    if isinstance(group, CrossWorldGroup):
        group.barrier(0)
        return
    # NCCL gets this rank's GPU: by itself it counts GPUs by the rank, wrong where nodes have unlike numbers of them.
    device = control_device(group)
    dist.barrier(group, device_ids=None if device.type == "cpu" else [device.index])


def connect(groups: Iterable[Group | None], device: torch.device) -> None:
    """Connect groups over NCCL; elsewhere nothing is done. Collective over each group, in one order on all ranks.

    NCCL connects a group in its first call, in which all its ranks must take part: where some send and others do not,
    that call would wait for ever.
    """
    for one in dict.fromkeys(groups) if device.type != "cpu" else ():
        if one is not None:
            all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=one)


LOG = logging.getLogger(__name__)
T = TypeVar("T")
Convert = Callable[[Exception], XfflError] | None


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return a small value of each rank, by rank; collective over the group, by default the world."""
    values = [value] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def check_consistent(
    what: str, value: str, *, error: XfflError | None = None, describe: Describe = None, group: Group | None = None
) -> None:
    """Return if all ranks were given the same and none has an error; raise the same error on all of them otherwise.

    Collective over the world: one all-reduce of 16 bytes, and only where ranks differ an all-gather of their values.
    Where torch.distributed is not initialized nothing moves, and this rank's own error is raised.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    own = (what, value, None) if error is None else (what, "", (class_name(error), str(error)))
    # The call's name is part of what is compared, so that ranks in different calls notice it, too.
    with NamedWait(what, group):
        is_same = _is_same_everywhere(own, group)
        told = [] if is_same else all_gather_json(own, control_device(group), group)
    if is_same and error is None:
        return
    if error is None or not is_same:
        error = describe_difference([(what, value, wrong and tuple(wrong)) for what, value, wrong in told], describe)
    note_alike(error, is_speaker=own_rank(group) == 0)
    raise error


def _is_same_everywhere(own: object, group: Group | None) -> bool:
    """Tell whether all ranks have a value whose ``repr`` is the same; an all-reduce of 16 bytes over the group."""
    [is_same] = compare_hashes([hash_of(own)], group)
    return is_same


def hash_of(value: object) -> int:
    """Return a hash of 63 bits that is the same on all ranks for values with the same ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


def compare_hashes(hashes: Sequence[int | None], group: Group | None) -> list[bool]:
    """Tell for each hash whether all ranks have the same one, and none has ``None``; collective over the group."""
    # A hash and its negative give the minimum and the maximum: both are this rank's own only where all have the same.
    # No hash is negative, so the minimum is not the maximum where a rank has -1 in both places.
    pairs = [(-1, -1) if number is None else (number, -number) for number in hashes]
    extremes = torch.tensor(pairs, dtype=torch.int64, device=control_device(group))
    all_reduce(extremes, dist.ReduceOp.MIN, group)
    return [low == -high for low, high in extremes.tolist()]


@contextmanager
def run_on_all_ranks(
    what: str,
    *,
    convert: Convert = None,
    kinds: tuple[type[Exception], ...] = (Exception,),
    describe: Describe = None,
    group: Group | None = None,
) -> Iterator[Callable[[object], None]]:
    """Run a block that may fail on some ranks only, and leave it with the same error on all of them.

    Collective over the world, as :func:`check_consistent`, which ends the block: the block itself may not use a group
    that a rank with an error has left. It gets a function that takes what the ranks must have in common. ``convert``
    makes errors of xffl of those of ``kinds``.
    """
    values = [""]
    with keep_error(convert, kinds) as failure:
        yield lambda value: values.append(str(value))
    check_consistent(what, values[-1], error=failure.error, describe=describe, group=group)


@dataclass
class LocalError:
    """Why a block has failed on this rank; the other ranks must hear of it."""

    error: XfflError | None = None


@contextmanager
def keep_error(convert: Convert = None, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[LocalError]:
    """Run a block that may fail on some ranks only, and keep its error instead of raising it; local.

    ``convert`` makes errors of xffl of those of ``kinds``, which are raised without it.
    """
    failure = LocalError()
    try:
        yield failure
    except XfflError as wrong:
        failure.error = wrong
    except kinds as wrong:
        if convert is None:
            raise
        failure.error = convert(wrong)
        failure.error.__cause__ = wrong


PRIME = 1_000_003  # steps of the factors of elements, so that two that change places change the sum
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum over elements of what each one's bits and place come to, modulo 2^64; overwrites ``places``."""
    bits = bytes_of(values).view(BITS[values.itemsize]).to(torch.int64, copy=True).view(places.shape)
    bits.add_(PRIME).mul_(places.mul_(2).add_(1).mul_(PRIME))
    # Without it a change of all elements from 1 to 0.5 would add up to a multiple of a high power of two, that is to 0.
    return bits.bitwise_xor_(bits >> 31).sum()


def processor_of(device: torch.device) -> str:
    """Return the kind of a processor: the name of the GPU, or machine and vector units of the CPU; local."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def own_runtime(device: torch.device) -> Runtime:
    """Return what this rank, which computes on a device, runs; local."""
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return Runtime(
        processor=processor_of(device),
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip or "none",
        nccl=".".join(map(str, nccl)) or "none",
        xffl=__version__,
        python=platform.python_version(),
    )


def gather_runtimes(state: DistributedState) -> dict[Runtime, list[int]]:
    """Return what the ranks run, with the ranks of each.

    Collective over the world: an all-reduce of 16 bytes, and only where ranks differ an all-gather of a few texts.
    """
    own = own_runtime(compute_device(state))
    if not dist.is_initialized():
        return {own: [0]}
    if _is_same_everywhere(own, None):
        return {own: list(range(dist.get_world_size()))}
    told = all_gather_json(astuple(own), control_device())
    return group_by_runtime((rank, Runtime(*texts)) for rank, texts in enumerate(told))
