"""The job of a configuration: what its trainer runs with, as all cells of a job or as one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xffl.cluster.environment import requested_federation
from xffl.cluster.launch.job_layout import JobLayout, lay_out
from xffl.cluster.over_files import OverFiles
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Allocation
from xffl.errors import ConfigError
from xffl.files import TEXT_FILE_LIMIT, read_text
from xffl.jobs.asked_cells import AskedCells, count_of, describe_export
from xffl.jobs.options import JobOptions
from xffl.json_text import parse_json

__all__ = ["ConfiguredJob", "configured_cells", "experiment_of", "print_help", "read_configured"]

_RANK = Path(__file__).with_name("configured_rank.py")  # what each process runs that is started for a configuration
_RUN = ".run"  # behind the name of a file of what is measured: the folder of the run that measures


@dataclass(frozen=True, kw_only=True)
class ConfiguredJob:
    """A configuration with its trainer, and the options that beat it."""

    file: str
    trainer: type
    resolved: Any  # xffl.training.config.configuration.Resolved
    over_files: OverFiles
    asked: Federation | None  # the option --federated
    hsdp: int | None
    asked_processes: int | None

    source: None = None  # ranks have a file to run
    command = (str(_RANK),)
    default = 1  # rank, on this machine, if nobody says how many

    @property
    def variables(self) -> Mapping[str, str]:
        """What hands the configuration to ranks."""
        from xffl.training.config.configuration import write_resolved

        return {"XFFL_RESOLVED": write_resolved(self.file, self.resolved)}

    @property
    def processes(self) -> int | None:
        """How many ranks are asked for."""
        return self.resolved.launch.processes if self.asked_processes is None else self.asked_processes

    @property
    def processes_by(self) -> str:
        """Who asks for them."""
        if self.asked_processes is None and self.resolved.launch.processes is not None:
            return f"launch.processes ({self.resolved.origins.get('launch.processes', 'default')})"
        return "--processes"

    @property
    def federated(self) -> Federation | None:
        """The cells that are asked for, before it is known how they fit: as far as they decide where ranks start."""
        configured = getattr(getattr(self.resolved.config, "distributed", None), "federated", None)
        wishes = (self.asked, self.resolved.launch.federated, requested_federation()[0], configured)
        return next((wish for wish in wishes if wish is not None), None)

    @property
    def timeout_s(self) -> float | None:
        """How long ranks may take, as the configuration says."""
        timeout_s: float | None = self.resolved.launch.timeout_s
        return timeout_s

    @property
    def home(self) -> str | None:
        """The folder of its run, where it has one."""
        experiment = experiment_of(self.resolved)
        return None if experiment is None else experiment.output_dir

    @property
    def resumes(self) -> bool:
        """Whether the same job goes on from a checkpoint of its run."""
        experiment = experiment_of(self.resolved)
        return experiment is not None and experiment.resume

    def of_cell(self, number: int, cells: int, processes: int | None) -> ConfiguredJob:
        """Return the job of one cell of an elastic run, of a configuration of all cells."""
        from xffl.training.config.configuration import with_settings

        settings = _settings_of_elastic_cell(number, cells, self.resolved, processes)
        resolved = with_settings(self.resolved, settings)
        return replace(self, resolved=resolved, asked=None, asked_processes=processes)

    def lay_out(self, start: Allocation) -> tuple[JobLayout, Federation | None]:
        """Lay ranks over hosts; return the cells that were asked for, too."""
        from xffl.training.config.configuration import choose_federation

        federated, replica_size = choose_federation(self.resolved, start.slots, federated=self.asked, hsdp=self.hsdp)
        return lay_out(start.hosts, federated, replica_size), federated

    def rank(self, started: int) -> tuple[Callable[[], object], Mapping[str, str]]:
        """Return what this process is to do, which is one of so many ranks, and the variables for that."""
        from xffl.training.config.configuration import ask_for_cells

        def train() -> None:
            ask_for_cells(self.resolved, federated=self.asked, hsdp=self.hsdp)
            self.trainer(self.resolved.config, origins=self.resolved.origins).fit()

        return train, {}

    def show(self) -> None:
        """Print the configuration."""
        from xffl.training.config.configuration import print_text

        print(print_text(self.resolved), end="")

    def done(self) -> str | None:
        """Tell where the job of a cell, or a measurement, has been made before; ``None`` where it is to be made."""
        asked = getattr(self.resolved.config, "federation", None)
        if asked is None or not asked.is_alone:
            return None
        from xffl.aggregation.exports import read_global

        round_before, start = (0, None) if asked.start_from is None else read_global(asked.start_from)
        if asked.measure_to is not None:
            try:
                summary = parse_json(read_text(Path(asked.measure_to), TEXT_FILE_LIMIT))
            except (OSError, ValueError):
                return None
            is_same = isinstance(summary, dict) and summary.get("start") == start is not None
            return f"{asked.measure_to} has the values of {asked.start_from} already" if is_same else None
        if asked.export_to is None or (asked.round is None and start is None):
            return None
        number = round_before + 1 if asked.round is None else asked.round
        return describe_export(asked.export_to, cell=asked.cell, number=number, start=start, plan=asked.plan)

    @property
    def stale(self) -> str | None:
        """The folder of the measurement before, if it is one."""
        return None if self.over_files.measure is None else f"{self.over_files.measure}{_RUN}"


def read_configured(options: JobOptions, command: Sequence[str], cells: AskedCells) -> ConfiguredJob:
    """Read a configuration, and make it that of the cell that its job is."""
    if options.isolate:
        raise ConfigError(
            "--isolate is for scripts; the trainer of a configuration keeps its cells apart in one world, where it "
            "also compares their metrics: leave --isolate out"
        )
    from xffl.training.config.configuration import read_job_with, with_settings

    file, *words = command
    over_files, asked = cells.over_files, cells.sizes
    settings = _settings_over_files(over_files)
    trainer, resolved = read_job_with(settings, file, words)
    changes: dict[str, Any] = {}
    if cells.elastic is not None:
        changes = _settings_of_elastic_cell(*cells.elastic, resolved, options.processes)
    elif over_files:
        changes = _settings_of_cell(cells, resolved)
        asked = None  # it is a job of one cell
    if changes:
        resolved = with_settings(resolved, changes)
    return ConfiguredJob(
        file=file,
        trainer=trainer,
        resolved=resolved,
        over_files=over_files,
        asked=asked,
        hsdp=cells.replica_size,
        asked_processes=options.processes,
    )


def print_help(file: str, words: Sequence[str], usage: str) -> None:
    """Print the help of a configuration, with its name in the place of ``{}`` in the usage."""
    from xffl.training.config.configuration import config_class, help_text, job_trainer

    print(help_text(config_class(job_trainer(file, words)), usage.format(os.path.basename(file))), end="")


def experiment_of(resolved: Any) -> Any:
    """Return the section that says which run a configuration is of; a trainer need not have it."""
    return getattr(resolved.config, "experiment", None)


def configured_cells(resolved: Any) -> Federation | None:
    """Return the cells that a configuration of all of them has, or a rule that finds them."""
    configured: Federation | None = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    launched: Federation | None = resolved.launch.federated
    return launched if configured is None else configured


def _no_cells(resolved: Any) -> dict[str, Any]:
    """Return the settings by which the configuration of all cells is one of a single cell."""
    configured = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    return {"launch.federated": None, **({} if configured is None else {"distributed.federated": None})}


def _settings_over_files(asked: OverFiles) -> dict[str, Any]:
    """Return the settings with which a configuration's job trains one cell, or measures a model."""
    export = asked.export if asked.measure is None else None
    given = {"cell": asked.cell, "start_from": asked.start, "export_to": export, "measure_to": asked.measure}
    settings: dict[str, Any] = {f"federation.{key}": value for key, value in given.items() if value is not None}
    if asked.measure is None:
        return settings
    # Beside a run of the same name, of which it is no part.
    apart = {"callbacks": [], "experiment.output_dir": f"{asked.measure}{_RUN}", "experiment.resume": False}
    return {**settings, **apart}


def _settings_of_cell(asked: AskedCells, resolved: Any) -> dict[str, Any]:
    """Return the settings with which a job that was meant for all cells is one of them, with the ranks of that one."""
    settings, over_files = _no_cells(resolved), asked.over_files
    configured = getattr(getattr(resolved.config, "distributed", None), "federated", None)
    federated = next((wish for wish in (asked.sizes, resolved.launch.federated, configured) if wish is not None), None)
    number, cells = (0, 1) if asked.lone is None else asked.lone
    if isinstance(cells, int) and isinstance(federated, int):
        cells = (federated,) * cells
    elif isinstance(federated, tuple) and over_files.cell is not None and len(federated) != count_of(cells):
        raise ConfigError(
            f"--cell is {over_files.cell}, of {count_of(cells)} cells, but the configuration has {len(federated)}; "
            "give as many"
        )
    elif isinstance(cells, int) and isinstance(federated, tuple):
        cells = federated  # as they would be in one job
    if isinstance(cells, tuple):
        settings["launch.processes"] = cells[number]
    if over_files.cell is None:
        return settings
    if over_files.measure is None and resolved.origins.get("experiment.output_dir") == "default":
        # Beside those of the other cells, should they be trained from the same folder.
        settings["experiment.output_dir"] = os.path.join(resolved.config.experiment.output_dir, f"cell_{number}")
    settings["federation.cell"] = f"{number}/{cells if isinstance(cells, int) else ','.join(map(str, cells))}"
    return settings


def _settings_of_elastic_cell(number: int, cells: int, resolved: Any, processes: int | None) -> dict[str, Any]:
    """Return the settings with which a job that was meant for all cells of an elastic run is one of them."""
    settings, sizes = _no_cells(resolved), configured_cells(resolved)
    if processes is None and isinstance(sizes, (int, tuple)):
        ranks = (sizes,) * cells if isinstance(sizes, int) else sizes
        if len(ranks) != cells:
            raise ConfigError(
                f"this is cell {number} of {cells}, but the configuration has {len(ranks)} cells; give --processes"
            )
        settings["launch.processes"] = ranks[number]
    if (experiment := experiment_of(resolved)) is not None:
        settings["experiment.output_dir"] = os.path.join(experiment.output_dir, f"cell_{number}")
    return settings
