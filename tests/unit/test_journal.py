"""The records of the journal and their text; where they stand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xffl.elastic.journal.records import (
    LONGEST_RECORD,
    MOST_CELLS,
    MOST_RECORDS,
    ForgetRecord,
    ModelId,
    Record,
    RoundRecord,
    Start,
    StartRecord,
    VoidRecord,
    make_id,
    next_lineage,
    read_record,
    record_text,
)
from xffl.errors import CheckpointError

RUN, ID = "a" * 32, "b" * 32
BASE = ModelId(RUN, 6, "c" * 32)
ROUND = RoundRecord(
    run=RUN,
    number=7,
    id=ID,
    base=BASE,
    lineage=next_lineage(None, ID),
    cells=(0, 2),
    weights=(0.1, 0.0),
    places=(10, 0, 2**40),
    left=(1,),
)
RECORDS: list[Record] = [
    ROUND,
    replace(ROUND, base=None, left=()),
    VoidRecord(RUN, 0, RUN),
    StartRecord(RUN, 8, ID, (Start(0, "d" * 32, BASE), Start(3, "e" * 32, None))),
    ForgetRecord(RUN, MOST_RECORDS - 1, ID, 5),
]

# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert read_record(record_text(record), "it") == record
    assert read_record(record_text(record).encode(), "it") == record


@given(
    weights=st.lists(st.floats(0, 1e300), min_size=1, max_size=5),
    places=st.lists(st.integers(0, 2**53), min_size=5, max_size=5),
)
def test_numbers_keep_all_their_bits(weights: list[float], places: list[int]) -> None:
    cells = tuple(range(len(weights)))
    record = replace(ROUND, cells=cells, weights=tuple(weights), places=tuple(places))
    assert read_record(record_text(record), "it") == record


def test_a_record_says_who_gave_what() -> None:
    assert [ROUND.weight_of(cell) for cell in range(3)] == [0.1, 0.0, 0.0]
    assert [ROUND.is_behind(0, BASE), ROUND.is_behind(2, None)] == [False, True]
    first = replace(ROUND, base=None)
    assert [first.is_behind(0, None), first.is_behind(2, None)] == [False, True]
    assert ROUND.model == ModelId(RUN, 7, ID)


WRONG = {
    "not JSON": ("{", "is no record of a run's journal"),
    "a list": ("[]", "must be a mapping"),
    "another format": ({"format": 2}, "format of it must be an integer from 1 to 1"),
    "an unknown kind": ({"kind": "rounds"}, "kind of it must be one of"),
    "an unknown name": ({"cell": 1}, "cell of it is unknown"),
    "no number": ({"number": None}, "number of it must be an integer"),
    "a number that is too large": ({"number": MOST_RECORDS}, "number of it must be an integer from 0"),
    "no id": ({"id": "xyz"}, "id of it is no id of 16 to 64 hexadecimal digits"),
    "no base": ({"base": ...}, "base of it is missing"),
    "a base above it": ({"base": {"run": RUN, "number": 7, "id": ID}}, "base of it has the number 7, not one below 7"),
    "a base with more": ({"base": {"run": RUN, "number": 6, "id": ID, "x": 1}}, "base.x of it is unknown"),
    "a cell twice": ({"cells": [0, 0]}, "cells of it must name each cell once"),
    "cells in disorder": ({"cells": [2, 0]}, "cells of it must name each cell once"),
    "a cell that does not exist": ({"cells": [0, 3]}, r"cells\[1\] of it must be an integer from 0 to 2"),
    "no cells": ({"cells": [], "weights": []}, "weights of it has 0 items for 0 cells"),
    "too few weights": ({"weights": [1.0]}, "weights of it has 1 items for 2 cells"),
    "a negative weight": ({"weights": [1.0, -1.0]}, r"weights\[1\] of it must be"),
    "an infinite weight": ({"weights": [1.0, float("inf")]}, "holds Infinity"),
    "a place that is no count": ({"places": [0, 0, 1.5]}, r"places\[2\] of it must be"),
    "too many cells": ({"places": [0] * (MOST_CELLS + 1)}, "places of it has 4097 items"),
    "a long text": (" " * (LONGEST_RECORD + 1), "at most 1048576 are read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_record_is_refused(what: str) -> None:
    change, message = WRONG[what]
    if isinstance(change, dict):
        plain = json.loads(record_text(ROUND)) | change
        text = json.dumps({name: value for name, value in plain.items() if value is not ...})
    else:
        text = change
    with pytest.raises(CheckpointError, match=message):
        read_record(text, "it")


def test_a_start_names_each_cell_once() -> None:
    twice = StartRecord(RUN, 8, ID, (Start(0, "d" * 32, None), Start(0, "e" * 32, None)))
    with pytest.raises(CheckpointError, match="starts of it must name each cell once"):
        read_record(record_text(twice), "it")


def test_a_record_that_nobody_would_read_is_not_written() -> None:
    large = replace(ROUND, cells=tuple(range(MOST_CELLS)), weights=(1e-300 / 3,) * MOST_CELLS, left=(1,) * 10**6)
    with pytest.raises(ValueError, match="record 7 has"):
        record_text(large)


def test_ids_are_random() -> None:
    assert len({make_id() for _ in range(100)}) == 100
