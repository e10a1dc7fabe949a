"""What is kept: sharded checkpoints that are atomic, checked, and load into any layout."""

from xffl.checkpoint.background import AsyncSaver, PendingSave
from xffl.checkpoint.consolidate import consolidate_checkpoint
from xffl.checkpoint.loading import load_checkpoint
from xffl.checkpoint.random_state import RandomState
from xffl.checkpoint.rotation import CheckpointManager, auto_resume, find_latest_checkpoint
from xffl.checkpoint.saving import save_checkpoint

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
