"""Checkpoints of Lightning that are saved after rounds, and not after steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from xffl.checks import integer
from xffl.errors import ConfigError

__all__ = ["RoundCheckpoint"]


class RoundCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    r"""Saves after every so many rounds, in a Trainer with ``FederatedRounds``.

    Cells continue from checkpoints that have the same number of rounds behind them. Where schedules such as
    ``every="balanced:every=100"`` let the cells make unlike numbers of steps between two rounds, a ``ModelCheckpoint``
    saves after unlike rounds in them; this callback after the same ones in all cells. A delayed round counts from its
    merge on.

    .. code-block:: python

       rounds = FederatedRounds(every="balanced:every=100", aggregator={"combine": "fednova"})
       trainer = L.Trainer(callbacks=[rounds, RoundCheckpoint(every_n_rounds=5)])

    :param dirpath: As for ``ModelCheckpoint``.
    :param filename: As for ``ModelCheckpoint``.
    :param every_n_rounds: Rounds, and checks of a schedule that skipped one, from one checkpoint to the next.
    :param \**given: Other keywords of ``ModelCheckpoint``, but for those that say when to save.
    :raises ConfigError: if the number of rounds is invalid.
    """

    def __init__(self, dirpath: Any = None, filename: str | None = None, *, every_n_rounds: int, **given: Any) -> None:
        self._every_n_rounds = integer("every_n_rounds", every_n_rounds, hint="give the rounds between two checkpoints")
        super().__init__(dirpath, filename, every_n_train_steps=1, **given)
        self._count_rounds: Callable[[], int] | None = None
        self._seen = 0
        """Rounds of the cell when this callback has last looked"""

    @property
    def state_key(self) -> str:
        """Tells this callback's state in a checkpoint from that of others."""
        return f"{super().state_key}, every {self._every_n_rounds} rounds"

    def follow(self, count_rounds: Callable[[], int]) -> None:
        """Save after these rounds; local.

        :param count_rounds: Returns how many rounds the cell has behind it, also in earlier starts.
        """
        self._count_rounds = count_rounds

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count: ``FederatedRounds``, which comes first, has entered its rounds."""
        super().on_train_start(trainer, pl_module)
        if self._count_rounds is None:
            raise ConfigError("RoundCheckpoint saves after rounds; add FederatedRounds(...) to the same Trainer")
        self._seen = self._count_rounds()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if the batch has brought a round after which a checkpoint is due."""
        if self._count_rounds is None:
            return
        made, seen = self._count_rounds(), self._seen
        self._seen = made
        if made // self._every_n_rounds > seen // self._every_n_rounds:
            super().on_train_batch_end(trainer, pl_module, outputs=outputs, batch=batch, batch_idx=batch_idx)
