"""What an elastic run's journal holds, for tests: one record of each kind, and rounds that follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xffl.journal.folder import JournalFolder
from xffl.journal.records import (
    MOST_RECORDS,
    ForgetRecord,
    ModelId,
    Record,
    RecoverRecord,
    RoundRecord,
    Start,
    StartRecord,
    VoidRecord,
    make_id,
    next_lineage,
)
from xffl.journal.who_continues import History, Member, attempt_of

__all__ = ["BASE", "ID", "RECORDS", "ROUND", "RUN", "attempt_after", "newest_of", "next_round"]

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
    federation=3,
    left=(1,),
)
RECORDS: list[Record] = [
    ROUND,
    replace(ROUND, base=None, left=()),
    VoidRecord(RUN, 0, RUN),
    StartRecord(RUN, 8, ID, (Start(0, "d" * 32, BASE), Start(3, "e" * 32, None))),
    ForgetRecord(RUN, MOST_RECORDS - 1, ID, 5),
    RecoverRecord(RUN, 0, RUN),
    replace(ROUND, base=None, recovered=ModelId("f" * 32, 57, "c" * 32)),
]


def next_round(
    number: int,
    cells: tuple[int, ...],
    base: RoundRecord | None = None,
    *,
    federation: int = 3,
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
        federation=federation,
        left=left,
    )


def attempt_after(
    history: History,
    base: RoundRecord | None,
    members: Sequence[Member],
    weights: Mapping[int, float],
    *,
    federation: int = 3,
) -> RoundRecord:
    """Return an attempt of some cells to make the next round, with an id of its own."""
    return attempt_of(
        run=history.run,
        number=history.newest + 1,
        name=make_id(),
        base=base,
        members=members,
        weights=weights,
        federation=federation,
    )


def newest_of(folder: JournalFolder) -> int:
    """Return the number of the newest record in a folder; -1 if there is none."""
    return len(folder.read_from(0)) - 1
