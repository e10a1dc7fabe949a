"""What an elastic run's journal holds, for tests: one record of each kind, and rounds that follow each other."""

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

__all__ = ["BASE", "ID", "RECORDS", "ROUND", "RUN", "next_round"]

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


def next_round(
    number: int,
    cells: tuple[int, ...],
    base: RoundRecord | None = None,
    *,
    places: tuple[int, ...] = (0, 0, 0),
    left: tuple[int, ...] = (),
    run: str = RUN,
) -> RoundRecord:
    """Return a round in which all of its cells have the weight 1; its id is its number, that of record 0 the run's."""
    name = f"{number:032x}" if number else run
    return RoundRecord(
        run=run,
        number=number,
        id=name,
        round=1 if base is None else base.round + 1,
        base=None if base is None else base.model,
        lineage=next_lineage(base, name),
        cells=cells,
        weights=(1.0,) * len(cells),
        places=places,
        left=left,
    )
