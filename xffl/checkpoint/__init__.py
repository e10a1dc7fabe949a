"""What is kept: sharded checkpoints that are atomic, checked, and load into any layout.

``save`` takes the tensors and values of models and optimizers by layout-free names (``contents``), what each rank has
for itself (``rank_state``), and lets torch write them with an index in JSON (``storage``) into a folder that gets its
name last (``format``). ``load`` goes the way back and compares everything before it changes anything. ``async_save``
writes a copy on a thread, ``manager`` names checkpoints by step and deletes the oldest, and ``export`` makes
safetensors files of one, without a process group.

The names below are imported when they are first used, so that reading files starts light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.lazy import lazy_names

if TYPE_CHECKING:
    from xffl.checkpoint.async_save import AsyncSaver, PendingSave
    from xffl.checkpoint.export import consolidate_checkpoint
    from xffl.checkpoint.load import load_checkpoint
    from xffl.checkpoint.manager import CheckpointManager, auto_resume, find_latest_checkpoint
    from xffl.checkpoint.rank_state import RandomState
    from xffl.checkpoint.save import save_checkpoint

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

_HOMES = {
    "AsyncSaver": "xffl.checkpoint.async_save",
    "CheckpointManager": "xffl.checkpoint.manager",
    "PendingSave": "xffl.checkpoint.async_save",
    "RandomState": "xffl.checkpoint.rank_state",
    "auto_resume": "xffl.checkpoint.manager",
    "consolidate_checkpoint": "xffl.checkpoint.export",
    "find_latest_checkpoint": "xffl.checkpoint.manager",
    "load_checkpoint": "xffl.checkpoint.load",
    "save_checkpoint": "xffl.checkpoint.save",
}
"""Where the names live."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
