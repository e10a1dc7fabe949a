"""What is kept: sharded checkpoints that are atomic, checked, and load into any layout.

``save`` takes the tensors and values of models and optimizers by layout-free names and what each rank has for itself
(``contents``), and lets torch write them, at once or on a thread, with an index in JSON into a folder that gets its
name last (``format``). ``load`` goes the way back and compares everything before it changes anything. ``manager`` names
checkpoints by step and deletes the oldest, and ``export`` makes safetensors files of one, without a process group.
Who reads one holds the folder of one save open (``opened``). What cannot be deleted is left for later (``removal``).

The names below are imported when they are first used, so that reading files starts light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.checkpoint.export import consolidate_checkpoint
    from xffl.checkpoint.generators import RandomState
    from xffl.checkpoint.load import load_checkpoint
    from xffl.checkpoint.manager import CheckpointManager, auto_resume, find_latest_checkpoint
    from xffl.checkpoint.save import AsyncSaver, PendingSave, save_checkpoint

__all__ = [
    "AsyncSaver",
    "CheckpointManager",
    "PendingSave",
    "RandomState",
    "auto_resume",
    "consolidate_checkpoint",
    "find_latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_names(__name__)
