"""Checks that all ranks were given the same, errors that all of them raise, and where a backend needs its tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from xffl import __version__
from xffl.cluster.launch.failure import note_alike
from xffl.cluster.runtimes import Runtime, group_by_runtime, runtime_table
from xffl.costs import format_refusal, own_format
from xffl.distributed.collectives import Group, all_gather_json, all_reduce, own_rank
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.differences import Describe, describe_difference, rebuild_error
from xffl.distributed.failures.waits import NamedWait
from xffl.distributed.sharding import bytes_of
from xffl.errors import ConfigError, LaunchError, XfflError, public_name
from xffl.topology import ranks_text

if TYPE_CHECKING:
    from xffl.distributed.distributed_state import DistributedState

__all__ = [
    "barrier",
    "check_consistent",
    "compute_device",
    "connect",
    "control_device",
    "find_unequal_cells",
    "gather_objects",
    "gather_runtimes",
    "home_device",
    "message_device",
    "own_runtime",
    "processor_of",
    "ranks_text",
    "sends_from_gpu",
    "sum_of_bits",
    "tell_runtimes",
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
    device = compute_device(state)
    if state.link_backend is None or device.type != "cuda" or "nccl" not in str(state.backend):
        return None
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def compute_device(state: DistributedState) -> torch.device:
    """Return the device that this process computes on."""
    device = state.current_device if state.current_device is not None else state.device_type
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group have come here; collective over it."""
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
    own = (what, value, None) if error is None else (what, "", (public_name(error), str(error)))
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
    # A hash and its negative give the minimum and the maximum: both are this rank's own only where all have the same.
    h = int.from_bytes(hashlib.sha256(repr(own).encode()).digest()[:8], "big") >> 1
    extremes = torch.tensor([h, -h], dtype=torch.int64, device=control_device(group))
    all_reduce(extremes, dist.ReduceOp.MIN, group)
    low, high = extremes.tolist()
    return bool(low == -high)


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
    error: XfflError | None = None
    try:
        yield lambda value: values.append(str(value))
    except XfflError as wrong:
        error = wrong
    except kinds as wrong:  # whatever it is, the other ranks must hear of it
        if convert is None:
            raise
        error = convert(wrong)
        error.__cause__ = wrong
    check_consistent(what, values[-1], error=error, describe=describe, group=group)


TELL_AFTER_S = 30.0
"""How long rank 0 waits for the others to meet before it says who has not come"""
CHECKSUM_RANGE = 2**40  # sums of ranks are taken modulo this before they are added up, so that thousands fit 64 bits
PRIME = 1_000_003  # steps of the factors of elements, so that two that change places change the sum
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum over elements of what each one's bits and place come to, modulo 2^64; overwrites ``places``."""
    bits = bytes_of(values).view(BITS[values.itemsize]).to(torch.int64, copy=True).view(places.shape)
    bits.add_(PRIME).mul_(places.mul_(2).add_(1).mul_(PRIME))
    # Without it a change of all elements from 1 to 0.5 would add up to a multiple of a high power of two, that is to 0.
    return bits.bitwise_xor_(bits >> 31).sum()


def find_unequal_cells(
    sums: torch.Tensor, cell: int, cells: int, group: Group | None = None
) -> tuple[int, list[int]] | None:
    """Return the first tensor of which some cells hold other values than cell 0, and these cells; ``None`` without.

    ``sums`` are those of this rank's elements of each tensor; each element must count once in each cell. Collective
    over ``group``: moves one number for each tensor and cell.
    """
    table = torch.zeros(cells, len(sums), dtype=torch.int64)
    table[cell] = sums % CHECKSUM_RANGE
    table = table.to(control_device(group))
    all_reduce(table, group=group)
    for index, column in enumerate((table % CHECKSUM_RANGE).t().tolist()):
        if others := [number for number, value in enumerate(column) if value != column[0]]:
            return index, others
    return None


def check_consistent_on_store(
    store: Store,
    rank: int,
    world_size: int,
    value: str,
    error: XfflError | None,
    timeout_s: float,
    *,
    judge: Callable[[], XfflError | None] = lambda: None,
) -> None:
    """Do what :func:`check_consistent` does before there is a process group, over the store that ranks meet at.

    Collective over the world: a handful of small requests to the store from each rank. The rank that arrives last calls
    ``judge`` for what else is wrong with what all have left at the store; all ranks raise it.
    """
    # compare_set() gives the value that stands in the store: the first rank's.
    ours = own_format()
    theirs = store.compare_set("format", "", ours).decode()
    # Where the format's number is another one, whatever else is compared may be told in another way there.
    if theirs.partition(" ")[0] != ours.partition(" ")[0]:
        error = ConfigError(format_refusal(f"rank {rank}", ours, "other ranks", theirs))
    if error is not None:  # this rank has no value to compare
        store.compare_set("error", "", json.dumps([public_name(error), f"{error} (first told by rank {rank})"]))
    elif (common := store.compare_set("value", "", value).decode()) != value:
        text = f"ranks were given different set-ups: rank {rank}: {value}; others: {common}; give all ranks the same"
        store.compare_set("error", "", json.dumps([ConfigError.__name__, text]))
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == world_size:
        if (wrong := judge()) is not None:
            store.compare_set("error", "", json.dumps([public_name(wrong), str(wrong)]))
        store.set("verdict", store.compare_set("error", "", "null").decode())
    try:
        _await_verdict(store, rank, world_size, timeout_s)
    except RuntimeError as late:
        raise LaunchError(
            f"rank {rank} waited for all of {world_size} ranks for {timeout_s:g} s at most, but "
            f"{_absent(store, world_size)}: {late}; see the other ranks' output, or raise timeout_s"
        ) from late
    verdict: list[str] | None = json.loads(store.get("verdict").decode())
    if verdict is not None:
        _wait_for_readers(store, rank, world_size, timeout_s)
        refused = rebuild_error(*verdict)
        note_alike(refused, is_speaker=rank == 0)
        raise refused


def _await_verdict(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait for the verdict; after a while rank 0 says in a line which ranks have not come to the store."""
    first_s = min(TELL_AFTER_S, timeout_s)
    try:
        store.wait(["verdict"], timedelta(seconds=first_s))
        return
    except RuntimeError:
        if first_s == timeout_s:
            raise
    if rank == 0:
        print(
            f"xffl: rank 0 has waited {first_s:g} s for all of {world_size} ranks to meet: "
            f"{_absent(store, world_size)}. See their output, and that all were given the same MASTER_ADDR and "
            "MASTER_PORT",
            file=sys.stderr,
        )
    store.wait(["verdict"], timedelta(seconds=timeout_s - first_s))


def end_on_store(
    store: Store, rank: int | None, world_size: int | None, error: XfflError, timeout_s: float, *, is_speaker: bool
) -> NoReturn:
    """Raise an error on all ranks that wait at the store where they meet, or come to it later, and on this one.

    Local, for a rank that cannot take part: the others find the verdict in :func:`check_consistent_on_store`.
    ``is_speaker``: whether it tells the error; rank 0 does, where it waits with the others.
    """
    teller = "a process whose rank cannot be read" if rank is None else f"rank {rank}"
    store.compare_set("error", "", json.dumps([public_name(error), f"{error} (first told by {teller})"]))
    verdict = store.get("error").decode()
    store.set("verdict", verdict)
    _wait_for_readers(store, rank, world_size, timeout_s)
    refused = rebuild_error(*json.loads(verdict))
    note_alike(refused, is_speaker=is_speaker)
    raise refused


_READ_S = 10.0


def _wait_for_readers(store: Store, rank: int | None, world_size: int | None, timeout_s: float) -> None:
    """Note that this rank knows the verdict; rank 0, in which the store may live, waits until all others do, too."""
    if store.add("read", 1) == world_size:
        store.set("all_read", "")
    if rank == 0:
        with suppress(RuntimeError):  # the verdict says more than who has not come for it
            store.wait(["all_read"], timedelta(seconds=min(timeout_s, _READ_S)))


def _absent(store: Store, world_size: int) -> str:
    """Say which ranks have not come to the store where all meet."""
    try:
        absent = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
    except RuntimeError:  # it went with rank 0
        absent = []
    return f"{ranks_text(absent)} did not come" if absent else "not all came"


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


def tell_runtimes(rows: Sequence[tuple[str, Runtime]]) -> None:
    """Write the table of what the cells run, where something differs; local."""
    if lines := runtime_table(rows):
        where = "docs: Versions and formats, What may differ between cells"
        title = f"what the cells run differs, which is allowed ({where}):"
        text = "\n".join(f"xffl: {line}" for line in (title, *(f"  {line}" for line in lines)))
        print(text, file=sys.stderr, flush=True)


def holders_text(ranks: Iterable[int], sizes: Sequence[int], first: int = 0) -> str:
    """Write which ranks these are: ``cells 0, 2`` where they are whole cells, ``cell 0, rank 5`` with others.

    Cells are numbered from ``first``.
    """
    left, whole = {*ranks}, []
    for cell, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0))):
        if left.issuperset(range(start, stop)):
            whole.append(first + cell)
            left -= {*range(start, stop)}
    cells = [ranks_text(whole).replace("rank", "cell")] if whole else []
    return ", ".join(cells + ([ranks_text(left)] if left else []))
