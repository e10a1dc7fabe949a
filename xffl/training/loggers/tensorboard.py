"""Values for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xffl.extras import optional_import
from xffl.training.loggers.base import Logger, tiled

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/SCOPE``; look at them with ``tensorboard --logdir RUN/tensorboard``.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    :raises ConfigError: if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, scope: str) -> None:
        with optional_import("tensorboard", "TensorBoardLogger needs tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._kind = SummaryWriter
        self._folder = folder / "tensorboard" / scope
        self._purge_step: int | None = None
        self._made: SummaryWriter | None = None

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Write each value as a scalar."""
        for name, value in values.items():
            self._writer().add_scalar(name, value, step, walltime=time_s)

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Write a picture."""
        self._writer().add_image(name, tiled(images), step, dataformats="HWC")

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Write a text."""
        self._writer().add_text(name, text, step)

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Write a table."""
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        text = "\n".join(["| name | value |", "| --- | --- |", *rows])
        self._writer().add_text("configuration", text, 0)

    def cut_after(self, step: int | None) -> None:
        """Begin a file that tells TensorBoard to leave out what others have of later steps."""
        self.close()
        self._purge_step = 0 if step is None else step + 1

    def close(self) -> None:
        """Write what is left."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _writer(self) -> SummaryWriter:
        """Return the writer, which makes its file at once and therefore waits for the first value."""
        if self._made is None:
            self._made = self._kind(str(self._folder), purge_step=self._purge_step)
            self._purge_step = None
        return self._made
