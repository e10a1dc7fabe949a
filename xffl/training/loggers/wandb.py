"""Values for Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xffl.extras import optional_import
from xffl.training.loggers.base import Logger, tiled

__all__ = ["WandBLogger"]


class WandBLogger(Logger):
    """A run of Weights & Biases for each cell, and one for the federation, in a group of the run's name.

    A run that is resumed goes on under the same id, which ``wandb/SCOPE.id`` holds. What was logged of later steps
    before stays there; it shows as a second value of the same step.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    :param name: The run's name.
    :param project: The project.
    :param entity: The team or user; by default the one who is logged in.
    :param mode: ``offline`` writes files, for ``wandb sync``; ``online`` sends; ``disabled`` does nothing.
    :param tags: Tags of the run.
    :raises ConfigError: if wandb is not installed.
    """

    def __init__(
        self,
        folder: Path,
        scope: str,
        *,
        name: str,
        project: str,
        entity: str | None = None,
        mode: str = "offline",
        tags: Sequence[str] = (),
    ) -> None:
        with optional_import("wandb", "WandBLogger needs wandb"):
            import wandb
        self._image = wandb.Image
        home = folder / "wandb"
        home.mkdir(exist_ok=True)
        file = home / f"{scope}.id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        self._run = wandb.init(
            project=project,
            entity=entity,
            dir=str(folder),
            id=file.read_text(encoding="utf-8"),
            name=f"{name}-{scope}",
            group=name,
            tags=list(tags),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="create_new",  # rank 0 has two runs at a time
            settings={"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True},
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Log the values with their step, which need not be larger than the last one."""
        self._run.log({**values, "step": step, "epoch": epoch, "samples": samples, "time": time_s})

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Log a picture."""
        self._run.log({name: self._image(tiled(images)), "step": step})

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Log a text."""
        self._run.log({name: text, "step": step})

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the run."""
        self._run.finish()
