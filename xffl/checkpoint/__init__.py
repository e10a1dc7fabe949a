"""What is kept: sharded checkpoints that are atomic and load into any layout of the same cells."""

from xffl.checkpoint.loading import load_checkpoint
from xffl.checkpoint.rotation import CheckpointManager, auto_resume, find_latest_checkpoint
from xffl.checkpoint.saving import save_checkpoint

__all__ = [
    "CheckpointManager",
    "auto_resume",
    "find_latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
