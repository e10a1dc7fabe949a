"""Workarounds of Lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["choose_checkpoint", "saves_by_time"]


def choose_checkpoint(trainer: Any, choose: Callable[[Any], str | None]) -> None:
    """Let a function choose the checkpoint that ``fit`` goes on from, given the one that Lightning would take.

    ``fit`` looks at ``trainer.ckpt_path`` before it makes the process group, so a callback cannot set it in Lightning
    2.6, and the ranks cannot agree before:
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/trainer/trainer.py (``_run``).

    :param trainer: The Trainer, in a callback's ``setup``.
    :param choose: Called with the path, or None, where Lightning is about to read it.
    """
    connector = trainer._checkpoint_connector
    resume_start = connector.resume_start

    @wraps(resume_start)
    def resume_from_chosen(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        resume_start(choose(checkpoint_path), *args, **kwargs)

    connector.resume_start = resume_from_chosen


def saves_by_time(callback: Any) -> bool:
    """Tell whether a ``ModelCheckpoint`` has a ``train_time_interval``; local.

    Lightning 2.6 keeps it to itself:
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/callbacks/model_checkpoint.py.

    :param callback: The callback.
    :return: Whether it has one.
    """
    return callback._train_time_interval is not None
