"""The records of an elastic run's journal, and their text.

A journal has at most one record for each number. There are five kinds:

round
    The cells in it agreed on a model. The record names the model that the round started from (its base), and what each
    cell contributed.
void
    The number was given up: a cell that did not know how its attempt had ended published this in its place.
start
    Cells whose jobs were started, and the models that they hold.
forget
    A cell lost what it held, so that nobody waits for it.
recover
    The first record of a journal that takes the place of a lost one. Cells may hold models of that; the first round
    record names the newest of them, and makes it one of this journal.

The text of a record is a JSON object. Others wrote it, so it is read strictly: unknown names, wrong types and values
beyond their limits raise :class:`~xffl.errors.CheckpointError` with the place of the value.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from xffl.errors import CheckpointError, RoundError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = [
    "LONGEST_RECORD",
    "MOST_CELLS",
    "MOST_RECORDS",
    "PATIENCE_S",
    "STOPPING_S",
    "ForgetRecord",
    "Journal",
    "JournalUnproven",
    "JournalUnreachable",
    "ModelId",
    "Record",
    "RecoverRecord",
    "RoundRecord",
    "Start",
    "StartRecord",
    "VoidRecord",
    "has_id_form",
    "make_id",
    "next_lineage",
    "read_held",
    "read_id",
    "read_record",
    "record_text",
]

LONGEST_RECORD = 1 << 20
"""The most bytes of a record's text"""
MOST_CELLS = 1 << 12
"""The most cells of a federation that a journal records"""
MOST_RECORDS = 10**9
"""One more than the largest number of a record, so that numbers have nine digits"""
PATIENCE_S = 60.0
"""How long a journal is asked, or read again for a record that another cell has seen"""
STOPPING_S = 1.0
"""The same for a cell that is to stop"""
_FORMAT = 2
_FORMAT_WITH_PLACES = 1
"""Round records of this one have a list of zeros, one for each cell, in place of the number of cells."""
_KINDS = ("round", "void", "start", "forget", "recover")
_ID = re.compile(r"[0-9a-f]{16,64}")
_MOST_DEPTH = 4


@dataclass(frozen=True)
class ModelId:
    """The name of an agreed model: the record that made it.

    The number alone does not do: it may be that of another run or of another attempt.
    """

    run: str  # id of the journal's first record
    number: int
    id: str  # of the attempt whose record stands under the number


@dataclass(frozen=True)
class RoundRecord:
    """A round, or an attempt to make one until its record stands."""

    kind: ClassVar[str] = "round"
    run: str
    number: int
    id: str  # random, of one attempt
    round: int  # how many rounds lead to its model, itself included
    base: ModelId | None  # the model that the round starts from; None: the start of its lowest cell
    lineage: str  # see next_lineage()
    cells: tuple[int, ...]  # that took part, ascending; from this record on they hold its model
    weights: tuple[float, ...]  # what each of them contributed; 0 for a cell that was behind
    federation: int  # number of cells of the federation, present or not
    left: tuple[int, ...] = ()  # cells that have finished the run
    recovered: ModelId | None = None  # the model of a lost journal that this one is, if it is one

    @property
    def model(self) -> ModelId:
        """Return the name of the model that the round makes."""
        return ModelId(self.run, self.number, self.id)

    def weight_of(self, cell: int) -> float:
        """Return what a cell contributed; 0 for one that did not take part."""
        return dict(zip(self.cells, self.weights, strict=True)).get(cell, 0.0)


@dataclass(frozen=True)
class VoidRecord:
    """A number that makes no model."""

    kind: ClassVar[str] = "void"
    run: str
    number: int
    id: str


@dataclass(frozen=True)
class Start:
    """One start of a cell's job, as it tells it at its first meeting."""

    cell: int
    id: str  # random, of this start
    held: ModelId | None  # the model that it holds, from a checkpoint for instance


@dataclass(frozen=True)
class StartRecord:
    """The starts that had not been recorded when their cells met."""

    kind: ClassVar[str] = "start"
    run: str
    number: int
    id: str
    starts: tuple[Start, ...]


@dataclass(frozen=True)
class ForgetRecord:
    """A cell that has lost what it held; it counts again for later records."""

    kind: ClassVar[str] = "forget"
    run: str
    number: int
    id: str
    cell: int


@dataclass(frozen=True)
class RecoverRecord:
    """The beginning of a journal that takes the place of a lost one."""

    kind: ClassVar[str] = "recover"
    run: str
    number: int  # 0
    id: str


Record: TypeAlias = RoundRecord | VoidRecord | StartRecord | ForgetRecord | RecoverRecord
"""Any record of a journal"""


class JournalUnreachable(RoundError):
    """A journal could not be asked, or did not answer: whether what was put stands there is not known."""


class JournalUnproven(JournalUnreachable):
    """Whoever answers does not know the run's token, or has heard another one."""


class Journal(Protocol):
    """Where the records of a run stand."""

    @property
    def where(self) -> str:
        """The folder, or the address of the service."""
        ...

    def heed(self, is_stopping: Callable[[], bool] | None) -> None:
        """Wait no longer than :data:`STOPPING_S` for an answer once ``is_stopping()`` is true."""
        ...

    def put(self, record: Record) -> Record:
        """Publish a record unless another one has its number, and return the record that stands under the number.

        The record that is returned survives a power cut. :class:`JournalUnreachable` if it is not known what stands.
        """
        ...

    def read_from(self, number: int) -> list[Record]:
        """Return the records from a number on, in order and without a gap, possibly not all of them.

        Raises :class:`JournalUnreachable` if the journal cannot be read.
        """
        ...


def make_id() -> str:
    """Return a random id, for an attempt or for the start of a job."""
    return secrets.token_hex(16)


def has_id_form(text: str) -> bool:
    """Tell whether a text may be an id."""
    return _ID.fullmatch(text) is not None


def next_lineage(base: RoundRecord | None, attempt: str) -> str:
    """Return the digest of all rounds that lead to the model of an attempt."""
    content = json.dumps(["" if base is None else base.lineage, attempt])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# Their text -----------------------------------------------------------------------------------------------------------


def record_text(record: Record) -> str:
    """Return the text of a record."""
    plain: dict[str, Any] = {
        "format": _FORMAT,
        "kind": record.kind,
        "run": record.run,
        "number": record.number,
        "id": record.id,
    }
    if isinstance(record, RoundRecord):
        plain |= {
            "round": record.round,
            "base": _model_plain(record.base),
            "lineage": record.lineage,
            "cells": record.cells,
            "weights": record.weights,
            "federation": record.federation,
            "left": record.left,
            "recovered": _model_plain(record.recovered),
        }
    elif isinstance(record, StartRecord):
        plain["starts"] = [
            {"cell": start.cell, "id": start.id, "held": _model_plain(start.held)} for start in record.starts
        ]
    elif isinstance(record, ForgetRecord):
        plain["cell"] = record.cell
    text = json.dumps(plain, allow_nan=False) + "\n"
    if len(text) > LONGEST_RECORD:
        raise ValueError(f"record {record.number} has {len(text)} bytes; at most {LONGEST_RECORD} are read")
    return text


def _model_plain(model: ModelId | None) -> dict[str, Any] | None:
    return None if model is None else {"run": model.run, "number": model.number, "id": model.id}


def read_record(text: str | bytes, what: str) -> Record:
    """Return the record whose text :func:`record_text` has written.

    :param text: The text, which may come from anybody.
    :param what: Where it comes from, for errors.
    :return: The record.
    :raises CheckpointError: if it is the text of no record.
    """
    try:
        value = parse_json(text, limit=LONGEST_RECORD, depth=_MOST_DEPTH, is_finite=True)
    except ValueError as error:
        raise CheckpointError(f"{what} is no record of a run's journal: {error}") from error
    given = Fields(value, what, error=CheckpointError, hint="run one version of xffl in all cells")
    number_of_format = given.integer("format", _FORMAT_WITH_PLACES, _FORMAT)
    kind = given.choice("kind", _KINDS)
    run = read_id(given, "run")
    number = given.integer("number", 0, MOST_RECORDS - 1)
    attempt = read_id(given, "id")
    record: Record
    if kind == RoundRecord.kind:
        if number_of_format == _FORMAT_WITH_PLACES:
            size = "places"
            federation = len(given.list_of(size, MOST_CELLS, Fields.integer))
        else:
            size = "federation"
            federation = given.integer(size, 1, MOST_CELLS)
        _refuse_others(given, "round", "base", "lineage", "cells", "weights", size, "left", "recovered")
        cells = _read_cells(given, "cells", federation)
        record = RoundRecord(
            run=run,
            number=number,
            id=attempt,
            round=given.integer("round", 1, MOST_RECORDS),
            base=read_held(given, "base"),
            lineage=read_id(given, "lineage"),
            cells=cells,
            weights=tuple(given.list_of("weights", len(cells), Fields.number, 0)),
            federation=federation,
            left=_read_cells(given, "left", federation),
            recovered=given.optional("recovered", _read_model),
        )
        if not cells or len(record.weights) != len(cells):
            given.fail(f"{given.place('weights')} has {len(record.weights)} items for {len(cells)} cells")
        if record.base is not None and record.base.number >= number and record.base.run == run:
            given.fail(f"{given.place('base')} has the number {record.base.number}, not one below {number}")
    elif kind == StartRecord.kind:
        _refuse_others(given, "starts")
        starts = tuple(given.list_of("starts", MOST_CELLS, _read_start))
        _check_ascending(given, "starts", [start.cell for start in starts])
        record = StartRecord(run, number, attempt, starts)
    elif kind == ForgetRecord.kind:
        _refuse_others(given, "cell")
        record = ForgetRecord(run, number, attempt, given.integer("cell", 0, MOST_CELLS - 1))
    elif kind == RecoverRecord.kind:
        _refuse_others(given)
        record = RecoverRecord(run, number, attempt)
    else:
        _refuse_others(given)
        record = VoidRecord(run, number, attempt)
    return record


def _refuse_others(given: Fields, *names: str) -> None:
    given.refuse_others("format", "kind", "run", "number", "id", *names)


def read_id(given: Fields, name: str) -> str:
    """Return an id; the error of ``given`` if the value is none."""
    text = given.text(name, 64)
    if not has_id_form(text):
        given.fail(f"{given.place(name)} is no id of 16 to 64 hexadecimal digits: {text!r:.80}")
    return text


def _read_model(given: Fields, name: str) -> ModelId:
    fields = given.mapping(name)
    fields.refuse_others("run", "number", "id")
    return ModelId(read_id(fields, "run"), fields.integer("number", 0, MOST_RECORDS - 1), read_id(fields, "id"))


def read_held(given: Fields, name: str) -> ModelId | None:
    """Return the name of a model, or ``None`` where the value is null; a value that is missing is an error."""
    return None if given.any(name) is None else _read_model(given, name)


def _read_start(given: Fields, name: str) -> Start:
    fields = given.mapping(name)
    fields.refuse_others("cell", "id", "held")
    return Start(
        cell=fields.integer("cell", 0, MOST_CELLS - 1),
        id=read_id(fields, "id"),
        held=read_held(fields, "held"),
    )


def _read_cells(given: Fields, name: str, cells: int) -> tuple[int, ...]:
    numbers = given.list_of(name, cells, Fields.integer, 0, max(0, cells - 1))
    _check_ascending(given, name, numbers)
    return tuple(numbers)


def _check_ascending(given: Fields, name: str, cells: Sequence[int]) -> None:
    if list(cells) != sorted({*cells}):
        given.fail(f"{given.place(name)} must name each cell once, in ascending order")
