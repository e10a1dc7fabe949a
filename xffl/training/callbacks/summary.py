"""Table of the models: layers, parameters, how they are sharded, and what memory they take."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.aggregation.engine.tensors import WRAPPERS, tensors_of
from xffl.checks import integer
from xffl.files import create
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.param_norms import local

if TYPE_CHECKING:
    from xffl.training.trainer import BaseTrainer

__all__ = ["ModelSummaryCallback", "SummaryRow", "summarize"]

FILE = "model.txt"
PLAIN_WIDTH = 160


@dataclass
class SummaryRow:
    """What a part of a model holds; parameters that are tied count where they stand first."""

    name: str
    kind: str
    parameters: int = 0
    """Of the whole part"""
    trained: int = 0
    held: int = 0
    """On this rank"""
    held_bytes: int = 0
    """On this rank"""
    dtypes: set[str] = field(default_factory=set)
    spread: set[str] = field(default_factory=set)


def summarize(model: nn.Module, depth: int = 2) -> list[SummaryRow]:
    """Return a row for each part of a model that has parameters of its own or stands at the given depth; local.

    What lies deeper is added to its part; parameters of the model itself are the row without name.
    """
    kinds = {
        ".".join(part for part in name.split(".") if part and part not in WRAPPERS): module
        for name, module in model.named_modules()
    }
    rows: dict[str, SummaryRow] = {}
    for name, _, _, tensor in tensors_of(model):
        if not isinstance(tensor, nn.Parameter):
            continue
        part = ".".join(name.split(".")[:-1][:depth])
        row = rows.setdefault(part, SummaryRow(part, type(kinds.get(part, model)).__name__.removeprefix("FSDP")))
        own = local(tensor)
        row.parameters += tensor.numel()
        row.trained += tensor.numel() if tensor.requires_grad else 0
        row.held += own.numel()
        row.held_bytes += own.numel() * own.element_size()
        row.dtypes.add(str(tensor.dtype).removeprefix("torch."))
        row.spread.add(_spread(tensor))
    return list(rows.values())


class ModelSummaryCallback(Callback):
    """Show a table of the models before training: rank 0 of the world on its terminal, and ``model.txt`` in the folder.

    Parameters are counted for the whole model and as rank 0 holds them, with their data types, how they are spread over
    the mesh, and the bytes that they take on rank 0 (without gradients and the optimizer's state). Of a pipeline the
    table shows rank 0's stage; the totals are those of all stages, which costs one all-reduce of some numbers.

    :param depth: How many components of names are told apart.
    :param shows: Whether to print the table; it is always written to the folder.
    :raises ConfigError: if an argument is invalid.
    """

    def __init__(self, *, depth: int = 2, shows: bool = True) -> None:
        self.depth = integer("depth", depth)
        self.shows = shows

    def make_console(self) -> Console:
        """Return where the table is shown; override it for another place."""
        return Console()

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Show the table; collective over the pipeline, where there is one."""
        tables = []
        for name, model in trainer.named_models().items():
            rows = summarize(model, self.depth)
            each = [(row.parameters, row.trained, row.held, row.held_bytes) for row in rows]
            totals = torch.tensor(each, dtype=torch.int64, device=trainer.device).reshape(-1, 4).sum(0)
            world = trainer.world
            if world.pp_enabled:
                totals = world.all_reduce(totals, "sum", "pp")
            if world.is_global_zero:
                stage = f", stage 0 of {world.pp_size}" if world.pp_enabled else ""
                tables.append(_table(f"{name} ({type(_inner(model)).__name__}{stage})", rows, totals.tolist()))
        if not tables:
            return
        if self.shows:
            console = self.make_console()
            for table in tables:
                console.print(table)
        path = Path(trainer.config.experiment.output_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with io.TextIOWrapper(create(path, "replace"), encoding="utf-8") as file:
            console = Console(file=file, width=PLAIN_WIDTH, force_terminal=False, color_system=None)
            for table in tables:
                table.box = box.MARKDOWN
                console.print(table)


def _table(title: str, rows: list[SummaryRow], totals: list[int]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("part", "kind", "parameters", "trained", "here", "dtype", "spread", "memory here"):
        is_number = column in ("parameters", "trained", "here", "memory here")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    parameters, trained, held, size = totals
    table.add_section()
    total = SummaryRow("total", "", parameters, trained, held, size)
    table.add_row(*_cells(total))
    return table


def _cells(row: SummaryRow) -> Iterator[str]:
    yield row.name or "(itself)"
    yield row.kind
    yield f"{row.parameters:,}"
    yield "no" if row.trained == 0 else "all" if row.trained == row.parameters else f"{row.trained:,}"
    yield f"{row.held:,}"
    yield ", ".join(sorted(row.dtypes))
    yield ", ".join(sorted(row.spread))
    yield decimal(row.held_bytes)


def _spread(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    names = tensor.device_mesh.mesh_dim_names or tuple(str(dim) for dim in range(tensor.device_mesh.ndim))
    texts = []
    for name, placement in zip(names, tensor.placements, strict=True):
        stem = name.rstrip("0123456789").removesuffix("_")
        how = f"cut along {placement.dim}" if hasattr(placement, "dim") else "copied"
        texts.append(f"{stem}: {how}")
    return "; ".join(texts)


def _inner(model: nn.Module) -> nn.Module:
    inside = getattr(model, "module", None)
    return inside if isinstance(inside, nn.Module) else model
