"""Values for MLflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xffl.extras import optional_import
from xffl.training.loggers.base import Logger

__all__ = ["MLflowLogger"]

PARAMETERS_AT_ONCE = 100
LONGEST_PARAMETER = 6000


class MLflowLogger(Logger):
    """A run of MLflow for each cell, and one for the federation, in an experiment of the run's name.

    A run that is resumed goes on as the same one, whose id ``mlflow/SCOPE.id`` holds. What was logged of later steps
    before stays there beside the new values.

    :param folder: The run's folder.
    :param scope: Whose values these are: ``cell_0``, or ``federation``.
    :param name: The run's name.
    :param uri: The tracking store; by default the SQLite file ``mlflow/SCOPE.db`` in the run's folder, one for each
        cell, since many file systems that ranks share cannot lock it.
    :param experiment: The experiment; by default the run's name.
    :raises ConfigError: if MLflow is not installed.
    """

    def __init__(
        self, folder: Path, scope: str, *, name: str, uri: str | None = None, experiment: str | None = None
    ) -> None:
        with optional_import("mlflow", "MLflowLogger needs mlflow-skinny"):
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric, self._parameter = Metric, Param
        home = (folder / "mlflow").absolute()
        home.mkdir(exist_ok=True)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / scope}.db")
        file = home / f"{scope}.id"
        if file.exists():
            self._id = file.read_text(encoding="utf-8")
            return
        title = experiment or name
        known = self._client.get_experiment_by_name(title)
        if known is None:
            try:
                number = self._client.create_experiment(title)
            except MlflowException:  # another cell was faster
                known = self._client.get_experiment_by_name(title)
                if known is None:
                    raise
        if known is not None:
            number = known.experiment_id
        self._id = self._client.create_run(number, run_name=f"{name}-{scope}").info.run_id
        file.write_text(self._id, encoding="utf-8")

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Log a metric for each value; names keep to the characters that MLflow has."""
        moment = int(time_s * 1000)
        metrics = {**values, "epoch": epoch, "samples": samples}
        self._client.log_batch(
            self._id, metrics=[self._metric(name, float(value), moment, step) for name, value in metrics.items()]
        )

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, name, text[:LONGEST_PARAMETER])

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Log the parameters; those of a run that is resumed stay as they are, as MLflow asks for."""
        known = self._client.get_run(self._id).data.params
        new = [
            self._parameter(name, str(value)[:LONGEST_PARAMETER]) for name, value in values.items() if name not in known
        ]
        for first in range(math.ceil(len(new) / PARAMETERS_AT_ONCE)):
            start = first * PARAMETERS_AT_ONCE
            self._client.log_batch(self._id, params=new[start : start + PARAMETERS_AT_ONCE])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
