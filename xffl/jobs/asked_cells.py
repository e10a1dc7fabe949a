"""Which cells a command is for: all of one job, all of an elastic run, or one that is a job of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xffl.checks import integer, number
from xffl.cluster.environment import required_cells
from xffl.cluster.lighthouse.address import MEETING_TIMEOUT_VARIABLE, parse_lighthouse
from xffl.cluster.over_files import OverFiles
from xffl.cluster.sizes import Federation
from xffl.cluster.sizes_text import parse_cell, parse_federation
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError
from xffl.jobs.options import JobOptions

if TYPE_CHECKING:
    from xffl.aggregation.exports import RoundPlan

__all__ = ["NO_CELLS", "AskedCells", "count_of", "describe_export", "read_cells"]

NO_CELLS = (
    "--elastic without an address starts all cells; give --federated, such as 2,2, or the address of a lighthouse and "
    "--cell"
)
"""What is said where all cells of an elastic run are to start, and nobody says which."""


@dataclass(frozen=True, kw_only=True)
class AskedCells:
    """Which cells a command is for; all cells of one job where nothing else is said."""

    sizes: Federation | None = None  # the option --federated
    replica_size: int | None = None  # the option --hsdp
    over_files: OverFiles = field(default_factory=OverFiles)
    lone: tuple[int, int | tuple[int, ...]] | None = None  # the one cell that this job is; how many there are, or ranks
    is_elastic: bool = False  # whether that is one of an elastic run
    is_kept: bool = False  # whether this command starts it again when it fails
    is_all: bool = False  # whether all cells of an elastic run, and their lighthouse, start here
    required: int | None = None  # how many cells there must be at least
    variables: Mapping[str, str] = field(default_factory=dict)  # by which ranks know it

    @property
    def elastic(self) -> tuple[int, int] | None:
        """The cell of an elastic run that this job is, and how many there are."""
        return (self.lone[0], count_of(self.lone[1])) if self.is_elastic and self.lone is not None else None


def read_cells(
    options: JobOptions, over_files: OverFiles, started: int | None, environ: Mapping[str, str] = ENVIRON
) -> AskedCells:
    """Read which cells a command is for; ``started`` is how many processes a launcher has started, if any."""
    is_of_run = over_files.cell is not None and bool(environ.get("XFFL_LIGHTHOUSE", "").strip())
    is_elastic = options.elastic is not None or is_of_run
    is_kept = bool(options.elastic) and started is None
    if is_elastic:
        _refuse_for_elastic(options, over_files, started, environ)
    if options.restarts is not None and options.elastic is None:
        raise ConfigError(f"--restarts {options.restarts} is for cells that xffl exec --elastic starts; leave it out")
    if options.meeting_timeout is not None and options.elastic is None:
        raise ConfigError(f"--meeting-timeout {options.meeting_timeout:g} is for --elastic; leave it out")
    if options.isolate and (is_elastic or over_files):
        raise ConfigError(
            "--isolate is for a job of all cells; with --elastic or --cell each cell is a job, and so a world of its "
            "own, already: leave --isolate out"
        )
    variables = {}
    required = required_cells(environ) if options.require_cells is None else None
    if options.require_cells is not None:
        required = integer("--require-cells", options.require_cells)
    if required is not None and not (is_kept or options.elastic == ""):
        variables["XFFL_REQUIRE_CELLS"] = str(required)
    if options.meeting_timeout is not None:
        seconds = number("--meeting-timeout", options.meeting_timeout, above=0, below=1e9, hint="give seconds")
        variables[MEETING_TIMEOUT_VARIABLE] = f"{seconds:g}"
    if options.restarts is not None:
        integer("--restarts", options.restarts, 0)
    sizes = None if options.federated is None else parse_federation(options.federated, "--federated")
    lone = None if over_files.cell is None else parse_cell(over_files.cell, "--cell")
    if is_elastic and lone is not None:
        variables["XFFL_CELL"] = f"{lone[0]}/{count_of(lone[1])}"
        if options.elastic is not None:
            variables["XFFL_LIGHTHOUSE"] = parse_lighthouse("--elastic", options.elastic)
    return AskedCells(
        sizes=sizes,
        replica_size=options.hsdp,
        over_files=OverFiles() if is_elastic else over_files,
        lone=lone,
        is_elastic=is_elastic,
        is_kept=is_kept,
        is_all=is_elastic and lone is None,
        required=required,
        variables=variables,
    )


def count_of(cells: int | tuple[int, ...]) -> int:
    """Return how many cells there are, given by their number or by the ranks of each."""
    return cells if isinstance(cells, int) else len(cells)


def describe_export(export: str, *, cell: str, number: int, start: str | None, plan: RoundPlan | None) -> str | None:
    """Tell where a cell's export for a round stands already; ``None`` where it does not."""
    from xffl.aggregation.exports import is_exported

    place, cells = parse_cell(cell, "--cell")
    if is_exported(export, cell=place, cells=count_of(cells), round=number, start=start, plan=plan):
        return f"{export} is the export of cell {place} for round {number} already, and whole"
    return None


def _refuse_for_elastic(
    options: JobOptions, over_files: OverFiles, started: int | None, environ: Mapping[str, str]
) -> None:
    """Refuse what does not go with an elastic run."""
    for name, value in (("from", over_files.start), ("export", over_files.export), ("measure", over_files.measure)):
        if value is not None:
            raise ConfigError(
                f"--{name} {value} is for rounds over files, but --elastic or XFFL_LIGHTHOUSE "
                "asks for an elastic run; leave one of them out"
            )
    by_hand = "start xffl lighthouse, and a job for each cell: xffl exec --elastic http://HOST:PORT --cell 0/2"
    if options.elastic == "":
        if over_files.cell is not None:
            raise ConfigError(f"--cell {over_files.cell} needs the lighthouse's address: --elastic http://HOST:PORT")
        if started is not None:
            raise ConfigError(f"--elastic starts all cells, but a launcher has started {started} processes; {by_hand}")
        if options.hosts is not None or options.launcher == "ssh":
            raise ConfigError(f"--elastic starts all cells on this machine or in a SLURM job, not by ssh; {by_hand}")
        return
    if over_files.cell is None:
        hint = "give --cell, such as 0/2, or leave the address out to start all cells"
        raise ConfigError(f"--elastic {options.elastic} joins one cell to a run; {hint}")
    if sizes := options.federated or environ.get("XFFL_FEDERATED", "").strip():
        raise ConfigError(
            f"--federated {sizes} is for a job of several cells, but this one is cell {over_files.cell}; give its "
            "ranks by --processes"
        )
    if options.restarts is not None and (options.elastic is None or started is not None):
        raise ConfigError(f"--restarts {options.restarts} is for ranks that --elastic starts itself; leave it out")
