"""Workarounds of transformers 5."""

from __future__ import annotations

from typing import Any

__all__ = ["save_checkpoint"]


def save_checkpoint(trainer: Any) -> None:
    """Save a checkpoint of a Trainer, as it does between its steps; collective over its ranks.

    Up to transformers 5.24 nothing public does so with the optimizer, and behind the last step nothing asks the
    callbacks whether to: https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/trainer.py
    (``_maybe_log_save_evaluate``).

    :param trainer: The Trainer.
    """
    trainer._save_checkpoint(trainer.model, None)
    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
