"""What is kept: sharded checkpoints that are atomic, checked, and load into any layout."""

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
