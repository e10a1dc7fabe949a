"""The model that a trainer of TRL compares with, which rounds do not send."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.several_worlds.cell_notes import CellNotes
from xffl.integrations.frozen import check_alike

__all__ = ["check_reference"]


def check_reference(trainer: Any, state: DistributedState, notes: CellNotes) -> None:
    """Refuse isolated cells that compare with models that differ; collective over the job, before training.

    :param trainer: The Trainer.
    :param state: The state of the cell.
    :param notes: What the cells tell each other.
    :raises ConfigError: if they differ.
    """
    remedy = "load the same file in all cells, or seed them alike before the model is made"
    check_alike("reference parameters", _find_reference(trainer), state, notes, remedy=remedy)


def _find_reference(trainer: Any) -> Collection[nn.Parameter]:
    """Return the parameters of the reference model; none where it is what adapters are added to, which is frozen."""
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module):
        return list(reference.parameters())
    if getattr(trainer.args, "precompute_ref_log_probs", False) and not hasattr(trainer.model, "peft_config"):
        # They were computed when the trainer was made, by the model before it takes the weights of cell 0.
        return list(trainer.model.parameters())
    return []
