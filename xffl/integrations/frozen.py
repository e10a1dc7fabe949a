"""The parameters that a framework does not train, as those below adapters, which rounds do not send."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xffl.distributed.cell_notes import CellNotes
from xffl.distributed.consistency import gather_objects
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.sharding import local_tensor
from xffl.errors import ConfigError

__all__ = ["check_frozen"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element"""


def check_frozen(model: nn.Module, state: DistributedState, notes: CellNotes, *, seeding: str) -> None:
    """Refuse isolated cells whose frozen parameters differ: adapters would not go together; collective over the job.

    Each is summed up as integers, once. Shards of cells of unlike sizes are not compared.

    :param model: The model, as a framework has wrapped it.
    :param state: The state of the cell.
    :param notes: What the cells tell each other.
    :param seeding: What a user writes to seed all cells alike, for the message.
    :raises ConfigError: if they differ; another rank may see first that the job's store has ended by it.
    """
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    sums = [_sum_bits(parameter) for parameter in frozen]
    of_ranks = gather_objects(sums)
    sizes = set() if state.isolated is None else set(state.isolated.sizes)
    is_sharded = any(ranks != of_ranks[0] for ranks in of_ranks)
    notes.write("frozen", "unlike shards" if is_sharded and len(sizes) > 1 else str(of_ranks if is_sharded else sums))
    if len(set(notes.gather("frozen"))) > 1:
        raise ConfigError(
            f"the {len(frozen)} frozen parameters differ between the cells, and rounds do not send them; load the same "
            f"file in all cells, or {seeding} before the model is made"
        )


def _sum_bits(parameter: Any) -> int:
    values = local_tensor(parameter.detach())
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64).item())
