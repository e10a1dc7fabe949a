"""Roster of an elastic federation: which cells may make the next round together, from which model, and who is behind.

This module is pure: each cell calls :func:`form_epoch` with the same records and gets the same epoch, without another
message. Its terms:

version
    A model that cells have agreed on, named by the number of the round that made it and by its lineage, a digest of
    all rounds before it. Two models of one version are equal to the bit.
epoch
    The cells that have met for a round, and the version that the round starts from (its base). A member that holds an
    older version is behind: it takes over the round's result and contributes nothing.
life
    One start of a cell's job. A cell that is started again is another life of the same cell.
voters
    The lives that agreed on a version. Its successor may be made by any of: more than half of the voters; half of
    them, if the lowest cell is among these; all cells of the voters, in any life, if one of the voters has attended
    every meeting since; all known cells. Any two of these sets overlap, so a federation never splits into two that
    continue from one version independently. On one machine, where each cell sees which lives have not ended, the
    living cells continue, however few they are. A life that ends normally between rounds bequeaths its vote to the
    next life of its cell, because it has agreed on no later version.
doubt
    The state of a cell that voted to commit a round and lost contact before it saw the result. It keeps both models,
    the one from before the round and the one that the round made. At the next meeting the doubt ends: if any member of
    that round rolled it back, then nobody committed it; otherwise all cells in doubt commit it, because an absent
    cell may have done so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from xffl.checks import shown
from xffl.cluster.runtimes import Runtime
from xffl.costs import EXCHANGE_FORMAT, format_refusal
from xffl.errors import ConfigError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = [
    "LONGEST_TOLD",
    "MOST_LIVES",
    "Attendance",
    "CellRecord",
    "Epoch",
    "Standing",
    "Version",
    "cell_of",
    "cells_text",
    "check_alike",
    "form_epoch",
    "is_life",
    "least_cells",
    "name_cell",
    "read_life",
]

LONGEST_TOLD = 1 << 18
"""The most characters of the JSON text that a cell's program passes to the other cells."""
_LONGEST_NAME = 300
_MOST_CELLS = 1 << 16
_MOST_RANKS = 1 << 24
MOST_LIVES = 1 << 16
"""The most earlier lives whose votes one life inherits"""
_LATEST_NS = (1 << 63) - 1
_LIFE = re.compile(r"([0-9]{1,9})\.[0-9a-f]{1,64}")


@dataclass(frozen=True)
class Version:
    """The name of an agreed model, the same in all cells that hold it."""

    round: int = 0  # committed rounds that led to it
    created: int = 0  # when the epoch of its last round was formed, in nanoseconds, by the lighthouse's clock
    lineage: str = ""  # digest of all rounds that led to it; empty before the first round: each cell has its own start
    voters: tuple[str, ...] = ()  # the lives that agreed on it

    @property
    def is_agreed(self) -> bool:
        """Whether a round made it, as opposed to the model with which a cell starts."""
        return bool(self.lineage)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], what: str = "the version", *, hint: str = "") -> Version:
        """Return the version whose fields :func:`dataclasses.asdict` has written as numbers and texts.

        The values may come from anybody: ConfigError if one has the wrong type or exceeds its limit.
        """
        return cls._read(Fields(plain, what, hint=hint))

    @classmethod
    def _read(cls, given: Fields) -> Version:
        return cls(
            round=given.integer("round"),
            created=given.integer("created", 0, _LATEST_NS),
            lineage=given.text("lineage", _LONGEST_NAME),
            voters=tuple(given.list_of("voters", _MOST_CELLS, read_life)),
        )


@dataclass(frozen=True)
class CellRecord:
    """The message of one cell to the others at a meeting."""

    cell: int  # its number, the same in all of its lives
    cells: int  # number of cells in the federation, present or not
    life: str  # the current start of its job; see :func:`cell_of`
    restarts: int = 0  # number of earlier starts of its job
    ranks: int = 1
    replica_size: int | None = None
    address: str = ""  # HOST:PORT of its store, where the ranks of an epoch may meet
    version: Version = Version()  # the version that it holds
    doubt: Version | None = None  # the version that it holds as well, if the round in doubt was committed
    group: str = ""  # name of the process group that it has kept from the last round
    left: tuple[int, ...] = ()  # cells that have finished the run
    inherited: tuple[str, ...] = ()  # earlier lives of its cell that ended with this version and bequeathed their votes
    serial: int = 0  # number of the request among those of this life, so that an old record is recognized
    is_finished: bool = False  # whether the cell leaves after the next round
    looks: int = 0  # requests since its last round at which a cell was missing
    same_lighthouse: bool = False  # whether this lighthouse formed the epochs of its version and of its doubt
    met: int = 0  # number of the last meeting that it attended at this lighthouse
    has_met_all: bool = False  # whether it attended every meeting from those of its version and its doubt up to ``met``
    living: tuple[str, ...] | None = None  # all lives that have entered an epoch and not ended; None if not known
    told: str = ""  # JSON text from the cell's program: as a text, because numbers might lose bits on the way
    total_weight: float = 0.0  # sum of all cells' weights over all rounds that led to its version
    # Number of the format of this record and of all other messages; its key is the same in every format.
    format: int = EXCHANGE_FORMAT
    runtime: Runtime = field(default_factory=Runtime)  # software and processor of its first rank

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
        cells = given.integer("cells", 1, _MOST_CELLS)
        ranks = given.integer("ranks", 1, _MOST_RANKS)
        doubt = given.optional("doubt", Fields.mapping)
        record = cls(
            cell=given.integer("cell", 0, cells - 1),
            cells=cells,
            life=read_life(given, "life"),
            restarts=given.integer("restarts"),
            ranks=ranks,
            replica_size=given.optional("replica_size", Fields.integer, 1, ranks),
            address=given.text("address", _LONGEST_NAME),
            version=Version._read(given.mapping("version")),
            doubt=None if doubt is None else Version._read(doubt),
            group=given.text("group", _LONGEST_NAME),
            left=tuple(given.list_of("left", cells, Fields.integer, 0, cells - 1)),
            inherited=tuple(given.list_of("inherited", MOST_LIVES, read_life)),
            looks=given.integer("looks"),
            serial=given.integer("serial"),
            is_finished=given.boolean("is_finished"),
            same_lighthouse=given.boolean("same_lighthouse"),
            met=given.integer("met", 0, _LATEST_NS),
            has_met_all=given.boolean("has_met_all"),
            living=None if plain.get("living") is None else tuple(given.list_of("living", MOST_LIVES, read_life)),
            told=given.text("told", LONGEST_TOLD),
            total_weight=given.number("total_weight", 0),
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


def read_life(given: Fields, name: str) -> str:
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
    """Return how many cells a round needs by default: more than half of the federation; one of two."""
    return 1 if cells == 2 else cells // 2 + 1


@dataclass(frozen=True)
class Epoch:
    """The cells that have met for a round, ordered by number, and the version that the round starts from."""

    created: int  # when it was formed; unique
    members: tuple[CellRecord, ...]
    base: Version  # the version that the round starts from
    first: int  # the lowest cell that holds the base
    behind: frozenset[int]  # cells that hold another model; before the first round, all but the first
    keeps_group: bool  # whether all still have the same process group, with exactly these members
    refusal: str = ""  # why these cells must not make a round, so that they meet again; empty if they may
    looks_again: bool = False  # whether the only reason is that a missing cell may still come
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
    def has_all_holders(self) -> bool:
        """Return whether no absent cell can hold the base, a later version or a doubt: all living lives are here.

        Every member must have seen so. One member's view is not enough, since after it another member may have made a
        round with a newcomer; the last view was taken when all members were already waiting in this meeting. If all
        voters of the base have ended, as for a model from a checkpoint, other cells may come with a later version.
        """
        here = {*self.lives}
        views = [member.living for member in self.members]
        return not here.isdisjoint(self.base.voters) and all(view is not None and {*view} <= here for view in views)

    @property
    def group(self) -> str:
        """Return a unique name for a new process group of the members; it ends with their number."""
        return f"{self.base.round + 1}.{self.created}/{len(self.members)}"

    @property
    def digest(self) -> bytes:
        """Return a digest of all records: two ranks with equal digests were in the same meeting."""
        content = [self.created, self.first, *(member.to_plain() for member in self.members)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    @property
    def membership(self) -> str:
        """Return the name of the process group of the round; it stays while the members stay the same."""
        return self.members[0].group if self.keeps_group else self.group

    @property
    def left(self) -> tuple[int, ...]:
        """Return the cells that had finished the run before this epoch."""
        return tuple(sorted({cell for member in self.members for cell in member.left} - {*self.cells}))

    @property
    def has_same_lighthouse(self) -> bool:
        """Return whether this lighthouse is known to be the one that formed the epoch of the base."""
        return any(member.same_lighthouse and member.version == self.base for member in self.members)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the absent cells that may be alive: voters of the base; before the first round, all other cells."""
        if not self.base.is_agreed:
            return tuple(sorted({*range(self.members[0].cells)} - {*self.cells}))
        # If another life of a cell is here, the one that voted has ended.
        return tuple(sorted(cell for cell in map(cell_of, self.base.voters) if cell not in (*self.cells, *self.left)))

    @property
    def votes(self) -> frozenset[str]:
        """Return the lives whose votes count: the members', and those that holders of the base have inherited."""
        inherited = (life for member in self.members if member.version == self.base for life in member.inherited)
        return frozenset((*self.lives, *inherited))

    @property
    def next_left(self) -> tuple[int, ...]:
        """Return the cells that will have finished once the round is committed."""
        return tuple(sorted({*self.left, *(member.cell for member in self.members if member.is_finished)}))

    @property
    def next_version(self) -> Version:
        """Return the version that the round makes; no other round can make a version of the same name."""
        content = json.dumps([self.base.lineage, self.base.round, self.created, self.lives])
        lineage = hashlib.sha256(content.encode()).hexdigest()[:16]
        return Version(self.base.round + 1, self.created, lineage, self.lives)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all rounds that led to the base.

        If all holders were in doubt about the last of these rounds, none of them knows its weight, which is left out.
        """
        return max(member.total_weight for member in self.members if self.base in (member.version, member.doubt))

    def index_of(self, cell: int) -> int:
        """Return the index of a cell in ``members``."""
        return self.cells.index(cell)


def form_epoch(
    records: Iterable[CellRecord], created: int, number: int = 0, *, least: int | None = None, looks: int = 1
) -> Epoch:
    """Return the epoch that a meeting forms; pure, so all cells that met get the same.

    :param records: The records of the cells, one each.
    :param created: When the meeting ended, in nanoseconds; unique.
    :param number: The lighthouse's number of the meeting: unchanged if the same lives met again, else the next.
    :param least: How many cells a round needs; by default :func:`least_cells`, or any number if all living cells are
        known to be here.
    :param looks: How often the cells meet again before they continue without a cell of the last round, if the
        lighthouse may have been replaced since, or a newcomer is here.
    :return: The epoch, with a refusal if these cells must not make a round.
    :raises ConfigError: if cells that hold a version (or, before the first round, any cells) were started for
        different federations.
    """
    members, strangers = _split(sorted(records, key=lambda record: (record.cell, record.life)))
    resolved = tuple(_resolve(member, members) for member in members)
    versions = [member.version for member in resolved]
    base = max(versions, key=lambda version: (version.round, version.created, version.lineage))
    holders = [member.cell for member in resolved if member.version == base]
    first = holders[0]
    behind = frozenset(
        member.cell for member in resolved if member.version != base or not (base.is_agreed or member.cell == first)
    )
    groups = {member.group for member in members}
    keeps_group = len(groups) == 1 and members[0].group.endswith(f"/{len(members)}")
    epoch = Epoch(
        created=created,
        members=resolved,
        base=base,
        first=first,
        behind=behind,
        keeps_group=keeps_group,
        strangers=strangers,
    )
    refusal = _refusal(epoch, least, number)
    # The same lighthouse formed the last epoch, so a missing cell has stopped sending heartbeats. A lighthouse that was
    # started since may not have received its first heartbeat yet. If a newcomer asked long before the others did, the
    # lighthouse has not waited for late cells either.
    is_reliable = epoch.has_same_lighthouse and all(member.life in base.voters for member in resolved)
    if epoch.has_all_holders or is_reliable:
        looks = 0
    if not refusal and epoch.missing and min(member.looks for member in members) < looks:
        return replace(epoch, refusal=f"{cells_text(epoch.missing)} may still come", looks_again=True)
    return replace(epoch, refusal=refusal)


def _split(records: Sequence[CellRecord]) -> tuple[tuple[CellRecord, ...], tuple[CellRecord, ...]]:
    """Separate the cells of the run from newcomers that were started for another federation."""
    agreed = [record for record in records if record.version.is_agreed]
    check_alike(agreed or records)
    settings = {(record.cells, record.replica_size) for record in agreed or records}
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


def _resolve(member: CellRecord, members: Sequence[CellRecord]) -> CellRecord:
    """Return a record with its doubt ended: the round in doubt counts unless one of its members rolled it back."""
    doubt = member.doubt
    if doubt is None:
        return member
    is_refused = any(
        # A cell with a later version is followed, whatever became of the round in doubt.
        other.version.created > doubt.created
        or (other.life in doubt.voters and other.version != doubt and other.doubt != doubt)
        for other in members
    )
    return replace(member, version=member.version if is_refused else doubt, doubt=None)


def _refusal(epoch: Epoch, least: int | None, number: int) -> str:
    """Return why the members must not make a round, or an empty text."""
    known = epoch.members[0].cells
    twice = [cell for cell, count in Counter(epoch.cells).items() if count > 1]
    if twice:
        verb = "is" if len(twice) == 1 else "are"
        return f"{cells_text(twice)} {verb} there twice; if two jobs have the same number (--cell), end one of them"
    if len(epoch.members) + len(epoch.left) >= known:
        return ""  # every cell that could hold a later version is here
    needed = 1 if least is None and epoch.has_all_holders else least_cells(known) if least is None else least
    if len(epoch.members) < min(needed, known - len(epoch.left)):
        return f"a round needs {needed} of {known} cells, but only {cells_text(epoch.cells)} came"
    if epoch.has_all_holders:
        return ""
    absent = sorted({*range(known)} - {*epoch.cells, *epoch.left})
    hint = "see that it runs" if len(absent) == 1 else "see that they run"
    if not epoch.base.is_agreed:
        # A restarted cell has lost its model; an absent one may still hold the run's, so no cell here may redefine it.
        fresh = [member for member in epoch.members if member.restarts == 0]
        if 2 * len(fresh) > known:
            return ""
        if len(fresh) == len(epoch.members):
            return f"a run begins with more than half of its cells, but only {cells_text(epoch.cells)} came"
        return f"no cell here holds an agreed model, and {cells_text(absent)} may; {hint}"
    # The absent voters could form a quorum with other absent cells and hold a newer version.
    voters = sorted((life for life in epoch.base.voters if cell_of(life) not in epoch.left), key=cell_of)
    here = [life for life in voters if life in epoch.votes]
    # Tie: the half with the lowest cell continues. Of two cells either one continues alone (docs/elastic.rst).
    is_half = 2 * len(here) == len(voters) and (known == 2 or (bool(here) and here[0] == voters[0]))
    # They cannot if a voter has attended every meeting since. A meeting without that voter would have had a number of
    # its own, so the voter would have seen a gap in the numbers, after which it never sets ``has_met_all`` again for
    # this version.
    has_seen_all = any(
        member.life in here
        and member.version == epoch.base
        and member.same_lighthouse
        and member.has_met_all
        and number - member.met <= 1
        for member in epoch.members
    )
    if 2 * len(here) > len(voters) or is_half or (has_seen_all and not epoch.missing):
        return ""
    return f"{cells_text(absent)} may hold a later model than round {epoch.base.round}; {hint}"


def cells_text(cells: Sequence[int]) -> str:
    """Name cells by their numbers."""
    return f"cell{'s' if len(cells) != 1 else ''} {', '.join(map(str, cells))}"


class Attendance:
    """The meetings of one lighthouse that this cell has attended without a gap.

    The lighthouse gives a meeting a new number unless the same lives met just before. A number that this cell has not
    seen therefore belongs to a meeting without it, in which others may have made a round.
    """

    def __init__(self) -> None:
        self.last_number = 0
        """Number of the last meeting that this cell attended."""
        self._created: set[int] = set()
        """Creation times of the meetings since the last gap."""

    def note(self, number: int, created: int) -> None:
        """Note a meeting that this cell attended, whether or not it led to a round."""
        if not 0 <= number - self.last_number <= 1:  # a lower number: another lighthouse has begun to count
            self._created.clear()
        self.last_number = number
        self._created.add(created)

    def note_absence(self) -> None:
        """Note that others may have met without this cell, although the numbers show no gap."""
        self._created.clear()

    def covers(self, *versions: Version | None) -> bool:
        """Tell whether this cell has attended every meeting since the rounds that made these versions."""
        return {version.created for version in versions if version is not None} <= self._created

    def forget_before(self, created: int) -> None:
        """Drop meetings that are older than a time; :meth:`covers` will not be asked about them."""
        self._created = {time_ns for time_ns in self._created if time_ns >= created}


@dataclass
class Standing:
    """The version that a cell holds, and the round about which it may be in doubt.

    A round ends by :meth:`take`, :meth:`refuse` or :meth:`suspect`; :meth:`settle` ends a doubt at the next meeting.
    """

    version: Version = field(default_factory=Version)
    doubt: Version | None = None
    latest: Version | None = None  # the last version that this life agreed on; a loaded checkpoint may hold another
    left: tuple[int, ...] = ()
    total_weight: float = 0.0
    _doubted_left: tuple[int, ...] = ()

    def restore(self, version: Version, left: tuple[int, ...], total_weight: float) -> None:
        """Hold a version that was saved, and the cells that had left and the weight that had counted by then."""
        self.version = version
        self.left = left
        self.total_weight = total_weight

    def adopt_weight(self, total_weight: float) -> None:
        """Hold a model in which so much has counted."""
        self.total_weight = total_weight

    def add_weight(self, weight: float) -> None:
        """Note that a round has counted so much."""
        self.total_weight += weight

    def take(self, epoch: Epoch) -> None:
        """Note that the round was committed."""
        self.version = epoch.next_version
        self.latest = epoch.next_version
        self.doubt = None
        self.left = epoch.next_left

    def refuse(self) -> None:
        """Note that the round was rolled back on all ranks."""
        self.doubt = None

    def suspect(self, epoch: Epoch) -> None:
        """Note that this cell voted to commit and lost contact before it saw the result."""
        self.doubt = epoch.next_version
        self._doubted_left = epoch.next_left

    def settle(self, epoch: Epoch, cell: int) -> bool | None:
        """End the doubt, if there is one; return whether its round was committed, ``None`` if there was no doubt."""
        if self.doubt is None:
            return None
        is_taken = epoch.members[epoch.index_of(cell)].version == self.doubt
        if is_taken:
            self.version = self.doubt
            self.latest = self.doubt
            self.left = self._doubted_left
        self.doubt = None
        return is_taken
