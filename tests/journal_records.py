"""Samples of what an elastic run's journal holds: one record of each kind."""

from __future__ import annotations

from dataclasses import replace

from xffl.journal.records import (
    MOST_RECORDS,
    ForgetRecord,
    ModelId,
    Record,
    RoundRecord,
    Start,
    StartRecord,
    VoidRecord,
    next_lineage,
)

__all__ = ["BASE", "ID", "RECORDS", "ROUND", "RUN"]

RUN, ID = "a" * 32, "b" * 32
BASE = ModelId(RUN, 6, "c" * 32)
ROUND = RoundRecord(
    run=RUN,
    number=7,
    id=ID,
    round=5,
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
