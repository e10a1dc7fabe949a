"""A process group for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from xffl.cluster.cells import Federation, parse_cell
from xffl.cluster.environment import read_over_files
from xffl.cluster.launch.failure import note_failure
from xffl.cluster.network import Timeouts
from xffl.distributed.distributed_state import DEFAULT_TIMEOUT_S, DistributedState
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.process_group import cleanup_distributed_process_group, setup_distributed_process_group
from xffl.errors import ConfigError

__all__ = ["session"]


@contextmanager
def session(
    *,
    federated: Federation | None = None,
    hsdp: int | None = None,
    backend: str | None = None,
    device: torch.device | str | int | None = None,
    streams: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ifname: str | None = None,
    device_parameters: DeviceParameters | None = None,
    timeouts: Timeouts | None = None,
    cell: int | None = None,
    cells: int | Sequence[int] | None = None,
) -> Iterator[DistributedState]:
    """Join the other processes, yield the state, and leave again.

    Entering and leaving are collective over the world. Leaving by an exception (Ctrl-C too) does not communicate, so a
    rank that fails is not kept waiting by the others.

    .. code-block:: python

       with xffl.session(federated=(4, 4), hsdp=2) as state:
           model = xffl.shard(build_model(), state)

    :param federated: Sizes of the federated groups, one size for equal ones, or a rule that finds them: ``auto``
        (SLURM's network), ``auto:LEVEL``, ``hosts:REGEX``, ``file:PATH``; by default what ``XFFL_FEDERATED`` says.
    :param hsdp: Size of a replica; by default what ``XFFL_HSDP`` says, else none.
    :param backend: Communication backend; by default ``gloo``, and ``cpu:gloo,cuda:nccl`` on CUDA: NCCL for what lies
        on GPUs, gloo for the votes of rounds and all else that the host must hear of if a rank is lost.
    :param device: Device of this process; by default the GPU of its local rank where there are GPUs, else the CPU.
    :param streams: CUDA streams, and so handles, for the groups of a round; 4 by default on CUDA.
    :param timeout_s: Seconds after which a collective over the world gives up; within a cell it is half of that,
        between cells three quarters.
    :param ifname: Network interface for gloo and NCCL; by default what ``XFFL_IFNAME`` says.
    :param device_parameters: The mesh inside each cell, in place of ``hsdp``; its timeouts are not read here.
    :param timeouts: How long each level waits (in a cell, between cells, over the world), in place of ``timeout_s``.
    :param cell: Which cell this job is, from 0, where each cell is a job of its own and rounds go over files; by
        default what ``XFFL_CELL`` says, else none. The state keeps it as ``lone_cell``, and its ``data_place`` deals
        samples out as in one job of all cells.
    :param cells: With ``cell``, how many cells there are, or the ranks of each.
    :yield: The state.
    :raises ConfigError: if this job is not like that cell; on all ranks.
    """
    lone_cell = _read_cell(cell, cells)
    state = setup_distributed_process_group(
        backend=backend,
        device=device,
        hsdp=hsdp,
        federated=federated,
        streams=streams,
        timeout_s=timeout_s,
        ifname=ifname,
        device_parameters=device_parameters,
        timeouts=timeouts,
    )
    try:
        if lone_cell is not None:
            state._lone_cell = _check_cell(*lone_cell, state)
        yield state
    except BaseException as error:
        note_failure(error)  # before the others lose this rank, so that it counts as the first to fail
        cleanup_distributed_process_group(state, synchronize=False)
        raise
    cleanup_distributed_process_group(state)


def _read_cell(cell: int | None, cells: int | Sequence[int] | None) -> tuple[int, int | tuple[int, ...]] | None:
    """Return which cell this job is asked to be, and how many there are, or the ranks of each."""
    if (cell is None) != (cells is None):
        raise ConfigError(f"cell is {cell} and cells is {cells}; give both, such as cell=0, cells=2")
    if cell is None or cells is None:
        text = read_over_files().cell
        return None if text is None else parse_cell(text, "XFFL_CELL")
    sizes = cells if isinstance(cells, int) else ",".join(map(str, cells))
    return parse_cell(f"{cell}/{sizes}", "cell")


def _check_cell(cell: int, cells: int | tuple[int, ...], state: DistributedState) -> tuple[int, tuple[int, ...]]:
    """Return which cell this job is, and the ranks of all."""
    topology = state.topology
    sizes = (topology.world_size,) * cells if isinstance(cells, int) else cells
    if topology.cells > 1 or sizes[cell] != topology.world_size:
        raise ConfigError(
            f"this job is to be cell {cell}, of {sizes[cell]} ranks, but it has {topology.cells} cells and "
            f"{topology.world_size} ranks; start as many, without a federation"
        )
    return cell, sizes
