"""The parameters that a framework does not train, as those below adapters, which rounds do not send."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from xffl.distributed.agreement.consistency import gather_objects
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.distributed.values.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["check_alike", "check_frozen"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element"""


def check_frozen(model: nn.Module, state: DistributedState, notes: CellNotes, *, seeding: str) -> None:
    """Refuse isolated cells whose frozen parameters differ: adapters would not go together; collective over the job.

    :param model: The model, as a framework has wrapped it.
    :param state: The state of the cell.
    :param notes: What the cells tell each other.
    :param seeding: What a user writes to seed all cells alike, for the message.
    :raises ConfigError: if they differ; another rank may see first that the job's store has ended by it.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    remedy = f"load the same file in all cells, or {seeding} before the model is made"
    check_alike("frozen parameters", frozen, state, notes, remedy=remedy)


def check_alike(
    name: str, parameters: Collection[nn.Parameter], state: DistributedState, notes: CellNotes, *, remedy: str
) -> None:
    """Refuse isolated cells in which parameters that rounds do not send differ; collective over the job.

    Each is summed up as integers, once. Shards of cells of unlike sizes are not compared.

    :param name: What they are, for the message.
    :param parameters: The parameters of this rank.
    :param state: The state of the cell.
    :param notes: What the cells tell each other.
    :param remedy: What a user does, for the message.
    :raises ConfigError: if they differ; another rank may see first that the job's store has ended by it.
    """
    sums = [_sum_bits(parameter) for parameter in parameters]
    of_ranks = gather_objects(sums)
    sizes = set() if state.isolated is None else set(state.isolated.sizes)
    is_sharded = any(ranks != of_ranks[0] for ranks in of_ranks)
    notes.write(name, "unlike shards" if is_sharded and len(sizes) > 1 else str(of_ranks if is_sharded else sums))
    if len(set(notes.gather(name))) > 1:
        raise ConfigError(
            f"the {len(parameters)} {name} differ between the cells, and rounds do not send them; {remedy}"
        )


def _sum_bits(parameter: Any) -> int:
    # Stage 3 of ZeRO leaves the parameter empty, and this rank's part beside it.
    values = getattr(parameter, "ds_tensor", local_tensor(parameter.detach()))
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64).item())
