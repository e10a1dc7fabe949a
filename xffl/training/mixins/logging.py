"""Records of a run: values of steps, of validations and of rounds, written by one rank of each cell."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from xffl.aggregation.report import RoundReport
from xffl.checks import one_of
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.errors import ConfigError, StateError
from xffl.training.loggers import (
    CSVLogger,
    FileLogger,
    JSONLinesLogger,
    LineFile,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandBLogger,
    plain_values,
)
from xffl.training.metrics import SCOPES, WeightedSums, check_value_name, reduce_sums
from xffl.training.mixins.base import StatePart, TrainerMixin
from xffl.training.run_directory import flattened, on_all_ranks, plain_config

__all__ = [
    "LoggerConfigMixin",
    "LoggerMixin",
    "LoggingConfig",
    "MLflowLoggerMixin",
    "TensorBoardLoggerMixin",
    "WandBConfig",
    "WandBLoggerConfigMixin",
    "WandBLoggerMixin",
]

LOG = logging.getLogger(__name__)
FEDERATION = "federation"
MODES = ("online", "offline", "disabled")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where values are written to beside the run's folder, which always has them as JSON lines and CSV.

    :param tensorboard: Whether to write event files for TensorBoard, into the run's folder.
    :param mlflow: Whether to log to MLflow.
    :param mlflow_uri: MLflow's tracking store; by default SQLite files in the run's folder.
    :param mlflow_experiment: MLflow's experiment; by default the run's name.
    """

    tensorboard: bool = False
    mlflow: bool = False
    mlflow_uri: str | None = None
    mlflow_experiment: str | None = None


@dataclass(kw_only=True)
class LoggerConfigMixin:
    """The section of loggers.

    :param logging: Where values are written to.
    """

    logging: LoggingConfig = field(default_factory=LoggingConfig)


@dataclass(frozen=True, kw_only=True)
class WandBConfig:
    """A run of Weights & Biases for each cell.

    :param project: The project.
    :param entity: The team or user; by default the one who is logged in.
    :param mode: ``offline`` writes files in the run's folder, for ``wandb sync``; ``online`` sends; ``disabled`` does
        nothing.
    :param tags: Tags of the run.
    """

    project: str = "xffl"
    entity: str | None = None
    mode: str = "offline"
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        one_of("wandb.mode", self.mode, MODES)


@dataclass(kw_only=True)
class WandBLoggerConfigMixin:
    """The section of Weights & Biases.

    :param wandb: Its run.
    """

    wandb: WandBConfig = field(default_factory=WandBConfig)


class LoggerMixin(TrainerMixin):
    """Record values; JSON lines and CSV are always written.

    Every rank calls the same methods; the first one of each cell writes the cell's records, and rank 0 those of the
    federation.
    """

    _saved_lines: dict[str, int] | None = None
    """How long the files were when the checkpoint was written that was loaded last"""

    def configure_loggers(self, scope: str) -> list[Logger]:
        """Make the loggers of a cell (``cell_0``) or of the ``federation``; called on the rank that writes them.

        Overload it, and add yours to those of ``super()``.
        """
        loggers = self._file_loggers(scope)
        asked = self.section("logging", LoggingConfig)
        if asked.tensorboard or isinstance(self, TensorBoardLoggerMixin):
            loggers.append(TensorBoardLogger(self.run_directory.path, scope))
        if asked.mlflow or isinstance(self, MLflowLoggerMixin):
            loggers.append(
                MLflowLogger(
                    self.run_directory.path,
                    scope,
                    name=self.config.experiment.name,
                    uri=asked.mlflow_uri,
                    experiment=asked.mlflow_experiment,
                )
            )
        return loggers

    def setup(self) -> None:
        """Make the loggers."""
        self._scalars = WeightedSums(self.device)
        self._loggers: dict[str, list[Logger]] = {}
        self._rounds_file: LineFile | None = None
        wrong = "loggers could not be made: {}: {}; see configure_loggers"
        with run_on_all_ranks("loggers", convert=lambda one: ConfigError(wrong.format(type(one).__name__, one))):
            self._open_loggers()
        super().setup()

    def teardown(self, error: BaseException | None) -> None:
        """Write what is left, and close the run's folder, whatever one of the loggers raises."""
        closing = [logger.close for loggers in getattr(self, "_loggers", {}).values() for logger in loggers]
        self._loggers = {}
        for holder in (getattr(self, "_rounds_file", None), getattr(self, "run_directory", None)):
            if holder is not None:
                closing.append(holder.close)  # the folder last: its log tells what the others raise
        failed: Exception | None = None
        for close in closing:
            try:
                close()
            except Exception as wrong:
                LOG.exception("records could not be closed")
                failed = failed or wrong
        super().teardown(error)
        if failed is not None and error is None:  # else that is what the run ends with
            raise failed

    # What a trainer calls ---------------------------------------------------------------------------------------------

    def log_scalar(self, name: str, value: float | torch.Tensor | None, *, weight: float = 1.0) -> None:
        """Keep a value of this rank for the next record, the weighted mean over the cell's ranks; local.

        All ranks of a cell tell the same names between two records. A tensor is added where it is; nothing waits for
        it.

        :param name: Its name, such as ``train/loss``.
        :param value: A number, or a tensor of one element; ``None``, such as a norm that was not measured, is left out.
        :param weight: What it counts for in the mean (samples, tokens).
        :raises ConfigError: if one of them is invalid.
        """
        try:
            scalars = self._scalars
        except AttributeError:
            raise StateError("log_scalar comes after setup(); fit() calls it") from None
        if value is not None:
            scalars.add(name, value, weight)

    def flush_scalars(self) -> None:
        """Record what :meth:`log_scalar` was given since the last time; collective over the cell.

        One all-reduce of about 1 KiB; see :func:`xffl.training.metrics.reduce_sums`.
        """
        means = reduce_sums(self._scalars, self.state, over="cell", device=self.device)
        self._scalars.clear()
        if means:
            self.log_metrics(means)

    def log_metrics(self, values: Mapping[str, float], *, over: str = "cell") -> None:
        """Record values that are the same on all ranks already; local.

        :param values: Numbers by name; without any there is no record.
        :param over: Whether they are of the ``cell`` or of the ``federation``.
        :raises ConfigError: if a name or ``over`` is invalid.
        """
        one_of("over", over, SCOPES)
        for name in values:
            check_value_name(name)
        numbers = {name: float(value) for name, value in values.items()}
        for logger in self._loggers_of(over) if numbers else ():
            logger.log(
                numbers, step=self.global_step, epoch=self.current_epoch, samples=self.samples, time_s=time.time()
            )

    def log_image(self, name: str, images: Any) -> None:
        """Record a picture, or several side by side: those of the cell's first rank; local.

        :param name: Their name.
        :param images: A tensor or array (height, width), (channels, height, width) or (pictures, channels, height,
            width) of bytes or of fractions from 0 to 1.
        :raises ConfigError: on the rank that writes, if it is none of these, or a package is missing.
        """
        check_value_name(name)
        for logger in self._loggers_of("cell"):
            logger.log_image(name, images, step=self.global_step)

    def log_text(self, name: str, text: str) -> None:
        """Record a text: that of the cell's first rank; local.

        :param name: Its name.
        :param text: The text.
        :raises ConfigError: if the name is invalid.
        """
        check_value_name(name)
        for logger in self._loggers_of("cell"):
            logger.log_text(name, text, step=self.global_step)

    def log_round(self, report: RoundReport, *, divergence: Mapping[str, float] | None = None) -> None:
        """Record what a round did; collective over the cell: three numbers of each rank are gathered.

        ``divergence`` is how far the cells' models were apart, by name, where that was measured.
        """
        across, home, codec_error = self._over_cell(report)
        if self._rounds_file is None:
            return
        record: dict[str, Any] = {
            "time": time.time(),
            "step": self.global_step,
            "epoch": self.current_epoch,
            **{item.name: getattr(report, item.name) for item in fields(report)},
            # What is counted and measured by rank, over the cell.
            "bytes_across": across,
            "bytes_home": home,
            "codec_error": codec_error,
        }
        if divergence is not None:
            record["divergence"] = dict(divergence)
        self._rounds_file.append(json.dumps(plain_values(record), allow_nan=False) + "\n")

    # Resuming ---------------------------------------------------------------------------------------------------------

    def own_parts(self) -> dict[str, Any]:
        """Return what was logged since the last record, and how long the files were."""
        return {**super().own_parts(), "records": StatePart(self._records, self._load_records)}

    def on_resumed(self) -> None:
        """Cut later records off; collective over the world: one small all-reduce."""
        lines = self._saved_lines
        self._saved_lines = None
        step = self.global_step
        if self.place_step > step:  # records that a cell of an elastic run may go on from; it tells when it has joined
            step, lines = self.place_step, None
        for loggers in self._loggers.values():
            for logger in loggers:
                logger.cut_after(step)
        if self._rounds_file is not None:
            self._rounds_file.close()
        with on_all_ranks("records of a run that is resumed"):
            self.run_directory.cut_after(step, lines)
        super().on_resumed()

    def _records(self) -> dict[str, Any]:
        files = [] if self._rounds_file is None else [self._rounds_file]
        for logger in (one for loggers in self._loggers.values() for one in loggers):
            files += logger.files if isinstance(logger, FileLogger) else ()
        lines = {str(file.path.relative_to(self.run_directory.path)): file.lines for file in files}
        return {"pending": self._scalars.state_dict(), "lines": lines}

    def _load_records(self, state: Mapping[str, Any]) -> None:
        self._scalars.load_state_dict(state["pending"])
        self._saved_lines = dict(state["lines"])

    # What the parts share ---------------------------------------------------------------------------------------------

    def _file_loggers(self, scope: str) -> list[Logger]:
        return [JSONLinesLogger(self.run_directory.path, scope), CSVLogger(self.run_directory.path, scope)]

    def _open_loggers(self) -> None:
        folder = self.run_directory
        if not folder.is_cell_writer:
            return
        self._rounds_file = LineFile(folder.path / "rounds" / f"{folder.scope}.jsonl")
        self._loggers["cell"] = self.configure_loggers(folder.scope)
        if folder.rank == 0:
            is_alone = self.state.topology.cells == 1
            self._loggers[FEDERATION] = (
                self._file_loggers(FEDERATION) if is_alone else self.configure_loggers(FEDERATION)
            )
        values = flattened(plain_config(self.config))
        for loggers in self._loggers.values():
            for logger in loggers:
                logger.log_config(values)

    def _loggers_of(self, over: str) -> list[Logger]:
        try:
            return self._loggers.get(over, [])
        except AttributeError:
            raise StateError("records come after setup(); fit() calls it") from None

    def _over_cell(self, report: RoundReport) -> tuple[int, int, float | None]:
        """Return what a round of all ranks of the cell has sent, and the largest error of a codec."""
        mine = [report.bytes_across, report.bytes_home, -1.0 if report.codec_error is None else report.codec_error]
        rows = self.world.all_gather(torch.tensor(mine, dtype=torch.float64, device=self.device), "cell")
        across, home, errors = rows.T.tolist()
        return int(sum(across)), int(sum(home)), None if max(errors) < 0 else max(errors)


class TensorBoardLoggerMixin(LoggerMixin):
    """Write for TensorBoard, too, as with ``logging.tensorboard``."""


class MLflowLoggerMixin(LoggerMixin):
    """Log to MLflow, too, as with ``logging.mlflow``."""


class WandBLoggerMixin(LoggerMixin):
    """Log to Weights & Biases, too."""

    def configure_loggers(self, scope: str) -> list[Logger]:
        """Add that of Weights & Biases."""
        asked, name = self.section("wandb", WandBConfig), self.config.experiment.name
        logger = WandBLogger(self.run_directory.path, scope, name=name, **vars(asked))
        return [*super().configure_loggers(scope), logger]
