"""Roster of an elastic federation: which cells may make the next round together, from which model, and who is behind.

This module is pure: each cell calls :func:`form_epoch` with the same records and the same journal, and gets the same
epoch, without another message. Its terms:

life
    One start of a cell's job, as the lighthouse knows it.
epoch
    The cells that have met for a round, and the round whose model they start from (its base). A member that does not
    hold that model is behind: it takes over the round's result and contributes nothing.

**The rule** is that of :mod:`xffl.journal.who_continues`, where its proof stands. The newest round of the journal is
the run's model. If a cell here holds it, the cells here continue from it, however few they are; if none does, they wait
for those of its cells that are not here and may hold it. What each cell knows at a meeting may differ: one may have
read a record that another has not. So a meeting decides by the records up to the largest number that any of its members
has told, which all of them have read then. The round that follows tries the next number. If a record stands there
already, the round is not taken, and the cells that have seen it tell its number at the next meeting.

Two more conditions are no part of that rule, because a run cannot go wrong without them:

- A run begins with more than half of its cells (one of two), and goes on with any number of them, unless
  ``least_cells`` says otherwise.
- A cell of the base that is not here may only be late. So the cells meet again until all members that hold the base
  have told that it does not answer, or has been waited for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from xffl.checks import shown
from xffl.cluster.runtimes import Runtime
from xffl.costs import EXCHANGE_FORMAT, format_refusal
from xffl.errors import ConfigError
from xffl.journal.records import MOST_CELLS, MOST_RECORDS, ModelId, RoundRecord, make_id, read_held, read_id
from xffl.journal.who_continues import History, Member, Recovery, Wait, attempt_of, is_behind, largest_told
from xffl.json_text import parse_json
from xffl.reading import Fields
from xffl.topology import cells_text

__all__ = [
    "LONGEST_TOLD",
    "CellRecord",
    "Epoch",
    "cell_of",
    "check_alike",
    "form_epoch",
    "is_life",
    "least_cells",
    "name_cell",
]

LONGEST_TOLD = 1 << 18
"""The most characters of the JSON text that a cell's program passes to the other cells."""
_LONGEST_NAME = 300
_MOST_RANKS = 1 << 24
_LIFE = re.compile(r"([0-9]{1,9})\.[0-9a-f]{1,64}")


@dataclass(frozen=True)
class CellRecord:
    """The message of one cell to the others at a meeting."""

    cell: int  # its number, the same in all of its lives
    cells: int  # number of cells in the federation, present or not
    life: str  # the current start of its job, as the lighthouse knows it; see :func:`cell_of`
    start: str = field(default_factory=make_id)  # the same, as the journal records it
    since: int = -1  # number of the newest record when its job started, before it loaded anything
    held: ModelId | None = None  # the agreed model that it holds; None: it has only its own start
    seen: int = -1  # the largest number of a record that it knows of
    lost: ModelId | None = None  # the model that it holds by a journal that was lost
    run: str = ""  # id of the run, by the journal that it reads; empty if that has no record yet
    round: int = 0  # rounds that lead to its model
    gone: tuple[int, ...] = ()  # absent cells that do not answer it, or for which it has waited
    restarts: int = 0  # number of earlier starts of its job
    ranks: int = 1
    replica_size: int | None = None
    address: str = ""  # HOST:PORT of its store, where the ranks of an epoch may meet
    group: str = ""  # name of the process group that it has kept from the last round
    serial: int = 0  # number of the request among those of this life, so that an old record is recognized
    is_finished: bool = False  # whether the cell leaves after the next round
    told: str = ""  # JSON text from the cell's program: as a text, because numbers might lose bits on the way
    total_weight: float = 0.0  # sum of all cells' weights over all rounds that led to its model
    reach_s: float = 0.0  # how long after this meeting it may come to the next one; 0 if it does not know
    # Number of the format of this record and of all other messages; its key is the same in every format.
    format: int = EXCHANGE_FORMAT
    runtime: Runtime = field(default_factory=Runtime)  # software and processor of its first rank

    @property
    def member(self) -> Member:
        """Return what the journal's rule asks of the cell."""
        return Member(self.cell, self.start, self.since, held=self.held, seen=self.seen, lost=self.lost)

    def to_plain(self) -> dict[str, Any]:
        """Return the record as a mapping of numbers and texts."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CellRecord:
        """Return the record that :meth:`to_plain` has written; ConfigError if another version of xffl wrote it."""
        cell = shown(plain.get("cell", "?"))
        if (number := plain.get("format")) != EXCHANGE_FORMAT:
            runtime = plain.get("runtime")
            xffl = runtime.get("xffl") if isinstance(runtime, Mapping) else None
            theirs = f"{shown(number) if number else 'unknown'}{f' (xffl {xffl!s:.40})' if xffl else ''}"
            raise ConfigError(format_refusal(f"cell {cell}", theirs, "this cell"))
        given = Fields(plain, f"the record of cell {cell}", hint="run one version of xffl in all cells")
        given.refuse_others(*(item.name for item in fields(cls)))
        cells = given.integer("cells", 1, MOST_CELLS)
        ranks = given.integer("ranks", 1, _MOST_RANKS)
        record = cls(
            cell=given.integer("cell", 0, cells - 1),
            cells=cells,
            life=_read_life(given, "life"),
            start=read_id(given, "start"),
            since=given.integer("since", -1, MOST_RECORDS),
            held=read_held(given, "held"),
            seen=given.integer("seen", -1, MOST_RECORDS),
            lost=read_held(given, "lost"),
            run=given.text("run", _LONGEST_NAME),
            round=given.integer("round", 0, MOST_RECORDS),
            gone=tuple(given.list_of("gone", cells, Fields.integer, 0, cells - 1)),
            restarts=given.integer("restarts"),
            ranks=ranks,
            replica_size=given.optional("replica_size", Fields.integer, 1, ranks),
            address=given.text("address", _LONGEST_NAME),
            group=given.text("group", _LONGEST_NAME),
            serial=given.integer("serial"),
            is_finished=given.boolean("is_finished"),
            told=given.text("told", LONGEST_TOLD),
            total_weight=given.number("total_weight", 0),
            reach_s=given.number("reach_s", 0),
            runtime=_read_runtime(given.mapping("runtime")),
        )
        if cell_of(record.life) != record.cell:
            given.fail(f"{given.place('life')} is {record.life}, one of cell {cell_of(record.life)}")
        record.told_values()
        return record

    def told_values(self) -> dict[str, Any]:
        """Return the values that the cell's program passes to the others."""
        try:
            values = parse_json(self.told, limit=LONGEST_TOLD) if self.told else {}
        except ValueError as error:
            raise ConfigError(f"cell {self.cell} has told what cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"cell {self.cell} has told no mapping of names to values, but {shown(values)}")
        return values


def _read_life(given: Fields, name: str) -> str:
    """Return the name of one start of a cell's job."""
    life = given.text(name, _LONGEST_NAME)
    if _LIFE.fullmatch(life) is None:
        given.fail(f"{given.place(name)} is no start of a cell's job: {shown(life)}")
    return life


def _read_runtime(given: Fields) -> Runtime:
    names = [item.name for item in fields(Runtime)]
    given.refuse_others(*names)
    return Runtime(**{name: given.text(name, _LONGEST_NAME) for name in names if name in given})


def cell_of(life: str) -> int:
    """Return the number of a life's cell, with which its name begins: 2 of ``2.8f0c``."""
    return int(life.partition(".")[0])


def is_life(life: str, cells: int) -> bool:
    """Tell whether a text is the name of a life of one of ``cells`` cells."""
    return _LIFE.fullmatch(life) is not None and cell_of(life) < cells


def name_cell(life: str) -> str:
    """Return in words which cell a life claims to be; the text may come from anybody."""
    match = _LIFE.fullmatch(life)
    return f"cell {match[1]}" if match is not None else f"who calls itself {life[:40]!r}"


def least_cells(cells: int) -> int:
    """Return with how many cells a run begins by default: more than half of the federation; one of two."""
    return 1 if cells == 2 else cells // 2 + 1


@dataclass(frozen=True)
class Epoch:
    """The cells that have met for a round, ordered by number, and the round whose model they start from."""

    created: int  # when it was formed; unique
    members: tuple[CellRecord, ...]
    run: str  # id of the run
    number: int  # of the record that the round tries
    base: RoundRecord | None  # None: the start of the lowest cell
    first: int  # the lowest cell that holds the base
    behind: frozenset[int]  # cells that hold another model; before the first round, all but the first
    keeps_group: bool  # whether all still have the same process group, with exactly these members
    refusal: str = ""  # why these cells must not make a round, so that they meet again; empty if they may
    has_new_starts: bool = False  # whether the reason is that starts have to be recorded
    recovering: ModelId | None = None  # the model of a lost journal that has to be recorded, if that is the reason
    wait: Wait | None = None  # the round whose model is missing here, if that is the reason
    awaited: tuple[int, ...] = ()  # absent cells that may hold a newer model, if that is the reason
    missing: tuple[int, ...] = ()  # absent cells that may still come, if that is the reason
    strangers: tuple[CellRecord, ...] = ()  # cells that came with settings of another federation

    @property
    def cells(self) -> tuple[int, ...]:
        """Return the numbers of the cells."""
        return tuple(member.cell for member in self.members)

    @property
    def lives(self) -> tuple[str, ...]:
        """Return the lives of the cells."""
        return tuple(member.life for member in self.members)

    @property
    def base_round(self) -> int:
        """Return how many rounds lead to the base."""
        return 0 if self.base is None else self.base.round

    @property
    def group(self) -> str:
        """Return a unique name for a new process group of the members; it ends with their number."""
        return f"{self.base_round + 1}.{self.created}/{len(self.members)}"

    @property
    def digest(self) -> bytes:
        """Return a digest of all records: two ranks with equal digests were in the same meeting."""
        base = None if self.base is None else self.base.id
        content = [self.created, self.run, self.number, base, *(member.to_plain() for member in self.members)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    @property
    def membership(self) -> str:
        """Return the name of the process group of the round; it stays while the members stay the same."""
        return self.members[0].group if self.keeps_group else self.group

    @property
    def left(self) -> tuple[int, ...]:
        """Return the cells that had finished the run before this epoch."""
        return () if self.base is None else tuple(cell for cell in self.base.left if cell not in self.cells)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all rounds that led to the base."""
        return max(member.total_weight for member in self.members if member.cell not in self.behind)

    def attempt(self, weights: Sequence[float]) -> RoundRecord:
        """Return the record by which the round of this epoch counts, the same on all ranks.

        :param weights: What each member contributes.
        :return: The record, which stands only once it is published.
        """
        return attempt_of(
            run=self.run,
            number=self.number,
            name=self.digest.hex()[:32],
            base=self.base,
            members=[member.member for member in self.members],
            weights=dict(zip(self.cells, weights, strict=True)),
            federation=self.members[0].cells,
            left={*self.left, *(member.cell for member in self.members if member.is_finished)},
        )

    def index_of(self, cell: int) -> int:
        """Return the index of a cell in ``members``."""
        return self.cells.index(cell)


def form_epoch(records: Iterable[CellRecord], created: int, history: History, *, least: int | None = None) -> Epoch:
    """Return the epoch that a meeting forms; pure, so all cells that met get the same.

    :param records: The records of the cells.
    :param created: When the meeting ended, in nanoseconds; unique.
    :param history: The run's journal, at least up to the largest number that a cell has told.
    :param least: How many cells a round needs; by default any number once the run has begun, and :func:`least_cells` to
        begin it.
    :return: The epoch, with a refusal if these cells must not make a round.
    :raises ConfigError: if those cells that have run for longest (before the first round, any cells) were started for
        different federations, or for another one than that of the journal.
    """
    ordered = sorted(records, key=lambda record: (record.cell, record.life))
    history = history.until(largest_told(record.member for record in ordered))
    # Cells that hold what the first round has recovered hold its model.
    ordered = [
        replace(record, held=history.find_recovered(record.lost)) if record.lost is not None else record
        for record in ordered
    ]
    members, strangers = _split([record for record in ordered if not history.is_superseded(record.member)], history)
    asked = [member.member for member in members]
    starts = history.unrecorded(asked)
    chosen = history.choose_base(asked)
    base = chosen.round if isinstance(chosen, Wait) else chosen.base
    if base is not None and members and base.federation != members[0].cells:
        raise ConfigError(
            f"the journal is that of a run of {base.federation} cells, and the cells here are of {members[0].cells}; "
            "give each run a journal of its own"
        )
    model = None if base is None else base.model
    lowest = min((member.cell for member in members), default=0)
    behind = {member.cell for member in members if is_behind(member.cell, member.held, model, lowest=lowest)}
    groups = {member.group for member in members}
    epoch = Epoch(
        created=created,
        members=members,
        run=history.run,
        number=history.newest + 1,
        base=base,
        first=min((member.cell for member in members if member.cell not in behind), default=lowest),
        behind=frozenset(behind),
        keeps_group=len(groups) == 1 and members[0].group.endswith(f"/{len(members)}"),
        strangers=strangers,
    )
    if not members:
        return replace(epoch, refusal="later starts have taken the place of all cells that came")
    if starts:
        return replace(epoch, refusal="the cells' starts are being recorded", has_new_starts=True)
    if isinstance(chosen, Wait):
        return replace(epoch, refusal=_wait_text(chosen), wait=chosen, awaited=chosen.cells)
    recovery = history.find_recovery(asked, members[0].cells)
    return _with_enough(epoch, least) if recovery is None else _refuse_until_recovered(epoch, recovery)


def _refuse_until_recovered(epoch: Epoch, recovery: Recovery) -> Epoch:
    """Return an epoch after the journal was lost, refused until the newest model that a cell holds is recorded."""
    runs = sorted({member.lost.run for member in epoch.members if member.lost is not None})
    if len(runs) > 1:
        raise ConfigError(
            f"the cells hold models of the runs {', '.join(runs)}, so they had different journals; start those of one "
            "run only with their checkpoints"
        )
    if recovery.missing:
        return replace(
            epoch,
            refusal=f"the run's journal was lost, and {cells_text(recovery.missing)} may hold a newer model; start all "
            "cells, or give up what one that is lost holds",
            awaited=recovery.missing,
        )
    return replace(epoch, refusal="the newest model of the lost journal is being recorded", recovering=recovery.newest)


def _with_enough(epoch: Epoch, least: int | None) -> Epoch:
    """Return an epoch of cells that may make a round, refused if they are too few, or if others may still come."""
    known = epoch.members[0].cells
    if least is None:
        least = least_cells(known) if epoch.base is None else 1
    if len(epoch.members) < min(least, known - len(epoch.left)):
        return replace(
            epoch, refusal=f"a round needs {least} of {known} cells, but only {cells_text(epoch.cells)} came"
        )
    expected = range(known) if epoch.base is None else epoch.base.cells
    absent = {cell for cell in expected if cell not in epoch.cells and cell not in epoch.left}
    # Before the first round all are asked, and a cell that is behind does not know where those of the base were.
    judges = [member for member in epoch.members if epoch.base is None or member.cell not in epoch.behind]
    missing = tuple(sorted(cell for cell in absent if any(cell not in judge.gone for judge in judges)))
    if missing:
        return replace(epoch, refusal=f"{cells_text(missing)} may still come", missing=missing)
    return epoch


def _wait_text(wait: Wait) -> str:
    """Return in words whom cells wait for, and how to end that."""
    is_lone = len(wait.cells) == 1
    them = "it" if is_lone else "them"
    they_hold = "it holds" if is_lone else "they hold"
    return (
        f"{cells_text(wait.cells)} took part in round {wait.round.round} (record {wait.round.number}) and may hold its "
        f"model; start {them}, or give up what {they_hold}"
    )


def _split(records: Sequence[CellRecord], history: History) -> tuple[tuple[CellRecord, ...], tuple[CellRecord, ...]]:
    """Separate the cells of the run from newcomers that were started for another federation.

    A cell may have come back with the model and with other settings; those that have run for longest are right.
    """
    holders = [record for record in records if record.held is not None]
    earliest = {member.start for member in history.earliest([record.member for record in holders])}
    right = [record for record in holders if record.start in earliest] or records
    check_alike(right)
    settings = {(record.cells, record.replica_size) for record in right}
    members = tuple(record for record in records if (record.cells, record.replica_size) in settings)
    return members, tuple(record for record in records if record not in members)


def check_alike(members: Sequence[CellRecord]) -> None:
    """Raise ConfigError where cells were started for different federations."""
    for what, text, option in (
        ("cells", "numbers of cells", "--cell NUMBER/CELLS"),
        ("replica_size", "replica sizes", "--hsdp"),
    ):
        first_cell = {getattr(member, what): member.cell for member in reversed(members)}
        if len(first_cell) > 1:
            by_cell = sorted(first_cell.items(), key=lambda item: item[1])
            shown = ", ".join(f"cell {cell}: {value}" for value, cell in by_cell)
            raise ConfigError(f"the cells were given different {text} ({shown}); give all the same ({option})")
