"""What ``xffl report`` reads: each file of a run's folder, and of the folders of an elastic run's cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.chaos.inputs.parser import Form, Parser, command
from tests.unit.test_elastic_report import write_cells
from tests.unit.test_run_report import run_files, write
from xffl.run_report.catalogue import MAX_VALUES
from xffl.run_report.elastic import read_runs
from xffl.run_report.pace import find_slowest_cells
from xffl.run_report.reader import Run
from xffl.run_report.summary import (
    cell_table,
    environment_tables,
    printable,
    read_settings,
    sort_names,
    summary_rows,
    value_rows,
)

FILES: dict[str, Form] = {
    "metrics/cell_0.jsonl": "lines",
    "metrics/federation.jsonl": "lines",
    "rounds/cell_0.jsonl": "lines",
    "topology.json": "json",
    "partition.json": "json",
    "config.yaml": "yaml",
    "origins.json": "json",
    "environment.json": "json",
    "checkpoints/latest": "text",
}
OF_CELLS: dict[str, Form] = {"cell_1/rounds/cell_0.jsonl": "lines", "cell_1/topology.json": "json"}


def tell(run: Run) -> None:
    """Make all texts of a run's page, but no figures."""
    summary_rows(run)
    environment_tables(run)
    find_slowest_cells(run)
    sort_names(list(run.series))[:MAX_VALUES]
    if run.history is not None:
        cell_table(run)
    for note in run.notes:
        printable(note).encode()


def of_run(name: str) -> tuple[Callable[[Path], list[bytes]], Callable[[bytes, Path], None]]:
    def examples(folder: Path) -> list[bytes]:
        write(folder / "mine", run_files())
        return [(folder / "mine" / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        (folder / "mine" / name).write_bytes(content)
        found = read_runs([folder / "mine"])
        value_rows(found)
        read_settings(found)
        tell(found[0])

    return examples, read


def of_cells(name: str) -> tuple[Callable[[Path], list[bytes]], Callable[[bytes, Path], None]]:
    def examples(folder: Path) -> list[bytes]:
        write_cells(folder / "demo")
        return [(folder / "demo" / name).read_bytes()]

    def read(content: bytes, folder: Path) -> None:
        (folder / "demo" / name).write_bytes(content)
        found = read_runs([folder / "demo"])
        value_rows(found)
        for run in (*found, *found[0].parts.values()):
            tell(run)

    return examples, read


def page_of(name: str) -> Callable[[bytes, Path], None]:
    def read(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        command("report", str(folder / Path(name).parts[0]))

    return read


PARSERS = (
    *(Parser(f"report: {name}", form, *of_run(name)) for name, form in FILES.items()),
    *(Parser(f"report: {name}", form, *of_cells(name)) for name, form in OF_CELLS.items()),
    Parser("page: metrics", "lines", of_run("metrics/cell_0.jsonl")[0], page_of("mine/metrics/cell_0.jsonl"), 0.05),
    Parser("page: rounds", "lines", of_run("rounds/cell_0.jsonl")[0], page_of("mine/rounds/cell_0.jsonl"), 0.05),
    Parser("page: topology", "json", of_run("topology.json")[0], page_of("mine/topology.json"), 0.05),
    Parser("page: partition", "json", of_run("partition.json")[0], page_of("mine/partition.json"), 0.05),
    Parser(
        name="page: elastic rounds",
        form="lines",
        examples=of_cells("cell_1/rounds/cell_0.jsonl")[0],
        read=page_of("demo/cell_1/rounds/cell_0.jsonl"),
        share=0.05,
    ),
)
